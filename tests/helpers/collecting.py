"""Statistics of what a model is called with, and the inputs of convolutions as matrices."""

from typing import TypeVar

from torch import Tensor, nn
from torch.nn import functional

from distprune.statistics import ActivationStatistics

Statistics = TypeVar("Statistics", bound=ActivationStatistics)


def collected(statistics: Statistics, model: nn.Module, *batches: object) -> Statistics:
    """Let statistics see a model run on batches, and return them."""
    with statistics.collecting():
        for batch in batches:
            model(batch)
    return statistics


def unfolded(layer: nn.Module, x: Tensor) -> Tensor:
    """The input of a convolution as a matrix: a row per position of the output."""
    # torch's own field, which its forward uses for other modes than zeros and for "same".
    around = [0 if layer.padding == "valid" else n for n in layer._reversed_padding_repeated_twice]
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    x = functional.pad(x, around, mode=mode)
    extra = (1,) * (4 - x.ndim)
    kernel, dilation, stride = (
        (*sizes, *extra) for sizes in (layer.kernel_size, layer.dilation, layer.stride)
    )
    columns = functional.unfold(x.view(*x.shape, *extra), kernel, dilation=dilation, stride=stride)
    return columns.transpose(1, 2).reshape(-1, columns.shape[1])
