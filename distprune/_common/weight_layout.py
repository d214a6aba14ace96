"""How the weight of a layer meets its input: as one matrix or several, [out, in] or [in, out]."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

EXPERT_LAYOUTS = ("experts", "transposed_experts")
_TRANSPOSED_LAYOUTS = ("conv1d_of_transformers", "transposed_experts")
LAYOUTS = ("linear", "conv1d_of_transformers", "convolution", *EXPERT_LAYOUTS)


@dataclass(frozen=True)
class WeightLayout:
    """How the weight of a layer meets its input.

    Attributes:
        kind: "linear" ([out, in]), "conv1d_of_transformers" ([in, out]), "convolution", or
            "experts" ([experts, out, in]) or "transposed_experts" ([experts, in, out]).
        shape: of the whole weight.
        groups: of a convolution.
    """

    kind: str
    shape: tuple[int, ...]
    groups: int = 1

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of a statistic that has one number for each input feature."""
        shape = self.shape
        if self.are_experts:
            return (shape[0], shape[self.input_dim])
        if self.kind == "convolution":
            return (self.groups * shape[1], *shape[2:])
        return shape[:1] if self.is_transposed else shape[1:]

    @property
    def num_inputs(self) -> int:
        """Number of input features."""
        return math.prod(self.input_shape)

    @property
    def num_matrices(self) -> int:
        """How many matrices it is: fused experts, or groups of a convolution."""
        return self.shape[0] if self.are_experts else self.groups

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """Outputs and inputs of each of its matrices."""
        num = max(1, self.num_matrices)
        return self.num_outputs // num, self.num_inputs // num

    @property
    def are_experts(self) -> bool:
        """Whether it is matrices of fused experts: each has tokens of its own."""
        return self.kind in EXPERT_LAYOUTS

    @property
    def num_token_counts(self) -> int:
        """How many numbers of tokens there are: one, or one for each expert."""
        return self.shape[0] if self.are_experts else 1

    @property
    def is_transposed(self) -> bool:
        """Whether the matrices are [in, out]."""
        return self.kind in _TRANSPOSED_LAYOUTS

    @property
    def input_dim(self) -> int:
        """The dimension of the inputs; of a convolution, that of the channels in a group."""
        return int(self.are_experts) + int(not self.is_transposed)

    @property
    def output_dim(self) -> int:
        """The dimension of the weight that has one row for each output."""
        return int(self.are_experts) + int(self.is_transposed)

    @property
    def num_outputs(self) -> int:
        """Number of outputs; of experts, those of each counted."""
        return self.num_token_counts * self.shape[self.output_dim]

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
        shape = [1] * len(self.shape)
        shape[self.output_dim] = -1
        if self.are_experts:
            shape[0] = self.shape[0]
        return values.reshape(shape)
