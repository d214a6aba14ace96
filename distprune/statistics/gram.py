"""GramMatrices: sums of x x^T of what layers are called with."""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from distprune._common.collectives import Communicator
from distprune._common.naming import NamedParameter
from distprune.files.checkpoints.statistics_file import (
    STATISTICS,
    StoredMatrix,
    read_index,
    read_rows,
    write_index,
    write_matrix,
)
from distprune.files.errors import CheckpointError
from distprune.shards.factored import FactoredScores
from distprune.statistics.activation import ActivationStatistics
from distprune.statistics.collecting import LocalStatistics
from distprune.statistics.gram_collecting import GramCollector, LocalGram
from distprune.statistics.input_parts import peers_of
from distprune.statistics.layers import WeightLayout
from distprune.statistics.totals import Pairs, Read, Totals


@dataclass(eq=False)
class GramBlock:
    """This rank's rows of the Gram matrices that some parameters share, summed over all ranks.

    Attributes:
        size: inputs of each matrix.
        rows: [matrices, rows, inputs]: as many rows on every rank, the last ones may be padding.
    """

    size: int
    rows: Tensor

    def whole(self, number: int, communicator: Communicator) -> Tensor:
        """One matrix [inputs, inputs], on every rank. Collective.

        Cost: one all-gather; on one rank it is a view.
        """
        rows = communicator.gather(self.rows[number].reshape(-1))
        return rows.view(-1, self.size)[: self.size]


class GramMatrices(ActivationStatistics):
    """The Gram matrix of the inputs of each layer: the sum of x x^T over calibration data.

    grams = GramMatrices(prune.select(model, types=nn.Linear))
    with grams.collecting():
        for batch in calibration:
            model(batch)
    prune.reconstruct(parameters, grams)  # after a pruning: least squares for what was kept

    They are activation statistics, too: the same pass gives the scores of Wanda and others, and
    what is said there of tokens, padding, ranks, tied parameters and errors holds for them. A
    weight has one matrix [inputs, inputs]; fused experts have one for each expert, of its own
    tokens; a convolution one for each of its groups, of the columns of the unfolded input.

    Products are of fp32 (fp64 of fp64 inputs), and are added in fp32. One process that ran all
    batches would have the same matrices to 1e-6 of the largest element; of integers, the same bits
    as long as sums are below 2**24. Layers with the same input share one matrix while they have
    met the same rows: the projections of an attention, of a gated unit. Under row-wise tensor
    parallelism the ranks have a part of the features each: the inputs of such layers are gathered.

    Args, Raises: as :class:`ActivationStatistics`.

    Cost: 4 bytes x inputs**2 for each different input on every rank while batches are collected
    (:meth:`num_bytes` says it before), and the inputs of one call that is under way; per token
    2 x inputs**2 operations. Once the matrices are asked for, each rank keeps a block of rows, and
    4 bytes x inputs**2 / ranks: one reduce-scatter per matrix. Where this is too much, go
    block by block: :func:`prune_sequentially` forgets the matrices of a block after its pruning.

    :meth:`save` writes a folder, which :meth:`load` reads for any sharding and any number of ranks;
    each rank reads and keeps its own rows.
    """

    _collector: GramCollector

    def _new_collector(self) -> GramCollector:
        self._blocks: dict[str, GramBlock] = {}
        return GramCollector(self._communicator.rank)

    def num_bytes(self, parameters: Pairs | None = None) -> int:
        """Bytes of the matrices of some parameters, by default of all, if none is shared. Local.

        That much memory a rank needs for them while it collects.
        """
        return sum(
            4 * layout.num_matrices * layout.matrix_shape[1] ** 2
            for layout in (self._local[p].layout for p in self._positions_of(parameters))
        )

    def matrix(self, module: nn.Module, name: str = "weight") -> Tensor:
        """The Gram matrix of a parameter's inputs, over all ranks. Collective.

        Args:
            module, name: one of the parameters; the same on every rank.

        Returns:
            [inputs, inputs], whole, on every rank; of fused experts and of convolutions with
            groups [matrices, inputs, inputs].

        Raises: as :meth:`totals`.

        Cost: as :meth:`totals`; what is new is summed over the ranks, and the matrices are
        gathered.
        """
        ((labels, block),) = self.blocks([(module, name)])
        num = block.rows.shape[0]
        with self._communicator.exclusively():
            whole = [block.whole(number, self._communicator) for number in range(num)]
        layout = self._layouts[labels[0]]
        has_several = layout.are_experts or layout.groups > 1
        return torch.stack(whole) if has_several else whole[0].clone()

    def obs(
        self, parameters: Pairs | None = None, *, damping: float = 0.01
    ) -> dict[NamedParameter, FactoredScores]:
        """Scores of the Optimal Brain Surgeon for one weight: |w_ij| / sqrt([H^-1]_jj). Collective.

        H is the Gram matrix divided by the number of tokens, with damping on its diagonal. The
        square of a score is the error of the layer's output, per token, that is left when the
        weight is removed and all others of its row are adjusted. SparseGPT ranks by it.

        Args:
            parameters: some of the parameters; by default all.
            damping: what is added to the diagonal, in units of its mean; larger than 0.

        Returns, Raises: as :meth:`wanda`; ValueError for a damping that is not positive.

        Cost: as :meth:`matrix`; the ranks share the inversions, 2 x inputs**3 operations each.

        Source: Hassibi and Stork, NeurIPS 1992; Frantar and Alistarh, SparseGPT, arXiv 2301.00774.
        """
        if not damping > 0:
            raise ValueError(f"damping={damping!r}; expected a number > 0, such as 0.01.")
        totals = self._labelled(parameters)
        blocks = self.blocks(parameters)
        layouts = self._layouts
        factors: dict[str, Tensor] = {}
        turns = itertools.cycle(range(self._communicator.size))
        with self._communicator.exclusively(), torch.no_grad(), torch.inference_mode(False):
            for labels, block in blocks:
                inverse = self._inverse_diagonals(block, damping, turns)
                for label in labels:
                    layout, counts = layouts[label], totals[label].num_tokens
                    tokens = torch.tensor(counts, dtype=torch.float64).clamp(min=1).view(-1, 1)
                    of_input = (1 / (inverse * tokens)).sqrt()
                    factors[label] = layout.of_inputs(of_input.view(layout.input_shape)).float()
        return self._scores(totals, lambda p: FactoredScores([[factors[p.label]]]))

    def _inverse_diagonals(self, block: GramBlock, damping: float, turns: Iterator[int]) -> Tensor:
        """Of each matrix of a block, [matrices, inputs]; the ranks take turns."""
        found = torch.zeros(len(block.rows), block.size, dtype=torch.float64)
        for number in range(len(block.rows)):
            whole = block.whole(number, self._communicator)
            if next(turns) == self._communicator.index:
                damped, _ = with_damping(whole, damping, torch.float64)
                found[number] = torch.cholesky_inverse(torch.linalg.cholesky(damped)).diagonal()
        shared = self._communicator.reduce_floats(found.numel(), lambda: found.view(-1))
        return shared.view(found.shape)

    def layouts_of(self, parameters: Pairs) -> list[tuple[str, WeightLayout]]:
        """The name and the layout of each of some parameters. Local.

        Raises:
            ValueError: one that is none of these statistics.
        """
        found = [self._local[position] for position in self._positions_of(parameters)]
        return [(parameter.label, parameter.layout) for parameter in found]

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that take part."""
        return self._communicator.ranks

    def forget(self, parameters: Pairs | None = None) -> None:
        """Free the matrices of some parameters, by default of all. Local; do it on every rank.

        Their sums stay, and so the scores of :class:`ActivationStatistics`.
        """
        for position in self._positions_of(parameters):
            parameter = self._local[position]
            self._collector.forget(parameter)
            self._blocks.pop(parameter.label, None)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the matrices and the statistics to a folder. Collective; the first rank writes.

        Any run on any sharding can load it. The form is in
        files.checkpoints.statistics_file.[Note: folder of Gram matrices].

        Raises:
            ValueError: as :meth:`totals`; parameters without full names.
            OutputError: of distprune.files.errors, a file cannot be written; a RuntimeError on the
                other ranks.

        Cost: as :meth:`matrix`; one matrix in memory at a time, 4 bytes x inputs**2 each on disk.
        """
        folder, communicator = Path(path), self._communicator
        is_first = communicator.index == 0
        with communicator.exclusively():
            communicator.run(
                lambda: folder.mkdir(parents=True, exist_ok=True) if is_first else None
            )
        super().save(folder / STATISTICS)
        stored: list[StoredMatrix] = []
        blocks = self.blocks()
        with communicator.exclusively():
            for labels, block in blocks:
                for number in range(len(block.rows)):
                    whole = block.whole(number, communicator)
                    name = f"gram-{len(stored):05}.safetensors"
                    stored.append(StoredMatrix(name, block.size, number, tuple(labels)))

                    def write(whole: Tensor = whole, name: str = name) -> None:
                        if is_first:
                            write_matrix(folder / name, whole.cpu().numpy())

                    communicator.run(write)
            communicator.run(lambda: write_index(folder, stored) if is_first else None)

    def _load(self, path: str) -> None:
        super()._load(os.path.join(path, STATISTICS))
        with self._communicator.exclusively():
            self._communicator.run(
                lambda: self._read_blocks(Path(path)), lambda names: [("matrices", str(names))]
            )

    def _restore_from(self, read: Callable[[], Read], where: str) -> None:
        super()._restore_from(read, where)
        self.forget()  # what was collected before, as the sums of it

    def _read_blocks(self, folder: Path) -> list[str]:
        """Read this rank's rows of all parameters; the names of those that have some.

        Raises:
            CheckpointError: the folder is malformed, or lacks a parameter.
        """
        by_sharing: dict[tuple[str, ...], list[StoredMatrix]] = {}
        for stored in read_index(folder):
            by_sharing.setdefault(stored.parameters, []).append(stored)
        layouts = self._layouts
        for names, matrices in by_sharing.items():
            wanted = [name for name in names if name in layouts]
            if not wanted:
                continue
            num, size = layouts[wanted[0]].num_matrices, layouts[wanted[0]].matrix_shape[1]
            matrices.sort(key=lambda stored: stored.number)
            if [(m.number, m.size) for m in matrices] != [(n, size) for n in range(num)]:
                raise CheckpointError(
                    f"{folder} has other Gram matrices of {wanted[0]}: expected {num} of {size} "
                    "inputs."
                )
            height = -(-size // self._communicator.size)
            start = height * self._communicator.index
            rows = [read_rows(folder, m, range(start, start + height)) for m in matrices]
            block = GramBlock(size, torch.from_numpy(np.stack(rows)))
            self._blocks.update(dict.fromkeys(wanted, block))
        missing = [label for label in layouts if label not in self._blocks]
        if missing:
            raise CheckpointError(f"{folder} has no Gram matrix of {missing[0]}.")
        return list(self._blocks)

    def blocks(self, parameters: Pairs | None = None) -> list[tuple[list[str], GramBlock]]:
        """This rank's rows of matrices, with the labels of those that share them. Collective.

        Raises, Cost: as :meth:`matrix`; nothing is gathered.
        """
        totals = self._labelled(parameters)
        asked = [parameter for parameter in self._local if parameter.label in totals]
        with self._communicator.exclusively(), torch.no_grad(), torch.inference_mode(False):
            grouped: dict[int, list[LocalStatistics]] = {}
            for parameter, shared in zip(asked, self._shared_by_all(asked), strict=True):
                grouped.setdefault(shared, []).append(parameter)
            for group in grouped.values():
                self._sum_group(group, totals)
        result: dict[int, tuple[list[str], GramBlock]] = {}
        for parameter in asked:
            block = self._blocks[parameter.label]
            result.setdefault(id(block), ([], block))[0].append(parameter.label)
        return list(result.values())

    def _shared_by_all(self, asked: Sequence[LocalStatistics]) -> list[int]:
        """A number for each parameter: equal for those that share their sums on every rank."""

        def share() -> Tensor:
            numbers = []
            first_with: dict[int, str] = {}  # of each block
            for label, block in self._blocks.items():
                first_with.setdefault(id(block), label)
            for parameter in asked:
                gram = self._counted(parameter)
                first = None if gram is None else gram.parameters[0].label
                before = first_with.get(id(self._blocks.get(parameter.label)))
                layout = parameter.layout
                text = f"{self._communicator.index} {first} {before} "
                text += f"{layout.num_matrices} {layout.matrix_shape[1]}"
                digest = hashlib.sha256(text.encode()).digest()
                numbers.append(int.from_bytes(digest[:8], "big", signed=True))
            return torch.tensor(numbers, dtype=torch.int64)

        shared: list[int] = self._communicator.reduce(len(asked), share).tolist()
        return shared

    def _counted(self, parameter: LocalStatistics) -> LocalGram | None:
        """This rank's new sums of a parameter, unless another rank has the same tokens."""
        gram = self._collector.gram_of(parameter)
        peers = peers_of(self._collector.same_tokens, self._communicator.rank)
        is_other = gram is not None and gram.is_plain and peers[0] != self._communicator.rank
        return None if is_other else gram

    def _sum_group(self, group: Sequence[LocalStatistics], totals: Mapping[str, Totals]) -> None:
        """Sum what is new of the matrices that parameters share, and keep this rank's rows.

        Raises:
            RuntimeError: inputs were seen, and the matrices are gone.
        """
        communicator, label = self._communicator, group[0].label
        num, size = group[0].layout.num_matrices, group[0].layout.matrix_shape[1]
        height = -(-size // communicator.size)
        gram, before = self._counted(group[0]), self._blocks.get(label)
        dtypes = torch.tensor([0 if gram is None else 1 + int(_is_double(gram))])
        is_new = int(communicator.max(dtypes))
        if before is not None and not is_new:
            return
        if not is_new and bool(totals[label].squares.any()):
            raise RuntimeError(
                f"{label}: its Gram matrix was forgotten, or was never collected: statistics that "
                "were loaded from a file of ActivationStatistics have none. Expected new "
                "GramMatrices, collected again."
            )
        dtype = torch.float64 if is_new == 2 else torch.float32
        rows: list[Tensor] = []
        for number in range(num):

            def pieces(number: int = number) -> Tensor:
                if gram is None or number not in gram.matrices:
                    return torch.zeros(communicator.size, height * size, dtype=dtype)
                matrix = gram.matrices[number]
                if any(all(p is not other for other in group) for p in gram.parameters):
                    matrix = matrix.clone()  # others go on adding to it
                padding = height * communicator.size - size
                padded = functional.pad(matrix, (0, 0, 0, padding)) if padding else matrix
                return padded.to(dtype).view(communicator.size, -1)

            own = communicator.scatter_sum(communicator.run(pieces))
            rows.append(own.view(height, size).to(rows[0].device if rows else own.device))
        block = rows[0].unsqueeze(0) if num == 1 else torch.stack(rows)
        made = GramBlock(size, block if before is None else block + before.rows)
        for parameter in group:
            self._collector.forget(parameter)
            self._blocks[parameter.label] = made


def with_damping(gram: Tensor, damping: float, dtype: torch.dtype) -> tuple[Tensor, float]:
    """A copy with ``damping`` times the mean of the diagonal added to it, and how much that is.

    It is 1 where nothing was seen: then least squares leaves weights as they are.
    """
    mean = float(gram.diagonal().mean(dtype=torch.float64)) if len(gram) else 0.0
    added = damping * mean if mean > 0 else 1.0
    damped = gram.to(dtype, copy=True)
    damped.diagonal().add_(added)
    return damped, added


def _is_double(gram: LocalGram | None) -> bool:
    return gram is not None and any(m.dtype == torch.float64 for m in gram.matrices.values())
