"""Blocks of elements of one tensor that are ranked on their own: the rule of live models and files.

Scope "layer" has one block, scope "row" one for each output: the elements that it sums over. A
pattern N:M cuts the inputs of each output into blocks of M, of which N are kept; of a convolution,
each position of the kernel has blocks of its own. Scope "global" has no blocks.

Every block loses the same number of elements: the lowest ones in the order (key, row-major index).

Importing this module does not import numpy, because the help of the command line does without.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from distprune.base.amount import resolve_count

if TYPE_CHECKING:
    from torch import Tensor

_PATTERN = re.compile("([0-9]{1,4}):([0-9]{1,4})")


def parse_pattern(pattern: object) -> tuple[int, int]:
    """(N, M) of a pattern "N:M", which keeps N of every M neighbours along the inputs.

    Raises:
        ValueError: anything else.
    """
    match = _PATTERN.fullmatch(pattern) if isinstance(pattern, str) else None
    if match is not None and 0 < int(match[1]) < int(match[2]):
        return int(match[1]), int(match[2])
    raise ValueError(f"expected a pattern N:M such as '2:4', got {pattern!r}")


Scope = Literal["global", "layer", "row"]


class Layout(NamedTuple):
    """A tensor as [outer, inputs, columns, kernel], row-major.

    An output is a pair of an index of ``outer`` and one of ``columns``; it sums over ``inputs`` and
    ``kernel``. A matrix [out, in] is (out, in, 1, 1); [in, out] is (1, in, out, 1); a convolution
    [out, in, *kernel] is (out, in, 1, product of kernel).
    """

    outer: int
    inputs: int
    columns: int = 1
    kernel: int = 1

    @property
    def stride(self) -> int:
        """The distance of neighbours along the inputs, in elements."""
        return self.columns * self.kernel


class Blocks(NamedTuple):
    """The blocks of one tensor.

    The tensor is a sequence of bands [length, columns, kernel], row-major. A band has a block for
    each column; with one column, it is a block itself. N:M = 2:4 with inputs stored first, that is
    length 4, columns 3, kernel 1::

        a b c        elements of the same letter are one block of 4 inputs; each letter is the
        a b c        column of an output
        a b c
        a b c

    Attributes:
        length, columns, kernel: of a band.
        num_pruned: elements that each block loses.
    """

    length: int
    columns: int
    kernel: int
    num_pruned: int

    @property
    def size(self) -> int:
        """Elements of a block."""
        return self.length * self.kernel

    @property
    def band(self) -> int:
        """Elements of the shortest run of whole blocks."""
        return self.size * self.columns

    def num_pruned_of(self, numel: int) -> int:
        """Elements that a tensor of so many loses."""
        return numel // self.size * self.num_pruned if self.size else 0

    @property
    def stride(self) -> int:
        """Elements of a band for one step along its length."""
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
    ndim, start = len(shape), len(shape) - len(dims[1:])
    inner = [dim % ndim if -ndim <= dim < ndim else ndim for dim in dims]
    if not inner or inner[0] >= start or inner[1:] != list(range(start, ndim)):
        raise ValueError(
            f"{label} has the shape {list(shape)}, and input_dims says {list(dims)}; "
            "expected one of its dimensions and, of a convolution, those of the kernel after it."
        )
    first, size = inner[0], math.prod
    return Layout(
        size(shape[:first]), shape[first], size(shape[first + 1 : start]), size(shape[start:])
    )


@dataclass(frozen=True)
class BlockRule:
    """Which blocks a tensor has, and how many elements each of them loses.

    Attributes:
        scope: what is ranked together, without a pattern.
        sparsity: of every block, in [0, 1]; with a pattern, what a schedule allows so far, or
            None.
        kept_of: (N, M) of a pattern N:M.
    """

    scope: Scope
    sparsity: float | None
    kept_of: tuple[int, int] | None = None

    @property
    def needs_input_dim(self) -> bool:
        """Whether it matters along which dimension the inputs of a tensor lie."""
        return self.kept_of is not None or self.scope == "row"

    @property
    def wanted(self) -> float:
        """The sparsity that every tensor is to have, before rounding; they do not compete."""
        kept, block = self.kept_of or (0, 1)
        most = (block - kept) / block
        return most if self.sparsity is None else min(self.sparsity, most)

    def misfit(self, label: str, shape: Sequence[int], layout: Layout) -> str | None:
        """Why the pattern does not fit a tensor: only whole blocks are made."""
        if self.kept_of is None or layout.inputs % self.kept_of[1] == 0:
            return None
        n, m = self.kept_of
        return (
            f"{label} has {layout.inputs} inputs (shape {list(shape)}), which {m} does not divide: "
            f"{n}:{m} does not fit. Exclude it."
        )

    def blocks(self, numel: int, layout: Layout | None) -> Blocks:
        """The blocks of a tensor, or of whole blocks of it that lie like a tensor.

        The sparsity of a block becomes a count with halves to even: each layer and each row by
        itself, so that the total may differ from the sparsity of all by half an element per block.

        Args:
            numel: elements.
            layout: where the inputs are; None where the rule does not go along them.
        """
        if self.kept_of is not None:
            assert layout is not None
            form = self.kept_of[1], layout.stride, 1
        elif layout is None or not self.needs_input_dim:
            form = numel, 1, 1
        elif layout.columns == 1:
            form = layout.inputs * layout.kernel, 1, 1
        else:
            form = layout.inputs, layout.columns, layout.kernel
        return Blocks(*form, resolve_count(self.wanted, form[0] * form[2]))


EXPERT_LAYOUTS = ("experts", "transposed_experts")
_TRANSPOSED_LAYOUTS = ("conv1d_of_transformers", "transposed_experts")
LAYOUTS = ("linear", "conv1d_of_transformers", "convolution", *EXPERT_LAYOUTS)


@dataclass(unsafe_hash=True)
class WeightLayout:
    """How the weight of a layer meets its input.

    Args:
        kind: "linear" ([out, in]), "conv1d_of_transformers" ([in, out]), "convolution", or
            "experts" ([experts, out, in]) or "transposed_experts" ([experts, in, out]).
        shape: of the whole weight.
        groups: of a convolution.

    Attributes:
        are_experts: whether it is matrices of fused experts: each has tokens of its own.
        is_transposed: whether the matrices are [in, out].
        input_dim: the dimension of the inputs; of a convolution, that of the channels in a group.
        output_dim: the dimension of the weight that has one row for each output.
        num_matrices: how many matrices it is: fused experts, or groups of a convolution.
        num_token_counts: how many numbers of tokens there are: one, or one for each expert.
        input_shape: shape of a statistic that has one number for each input feature.
        num_inputs: number of input features.
        num_outputs: number of outputs; of experts, those of each counted.
        matrix_shape: outputs and inputs of each of its matrices.
    """

    kind: str
    shape: tuple[int, ...]
    groups: int = 1

    def __post_init__(self) -> None:
        self.are_experts = self.kind in EXPERT_LAYOUTS
        self.is_transposed = self.kind in _TRANSPOSED_LAYOUTS
        self.input_dim = self.are_experts + (not self.is_transposed)
        self.output_dim = self.are_experts + self.is_transposed
        self.num_token_counts = self.shape[0] if self.are_experts else 1
        self.num_matrices = self.shape[0] if self.are_experts else self.groups
        self.input_shape = tuple(n for d, n in enumerate(self.shape) if d != self.output_dim)
        if self.kind == "convolution":
            self.input_shape = (self.groups * self.shape[1], *self.shape[2:])
        self.num_inputs = math.prod(self.input_shape)
        self.num_outputs = self.num_token_counts * self.shape[self.output_dim]
        num = max(1, self.num_matrices)
        self.matrix_shape = self.num_outputs // num, self.num_inputs // num

    def of_inputs(self, values: Tensor) -> Tensor:
        """A number per input feature, as a factor that broadcasts to the weight.

        Args:
            values: of the input shape.

        Returns:
            Of as many dimensions as the weight; a view. For a convolution with groups it has
            the shape of the weight: outputs of different groups see different inputs.
        """
        if self.kind != "convolution":
            return values.unsqueeze(self.output_dim)
        if self.groups == 1:
            return values.unsqueeze(0)
        per_group = values.reshape(self.groups, 1, *self.shape[1:])
        repeats = self.shape[0] // self.groups
        return per_group.expand(-1, repeats, *self.shape[1:]).reshape(self.shape)

    def of_outputs(self, values: Tensor) -> Tensor:
        """A number per output, [outputs], as a factor that broadcasts to the weight; a view."""
        is_dim = [self.are_experts and dim == 0 for dim in range(len(self.shape))]
        is_dim[self.output_dim] = True
        return values.reshape([n if own else 1 for n, own in zip(self.shape, is_dim, strict=True)])
