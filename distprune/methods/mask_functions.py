"""Decisions of methods that compute a mask, instead of ranking by a score."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from distprune._common.memory import INTEGERS
from distprune.call.request import Decision, PruningCall
from distprune.shards.checksum import checksums
from distprune.shards.reader import local_part, whole_checksum

ComputeMask = Callable[[Tensor, Tensor], Tensor]

_ELEMENTWISE_CHUNK = 1 << 20


def elementwise_decision(call: PruningCall, compute_mask: ComputeMask) -> Decision:
    """Run a method whose mask is a function of each element alone, shard by shard."""

    def prune(position: int, mask: Tensor) -> None:
        shard = call.shards[position]
        flat_mask, flat_scores = shard.flat(mask), shard.flat(call.score_or_value(position))
        for start in range(0, flat_mask.numel(), _ELEMENTWISE_CHUNK):
            chunk = flat_mask[start : start + _ELEMENTWISE_CHUNK]
            live = chunk == 1
            scores = flat_scores[start : start + _ELEMENTWISE_CHUNK][live]
            chunk[live] = compute_mask(scores, torch.ones_like(scores)).to(chunk.dtype)

    return Decision(lambda: call.changed_masks(prune))


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
        _whole(call, position, call.score_or_value(position), gather)
        for position in range(len(call.shards))
    ]
    masks = [
        None if shard.mask is None else _whole(call, position, shard.mask, gather)
        for position, shard in enumerate(call.shards)
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
        pieces = torch.split(chosen, [int(flags.sum()) for flags in live])
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

    def prune(position: int, mask: Tensor) -> None:
        shard = call.shards[position]
        mask.masked_fill_(shard.slice_of(pruned[position].view(shard.shape)), 0)

    return Decision(lambda: call.changed_masks(prune))


def fixed_mask_decision(call: PruningCall, whole: Tensor) -> Decision:
    """Prune one parameter where a mask is 0; values other than 0 and 1 are multiplied in."""
    shard = call.shards[0]

    def digest_of(part: Tensor) -> list[tuple[str, str]]:
        # Every rank slices its own copy of a whole mask: they have to be the same one.
        return [("checksum of the mask", whole_checksum(whole != 0, shard))]

    part = call.communicator.run(lambda: local_part(shard.name, "mask", whole, shard), digest_of)

    def prune(position: int, mask: Tensor) -> None:
        mask.mul_(part.to(mask.dtype))

    return Decision(lambda: call.changed_masks(prune))


def _whole(call: PruningCall, position: int, local: Tensor, gather: bool) -> Tensor:
    """A whole tensor, flat and row-major, from its parts on all ranks."""
    shard = call.shards[position]
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
