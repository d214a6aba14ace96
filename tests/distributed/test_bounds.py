"""Floors and ceilings: the mask of every rank is its part of what the definition says."""

import re

import pytest
import torch
import torch.distributed as dist

import distprune as prune
from distprune.testing import run_ranks
from helpers import reference, wrappings
from helpers.collective_traffic import Traffic
from helpers.comparisons import assert_nothing_wrong_on, changes, snapshot, wrong_masks
from helpers.models import Net, fill, target
from helpers.sampling import every

WRAPPINGS = [
    "plain-1", "plain-3", "ddp-2", "fsdp2-1", "fsdp2-2", "fsdp2-3", "fsdp2-4", "fsdp2_root-3",
    "hsdp-2x2", "hsdp-3x1", "tp-2", "tp-3", "fsdp2_tp-2x2", "fsdp2_tp-1x3",
]  # fmt: skip
NAMES = ["l2.weight", "l1.weight", "l1.bias", "l3.weight", "l3.bias"]
SIZES = [50, 60, 10, 15, 3]
# (floors, ceilings, counts of successive calls); floats are for all parameters.
PLANS = [
    (0.2, 0.6, (40, 30)),
    ([0.5, 0, 0, 0.8, 0], [1, 0.3, 0, 1, 0.34], (60, 12)),
    (0, 0.5, (68,)),  # all that the ceilings leave
    ([0, 0.9, 0.3, 0, 0.5], [0.05, 1, 1, 1, 1], (80, 10, 0)),
]


class Smallest(prune.BasePruningMethod):
    PRUNING_TYPE = "unstructured"
    DISTRIBUTED = "scores"

    def __init__(self, amount):
        self.amount = amount

    def compute_scores(self, t):
        return t


def as_given(limits, targets: list, by_name: dict):
    """For the odd parameters by (module, name), for the even ones by full name."""
    if not isinstance(limits, list):
        return limits
    keys = [targets[i] if i % 2 else by_name[i] for i in range(len(limits))]
    return dict(zip(keys, limits, strict=True))


def differences(wrapping: str) -> list[str]:
    wrong = []
    indices = wrappings.local_indices(Net(), wrapping)
    for turn, (floors, ceilings, counts) in enumerate(PLANS):
        for data in every(2, ("normal", "few"), turn + len(wrapping)):
            method = Smallest if turn == 1 and data == "normal" else prune.L1Unstructured
            model = fill(Net(), data, "float32", turn)
            with torch.no_grad():  # else ceilings are seldom met
                model.l1.weight.mul_(0.25)
            scores = [model.get_parameter(name).detach().clone() for name in NAMES]
            model = wrappings.unwrapped(wrappings.wrap(model, wrapping))
            targets = [
                prune.NamedParameter(*target(model, name), name + " in full") for name in NAMES
            ]
            labels = [each.fqn for each in targets]
            limits = [x if isinstance(x, list) else [x] * 5 for x in (floors, ceilings)]
            keeps = [torch.ones(score.shape) for score in scores]
            for k in counts:
                before = [int((keep == 0).sum()) for keep in keeps]
                key = (lambda value: value) if method is Smallest else abs
                keeps = reference.prune_bounded(scores, k, *limits, keeps, key)
                report = prune.global_unstructured(
                    targets,
                    method,
                    amount=k,
                    min_sparsity=as_given(floors, targets, labels),
                    max_sparsity=as_given(ceilings, targets, labels),
                )
                when = f"plan {turn}, {data}, {k} more"
                wrong += wrong_masks(model, dict(zip(NAMES, keeps, strict=True)), indices, when)
                pruned = [int((keep == 0).sum()) for keep in keeps]
                if [each.num_pruned for each in report.parameters] != pruned:
                    wrong.append(f"{when}: the report has {report}, and {pruned} are pruned")
                if report.num_pruned_now != k:
                    wrong.append(f"{when}: {report.num_pruned_now} pruned")
                for i, each in enumerate(report.parameters):
                    bound = {"min_sparsity": limits[0][i], "max_sparsity": limits[1][i]}
                    is_held = each.held_at and pruned[i] != before[i]
                    if is_held and abs(pruned[i] - bound[each.held_at] * SIZES[i]) >= 1:
                        wrong.append(f"{when}: {each} is at no bound")
    return wrong


@pytest.mark.parametrize("wrapping", wrappings.sampled(WRAPPINGS))
def test_masks_are_those_of_the_definition(wrapping):
    assert_nothing_wrong_on(wrapping, differences)


def traffic_with_bounds(wrapping: str) -> tuple:
    """What one call sends, counted here and by its report; and how many parameters are held."""
    sizes = (100, 400, 100, 8)  # 81 thousand elements: more than are collected outright
    model = wrappings.wrap(fill(Net(sizes), "normal", "float32"), wrapping)
    targets = prune.select(wrappings.unwrapped(model))
    with torch.no_grad():
        wrappings.local(targets[0][0].weight).mul_(0.5)
    with Traffic() as traffic:
        report = prune.global_unstructured(
            targets,
            prune.L1Unstructured,
            amount=0.5,
            min_sparsity={"l3.weight": 0.9},
            max_sparsity={"l1.weight": 0.52},
        )
    assert (report.num_collectives, report.bytes_sent) == (
        len(traffic.calls), sum(num_bytes for _, num_bytes in traffic.calls),
    )  # fmt: skip
    held = sum(entry.held_at is not None for entry in report.parameters)
    return [name for name, _ in traffic.calls], report.bytes_sent, held


@pytest.mark.parametrize("wrapping", ["ddp-2", "fsdp2-3"])
def test_bounds_cost_kilobytes_per_parameter(wrapping):
    per_rank = run_ranks(traffic_with_bounds, wrappings.world_size(wrapping), wrapping)
    assert all(found == per_rank[0] for found in per_rank)
    calls, num_bytes, held = per_rank[0]
    assert held == 2 and not [name for name in calls if "gather" in name]
    assert len(calls) < 60 and num_bytes < 800_000


ODD = {  # what the odd rank passes instead -> what the error names on every rank
    "floor": ({"min_sparsity": 0.25}, "segments of .* pruned elements"),
    "ceiling": ({"max_sparsity": {"l1.weight": 0.5}}, "segments of .* pruned elements"),
    "no bounds": ({"min_sparsity": None, "max_sparsity": None}, "bounds on the sparsity"),
    "NaN": ({"max_sparsity": float("nan")}, "max_sparsity=nan"),
    "no number": ({"min_sparsity": "0.2"}, "min_sparsity='0.2'"),
    "unknown name": ({"min_sparsity": {"l9": 0.2}}, "l9"),
}


def outcomes(wrapping: str) -> dict[str, tuple[str, str, list[str]]]:
    """(type, text, changes) of the error that this rank sees, by case."""
    model = wrappings.wrap(fill(Net(), "normal", "float32"), wrapping)
    targets = prune.select(model, names=("weight", "bias"), everything=True)
    is_odd = dist.get_rank() == dist.get_world_size() - 1
    prune.global_unstructured(targets, prune.L1Unstructured, amount=10)
    found = {}
    for case, (odd, _) in ODD.items():
        arguments = {
            "pruning_method": prune.L1Unstructured, "amount": 50,
            "min_sparsity": 0.2, "max_sparsity": 0.6,
        }  # fmt: skip
        if is_odd:
            arguments |= odd
        before = snapshot(model)
        try:
            prune.global_unstructured(targets, **arguments)
            error = ("nothing", "")
        except Exception as raised:
            error = (type(raised).__name__, str(raised))
        found[case] = (*error, changes(before, snapshot(model)))
    return found


@pytest.mark.parametrize("wrapping", ["plain-2", "ddp-3", "fsdp2-3", "hsdp-2x2", "tp-2"])
def test_every_rank_refuses_or_none(wrapping):
    per_rank = run_ranks(outcomes, wrappings.world_size(wrapping), wrapping, timeout=40)
    for case, (_, text) in ODD.items():
        kinds = {found[case][0] for found in per_rank}
        assert len(kinds) == 1 and kinds <= {"ValueError", "TypeError", "NotImplementedError"}
        for found in per_rank:
            assert re.search(text, found[case][1]), (case, found[case])
            assert found[case][2] == [], case
