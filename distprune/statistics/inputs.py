"""Layers that statistics are collected of: their inputs, the part that a rank has, and its sums.

[Note: input shape] A weight has an *input shape*: one statistic for each input feature that it
multiplies.

    layer                    weight                  input shape        one token is
    nn.Linear                [out, in]               [in]               a row of the input
    transformers' Conv1D     [in, out]               [in]               a row of the input
    nn.Conv1d, nn.Conv2d     [out, in / groups, *k]  [in, *k]           a position of the output
    fused experts            [experts, out, in]      [experts, in]      a row that came to an expert
    fused experts that say   [experts, in, out]      [experts, in]      a row that came to an expert
    ``is_transposed``

[Note: parts of an input] What a rank sees, by the way in which a layer is parallelised:

                          input of the layer       tokens of the ranks     features of the ranks
    plain, DDP, FSDP      a plain tensor           different               all
    colwise TP            Replicate                the same: one counts    all
    rowwise TP            Shard(-1)                the same: one counts    different
    sequence parallel     Shard(0), Shard(1)       different               all

A plain input of a layer that is not parallelised, in a model with layers that are, is the same on
the ranks of a tensor-parallel group. These ranks are known from the other layers:
``parameters.peers_of``.

transformers' own tensor parallelism calls layers with the local tensors: :func:`as_dtensor`.
That they are what they are taken for is seen when ranks that should have the same are compared.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from distprune.base.blocks import WeightLayout
from distprune.base.pruned_form import is_dtensor, local_tensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


Convolution = nn.Conv1d | nn.Conv2d

# Of transformers, whose classes need not be loaded: module, class, and kind of the weight.
_OF_TRANSFORMERS = (
    ("pytorch_utils", "Conv1D", "conv1d_of_transformers"),
    ("models.falcon.modeling_falcon", "FalconLinear", "linear"),
    ("models.jetmoe.modeling_jetmoe", "JetMoeParallelExperts", "experts"),
)


def layout_of(module: nn.Module, name: str, shape: torch.Size) -> WeightLayout | None:
    """How a parameter meets the input of its module; see [Note: input shape].

    Args:
        module, name: the owner of the parameter and its name there.
        shape: of the whole parameter.

    Returns:
        None if the input of the module is not what the parameter multiplies, or it cannot be known
        that it is.
    """
    is_transposed = getattr(module, "is_transposed", None)
    if len(shape) == 3 and isinstance(is_transposed, bool):
        # What transformers' use_experts_implementation says; see collecting.[Note: fused experts].
        return WeightLayout("transposed_experts" if is_transposed else "experts", tuple(shape))
    if name != "weight" or isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear):
        return None
    for known, kind in _known_layers():
        # With a forward of its own class, it is not known what a layer multiplies.
        if isinstance(module, known) and type(module).forward is known.forward:
            groups = module.groups if isinstance(module, Convolution) else 1
            return WeightLayout(kind, tuple(shape), groups)
    return None


def _known_layers() -> Iterator[tuple[type[nn.Module], str]]:
    """Layers whose forward multiplies their weight with their input as it comes."""
    yield from ((nn.Linear, "linear"), (nn.Conv1d, "convolution"), (nn.Conv2d, "convolution"))
    for file, name, kind in _OF_TRANSFORMERS:
        loaded = sys.modules.get(f"transformers.{file}")
        if loaded is not None:
            yield getattr(loaded, name), kind


@dataclass(frozen=True)
class Part:
    """What a rank has of an input; see [Note: parts of an input].

    Attributes:
        features: which of the input's features.
        token_ranks: the ranks that have these tokens; None: a plain tensor does not tell.
        ranks: those of them that have these features of them.
    """

    features: range
    token_ranks: tuple[int, ...] | None = None
    ranks: tuple[int, ...] | None = None


@dataclass(eq=False)
class Inputs:
    """What the weight of a parameter is multiplied with on this rank.

    Attributes:
        part: which part of the input it is.
        rows: [tokens, features].
        keep: bool [tokens], False where a token does not count; None: all count.
    """

    part: Part
    rows: Tensor
    keep: Tensor | None = None


def as_dtensor(label: str, value: Tensor, weight: DTensor, layout: WeightLayout) -> DTensor:
    """The plain input of a parallelised linear layer, as the DTensor of which it is a part.

    Args:
        label: the parameter, for messages.
        value: [..., features]: all features, the same on every rank, or those that the rank's part
            of the weight multiplies.
        weight: what is registered as the layer's weight during this call.
        layout: of the weight.

    Raises:
        NotImplementedError: a convolution; another number of features.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard

    dim = layout.input_dim
    num_inputs, num_local = weight.shape[dim], local_tensor(weight).shape[dim]
    is_whole = value.shape[-1] == num_inputs
    if layout.kind == "convolution" or not (is_whole or value.shape[-1] == num_local):
        raise NotImplementedError(
            f"{label}: the weight is a DTensor, and which part of the input the plain tensor of "
            f"shape {tuple(value.shape)} is, is not known; expected a DTensor, as the layer gets "
            "from parallelize_module."
        )
    placements = [
        Replicate() if is_whole or placement != Shard(dim) else Shard(value.ndim - 1)
        for placement in weight.placements
    ]
    shape = torch.Size((*value.shape[:-1], num_inputs))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        value.detach(), weight.device_mesh, placements, run_check=False, shape=shape, stride=stride
    )


def read_input(
    label: str, value: Tensor, mask: Tensor | None, convolution: Convolution | None
) -> Iterator[Inputs]:
    """This rank's part of what a layer is called with; of a convolution, in several chunks.

    Args:
        label: the parameter, for messages.
        value: the input; of a parallelised layer a DTensor.
        mask: bool [batch, tokens], True = a token; None: all are tokens.
        convolution: the layer, if it is one; then there is no mask.

    Raises:
        NotImplementedError: a layout whose sums are not known.
        ValueError: a mask that does not fit.
    """
    feature_dim = value.ndim - 1 - (0 if convolution is None else len(convolution.kernel_size))
    keep = None if mask is None else _keep_of(label, value.shape, mask)
    if is_dtensor(value):
        part, local, keep = _read_dtensor(label, value, keep, feature_dim)
    else:
        part, local = Part(range(value.shape[feature_dim])), value.detach()
    if convolution is None:
        rows = local.reshape(-1, local.shape[-1])
        yield Inputs(part, rows, None if keep is None else keep.reshape(-1))
        return
    if local.shape[feature_dim:] != value.shape[feature_dim:]:
        raise NotImplementedError(
            f"{label}: the input of the convolution is sharded by channels or by places; expected "
            "whole images."
        )
    for rows in _rows_of_windows(local if feature_dim else local.unsqueeze(0), convolution):
        yield Inputs(replace(part, features=range(rows.shape[1])), rows)


def _rows_of_windows(images: Tensor, layer: Convolution) -> Iterator[Tensor]:
    """Rows of the unfolded input of a convolution, for chunks of samples, at least one.

    Args:
        images: [samples, channels, *sizes].
        layer: says kernel size, stride, dilation and padding.

    Returns:
        Of each sample and position of the output a row, which the weight meets, in the order
        [channels, *kernel].
    """
    dims = len(layer.kernel_size)
    axes = zip(layer.kernel_size, layer.dilation, strict=True)
    reaches = [reach * (width - 1) for width, reach in axes]
    if layer.padding == "same":
        pairs = [(reach // 2, reach - reach // 2) for reach in reaches]
    elif layer.padding == "valid":
        pairs = [(0, 0)] * dims
    else:
        pairs = [(int(width), int(width)) for width in layer.padding]
    sides = [side for pair in reversed(pairs) for side in pair]
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    # Columns are copied, as neighbouring positions are neighbours in memory: faster than rows.
    order = [1, *range(2 + dims, 2 + 2 * dims), 0, *range(2, 2 + dims)]
    num_inputs = images.shape[1] * math.prod(layer.kernel_size)
    size = images.shape[1:].numel() * math.prod(layer.kernel_size)
    for start, stop in spans(len(images), size, images.device):
        windows = functional.pad(images[start:stop], sides, mode=mode)
        for dim in range(dims):  # [samples, channels, *positions, *kernel]
            windows = windows.unfold(2 + dim, reaches[dim] + 1, layer.stride[dim])
            windows = windows[..., :: layer.dilation[dim]]
        yield windows.permute(order).reshape(num_inputs, -1).mT


def _read_dtensor(
    label: str, value: DTensor, keep: Tensor | None, feature_dim: int
) -> tuple[Part, Tensor, Tensor | None]:
    """This rank's part of an input, its values, and what it has of ``keep``."""
    from torch.distributed.tensor.placement_types import Replicate, Shard

    from distprune.shards.geometry import Split, dim_coordinates

    mesh = value.device_mesh
    coordinate = mesh.get_coordinate() or [0] * mesh.ndim
    local = local_tensor(value).detach()
    splits = []
    # Where in the mesh ranks have the same tokens as this one, and where the same features too.
    same_tokens: list[slice | int] = [slice(None)] * mesh.ndim
    same_all = [*same_tokens]
    for axis, placement in enumerate(value.placements):
        size, place = mesh.size(axis), coordinate[axis]
        if isinstance(placement, Replicate) or size == 1:
            continue
        if not isinstance(placement, Shard):
            raise NotImplementedError(
                f"{label}: the input has the placement {placement}; expected Replicate, or Shard "
                "of its features or of its tokens. Redistribute the input before the layer."
            )
        dim = placement.dim % value.ndim
        splits.append(Split(dim, size, place))
        same_all[axis] = place
        if dim != feature_dim:
            same_tokens[axis] = place
    coordinates = dim_coordinates(value.shape, splits)
    fits = [len(c) == size for c, size in zip(coordinates, local.shape, strict=True)]
    if not (fits[feature_dim] and (keep is None or all(fits))):
        raise NotImplementedError(
            f"{label}: which part of its input, of shape {tuple(value.shape)} with "
            f"{value.placements}, the {tuple(local.shape)} of this rank are, is not known; "
            "expected chunks as torch.chunk cuts them."
        )
    for dim, rows in enumerate(coordinates[:-1]):
        keep = None if keep is None else keep.narrow(dim, rows.start, len(rows))
    part = Part(coordinates[feature_dim], ranks_at(mesh, same_tokens), ranks_at(mesh, same_all))
    return part, local, keep


def ranks_at(mesh: DeviceMesh, where: Sequence[slice | int]) -> tuple[int, ...]:
    """The ranks at some places of a mesh, given for each of its axes; sorted."""
    return tuple(sorted(mesh.mesh[tuple(where)].flatten().tolist()))


def _keep_of(label: str, shape: torch.Size, mask: Tensor) -> Tensor:
    """The mask in the shape of the tokens of an input, [..., features]."""
    # [batch * tokens, features], or a dimension of size 1 between batch and tokens.
    squeezed = [size for size in shape[:-1] if size > 1]
    if squeezed in ([size for size in mask.shape if size > 1], [mask.numel()]):
        return mask.view(shape[:-1])
    raise ValueError(
        f"{label}: an input of shape {tuple(shape)} does not fit the attention_mask of shape "
        f"{tuple(mask.shape)}; expected [batch, tokens, features] or [batch * tokens, features]. "
        "Layers that see other tokens (experts, poolers) need batches without padding and without "
        "attention_mask, or are left out."
    )


# Elements that are converted to fp64 at a time: what stays in the cache of a core, 1 MiB; and what
# keeps an accelerator busy, 32 MiB.
_CPU_CHUNK = 1 << 17
_DEVICE_CHUNK = 1 << 22
_ROWS_OF_A_PRODUCT = 256


def sums_of_rows(rows: Tensor, keep: Tensor | None = None) -> Tensor:
    """Sums over the rows of the input of a layer.

    Args:
        rows: [tokens, features], of any real floating-point dtype. Squares are those of fp64: in
            fp16 they would overflow from 256 on.
        keep: bool [tokens]; rows that are False are left out, whatever they hold.

    Returns:
        fp64 [2, features]: the sums of x, and those of x squared.

    Cost: one read; temporaries in fp64 of a chunk, 1 MiB on a CPU and 32 MiB elsewhere.
    """
    totals = torch.zeros(2, rows.shape[1], dtype=torch.float64, device=rows.device)
    for start, stop in spans(rows.shape[0], rows.shape[1], rows.device):
        chunk = rows[start:stop].to(torch.float64, copy=True)
        if keep is not None:
            chunk.masked_fill_(~keep[start:stop].unsqueeze(1), 0)
        totals[0] += chunk.sum(0)
        totals[1] += chunk.square_().sum(0)
    return totals


def product_of_rows(rows: Tensor) -> Tensor:
    """The sum of x x^T over the rows [tokens, inputs]: in fp32, or fp64 of such rows.

    Rows are multiplied a few at a time, because the rounding of a product grows with their number.
    """
    dtype = torch.promote_types(rows.dtype, torch.float32)
    total = torch.zeros(rows.shape[1], rows.shape[1], dtype=dtype, device=rows.device)
    for chunk in torch.split(rows, _ROWS_OF_A_PRODUCT):
        values = chunk.to(dtype)
        total += values.mT @ values  # addmm may add token by token, and round as often
    return total


def spans(length: int, size: int, device: torch.device) -> Iterator[tuple[int, int]]:
    """Spans of a dimension; with ``size`` elements in each place they are chunks."""
    chunk = _CPU_CHUNK if device.type == "cpu" else _DEVICE_CHUNK
    step = max(1, chunk // max(1, size))
    for start in range(0, length, step):
        yield start, min(start + step, length)
