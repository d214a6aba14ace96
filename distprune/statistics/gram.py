"""GramMatrices: sums of x x^T of what layers are called with.

[Note: shared inputs] The projections of an attention are called with one tensor. Parameters that
have met the same rows so far, in value and in order, share one sum; at the first difference the
sum is copied, and each part goes on alone. So the result does not depend on what is shared.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from distprune.base.blocks import WeightLayout
from distprune.base.naming import NamedParameter
from distprune.base.pruned_form import is_dtensor
from distprune.ranks.collectives import Communicator, with_whole_dim
from distprune.shards.factored import FactoredScores
from distprune.statistics.activation import ActivationStatistics
from distprune.statistics.inputs import Inputs, Part, product_of_rows, products_of_windows
from distprune.statistics.parameters import Pairs, ParameterStatistics, peers_of


@dataclass(eq=False)
class LocalGram:
    """This rank's sums of x x^T, of parameters that have met the same rows.

    Attributes:
        is_plain: whether the inputs do not tell which ranks have the same tokens.
        matrices: by number, [inputs, inputs]; one that has met no row is missing.
        parameters: which share it.
    """

    is_plain: bool
    matrices: dict[int, Tensor] = field(default_factory=dict)
    parameters: set[ParameterStatistics] = field(default_factory=set)


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


@dataclass(frozen=True, eq=False)
class GramBlock:
    """This rank's rows of the Gram matrices that some parameters share, summed over all ranks.

    Attributes:
        rows: [matrices, rows, inputs]: as many rows on every rank, the last ones may be padding.
    """

    rows: Tensor

    def whole(self, number: int, communicator: Communicator) -> Tensor:
        """One matrix [inputs, inputs], on every rank. Collective.

        Cost: one all-gather; on one rank it is a view.
        """
        size = self.rows.shape[2]
        rows = communicator.gather(self.rows[number].reshape(-1))
        return rows.view(-1, size)[:size]


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

    def __init__(self, parameters: Pairs, **options: Any) -> None:
        super().__init__(parameters, **options)
        self._grams: dict[ParameterStatistics, LocalGram] = {}
        self._blocks: dict[ParameterStatistics, GramBlock] = {}
        # The last rows, whose product is not added yet, and the parameters that have met them.
        self._last: tuple[Part, Tensor, list[ParameterStatistics]] | None = None

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
        with self._communicator.exclusively():
            whole = [block.whole(n, self._communicator) for n in range(len(block.rows))]
        (layout,) = (p.layout for p in self._local if p.label == labels[0])
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
        asked = self._asked(parameters)
        blocks = self.blocks(parameters)
        communicator = self._communicator
        of_input: dict[str, Tensor] = {}
        turns = itertools.cycle(range(communicator.size))
        with communicator.exclusively(), torch.no_grad(), torch.inference_mode(False):
            for labels, block in blocks:
                num, _, size = block.rows.shape
                inverse = torch.zeros(num, size, dtype=torch.float64)  # its diagonals
                for number in range(num):
                    whole = block.whole(number, communicator)
                    if next(turns) == communicator.index:
                        damped, _ = with_damping(whole, damping, torch.float64)
                        factor, has_failed = torch.linalg.cholesky_ex(damped)
                        diagonal = torch.cholesky_inverse(factor).diagonal()
                        inverse[number] = torch.nan if has_failed else diagonal
                shared = communicator.reduce_floats(inverse.numel(), inverse.flatten)
                if bool(shared.isnan().any()):
                    raise ValueError(
                        f"{labels[0]}: its Gram matrix with damping={damping} is not positive "
                        "definite; expected a larger damping."
                    )
                of_input |= dict.fromkeys(labels, shared.view(num, size))

        def obs(parameter: ParameterStatistics) -> FactoredScores:
            tokens = parameter.sums.counts.clamp(min=1)
            values = (1 / (of_input[parameter.label] * tokens.view(-1, 1))).sqrt()
            layout = parameter.layout
            return FactoredScores([[layout.of_inputs(values.view(layout.input_shape)).float()]])

        return self._scores(asked, obs)

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
            self._forget(self._local[position])
            self._blocks.pop(self._local[position], None)

    def blocks(self, parameters: Pairs | None = None) -> list[tuple[list[str], GramBlock]]:
        """This rank's rows of matrices, with the labels of those that share them. Collective.

        Raises, Cost: as :meth:`matrix`; nothing is gathered.
        """
        asked = self._asked(parameters)
        with self._communicator.exclusively(), torch.no_grad(), torch.inference_mode(False):
            grouped: dict[int, list[ParameterStatistics]] = {}
            for parameter, shared in zip(asked, self._shared_by_all(asked), strict=True):
                grouped.setdefault(shared, []).append(parameter)
            for group in grouped.values():
                self._sum_group(group)
        result: dict[GramBlock, list[str]] = {}
        for parameter in asked:
            result.setdefault(self._blocks[parameter], []).append(parameter.label)
        return [(labels, block) for block, labels in result.items()]

    def _shared_by_all(self, asked: Sequence[ParameterStatistics]) -> list[int]:
        """A number for each parameter: equal for those that share their sums on every rank."""

        def share() -> Tensor:
            numbers = []
            firsts: dict[object, int] = {}  # the first parameter of each sum, and of each block
            for position, parameter in enumerate(asked):
                held = self._gram_of(parameter), self._blocks.get(parameter)
                mine = [each and firsts.setdefault(each, position) for each in held]
                sizes = parameter.layout.num_matrices, parameter.layout.matrix_shape[1]
                digest = hashlib.sha256(f"{self._communicator.index} {mine} {sizes}".encode())
                numbers.append(int.from_bytes(digest.digest()[:8], "big", signed=True))
            return torch.tensor(numbers, dtype=torch.int64)

        shared: list[int] = self._communicator.reduce(len(asked), share).tolist()
        return shared

    def _sum_group(self, group: Sequence[ParameterStatistics]) -> None:
        """Sum what is new of the matrices that parameters share, and keep this rank's rows.

        Raises:
            RuntimeError: inputs were seen, and the matrices are gone.
        """
        communicator, layout = self._communicator, group[0].layout
        num, size = layout.num_matrices, layout.matrix_shape[1]
        height = -(-size // communicator.size)
        gram, before = self._gram_of(group[0]), self._blocks.get(group[0])
        matrices = {} if gram is None else gram.matrices
        level = (gram is not None) + any(m.dtype == torch.float64 for m in matrices.values())
        level = int(communicator.max(torch.tensor([int(level)])))
        if not level and before is not None:
            return
        if not level and bool(group[0].sums.second.any()):
            raise RuntimeError(
                f"{group[0].label}: its Gram matrix was forgotten, or was never collected: "
                "statistics that were loaded from a file have none. Expected new GramMatrices, "
                "collected again."
            )
        dtype = torch.float64 if level == 2 else torch.float32

        def pieces(number: int) -> Tensor:
            matrix = matrices.get(number)
            if matrix is None:
                return torch.zeros(communicator.size, height * size, dtype=dtype)
            matrix = functional.pad(matrix, (0, 0, 0, height * communicator.size - size))
            return matrix.to(dtype).view(communicator.size, -1)

        rows: list[Tensor] = []
        for number in range(num):
            own = communicator.scatter_sum(communicator.run(partial(pieces, number)))
            rows.append(own.view(height, size).to(rows[0].device if rows else own.device))
        summed = rows[0].unsqueeze(0) if num == 1 else torch.stack(rows)
        block = GramBlock(summed if before is None else summed + before.rows)
        for parameter in group:
            self._forget(parameter)
            self._blocks[parameter] = block

    @contextlib.contextmanager
    def _collecting(self, parameters: Sequence[ParameterStatistics]) -> Iterator[None]:
        with super()._collecting(parameters):
            yield
            self._add_last()

    def _gram_of(self, parameter: ParameterStatistics) -> LocalGram | None:
        """The sums of a parameter; None if this rank has none that count."""
        gram, rank = self._grams.get(parameter), self._communicator.rank
        if gram is None or not gram.is_plain:
            return gram
        return gram if peers_of(self._same_tokens, rank)[0] == rank else None

    def _forget(self, parameter: ParameterStatistics) -> None:
        """Drop the sums of a parameter; they are freed if no other one shares them."""
        gram = self._grams.pop(parameter, None)
        if gram is not None:
            gram.parameters.remove(parameter)

    def _prepared(self, value: Tensor, feature_dim: int) -> Tensor:
        # Products of two features need both on one rank: row-wise layers have a part of them.
        return with_whole_dim(value, feature_dim % value.ndim) if is_dtensor(value) else value

    def _add(self, parameter: ParameterStatistics, inputs: Inputs) -> None:
        super()._add(parameter, inputs)
        part, values = inputs.part, inputs.values.detach()
        if part.token_ranks is not None and part.token_ranks[0] != self._communicator.rank:
            return  # the first of ranks that are known to have the same tokens adds products
        if inputs.convolution is not None:
            with _full_precision():
                products = products_of_windows(values, inputs.convolution)
            self._add_products([parameter], dict(enumerate(products)), is_plain=True)
            return
        rows = values if inputs.keep is None else values[inputs.keep]
        if self._last is not None:
            last_part, last, parameters = self._last
            is_same = parameter not in parameters and part == last_part and rows.dtype == last.dtype
            if is_same and torch.equal(last, rows):
                parameters.append(parameter)
                return
            self._add_last()
        # A copy: the model may change its own tensor in place before it is multiplied.
        self._last = part, rows.clone() if rows is values else rows, [parameter]

    def _add_last(self) -> None:
        if self._last is not None:
            (part, rows, parameters), self._last = self._last, None
            number = part.features.start // len(part.features) if part.features else 0
            with torch.inference_mode(False), torch.no_grad(), _full_precision():
                products = {number: product_of_rows(rows)}
                self._add_products(parameters, products, is_plain=part.token_ranks is None)

    def _add_products(
        self, parameters: list[ParameterStatistics], products: dict[int, Tensor], *, is_plain: bool
    ) -> None:
        """Add products to the sums of the parameters that have met the same rows.

        Raises:
            NotImplementedError: plain inputs and DTensors for one parameter.
        """
        # Parameters that have shared their sums until now, and go on to share them.
        sharing: dict[LocalGram | None, set[ParameterStatistics]] = {}
        for parameter in parameters:
            sharing.setdefault(self._grams.get(parameter), set()).add(parameter)
        for gram, group in sharing.items():
            if gram is None:
                gram = LocalGram(is_plain)
            elif gram.is_plain != is_plain:
                raise NotImplementedError(
                    f"{next(iter(group)).label}: its layer was called with a plain tensor and "
                    "with a DTensor; expected one of them in all calls, as it is not known which "
                    "ranks have the tokens of the plain one."
                )
            elif gram.parameters != group:  # the others have not met these rows
                gram.parameters -= group
                gram = LocalGram(is_plain, {n: m.clone() for n, m in gram.matrices.items()})
            gram.parameters |= group
            self._grams |= dict.fromkeys(group, gram)
            for number, product in products.items():
                if number in gram.matrices:
                    gram.matrices[number] += product.to(gram.matrices[number].device)
                else:
                    gram.matrices[number] = product if len(sharing) == 1 else product.clone()


def with_damping(gram: Tensor, damping: float, dtype: torch.dtype) -> tuple[Tensor, float]:
    """A copy with ``damping`` times the mean of the diagonal added to it, and how much that is.

    It is 1 where nothing was seen: then least squares leaves weights as they are.
    """
    mean = float(gram.diagonal().mean(dtype=torch.float64)) if len(gram) else 0.0
    added = damping * mean if mean > 0 else 1.0
    damped = gram.to(dtype, copy=True)
    damped.diagonal().add_(added)
    return damped, added
