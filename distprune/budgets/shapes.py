"""Budgets that depend on the shapes of the parameters alone: Uniform, UniformPlus and ERK."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from distprune._common.amount import Bounded
from distprune.budgets.base import Budget, LinearDivision
from distprune.budgets.filling import Line


@dataclass(frozen=True)
class Uniform(Budget):
    """The same sparsity for each parameter: "layer" scope, with one exact total.

    A parameter that is pruned further already, or has a floor above or a ceiling below this
    sparsity, keeps its own, and the others share what is left, again with one sparsity.

    Cost: nothing is read or sent.
    """

    def divide(self, parameters: Sequence[Bounded]) -> LinearDivision:
        sizes = [parameter.num_elements for parameter in parameters]
        lines = tuple(Line(0, n) for n in sizes)
        return LinearDivision("budget='uniform'", tuple(parameters), lines, tuple(sizes))


@dataclass(frozen=True)
class UniformPlus(Budget):
    """Uniform, but for the first convolution, which stays dense, and the last layer.

    The last matrix, or convolution, of the list keeps at least 20 % of its elements. Parameters
    of three or more dimensions are convolutions. First and last are meant in the order of the
    list; under ``pipeline_parallel`` that is the order of the names.

    Cost: nothing is read or sent.

    Source: Gale et al., "The state of sparsity in deep neural networks", arXiv 1902.09574.
    """

    def divide(self, parameters: Sequence[Bounded]) -> LinearDivision:
        sizes = [parameter.num_elements for parameter in parameters]
        caps = list(sizes)
        layers = [i for i, parameter in enumerate(parameters) if len(parameter.shape) >= 2]
        convolutions = [i for i in layers if len(parameters[i].shape) >= 3]
        if layers:
            caps[layers[-1]] = 4 * sizes[layers[-1]] // 5
        if convolutions:
            caps[convolutions[0]] = 0
        lines = tuple(Line(0, n) for n in sizes)
        return LinearDivision("budget='uniform+'", tuple(parameters), lines, tuple(caps))


@dataclass(frozen=True)
class ERK(Budget):
    """Erdos-Renyi-Kernel: the density of a parameter falls with its size.

    The density is proportional to (the sum of the dimensions) / (their product), kernel sizes
    included: (n_in + n_out + height + width) / (n_in * n_out * height * width) for a convolution.
    So a parameter keeps a number of elements that is proportional to the sum of its dimensions.
    Parameters that would be denser than 1 stay dense, and the others are scaled again. The formula
    gives 1-d parameters the largest density of all.

    Cost: nothing is read or sent.

    Source: Evci et al., "Rigging the lottery", arXiv 1911.11134.
    """

    def divide(self, parameters: Sequence[Bounded]) -> LinearDivision:
        sizes = tuple(parameter.num_elements for parameter in parameters)
        dims = [sum(parameter.shape) or 1 for parameter in parameters]
        # The level is minus the common factor of the densities.
        lines = tuple(Line(n, dim if n else 0) for n, dim in zip(sizes, dims, strict=True))
        return LinearDivision("budget='erk'", tuple(parameters), lines, sizes)
