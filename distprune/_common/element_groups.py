"""Groups of elements of one tensor that are ranked on their own: the rule of live models and files.

Scope "layer" has one group, scope "row" one for each output: the elements that it sums over. A
pattern N:M cuts the inputs of each output into groups of M, of which N are kept; of a convolution,
each position of the kernel has groups of its own. Scope "global" has no groups.

Every group loses the same number of elements: the lowest ones in the order (key, row-major index).

With a pattern of tiles, AxB, it is tiles of A outputs and B inputs that are ranked and lost, in any
scope: by the sums of their scores, see ``tile_sums``. The tiles of a tensor lie like a tensor that
has one element for each. A tile is ranked as long as it has an element that is not pruned.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from distprune._common.amount import resolve_count
from distprune._common.sparsity_pattern import Pattern

Scope = Literal["global", "layer", "row"]


@dataclass(frozen=True, slots=True)
class Layout:
    """A tensor as [outer, inputs, columns, kernel], row-major.

    An output is a pair of an index of ``outer`` and one of ``columns``; it sums over ``inputs`` and
    ``kernel``. A matrix [out, in] is (out, in, 1, 1); [in, out] is (1, in, out, 1); a convolution
    [out, in, *kernel] is (out, in, 1, product of kernel).

    Attributes:
        stack: without columns, how many matrices, or groups of a convolution, ``outer`` goes over.
    """

    outer: int
    inputs: int
    columns: int = 1
    kernel: int = 1
    stack: int = 1

    @property
    def tiled_outputs(self) -> int:
        """The number of outputs that tiles divide: those of one matrix."""
        return self.columns if self.columns > 1 else self.outer // max(1, self.stack)

    def of_tiles(self, tile: tuple[int, int]) -> Layout:
        """The layout of the tiles, of a tensor that they fit."""
        outputs, inputs = tile
        if self.columns > 1:
            return Layout(self.outer, self.inputs // inputs, self.columns // outputs, self.kernel)
        rows = self.outer // outputs
        return Layout(rows, self.inputs // inputs, 1, self.kernel, self.stack)

    def tile_sizes(self, tile: tuple[int, int]) -> tuple[int, int, int, int]:
        """A tile's share of [outer, inputs, columns, kernel]."""
        outputs, inputs = tile
        return (1, inputs, outputs, 1) if self.columns > 1 else (outputs, inputs, 1, 1)

    @property
    def outputs(self) -> int:
        """The number of outputs."""
        return self.outer * self.columns

    @property
    def stride(self) -> int:
        """The distance of neighbours along the inputs, in elements."""
        return self.columns * self.kernel


@dataclass(frozen=True)
class Groups:
    """The groups of one tensor.

    The tensor is a sequence of blocks [length, columns, kernel], row-major. A block has a group for
    each column; with one column, it is a group itself. N:M = 2:4 with inputs stored first, that is
    length 4, columns 3, kernel 1::

        a b c        elements of the same letter are one group of 4 inputs; each letter is the
        a b c        column of an output
        a b c
        a b c

    Attributes:
        length, columns, kernel: of a block.
        num_pruned: elements that each group loses.
    """

    length: int
    columns: int
    kernel: int
    num_pruned: int

    @property
    def size(self) -> int:
        """Elements of a group."""
        return self.length * self.kernel

    @property
    def block(self) -> int:
        """Elements of the shortest run of whole groups."""
        return self.size * self.columns

    @property
    def stride(self) -> int:
        """Elements of a block for one step along its length."""
        return self.columns * self.kernel


def layout_along(label: str, shape: Sequence[int], dims: Sequence[int]) -> Layout:
    """The layout of a tensor whose outputs sum over these dimensions.

    Args:
        label: of the tensor, for messages.
        shape: of the tensor.
        dims: the dimension that N:M patterns run along. If outputs also sum over the last
            dimensions, as over the kernel of a convolution, these follow. Negative dimensions count
            from the end.

    Raises:
        ValueError: the tensor has no such dimensions, or they do not make a layout.
    """
    ndim = len(shape)
    inner = [dim + ndim if dim < 0 else dim for dim in dims]
    kernel = inner[1:]
    is_good = (
        bool(inner)
        and all(0 <= dim < ndim for dim in inner)
        and kernel == list(range(ndim - len(kernel), ndim))
        and (not kernel or inner[0] < kernel[0])
    )
    if not is_good:
        raise ValueError(
            f"{label} has the shape {list(shape)}, and input_dims says {list(dims)}; "
            "expected one of its dimensions, counted from 0, and after it, for a convolution, "
            "those of the kernel: the last ones."
        )
    first, start = inner[0], ndim - len(kernel)
    return Layout(
        math.prod(shape[:first]),
        shape[first],
        math.prod(shape[first + 1 : start]),
        math.prod(shape[start:]),
        math.prod(shape[: max(0, first - 1)]),
    )


@dataclass(frozen=True)
class GroupRule:
    """Which groups a tensor has, and how many elements each of them loses.

    Attributes:
        scope: what is ranked together, without a pattern.
        sparsity: of every group, in [0, 1]; with a pattern, what a schedule allows so far, or
            None.
        pattern: N:M, or tiles. Then "elements" are tiles, in all that is said of groups and counts.
    """

    scope: Scope
    sparsity: float | None
    pattern: Pattern | None = None

    @property
    def kept_of(self) -> tuple[int, int] | None:
        """(N, M) of a pattern N:M."""
        return None if self.pattern is None else self.pattern.kept_of

    @property
    def tile(self) -> tuple[int, int] | None:
        """(A, B) of a pattern of tiles."""
        return None if self.pattern is None else self.pattern.tile

    @property
    def is_together(self) -> bool:
        """Whether all tensors are ranked together, without groups."""
        return self.scope == "global" and self.kept_of is None

    @property
    def tile_size(self) -> int:
        """Elements of what is ranked: of a tile, or 1."""
        return 1 if self.tile is None else math.prod(self.tile)

    @property
    def goes_along_inputs(self) -> bool:
        """Whether it matters along which dimension the inputs of a tensor lie."""
        return self.kept_of is not None or self.tile is not None or self.scope == "row"

    @property
    def wanted(self) -> float | None:
        """The sparsity that every tensor is to have, before rounding; None if they compete."""
        if self.kept_of is None:
            return None if self.scope == "global" else self.sparsity
        kept, group = self.kept_of
        most = (group - kept) / group
        return most if self.sparsity is None else min(self.sparsity, most)

    def misfit(self, label: str, shape: Sequence[int], layout: Layout) -> str | None:
        """Why the pattern does not fit a tensor: only whole groups and tiles are made."""
        if self.tile is not None:
            outputs, inputs = self.tile
            if layout.tiled_outputs % outputs == 0 and layout.inputs % inputs == 0:
                return None
            return (
                f"{label} has {layout.tiled_outputs} outputs and {layout.inputs} inputs (shape "
                f"{list(shape)}), which tiles of {outputs} outputs and {inputs} inputs do not "
                f"divide: {self.pattern} does not fit. Exclude it."
            )
        if self.kept_of is None or layout.inputs % self.kept_of[1] == 0:
            return None
        m = self.kept_of[1]
        return (
            f"{label} has {layout.inputs} inputs (shape {list(shape)}), which {m} does not divide: "
            f"{self.pattern} does not fit. Exclude it."
        )

    def counts(self, numel: int, layout: Layout | None) -> tuple[int, int]:
        """How many groups a tensor has, and how many elements each of them loses.

        The sparsity of a group becomes a count with halves to even: each layer and each row by
        itself, so that the total may differ from the sparsity of all by half an element per group.
        """
        if self.tile is not None:
            of_tiles = None if layout is None else layout.of_tiles(self.tile)
            return replace(self, pattern=None).counts(numel // self.tile_size, of_tiles)
        if self.kept_of is not None:
            kept, group = self.kept_of
            most = group - kept
            wanted = most if self.sparsity is None else resolve_count(self.sparsity, group)
            return numel // group, min(wanted, most)
        if self.is_together:
            return 0, 0
        assert self.sparsity is not None
        if self.scope == "layer":
            return 1, resolve_count(self.sparsity, numel)
        assert layout is not None
        size = numel // layout.outputs if layout.outputs else 0
        return layout.outputs, resolve_count(self.sparsity, size)

    def groups(self, numel: int, layout: Layout | None, num_pruned: int) -> Groups:
        """The groups of a tensor, or of whole groups of it that lie like a tensor.

        Args:
            numel: elements.
            layout: where the inputs are, if the rule goes along them.
            num_pruned: elements that each group loses, from :meth:`counts`.

        Returns:
            Of the tiles, if there are any, as of a tensor with one element for each.
        """
        if self.tile is not None:
            of_tiles = None if layout is None else layout.of_tiles(self.tile)
            of_elements = replace(self, pattern=None)
            return of_elements.groups(numel // self.tile_size, of_tiles, num_pruned)
        if self.kept_of is not None:
            assert layout is not None
            return Groups(self.kept_of[1], layout.stride, 1, num_pruned)
        if layout is None or not self.goes_along_inputs:
            return Groups(numel, 1, 1, num_pruned)
        if layout.columns == 1:
            return Groups(layout.inputs * layout.kernel, 1, 1, num_pruned)
        return Groups(layout.inputs, layout.columns, layout.kernel, num_pruned)
