"""Pruning whole tiles, of parameters on any sharding: sums over ranks, and a ranking of the sums.

Each rank sums the tiles that it has whole. Of those that the sharding cuts, the ranks add their
shares, so each of them has the sum; one of them, the owner, ranks it together with its own. From
there on tiles are ranked like the elements of smaller parameters::

    scores --sums--> tiles of this rank --> any selection --> which go --> masks of elements
             loose tiles: shares are added      owners tell the others
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from distprune._common import tile_sums
from distprune._common.collectives import Communicator
from distprune._common.memory import Array
from distprune.selection.block_cuts import Progressions, to_progressions, union
from distprune.selection.candidates import Candidates
from distprune.selection.keys import (
    RANDOM_KEYS,
    KeyRange,
    RandomKeys,
    ScoreKeys,
    key_range,
)
from distprune.selection.scores import TensorScores
from distprune.selection.search import refuse_nan_in
from distprune.selection.tile_places import NO_TILES, ListedIndex, TilePlaces, Tiling, tile_places
from distprune.selection.tile_scores import LooseSums, TileReader, sums_and_live

_LAST = (1 << 63) - 1
# Words of an all-reduce of loose tiles, unless one parameter has more: 8 MiB.
_WORDS = 1 << 20


@dataclass(frozen=True)
class TiledParts:
    """What is pruned in tiles.

    Attributes:
        parts: this rank's part of every parameter, in the same order on all ranks.
        names: of the parameters, for messages.
        tilings: of the parameters; None where this rank has no element.
        tile_size: elements of a tile.
        num_live: live elements of every whole parameter.
        is_first_copy: per parameter, whether this rank has the first of all replicas of its part.
        keys: the range of the elements' keys.
        communicator: the ranks that have the parts.
    """

    parts: Sequence[Candidates]
    names: Sequence[str]
    tilings: Sequence[Tiling | None]
    tile_size: int
    num_live: Sequence[int]
    is_first_copy: Sequence[bool]
    keys: KeyRange
    communicator: Communicator


@dataclass(frozen=True)
class RankedTiles:
    """The tiles of a call, as selection ranks them.

    Attributes:
        parts: this rank's tiles of every parameter, as candidates.
        num_tiles: of every whole parameter.
        num_live: those that have an element which is not pruned.
        keys: the range of the tiles' keys.
    """

    parts: Sequence[Candidates]
    num_tiles: Sequence[int]
    num_live: Sequence[int]
    keys: KeyRange
    _tiled: TiledParts
    _own: Sequence[_OwnTiles]
    _shared: Sequence[tuple[int, Array]]

    def new_masks(self) -> list[Tensor]:
        """An uninitialised mask of the tiles of each part."""
        return [torch.empty(part.num_local, dtype=torch.bool) for part in self.parts]

    def share_loose(self, keeps: Sequence[Tensor]) -> list[Array]:
        """Per parameter, whether each of the loose tiles on any rank is kept. Collective.

        Args:
            keeps: masks of the tiles of each part.

        Cost: an all-reduce of 8 bytes per loose tile.
        """
        found: list[Array] = [np.ones(0, dtype=bool)] * len(self.parts)
        if not self._shared:
            return found

        def dropped() -> Tensor:
            rows = [
                self._own[position].dropped_loose(keeps[position].numpy(), numbers)
                if self._tiled.is_first_copy[position]
                else np.zeros(len(numbers), dtype=np.int64)
                for position, numbers in self._shared
            ]
            return torch.from_numpy(np.concatenate(rows))

        total = sum(len(numbers) for _, numbers in self._shared)
        flags = self._tiled.communicator.reduce(total, dropped).numpy()
        first = 0
        for position, numbers in self._shared:
            found[position] = flags[first : first + len(numbers)] == 0
            first += len(numbers)
        return found

    def write(
        self, keeps: Sequence[Tensor], loose: Sequence[Array], outs: Sequence[Tensor]
    ) -> list[int]:
        """Write the masks of the elements. Local.

        Args:
            keeps: masks of the tiles of each part.
            loose: from :meth:`share_loose`.
            outs: flat masks of the parts, uninitialised.

        Returns:
            Per parameter, how many elements that this rank counts were pruned now.
        """
        shared = dict(self._shared)
        counts = []
        for position, (part, own, out) in enumerate(
            zip(self._tiled.parts, self._own, outs, strict=True)
        ):
            numbers = shared.get(position, np.zeros(0, dtype=np.int64))
            counts.append(own.write(part, keeps[position].numpy(), numbers, loose[position], out))
        return counts


def rank_tiles(tiled: TiledParts) -> RankedTiles:
    """Sum the scores of all tiles. Collective.

    Raises:
        ValueError: a live score is NaN, or a tile has both infinities; names the parameters. On
            every rank.

    Cost: one read of the scores, and two more of the chunks that have loose tiles; memory of 17
    bytes per local tile, and for a chunk. All-reduces of 16 bytes per parameter, and of about 50
    bytes per loose tile; see also
    :meth:`~distprune._common.collectives.Communicator.distinct_texts`.
    """
    communicator = tiled.communicator
    places = communicator.run(partial(_find_places, tiled))
    shared = _agree_on_loose(tiled, places)
    readers = [
        TileReader(
            name,
            part.keys.scores if isinstance(part.keys, ScoreKeys) else None,
            part.live,
            tiled.keys.order,
            own,
        )
        for name, part, own in zip(tiled.names, tiled.parts, places, strict=True)
    ]
    read: list[tuple[Array, Array]] = []

    def read_whole() -> Tensor:
        counts = []
        for reader, is_first in zip(readers, tiled.is_first_copy, strict=True):
            sums, live, num_nan = reader.read_inner()
            read.append((sums, live))
            counts.append(num_nan if is_first else 0)
        return torch.tensor(counts, dtype=torch.int64)

    num_nan = communicator.reduce(len(readers), read_whole).tolist()
    refuse_nan_in(tiled.names, tiled.num_live, num_nan)
    loose = _sum_loose(tiled, readers, shared)
    is_random = tiled.keys is RANDOM_KEYS
    keys = RANDOM_KEYS if is_random else key_range(torch.float64, tiled.keys.order)

    def combine() -> tuple[list[_OwnTiles], list[Candidates]]:
        own, parts, offset = [], [], 0
        for position, part in enumerate(tiled.parts):
            sums, live = read[position]
            tiles = _OwnTiles.of(places[position], sums, live, *loose.get(position, _NOTHING))
            num_tiles = part.numel // tiled.tile_size
            own.append(tiles)
            parts.append(_candidates(part, tiles, num_tiles, offset, keys, tiled.names[position]))
            offset += num_tiles
        return own, parts

    own, parts = communicator.run(combine)
    num_live = communicator.reduce(len(parts), lambda: _count_live(parts)).tolist()
    num_tiles = [part.numel for part in parts]
    return RankedTiles(parts, num_tiles, num_live, keys, tiled, own, shared)


@dataclass(frozen=True)
class _OwnTiles:
    """The tiles that this rank ranks: those it has whole, and the loose ones that it owns.

    Attributes:
        places: of all tiles of the part.
        numbers: int64, ascending.
        sums, live: of each.
        order: positions of the tiles in the order of ``numbers``, from the order in which chunks
            have them, with the loose ones at the end; None: they are the same.
        owned: int64, the loose tiles among them; ascending.
    """

    places: TilePlaces
    numbers: Array
    sums: Array
    live: Array
    order: Array | None
    owned: Array

    @classmethod
    def of(
        cls, places: TilePlaces, sums: Array, live: Array, numbers: Array, loose_sums: Array,
        loose_live: Array, owners: Array,
    ) -> _OwnTiles:  # fmt: skip
        """Join what was read with what was summed over the ranks.

        Args:
            places, sums, live: of the whole tiles.
            numbers, loose_sums, loose_live, owners: of the loose tiles on any rank.
        """
        is_mine = (owners == places.first_index) if places.first_index >= 0 else owners < 0
        owned = numbers[is_mine]
        if len(owned):
            sums = np.concatenate([sums, loose_sums[is_mine]])
            live = np.concatenate([live, loose_live[is_mine]])
        all_numbers = np.concatenate([places.numbers, owned]) if len(owned) else places.numbers
        if len(all_numbers) < 2 or (np.diff(all_numbers) > 0).all():
            return cls(places, all_numbers, sums, live, None, owned)
        order = np.argsort(all_numbers)
        return cls(places, all_numbers[order], sums[order], live[order], order, owned)

    def dropped_loose(self, keep: Array, numbers: Array) -> Array:
        """int64, 1 for each of some loose tiles that this rank owns and drops."""
        dropped = np.zeros(len(numbers), dtype=np.int64)
        if len(self.owned):
            own = ~keep[np.searchsorted(self.numbers, self.owned)]
            dropped[np.searchsorted(numbers, self.owned)] = own
        return dropped

    def write(
        self, part: Candidates, keep: Array, numbers: Array, keep_loose: Array, out: Tensor
    ) -> int:
        """Write a flat mask; how many counted elements were pruned now."""
        if self.order is not None:
            by_chunk = np.empty_like(keep)
            by_chunk[self.order] = keep
            keep = by_chunk
        places, num_pruned = self.places, 0
        for chunk in places.chunks:
            kept = np.empty(len(chunk.positions), dtype=bool)
            if chunk.has_loose:
                where, tiles = places.loose_in(chunk)
                kept[where] = keep_loose[np.searchsorted(numbers, tiles)]
            if chunk.inner is not None:
                shape = places.inner_shape(chunk)
                own = keep[chunk.first : chunk.first + places.num_inner(chunk)].reshape(shape)
                for dim, size in enumerate(places.sizes):
                    own = own.repeat(size, axis=dim) if size > 1 else own
                places.inner_of(chunk, kept)[...] = own
            span = slice(chunk.positions.start, chunk.positions.stop)
            mask = torch.from_numpy(kept).to(out.device)
            if part.live is None:
                out[span] = mask
                gone = ~kept
            else:
                previous = part.live[span]
                out[span] = previous * mask
                gone = ~kept & (previous == 1).cpu().numpy()
            first = max(0, part.counted.start - span.start)
            last = max(first, part.counted.stop - span.start)
            num_pruned += int(np.count_nonzero(gone[first:last]))
        return num_pruned


_EMPTY: Array = np.zeros(0, dtype=np.int64)
_NOTHING = (_EMPTY, np.zeros(0), np.zeros(0, dtype=bool), _EMPTY)


def _find_places(tiled: TiledParts) -> list[TilePlaces]:
    return [
        NO_TILES if tiling is None else tile_places(part.index, part.num_local, tiling)
        for part, tiling in zip(tiled.parts, tiled.tilings, strict=True)
    ]


def _agree_on_loose(tiled: TiledParts, places: Sequence[TilePlaces]) -> list[tuple[int, Array]]:
    """Per parameter that has loose tiles on any rank: its position, and their numbers."""

    def describe() -> str:
        return json.dumps(
            {i: to_progressions(own.loose) for i, own in enumerate(places) if len(own.loose)}
        )

    texts, _ = tiled.communicator.distinct_texts(tiled.communicator.run(describe))
    found: dict[int, list[Progressions]] = {}
    for text in texts:
        for position, progressions in json.loads(text).items():
            found.setdefault(int(position), []).append(progressions)
    return [(position, union(found[position])) for position in sorted(found)]


def _sum_loose(
    tiled: TiledParts, readers: Sequence[TileReader], shared: Sequence[tuple[int, Array]]
) -> dict[int, tuple[Array, Array, Array, Array]]:
    """Of every parameter with loose tiles: their numbers, sums, whether they live, and owners."""
    if not shared:
        return {}
    communicator = tiled.communicator
    sums = {i: LooseSums(readers[i], numbers) for i, numbers in shared}

    def extents() -> Tensor:
        ends = [sums[i].extent() for i, _ in shared]
        return torch.tensor([[high, -low] for high, low in ends], dtype=torch.int64).view(-1)

    extent = communicator.reduce(2 * len(shared), extents, "max").view(-1, 2).tolist()
    found = {}
    for batch in _batches(shared, extent):
        shapes = [
            (tile_sums.num_limbs(high, -low) + 3, len(numbers))
            for (_, numbers), (high, low) in batch
        ]

        def take(batch: _Batch = batch, shapes: Sequence[tuple[int, int]] = shapes) -> Tensor:
            rows = [
                sums[i].take(high, height - 3)
                if tiled.is_first_copy[i]
                else np.zeros((height, width), dtype=np.int64)
                for ((i, _), (high, _)), (height, width) in zip(batch, shapes, strict=True)
            ]
            return torch.from_numpy(np.concatenate([row.reshape(-1) for row in rows]))

        def claim(batch: _Batch = batch) -> Tensor:
            owners = [_claimed(readers[i].places, numbers) for (i, numbers), _ in batch]
            return torch.from_numpy(np.concatenate(owners))

        sizes = [height * width for height, width in shapes]
        rows = torch.split(communicator.reduce(sum(sizes), take), sizes)
        widths = [width for _, width in shapes]
        owners = torch.split(communicator.reduce(sum(widths), claim, "min"), widths)
        for ((i, numbers), (high, _)), shape, own, owner in zip(
            batch, shapes, rows, owners, strict=True
        ):
            total, live = sums_and_live(own.numpy().reshape(shape), high)
            found[i] = (numbers, total, live, owner.numpy())
    return found


# Parameters with loose tiles, and the extents of their scores.
_Batch = Sequence[tuple[tuple[int, Array], Sequence[int]]]


def _batches(shared: Sequence[tuple[int, Array]], extent: Sequence[Sequence[int]]) -> list[_Batch]:
    """Parameters whose loose tiles are summed together."""
    batches: list[list[tuple[tuple[int, Array], Sequence[int]]]] = []
    num_words = _WORDS
    for one, (high, low) in zip(shared, extent, strict=True):
        size = len(one[1]) * (tile_sums.num_limbs(high, -low) + 4)
        if num_words + size > _WORDS:
            batches.append([])
            num_words = 0
        batches[-1].append((one, (high, low)))
        num_words += size
    return list(batches)


def _claimed(places: TilePlaces, numbers: Array) -> Array:
    """Per tile, this part's first index if it has an element of it; otherwise a larger number."""
    claims = np.full(len(numbers), _LAST, dtype=np.int64)
    claims[np.searchsorted(numbers, places.loose)] = places.first_index
    return claims


def _candidates(
    part: Candidates, tiles: _OwnTiles, num_tiles: int, offset: int, keys: KeyRange, name: str
) -> Candidates:
    """The tiles of a part as candidates."""
    count = len(tiles.numbers)
    index = ListedIndex.of(tiles.numbers)
    cpu = torch.device("cpu")
    source: ScoreKeys | RandomKeys
    if isinstance(part.keys, RandomKeys):
        source = part.keys.of_others(offset, index, cpu)
    else:
        if np.isnan(tiles.sums[tiles.live]).any():
            raise ValueError(
                f"{name} has a tile with scores of inf and of -inf, which have no sum; expected "
                "finite scores."
            )
        source = ScoreKeys(TensorScores(torch.from_numpy(tiles.sums)), keys)
    # Replicas of a part have the same tiles, and count equal parts of them.
    n = max(1, part.num_local)
    counted = range(count * part.counted.start // n, count * part.counted.stop // n)
    live = None if tiles.live.all() else torch.from_numpy(tiles.live)
    return Candidates(source, live, index, counted, count, num_tiles, cpu)


def _count_live(parts: Sequence[Candidates]) -> Tensor:
    return torch.tensor(
        [
            len(part.counted)
            if part.live is None
            else int(part.live[part.counted.start : part.counted.stop].sum())
            for part in parts
        ],
        dtype=torch.int64,
    )
