"""Adding up x x^T of the inputs of layers: once for all layers that have the same input.

[Note: shared inputs] The projections of an attention are called with one tensor. Parameters that
have met the same rows so far, in value and in order, share one sum; at the first difference the
sum is copied, and each part goes on alone. So the result does not depend on what is shared.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from distprune._common.collectives import with_whole_dim
from distprune._common.pruned_form import is_dtensor
from distprune.statistics.collecting import Collector, LocalStatistics
from distprune.statistics.input_parts import Part, product_of_rows, products_of_windows


@dataclass(eq=False)
class Rows:
    """What one matrix was called with, and the parameters that were.

    Attributes:
        number: of the matrix in its parameter: which expert.
        values: [tokens, inputs], those that count.
        is_plain: whether they do not tell which ranks have the same tokens.
        seen_by: parameters that were called with it ...
        counted_by: ... in calls that count.
    """

    number: int
    values: Tensor
    is_plain: bool
    seen_by: list[LocalStatistics] = field(default_factory=list)
    counted_by: list[LocalStatistics] = field(default_factory=list)


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
        self._seen: Rows | None = None  # the last
        self._counted: Rows | None = None  # whose product is not added yet

    @contextlib.contextmanager
    def collecting(self, parameters: Sequence[LocalStatistics]) -> Iterator[None]:
        """Collect while the context is open; see :meth:`Collector.collecting`."""
        try:
            with super().collecting(parameters):
                yield
        finally:
            self._add_counted()
            self._seen = None

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

    def _note_rows(
        self,
        parameter: LocalStatistics,
        part: Part,
        rows: Tensor,
        keep: Tensor | None,
        num_kept: int | None,
    ) -> None:
        super()._note_rows(parameter, part, rows, keep, num_kept)
        if not self._adds(part):
            return
        values = rows.detach() if keep is None else rows.detach()[keep]
        number = part.features.start // len(part.features) if part.features else 0
        is_plain = part.token_ranks is None
        seen = self._seen
        if (
            seen is None
            or (seen.number, seen.is_plain) != (number, is_plain)
            or any(each is parameter for each in seen.seen_by)
            or seen.values.dtype != values.dtype
            or not torch.equal(seen.values, values)
        ):
            # A copy: the model may change its own tensor in place before the call counts.
            seen = self._seen = Rows(number, values.clone() if keep is None else values, is_plain)
        seen.seen_by.append(parameter)
        self.forwards.note(partial(self._count, seen, parameter))

    def _note_images(
        self,
        parameter: LocalStatistics,
        part: Part,
        images: Tensor,
        convolution: nn.Conv1d | nn.Conv2d,
    ) -> None:
        super()._note_images(parameter, part, images, convolution)
        if self._adds(part):
            with _full_precision():
                products = products_of_windows(images.detach(), convolution)
            found = dict(enumerate(products))
            self.forwards.note(partial(self._add_products, [parameter], found, is_plain=True))

    def _adds(self, part: Part) -> bool:
        return part.token_ranks is None or part.token_ranks[0] == self._rank

    def _count(self, rows: Rows, parameter: LocalStatistics) -> None:
        if self._counted is not rows:
            self._add_counted()
            self._counted = rows
        rows.counted_by.append(parameter)

    def _add_counted(self) -> None:
        rows, self._counted = self._counted, None
        if rows is None:
            return
        with torch.inference_mode(False), torch.no_grad(), _full_precision():
            product = product_of_rows(rows.values)
            self._add_products(rows.counted_by, {rows.number: product}, is_plain=rows.is_plain)

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
