"""Target: one parameter of a pruning call on this rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from distprune.shards.factored import FactoredScores
from distprune.shards.shard import LocalShard
from distprune.torch_private.managed import Managed

# By (module, name): a score per element, or the factors of all scores.
Scores = Mapping[tuple[nn.Module, str], Tensor | FactoredScores]


@dataclass(frozen=True)
class Target:
    """One parameter to prune, under every (module, name) that the caller gave for it.

    Attributes:
        label: its full name, or its substitute in messages.
        places: its (module, name) pairs on this rank; empty if only other ranks have it.
        is_tied: whether it has several places, which are removed together.
        managed: a wrapper's record of it, if it has one.
        shard: this rank's part.
        scores: this rank's part of the importance scores, or factors of the whole; None without
            scores.
        about_scores: facts about the scores that must be equal on all ranks.
        is_named: whether the label is a full name.
    """

    label: str
    places: tuple[tuple[nn.Module, str], ...]
    is_tied: bool
    managed: Managed | None
    shard: LocalShard
    scores: Tensor | FactoredScores | None
    about_scores: str = "none"
    is_named: bool = False

    @property
    def facts(self) -> str:
        """What must be the same on every rank that has the parameter."""
        shard = self.shard
        return (
            f"shape {tuple(shard.shape)}, dtype {shard.values.dtype}, {shard.layout}, "
            f"{'un' if shard.mask is None else ''}pruned, importance scores: {self.about_scores}"
        )
