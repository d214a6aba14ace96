"""The layers that statistics are collected of, and how their weights meet the inputs.

A weight has an *input shape*: one statistic for each input feature that it multiplies.

    layer                    weight                  input shape        one token is
    nn.Linear                [out, in]               [in]               a row of the input
    transformers' Conv1D     [in, out]               [in]               a row of the input
    nn.Conv1d, nn.Conv2d     [out, in / groups, *k]  [in, *k]           a position of the output
    fused experts            [experts, out, in]      [experts, in]      a row that came to an expert
    fused experts that say   [experts, in, out]      [experts, in]      a row that came to an expert
    ``is_transposed``
"""

from __future__ import annotations

import sys

import torch
from torch import nn

from distprune.base.blocks import WeightLayout as WeightLayout

# Their forward is F.linear, or a convolution, of the input as it comes.
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d)
_FALCON_LINEAR = ("models.falcon.modeling_falcon", "FalconLinear")
_CONV1D = ("pytorch_utils", "Conv1D")
_JETMOE_EXPERTS = ("models.jetmoe.modeling_jetmoe", "JetMoeParallelExperts")


def layout_of(module: nn.Module, name: str, shape: torch.Size) -> WeightLayout | None:
    """How a parameter meets the input of its module.

    Args:
        module, name: the owner of the parameter and its name there.
        shape: of the whole parameter.

    Returns:
        None if the input of the module is not what the parameter multiplies, or it cannot be known
        that it is.
    """
    kind = None
    is_fused = len(shape) == 3
    if is_fused and isinstance(getattr(module, "is_transposed", None), bool):
        # What transformers' use_experts_implementation says; see experts.[Note: fused experts].
        kind = "transposed_experts" if module.is_transposed else "experts"
    elif name == "weight":
        # Falcon's linear layers have a forward of their own, which does what nn.Linear's does.
        if _calls(module, nn.Linear) or _calls_transformers(module, *_FALCON_LINEAR):
            kind = "linear"
        elif any(_calls(module, convolution) for convolution in _CONVOLUTIONS):
            kind = "convolution"
        elif _calls_transformers(module, *_CONV1D):
            kind = "conv1d_of_transformers"
        elif is_fused and _calls_transformers(module, *_JETMOE_EXPERTS):
            kind = "experts"
    if kind is None or isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear):
        return None
    if kind == "convolution":
        assert isinstance(module, _CONVOLUTIONS)
        return WeightLayout(kind, tuple(shape), module.groups)
    return WeightLayout(kind, tuple(shape))


def matrices_of(module: nn.Module, name: str, shape: torch.Size) -> WeightLayout:
    """How a parameter lies as matrices of outputs and inputs, whatever its layer does with it.

    Where that is not known, rows are outputs: dimension 0 of two, and of more than three; of three
    dimensions, dimension 0 counts matrices.

    Raises:
        NotImplementedError: fewer than two dimensions.
    """
    known = layout_of(module, name, shape)
    if known is not None:
        return known
    if len(shape) < 2:
        raise NotImplementedError(
            f"it has {len(shape)} dimension(s), so there are no rows and columns of it; expected "
            "parameters of two or more dimensions. Leave it out, as select(model) does."
        )
    if isinstance(module, nn.modules.conv._ConvNd):
        return WeightLayout("convolution", tuple(shape), 1 if module.transposed else module.groups)
    kind = {2: "linear", 3: "experts"}.get(len(shape), "convolution")
    return WeightLayout(kind, tuple(shape))


def _calls(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a module is of a kind and has its forward, not one of its own class."""
    return isinstance(module, kind) and type(module).forward is kind.forward


def _calls_transformers(module: nn.Module, file: str, name: str) -> bool:
    """:func:`_calls` for a class of transformers, which need not be loaded."""
    loaded = sys.modules.get(f"transformers.{file}")
    return loaded is not None and _calls(module, getattr(loaded, name))
