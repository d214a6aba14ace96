"""Frozen results of live models: each case, on each wrapping.

A case is a tuple of keywords for successive calls of global_unstructured, or a function of a Run.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import distprune as prune
from distprune import budgets, criteria, dynamic, schedule
from distprune.base.naming import unwrap
from distprune.call.request import ParameterArguments
from distprune.call.run import count_live
from distprune.ranks.collectives import world
from distprune.statistics import ActivationStatistics
from distprune.testing import run_ranks
from golden import corpus
from helpers import wrappings
from helpers.comparisons import assembled
from helpers.models import DTYPES, EVEN, Net, fill, fqns, target

ALL_WRAPPINGS = [*wrappings.TRAINED, *wrappings.FSDP2_DIM1]
SCALES = (1.0, 4.0, 1 / 3)  # of successive parameters; the last one fills all their bits
SHARES = {"l1.weight": 0.5, "l2.weight": 0.2, "l3.weight": 0.7, "conv.weight": 0.0}
RATIOS = {"l1.weight": 0.1, "l2.weight": 0.4, "l3.weight": 0.3, "conv.weight": 0.0}
BOUNDS = {"min_sparsity": 0.3, "max_sparsity": 0.6}
RAMP = schedule.Cubic(begin=0, end=2, frequency=1, final_sparsity=0.7, initial_sparsity=0.2)
CASES_PER_CALL = 16  # torch keeps the threads of each mesh


class IntegerNet(Net):
    """Net without tanh: integers stay integers, so that all sums are exact."""

    def forward(self, x: Tensor) -> Tensor:
        return self.l3(self.l2(torch.relu(self.l1(x))))


def batches(model: nn.Module, number: int) -> list[tuple[Tensor, Tensor]]:
    """(inputs, factors of the outputs) of some global batches of 12 rows, small integers."""
    generator = torch.Generator().manual_seed(1)
    sizes = model.l1.in_features, model.l3.out_features
    return [
        tuple(torch.randint(-2, 3, (12, size), generator=generator).float() for size in sizes)
        for _ in range(number)
    ]


def backward(model: nn.Module, batch: tuple[Tensor, Tensor], part: int, num_parts: int) -> None:
    """This rank's share of a batch. Times the number of ranks, because wrappers average."""
    x, factors = (tensor.chunk(num_parts)[part] for tensor in batch)
    ((model(x) * factors).sum() * num_parts).backward()


class ShapesNet(Net):
    """Net, and other shapes; 5, 3 and 1 rows leave some of 4 ranks without any."""

    def __init__(
        self, sizes: tuple[int, int, int, int] = EVEN, filters: int = 3, outputs: int = 1
    ) -> None:
        super().__init__(sizes)
        self.conv = nn.Conv2d(sizes[0], filters, 2)
        self.norm = nn.LayerNorm(7)
        self.one = nn.Linear(sizes[0], outputs, bias=False)


def large_net(dtype: str, seed: int) -> ShapesNet:
    """Return a net of 80,000 elements, which the engine does not collect all.

    Each parameter has fewer than 128 * 128 elements, as wrappings.local_indices needs it.
    """
    net = ShapesNet((120, 132, 120, 136), 34, 136).to(getattr(torch, dtype))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in net.parameters():
            steps = torch.randint(-(2**20), 2**20, parameter.shape, generator=generator)
            parameter.copy_(steps / 2**18)
    return net


def linear_net() -> Net:
    """Return a net of small integers, whose outputs and gradients are exact on any sharding."""
    net = IntegerNet(EVEN)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randint(-2, 3, parameter.shape, generator=generator))
        net.l2.bias.zero_()  # each rank of rowwise parallelism adds a share of it
    return net


@dataclass(frozen=True)
class Case:
    """A case.

    Attributes:
        what: keywords of successive calls, or a function of a Run.
        data, dtype: of the parameters; see helpers.models.fill, and large_net for "many".
        names: of the parameters that are pruned: "all", or "matrices".
        has_forward: whether the model runs, with integers for weights and inputs.
    """

    what: tuple[dict[str, Any], ...] | Callable[[Run], None]
    data: str = "rounded"
    dtype: str = "float32"
    names: str = "all"
    has_forward: bool = False

    def make(self, seed: int = 0) -> nn.Module:
        if self.has_forward:
            return linear_net()
        if self.data == "many":
            net = large_net(self.dtype, seed)
        else:
            net = fill(ShapesNet(), self.data, self.dtype, seed + DTYPES.index(self.dtype))
        with torch.no_grad():
            for number, parameter in enumerate(net.parameters()):
                parameter.mul_(SCALES[number % len(SCALES)])
        return net


class Run:
    """A case on this rank: the wrapped model, and what has been found so far."""

    def __init__(self, case: Case, wrapping: str, indices: dict[str, Tensor]) -> None:
        self.case, self.wrapping, self.indices = case, wrapping, indices
        dense = case.make()
        names = [n for n in fqns(dense) if self._fits(n, dense.get_parameter(n).shape)]
        self.names = random.Random(3).sample(names, len(names))
        self.whole = {name: dense.get_parameter(name).detach().clone() for name in self.names}
        self.model = wrappings.wrap(dense, wrapping)
        inner = wrappings.unwrapped(self.model)
        placed = [target(inner, name) for name in self.names]
        self.pairs = [
            prune.NamedParameter(unwrap(module), own, name)
            for (module, own), name in zip(placed, self.names, strict=True)
        ]
        self.part = wrappings.data_rank(wrapping)
        self.facts: list[object] = []
        self.masks: dict[str, Tensor] = {}  # the parts on this rank: "number of the step name"

    def _fits(self, name: str, shape: torch.Size) -> bool:
        if self.case.names == "all" and not self.case.has_forward:
            return True
        if name not in SHARES or not isinstance(self.case.what, tuple):
            return name in SHARES
        pattern = self.case.what[0].get("pattern", "")
        sizes = [int(size) for size in pattern.split("x")] if "x" in pattern else [1, 1]
        return all(length % size == 0 for length, size in zip(shape, sizes, strict=False))

    def carry_out(self) -> None:
        if callable(self.case.what):
            self.case.what(self)
        else:
            for keywords in self.case.what:
                self.prune(**keywords)

    def given(self, dtype: torch.dtype, step: int) -> dict[Any, Tensor]:
        """Whole scores, some of them negative, for each ``step``-th parameter."""
        generator = torch.Generator().manual_seed(8)
        drawn = [torch.randint(-9, 10, w.shape, generator=generator) for w in self.whole.values()]
        pairs = zip(self.pairs, drawn, strict=True)
        return {pair: scores.to(dtype) for pair, scores in list(pairs)[::step]}

    def prune(
        self, method: Any = prune.L1Unstructured, scores: Any = None, **keywords: Any
    ) -> None:
        torch.manual_seed(5)  # of random scores
        budget = keywords.pop("budget", None)
        if budget is not None:  # a function; the amount is a share of what is unpruned
            arguments = ParameterArguments(parameters=self.pairs)
            shards, num_live = count_live(lambda: arguments, world())
            num_elements = sum(shard.numel for shard in shards)
            pruned = num_elements - sum(num_live)
            amount = round(keywords.pop("amount") * (num_elements - pruned))
            keywords = {"amount": budget(self.pairs, Fraction(pruned + amount, num_elements))}
        self.keep(prune.global_unstructured(self.pairs, method, scores, **keywords))

    def keep(self, report: Any = None, masks: Iterable[Tensor] | None = None) -> None:
        """Remember the masks as they are now, or those given, and what a report says."""
        if masks is None:
            masks = [getattr(module, name + "_mask") for module, name in self.pairs]
        step = sum(fact == "step" for fact in self.facts)
        self.facts.append("step")
        for name, mask in zip(self.names, masks, strict=True):
            self.masks[f"{step} {name}"] = wrappings.local(mask).bool().clone()
        if report is not None:
            self.facts += [report.threshold, report.num_ties, report.num_ties_pruned]
            for each in report.parameters:
                self.facts += [each.name, each.num_pruned, each.held_at, each.wanted]

    @torch.no_grad()
    def change_values(self, seed: int) -> None:
        """Give the parameters other values, as an optimizer does."""
        dense = self.case.make(seed)
        for name in self.names:
            part = wrappings.my_part(dense.get_parameter(name), self.indices[name])
            wrappings.shard(self.model, name, self.indices).copy_(part)

    def backwards(self, number: int) -> Iterable[int]:
        """Run batches backwards; the gradients are there while the caller has the number."""
        for step, batch in enumerate(batches(wrappings.unwrapped(self.model), number)):
            backward(self.model, batch, *self.part)
            yield step
            self.model.zero_grad()

    def statistics(self) -> ActivationStatistics:
        """Statistics of one batch; ranks with plain models take a part of it each, as others."""
        is_plain = wrappings.kind_of(self.wrapping) == "plain"
        size = torch.distributed.get_world_size()
        part, num_parts = (torch.distributed.get_rank(), size) if is_plain else self.part
        collected = ActivationStatistics(self.pairs)
        ((inputs, _),) = batches(wrappings.unwrapped(self.model), 1)
        with collected.collecting(), torch.no_grad():
            self.model(inputs.chunk(num_parts)[part])
        return collected


def of_method(
    method: Any, *calls: dict[str, Any], scores: Any = None, step: int = 2
) -> Callable[[Run], None]:
    def run(self: Run) -> None:
        for keywords in calls:
            self.prune(method, None if scores is None else self.given(scores, step), **keywords)

    return run


def of_statistics(score: str, **keywords: Any) -> Callable[[Run], None]:
    def run(self: Run) -> None:
        collected = self.statistics()
        more = {}
        if keywords.get("budget") == "owl":
            more["budget"] = partial(
                budgets.owl,
                ratios=collected.outlier_ratios(threshold_multiple=2, per="parameter"),
                lam=0.2,
            )
        self.prune(prune.L1Unstructured, getattr(collected, score)(), **(keywords | more))

    return run


def of_criterion(make: Any, **keywords: Any) -> Callable[[Run], None]:
    def run(self: Run) -> None:
        criterion = make(self.pairs)
        for _ in self.backwards(3):
            criterion.update()
        self.prune(criterion.pruning_method, criterion.scores(), **keywords)

    return run


def projected(**keywords: Any) -> Callable[[Run], None]:
    def run(self: Run) -> None:
        total = sum(tensor.numel() for tensor in self.whole.values())
        torch.manual_seed(5)
        first = prune.global_mask(self.pairs, total // 3, **keywords)
        self.keep(masks=first.masks)
        second = prune.global_mask(self.pairs, total // 5, candidates=first.masks)
        self.keep(masks=second.masks)

    return run


def scheduled(**keywords: Any) -> Callable[[Run], None]:
    """Three steps; other values at each of them."""

    def run(self: Run) -> None:
        pruner = schedule.ScheduledPruner(self.pairs, RAMP, **keywords)
        for step in range(3):
            self.change_values(step)
            torch.manual_seed(step)
            self.keep(pruner.step())

    return run


def dropped_and_grown(self: Run) -> None:
    self.prune(amount=0.5)
    for seed in (1, 2):
        self.change_values(seed)
        torch.manual_seed(seed)
        dynamic.set_step(self.pairs, 0.3)
        self.keep()


LOWEST, RANDOM = prune.LowestScore, prune.RandomUnstructured
HALF = {"amount": 0.5}
SIGNED = {"scores": torch.float32, "step": 1}
CASES: dict[str, Case] = {
    # One ranking over all, and how the count is shared.
    "l1": Case((HALF,)),
    "random": Case(of_method(RANDOM, {"amount": 0.3}, HALF)),
    "given rms": Case(of_method(prune.L1Unstructured, {"amount": 0.5, "normalize": "rms"},
                                scores=torch.bfloat16)),
    "lowest rms bounds": Case(of_method(LOWEST, {**HALF, **BOUNDS, "normalize": "rms"}, **SIGNED)),
    "rms float64 bounds": Case(({"normalize": "rms", **HALF, **BOUNDS},), dtype="float64"),
    **{budget.__name__: Case(({"amount": 0.3, "budget": budget}, {"amount": 0.4, "budget": budget}),
                             names="matrices")
       for budget in (budgets.uniform, budgets.erk)},
    "erk ceiling": Case(
        ({"amount": 0.6, "budget": partial(budgets.erk, max_sparsity=0.7)},), "few"
    ),
    "owl": Case(({"amount": 0.6, "budget": partial(budgets.owl, ratios=RATIOS, lam=0.2)},),
                names="matrices"),
    "sparsities": Case(({"amount": SHARES},), names="matrices"),
    "layer lowest": Case(of_method(LOWEST, {"scope": "layer", **HALF}, **SIGNED)),
    "2:4 lowest": Case(of_method(LOWEST, {"pattern": "2:4"}, **SIGNED), names="matrices"),
    "row random": Case(of_method(RANDOM, {"scope": "row", **HALF})),
    "1:3 random": Case(of_method(RANDOM, {"pattern": "1:3"}), names="matrices"),
    # Scores from activations and gradients, by scopes, budgets and bounds.
    "wanda row": Case(of_statistics("wanda", scope="row", **HALF), has_forward=True),
    "wanda owl": Case(of_statistics("wanda", budget="owl", **HALF), has_forward=True),
    "ria 2:4": Case(of_statistics("ria", pattern="2:4"), has_forward=True),
    "stade": Case(of_statistics("stade", **HALF, **BOUNDS), has_forward=True),
    "SNIP erk": Case(of_criterion(criteria.SNIP, budget=budgets.erk, **HALF), has_forward=True),
    "Movement row": Case(of_criterion(criteria.Movement, scope="row", **HALF), has_forward=True),
    # Too many elements to collect them all.
    "large": Case(({"amount": 0.3}, HALF), "many"),
    "large bfloat16": Case(({"amount": 0.3}, HALF), "many", "bfloat16"),
    "large float16 rms": Case(({"normalize": "rms", **HALF},), "many", "float16"),
    "large rms": Case(({"normalize": "rms", **HALF},), "many"),
    "large bounds": Case(({**HALF, **BOUNDS},), "many"),
    "large random": Case(of_method(RANDOM, HALF), "many"),
    "large lowest": Case(of_method(LOWEST, HALF, **SIGNED), "many"),
    "large erk": Case(({"budget": budgets.erk, **HALF},), "many", "bfloat16", names="matrices"),
    "large row": Case(({"scope": "row", "amount": 0.4},), "many"),
    "large 2:4": Case(({"pattern": "2:4"},), "many", names="matrices"),
    "large projection": Case(projected(), "many"),
    "large schedule": Case(scheduled(max_sparsity=0.72), "many"),
    # Projection, and what changes masks again and again.
    "projection signed": Case(projected(signed=True)),
    "projection random": Case(projected(scores="random")),
    "schedule bounds": Case(scheduled(max_sparsity=0.75, normalize="rms")),
    "schedule random": Case(scheduled(pruning_method=RANDOM)),
    "drop and grow": Case(dropped_and_grown, names="matrices"),
}  # fmt: skip


def case_name(name: str) -> str:
    return f"model/{name}"


ALL_CASES = [case_name(name) for name in CASES]


def run_here(wrapping: str, names: list[str]) -> list[tuple[dict[str, Any], list[object]]]:
    """Run cases on this rank: ({step and name: (mask, indices, shape)}, facts) of each."""
    found = []
    known: dict[tuple[bool, bool, str], dict[str, Tensor]] = {}
    for name in names:
        case = CASES[name]
        kind = case.has_forward, case.data == "many", case.dtype
        if kind not in known:  # FSDP1 cuts by bytes
            known[kind] = wrappings.local_indices(case.make(), wrapping)
        run = Run(case, wrapping, known[kind])
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of parameters that are emptied
                run.carry_out()
        except Exception as error:
            raise RuntimeError(f"the case {name!r} failed") from error
        masks = {}
        for key, mask in run.masks.items():
            own = key.partition(" ")[2]
            masks[key] = mask.numpy(), run.indices[own].numpy(), tuple(run.whole[own].shape)
        found.append((masks, run.facts))
    return found


def results(wrapping: str, names: list[str]) -> dict[str, str]:
    """Return the hashes of cases on a wrapping."""
    found = {}
    for first in range(0, len(names), CASES_PER_CALL):
        some = names[first : first + CASES_PER_CALL]
        per_rank = run_ranks(run_here, wrappings.world_size(wrapping), wrapping, some, timeout=250)
        for name, *ranks in zip(some, *per_rank, strict=True):
            masks = {}
            for key, (_, _, shape) in ranks[0][0].items():
                parts = [[torch.from_numpy(part) for part in rank[0][key][:2]] for rank in ranks]
                masks[key] = assembled(parts, shape)
            assert all(rank[1] == ranks[0][1] for rank in ranks), f"{name}: reports differ"
            facts = corpus.hash_of(ranks[0][1])
            found[case_name(name)] = f"masks={corpus.hash_of_masks(masks)} report={facts}"
    return found
