"""LAMP counts against a sort of all scores, written from the paper, over virtual ranks."""

import itertools
import math
from fractions import Fraction
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import distprune as prune
from distprune import budgets
from distprune._common import memory
from distprune.budgets import lamp
from distprune.selection.candidates import Ranked
from distprune.selection.keys import Order, ScoreKeys, key_range
from helpers.models import Net, fill
from helpers.sampling import num_examples
from helpers.virtual_ranks import run_virtual_ranks
from helpers.virtual_shards import LAYOUTS, candidates


def exact_scores(tensor, live):
    """The scores of one tensor's live elements in ascending order, as rational numbers."""
    squares = sorted(Fraction(value) ** 2 for value in tensor[live].double().tolist())
    left = sum(squares)
    for square in squares:
        yield square / left if square else Fraction(0)
        left -= square


def lamp_by_sorting(tensors, lives, k, lowest, highest):
    """How many elements of each tensor are among the ``k`` first in the order of all scores."""
    counts = list(lowest)
    ordered = sorted(
        (score, position, number)
        for position, (tensor, live) in enumerate(zip(tensors, lives, strict=True))
        for number, score in enumerate(exact_scores(tensor, live))
        if lowest[position] <= number < highest[position]
    )
    for _, position, _ in ordered[: k - sum(lowest)]:
        counts[position] += 1
    return counts


def lamp_of(tensors, lives, k, lowest, highest, layouts, size, dtype=torch.float32):
    """The counts that all virtual ranks agree on."""
    common = key_range(dtype, Order.MAGNITUDE)
    names = [f"t{i}" for i in range(len(tensors))]

    def on_rank(communicator):
        parts = [
            candidates(
                tensor, None if bool(live.all()) else live, layout, common, size,
                communicator.index,
            )[0]
            for tensor, live, layout in zip(tensors, lives, layouts, strict=True)
        ]  # fmt: skip
        num_live = [int(live.sum()) for live in lives]
        ranked = Ranked(parts, names, num_live, common, communicator)
        return lamp.num_to_prune(ranked, lowest, highest, k)

    results = run_virtual_ranks(on_rank, size)
    assert all(result == results[0] for result in results)
    return results[0]


def draw_tensors(data):
    shapes = data.draw(
        st.lists(
            st.lists(st.integers(1, 7), min_size=1, max_size=2).map(tuple), min_size=1, max_size=5
        ),
        "shapes",
    )
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 999), "seed"))
    dtype = data.draw(
        st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64]),
        "dtype",
    )
    tensors = [(torch.randn(shape, generator=generator) * 50).to(dtype) for shape in shapes]
    sparsity = data.draw(st.sampled_from([0.0, 0.4, 1.0]), "sparsity")
    lives = [torch.rand(shape, generator=generator) >= sparsity for shape in shapes]
    return tensors, lives


@settings(max_examples=num_examples(200), deadline=None, derandomize=True)
@given(data=st.data())
def test_any_sharding_gives_the_same_counts(data):
    tensors, lives = draw_tensors(data)
    limits = []
    for live in lives:
        count = st.integers(0, int(live.sum()))
        is_limited = data.draw(st.booleans(), "limited")
        limits.append(
            sorted((data.draw(count), data.draw(count))) if is_limited else [0, int(live.sum())]
        )
    lowest, highest = [low for low, _ in limits], [high for _, high in limits]
    k = data.draw(st.integers(sum(lowest), sum(highest)), "k")
    layouts = [data.draw(st.sampled_from(LAYOUTS)) for _ in tensors]
    size = data.draw(st.integers(1, 4), "ranks")
    dtype = tensors[0].dtype
    whole = lamp_of(tensors, lives, k, lowest, highest, ["rows"] * len(tensors), 1, dtype)
    assert sum(whole) == k
    assert all(low <= n <= high for low, n, high in zip(lowest, whole, highest, strict=True))
    # Parameters are counted all at once, or one after the other, by numpy or by torch.
    with (
        mock.patch.object(lamp, "_MOST_COUNTS", data.draw(st.sampled_from([1, 1 << 22]))),
        mock.patch.object(memory, "takes_numpy", data.draw(st.sampled_from([lambda _: False,
                                                                          memory.takes_numpy]))),
    ):  # fmt: skip
        assert lamp_of(tensors, lives, k, lowest, highest, layouts, size, dtype) == whole


def test_counts_rise_with_the_amount_and_one_element_is_kept():
    generator = torch.Generator().manual_seed(1)
    tensors = [torch.randn(n, generator=generator) ** 3 * n for n in (1, 2, 7, 40, 90)]
    lives = [torch.ones_like(tensor, dtype=torch.bool) for tensor in tensors]
    sizes = [tensor.numel() for tensor in tensors]
    before = [0] * 5
    for k in range(1, sum(sizes) + 1):
        counts = lamp_of(tensors, lives, k, [0] * 5, sizes, ["rows"] * 5, 1)
        assert sum(counts) == k
        assert all(new >= old for new, old in zip(counts, before, strict=True))
        if k <= sum(sizes) - 5:
            assert all(count < size for count, size in zip(counts, sizes, strict=True))
        before = counts


def lamp_in_floats(arrays, k):
    """The authors' way (jaeho-lee/layer-adaptive-sparsity): a sort of each layer, and of all."""
    scores, owner = [], []
    for position, array in enumerate(arrays):
        sorted_squares = np.sort(np.abs(array.astype(np.float64).ravel())) ** 2
        cumulated = np.cumsum(sorted_squares[::-1])[::-1]
        with np.errstate(invalid="ignore"):
            scores.append(np.where(sorted_squares > 0, sorted_squares / cumulated, 0.0))
        owner.append(np.full(array.size, position))
    order = np.argsort(np.concatenate(scores), kind="stable")[:k]
    return np.bincount(np.concatenate(owner)[order], minlength=len(arrays)).tolist()


def scaled(kind, generator, shape):
    normal = torch.randn(shape, generator=generator)
    match kind:
        case "as layers have":
            return normal * 0.02
        case "wide":
            return torch.exp(4 * normal)
        case "far apart":
            return normal**15
        case "one large row":
            normal[0] *= 1e6
            return normal
        case "tiny":
            return normal * 1e-30
    raise ValueError(kind)


def differ_more_than_documented(found, expected, sizes):
    return [
        (a, b, n) for a, b, n in zip(found, expected, sizes, strict=True)
        if abs(a - b) > max(n / 500, 20)
    ]  # fmt: skip


KINDS = ["as layers have", "wide", "far apart", "one large row", "tiny"]
DTYPES = [torch.float32, torch.float64, torch.bfloat16]


@pytest.mark.parametrize(
    ("kind", "dtype"), [("as layers have", torch.float16), *itertools.product(KINDS, DTYPES)]
)
def test_counts_are_those_of_a_sort(kind, dtype):
    generator = torch.Generator().manual_seed(3)
    shapes = [(240, 130), (75, 50), (300, 200), (1, 9000), (264, 64)]
    tensors = [(scaled(kind, generator, s) * (i + 1)).to(dtype) for i, s in enumerate(shapes)]
    lives = [torch.ones(shape, dtype=torch.bool) for shape in shapes]
    sizes = [math.prod(shape) for shape in shapes]
    for k in (100, 5000, 50_000, 90_000, sum(sizes) - 6):
        expected = lamp_in_floats([tensor.double().numpy() for tensor in tensors], k)
        found = lamp_of(tensors, lives, k, [0] * 5, sizes, ["rows"] * 5, 1, dtype)
        assert not differ_more_than_documented(found, expected, sizes), k


def test_zeros_go_first_and_equal_values_in_the_order_of_the_parameters():
    zeros, ones, mixed = torch.zeros(6), torch.ones(6), torch.tensor([0.0, 0, 1, 1, 2, 2])
    lives = [torch.ones(6, dtype=torch.bool)] * 3
    tensors = [ones, zeros, mixed]
    assert lamp_of(tensors, lives, 8, [0] * 3, [6] * 3, ["rows"] * 3, 2) == [0, 6, 2]
    assert lamp_of(tensors, lives, 17, [0] * 3, [6] * 3, ["rows"] * 3, 2) == [6, 6, 5]
    counts = lamp_of([ones] * 3, lives, 10, [0] * 3, [6] * 3, ["rows"] * 3, 2)
    assert counts == lamp_by_sorting([ones] * 3, lives, 10, [0] * 3, [6] * 3) == [4, 3, 3]


def test_one_read_and_one_all_reduce():
    generator = torch.Generator().manual_seed(7)
    tensors = [torch.randn(200, 100, generator=generator) * (i + 1) for i in range(10)]
    common = key_range(torch.float32, Order.MAGNITUDE)

    def on_rank(communicator):
        parts = [
            candidates(tensor, None, "rows", common, 2, communicator.index)[0] for tensor in tensors
        ]
        ranked = Ranked(parts, [""] * 10, [20_000] * 10, common, communicator)
        lamp.num_to_prune(ranked, [0] * 10, [20_000] * 10, 70_000)
        return communicator.num_collectives, communicator.bytes_sent

    with mock.patch.object(ScoreKeys, "load", autospec=True, side_effect=ScoreKeys.load) as load:
        ranks = run_virtual_ranks(on_rank, 2)
    assert load.call_count == 2 * 10  # no part is larger than a chunk
    for num_collectives, num_bytes in ranks:
        assert num_collectives == 1 and 10 * 65_000 < num_bytes < 10 * 66_000


# -- in a call ------------------------------------------------------------------------------------


def pruned(amount, model=None, method=prune.L1Unstructured, **options):
    model = model or fill(Net(), "normal", "float32")
    report = prune.global_unstructured(
        prune.select(model), method, amount=amount, budget="lamp", **options
    )
    return model, [entry.num_pruned for entry in report.parameters]


@pytest.mark.parametrize("amount", [0, 1, 40, 0.5, 122, 125])
def test_a_call_prunes_the_lowest_of_each_parameter(amount):
    weights = [p.detach().clone() for n, p in fill(Net(), "normal", "float32").named_parameters()
               if n.endswith("weight")]  # fmt: skip
    lives = [torch.ones(w.shape, dtype=torch.bool) for w in weights]
    k = round(125 * amount) if isinstance(amount, float) else amount
    expected = lamp_by_sorting(weights, lives, k, [0] * 3, [w.numel() for w in weights])
    model, counts = pruned(amount)
    assert counts == expected
    for weight, layer, count in zip(weights, (model.l1, model.l2, model.l3), counts, strict=True):
        lowest = weight.abs().flatten().argsort(stable=True)[:count]
        keep = torch.ones(weight.numel()).index_fill_(0, lowest, 0)
        assert torch.equal(layer.weight_mask.flatten(), keep)


def test_pruning_in_steps_ranks_what_is_left():
    model, first = pruned(50)
    lives = [layer.weight_mask.bool() for layer in (model.l1, model.l2, model.l3)]
    weights = [layer.weight_orig.detach() for layer in (model.l1, model.l2, model.l3)]
    more = lamp_by_sorting(weights, lives, 30, [0] * 3, [int(live.sum()) for live in lives])
    assert pruned(30, model)[1] == [a + b for a, b in zip(first, more, strict=True)]


def test_scores_and_factors_are_ranked():
    def with_scores(scores_of):
        model = fill(Net(), "normal", "float32")
        scores = {(module, name): scores_of(module.weight) for module, name in prune.select(model)}
        return pruned(60, model, importance_scores=scores)[1]

    columns = {n: torch.arange(1.0, n + 1) for n in (6, 10, 5)}
    tensors = with_scores(lambda w: w.detach() * columns[w.shape[1]])
    factors = with_scores(lambda w: prune.FactoredScores([[columns[w.shape[1]][None]]]))
    assert tensors == factors != pruned(60)[1]


@pytest.mark.parametrize("normalize", ["rms", "l2", "mean"])
def test_normalisation_changes_nothing(normalize):
    assert pruned(60, normalize=normalize)[1] == pruned(60)[1]


def test_floors_and_ceilings():
    _, counts = pruned(60, min_sparsity={"l3.weight": 0.8}, max_sparsity={"l1.weight": 0.3})
    assert sum(counts) == 60 and counts[0] == 18 and counts[2] == 12


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_values_that_have_no_score(value):
    model = fill(Net(), "normal", "float32")
    with torch.no_grad():
        model.l2.weight[0, 0] = value
    with pytest.raises(ValueError, match="weight are NaN or infinite"):
        pruned(60, model)
    assert not prune.is_pruned(model)


@pytest.mark.parametrize("method", [prune.RandomUnstructured, prune.LowestScore])
def test_methods_that_rank_otherwise(method):
    model = fill(Net(), "normal", "float32")
    scores = {pair: torch.ones(pair[0].weight.shape) for pair in prune.select(model)}
    options = {} if method is prune.RandomUnstructured else {"importance_scores": scores}
    with pytest.raises(NotImplementedError, match="budget='lamp' divides by the squares"):
        pruned(60, model, method, **options)
    assert not prune.is_pruned(model)


def test_millions_of_elements():
    layers = [torch.nn.Linear(1000, 1000, bias=False) for _ in range(3)]
    with torch.no_grad():
        for i, layer in enumerate(layers):
            layer.weight.normal_(generator=torch.Generator().manual_seed(i)).mul_(0.1**i)
    expected = lamp_in_floats([layer.weight.detach().numpy() for layer in layers], 900_000)
    report = prune.global_unstructured(
        [(layer, "weight") for layer in layers], prune.L1Unstructured, amount=900_000,
        budget=budgets.LAMP(),
    )  # fmt: skip
    found = [entry.num_pruned for entry in report.parameters]
    assert sum(found) == 900_000
    assert not differ_more_than_documented(found, expected, [10**6] * 3)
