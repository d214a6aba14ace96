"""The mask that each rank holds is its part of the mask that one process would compute."""

import random
from itertools import product

import pytest
import torch

import distprune as prune
from distprune.testing import run_ranks
from helpers import reference, wrappings
from helpers.comparisons import assert_nothing_wrong, assert_nothing_wrong_on, wrong_masks
from helpers.models import DATA, DTYPES, EVEN, Net, ShapesNet, fill, fqns, target
from helpers.sampling import THOROUGH, every

ALL = wrappings.ALL + wrappings.REPLICATE
# Amounts of successive calls on one model; "all" is the number of elements that are left.
ROUNDS = [
    (0.1, 0.9),
    (0.5, 0.5),
    (7, 0.5),
    (0, 0.0, 1, 0.9, "all", 0),
    (1.0, 0.5),
    ("all",),
]


def differences(wrapping: str, cases: list, net: type = ShapesNet, *sizes) -> list[str]:
    """Run every case (data, dtype, amounts, seed); what differs from the reference, in words."""
    wrong = []
    indices = wrappings.local_indices(net(*sizes), wrapping)
    for data, dtype, amounts, seed in cases:
        model = fill(net(*sizes), data, dtype, seed)
        if wrappings.kind_of(wrapping).startswith("fsdp1"):  # cuts by bytes
            indices = wrappings.local_indices(model, wrapping)
        names = random.Random(seed).sample(fqns(model), len(fqns(model)))  # the caller's order
        scores = [model.get_parameter(name).detach().clone() for name in names]
        keeps = [torch.ones(score.shape, dtype=torch.bool) for score in scores]
        model = wrappings.wrap(model, wrapping)
        targets = [target(wrappings.unwrapped(model), name) for name in names]
        for amount in amounts:
            if amount == "all":
                amount = sum(int(keep.sum()) for keep in keeps)
            keeps = reference.prune(scores, amount, keeps)
            prune.global_unstructured(targets, prune.L1Unstructured, amount=amount)
            when = f"{data} {dtype}, {amount} of {amounts}, seed {seed}"
            expected = dict(zip(names, keeps, strict=True))
            wrong += wrong_masks(model, expected, indices, when)
    return wrong


@pytest.mark.parametrize("wrapping", ALL)
def test_any_data_and_dtype(wrapping):
    """One dtype for each data; in a thorough run all of them on 1 and 2 ranks.

    Each wrapping starts at another dtype, so that all pairs of data and dtype are tested.
    """
    size, cases = wrappings.world_size(wrapping), []
    for turn, data in enumerate(DATA, start=ALL.index(wrapping)):
        if size > 2 and turn % 2 and not THOROUGH:
            continue
        dtypes = [*DTYPES[turn % len(DTYPES) :], *DTYPES[: turn % len(DTYPES)]]
        dtypes = dtypes if THOROUGH and size <= 2 else dtypes[:1]
        if wrappings.kind_of(wrapping) == "fsdp1_root":  # a flat parameter has one dtype
            dtypes = [dtype if dtype != "mixed" else "float32" for dtype in dtypes]
        cases += [(data, dtype, ROUNDS[(turn + i) % 3], turn + i) for i, dtype in enumerate(dtypes)]
    assert_nothing_wrong(run_ranks(differences, size, wrapping, cases))


@pytest.mark.parametrize("wrapping", wrappings.ALL)
def test_any_amounts_one_after_the_other(wrapping):
    rounds = every(3, enumerate(ROUNDS), wrappings.ALL.index(wrapping))
    cases = [("few", "float32", amounts, seed) for seed, amounts in rounds]
    assert_nothing_wrong_on(wrapping, differences, cases)


@pytest.mark.parametrize("wrapping", wrappings.FSDP2_DIM1)
def test_shards_of_columns(wrapping):
    cases = [(data, "float32", (0.3, 0.5), 0) for data in ("equal", "few")]
    cases.append(("normal", "bfloat16", (0.3, 0.5), 1))
    assert_nothing_wrong_on(wrapping, differences, cases, Net, EVEN)


@pytest.mark.parametrize(
    ("wrapping", "rows"),
    every(7, product(["fsdp2_tp-4x2", "fsdp2_tp-3x2", "fsdp2_tp-2x3"], [1, 9, 11]), 1),
)
def test_nested_uneven_shards(wrapping, rows):
    """Splits where torch's own offsets and full_tensor() are wrong (9 rows on 4x2)."""
    cases = [("equal", "float32", (0.3, 0.5), 0), ("rounded", "bfloat16", (0.9,), 1)]
    size, sizes = wrappings.world_size(wrapping), (6, rows, 5, 3)
    assert_nothing_wrong(run_ranks(differences, size, wrapping, cases, Net, sizes))


def differences_after_training_step(wrapping: str) -> list[str]:
    """A second pruning ranks the values as they are now, and the first mask holds on."""
    model = fill(Net(), "normal", "float32")
    indices = wrappings.local_indices(model, wrapping)
    names = [name for name in fqns(model) if name.endswith("weight")]
    first = [model.get_parameter(name).detach().clone() for name in names]
    second = [score.flip(0) * 2 for score in first]
    model = wrappings.wrap(model, wrapping)
    targets = [target(wrappings.unwrapped(model), name) for name in names]
    prune.global_unstructured(targets, prune.L1Unstructured, amount=0.4)
    for name, values in zip(names, second, strict=True):
        wrappings.shard(model, name, indices).copy_(wrappings.my_part(values, indices[name]))
    prune.global_unstructured(targets, prune.L1Unstructured, amount=0.4)
    keeps = reference.prune(second, 0.4, reference.prune(first, 0.4))
    return wrong_masks(model, dict(zip(names, keeps, strict=True)), indices)


@pytest.mark.whole  # the one test on every wrapper with every number of processes
@pytest.mark.parametrize("wrapping", wrappings.ALL)
def test_pruning_again_ranks_the_values_of_now(wrapping):
    assert_nothing_wrong_on(wrapping, differences_after_training_step)


def differences_with_scores(wrapping: str) -> list[str]:
    return [
        *differences_with_scores_given(wrapping, as_shards=False),
        *differences_with_scores_given(wrapping, as_shards=True),
    ]


def differences_with_scores_given(wrapping: str, as_shards: bool) -> list[str]:
    """Scores replace the values of two of three parameters; signs do not count."""
    model = fill(Net(), "normal", "float32")
    indices = wrappings.local_indices(model, wrapping)
    names = ["l1.weight", "l2.weight", "l3.bias"]
    scores = [model.get_parameter(name).detach().clone() for name in names]
    for position in (0, 2):
        scores[position] = -scores[position].flip(0).round(decimals=1)
    keeps = reference.prune(scores, 0.5)
    scorer = Net()
    scorer.load_state_dict(dict(zip(names, scores, strict=True)), strict=False)
    model = wrappings.wrap(model, wrapping)
    given = {names[p]: scorer.get_parameter(names[p]).detach() for p in (0, 2)}
    if as_shards:
        scorer = wrappings.wrap(scorer, wrapping)
        given = {name: wrappings.shard(scorer, name, indices, as_dtensor=True) for name in given}
    targets = {name: target(wrappings.unwrapped(model), name) for name in names}
    given = {targets[name]: score for name, score in given.items()}
    prune.global_unstructured(targets.values(), prune.L1Unstructured, given, amount=0.5)
    when = "sharded scores" if as_shards else "whole scores"
    return wrong_masks(model, dict(zip(names, keeps, strict=True)), indices, when)


@pytest.mark.parametrize("wrapping", wrappings.sampled(wrappings.ALL))
def test_importance_scores(wrapping):
    assert_nothing_wrong_on(wrapping, differences_with_scores)


def differences_with_odd_scores(wrapping: str, kind: str) -> list[str]:
    """Scores of other dtypes than the parameters: compared by value, whatever the dtype."""
    model = fill(Net(), "normal", "float32")
    indices = wrappings.local_indices(model, wrapping)
    generator = torch.Generator().manual_seed(2)
    names, scores = ["l1.weight", "l2.weight", "l3.weight"], []
    for name in names:
        normal = torch.randn(model.get_parameter(name).shape, generator=generator).double()
        scores.append((normal * 4).long() if kind == "int64" else normal)
    if kind == "mixed":  # float64 values that float32 would round to 0
        scores = [scores[0] * 1e-60, scores[1].half() * 0, model.l3.weight.detach().clone()]
    keeps = reference.prune(scores, 40)
    model = wrappings.wrap(model, wrapping)
    targets = [target(wrappings.unwrapped(model), name) for name in names]
    given = dict(zip(targets, scores, strict=True))
    prune.global_unstructured(targets, prune.L1Unstructured, given, amount=40)
    return wrong_masks(model, dict(zip(names, keeps, strict=True)), indices)


@pytest.mark.parametrize("kind", ["float64", "int64", "mixed"])
@pytest.mark.parametrize("wrapping", ["plain-2", "ddp-2", "fsdp2-2", "hsdp-2x2", "tp-2"])
def test_importance_scores_of_other_dtypes(wrapping, kind):
    assert_nothing_wrong_on(wrapping, differences_with_odd_scores, kind)


def differences_with_odd_lists(wrapping: str, kind: str) -> list[str]:
    """The list as a one-shot iterator, or with one parameter in it twice."""
    model = fill(Net(), "rounded", "float32")
    indices = wrappings.local_indices(model, wrapping)
    names = ["l2.weight", "l1.weight"]
    keeps = reference.prune([model.get_parameter(name) for name in names], 30)
    model = wrappings.wrap(model, wrapping)
    targets = [target(wrappings.unwrapped(model), name) for name in names]
    given = iter(targets) if kind == "iterator" else [*targets, targets[0]]
    report = prune.global_unstructured(given, prune.L1Unstructured, amount=30)
    wrong = [] if report.num_pruned_now == 30 else [f"{report.num_pruned_now} pruned, not 30"]
    return wrong + wrong_masks(model, dict(zip(names, keeps, strict=True)), indices)


@pytest.mark.parametrize("kind", ["iterator", "duplicate"])
@pytest.mark.parametrize("wrapping", ["plain-2", "ddp-2", "fsdp2-2", "tp-2"])
def test_iterators_and_duplicates(wrapping, kind):
    assert_nothing_wrong_on(wrapping, differences_with_odd_lists, kind)
