"""Floors and ceilings equal the definition; distributed/test_operations.py has ranks."""

import functools
import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import distprune as prune
from distprune.base.amount import Bounded, to_bounds
from helpers import reference
from helpers.models import HARD, Net, fill, values
from helpers.sampling import num_examples

SPARSITY = st.sampled_from([0.0, 0.07, 0.1, 0.25, 0.3, 0.5, 0.7, 0.9, 0.95, 1.0])


def check(tensors, masks, k, floors, ceilings):
    """The masks of a call are those of the definition, or the call is refused; what held each."""
    expected = reference.prune_bounded(tensors, k, floors, ceilings, masks)
    model = nn.ParameterList(tensors)
    pairs = [(model, str(i)) for i in range(len(tensors))]
    if masks is not None:
        prune.set_masks(pairs, masks)
    limits = [dict(zip(pairs, given, strict=True)) for given in (floors, ceilings)]
    call = functools.partial(
        prune.global_unstructured, pairs, prune.L1Unstructured, amount=k,
        min_sparsity=limits[0], max_sparsity=limits[1],
    )  # fmt: skip
    if expected is None:
        with pytest.raises(ValueError, match=r"min_sparsity|max_sparsity|more than the"):
            call()
        return None
    report = call()
    for i, keep in enumerate(expected):
        assert torch.equal(getattr(model, f"{i}_mask").bool(), keep), i
    return [entry.held_at for entry in report.parameters]


@settings(max_examples=num_examples(300), deadline=None, derandomize=True)
@given(data=st.data())
@pytest.mark.filterwarnings("ignore:the ranking over all parameters")
def test_any_bounds_on_any_data(data):
    shapes = data.draw(
        st.lists(
            st.lists(st.integers(1, 7), min_size=1, max_size=2).map(tuple), min_size=1, max_size=6
        ),
        "shapes",
    )
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99), "seed"))
    kind = data.draw(st.sampled_from(HARD), "kind")
    # Tensors of different scale: so that bounds are met, and chains of them.
    tensors = [
        values(kind, shape, torch.float32, generator) * data.draw(st.sampled_from([0.25, 1.0, 4.0]))
        for shape in shapes
    ]
    masks = None
    if data.draw(st.booleans(), "pruned already"):
        masks = [torch.rand(shape, generator=generator) > 0.4 for shape in shapes]
    pairs = [sorted((data.draw(SPARSITY), data.draw(SPARSITY))) for _ in shapes]
    floors, ceilings = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    for i, t in enumerate(tensors):  # a floor above the ceiling is refused earlier
        if math.ceil(Fraction(str(floors[i])) * t.numel()) > Fraction(str(ceilings[i])) * t.numel():
            floors[i] = 0.0
    live = sum(t.numel() if masks is None else int(masks[i].sum()) for i, t in enumerate(tensors))
    check(tensors, masks, data.draw(st.integers(0, live), "k"), floors, ceilings)


def scaled(num, low, high):
    """Normal values whose scale rises from one tensor to the next."""
    generator = torch.Generator().manual_seed(3)
    steps = torch.linspace(math.log(low), math.log(high), num)
    return [torch.randn(30, generator=generator) * float(s.exp()) for s in steps]


def test_many_parameters_at_both_bounds():
    held = check(scaled(40, 0.01, 100), None, 600, [0.2] * 40, [0.8] * 40)
    assert held.count("max_sparsity") > 10 and held.count("min_sparsity") > 10
    assert None in held


def test_a_floor_that_holds_by_itself_once_a_ceiling_does():
    """The first cut takes ten of the first tensor, and none of the second, whose floor is two."""
    tensors = [torch.arange(1.0, 11) * 0.01, torch.arange(1.0, 21, 2), torch.arange(2.0, 22, 2)]
    held = check(tensors, None, 10, [0.0, 0.2, 0.0], [0.2, 1.0, 1.0])
    assert held == ["max_sparsity", None, None]


@pytest.mark.parametrize(
    ("n", "low", "high", "counts"),
    [
        (100, 0.07, 0.29, (7, 29)),  # 0.07 * 100 > 7 and 0.29 * 100 < 29 in binary
        (10, 0.1, 0.1, (1, 1)),
        (3, 0.5, 0.7, (2, 2)),
        (3, Fraction(1, 3), Fraction(2, 3), (1, 2)),
        (2**40 + 1, 0.5, 1, (2**39 + 1, 2**40 + 1)),
        (5, None, 0, (0, 0)),
    ],
)
def test_bounds_are_decimals(n, low, high, counts):
    bounds = to_bounds([Bounded("w", ("w",), n)], low, high)
    assert bounds == ((counts[0],), (counts[1],))


@pytest.mark.parametrize(
    ("low", "high", "error", "text"),
    [
        (0.6, 0.5, ValueError, "l1.weight: min_sparsity asks for at least 36"),
        (None, 1.5, ValueError, "max_sparsity=1.5"),
        (None, {"l1.weight": True}, TypeError, r"max_sparsity\[l1.weight\]=True"),
        ({"l1.wieght": 0.5}, None, ValueError, "'l1.wieght', which is none of the parameters"),
        (0.5, None, ValueError, r"for 63 to .* more .*, and 20 are to be pruned \(20 of"),
        (None, 0.1, ValueError, "to 12 more pruned elements, and 20 are to be"),
    ],
)
def test_refused(low, high, error, text):
    model = fill(Net(), "normal", "float32")
    targets = prune.select(model)
    with pytest.raises(error, match=text):
        prune.global_unstructured(
            targets, prune.L1Unstructured, amount=20, min_sparsity=low, max_sparsity=high
        )
    assert not prune.is_pruned(model)


def test_keys_of_a_mapping():
    """By pair or by name, in any mix; but one value for each parameter."""
    model = fill(Net(), "normal", "float32")
    targets = prune.select(model)
    report = prune.global_unstructured(
        targets, prune.L1Unstructured, amount=40,
        min_sparsity={"l1.weight": 0.6}, max_sparsity={(model.l2, "weight"): 0.02},
    )  # fmt: skip
    assert report.num_pruned == 40
    assert [entry.num_pruned for entry in report.parameters] == [36, 1, 3]
    assert [entry.held_at for entry in report.parameters] == ["min_sparsity", "max_sparsity", None]
    both = {"l1.weight": 0.6, (model.l1, "weight"): 0.7}
    with pytest.raises(ValueError, match=r"several values for l1\.weight"):
        prune.global_unstructured(targets, prune.L1Unstructured, amount=0, min_sparsity=both)


class Half(prune.BasePruningMethod):
    PRUNING_TYPE = "unstructured"

    def __init__(self, amount=0):
        pass

    def compute_mask(self, t, default_mask):
        return default_mask * (t > 0)


@pytest.mark.parametrize(
    ("method", "options", "what"),
    [
        (prune.Identity, {"max_sparsity": 0.9}, "min_sparsity or max_sparsity has"),
        (Half, {"min_sparsity": 0.1}, "min_sparsity or max_sparsity has"),
        (
            Half,
            {"amount": {"l1.weight": 0.5, "l2.weight": 0, "l3.weight": 0}},
            "a mapping as amount has",
        ),
        (Half, {"scope": "row", "amount": 0.5}, "scope or pattern has"),
        (prune.Identity, {"normalize": "rms"}, "normalize='rms' has"),
    ],
)
def test_methods_that_do_not_rank(method, options, what):
    model = fill(Net(), "normal", "float32")
    with pytest.raises(NotImplementedError, match=f"{method.__name__} does not rank .*{what}"):
        prune.global_unstructured(prune.select(model), method, **options)
    assert not prune.is_pruned(model)
