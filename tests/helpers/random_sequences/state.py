"""A sharded model and the oracle: run an operation on both, then compare everything."""

import functools
import traceback
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

import distprune as prune
from distprune import schedule
from distprune.base.naming import named_modules
from helpers import wrappings
from helpers.comparisons import changes, kind_of, snapshot, wrong_masks
from helpers.models import fill
from helpers.random_sequences.oracle import Counts, Oracle, Refused
from helpers.random_sequences.plans import FAMILIES, Operation, Plan

OPTIMIZERS = {
    # A large eps: else rounding decides the sign of whole steps where gradients are near 0.
    "adamw": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-2}),
    "sgd": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}),
}
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-4, torch.bfloat16: 5e-2}


class SideBySide:
    """A sharded model, the oracle, and the operations on both.

    Args:
        plan: the initial model and sharding.
        folder: for checkpoints; the same on every rank.
    """

    def __init__(self, plan: Plan, folder: Path):
        self.plan, self.folder = plan, folder
        kind, options = OPTIMIZERS[plan.optimizer]
        self.make_optimizer = functools.partial(kind, **options, foreach=False)
        self.oracle = Oracle(self.filled(plan.seed), self.make_optimizer)
        self.num_saved = 0
        self.ramp = schedule.Linear(0, 6, 1, final_sparsity=0.1 * (plan.seed % 10))
        self.pruner: schedule.ScheduledPruner | None = None
        self.wrong: list[str] = []
        self.take(plan.wrap(self.filled(plan.seed), plan.wrapping), plan.wrapping)

    def filled(self, seed: int) -> nn.Module:
        return fill(self.plan.make(), self.plan.data, self.plan.dtype, seed)

    def take(self, model: nn.Module, wrapping: str) -> None:
        """Replace the model, the optimizer and the pruner."""
        plan = self.plan
        self.model, self.wrapping, self.kind = model, wrapping, wrappings.kind_of(wrapping)
        self.indices = indices_of(plan.family, plan.sizes, plan.dtype, wrapping, dist.get_rank())
        self.run = torch.compile(model, backend=plan.compiler) if plan.compiler else model
        self.modules = dict(named_modules(model))
        # Of whatever wraps the model, parameters have the names of the plain one, in its order.
        plain, found = ([pair.fqn for pair in prune.select(each)] for each in (plan.make(), model))
        self.wrong += [f"select: {found}, not {plain}"] * (found != plain)
        self.optimizer = self.make_optimizer(model.parameters())
        if self.pruner is not None:
            state = self.pruner.state_dict()
            self.pruner = self.new_pruner()
            self.pruner.load_state_dict(state)

    def new_pruner(self) -> schedule.ScheduledPruner:
        return schedule.ScheduledPruner(prune.select(self.model, everything=True), self.ramp)

    def target(self, name: str) -> tuple[nn.Module, str]:
        path, _, leaf = name.rpartition(".")
        return self.modules[path], leaf

    def targets(self, names: Sequence[str]) -> tuple[list[str], list[Any]]:
        """Names and pairs in one order; select finds all names of tied weights."""
        if self.plan.family != "tied":
            return list(names), [self.target(name) for name in names]
        pairs = prune.select(self.model, include=names, names=("weight", "bias"), everything=True)
        return [pair.fqn for pair in pairs], pairs

    def held(self, name: str) -> Tensor:
        return wrappings.shard(self.model, name, self.indices)

    def do(self, operation: Operation) -> list[str]:
        """Run an operation on both; return the differences here, or that another rank has some."""
        arguments = {k: v for k, v in operation.arguments.items() if k != "look"}
        expect, act = getattr(self, operation.name)(**arguments)
        before, error, refused, counts, report = {}, None, None, None, None
        try:
            counts = expect()
            self.zero_pruned()
        except Refused as expected:
            refused = expected.kind
            self.reshard()
            before = snapshot(self.model)
        try:
            report = act()
            self.zero_pruned()
        except Exception as raised:
            error = raised
        if error is not None and refused is None:
            self.wrong.append("".join(traceback.format_exception(error)[-4:]))
        elif refused is not None and (error is None or kind_of(error) != refused.__name__):
            self.wrong.append(f"{error!r}; expected {refused.__name__}")
        elif refused is not None:
            changed = changes(before, snapshot(self.model))
            if operation.name == "load_rewrapped":  # saving leaves attributes on FSDP1's modules
                changed = [what for what in changed if not what.endswith(" attributes")]
            self.wrong += [f"changed in spite of the error: {what}" for what in changed]
        if isinstance(counts, Counts) and report is not None:
            self.compare_report(counts, report)
        told: object = type(error).__name__
        if isinstance(report, prune.PruningReport):
            told = {**report.to_dict(), "seconds": 0}
        if not self.wrong:
            self.compare()
        if agreed(told, self.wrong) and operation.arguments["look"]:
            self.compare_outputs(self.plan.seed, torch.no_grad())
            self.verify()
            agreed(None, self.wrong)
        return self.wrong

    def verify(self) -> None:
        """Nothing is found on a healthy model, and all that is pruned is counted."""
        expected = {name: self.oracle.num_pruned(name) for name in self.oracle.masks}
        report = prune.verify(self.model, expected=list(expected), raise_errors=False)
        found = {entry.name: entry.num_pruned for entry in report.parameters}
        if not report.ok or found != expected:
            self.wrong.append(f"verify: {report}, not {expected}")

    def is_sharded(self, name: str) -> bool:
        return wrappings.is_sharded(self.wrapping, name)

    def zero_pruned(self) -> None:
        """Where the model holds zeros, the oracle's values are zero under its masks, too."""
        for name, keep in self.oracle.masks.items():
            if self.is_sharded(name):
                self.oracle.value(name).masked_fill_(~keep, 0)

    def reshard(self) -> None:
        """Let FSDP2 replace gathered parameters with its shards."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def compare(self) -> None:
        """Compare masks, weights and masked weights, bit for bit."""
        self.reshard()
        masks = self.oracle.masks
        self.wrong += wrong_masks(self.model, masks, self.indices)
        if prune.is_pruned(self.model) != bool(masks):
            self.wrong.append(f"is_pruned is {prune.is_pruned(self.model)}")
        for name, indices in self.indices.items():
            module, leaf = self.target(name)
            if name not in masks and leaf + "_mask" in module._buffers:
                self.wrong.append(f"{name} has a mask")
                continue
            held = self.held(name)
            expected = wrappings.my_part(self.oracle.value(name), indices)
            if held.shape != expected.shape or not torch.equal(held, expected):
                self.wrong.append(f"{name}: {held.tolist()}, not {expected.tolist()}")
            # Else its last forward computed it, or FSDP1 frees it.
            if name in masks and leaf not in vars(module) and self.kind != "fsdp1_flat":
                effective = wrappings.local(getattr(module, leaf))
                if not torch.equal(effective, held * wrappings.my_part(masks[name], indices)):
                    self.wrong.append(f"{name} is not what its mask leaves")

    def compare_outputs(self, seed: int, mode: Any) -> None:
        x, _ = self.plan.inputs(seed)
        with mode:
            out = self.run(self.my_rows(x))
            self.close(out, self.my_rows(self.oracle.forward(x)), "outputs")

    def compare_gradients(self, dense: bool = False) -> None:
        oracle = self.oracle
        for name, whole in (oracle.dense_gradients if dense else oracle.gradients).items():
            found = wrappings.gradient(self.model, name, self.indices)
            indices, keep = self.indices[name], oracle.masks.get(name)
            self.close(found, wrappings.my_part(whole, indices), f"{dense=} gradient of {name}")
            if keep is not None and not dense and found[~wrappings.my_part(keep, indices)].any():
                self.wrong.append(f"pruned elements of {name} have a gradient")

    def compare_report(self, counts: Counts, report: prune.PruningReport) -> None:
        rows = [(entry.num_pruned_before, entry.num_pruned_now) for entry in report.parameters]
        expected = list(zip(counts.before, counts.now, strict=True))
        if rows != expected:
            self.wrong.append(f"the report counts {rows}, not {expected}")
        if counts.threshold is not None:
            found = report.threshold, (report.num_ties, report.num_ties_pruned)
            if found != (counts.threshold, counts.ties):
                self.wrong.append(f"threshold, ties: {found}, not {counts}")

    def close(self, actual: Tensor, expected: Tensor, what: str) -> None:
        tolerance = TOLERANCE[expected.dtype]
        if not torch.allclose(actual, expected, rtol=tolerance, atol=tolerance):
            off = (actual.double() - expected.double()).abs().max()
            self.wrong.append(f"{what}: off by {float(off):.3g}")

    def my_rows(self, batch: Tensor) -> Tensor:
        part, num_parts = wrappings.data_rank(self.wrapping)
        return batch.chunk(num_parts)[part]


@functools.cache
def indices_of(
    family: str, sizes: tuple[int, ...], dtype: str, wrapping: str, rank: int
) -> dict[str, Tensor]:
    """wrappings.local_indices, cached for later sequences."""
    model = fill(FAMILIES[family](sizes), "zeros", dtype)
    return wrappings.local_indices(model, wrapping)


def agreed(told: object, wrong: list[str]) -> bool:
    """Whether no rank found a difference and all were told the same; if not, record it."""
    kind = zlib.crc32(repr(told).encode())
    facts = torch.tensor([bool(wrong), kind, -kind])
    dist.all_reduce(facts, dist.ReduceOp.MAX)
    if facts[1] != -facts[2]:
        wrong.append(f"the ranks were told different things, and this one {told!r}")
    elif facts[0] and not wrong:
        wrong.append("another rank differs")
    return not wrong


def by_name(names: Sequence[str], bound: float | dict[str, float] | None):
    """Return a bound for each name, or None without bounds."""
    return dict.fromkeys(names, bound) if isinstance(bound, float) else bound


def bounds(pairs: Sequence[Any], names: Sequence[str], low: Any, high: Any) -> dict[str, Any]:
    """Return bounds by (module, name), as global_unstructured takes them."""
    pair_of = {name: tuple(pair) for name, pair in zip(names, pairs, strict=True)}
    given = {"min_sparsity": low, "max_sparsity": high}
    return {
        key: {pair_of[name]: bound for name, bound in value.items()}
        for key, value in given.items()
        if value is not None
    }
