"""The oracle of random sequences: one process, without code of distprune.

A plain module holds the unpruned values, a dictionary of bool tensors the masks. Masks come from
reference.py, which sorts everything; forward multiplies values and masks. Operations that have to
fail raise Refused and change nothing.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from helpers import reference
from helpers.models import fill, target

WEYL, MIX = 0x9E3779B97F4A7C15, (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # of SplitMix64
BITS = 2**64 - 1


class Refused(Exception):
    """An operation that must raise an error of this type on every rank."""

    def __init__(self, kind: type[Exception]):
        super().__init__(kind.__name__)
        self.kind = kind


@dataclass(frozen=True)
class Counts:
    """The expected numbers of a report; ties only if there was a single ranking."""

    before: list[int]
    now: list[int]
    threshold: float | None = None
    ties: tuple[int, int] | None = None


class Oracle:
    """The model of one process: values, masks, an optimizer, and a schedule.

    Args:
        dense: a plain model, which the oracle changes.
        make_optimizer: makes an optimizer from parameters.
    """

    def __init__(self, dense: nn.Module, make_optimizer: Callable[[Any], torch.optim.Optimizer]):
        self.dense = dense
        self.make_optimizer = make_optimizer
        self.optimizer = make_optimizer(dense.parameters())
        self.masks: dict[str, Tensor] = {}
        self.num_steps, self.sparsity = 0, 0.0  # of the schedule
        self.outputs: list[Tensor] = []  # of the micro-batches of a training step
        self.gradients: dict[str, Tensor] = {}
        self.dense_gradients: dict[str, Tensor] = {}  # of the masked weights, not masked

    def value(self, name: str) -> Tensor:
        return self.dense.get_parameter(name).detach()

    def mask(self, name: str) -> Tensor:
        ones = torch.ones(self.value(name).shape, dtype=torch.bool)
        return self.masks.get(name, ones).clone()

    def num_pruned(self, name: str) -> int:
        return int((~self.mask(name)).sum())

    def forward(self, x: Tensor) -> Tensor:
        """The output, with masked elements multiplied by zero."""
        named = dict(self.dense.named_parameters())
        masked = {name: named[name] * mask for name, mask in self.masks.items()}
        return functional_call(self.dense, masked, (x,), tie_weights=True)

    def new_optimizer(self) -> None:
        self.optimizer = self.make_optimizer(self.dense.parameters())

    def start_optimizer(self) -> None:
        """Do what saving does to an optimizer that has not stepped: one step of length 0."""
        if self.optimizer.state:
            return
        rates = [group["lr"] for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            group["lr"] = 0.0
        for parameter in self.dense.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    def train(self, batches: Sequence[tuple[Tensor, Tensor]], clip: float | None) -> None:
        """One step of the mean loss of some micro-batches."""
        named = dict(self.dense.named_parameters())
        masked = {
            name: (named[name] * mask).detach().requires_grad_()
            for name, mask in self.masks.items()
        }
        self.outputs = []
        for x, y in batches:
            out = functional_call(self.dense, masked, (x,), tie_weights=True)
            (nn.functional.mse_loss(out, y) / len(batches)).backward()
            self.outputs.append(out.detach())
        self.dense_gradients = {
            name: masked.get(name, parameter).grad.clone()
            for name, parameter in named.items()
            if masked.get(name, parameter).grad is not None
        }
        for name, value in masked.items():
            named[name].grad = value.grad * self.masks[name]
        if clip is not None:
            nn.utils.clip_grad_norm_(self.dense.parameters(), clip)
        self.gradients = {name: p.grad.clone() for name, p in named.items() if p.grad is not None}
        self.optimizer.step()
        self.optimizer.zero_grad()

    def fill(self, data: str, seed: int) -> None:
        """Write new values as an optimizer would: into pruned elements, too."""
        dtype = str(next(self.dense.parameters()).dtype).removeprefix("torch.")
        fill(self.dense, data, dtype, seed)

    @torch.no_grad()
    def remove(self, name: str) -> None:
        if name not in self.masks:
            raise Refused(ValueError)
        self.value(name).masked_fill_(~self.masks.pop(name), 0)

    def rank(
        self,
        names: Sequence[str],
        amount: Any,
        *,
        scores: dict[str, Tensor] | None = None,
        low: dict[str, float] | None = None,
        high: dict[str, float] | None = None,
        ranks: dict[str, Tensor] | None = None,
        key: Callable[[float], float] = abs,
    ) -> Counts:
        """Prune the first ``amount`` elements of some parameters in the total order.

        Args:
            scores: rank by |scores| where there are any, else by |values|.
            low, high: floors and ceilings by name.
            ranks: rank by these, and report no threshold.
            key: of the scores.
        """
        ranked = [
            (ranks or scores or {}).get(name, self.value(name)).detach().double() for name in names
        ]
        keeps = [self.mask(name) for name in names]
        remaining = sum(int(keep.sum()) for keep in keeps)
        k = self.checked(amount, remaining)
        if low is None and high is None:
            after = reference.prune(ranked, k, keeps, key)
        else:
            floors = [(low or {}).get(name, 0) for name in names]
            ceilings = [(high or {}).get(name, 1) for name in names]
            sizes = [keep.numel() for keep in keeps]
            if any(_is_crossed(*each) for each in zip(floors, ceilings, sizes, strict=True)):
                raise Refused(ValueError)
            after = reference.prune_bounded(ranked, k, floors, ceilings, keeps, key)
            if after is None:
                raise Refused(ValueError)
        self.masks.update(zip(names, after, strict=True))
        before = [int((~keep).sum()) for keep in keeps]
        now = [int((old & ~new).sum()) for old, new in zip(keeps, after, strict=True)]
        if ranks is not None or low is not None or high is not None or k == 0:
            return Counts(before, now)
        magnitudes = [score.abs() for score in ranked]
        gone = [old & ~new for old, new in zip(keeps, after, strict=True)]
        threshold = max(float(m[g].max()) for m, g in zip(magnitudes, gone, strict=True) if g.any())
        ties = sum(int((m[k] == threshold).sum()) for m, k in zip(magnitudes, keeps, strict=True))
        tied = sum(int((m[g] == threshold).sum()) for m, g in zip(magnitudes, gone, strict=True))
        return Counts(before, now, threshold, (ties, tied))

    @staticmethod
    def checked(amount: Any, remaining: int) -> int:
        """Return the number of elements of an amount."""
        if isinstance(amount, str):
            raise Refused(TypeError)
        if isinstance(amount, float) and not 0 <= amount <= 1:
            raise Refused(ValueError)
        k = reference.num_to_prune(amount, remaining)
        if not 0 <= k <= remaining:
            raise Refused(ValueError)
        return k

    def random_ranks(self, names: Sequence[str], seed: int) -> dict[str, Tensor]:
        """Return the order of random scores, a function of the seed and the global index.

        The index runs through all parameters in the list. No two scores are equal.
        """
        torch.manual_seed(seed)
        drawn = int(torch.randint(2**62, (1,)))
        sizes = [self.value(name).numel() for name in names]
        hashed = [split_mix(index, drawn) for index in range(sum(sizes))]
        order = torch.tensor(sorted(range(len(hashed)), key=hashed.__getitem__))
        ranks = torch.empty(len(hashed), dtype=torch.int64)
        ranks[order] = torch.arange(len(hashed))
        return {
            name: part.view(self.value(name).shape)
            for name, part in zip(names, ranks.split(sizes), strict=True)
        }

    def random_of_torch(self, name: str, amount: Any, seed: int) -> None:
        """Prune an unsharded parameter at random: where torch's random numbers are largest."""
        keep, values = self.mask(name), self.value(name)
        self.checked(amount, int(keep.sum()))
        torch.manual_seed(seed)
        numbers = torch.zeros(values.shape)
        drawn = torch.rand_like(values[keep] if name in self.masks else values)
        numbers[keep] = drawn.float().flatten()
        self.rank([name], amount, ranks={name: numbers}, key=lambda number: -number)

    def norms(self, name: str, amount: Any, n: float, dim: int) -> None:
        """Prune the channels of smallest norm, each rounded once from its exact value."""
        values = self.value(name) * self.mask(name)
        self._check_dim(name, dim)
        rows = values.double().movedim(dim, 0).flatten(1).tolist()
        exact = [_norm([Fraction(abs(value)) for value in row], n) for row in rows]
        self._drop_channels(name, amount, dim, torch.tensor(exact).double().to(values.dtype))

    def random_channels(self, name: str, amount: Any, dim: int, seed: int) -> None:
        self._check_dim(name, dim)
        alive = self._alive(name, dim)
        torch.manual_seed(seed)
        scores = torch.zeros(len(alive))
        scores[alive] = torch.rand(int(alive.sum()))
        self._drop_channels(name, amount, dim, scores)

    def custom(self, name: str, mask: Tensor) -> None:
        self.masks[name] = self.mask(name) & (mask != 0)

    def segments(
        self, names: Sequence[str], groups_of: Callable[[str], list], count_of: Callable[[int], int]
    ) -> Counts:
        """Prune as many of each group of elements as ``count_of`` says of its size."""
        before = [self.num_pruned(name) for name in names]
        for name in names:
            groups = groups_of(name)
            count = count_of(len(groups[0]))
            self.masks[name] = reference.prune_in_blocks(
                self.value(name), groups, count, self.mask(name)
            )
        after = [self.num_pruned(name) for name in names]
        return Counts(before, [new - old for old, new in zip(before, after, strict=True)])

    def largest(
        self,
        names: Sequence[str],
        k: int,
        candidates: Sequence[Tensor],
        largest: bool,
        ranks: dict[str, Tensor],
    ) -> list[Tensor]:
        """The k largest, or smallest, elements among candidates: True is selected."""
        values = [ranks.get(name, self.value(name)) for name in names]
        num = sum(int(mask.sum()) for mask in candidates)
        if not 0 <= k <= num:
            raise Refused(ValueError)
        kept = reference.prune(values, num - k if largest else k, candidates)
        if largest:
            return kept
        return [mask & ~keep for mask, keep in zip(candidates, kept, strict=True)]

    @torch.no_grad()
    def set_masks(self, masks: dict[str, Tensor], with_optimizer: bool) -> None:
        """Replace masks: what grows is zero, and so is the state of what grows or is dropped."""
        for name, mask in masks.items():
            changed = mask ^ self.mask(name)
            self.value(name).masked_fill_(mask & changed, 0)
            state = self.optimizer.state.get(self.dense.get_parameter(name), {})
            for value in state.values() if with_optimizer else ():
                if isinstance(value, Tensor) and value.shape == mask.shape:
                    value.masked_fill_(changed, 0)
            self.masks[name] = mask

    def masks_from_zeros(self, names: Sequence[str]) -> None:
        masks = {name: self.mask(name) & (self.value(name) != 0) for name in names}
        found = {n: mask for n, mask in masks.items() if not torch.equal(mask, self.mask(n))}
        if not found:
            raise Refused(ValueError)
        self.masks.update(found)

    def _check_dim(self, name: str, dim: int) -> None:
        num_dims = self.value(name).ndim
        if num_dims < 2:
            raise Refused(ValueError)
        if not -num_dims <= dim < num_dims:
            raise Refused(IndexError)

    def _alive(self, name: str, dim: int) -> Tensor:
        return self.mask(name).movedim(dim, 0).flatten(1).any(1)

    def _drop_channels(self, name: str, amount: Any, dim: int, scores: Tensor) -> None:
        alive = self._alive(name, dim).nonzero().flatten().tolist()
        k = self.checked(amount, len(alive))
        mask = self.mask(name)
        for channel in sorted(alive, key=lambda i: (float(scores[i]), i))[:k]:
            mask.select(dim, channel).fill_(False)
        self.masks[name] = mask


def split_mix(index: int, seed: int) -> int:
    """The finaliser of SplitMix64 over a Weyl sequence; 63 bits."""
    x = (index * WEYL + seed) & BITS
    x = ((x ^ x >> 30) * MIX[0]) & BITS
    x = ((x ^ x >> 27) * MIX[1]) & BITS
    return (x ^ x >> 31) >> 1


def _norm(magnitudes: list[Fraction], n: float) -> float:
    if n == math.inf:
        return float(max(magnitudes))
    total = float(sum(magnitude**n for magnitude in magnitudes))
    return math.sqrt(total) if n == 2 else total


def _is_crossed(low: float, high: float, size: int) -> bool:
    """Whether a floor is above the ceiling, in elements. A bound is the decimal as written."""
    return math.ceil(Fraction(str(low)) * size) > math.floor(Fraction(str(high)) * size)


def places(model: nn.Module, name: str) -> list[tuple[nn.Module, str]]:
    """Every (module, name) of a parameter of a plain, unpruned model: several if it is tied."""
    module, leaf = target(model, name)
    parameter = module._parameters[leaf]
    return [
        (each, own)
        for each in model.modules()
        for own, found in each._parameters.items()
        if found is parameter
    ]
