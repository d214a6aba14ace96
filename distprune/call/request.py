"""What a pruning call was asked for, what it works on, and what its method decides."""

from __future__ import annotations

import math
import numbers
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from distprune.base.amount import (
    Amount,
    Bounded,
    Bounds,
    Sparsities,
    SparsityBound,
    per_parameter,
    to_bounds,
)
from distprune.base.blocks import BlockRule, Blocks, Layout, Scope, layout_along, parse_pattern
from distprune.base.exact_sums import Normalization
from distprune.base.naming import plain_key
from distprune.base.selecting import matcher
from distprune.masks.hook import PruningHook
from distprune.ranking.chunks import count_live
from distprune.ranking.in_blocks import BlockedParameter
from distprune.ranking.scores import scores_in_memory
from distprune.ranks.collectives import Communicator
from distprune.shards.factored import FactoredScores
from distprune.shards.reader import Scores
from distprune.shards.shard import Shard

# By (module, name), or a pattern for full names: the dimensions that an output sums over.
InputDims = Mapping[Any, int | Sequence[int]]


@dataclass(frozen=True)
class Segments:
    """What a call ranks together, and how much of it goes; the same on all ranks.

    By default all elements of all parameters are one segment.

    Attributes:
        bounds: of this segment: how much each parameter is to lose, at least and at most.
        counts: per parameter, if each is a segment: its pruned elements after the call.
        blocks: per parameter, its rows or groups of N:M, if these are segments; none of them where
            this rank has no element of it.
        wanted: per parameter, the sparsity that it is to have; None where parameters compete, that
            is, where scores of different parameters are compared.
    """

    bounds: Bounds | None = None
    counts: tuple[int, ...] | None = None
    blocks: tuple[BlockedParameter, ...] | None = None
    wanted: tuple[float, ...] | None = None


@dataclass(frozen=True)
class PruningCall:
    """One call to prune, read and agreed on by all ranks, before anything is decided.

    Attributes:
        shards: this rank's part of every parameter; the same list on all ranks.
        num_live: unpruned elements of every whole parameter.
        mask_dtypes: dtype of the new mask of every parameter.
        communicator: the ranks that take part.
        normalize: what the scores of each parameter are divided by before they are ranked; None:
            they are ranked as they are.
        segments: what is ranked together, and how much of it goes.
    """

    shards: Sequence[Shard]
    num_live: Sequence[int]
    mask_dtypes: Sequence[torch.dtype]
    communicator: Communicator
    normalize: Normalization | None = None
    segments: Segments = Segments()

    @property
    def is_local(self) -> bool:
        """Whether every parameter is whole on this rank, and on every other."""
        return not any(shard.is_sharded for shard in self.shards)

    def score_or_value(self, position: int) -> Tensor:
        """The given scores of a parameter, or its values; N-d.

        Factored scores are computed, and take the memory of a tensor.
        """
        shard = self.shards[position]
        if isinstance(shard.scores, FactoredScores):
            return scores_in_memory(shard, shard.scores)
        return shard.values if shard.scores is None else shard.scores

    def start_mask(self, position: int) -> Tensor:
        """A local mask to prune in: the mask in force, or ones.

        A new tensor at every pruning: masks of earlier rounds are never changed.
        """
        shard = self.shards[position]
        mask = shard.new_mask(self.mask_dtypes[position])
        return mask.fill_(1) if shard.mask is None else mask.copy_(shard.mask)

    def changed_masks(self, change: Callable[[int, Tensor], None]) -> LocalMasks:
        """The masks of all parameters after a change, and what it has pruned. A local step.

        Args:
            change: gets a parameter's position and its mask, N-d, which it prunes in place.
        """
        masks, num_pruned = [], []
        for position, shard in enumerate(self.shards):
            mask = self.start_mask(position)
            flat = shard.flat(mask)
            (num_live,) = count_live([flat], [shard.counted])
            change(position, mask)
            masks.append(mask)
            num_pruned.append(num_live - count_live([flat], [shard.counted])[0])
        return masks, num_pruned, ()


# The new masks on this rank, N-d, 1 = keep, with the earlier ones in them; how many of the elements
# that this rank counts are newly pruned, per parameter; and how many were pruned and are not any
# more, () for none.
LocalMasks = tuple[Sequence[Tensor], Sequence[int], Sequence[int]]


@dataclass
class Decision:
    """What a pruning method decided: the same on every rank, but for what ``finish`` returns.

    Attributes:
        finish: a local step, which may fail: writes this rank's masks.
        threshold: the score at which the order was cut, if scores were ranked.
        num_ties: elements that have exactly this score ...
        num_ties_pruned: ... and those of them that were pruned.
        bound_of: per parameter, the bound that decided how much of it is pruned, or None;
            None from a method that does not rank, and so supports neither bounds nor segments.
    """

    finish: Callable[[], LocalMasks]
    threshold: float | None = None
    num_ties: int = 0
    num_ties_pruned: int = 0
    bound_of: Sequence[str | None] | None = None


# (label, text): must be equal on all ranks of a call.
Fact = tuple[str, str]
# (module, name) -> the hook to register on the module
MakeHook = Callable[[nn.Module, str], PruningHook]


@dataclass(frozen=True, kw_only=True)
class ParameterArguments:
    """The parameters of a call, and what the ranks must agree on.

    Attributes:
        parameters: (module, name) pairs, the same on every rank unless ``pipeline_parallel``.
        importance_scores: the scores to rank by, by (module, name); None: the values are ranked.
        scores_name: the name of that argument, for messages.
        pipeline_parallel: the ranks have different lists, which are joined by name.
        facts: arguments that must be equal on all ranks.
    """

    parameters: Iterable[tuple[nn.Module, str]]
    importance_scores: Scores | None = None
    scores_name: str = "importance_scores"
    pipeline_parallel: bool = False
    facts: Sequence[Fact] = ()

    def all_facts(self) -> list[Fact]:
        """Everything that must be equal on all ranks, but for the parameters themselves."""
        return [*self.facts, ("pipeline_parallel", str(self.pipeline_parallel))]


@dataclass(frozen=True, kw_only=True)
class PruningArguments(ParameterArguments):
    """The arguments of a call that prunes; see ``global_unstructured``.

    Attributes:
        method: its name.
        decide: decides the masks of all parameters. Collective: the same steps on every rank.
        make_hook: makes what is registered on a module.
        reads_values: whether replicas have to be equal, and not their masks only.
        amount: of the method, or a mapping to sparsities; None for a pattern.
        min_sparsity, max_sparsity: floors and ceilings of single parameters.
        rule: a scope or a pattern; None: all elements are ranked together.
        input_dims: dimensions that outputs sum over, where modules do not say it.
        normalize: what the scores of each parameter are divided by, if anything.
    """

    method: str
    decide: Callable[[PruningCall], Decision]
    make_hook: MakeHook
    reads_values: bool = False
    amount: Amount | Sparsities | None = None
    min_sparsity: SparsityBound | None = None
    max_sparsity: SparsityBound | None = None
    rule: BlockRule | None = None
    input_dims: InputDims | None = None
    normalize: Normalization | None = None

    @property
    def divided_by(self) -> str | None:
        """What decides how much each parameter loses; None: one free ranking of all of them."""
        if self.rule is not None:
            return "scope or pattern"
        if isinstance(self.amount, Mapping):
            return "a mapping as amount"
        has_bounds = (self.min_sparsity, self.max_sparsity) != (None, None)
        return "min_sparsity or max_sparsity" if has_bounds else None

    def all_facts(self) -> list[Fact]:
        """Everything that must be equal on all ranks, but for the parameters themselves."""
        return [
            *super().all_facts(),
            ("normalize", str(self.normalize)),
            ("what divides the amount", str(self.divided_by)),
            ("scope or pattern", str(self.rule)),
        ]


_TURNED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_STRAIGHT = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_WEIGHT = re.compile(r"(.*_)?weight(_.*)?|original1")


def to_rule(
    scope: Scope, pattern: str | None, amount: Amount | Sparsities | None
) -> BlockRule | None:
    """The rule of the arguments ``scope``, ``pattern`` and ``amount``; None for one ranking.

    Raises:
        TypeError, ValueError: arguments that do not go together.
    """
    if scope not in ("global", "layer", "row"):
        raise ValueError(f"scope={scope!r}; expected 'global', 'layer' or 'row'.")
    if pattern is not None:
        kept_of = parse_pattern(pattern)
        if scope != "global" or amount is not None:
            raise ValueError(
                f"scope={scope!r} and amount={amount!r} beside pattern={pattern!r}; expected the "
                "pattern alone: it says what is ranked together, and how much of it is pruned."
            )
        return BlockRule(scope, None, kept_of)
    if scope == "global":
        return None
    if not isinstance(amount, numbers.Real) or isinstance(amount, numbers.Integral):
        raise ValueError(
            f"amount={amount!r} with scope={scope!r}; expected a fraction in [0.0, 1.0]: the "
            f"sparsity that every {scope} has after the call."
        )
    return BlockRule(scope, float(amount))


def agree_on_segments(
    arguments: PruningArguments, shards: Sequence[Shard], communicator: Communicator
) -> Segments:
    """What is ranked together, settled for the parameters of a call. Collective.

    Raises:
        TypeError: a sparsity that is no number.
        ValueError: a sparsity outside [0, 1], a floor above a ceiling, a key that is no parameter,
            a parameter without a sparsity; a pattern that does not fit the parameters, or whose
            direction is not known; ranks that differ in any of them. On every rank.

    Cost: an all-reduce of 40 bytes, unless all parameters are one segment without bounds.
    """
    if arguments.divided_by is None:
        return Segments()

    def settle() -> Segments:
        rule, amount = arguments.rule, arguments.amount
        if rule is not None and rule.needs_input_dim:
            given = _given_dims(arguments.input_dims or {}, shards)
            blocks = tuple(
                _blocked(rule, shard, given.get(position)) for position, shard in enumerate(shards)
            )
            return Segments(blocks=blocks, wanted=(rule.wanted,) * len(shards))
        if rule is not None:  # layers
            counts = tuple(rule.blocks(shard.numel, None).num_pruned for shard in shards)
            return Segments(counts=counts, wanted=(rule.wanted,) * len(shards))
        named = [Bounded(s.name, (s.name, *s.places), s.numel, tuple(s.shape)) for s in shards]
        if isinstance(amount, Mapping):
            wanted = per_parameter("amount", amount, named, default=None)
            counts = tuple(round(own * s.numel) for own, s in zip(wanted, shards, strict=True))
            return Segments(counts=counts, wanted=tuple(map(float, wanted)))
        return Segments(to_bounds(named, arguments.min_sparsity, arguments.max_sparsity))

    def facts_of(segments: Segments) -> list[Fact]:
        each: Sequence[object] = segments.counts or ()
        if segments.blocks is not None and not arguments.pipeline_parallel:
            each = segments.blocks  # ranks of a pipeline know the modules of their own parameters
        elif segments.bounds is not None:
            pairs = zip(*segments.bounds, strict=True)
            each = [f"{low} to {high} pruned elements" for low, high in pairs]
        return [(f"segments of {s.name}", str(of)) for s, of in zip(shards, each, strict=False)]

    return communicator.run(settle, facts_of)


def _blocked(rule: BlockRule, shard: Shard, given: tuple[int, ...] | None) -> BlockedParameter:
    """The blocks of a parameter; none if this rank does not know its module."""
    shape = tuple(shard.shape)
    if not shard.places:
        return BlockedParameter(Blocks(1, 1, 1, 0), rule, shape, ())
    module, name = shard.places[0]
    dims: tuple[int, ...] = ()
    if given is None and isinstance(module, _TURNED) and module.groups > 1 and len(shape) > 1:
        # The groups of a transposed convolution are an outer dimension.
        kernel, groups = math.prod(shape[2:]), module.groups
        layout = Layout(groups, shape[0] // groups, shape[1], kernel)
    else:
        dims = given or _dims_of(module, name, shape, shard.name)
        layout = layout_along(shard.name, shape, dims) if dims else Layout(1, shard.numel)
    problem = rule.misfit(shard.name, shape, layout)
    if problem is not None:
        raise ValueError(problem)
    return BlockedParameter(rule.blocks(shard.numel, layout), rule, shape, dims)


def _given_dims(input_dims: InputDims, shards: Sequence[Shard]) -> dict[int, tuple[int, ...]]:
    """By position of a shard, what the caller gave for it."""
    found: dict[int, tuple[int, ...]] = {}
    for key, value in input_dims.items():
        dims = (value,) if isinstance(value, int) else tuple(value)
        if isinstance(key, str):
            matches = matcher(key)
            positions = [i for i, shard in enumerate(shards) if matches(shard.name)]
        else:
            positions = [i for i, shard in enumerate(shards) if plain_key(key) in shard.places]
        if not positions:
            raise ValueError(
                f"input_dims: {key!r} matches none of the {len(shards)} parameters; expected "
                "(module, name) pairs of the call, or patterns for full names."
            )
        for position in positions:
            ndim = len(shards[position].shape)
            resolved = tuple(dim + ndim if dim < 0 else dim for dim in dims)
            found.setdefault(position, resolved)
    return found


def _dims_of(module: nn.Module, name: str, shape: Sequence[int], label: str) -> tuple[int, ...]:
    """The dimensions that an output sums over; () for a number."""
    ndim = len(shape)
    if ndim < 2:
        return tuple(range(ndim))
    kernel = tuple(range(2, ndim))
    if isinstance(module, _TURNED):
        return (0, *kernel)
    if isinstance(module, _STRAIGHT):
        return (1, *kernel)
    loaded = sys.modules.get("transformers.pytorch_utils")
    if loaded is not None and isinstance(module, loaded.Conv1D):
        return (0,)
    if ndim == 2 and _WEIGHT.fullmatch(name):
        return (1,)
    # transformers says it of its fused experts.
    is_turned = getattr(module, "is_transposed", None)
    if ndim == 3 and isinstance(is_turned, bool):
        return (1,) if is_turned else (2,)
    raise ValueError(
        f"{label} of {type(module).__name__} has the shape {list(shape)}, and along which "
        "dimension its inputs lie is not known. Give it with input_dims, such as "
        f"{{{label!r}: {ndim - 1}}} for [..., out, in] and {ndim - 2} for [..., in, out], or leave "
        "it out."
    )
