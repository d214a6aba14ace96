"""Ranking by a score over all parameters and ranks: the decision of every method that has one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from distprune.base.amount import Amount, checked_count
from distprune.base.blocks import Blocks
from distprune.base.memory import SERIAL, Scratch, draw_seed, takes_numpy
from distprune.call.request import Decision, LocalMasks, PruningCall
from distprune.ranking.chunks import Chunk, Part, operations_on
from distprune.ranking.in_blocks import lowest_of, prune_in_blocks
from distprune.ranking.passes import Common
from distprune.ranking.ranking import Ranking, cut_within, limits_for
from distprune.ranking.scores import (
    RANDOM_KEYS,
    ComputedScores,
    FactorScores,
    KeyRange,
    Order,
    ScoreSource,
    TensorScores,
    key_range,
    random_keys,
    to_keys,
)
from distprune.ranking.sums import Scored, normalized
from distprune.ranks.collectives import Communicator
from distprune.shards.factored import FactoredScores
from distprune.shards.geometry import index_map
from distprune.shards.shard import Shard

# The range of all keys, and for every shard of this rank the source of its scores.
Keys = tuple[KeyRange, Sequence[ScoreSource]]
# A local step that makes them.
MakeKeys = Callable[[], Keys]


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
        """Measure what the scores are divided by, if they are. Collective; the rest is local.

        Raises:
            ValueError: a live score is infinite, with a normalisation.
            NotImplementedError: scores that are no floating-point numbers, with a normalisation.
                On every rank.
        """
        sources: Sequence[ScoreSource] | None = None
        # Where parameters are segments of their own, a factor changes nothing.
        if call.normalize is not None and call.segments.wanted is None:
            scored = call.communicator.run(
                lambda: list(map(Scored, call.shards, self.make_scores(call)))
            )
            sources, _ = normalized(scored, call.normalize, call.num_live, call.communicator)
        return lambda: score_keys(
            self.make_scores(call) if sources is None else sources, self.order
        )


def score_keys(scores: Sequence[ScoreSource], order: Order) -> Keys:
    """The keys of scores that are ranked together: those of the dtype that holds all of them."""
    dtype = functools.reduce(torch.promote_types, [source.dtype for source in scores])
    if dtype.is_complex:
        raise NotImplementedError(
            f"scores of dtype {dtype} cannot be ranked over several parameters; "
            "expected real ones. Pass importance_scores=|w| of every parameter."
        )
    return key_range(dtype, order), scores


class AtRandom:
    """A ranking by random keys that are the same on any sharding of the parameters.

    Every rank draws one number from torch's default CPU generator; the leader's is the seed of all.
    """

    def prepare(self, call: PruningCall) -> MakeKeys:
        """Agree on the seed. Collective; the rest is local.

        Raises:
            ValueError: a normalisation, which random keys cannot have.
        """
        if call.normalize is not None:
            raise ValueError(
                f"normalize={call.normalize!r} of random scores has no meaning; expected None."
            )
        seed = agree_on_seed(call.communicator)
        return lambda: random_keys(call.shards, seed)


def agree_on_seed(communicator: Communicator) -> int:
    """A number that ranks draw from torch's default CPU generator: the leader's. Collective."""
    return int(communicator.leader_of(1, draw_seed)[0])


def scores_or_values(shards: Sequence[Shard], *, are_signed: bool) -> list[ScoreSource]:
    """The given scores of every shard of this rank, or its values.

    Args:
        are_signed: whether the order of signed scores matters, or that of |score| only.
    """
    sources: list[ScoreSource] = []
    for shard in shards:
        if isinstance(shard.scores, FactoredScores):
            sources.append(FactorScores.of_shard(shard, shard.scores, are_signed=are_signed))
        else:
            flat = shard.flat_values if shard.scores is None else shard.flat(shard.scores)
            sources.append(TensorScores(flat))
    return sources


def _magnitudes(call: PruningCall) -> list[ScoreSource]:
    return scores_or_values(call.shards, are_signed=False)


def _signed_scores(call: PruningCall) -> list[ScoreSource]:
    for shard in call.shards:
        if shard.scores is None and shard.values.numel():
            raise ValueError(
                f"{shard.name} has no importance_scores, and the lowest signed values of a weight "
                "are not its least important ones; expected scores of every parameter, or "
                "L1Unstructured to rank by magnitude."
            )
    return scores_or_values(call.shards, are_signed=True)


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


def rank(call: PruningCall, amount: Amount, ranking: ByScore | AtRandom) -> Decision:
    """Prune the elements of the lowest scores over all parameters and ranks, within the bounds.

    Args:
        call: the parameters.
        amount: how many elements, as a fraction of what is unpruned or a count.
        ranking: what is ranked.

    Raises:
        ValueError: a live score is NaN, or, with a normalisation, infinite; or the bounds or the
            budget do not allow for the amount; on every rank.
        NotImplementedError: scores of a dtype that has no order; on every rank.

    Cost: one read of the scores, two more with a normalisation, and one write of the masks when
    the decision is finished.
    """
    make_keys = ranking.prepare(call)

    def prepare() -> tuple[Keys, list[Tensor], list[Tensor]]:
        keys = make_keys()
        # All memory of the result is taken before anything is ranked.
        masks = [
            shard.new_mask(dtype)
            for shard, dtype in zip(call.shards, call.mask_dtypes, strict=True)
        ]
        flat = [shard.flat(mask) for shard, mask in zip(call.shards, masks, strict=True)]
        return keys, masks, flat

    keys, masks, flat = call.communicator.run(
        prepare, lambda made: [("dtype of the scores", str(made[0][0].value_dtype))]
    )
    ranked = Ranking(call.shards, keys, call.num_live, call.communicator, flat)
    bound_of: list[str | None] = [None] * len(call.shards)
    if call.segments.blocks is not None:
        num_pruned = prune_in_blocks(ranked, call.segments.blocks)
        return Decision(lambda: LocalMasks(masks, num_pruned), bound_of=bound_of)
    common: Common | None = None
    if call.segments.counts is not None:
        # What is pruned already counts, and stays.
        cuts = ranked.cut(
            range(len(masks)),
            [
                max(0, count + live - shard.numel)
                for shard, count, live in zip(
                    call.shards, call.segments.counts, call.num_live, strict=True
                )
            ],
        )
    else:
        k, bounds = checked_count(amount, sum(call.num_live)), call.segments.bounds
        if bounds is None:
            cuts = ranked.cut([0] * len(masks), [k])
            common = cuts.common
        else:
            limits = limits_for(k, bounds, [shard.numel for shard in call.shards], call.num_live)
            cuts, common, bound_of = cut_within(ranked, k, limits)
    decision = Decision(lambda: LocalMasks(masks, ranked.write(cuts)), bound_of=bound_of)
    if common is not None and ranked.keys is not RANDOM_KEYS:
        decision.threshold = ranked.keys.score_of(common.threshold)
        decision.num_ties, decision.num_ties_pruned = common[1:]
    return decision


def without_lowest(
    t: Tensor,
    default_mask: Tensor,
    amount: Amount,
    order: Order,
    score: Callable[[Tensor], Tensor] = lambda t: t,
) -> Tensor:
    """A copy of a mask without the elements that come first, if any; then ``t`` is scored."""
    k = checked_count(amount, t.nelement())
    mask = default_mask.clone(memory_format=torch.contiguous_format)
    if k:
        zero_lowest(mask, score(t), k, order)
    return mask


def zero_lowest(mask: Tensor, scores: Tensor, k: int, order: Order) -> None:
    """Zero, in place, the mask of the ``k`` first elements of one whole tensor.

    Args:
        mask: any dtype, contiguous, shape of ``scores``.
        scores: any shape; NaN rank last, as in torch.topk.
        k: 0 <= k <= scores.numel().
        order: which elements come first; equal scores go by row-major index.
    """
    flat, size = scores.detach().reshape(-1), scores.numel()
    if flat.is_complex():
        flat = flat.abs()
    keys = key_range(flat.dtype, order)
    if size <= SERIAL and takes_numpy(flat.device):  # a row by itself
        lowest = lowest_of(Blocks(size, 1, 1, k), to_keys(flat, keys)[0].numpy())
        mask.view(-1)[torch.from_numpy(lowest)] = 0
        return
    part = Part("scores", size, index_map(flat.shape, [range(size)], [0]), range(size))
    alone = Ranking(
        [part], (keys, [TensorScores(flat)]), [size], Communicator(()), refuse_nan=False
    )
    stay = alone.kept(Chunk([(0, 0, size)], True), alone.cut([0], [k]), Scratch())
    operations_on(flat.device).store(mask.view(-1), mask.view(-1), stay)
