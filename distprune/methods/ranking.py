"""Ranking by a score over all parameters and ranks: the decision of every method that has one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from distprune._common.amount import Amount, checked_count
from distprune._common.collectives import Communicator
from distprune._common.hashing import draw_seed
from distprune.call.context import Decision, LocalMasks, PruningCall
from distprune.methods.dividing import bounds_met, divide
from distprune.selection.candidates import Candidates, KeySource, PartCut
from distprune.selection.cut import Selection, select_lowest
from distprune.selection.keys import (
    RANDOM_KEYS,
    KeyRange,
    Order,
    RandomKeys,
    ScoreKeys,
    key_range,
)
from distprune.selection.normalizing import Scored, normalized
from distprune.selection.passes import write_keep, write_masks
from distprune.selection.scores import ComputedScores, FactorScores, ScoreSource, TensorScores
from distprune.selection.within_bounds import limits_for, select_within
from distprune.shards.factored import FactoredScores
from distprune.shards.geometry import dim_coordinates, index_map
from distprune.shards.shard import LocalShard

# The range of all keys, and for every shard of this rank the source of its keys.
Keys = tuple[KeyRange, Sequence[KeySource]]


@dataclass(frozen=True)
class Ranking:
    """What a method ranks by.

    Attributes:
        order: which scores are pruned first.
        make_scores: a local step: the scores of every shard of this rank.
    """

    order: Order
    make_scores: Callable[[PruningCall], Sequence[ScoreSource]]


def rank(call: PruningCall, amount: Amount, ranking: Ranking) -> Decision:
    """Prune the elements of the lowest scores over all parameters and ranks, within the bounds.

    Args:
        call: the parameters.
        amount: how many elements, as a fraction of what is unpruned or a count.
        ranking: :data:`BY_MAGNITUDE`, :data:`BY_SIGNED_SCORE`, or what :func:`by_function` returns.

    Raises:
        ValueError: a live score is NaN, or, with a normalisation, infinite; or the bounds or the
            budget do not allow for the amount; on every rank.
        NotImplementedError: scores of a dtype that has no order; on every rank.

    Cost: one read of the scores, two more with a normalisation, and one write of the masks when
    the decision is finished.
    """
    sources: Sequence[ScoreSource] | None = None
    # With a budget, parameters are not compared, or by scores that a factor does not change.
    if call.normalize is not None and call.division is None:
        scored = call.communicator.run(lambda: _scored(call, ranking.make_scores(call)))
        sources = normalized(scored, call.normalize, call.num_live, call.communicator)

    def make_keys() -> Keys:
        scores = ranking.make_scores(call) if sources is None else sources
        dtype = functools.reduce(torch.promote_types, [source.dtype for source in scores])
        if dtype.is_complex:
            raise NotImplementedError(
                f"scores of dtype {dtype} cannot be ranked over several parameters; "
                "expected real ones. Pass importance_scores=|w| of every parameter."
            )
        keys = key_range(dtype, ranking.order)
        return keys, [ScoreKeys(source, keys) for source in scores]

    return _rank_keys(call, amount, make_keys, is_by_magnitude=ranking is BY_MAGNITUDE)


def rank_at_random(call: PruningCall, amount: Amount) -> Decision:
    """:func:`rank` by random keys that are the same on any sharding of the parameters.

    Every rank draws one number from torch's default CPU generator; the leader's is the seed of all.

    Raises:
        ValueError: a normalisation, which random keys cannot have; and as :func:`rank`.
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

    return _rank_keys(call, amount, make_keys, is_by_magnitude=False)


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


def candidates_of(shards: Sequence[LocalShard], sources: Sequence[KeySource]) -> list[Candidates]:
    """What selection sees of this rank's shards: the elements that their masks leave compete."""
    return [
        Candidates(
            source,
            None if shard.mask is None else shard.flat(shard.mask),
            shard.index,
            shard.counted,
            shard.values.numel(),
            shard.numel,
            shard.values.device,
        )
        for shard, source in zip(shards, sources, strict=True)
    ]


def _rank_keys(
    call: PruningCall, amount: Amount, make_keys: Callable[[], Keys], *, is_by_magnitude: bool
) -> Decision:
    """:func:`rank`, by keys. ``make_keys`` is a local step."""

    def prepare() -> _Prepared:
        keys, sources = make_keys()
        parts = candidates_of(call.shards, sources)
        # All memory of the result is taken before anything is ranked.
        masks = [
            shard.new_mask(dtype)
            for shard, dtype in zip(call.shards, call.mask_dtypes, strict=True)
        ]
        flat = [shard.flat(mask) for shard, mask in zip(call.shards, masks, strict=True)]
        return _Prepared(keys, parts, masks, flat)

    prepared = call.communicator.run(
        prepare, lambda made: [("dtype of the scores", str(made.keys.value_dtype))]
    )
    keys, parts, flat = prepared.keys, prepared.parts, prepared.flat_masks
    k = None if not call.has_amount else checked_count(amount, sum(call.num_live))
    k, bounds, counts = divide(call, k, parts, keys)
    names = [shard.name for shard in call.shards]
    selection: Selection | None
    if bounds is None:
        selection = select_lowest(
            parts, names, call.num_live, k, keys, call.communicator, refuse_nan=True, drafts=flat
        )
        cuts = [PartCut(position, selection.cut) for position in range(len(parts))]
    else:
        limits = limits_for(k, bounds, [shard.numel for shard in call.shards], call.num_live)
        cuts, selection = select_within(
            parts, names, call.num_live, k, keys, call.communicator, limits
        )
    drafted = None if selection is None else selection.drafted

    def finish() -> LocalMasks:
        return LocalMasks(prepared.masks, write_masks(parts, cuts, flat, drafted))

    is_plain = not call.is_limited and call.normalize is None
    decision = Decision(
        finish,
        bound_of=[cut.bound for cut in cuts] if counts is None else bounds_met(call, counts),
        wanted=None if counts is None else counts.wanted,
        is_by_magnitude=is_by_magnitude
        and is_plain
        and not any(scores is not None for scores in call.scores),
    )
    if keys is RANDOM_KEYS or selection is None or not k:
        return decision
    return replace(
        decision,
        threshold=keys.score_of(selection.cut.threshold),
        num_ties=selection.num_ties,
        num_ties_pruned=selection.num_ties_pruned,
    )


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
            sources.append(FactorScores(shard, given, are_signed=are_signed))
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


BY_MAGNITUDE = Ranking(Order.MAGNITUDE, _magnitudes)
BY_SIGNED_SCORE = Ranking(Order.ASCENDING, _signed_scores)


def by_function(score: Callable[[Tensor], Tensor]) -> Ranking:
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

    return Ranking(Order.ASCENDING, make_scores)


def zero_lowest(mask: Tensor, scores: Tensor, k: int, order: Order) -> None:
    """Zero, in place, the mask of the ``k`` first elements of one whole tensor.

    Args:
        mask: any dtype, contiguous, shape of ``scores``.
        scores: any shape; NaN rank last, as in torch.topk.
        k: 0 <= k <= scores.numel().
        order: which elements come first; equal scores go by row-major index.
    """
    flat = scores.detach().reshape(-1)
    if flat.is_complex():
        flat = flat.abs()
    keys = key_range(flat.dtype, order)
    part = Candidates(
        ScoreKeys(TensorScores(flat), keys),
        None,
        index_map(flat.shape, dim_coordinates(flat.shape, ()), [0]),
        range(flat.numel()),
        flat.numel(),
        flat.numel(),
        flat.device,
    )
    selection = select_lowest(
        [part], ["scores"], [flat.numel()], k, keys, Communicator(()), refuse_nan=False
    )
    write_keep(part, 0, selection.cut, mask.view(-1), mask.view(-1))


@dataclass(frozen=True)
class _Prepared:
    """What a ranking works on: the keys of this rank's elements, and the masks to write."""

    keys: KeyRange
    parts: list[Candidates]
    masks: list[Tensor]
    flat_masks: list[Tensor]
