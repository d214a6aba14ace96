"""Ranking by a score over all parameters and ranks: the decision of every method that has one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from distprune.base.amount import Amount, checked_count
from distprune.base.blocks import Blocks
from distprune.base.memory import SERIAL, Scratch, draw_seed, takes_numpy
from distprune.call.request import Decision, PruningCall
from distprune.ranking.chunks import Chunk, Part, operations_on
from distprune.ranking.in_blocks import lowest_of, prune_in_blocks
from distprune.ranking.ranking import Ranking, cut_within, limits_for
from distprune.ranking.scores import (
    FactorScores,
    KeyRange,
    ScaledScores,
    ScoreSource,
    key_range,
    random_keys,
    to_keys,
)
from distprune.ranking.sums import Scored, divisors_of
from distprune.ranks.collectives import Communicator
from distprune.shards.factored import FactoredScores
from distprune.shards.geometry import index_map

# A local step that makes the scores of every shard of this rank.
MakeScores = Callable[[PruningCall], Sequence[ScoreSource]]
# The range of all keys, and these scores.
Keys = tuple[KeyRange, Sequence[ScoreSource]]


def scores_or_values(call: PruningCall, *, are_signed: bool) -> list[ScoreSource]:
    """The given scores of every shard of this rank, or its values.

    Args:
        are_signed: whether the order of signed scores matters, or that of |score| only.
    """
    return [
        FactorScores.of_shard(shard, shard.scores, are_signed=are_signed)
        if type(shard.scores) is FactoredScores
        else ScoreSource(shard.flat_values if shard.scores is None else shard.flat(shard.scores))
        for shard in call.shards
    ]


def given_scores(call: PruningCall) -> list[ScoreSource]:
    """The given scores, signed; ValueError for a parameter without."""
    for shard in call.shards:
        if shard.scores is None and shard.values.numel():
            raise ValueError(
                f"{shard.name} has no importance_scores, and the lowest signed values of a weight "
                "are not its least important ones; expected scores of every parameter, or "
                "L1Unstructured to rank by magnitude."
            )
    return scores_or_values(call, are_signed=True)


def computed_scores(call: PruningCall, score: Callable[[Tensor], Tensor]) -> list[ScoreSource]:
    """A user's elementwise scores.

    Args:
        score: from values (or importance scores), 1-d, to scores of the same shape.
    """
    sources: list[ScoreSource] = []
    for position, shard in enumerate(call.shards):
        flat = shard.flat(call.score_or_value(position))
        probe = score(flat[:1])
        if probe.shape != flat[:1].shape:
            raise ValueError(
                f"compute_scores returned shape {tuple(probe.shape)} for a chunk of shape "
                f"{tuple(flat[:1].shape)}; expected one score per element."
            )
        sources.append(ScoreSource(flat, score, probe.dtype))
    return sources


def _score_keys(scores: Sequence[ScoreSource], *, signed: bool) -> Keys:
    """The keys of scores that are ranked together: those of the dtype that holds all of them."""
    dtype = functools.reduce(torch.promote_types, [source.dtype for source in scores])
    if dtype.is_complex:
        raise NotImplementedError(
            f"scores of dtype {dtype} cannot be ranked over several parameters; "
            "expected real ones. Pass importance_scores=|w| of every parameter."
        )
    return key_range(dtype, signed=signed), scores


def rank(
    call: PruningCall,
    amount: Amount,
    make_scores: MakeScores | None = None,
    *,
    signed: bool = False,
    is_random: bool = False,
) -> Decision:
    """Prune the elements of the lowest scores over all parameters and ranks, within the bounds.

    Args:
        call: the parameters.
        amount: how many elements, as a fraction of what is unpruned or a count.
        make_scores: None: of the given scores, or the values.
        signed: whether the lowest scores are pruned; else those of the smallest |score|.
        is_random: rank by random keys instead, which are the same on any sharding. Every rank
            draws a number from torch's default CPU generator, and the leader's is the seed.

    Raises:
        ValueError: a live score is NaN, or, with a normalisation, infinite or random; or the bounds
            or the budget do not allow for the amount; on every rank.
        NotImplementedError: scores of a dtype that has no order, or, with a normalisation, that are
            no floating-point numbers; on every rank.

    Cost: one read of the scores, two more with a normalisation, and one write of the masks when
    the decision is finished.
    """
    shards, num_live, communicator = call.shards, call.num_live, call.communicator
    sources: Sequence[ScoreSource] | None = None
    make, seed = make_scores or functools.partial(scores_or_values, are_signed=signed), 0
    if is_random:
        if call.normalize is not None:
            raise ValueError(f"normalize={call.normalize!r} of random scores; expected None.")
        seed = int(communicator.leader_of(1, draw_seed)[0])
    elif call.normalize is not None and call.segments.wanted is None:
        # Where parameters are segments of their own, a factor changes nothing.
        scored = communicator.run(lambda: list(map(Scored, shards, make(call))))
        divisors = divisors_of(scored, call.normalize, num_live, communicator)
        sources = list(map(ScaledScores, (each.scores for each in scored), divisors))

    def prepare() -> tuple[Keys, list[Tensor]]:
        own = make(call) if sources is None and not is_random else sources
        keys = random_keys(shards, seed) if own is None else _score_keys(own, signed=signed)
        # All memory of the result is taken before anything is ranked.
        several = zip(shards, call.mask_dtypes, strict=True)
        return keys, [shard.new_mask(dtype) for shard, dtype in several]

    keys, masks = communicator.run(
        prepare, lambda made: [("dtype of the scores", str(made[0][0].value_dtype))]
    )
    flat = [shard.flat(mask) for shard, mask in zip(shards, masks, strict=True)]
    ranked = Ranking(shards, keys, num_live, communicator, flat)
    bound_of: list[str | None] = [None] * len(shards)
    if call.segments.blocks is not None:
        num_pruned = prune_in_blocks(ranked, call.segments.blocks)
        return Decision(lambda: (masks, num_pruned, ()), bound_of=bound_of)
    if call.segments.counts is not None:
        each = zip(shards, call.segments.counts, num_live, strict=True)
        # What is pruned already counts, and stays.
        counts = [max(0, count + live - shard.numel) for shard, count, live in each]
        cuts, common = ranked.cut(range(len(masks)), counts), None
    else:
        k, bounds = checked_count(amount, sum(num_live)), call.segments.bounds
        if bounds is None:
            cuts = ranked.cut([0] * len(masks), [k])
            common = cuts.common
        else:
            limits = limits_for(k, bounds, [shard.numel for shard in shards], num_live)
            cuts, common, bound_of = cut_within(ranked, k, limits)
    decision = Decision(lambda: (masks, ranked.write(cuts), ()), bound_of=bound_of)
    if common is not None and not is_random:
        decision.threshold = ranked.keys.score_of(common[0])
        decision.num_ties, decision.num_ties_pruned = common[1:]
    return decision


def without_lowest(
    t: Tensor,
    default_mask: Tensor,
    amount: Amount,
    score: Callable[[Tensor], Tensor] = lambda t: t,
    *,
    signed: bool = False,
) -> Tensor:
    """A copy of a mask without the elements that come first, if any; then ``t`` is scored."""
    k = checked_count(amount, t.nelement())
    mask = default_mask.clone(memory_format=torch.contiguous_format)
    if k:
        zero_lowest(mask, score(t), k, signed=signed)
    return mask


def zero_lowest(mask: Tensor, scores: Tensor, k: int, *, signed: bool = False) -> None:
    """Zero, in place, the mask of the ``k`` first elements of one whole tensor.

    Args:
        mask: any dtype, contiguous, shape of ``scores``.
        scores: any shape; NaN rank last, as in torch.topk.
        k: 0 <= k <= scores.numel().
        signed: whether the lowest scores come first, or the smallest |score|; equal ones go by
            row-major index.
    """
    flat, size = scores.detach().reshape(-1), scores.numel()
    if flat.is_complex():
        flat = flat.abs()
    keys = key_range(flat.dtype, signed=signed)
    if size <= SERIAL and takes_numpy(flat.device):  # a row by itself
        lowest = lowest_of(Blocks(size, 1, 1, k), to_keys(flat, keys)[0].numpy())
        mask.view(-1)[torch.from_numpy(lowest)] = 0
        return
    part = Part("scores", size, index_map(flat.shape, [range(size)], [0]), range(size))
    alone = Ranking([part], (keys, [ScoreSource(flat)]), [size], Communicator(()), refuse_nan=False)
    stay = alone.kept(Chunk([(0, 0, size)], True), alone.cut([0], [k]), Scratch())
    operations_on(flat.device).store(mask.view(-1), mask.view(-1), stay)
