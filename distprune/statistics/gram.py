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

import torch
from torch import Tensor, nn
from torch.nn import functional

from distprune.base.naming import NamedParameter
from distprune.base.pruned_form import is_dtensor
from distprune.ranks.collectives import Communicator, with_whole_dim
from distprune.shards.factored import FactoredScores
from distprune.statistics.activation import ActivationStatistics
from distprune.statistics.collecting import LayerInputs, Met
from distprune.statistics.input_parts import product_of_rows, products_of_windows
from distprune.statistics.layers import WeightLayout
from distprune.statistics.parameters import Pairs, peers_of


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
    parameters: set[LayerInputs] = field(default_factory=set)


def _identity(met: Met) -> tuple[int, bool]:
    """Which matrix of a parameter rows belong to, and whether they are plain."""
    features = met.part.features
    number = features.start // len(features) if features else 0
    return number, met.part.token_ranks is None


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

    def _prepare(self) -> None:
        self._grams: dict[LayerInputs, LocalGram] = {}
        self._blocks: dict[LayerInputs, GramBlock] = {}
        # The last rows, whose product is not added yet, and the parameters that have met them.
        self._last: tuple[Met, list[LayerInputs]] | None = None

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
        factors: dict[str, Tensor] = {}
        turns = itertools.cycle(range(self._communicator.size))
        with self._communicator.exclusively(), torch.no_grad(), torch.inference_mode(False):
            for labels, block in blocks:
                factors |= dict.fromkeys(labels, self._inverse_diagonals(block, damping, turns))

        def obs(parameter: LayerInputs) -> FactoredScores:
            tokens = parameter.sums.counts.clamp(min=1)
            of_input = (1 / (factors[parameter.label] * tokens.view(-1, 1))).sqrt()
            layout = parameter.layout
            factor = layout.of_inputs(of_input.view(layout.input_shape)).float()
            return FactoredScores([[factor]])

        return self._scores(asked, obs)

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
            self._forget(self._local[position])
            self._blocks.pop(self._local[position], None)

    def blocks(self, parameters: Pairs | None = None) -> list[tuple[list[str], GramBlock]]:
        """This rank's rows of matrices, with the labels of those that share them. Collective.

        Raises, Cost: as :meth:`matrix`; nothing is gathered.
        """
        asked = self._asked(parameters)
        with self._communicator.exclusively(), torch.no_grad(), torch.inference_mode(False):
            grouped: dict[int, list[LayerInputs]] = {}
            for parameter, shared in zip(asked, self._shared_by_all(asked), strict=True):
                grouped.setdefault(shared, []).append(parameter)
            for group in grouped.values():
                self._sum_group(group)
        result: dict[int, tuple[list[str], GramBlock]] = {}
        for parameter in asked:
            block = self._blocks[parameter]
            result.setdefault(id(block), ([], block))[0].append(parameter.label)
        return list(result.values())

    def _shared_by_all(self, asked: Sequence[LayerInputs]) -> list[int]:
        """A number for each parameter: equal for those that share their sums on every rank."""

        def share() -> Tensor:
            numbers = []
            first: dict[object, str] = {}  # the first parameter of each sum, and of each block
            for parameter in asked:
                gram, block = self._gram_of(parameter), self._blocks.get(parameter)
                mine = [first.setdefault(each, parameter.label) for each in (gram, block) if each]
                which = gram is not None, block is not None
                layout = parameter.layout
                sizes = layout.num_matrices, layout.matrix_shape[1]
                digest = hashlib.sha256(
                    repr((self._communicator.index, which, mine, sizes)).encode()
                ).digest()
                numbers.append(int.from_bytes(digest[:8], "big", signed=True))
            return torch.tensor(numbers, dtype=torch.int64)

        shared: list[int] = self._communicator.reduce(len(asked), share).tolist()
        return shared

    def _sum_group(self, group: Sequence[LayerInputs]) -> None:
        """Sum what is new of the matrices that parameters share, and keep this rank's rows.

        Raises:
            RuntimeError: inputs were seen, and the matrices are gone.
        """
        communicator, layout = self._communicator, group[0].layout
        num, size = layout.num_matrices, layout.matrix_shape[1]
        height = -(-size // communicator.size)
        gram, before = self._gram_of(group[0]), self._blocks.get(group[0])
        matrices = {} if gram is None else gram.matrices
        # Others that go on adding to these matrices.
        is_shared = gram is not None and not gram.parameters <= set(group)
        level = (gram is not None) + any(m.dtype == torch.float64 for m in matrices.values())
        is_new = int(communicator.max(torch.tensor([int(level)])))
        if before is not None and not is_new:
            return
        if not is_new and bool(group[0].sums.second.any()):
            raise RuntimeError(
                f"{group[0].label}: its Gram matrix was forgotten, or was never collected: "
                "statistics that were loaded from a file have none. Expected new GramMatrices, "
                "collected again."
            )
        dtype = torch.float64 if is_new == 2 else torch.float32
        rows: list[Tensor] = []
        for number in range(num):

            def pieces(number: int = number) -> Tensor:
                matrix = matrices.get(number)
                if matrix is None:
                    return torch.zeros(communicator.size, height * size, dtype=dtype)
                padding = height * communicator.size - size
                if padding:
                    matrix = functional.pad(matrix, (0, 0, 0, padding))
                elif is_shared:
                    matrix = matrix.clone()
                return matrix.to(dtype).view(communicator.size, -1)

            own = communicator.scatter_sum(communicator.run(pieces))
            rows.append(own.view(height, size).to(rows[0].device if rows else own.device))
        block = rows[0].unsqueeze(0) if num == 1 else torch.stack(rows)
        made = GramBlock(size, block if before is None else block + before.rows)
        for parameter in group:
            self._forget(parameter)
            self._blocks[parameter] = made

    @contextlib.contextmanager
    def _collecting(self, parameters: Sequence[LayerInputs]) -> Iterator[None]:
        with super()._collecting(parameters):
            yield
            self._add_last()

    def _gram_of(self, parameter: LayerInputs) -> LocalGram | None:
        """The sums of a parameter; None if this rank has none that count."""
        gram, rank = self._grams.get(parameter), self._communicator.rank
        if gram is None or not gram.is_plain:
            return gram
        return gram if peers_of(self._same_tokens, rank)[0] == rank else None

    def _forget(self, parameter: LayerInputs) -> None:
        """Drop the sums of a parameter; they are freed if no other one shares them."""
        gram = self._grams.pop(parameter, None)
        if gram is not None:
            gram.parameters.remove(parameter)

    def _prepared(self, value: Tensor, feature_dim: int) -> Tensor:
        # Products of two features need both on one rank: row-wise layers have a part of them.
        return with_whole_dim(value, feature_dim % value.ndim) if is_dtensor(value) else value

    def _add(self, parameter: LayerInputs, met: Met) -> None:
        super()._add(parameter, met)
        ranks = met.part.token_ranks
        if ranks is not None and ranks[0] != self._communicator.rank:
            return  # the first of ranks that are known to have the same tokens adds products
        if met.convolution is not None:
            with _full_precision():
                products = products_of_windows(met.values.detach(), met.convolution)
            self._add_products([parameter], dict(enumerate(products)), is_plain=True)
            return
        rows = met.values.detach()
        rows = rows if met.keep is None else rows[met.keep]
        if self._last is not None:
            last, parameters = self._last
            if (
                parameter not in parameters
                and _identity(last) == _identity(met)
                and last.values.dtype == rows.dtype
                and torch.equal(last.values, rows)
            ):
                parameters.append(parameter)
                return
            self._add_last()
        # A copy: the model may change its own tensor in place before it is multiplied.
        self._last = Met(met.part, rows.clone() if met.keep is None else rows), [parameter]

    def _add_last(self) -> None:
        last, self._last = self._last, None
        if last is not None:
            met, parameters = last
            number, is_plain = _identity(met)
            with torch.inference_mode(False), torch.no_grad(), _full_precision():
                product = product_of_rows(met.values)
                self._add_products(parameters, {number: product}, is_plain=is_plain)

    def _add_products(
        self, parameters: list[LayerInputs], products: dict[int, Tensor], *, is_plain: bool
    ) -> None:
        """Add products to the sums of the parameters that have met the same rows.

        Raises:
            NotImplementedError: plain inputs and DTensors for one parameter.
        """
        # Parameters that have shared their sums until now, and go on to share them.
        sharing: dict[LocalGram | None, set[LayerInputs]] = {}
        for parameter in parameters:
            sharing.setdefault(self._grams.get(parameter), set()).add(parameter)
        for number_of_gram, (gram, group) in enumerate(sharing.items()):
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
                    is_last = number_of_gram == len(sharing) - 1
                    gram.matrices[number] = product if is_last else product.clone()


def with_damping(gram: Tensor, damping: float, dtype: torch.dtype) -> tuple[Tensor, float]:
    """A copy with ``damping`` times the mean of the diagonal added to it, and how much that is.

    It is 1 where nothing was seen: then least squares leaves weights as they are.
    """
    mean = float(gram.diagonal().mean(dtype=torch.float64)) if len(gram) else 0.0
    added = damping * mean if mean > 0 else 1.0
    damped = gram.to(dtype, copy=True)
    damped.diagonal().add_(added)
    return damped, added
