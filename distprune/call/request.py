"""What a pruning call was asked for, what it works on, and what its method decides."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from distprune.base.amount import Amount, Bounds, Sparsities, SparsityBound
from distprune.base.blocks import BlockRule
from distprune.base.exact_sums import Normalization
from distprune.masks.hook import PruningHook
from distprune.ranking.chunks import count_live
from distprune.ranking.in_blocks import BlockedParameter
from distprune.ranking.scores import scores_in_memory
from distprune.ranks.collectives import Communicator
from distprune.shards.factored import FactoredScores
from distprune.shards.parameters import Scores
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
        blocks: per parameter, its rows or groups of N:M, if these are segments; None where this
            rank has no element of it.
        wanted: per parameter, the sparsity that it is to have; None where parameters compete.
    """

    bounds: Bounds | None = None
    counts: tuple[int, ...] | None = None
    blocks: tuple[BlockedParameter | None, ...] | None = None
    wanted: tuple[float, ...] | None = None

    @property
    def compares_parameters(self) -> bool:
        """Whether scores of different parameters are compared."""
        return self.wanted is None


ONE_SEGMENT = Segments()


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
    segments: Segments = ONE_SEGMENT

    @property
    def is_local(self) -> bool:
        """Whether every parameter is whole on this rank, and on every other."""
        return not any(shard.is_sharded for shard in self.shards)

    @property
    def is_limited(self) -> bool:
        """Whether anything but one free ranking divides what is pruned among the parameters."""
        return self.segments != ONE_SEGMENT

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
        return LocalMasks(masks, num_pruned)


@dataclass(frozen=True)
class LocalMasks:
    """The new masks on this rank.

    Attributes:
        masks: local, N-d, 1 = keep; earlier masks are included.
        num_pruned: newly pruned elements among those that this rank counts, per parameter.
        num_grown: those that were pruned and are not any more, likewise; none if it is empty.
    """

    masks: Sequence[Tensor]
    num_pruned: Sequence[int]
    num_grown: Sequence[int] = ()


@dataclass(frozen=True)
class Decision:
    """What a pruning method decided: the same on every rank, but for what ``finish`` returns.

    Attributes:
        finish: a local step, which may fail: writes this rank's masks.
        threshold: the score at which the order was cut, if scores were ranked.
        num_ties: elements that have exactly this score ...
        num_ties_pruned: ... and those of them that were pruned.
        bound_of: per parameter, the bound that decided how much of it is pruned, or None;
            None from a method that does not support bounds.
        wanted: per parameter, the sparsity that a budget, a scope or a pattern gives it; None where
            parameters compete.
    """

    finish: Callable[[], LocalMasks]
    threshold: float | None = None
    num_ties: int = 0
    num_ties_pruned: int = 0
    bound_of: Sequence[str | None] | None = None
    wanted: Sequence[float] | None = None


# (label, text): must be equal on all ranks of a call.
Fact = tuple[str, str]
# (module, name) -> the hook to register on the module
MakeHook = Callable[[nn.Module, str], PruningHook]


class DecidesMasks(Protocol):
    """What a call needs of a pruning method."""

    READS_VALUES: bool

    def decide(self, call: PruningCall) -> Decision:
        """Decide the masks of all parameters. Collective: the same steps on every rank."""
        ...


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
        method: decides the masks.
        make_hook: makes what is registered on a module.
        amount: of the method, or a mapping to sparsities; None for a pattern.
        min_sparsity, max_sparsity: floors and ceilings of single parameters.
        rule: a scope or a pattern; None: all elements are ranked together.
        input_dims: dimensions that outputs sum over, where modules do not say it.
        normalize: what the scores of each parameter are divided by, if anything.
    """

    method: DecidesMasks
    make_hook: MakeHook
    amount: Amount | Sparsities | None = None
    min_sparsity: SparsityBound | None = None
    max_sparsity: SparsityBound | None = None
    rule: BlockRule | None = None
    input_dims: InputDims | None = None
    normalize: Normalization | None = None

    @property
    def has_bounds(self) -> bool:
        """Whether a floor or a ceiling is given."""
        return (self.min_sparsity, self.max_sparsity) != (None, None)

    @property
    def divides(self) -> bool:
        """Whether anything but one free ranking decides how much each parameter loses."""
        return self.rule is not None or isinstance(self.amount, Mapping) or self.has_bounds

    def all_facts(self) -> list[Fact]:
        """Everything that must be equal on all ranks, but for the parameters themselves."""
        return [
            *super().all_facts(),
            ("normalize", str(self.normalize)),
            ("bounds on the sparsity of parameters", "given" if self.has_bounds else "none"),
            ("amount", "by parameter" if isinstance(self.amount, Mapping) else "one"),
            ("scope or pattern", str(self.rule)),
        ]
