"""Budgets: the mask of every rank is its part of that of one process, whatever the wrapping."""

import pytest
import torch
import torch.distributed as dist

import distprune as prune
from distprune import budgets
from distprune.testing import run_ranks
from helpers import wrappings
from helpers.comparisons import (
    assert_nothing_wrong,
    assert_nothing_wrong_on,
    changes,
    snapshot,
    wrong_masks,
)
from helpers.models import EVEN, UNEVEN, Net, fill, target
from helpers.sampling import every

WRAPPINGS = [
    "plain-1", "plain-3", "ddp-2", "fsdp1-2", "fsdp1-3", "fsdp1_root-3", "fsdp1_flat-2",
    "fsdp1_hybrid-2x2", "fsdp2-1", "fsdp2-2", "fsdp2-3", "fsdp2-4", "fsdp2_root-3", "fsdp2_dim1-3",
    "hsdp-2x2", "hsdp-3x1", "tp-2", "tp-3", "fsdp2_tp-2x2", "fsdp2_tp-1x3",
]  # fmt: skip
NAMES = ["l2.weight", "l1.weight", "l1.bias", "l3.weight", "l3.bias"]
RATIOS = dict(zip(NAMES, (0.1, 0.4, 0.2, 0.3, 0.0), strict=True))
SHARES = dict(zip(NAMES, (0.5, 0.25, 0.0, 0.75, 1.0), strict=True))
# Name: the amounts of two successive calls, as functions of the parameters.
PLANS = {
    "uniform": (lambda p: budgets.uniform(p, 0.3), lambda p: budgets.uniform(p, 0.6)),
    "erk": (
        lambda p: budgets.erk(p, 0.3),
        lambda p: budgets.erk(p, 0.5, max_sparsity=0.8),
    ),
    "owl": (
        lambda p: budgets.owl(p, 0.4, RATIOS, lam=0.2),
        lambda p: budgets.owl(p, 0.5, RATIOS),
    ),
    "mapping": (lambda p: SHARES, lambda p: dict.fromkeys(NAMES, 0.6)),
}
DATA = ["normal", "rounded", "few", "equal", "zeros", "denormal"]
DTYPES = ["float32", "bfloat16", "float16", "float64", "mixed"]


def pruned(plan, model, group=None):
    """Prune a model by a plan; the counts after each of its calls."""
    targets = [prune.NamedParameter(*target(model, name), name) for name in NAMES]
    counts = []
    for amount in PLANS[plan]:
        report = prune.global_unstructured(
            targets, prune.L1Unstructured, amount=amount(targets), group=group
        )
        counts.append([entry.num_pruned for entry in report.parameters])
    return counts


def alone(plan, data, dtype, sizes):
    """The masks and counts of one process."""
    model = fill(Net(sizes), data, dtype)
    group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    counts = pruned(plan, model, group)
    dist.destroy_process_group(group)
    return {name: model.get_buffer(name + "_mask").clone() for name in NAMES}, counts


def differences(wrapping: str, start: int) -> list[str]:
    wrong = []
    sizes = EVEN if wrapping.startswith("fsdp2_dim1") else UNEVEN
    cases = [(plan, data, dtype) for plan in PLANS for data in DATA for dtype in DTYPES]
    for plan, data, dtype in every(59, cases, start):
        if wrapping.startswith("fsdp1") and dtype == "mixed":  # a flat parameter has one dtype
            continue
        keeps, expected = alone(plan, data, dtype, sizes)
        model = fill(Net(sizes), data, dtype)
        indices = wrappings.local_indices(model, wrapping)
        model = wrappings.wrap(model, wrapping)
        counts = pruned(plan, wrappings.unwrapped(model))
        when = f"{plan}, {data}, {dtype}"
        if counts != expected:
            wrong.append(f"{when}: {counts}, not {expected}")
        wrong += wrong_masks(model, keeps, indices, when)
    return wrong


@pytest.mark.parametrize("wrapping", wrappings.sampled(WRAPPINGS))
def test_masks_are_those_of_one_process(wrapping):
    start = WRAPPINGS.index(wrapping)
    assert_nothing_wrong_on(wrapping, differences, start)


def stage_differences(num_ranks: int) -> list[str]:
    """Each rank has some layers of one model; sparsities are given by full name."""
    wrong = []
    rank = dist.get_rank()
    layers = ["l1", "l2", "l3"]
    shapes = {name: tuple(p.shape) for name, p in Net().named_parameters() if name in NAMES}
    for plan, amounts in PLANS.items():
        keeps, masks = {}, {}
        for everything in (True, False):
            model = fill(Net(), "normal", "float32")
            own = [
                pair
                for pair in prune.select(model, names=("weight", "bias"), everything=True)
                if pair.fqn in NAMES
                and (everything or layers.index(pair.fqn[:2]) % num_ranks == rank)
            ]
            group = dist.new_group([rank], use_local_synchronization=True) if everything else None
            for amount in amounts:
                report = prune.global_unstructured(
                    own, prune.L1Unstructured, amount=amount(shapes), group=group,
                    pipeline_parallel=True,
                )  # fmt: skip
            found = keeps if everything else masks
            found |= {pair.fqn: getattr(pair[0], pair[1] + "_mask").clone() for pair in own}
            counts = [entry.num_pruned for entry in report.parameters]
            if everything:
                expected = counts
        if counts != expected:
            wrong.append(f"{plan}: {counts}, not {expected}")
        wrong += [
            f"{plan}: another mask of {name}"
            for name, mask in masks.items()
            if not torch.equal(mask, keeps[name])
        ]
    return wrong


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_pipeline_stages(num_ranks):
    assert_nothing_wrong(run_ranks(stage_differences, num_ranks, num_ranks))


RENAMED = {name.replace("l1.weight", "l9"): share for name, share in SHARES.items()}
ODD = {  # what the odd rank passes instead -> what the error names on every rank
    "one amount": (0.5, "amount: "),
    "another sparsity": ({**SHARES, "l1.weight": 0.5}, "segments of l1.weight"),
    "another name": (RENAMED, "does not have l1.weight"),
}


def outcomes(wrapping: str) -> dict[str, tuple[str, list[str]]]:
    """(text, changes) of the error that this rank sees, by case."""
    model = wrappings.wrap(fill(Net(), "normal", "float32"), wrapping)
    targets = [prune.NamedParameter(*target(wrappings.unwrapped(model), n), n) for n in NAMES]
    is_odd = dist.get_rank() == dist.get_world_size() - 1
    found = {}
    for case, (odd, _) in ODD.items():
        amount = odd if is_odd else SHARES
        before = snapshot(model)
        try:
            prune.global_unstructured(targets, prune.L1Unstructured, amount=amount)
            text = "no error"
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
        found[case] = text, changes(before, snapshot(model))
    return found


@pytest.mark.parametrize("wrapping", ["plain-2", "fsdp2-3"])
def test_wrong_budgets_are_refused_on_every_rank(wrapping):
    for rank, found in enumerate(run_ranks(outcomes, wrappings.world_size(wrapping), wrapping)):
        for case, (_, text) in ODD.items():
            assert text in found[case][0], (rank, case, found[case])
            assert found[case][1] == [], (rank, case)
