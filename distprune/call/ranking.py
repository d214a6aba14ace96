"""Unstructured masks: by rank over all parameters, element by element, or by a user's own code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from distprune._common.amount import Amount, checked_count
from distprune._common.collectives import Communicator
from distprune._common.hashing import draw_seed
from distprune._common.memory import INTEGERS
from distprune.call.context import Decision, LocalMasks, PruningCall
from distprune.selection.candidates import Candidates, KeySource, PartCut
from distprune.selection.cut import Selection, select_lowest
from distprune.selection.keys import (
    RANDOM_KEYS,
    ComputedKeys,
    KeyRange,
    Order,
    RandomKeys,
    TensorKeys,
    key_range,
)
from distprune.selection.passes import count_live, write_keep, write_masks
from distprune.selection.within_bounds import limits_for, select_within
from distprune.shards.checksum import checksums
from distprune.shards.geometry import dim_coordinates, index_map
from distprune.shards.reader import local_part, whole_checksum

ComputeMask = Callable[[Tensor, Tensor], Tensor]

_ELEMENTWISE_CHUNK = 1 << 20


def magnitude_decision(call: PruningCall, amount: Amount) -> Decision:
    """Prune the smallest |score| over all parameters and ranks."""
    decision = _ranked(call, amount, lambda: _tensor_keys(call))
    is_by_value = call.bounds is None and all(scores is None for scores in call.scores)
    return replace(decision, is_by_magnitude=is_by_value)


def random_decision(call: PruningCall, amount: Amount) -> Decision:
    """Prune at random, the same elements on any sharding of the parameters.

    Every rank draws one number from torch's default CPU generator; the leader's
    is the seed of all.
    """
    seed = int(call.communicator.leader_of(1, draw_seed)[0])

    def prepare() -> tuple[KeyRange, list[KeySource]]:
        sources: list[KeySource] = []
        offset = 0
        for shard in call.shards:
            sources.append(RandomKeys(seed, offset, shard.index, shard.values.device))
            offset += shard.numel
        return RANDOM_KEYS, sources

    return _ranked(call, amount, prepare)


def scored_decision(
    call: PruningCall, amount: Amount, score: Callable[[Tensor], Tensor]
) -> Decision:
    """Prune the smallest of a user's elementwise scores, signed, over all parameters and ranks."""

    def prepare() -> tuple[KeyRange, list[KeySource]]:
        dtype = None
        for which in range(len(call.shards)):
            flat = call.shards[which].flat(call.score_or_value(which))
            probe = score(flat[:1])
            if probe.shape != flat[:1].shape:
                raise ValueError(
                    f"compute_scores returned shape {tuple(probe.shape)} for a chunk of shape "
                    f"{tuple(flat[:1].shape)}; expected one score per element."
                )
            dtype = probe.dtype if dtype is None else torch.promote_types(dtype, probe.dtype)
        assert dtype is not None
        keys = key_range(dtype, Order.ASCENDING)
        return keys, [
            ComputedKeys(shard.flat(call.score_or_value(which)), score, keys)
            for which, shard in enumerate(call.shards)
        ]

    return _ranked(call, amount, prepare)


def elementwise_decision(call: PruningCall, compute_mask: ComputeMask) -> Decision:
    """Run a method whose mask is a function of each element alone, shard by shard."""

    def finish() -> LocalMasks:
        masks, num_pruned = [], []
        for which, shard in enumerate(call.shards):
            mask = call.start_mask(which)
            flat_mask, flat_scores = shard.flat(mask), shard.flat(call.score_or_value(which))
            before = count_live(flat_mask, shard.counted)
            for start in range(0, flat_mask.numel(), _ELEMENTWISE_CHUNK):
                chunk = flat_mask[start : start + _ELEMENTWISE_CHUNK]
                live = chunk == 1
                scores = flat_scores[start : start + _ELEMENTWISE_CHUNK][live]
                chunk[live] = compute_mask(scores, torch.ones_like(scores)).to(chunk.dtype)
            masks.append(mask)
            num_pruned.append(before - count_live(flat_mask, shard.counted))
        return LocalMasks(masks, num_pruned)

    return Decision(finish)


def whole_decision(call: PruningCall, compute_mask: ComputeMask, *, gather: bool) -> Decision:
    """Run a method that has to see all unpruned scores at once, as one process would.

    Args:
        call: with whole parameters only, unless ``gather``.
        compute_mask: gets the live scores of all parameters, 1-d, in the caller's
            order, row-major, and a mask of ones.
        gather: bring everything to every rank first.

    Raises:
        ValueError: the ranks came to different masks.

    Cost: memory for all scores, on every rank; with ``gather`` also 8 bytes of
    communication per element.
    """
    communicator = call.communicator
    scores = [
        _whole(call, which, shard.values if given is None else given, gather)
        for which, (shard, given) in enumerate(zip(call.shards, call.scores, strict=True))
    ]
    masks = [
        None if shard.mask is None else _whole(call, which, shard.mask, gather)
        for which, shard in enumerate(call.shards)
    ]

    def decide() -> list[Tensor]:
        live = [
            torch.ones(s.shape, dtype=torch.bool, device=s.device) if m is None else m == 1
            for s, m in zip(scores, masks, strict=True)
        ]
        competing = torch.cat([s[flags] for s, flags in zip(scores, live, strict=True)])
        chosen = compute_mask(competing, torch.ones_like(competing))
        if chosen.shape != competing.shape:
            raise ValueError(
                f"compute_mask returned shape {tuple(chosen.shape)} for scores of shape "
                f"{tuple(competing.shape)}; expected a mask of the same shape."
            )
        pieces = chosen.split([int(flags.sum()) for flags in live])
        return [_pruned(flags, piece) for flags, piece in zip(live, pieces, strict=True)]

    pruned: list[Tensor] = []

    def decide_and_digest() -> Tensor:
        pruned.extend(decide())
        digests = torch.tensor(checksums(pruned))
        return torch.cat([digests, ~digests])

    highest, lowest = communicator.reduce(2 * len(scores), decide_and_digest, "max").chunk(2)
    if not torch.equal(highest, ~lowest):
        name = call.shards[int((highest != ~lowest).nonzero()[0])].name
        raise ValueError(
            f"{name}: the ranks computed different masks. Expected a method that gives every "
            "rank the same mask for the same scores; one that draws random numbers needs the "
            "same seed on all ranks."
        )
    return Decision(lambda: _masks_without(call, pruned))


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
        TensorKeys(flat, keys),
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


def _tensor_keys(call: PruningCall) -> tuple[KeyRange, list[KeySource]]:
    dtype = call.score_dtype()
    if dtype.is_complex:
        raise NotImplementedError(
            f"scores of dtype {dtype} cannot be ranked over several parameters; "
            "expected real ones. Pass importance_scores=|w| of every parameter."
        )
    keys = key_range(dtype, Order.MAGNITUDE)
    return keys, [
        TensorKeys(shard.flat(call.score_or_value(which)), keys)
        for which, shard in enumerate(call.shards)
    ]


@dataclass(frozen=True)
class _Prepared:
    """What a ranking works on: the keys of this rank's elements, and the masks to write."""

    keys: KeyRange
    parts: list[Candidates]
    masks: list[Tensor]
    flat_masks: list[Tensor]


def _ranked(
    call: PruningCall, amount: Amount, prepare: Callable[[], tuple[KeyRange, Sequence[KeySource]]]
) -> Decision:
    """Rank by keys; ``prepare`` is a local step that makes them, for each parameter."""

    def prepare_parts() -> _Prepared:
        keys, sources = prepare()
        parts = [
            Candidates(
                source,
                None if shard.mask is None else shard.flat(shard.mask),
                shard.index,
                shard.counted,
                shard.values.numel(),
                shard.numel,
                shard.values.device,
            )
            for shard, source in zip(call.shards, sources, strict=True)
        ]
        # All memory of the result is taken before anything is ranked.
        masks = [
            shard.new_mask(dtype)
            for shard, dtype in zip(call.shards, call.mask_dtypes, strict=True)
        ]
        flat = [shard.flat(mask) for shard, mask in zip(call.shards, masks, strict=True)]
        return _Prepared(keys, parts, masks, flat)

    prepared = call.communicator.run(
        prepare_parts, lambda made: [("dtype of the scores", str(made.keys.value_dtype))]
    )
    keys, parts, flat = prepared.keys, prepared.parts, prepared.flat_masks
    k = checked_count(amount, sum(call.num_live))
    names = [shard.name for shard in call.shards]
    selection: Selection | None
    if call.bounds is None:
        selection = select_lowest(
            parts, names, call.num_live, k, keys, call.communicator, refuse_nan=True, drafts=flat
        )
        cuts = [PartCut(position, selection.cut) for position in range(len(parts))]
    else:
        limits = limits_for(k, call.bounds, [shard.numel for shard in call.shards], call.num_live)
        cuts, selection = select_within(
            parts, names, call.num_live, k, keys, call.communicator, limits
        )
    drafted = None if selection is None else selection.drafted

    def finish_masks() -> LocalMasks:
        return LocalMasks(prepared.masks, write_masks(parts, cuts, flat, drafted))

    held_at = [cut.bound for cut in cuts]
    if keys is RANDOM_KEYS or selection is None or not k:
        return Decision(finish_masks, held_at=held_at)
    return Decision(
        finish_masks,
        keys.score_of(selection.cut.threshold),
        selection.num_ties,
        selection.num_ties_pruned,
        held_at,
    )


def _whole(call: PruningCall, which: int, local: Tensor, gather: bool) -> Tensor:
    """A whole tensor, flat and row-major, from its parts on all ranks."""
    shard = call.shards[which]
    if not gather:
        return local.reshape(-1)
    integer = INTEGERS[local.itemsize]

    def spread() -> Tensor:
        bits = shard.flat(local).contiguous().view(integer)
        counted = torch.arange(shard.counted.start, shard.counted.stop, device=local.device)
        whole = torch.zeros(shard.numel, dtype=torch.int64, device=local.device)
        whole[shard.index(counted)] = bits[counted].long()
        return whole

    return call.communicator.reduce(shard.numel, spread).to(integer).view(local.dtype)


def _pruned(live: Tensor, keep: Tensor) -> Tensor:
    """bool, flat: the live elements that a mask over the live ones leaves out."""
    pruned = torch.zeros_like(live)
    pruned[live] = keep == 0
    return pruned


def _masks_without(call: PruningCall, pruned: Sequence[Tensor]) -> LocalMasks:
    masks, num_pruned = [], []
    for which, (shard, flags) in enumerate(zip(call.shards, pruned, strict=True)):
        mask = call.start_mask(which)
        local = shard.slice_of(flags.view(shard.shape))
        mask.masked_fill_(local, 0)
        masks.append(mask)
        counted = shard.flat(local)[shard.counted.start : shard.counted.stop]
        num_pruned.append(int(torch.count_nonzero(counted)))
    return LocalMasks(masks, num_pruned)


def given_decision(call: PruningCall, given: Tensor) -> Decision:
    """Prune one parameter where a mask is 0; values other than 0 and 1 are multiplied in."""
    shard = call.shards[0]

    def digest_of(part: Tensor) -> list[tuple[str, str]]:
        # Every rank slices its own copy of a whole mask: they have to be the same one.
        return [("checksum of the mask", whole_checksum(given != 0, shard))]

    part = call.communicator.run(lambda: local_part(shard.name, "mask", given, shard), digest_of)

    def finish() -> LocalMasks:
        mask = call.start_mask(0)
        flat = shard.flat(mask)
        before = count_live(flat, shard.counted)
        mask.mul_(part.to(mask.dtype))
        return LocalMasks([mask], [before - count_live(flat, shard.counted)])

    return Decision(finish)
