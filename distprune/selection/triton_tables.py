"""Which parameters Triton's kernels take, and the tables that tell them where tiles are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from distprune._common.memory import INTEGERS, Array
from distprune.selection.candidates import Candidates, Cut
from distprune.selection.keys import RANDOM_KEYS, KeyRange, RandomKeys, ScoreKeys

# Elements that a program reads at a time; tests make it smaller.
BLOCK = 2048
# A tile has at most so many blocks, which 16 bits count; few enough for about this many tiles.
_LARGEST_TILE, _NUM_TILES = 1 << 12, 1 << 13
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
    keys = part.keys
    if isinstance(keys, RandomKeys):
        if keys.index.start is None:
            return False
    elif isinstance(keys, ScoreKeys):
        widened = (torch.bfloat16, torch.float32)
        is_same = keys.scores.dtype == keys.common.value_dtype
        if not (is_same or (keys.scores.dtype, keys.common.value_dtype) == widened):
            return False
        if not keys.common.is_float:
            return False
    else:
        return False
    masks = [mask for mask in (part.live, out) if mask is not None]
    return (
        len({mask.dtype for mask in masks}) <= 1
        and all(mask.itemsize in INTEGERS and not mask.dtype.is_complex for mask in masks)
        and all(mask.is_contiguous() for mask in masks)
    )


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
        scores: of the span; None: keys are random.
        live, out: masks of the whole part.
    """

    number: int
    position: int
    span: range
    part: Candidates
    scores: Tensor | None
    live: Tensor | None
    out: Tensor | None

    @classmethod
    def of(
        cls, number: int, position: int, span: range, part: Candidates, out: Tensor | None
    ) -> Piece:
        """Computes the scores, if they are not in memory."""
        scores = None
        if isinstance(part.keys, ScoreKeys):
            scores = part.keys.scores.load(span.start, span.stop).contiguous()
        return cls(number, position, span, part, scores, part.live, out)

    def kind(self) -> Kind:
        keys = self.part.keys
        mask = self.live if self.live is not None else self.out
        addresses = [a for a in self.addresses()[1:] if a]
        seed, common = 0, RANDOM_KEYS
        if isinstance(keys, RandomKeys):
            seed = keys.seed
        else:
            assert isinstance(keys, ScoreKeys)
            common = keys.common
            addresses.append(self.addresses()[0])
        return Kind(
            self.part.device,
            common,
            None if self.scores is None else self.scores.dtype,
            seed,
            torch.bool if mask is None else mask.dtype,
            self.live is not None,
            all(address % _ALIGNMENT == 0 for address in addresses),
        )

    def addresses(self) -> list[int]:
        """Of the first score, or its global index if keys are random; of the masks, 0 if none."""
        first = self.span.start
        keys = self.part.keys
        if self.scores is not None:
            start = self.scores.data_ptr()
        else:
            assert isinstance(keys, RandomKeys) and keys.index.start is not None
            start = keys.index.start + keys.offset + first
        masks = (self.live, self.out)
        return [start, *(0 if m is None else m.data_ptr() + first * m.itemsize for m in masks)]


@dataclass(frozen=True)
class Tiles:
    """The tiles of some pieces.

    Attributes:
        table: int64 [tiles, WIDTH], the first four columns filled.
        piece: int64 [tiles], which of the pieces a tile belongs to ...
        first: ... and the position in the piece of its first element.
    """

    table: Array
    piece: Array
    first: Array

    @property
    def lengths(self) -> Array:
        lengths: Array = self.table[:, LENGTH]
        return lengths


def tiles_of(pieces: Sequence[Piece]) -> Tiles:
    """Cut pieces of one kind into tiles, in order."""
    sizes = np.array([len(piece.span) for piece in pieces], dtype=np.int64)
    num_blocks = min(_LARGEST_TILE, max(1, int(sizes.sum()) // (BLOCK * _NUM_TILES)))
    size = BLOCK * num_blocks
    numbers = -(-sizes // size)
    piece = np.repeat(np.arange(len(pieces)), numbers)
    first = (np.arange(len(piece)) - np.repeat(np.cumsum(numbers) - numbers, numbers)) * size
    addresses = np.array([piece.addresses() for piece in pieces], dtype=np.int64).reshape(-1, 3)
    steps = np.array([_steps(piece) for piece in pieces], dtype=np.int64).reshape(-1, 3)
    table = np.zeros((len(piece), WIDTH), dtype=np.int64)
    table[:, [SCORES, LIVE, OUT]] = addresses[piece] + steps[piece] * first[:, None]
    table[:, LENGTH] = np.minimum(size, sizes[piece] - first)
    return Tiles(table, piece, first)


def _steps(piece: Piece) -> list[int]:
    """How far each address moves per element."""
    step = 1 if piece.scores is None else piece.scores.itemsize
    return [step, *(0 if m is None else m.itemsize for m in (piece.live, piece.out))]


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
