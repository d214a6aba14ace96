"""Gather sharded parameters whole on the first rank, in pieces of some megabytes."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from distprune._common.collectives import Communicator
from distprune._common.pruned_form import masked_product
from distprune.shards.shard import FlatShard, FoldedShard, LocalShard

_PIECE_BYTES = 8 * 2**20
# What the first rank does with a piece: the number of its first element, and its values, 1-d.
UsePiece = Callable[[int, Tensor], None]


class Gathering:
    """Hands the pieces of parameters to the first rank, which uses one while the next one comes.

    Args:
        communicator: the ranks; the first one gets the pieces.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._waiting: list[Callable[[], None]] = []

    def gather(self, shard: LocalShard, use: UsePiece) -> None:
        """Gather a parameter with zeros where it is pruned; collective.

        ``use`` is called on the first rank, at the latest by :meth:`finish`: row-major, in order.

        Raises:
            Exception: what ``use`` raised for an earlier piece, on every rank.

        Cost: an all-reduce of the parameter's bytes, 8 MB (or one index of dimension 0) at a time;
            nothing if every rank has the whole.
        """
        is_first = self._communicator.index == 0
        for rows in _pieces(shard):
            num_bytes = len(rows) * _row_bytes(shard)
            if _is_whole(shard):
                if is_first:
                    self._waiting.append(functools.partial(_use_own, use, shard, rows))
                continue
            step = functools.partial(self._part, shard, rows)
            words = self._communicator.reduce(-(-num_bytes // 8), step)
            if is_first:
                values = words.view(torch.uint8)[:num_bytes].view(shard.values.dtype)
                start = rows.start * _row_numel(shard)
                self._waiting.append(functools.partial(use, start, values))

    def finish(self) -> None:
        """Use the last pieces; collective.

        Raises:
            Exception: as :meth:`gather`.
        """
        self._communicator.run(self._use_waiting)

    def _use_waiting(self) -> None:
        for step in self._waiting:
            step()
        self._waiting.clear()

    def _part(self, shard: LocalShard, rows: range) -> Tensor:
        """This rank's elements of a piece, the others zero, as int64 words: a local step."""
        self._use_waiting()
        num_bytes = len(rows) * _row_bytes(shard)
        words = torch.zeros(-(-num_bytes // 8), dtype=torch.int64)
        if shard.replica == 0 and shard.values.numel():
            piece = words.view(torch.uint8)[:num_bytes].view(shard.values.dtype)
            _write_own(shard, rows, piece)
        return words


def _use_own(use: UsePiece, shard: LocalShard, rows: range) -> None:
    """Use a piece of a parameter that this rank has whole."""
    piece = torch.empty(len(rows) * _row_numel(shard), dtype=shard.values.dtype)
    _write_own(shard, rows, piece)
    use(rows.start * _row_numel(shard), piece)


def _is_whole(shard: LocalShard) -> bool:
    """Whether every rank has the whole; a fact that all ranks share.

    Not a matter of ``ranks``: under FSDP2 over tensor parallelism a norm is spread over each row of
    the mesh, so that the ranks of a shard differ.
    """
    if shard.ranks is None:
        return True
    return shard.placements is not None and all(p.is_replicate() for p in shard.placements)


def _pieces(shard: LocalShard) -> Iterator[range]:
    """Ranges of dimension 0."""
    if not shard.numel:
        return
    num_rows = shard.shape[0] if shard.shape else 1
    step = max(_PIECE_BYTES // _row_bytes(shard), 1)
    for start in range(0, num_rows, step):
        yield range(start, min(start + step, num_rows))


def _row_numel(shard: LocalShard) -> int:
    return math.prod(shard.shape[1:])


def _row_bytes(shard: LocalShard) -> int:
    return _row_numel(shard) * shard.values.itemsize


def _write_own(shard: LocalShard, rows: range, piece: Tensor) -> None:
    """Write this rank's part of some rows into the whole of them, 1-d."""
    if isinstance(shard, (FlatShard, FoldedShard)):
        _write_run(shard, rows.start * _row_numel(shard), piece)
        return
    own, *inner = shard.coordinates or [range(1)]
    first, last = max(rows.start, own.start), min(rows.stop, own.stop)
    if first >= last:
        return
    part = slice(first - own.start, last - own.start) if shard.shape else ...
    mask = None if shard.mask is None else shard.mask[part]
    target = piece.view(len(rows), *shard.shape[1:])[first - rows.start : last - rows.start]
    for dim, columns in enumerate(inner, 1):
        target = target.narrow(dim, columns.start, len(columns))
    target.copy_(_masked(shard.values[part], mask))


def _write_run(shard: LocalShard, start: int, piece: Tensor) -> None:
    """Write this rank's run of elements into a whole piece, 1-d, that begins at ``start``."""
    stop = start + piece.numel()
    if shard.index.start is not None:
        own = shard.index.start
        first, last = max(start, own), min(stop, own + shard.values.numel())
        if first < last:
            part = slice(first - own, last - own)
            mask = None if shard.mask is None else shard.mask[part]
            piece[first - start : last - start] = _masked(shard.values[part], mask)
        return
    # Not row-major in memory: channels_last, say; or apart from each other.
    indices = shard.index(torch.arange(shard.values.numel()))
    inside = (indices >= start) & (indices < stop)
    values = _masked(shard.values, shard.mask).cpu().view(-1)
    piece[indices[inside] - start] = values[inside]


def _masked(values: Tensor, mask: Tensor | None) -> Tensor:
    """What ``remove`` would leave: pruned elements are +0."""
    if mask is None:
        return values
    return masked_product(values, mask).masked_fill(mask == 0, 0)
