"""Weight files with zeros in their pruned elements: how ``prune`` and ``apply`` make them.

``verify`` goes through the same parts of a file, and compares them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from distprune.base import mask_bits
from distprune.base.float_formats import PLAIN_FLOATS
from distprune.base.memory import Array
from distprune.files.checkpoints.header import TensorEntry, WeightFile, read_header
from distprune.files.checkpoints.mask_files import MaskFile, read_keep
from distprune.files.disk.access import read_into, slabs, write_all
from distprune.files.errors import CheckpointError
from distprune.files.scoring import KeptValues

# By what is counted for the report, by position of a tensor.
Counts = defaultdict[str, Counter[int]]


class Piece(NamedTuple):
    """Consecutive elements of a tensor.

    Attributes:
        first: index of the first one.
        bits: as they are stored.
        keep: bool, which of them are kept; valid until the next piece.
    """

    first: int
    bits: Array
    keep: Array


# The elements of a tensor in their order, and which of them are kept; adds to the counts.
Pieces = Callable[[int, Counts], Iterator[Piece]]


def parts_of(
    file: WeightFile, positions: Mapping[str, int], pieces: Pieces, counts: Counts
) -> Iterator[range | tuple[int, Piece]]:
    """The parts of a weight file, in the order of its bytes.

    Args:
        file: of the source.
        positions: of the tensors that are rewritten, by name.
        pieces: which of their elements are kept.
        counts: gets how many elements of a tensor were pruned, and how many were zero before.

    Yields:
        Bytes that stay as they are, or the position of a tensor and a piece of it.
    """
    at = 0
    for entry in file.tensors:
        position = positions.get(entry.name)
        if position is None:
            continue
        if at < entry.start:
            yield range(at, entry.start)
        counts["pruned"][position] += 0
        for piece in pieces(position, counts):
            counts["pruned"][position] += len(piece.keep) - int(np.count_nonzero(piece.keep))
            num_zero = len(piece.bits) - int(np.count_nonzero(piece.bits << 1))
            if num_zero:
                counts["zero"][position] += num_zero
            yield position, piece
        at = entry.stop
    if at < file.size:
        yield range(at, file.size)


def masked_pieces(entries: Sequence[TensorEntry], masks: MaskFile) -> Pieces:
    """What existing masks keep of the tensors of a checkpoint.

    Args:
        entries: the tensors, by position.
        masks: one for each tensor.
    """

    def pieces(position: int, counts: Counts) -> Iterator[Piece]:
        entry = entries[position]
        form = PLAIN_FLOATS[entry.dtype]
        for run in slabs(entry.numel, form.num_bytes):
            first, last = run.start, run.stop
            raw = np.empty((last - first) * form.num_bytes, np.uint8)
            offset = entry.start + first * form.num_bytes
            read_into(entry.path, offset, raw.data)
            keep = read_keep(masks, entry.name, first, last)
            is_zeroed = ~keep & (form.magnitudes(raw) != 0)
            counts["zeroed"][position] += int(np.count_nonzero(is_zeroed))
            yield Piece(first, raw.view(form.bits), keep)

    return pieces


def entries_of(values: KeptValues, entries: Collection[TensorEntry]) -> dict[str, TensorEntry]:
    """By name of a tensor, the place of its kept values.

    Raises:
        CheckpointError: a tensor is missing, or has another dtype or shape than in the source.
    """
    assert values.folder is not None
    files = [read_header(path) for path in sorted(values.folder.glob("*.safetensors"))]
    found = {entry.name: entry for file in files for entry in file.tensors}
    for entry in entries:
        if entry.name in values.names:
            own = found.get(entry.name)
            if own is None or (own.dtype, own.shape) != (entry.dtype, entry.shape):
                has = "is missing" if own is None else f"is {own.dtype} {list(own.shape)}"
                raise CheckpointError(
                    f"{entry.name} {has} in {values.folder}; expected {entry.dtype} "
                    f"{list(entry.shape)}, as in the source."
                )
    return {name: own for name, own in found.items() if name in values.names}


class MaskWriter:
    """Appends the bits of masks to a file; each mask begins with a byte of its own."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._rest = np.empty(0, dtype=bool)  # less than a byte

    def add(self, keep: Array, *, is_last: bool) -> None:
        """Append a piece of a mask; ``is_last``: the mask ends with it."""
        keep = np.concatenate([self._rest, keep]) if len(self._rest) else keep
        num_whole = len(keep) if is_last else len(keep) - len(keep) % 8
        self._rest = keep[num_whole:].copy()
        write_all(self._descriptor, mask_bits.pack(keep[:num_whole]).data)
