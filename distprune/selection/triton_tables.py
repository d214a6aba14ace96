"""Which parameters Triton's kernels take, and the tables that tell them where tiles are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from distprune.base.memory import INTEGERS, Array
from distprune.selection.candidates import Candidates, Cut
from distprune.selection.keys import RANDOM_KEYS, KeyRange, RandomKeys, ScoreKeys

# Elements that a program reads at a time; tests make it smaller.
BLOCK = 256
# A tile has at most so many blocks, which 16 bits count; few enough for about this many tiles.
_LARGEST_TILE, _NUM_TILES = 1 << 13, 1 << 12
# Addresses that are multiples of this let a thread read several elements at a time.
_ALIGNMENT = 16
# Columns of a tile, as in triton_source.py.
SCORES, LIVE, OUT, LENGTH, FIRST, PLACE, CAPACITY, WIDTH = range(8)
THRESHOLD, END = 4, 5


@dataclass(frozen=True)
class Kind:
    """What the tiles of one launch have in common.

    Attributes:
        device: of the elements.
        keys: the range of the keys.
        scores: dtype of the scores; None: keys are random.
        seed: of random keys.
        masks: dtype of the mask in force and of the new one.
        has_live: whether there is a mask in force.
        is_aligned: whether all addresses are multiples of 16 bytes.
    """

    device: torch.device
    keys: KeyRange
    scores: torch.dtype | None
    seed: int
    masks: torch.dtype
    has_live: bool
    is_aligned: bool


def takes(part: Candidates, out: Tensor | None) -> bool:
    """Whether the kernels can read the keys and masks of a part, and write its mask."""
    found = part.__dict__.get("are_keys_taken")  # a part is asked for in every pass
    if found is None:
        found = part.__dict__["are_keys_taken"] = _takes_keys(part)
    live = part.live
    return (
        found
        and (live is None or _takes_mask(live))
        and (out is None or _takes_mask(out))
        and (live is None or out is None or live.dtype is out.dtype)
    )


def _takes_keys(part: Candidates) -> bool:
    keys = part.keys
    if isinstance(keys, RandomKeys):
        return keys.index.start is not None
    if not isinstance(keys, ScoreKeys) or not keys.common.is_float:
        return False
    dtypes = keys.scores.dtype, keys.common.value_dtype
    return dtypes[0] is dtypes[1] or dtypes == (torch.bfloat16, torch.float32)


def _takes_mask(mask: Tensor) -> bool:
    return mask.itemsize in INTEGERS and not mask.dtype.is_complex and mask.is_contiguous()


def is_in_memory(part: Candidates) -> bool:
    """Whether nothing has to be computed before keys can be read."""
    return isinstance(part.keys, RandomKeys) or (
        isinstance(part.keys, ScoreKeys) and part.keys.scores.is_in_memory
    )


@dataclass(frozen=True)
class Piece:
    """A run of one part's elements, and the memory that is visited.

    Attributes:
        number: of the piece, in the list that results are returned in.
        position: of the part.
        span: flat positions.
        part: whose elements they are.
        scores: of the span, which the addresses are of; None: keys are random.
        out: the new mask of the whole part; None: none is written.
        kind: what the piece has in common with those of one launch.
        addresses: of the first score, or its global index if keys are random; of the mask in force
            and the new one, 0 if there is none.
        steps: how far each address moves per element.
    """

    number: int
    position: int
    span: range
    part: Candidates
    scores: Tensor | None
    out: Tensor | None
    kind: Kind
    addresses: tuple[int, int, int]
    steps: tuple[int, int, int]

    @classmethod
    def of(
        cls, number: int, position: int, span: range, part: Candidates, out: Tensor | None
    ) -> Piece:
        """Computes the scores, if they are not in memory."""
        keys, live, first = part.keys, part.live, span.start
        scores, seed, common, step = None, 0, RANDOM_KEYS, 1
        if isinstance(keys, ScoreKeys):
            scores = keys.scores.load(first, span.stop).contiguous()
            start, step, common = scores.data_ptr(), scores.itemsize, keys.common
        else:
            assert isinstance(keys, RandomKeys) and keys.index.start is not None
            start, seed = keys.index.start + keys.offset + first, keys.seed
        live_step = 0 if live is None else live.itemsize
        out_step = 0 if out is None else out.itemsize
        live_at = 0 if live is None else live.data_ptr() + first * live_step
        out_at = 0 if out is None else out.data_ptr() + first * out_step
        mask = out if live is None else live
        kind = Kind(
            part.device,
            common,
            None if scores is None else scores.dtype,
            seed,
            torch.bool if mask is None else mask.dtype,
            live is not None,
            ((0 if scores is None else start) | live_at | out_at) % _ALIGNMENT == 0,
        )
        at, steps = (start, live_at, out_at), (step, live_step, out_step)
        return cls(number, position, span, part, scores, out, kind, at, steps)


@dataclass(frozen=True)
class Tiles:
    """The tiles of some pieces.

    Attributes:
        table: int64 [tiles, WIDTH], the first four columns filled.
        piece: int64 [tiles], which of the pieces a tile belongs to ...
        first: ... and the position in the piece of its first element.
        numbers: int64 [pieces], how many tiles a piece has.
    """

    table: Array
    piece: Array
    first: Array
    numbers: Array

    @property
    def lengths(self) -> Array:
        lengths: Array = self.table[:, LENGTH]
        return lengths

    def sums(self, counts: Array) -> Array:
        """Of each piece, the sums over its tiles: int64 [pieces, n] of counts [tiles, n]."""
        upto = np.concatenate([np.zeros((1, counts.shape[1]), np.int64), counts.cumsum(axis=0)])
        ends = np.cumsum(self.numbers)
        sums: Array = upto[ends] - upto[ends - self.numbers]
        return sums


def tiles_of(pieces: Sequence[Piece]) -> Tiles:
    """Cut pieces of one kind into tiles, in order."""
    sizes = np.array([len(piece.span) for piece in pieces], dtype=np.int64)
    num_blocks = min(_LARGEST_TILE, max(1, int(sizes.sum()) // (BLOCK * _NUM_TILES)))
    size = BLOCK * num_blocks
    numbers = -(-sizes // size)
    piece, number = numbered(numbers)
    first = number * size
    addresses = np.array([piece.addresses for piece in pieces], dtype=np.int64).reshape(-1, 3)
    steps = np.array([piece.steps for piece in pieces], dtype=np.int64).reshape(-1, 3)
    table = np.zeros((len(piece), WIDTH), dtype=np.int64)
    table[:, [SCORES, LIVE, OUT]] = addresses[piece] + steps[piece] * first[:, None]
    table[:, LENGTH] = np.minimum(size, sizes[piece] - first)
    return Tiles(table, piece, first, numbers)


def end_of_ties(part: Candidates, position: int, span: range, cut: Cut) -> int | None:
    """In front of which position of a span elements at the threshold are pruned.

    Returns:
        None if it has no such position: memory that is not row-major.
    """
    if position != cut.parameter:
        return len(span) if position < cut.parameter else 0
    if cut.index <= 0:
        return 0
    if not part.index.is_ascending:
        return None
    return min(max(part.index.position_of(cut.index) - span.start, 0), len(span))


def numbered(counts: Array) -> tuple[Array, Array]:
    """Of rows of which each owner has some: the owner of each, and its number among the owner's.

    Args:
        counts: int64 [owners], how many rows each has.
    """
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
