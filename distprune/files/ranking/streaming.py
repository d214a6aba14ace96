"""The selected tensors of a checkpoint, a few megabytes at a time: their bits and their keys.

What is ranked are *items*: elements or, with a pattern of tiles, tiles. Keys are those of items,
and bits those of elements. A span of whole bands has the items of :meth:`Source.items_of`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import numpy as np

from distprune.files.disk.open_files import OpenFiles, read_into
from distprune.files.errors import NaNError
from distprune.files.planning import Plan
from distprune.files.ranking.groups import bands_of
from distprune.files.ranking.keys import (
    HASHES,
    Array,
    KeyFormat,
    bits_dtype,
    hash_seed,
    key_format,
    magnitude_keys,
    random_keys,
)
from distprune.files.ranking.scales import Scale, score_dtype
from distprune.files.ranking.scorers import scorers_of
from distprune.files.ranking.tiles import SUMS, Bands

CHUNK = 1 << 19  # elements: the arrays of a step stay below fifty megabytes
_SUMMED = 1 << 16  # elements whose tiles are summed at a time: they stay in the cache
# A group of more elements, ranked on its own, is counted in one read and cut in another.
MAX_IN_MEMORY = 8 * CHUNK


class Source:
    """The selected tensors of a plan and the keys that they are ranked by, read in pieces.

    Args:
        plan: what to prune.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._files = OpenFiles(os.O_RDONLY)
        self._paths = {file.name: file.path for file in plan.checkpoint.files}
        self._seed = hash_seed(plan.recipe.seed) if plan.recipe.seed is not None else None
        self._scorers = scorers_of(plan, self._files)
        self._bands = [
            bands_of(tensor, plan.recipe_of(position))
            for position, tensor in enumerate(plan.tensors)
        ]
        self._group_formats = [
            SUMS
            if group.recipe.tile is not None
            else key_format(
                self.raw_dtype(position)
                if group.recipe.normalize is None
                else score_dtype(self.raw_dtype(position))
                for position in range(group.first, group.last)
            )
            for group in plan.groups
        ]
        self._scales: dict[int, Scale] = {}

    @property
    def files(self) -> OpenFiles:
        """The open files, to copy the other bytes from."""
        return self._files

    def normalize(self, divisors: Sequence[float | None]) -> None:
        """Rank normalised scores from now on, in the groups whose recipes say so.

        Args:
            divisors: per tensor, what its raw scores are divided by; None: by nothing.
        """
        for position, divisor in enumerate(divisors):
            if divisor is not None:
                tensor = self._plan.tensors[position]
                key_format = self._group_formats[tensor.group]
                self._scales[position] = Scale(self.raw_dtype(position), divisor, key_format)

    def scale_of(self, position: int) -> Scale | None:
        """What a tensor's raw scores are multiplied by; None: by nothing."""
        if self._plan.recipe_of(position).normalize is None:
            return None
        return self._scales[position]

    def needs_values(self, group: int) -> bool:
        """Whether the scores of a group depend on the stored values; random ones do not."""
        return self._plan.groups[group].recipe.score != "random"

    def group_format(self, group: int) -> KeyFormat:
        """The format of keys that are ranked across all tensors of a group."""
        return self._group_formats[group] if self.needs_values(group) else HASHES

    def format_of(self, position: int) -> KeyFormat:
        """The format of a tensor's keys: that of its group if they are ranked together."""
        tensor = self._plan.tensors[position]
        is_alone = tensor.num_groups and self._bands[position] is None
        if is_alone and self.needs_values(tensor.group):
            return key_format([self.raw_dtype(position)])
        return self.group_format(tensor.group)

    def bands_of(self, position: int) -> Bands | None:
        """The bands of a tensor whose tiles are ranked; None if its elements are."""
        return self._bands[position]

    def items_of(self, position: int, first: int, last: int) -> tuple[int, int]:
        """The items [first, last) that the elements [first, last) are: of whole bands."""
        bands = self._bands[position]
        size = 1 if bands is None else bands.tile_size
        return first // size, last // size

    def read_bits(self, position: int, first: int, last: int) -> Array:
        """Read the elements [first, last) as they are stored.

        Returns:
            Unsigned integers, a fresh array.

        Raises:
            CheckpointError: the file cannot be read, or is shorter than it was.
        """
        entry = self._plan.tensors[position].entry
        dtype = bits_dtype(entry.dtype)
        bits = np.empty(last - first, dtype=dtype)
        offset = entry.start + first * dtype.itemsize
        read_into(self._files, self._paths[entry.file], offset, bits.data.cast("B"))
        return bits

    def keys_of(self, position: int, first: int, bits: Array) -> Array:
        """The keys of elements that have been read.

        Args:
            position: of the tensor.
            first: index of the first element.
            bits: as :meth:`read_bits` returns them.

        Returns:
            Unsigned integers in the tensor's :meth:`format_of`.
        """
        tensor = self._plan.tensors[position]
        if not self.needs_values(tensor.group):
            return self._hashes(position, first, first + len(bits))
        raw = self._raw_bits_of(position, first, bits)
        scale = self.scale_of(position)
        if scale is not None:
            return scale.score_keys(raw)
        return magnitude_keys(raw, self.raw_dtype(position), self.format_of(position))

    def cut_keys_of(self, position: int, first: int, bits: Array) -> Array:
        """The keys that a tensor is cut by: as :meth:`keys_of`, but of raw scores if normalised.

        They are those of :meth:`Scale.interval`, and cost no multiplication by a scale.
        """
        if self.scale_of(position) is None:
            return self.keys_of(position, first, bits)
        dtype = self.raw_dtype(position)
        return magnitude_keys(self._raw_bits_of(position, first, bits), dtype, key_format([dtype]))

    def read_keys(self, position: int, first: int, last: int) -> Array:
        """The keys of the items [first, last). Random scores are computed without a read.

        Tiles are read in chunks, and may be any whole columns of tiles.

        Raises:
            CheckpointError: as for :meth:`read_bits`.
        """
        if not self.needs_values(self._plan.tensors[position].group):
            return self._hashes(position, first, last)
        bands = self._bands[position]
        if bands is not None:
            pieces = bands.split(first, last, CHUNK)
            return np.concatenate([self._tile_keys(position, bands, *piece) for piece in pieces])
        scale, dtype = self.scale_of(position), self.raw_dtype(position)
        raw = self.read_raw_bits(position, first, last)
        if scale is not None:
            return scale.score_keys(raw)
        return magnitude_keys(raw, dtype, self.format_of(position))

    def chunks_of_keys(self, position: int, first: int, last: int) -> Iterator[tuple[Array, int]]:
        """:meth:`read_keys` in chunks, each with the bytes that its elements have in the file."""
        bands = self._bands[position]
        if bands is not None:
            for start, stop in bands.split(first, last, CHUNK):
                num_bytes = (stop - start) * bands.tile_size * self.itemsize(position)
                yield self.read_keys(position, start, stop), num_bytes
            return
        for start in range(first, last, CHUNK):
            stop = min(start + CHUNK, last)
            keys = self.read_keys(position, start, stop)
            yield keys, (stop - start) * self.itemsize(position)

    def chunks_of_raw_bits(self, position: int, first: int, last: int) -> Iterator[Array]:
        """:meth:`read_raw_bits` in chunks."""
        for start in range(first, last, CHUNK):
            yield self.read_raw_bits(position, start, min(start + CHUNK, last))

    def read_raw_bits(self, position: int, first: int, last: int) -> Array:
        """Read what the elements [first, last) are ranked by, before a normalisation.

        Returns:
            Their scores in the format :meth:`raw_dtype`, signs included: weights, if those are
            ranked by magnitude.

        Raises:
            CheckpointError: as for :meth:`read_bits`.
        """
        scorer = self._scorers[position]
        if scorer is not None and not scorer.needs_weights:
            return scorer.score_bits(first, last, None)
        return self._raw_bits_of(position, first, self.read_bits(position, first, last))

    def raw_dtype(self, position: int) -> str:
        """The format of a tensor's scores before a normalisation."""
        scorer = self._scorers[position]
        return self._plan.tensors[position].entry.dtype if scorer is None else scorer.dtype

    def raw_itemsize(self, position: int) -> int:
        """Bytes of a score before a normalisation."""
        return bits_dtype(self.raw_dtype(position)).itemsize

    def itemsize(self, position: int) -> int:
        """Bytes of a stored element."""
        return bits_dtype(self._plan.tensors[position].entry.dtype).itemsize

    def close(self) -> None:
        self._files.close()

    def _raw_bits_of(self, position: int, first: int, bits: Array) -> Array:
        """The scores of elements, before a normalisation; ``bits`` themselves for magnitudes."""
        scorer = self._scorers[position]
        return bits if scorer is None else scorer.score_bits(first, first + len(bits), bits)

    def _tile_keys(self, position: int, bands: Bands, first: int, last: int) -> Array:
        """The keys of tiles that :meth:`Bands.split` yields."""
        dtype = self.raw_dtype(position)
        number, inside = divmod(first, bands.num_tiles)
        num_bands, rest = divmod(last - first, bands.num_tiles)
        start = number * bands.size
        if not inside and not rest:
            raw = self.read_raw_bits(position, start, start + num_bands * bands.size)
            step = max(_SUMMED // bands.size, 1) * bands.size
            pieces = [bands.keys(raw[i : i + step], dtype) for i in range(0, len(raw), step)]
            return np.concatenate(pieces)
        strip = bands.strip((last - first) // bands.kernel)
        start += inside // bands.kernel * bands.width * bands.kernel
        rows = [
            self.read_raw_bits(position, row, row + strip.row_size)
            for row in range(start, start + bands.size, bands.row_size)
        ]
        return strip.keys(np.concatenate(rows), dtype)

    def _hashes(self, position: int, first: int, last: int) -> Array:
        assert self._seed is not None
        offset = self._plan.tensors[position].offset
        return random_keys(offset + first, offset + last, self._seed)


def nan_error(plan: Plan, positions: Sequence[int]) -> NaNError:
    """The error for selected tensors that have NaN among their weights or their given scores."""
    names = ", ".join(plan.tensors[position].entry.name for position in positions)
    are_given = any(plan.recipe_of(position).score == "given" for position in positions)
    return NaNError(
        f"NaN in {'the scores of ' if are_given else ''}{names}; a NaN has no place in a ranking. "
        f"Repair the {'scores' if are_given else 'checkpoint'}, exclude the tensor, or keep NaN as "
        "they are (nan: keep)."
    )
