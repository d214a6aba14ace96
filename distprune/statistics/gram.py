"""GramMatrices: sums of x x^T of what layers are called with.

[Note: shared inputs] The projections of an attention are called with one tensor. Rows that several
parameters have met, one right after the other, are multiplied once, and added to the sum of exactly
these parameters. The matrix of a parameter is the total of all sums that it is in: one, unless
layers have met different rows in some calls.

[Note: order] Ranks may share the calls of layers in any way, because these sums have no order. The
product of the rows of one call is one term. Its element i, j is at most |x_i| |x_j|, the norms of
both features in this call, and is rounded to a multiple of 2**-24 of that. The terms are added in
fp64: this is exact, unless |x_i| |x_j| of a call is below 2**-27 of its sum over all calls. The sum
over all ranks is rounded to fp32.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from distprune.base.blocks import WeightLayout
from distprune.base.naming import NamedParameter
from distprune.ranks.collectives import Communicator
from distprune.shards.factored import FactoredScores
from distprune.statistics.activation import ActivationStatistics
from distprune.statistics.parameters import Entry, Pairs, Part, peers_of, product_of_rows, spans


@dataclass(eq=False)
class LocalGram:
    """This rank's sums of x x^T of rows that some parameters have met together.

    Attributes:
        parameters: all of them, and no others.
        is_plain: whether the inputs do not tell which ranks have the same tokens.
        matrices: by number, fp64 [inputs, inputs]; one that has met no row is missing.
    """

    parameters: set[Entry]
    is_plain: bool
    matrices: dict[int, Tensor] = field(default_factory=dict)


@contextlib.contextmanager
def _full_precision() -> Iterator[None]:
    """Multiply fp32 as fp32: an accelerator may be set to fewer bits."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


# This rank's rows of the Gram matrices that some parameters share, summed over all ranks: of each
# matrix [rows, inputs], as many on every rank; the last ones may be padding.
GramBlock = tuple[Tensor, ...]


def whole_matrix(rows: Tensor, communicator: Communicator) -> Tensor:
    """One Gram matrix [inputs, inputs] of the rows that each rank has, on all. Collective.

    Cost: one all-gather; on one rank it is a view.
    """
    size = rows.shape[1]
    return communicator.gather(rows.reshape(-1)).view(-1, size)[:size]


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

    Products are of fp32, and so are the matrices. Ranks that share the batches have the bits of one
    process that runs each of them with as many threads: see [Note: order]. Where tokens come to a
    layer in other calls, matrices agree to 1e-6 of the largest element; of integers, they have the
    same bits as long as sums are below 2**24. Layers with the same input share one matrix while
    they have met the same rows: the projections of an attention, of a gated unit. Under row-wise
    tensor parallelism the ranks have a part of the features each: the inputs of such layers are
    gathered.

    Args, Raises: as :class:`ActivationStatistics`.

    Cost: 8 bytes x inputs**2 for each different input on every rank while batches are collected,
    and the inputs of one call that is under way; per token 2 x inputs**2 operations. Once the
    matrices are asked for, each rank keeps a block of rows, and 4 bytes x inputs**2 / ranks: one
    reduce-scatter per matrix. Where this is too much, go block by block:
    :func:`prune_sequentially` forgets the matrices of a block after its pruning.

    A file has the activation statistics without the matrices.
    """

    # Products of two features need both on one rank: row-wise layers have a part of them.
    _NEEDS_WHOLE_ROWS = True

    def __init__(self, parameters: Pairs, **options: Any) -> None:
        super().__init__(parameters, **options)
        self._grams: dict[Entry, list[LocalGram]] = {}  # those that it is in
        self._blocks: dict[Entry, GramBlock] = {}
        # The last rows, whose product is not added yet, and the parameters that have met them.
        self._last: tuple[Part, Tensor, list[Entry]] | None = None

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
        ((_, block),) = self.blocks([(module, name)])
        ((_, layout),) = self.layouts_of([(module, name)])
        with self._communicator.exclusively():
            whole = torch.stack([whole_matrix(rows, self._communicator) for rows in block])
        return whole if layout.are_experts or layout.groups > 1 else whole[0]

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
                shape = len(block), block[0].shape[1]
                inverse = torch.zeros(shape, dtype=torch.float64)  # the diagonals
                for number, rows in enumerate(block):
                    whole = whole_matrix(rows, communicator)
                    if next(turns) == communicator.index and bool(whole.any()):
                        damped = whole.double()
                        damped.diagonal().add_(damping * damped.diagonal().mean())
                        factor, has_failed = torch.linalg.cholesky_ex(damped)
                        diagonal = torch.cholesky_inverse(factor).diagonal()
                        inverse[number] = torch.nan if has_failed else diagonal
                shared = communicator.reduce_floats(inverse.numel(), inverse.flatten)
                if bool(shared.isnan().any()):
                    text = f"with {damping=} its Gram matrix is not positive definite"
                    raise ValueError(f"{labels[0]}: {text}; expected a larger damping.")
                of_input |= dict.fromkeys(labels, shared.view(shape))

        def obs(parameter: Entry) -> FactoredScores:
            layout, inverse = parameter.layout, of_input[parameter.label]
            counts = parameter.sums[0].view(-1, 1)
            wanda = (parameter.sums[2].view(inverse.shape) / counts).sqrt()
            values = torch.where(inverse == 0, wanda, (1 / (inverse * counts)).sqrt())
            return FactoredScores([[layout.of_inputs(values.view(layout.input_shape)).float()]])

        return self._scores(asked, obs)

    def layouts_of(self, parameters: Pairs | None) -> list[tuple[str, WeightLayout]]:
        """The name and the layout of each of some parameters. Local.

        Raises:
            ValueError: one that is none of these statistics.
        """
        return [(parameter.label, parameter.layout) for parameter in self._entries_of(parameters)]

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that take part."""
        return self._communicator.ranks

    def forget(self, parameters: Pairs | None = None) -> None:
        """Free the matrices of some parameters, by default of all. Local; do it on every rank.

        Their sums stay, and so the scores of :class:`ActivationStatistics`.
        """
        for parameter in self._entries_of(parameters):
            self._forget(parameter)
            self._blocks.pop(parameter, None)

    def blocks(self, parameters: Pairs | None = None) -> list[tuple[list[str], GramBlock]]:
        """This rank's rows of matrices, with the labels of those that share them. Collective.

        Raises, Cost: as :meth:`matrix`; nothing is gathered.
        """
        asked = self._asked(parameters)
        with self._communicator.exclusively(), torch.no_grad(), torch.inference_mode(False):
            for group in self._groups(asked):
                self._sum_group(group)
        result: dict[GramBlock, list[str]] = {}
        for parameter in asked:
            result.setdefault(self._blocks[parameter], []).append(parameter.label)
        return [(labels, block) for block, labels in result.items()]

    def _groups(self, asked: Sequence[Entry]) -> list[list[Entry]]:
        """Parameters that share all of their sums on every rank."""
        held = []
        firsts: dict[object, int] = {}  # the first parameter of each sum, and of each block
        for position, parameter in enumerate(asked):
            sums = *self._counting(parameter), self._blocks.get(parameter)
            sizes = parameter.layout.num_matrices, parameter.layout.matrix_shape[1]
            held.append([sizes, [firsts.setdefault(each, position) for each in sums if each]])
        texts, _ = self._communicator.distinct_texts(json.dumps(held))
        groups: dict[str, list[Entry]] = {}
        for parameter, *of_ranks in zip(asked, *map(json.loads, texts), strict=True):
            groups.setdefault(str(of_ranks), []).append(parameter)
        return list(groups.values())

    def _sum_group(self, group: Sequence[Entry]) -> None:
        """Sum what is new of the matrices that parameters share, and keep this rank's rows.

        Raises:
            RuntimeError: inputs were seen, and the matrices are gone.
        """
        communicator, layout = self._communicator, group[0].layout
        num, size = layout.num_matrices, layout.matrix_shape[1]
        height = -(-size // communicator.size)
        before, grams = self._blocks.get(group[0]), self._counting(group[0])
        is_new = bool(communicator.max(torch.tensor([len(grams)])))
        if not is_new and before is not None:
            return
        if not is_new and bool(group[0].sums[2].any()):
            raise RuntimeError(
                f"{group[0].label}: its Gram matrix was forgotten, or was never collected, as in "
                "statistics of a file; expected new GramMatrices, collected again."
            )
        devices = [matrix.device for gram in grams for matrix in gram.matrices.values()]
        device = devices[0] if devices else torch.device("cpu")

        def pieces(number: int) -> Tensor:
            shape = height * communicator.size, size
            total = torch.zeros(shape, dtype=torch.float64, device=device)
            for gram in grams:
                if number in gram.matrices:
                    total[:size] += gram.matrices[number].to(device)
            return total.view(communicator.size, -1)

        rows = []
        for number in range(num):
            found = communicator.scatter_sum(communicator.run(partial(pieces, number)))
            rows.append(found.view(height, size).float())
        if before is not None:
            rows = [new + earlier for new, earlier in zip(rows, before, strict=True)]
        block = tuple(rows)
        for parameter in group:
            self._forget(parameter)
            self._blocks[parameter] = block

    @contextlib.contextmanager
    def _collecting(self, parameters: Sequence[Entry]) -> Iterator[None]:
        with super()._collecting(parameters):
            yield
            self._add_last()

    def _counting(self, parameter: Entry) -> list[LocalGram]:
        """The sums that a parameter is in, and that count on this rank."""
        grams, rank = self._grams.get(parameter, []), self._communicator.rank
        adds_plain = peers_of(self._same_tokens, rank)[0] == rank
        return [gram for gram in grams if adds_plain or not gram.is_plain]

    def _forget(self, parameter: Entry) -> None:
        """Drop the sums of a parameter; they are freed if no other one is in them."""
        for gram in self._grams.pop(parameter, ()):
            gram.parameters.remove(parameter)

    def _add(
        self, parameter: Entry, part: Part, inputs: Tensor, keep: Tensor | None = None
    ) -> None:
        super()._add(parameter, part, inputs, keep)
        width = parameter.layout.matrix_shape[1]
        if part.token_ranks is not None and part.token_ranks[0] != self._communicator.rank:
            return  # the first of ranks that are known to have the same tokens adds products
        rows = inputs if keep is None else inputs[keep]
        if self._last is not None:
            last_part, last, parameters = self._last
            is_alike = last_part == part and parameters[0].layout.matrix_shape[1] == width
            is_new = parameter not in parameters and rows.dtype == last.dtype
            if is_alike and is_new and torch.equal(last, rows):
                parameters.append(parameter)
                return
            self._add_last()
        # A copy: the model may change its own tensor in place before it is multiplied.
        self._last = part, rows.clone() if rows is inputs else rows, [parameter]

    def _add_last(self) -> None:
        """Multiply the last rows, and add products to the sum of exactly those that met them."""
        if self._last is None:
            return
        (part, rows, parameters), self._last = self._last, None
        together, is_plain = set(parameters), part.token_ranks is None
        for gram in self._grams.get(parameters[0], ()):
            if gram.parameters == together and gram.is_plain == is_plain:
                break
        else:
            gram = LocalGram(together, is_plain)
            for parameter in parameters:
                self._grams.setdefault(parameter, []).append(gram)
        width = max(1, parameters[0].layout.matrix_shape[1])
        first = part.features.start // width
        with torch.inference_mode(False), torch.no_grad(), _full_precision():
            for number, columns in enumerate(torch.split(rows, width, 1), first):
                if number not in gram.matrices:
                    shape = columns.shape[1], columns.shape[1]
                    gram.matrices[number] = columns.new_zeros(shape, dtype=torch.float64)
                add_product(gram.matrices[number], columns)


def add_product(total: Tensor, rows: Tensor) -> None:
    """Add the sum of x x^T over rows [tokens, inputs], rounded: see [Note: order]."""
    product = product_of_rows(rows).to(total.device)
    norms = product.diagonal().double().sqrt() * 2**14
    for start, stop in spans(len(total), len(total), total.device):
        shift = norms[start:stop, None] * norms  # 2**28 |x_i| |x_j|, of 53 bits
        total[start:stop] += product[start:stop].double().add_(shift).sub_(shift)
