"""What methods rank by: the keys of all elements of a call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from distprune._common.hashing import draw_seed
from distprune.call.context import PruningCall
from distprune.selection.candidates import KeySource
from distprune.selection.keys import (
    RANDOM_KEYS,
    KeyRange,
    Order,
    RandomKeys,
    ScoreKeys,
    key_range,
)
from distprune.selection.normalizing import Scored, normalized
from distprune.selection.scores import ComputedScores, FactorScores, ScoreSource, TensorScores
from distprune.selection.tallies import tallied
from distprune.shards.factored import FactoredScores
from distprune.shards.shard import LocalShard

# Tallies take at most a byte for so many local elements: less than a mask does.
_ELEMENTS_PER_BYTE = 50
# The range of all keys, and for every shard of this rank the source of its keys.
Keys = tuple[KeyRange, Sequence[KeySource]]
# A local step that makes them.
MakeKeys = Callable[[], Keys]


class Ranking(Protocol):
    """What a method ranks by."""

    def prepare(self, call: PruningCall) -> MakeKeys:
        """Do what takes all ranks; the rest is a local step. Collective."""
        ...


@dataclass(frozen=True)
class ByScore:
    """A ranking by scores, which may be normalised.

    Attributes:
        order: which scores are pruned first.
        make_scores: a local step: the scores of every shard of this rank.
    """

    order: Order
    make_scores: Callable[[PruningCall], Sequence[ScoreSource]]

    def prepare(self, call: PruningCall) -> MakeKeys:
        """Measure what the scores are divided by, if they are.

        Raises:
            ValueError: a live score is infinite, with a normalisation.
            NotImplementedError: scores that are no floating-point numbers, with a normalisation.
                On every rank.
        """
        sources: Sequence[ScoreSource] | None = None
        # With a budget, a scope or a pattern N:M, parameters are not compared, or by scores that a
        # factor does not change.
        if call.normalize is not None and call.share.compares_parameters:
            scored = call.communicator.run(lambda: _scored(call, self.make_scores(call)))
            if self.order is Order.MAGNITUDE:
                most_bytes = sum(len(part.counted) for part in scored) // _ELEMENTS_PER_BYTE
                tallies = tallied(scored, call.communicator, most_bytes)
                if tallies is not None:
                    scored = [
                        replace(part, scores=scores)
                        for part, scores in zip(scored, tallies, strict=True)
                    ]
            sources = normalized(scored, call.normalize, call.num_live, call.communicator)
        return lambda: self._keys(self.make_scores(call) if sources is None else sources)

    def _keys(self, scores: Sequence[ScoreSource]) -> Keys:
        dtype = functools.reduce(torch.promote_types, [source.dtype for source in scores])
        if dtype.is_complex:
            raise NotImplementedError(
                f"scores of dtype {dtype} cannot be ranked over several parameters; "
                "expected real ones. Pass importance_scores=|w| of every parameter."
            )
        keys = key_range(dtype, self.order)
        return keys, [ScoreKeys(source, keys) for source in scores]


class AtRandom:
    """A ranking by random keys that are the same on any sharding of the parameters.

    Every rank draws one number from torch's default CPU generator; the leader's is the seed of all.
    """

    def prepare(self, call: PruningCall) -> MakeKeys:
        """Agree on the seed.

        Raises:
            ValueError: a normalisation, which random keys cannot have.
        """
        if call.normalize is not None:
            raise ValueError(
                f"normalize={call.normalize!r} of random scores has no meaning; expected None."
            )
        seed = int(call.communicator.leader_of(1, draw_seed)[0])

        def make_keys() -> Keys:
            sources: list[KeySource] = []
            offset = 0
            for shard in call.shards:
                sources.append(RandomKeys(seed, offset, shard.index, shard.values.device))
                offset += shard.numel
            return RANDOM_KEYS, sources

        return make_keys


def _scored(call: PruningCall, scores: Sequence[ScoreSource]) -> list[Scored]:
    return [
        Scored(
            shard.name,
            source,
            None if shard.mask is None else shard.flat(shard.mask),
            shard.counted,
            shard.values.device,
        )
        for shard, source in zip(call.shards, scores, strict=True)
    ]


def scores_or_values(
    shards: Sequence[LocalShard],
    scores: Sequence[Tensor | FactoredScores | None],
    *,
    are_signed: bool,
) -> list[ScoreSource]:
    """The given scores of every shard, or its values.

    Args:
        shards: of this rank.
        scores: laid out like the shards, or factors; None: the values.
        are_signed: whether the order of signed scores matters, or that of |score| only.
    """
    sources: list[ScoreSource] = []
    for shard, given in zip(shards, scores, strict=True):
        if isinstance(given, FactoredScores):
            sources.append(FactorScores.of_shard(shard, given, are_signed=are_signed))
        else:
            sources.append(TensorScores(shard.flat(shard.values if given is None else given)))
    return sources


def _magnitudes(call: PruningCall) -> list[ScoreSource]:
    return scores_or_values(call.shards, call.scores, are_signed=False)


def _signed_scores(call: PruningCall) -> list[ScoreSource]:
    for shard, scores in zip(call.shards, call.scores, strict=True):
        if scores is None and shard.values.numel():
            raise ValueError(
                f"{shard.name} has no importance_scores, and the lowest signed values of a weight "
                "are not its least important ones; expected scores of every parameter, or "
                "L1Unstructured to rank by magnitude."
            )
    return scores_or_values(call.shards, call.scores, are_signed=True)


BY_MAGNITUDE = ByScore(Order.MAGNITUDE, _magnitudes)
BY_SIGNED_SCORE = ByScore(Order.ASCENDING, _signed_scores)
AT_RANDOM = AtRandom()


def by_function(score: Callable[[Tensor], Tensor]) -> ByScore:
    """A ranking by a user's elementwise scores, signed.

    Args:
        score: from values (or importance scores), 1-d, to scores of the same shape.
    """

    def make_scores(call: PruningCall) -> list[ScoreSource]:
        sources: list[ScoreSource] = []
        for position, shard in enumerate(call.shards):
            flat = shard.flat(call.score_or_value(position))
            probe = score(flat[:1])
            if probe.shape != flat[:1].shape:
                raise ValueError(
                    f"compute_scores returned shape {tuple(probe.shape)} for a chunk of shape "
                    f"{tuple(flat[:1].shape)}; expected one score per element."
                )
            sources.append(ComputedScores(flat, score, probe.dtype))
        return sources

    return ByScore(Order.ASCENDING, make_scores)
