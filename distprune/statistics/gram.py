"""GramMatrices: sums of x x^T of what layers are called with.

[Note: shared inputs] The projections of an attention are called with one tensor. Parameters that
have met the same rows so far, in value and in order, share one sum; at the first difference the
sum is copied, and each part goes on alone. So the result does not depend on what is shared.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional

from distprune.base.naming import NamedParameter
from distprune.base.pruned_form import is_dtensor
from distprune.ranks.collectives import Communicator, with_whole_dim
from distprune.shards.factored import FactoredScores
from distprune.statistics.activation import ActivationStatistics
from distprune.statistics.collecting import Collector, LocalStatistics
from distprune.statistics.input_parts import (
    Part,
    peers_of,
    product_of_rows,
    products_of_windows,
)
from distprune.statistics.layers import WeightLayout
from distprune.statistics.totals import Pairs, Totals


@dataclass(eq=False)
class Rows:
    """What one matrix was called with, and the parameters that were.

    Attributes:
        number: of the matrix in its parameter: which expert.
        values: [tokens, inputs], those that count.
        is_plain: whether they do not tell which ranks have the same tokens.
        parameters: that were called with it.
    """

    number: int
    values: Tensor
    is_plain: bool
    parameters: list[LocalStatistics] = field(default_factory=list)


@dataclass(eq=False)
class LocalGram:
    """This rank's sums of x x^T, of parameters that have met the same rows.

    Attributes:
        parameters: which share it.
        matrices: by number, [inputs, inputs]; one that has met no row is missing.
        is_plain: as :attr:`Rows.is_plain`.
    """

    parameters: list[LocalStatistics]
    matrices: dict[int, Tensor]
    is_plain: bool

    def add(self, number: int, product: Tensor) -> None:
        """Add a product of a matrix; it may be kept, and is the caller's no longer."""
        if number in self.matrices:
            self.matrices[number] += product.to(self.matrices[number].device)
        else:
            self.matrices[number] = product


class GramCollector(Collector):
    """Adds up x x^T beside the sums of :class:`Collector`; see [Note: shared inputs].

    Args:
        rank: this one. Of ranks that are known to have the same tokens, the first adds products.
    """

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = rank
        self._of_parameter: dict[int, LocalGram] = {}
        self._last: Rows | None = None  # whose product is not added yet

    @contextlib.contextmanager
    def collecting(self, parameters: Sequence[LocalStatistics]) -> Iterator[None]:
        """Collect while the context is open; see :meth:`Collector.collecting`."""
        with super().collecting(parameters):
            yield
            self._add_last()

    def gram_of(self, parameter: LocalStatistics) -> LocalGram | None:
        """The sums of a parameter; None if this rank has none."""
        return self._of_parameter.get(id(parameter))

    def forget(self, parameter: LocalStatistics) -> None:
        """Drop the sums of a parameter; they are freed if no other one shares them."""
        gram = self._of_parameter.pop(id(parameter), None)
        if gram is not None:
            gram.parameters.remove(parameter)

    def _prepared(self, value: Tensor, feature_dim: int) -> Tensor:
        # Products of two features need both on one rank: row-wise layers have a part of them.
        return with_whole_dim(value, feature_dim % value.ndim) if is_dtensor(value) else value

    def _add_rows(
        self,
        parameter: LocalStatistics,
        part: Part,
        rows: Tensor,
        keep: Tensor | None,
        num_kept: int | None,
    ) -> None:
        super()._add_rows(parameter, part, rows, keep, num_kept)
        if not self._adds(part):
            return
        values = rows.detach() if keep is None else rows.detach()[keep]
        number = part.features.start // len(part.features) if part.features else 0
        is_plain = part.token_ranks is None
        last = self._last
        if (
            last is None
            or (last.number, last.is_plain) != (number, is_plain)
            or any(each is parameter for each in last.parameters)
            or last.values.dtype != values.dtype
            or not torch.equal(last.values, values)
        ):
            self._add_last()
            # A copy: the model may change its own tensor in place before it is multiplied.
            last = self._last = Rows(number, values.clone() if keep is None else values, is_plain)
        last.parameters.append(parameter)

    def _add_images(
        self,
        parameter: LocalStatistics,
        part: Part,
        images: Tensor,
        convolution: nn.Conv1d | nn.Conv2d,
    ) -> None:
        super()._add_images(parameter, part, images, convolution)
        if self._adds(part):
            with _full_precision():
                products = products_of_windows(images.detach(), convolution)
            self._add_products([parameter], dict(enumerate(products)), is_plain=True)

    def _adds(self, part: Part) -> bool:
        return part.token_ranks is None or part.token_ranks[0] == self._rank

    def _add_last(self) -> None:
        rows, self._last = self._last, None
        if rows is None:
            return
        with torch.inference_mode(False), torch.no_grad(), _full_precision():
            product = product_of_rows(rows.values)
            self._add_products(rows.parameters, {rows.number: product}, is_plain=rows.is_plain)

    def _add_products(
        self, parameters: list[LocalStatistics], products: dict[int, Tensor], *, is_plain: bool
    ) -> None:
        """Add products to the sums of the parameters that have met the same rows.

        Raises:
            NotImplementedError: plain inputs and DTensors for one parameter.
        """
        ids = {id(parameter) for parameter in parameters}
        new = [p for p in parameters if id(p) not in self._of_parameter]
        found = {id(gram): gram for p in parameters if (gram := self.gram_of(p)) is not None}
        grams = list(found.values())
        for gram in grams.copy():
            others = [p for p in gram.parameters if id(p) not in ids]
            if others:  # they have not met these rows
                gram.parameters = [p for p in gram.parameters if id(p) in ids]
                copies = {number: matrix.clone() for number, matrix in gram.matrices.items()}
                self._share(LocalGram(others, copies, gram.is_plain))
            if gram.is_plain != is_plain:
                raise NotImplementedError(
                    f"{gram.parameters[0].label}: its layer was called with a plain tensor and "
                    "with a DTensor; expected one of them in all calls, as it is not known which "
                    "ranks have the tokens of the plain one."
                )
        if new:
            grams.append(LocalGram(new, {}, is_plain))
            self._share(grams[-1])
        for gram in grams:
            for number, product in products.items():
                gram.add(number, product if gram is grams[-1] else product.clone())

    def _share(self, gram: LocalGram) -> None:
        for parameter in gram.parameters:
            self._of_parameter[id(parameter)] = gram


@contextlib.contextmanager
def _full_precision() -> Iterator[None]:
    """Multiply fp32 as fp32: an accelerator may be set to fewer bits."""
    before = torch.get_float32_matmul_precision()
    if before == "highest":
        yield
        return
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


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

    A file has the activation statistics without the matrices.
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
        return self._scores(totals, lambda p, _: FactoredScores([[factors[p.label]]]))

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
        found = set() if gram is None else {matrix.dtype for matrix in gram.matrices.values()}
        level = 0 if gram is None else 1 + int(torch.float64 in found)
        is_new = int(communicator.max(torch.tensor([level])))
        if before is not None and not is_new:
            return
        if not is_new and bool(totals[label].squares.any()):
            raise RuntimeError(
                f"{label}: its Gram matrix was forgotten, or was never collected: statistics that "
                "were loaded from a file have none. Expected new GramMatrices, collected again."
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
