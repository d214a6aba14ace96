"""Which elements are pruned, tensor by tensor, once the rankings of a plan are cut."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from distprune.base.memory import Array, Scratch
from distprune.files.cuts import Cuts, nan_error
from distprune.files.disk.access import slabs
from distprune.files.errors import SelectionError
from distprune.files.reading import Source
from distprune.files.rewriting import Counts, Piece
from distprune.ranking.chunks import Chunk
from distprune.ranking.lowest import lowest_of
from distprune.ranks.collectives import Communicator


class LowestElements:
    """Applies the cuts of a plan, and ranks rows and blocks of N:M, which lie whole in a slab.

    Args:
        source: of what to prune.
        cuts: of the tensors that are ranked as a whole, together or each on its own.
    """

    def __init__(self, source: Source, cuts: Cuts) -> None:
        self._plan = source.plan
        self._source = source
        self._cuts = cuts
        self._scratch = Scratch()

    def pieces(self, position: int, counts: Counts) -> Iterator[Piece]:
        """The elements of a tensor, in their order.

        Args:
            position: of the tensor.
            counts: by position, it gets the NaN of tensors whose blocks are ranked ("nan").

        Raises:
            NaNError, SelectionError: of a tensor whose blocks are ranked.
            CheckpointError: the source cannot be read, or has changed.
        """
        tensor, values = self._plan.tensors[position], self._source.values[position]
        divisors = [self._cuts.divisors[position]]
        ranking = self._source.ranking([position], divisors, None, Communicator(()))
        cut, blocks = self._cuts.tensors[position], tensor.blocks
        band = 1 if blocks is None else blocks.band
        for run in slabs(tensor.entry.numel, values.dtype.itemsize, band):
            with values.holding(run.start, run.stop) as bits:
                chunk = Chunk([(0, run.start, run.stop)], True)
                if blocks is None:
                    assert cut is not None  # it is ranked as a whole
                    keep = ranking.kept(chunk, cut.alone(), self._scratch)
                else:
                    loaded, _, _ = ranking.load(chunk, self._scratch)
                    keys: Array = loaded.numpy()
                    lowest = lowest_of(blocks, keys, self._scratch)
                    self._count_nan(position, counts, keys, lowest)
                    keep = ~lowest
            yield Piece(run.start, bits, keep)

    def _count_nan(self, position: int, counts: Counts, keys: Array, lowest: Array) -> None:
        """Refuse or count NaN, which rank last."""
        key_range = self._source.key_ranges[position]
        is_nan = keys > key_range.largest_number
        num_nan = int(np.count_nonzero(is_nan)) if key_range.is_float else 0
        if not num_nan:
            return
        if self._plan.recipe.nan == "error":
            raise nan_error(self._plan, [position])
        counts["nan"][position] += num_nan
        if (is_nan & lowest).any():
            raise SelectionError(
                f"{self._plan.tensors[position].entry.name}: more of a group is to be pruned than "
                "is no NaN, and NaN are kept. Lower the sparsity, or exclude the tensor."
            )
