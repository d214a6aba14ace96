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
        # What transformers' use_experts_implementation says; see experts.[Note: fused experts].
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
        values: [tokens, features], or images [samples, channels, *sizes] of a convolution.
        keep: bool [tokens], False where a token does not count; None: all count.
        convolution: the layer, if it is one.
    """

    part: Part
    values: Tensor
    keep: Tensor | None = None
    convolution: Convolution | None = None


def as_dtensor(
    label: str, value: Tensor, weight: DTensor, input_dim: int, is_convolution: bool
) -> DTensor:
    """The plain input of a parallelised linear layer, as the DTensor of which it is a part.

    Args:
        label: the parameter, for messages.
        value: [..., features]: all features, the same on every rank, or those that the rank's part
            of the weight multiplies.
        weight: what is registered as the layer's weight during this call.
        input_dim: the weight's dimension of the inputs.
        is_convolution: whether the layer is none that is known.

    Raises:
        NotImplementedError: a convolution; another number of features.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard

    num_inputs = weight.shape[input_dim]
    is_whole = value.shape[-1] == num_inputs
    is_part = value.shape[-1] == local_tensor(weight).shape[input_dim]
    if is_convolution or not (is_whole or is_part):
        raise NotImplementedError(
            f"{label}: the weight is a DTensor ({weight.placements}), but its layer is called with "
            f"a plain tensor of shape {tuple(value.shape)}, and which part of the input that is, "
            "is not known. Expected a DTensor, as the layer gets from parallelize_module."
        )
    placements = [
        Replicate() if is_whole or placement != Shard(input_dim) else Shard(value.ndim - 1)
        for placement in weight.placements
    ]
    shape = torch.Size((*value.shape[:-1], num_inputs))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        value.detach(), weight.device_mesh, placements, run_check=False, shape=shape, stride=stride
    )


def read_input(
    label: str, value: Tensor, mask: Tensor | None, convolution: Convolution | None
) -> Inputs:
    """This rank's part of what a layer is called with.

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
        return Inputs(part, rows, None if keep is None else keep.reshape(-1))
    if local.shape[feature_dim:] != value.shape[feature_dim:]:
        raise NotImplementedError(
            f"{label}: the input of the convolution is sharded by channels or by places; expected "
            "whole images on every rank."
        )
    num_inputs = local.shape[feature_dim] * math.prod(convolution.kernel_size)
    images = local if feature_dim else local.unsqueeze(0)
    return Inputs(replace(part, features=range(num_inputs)), images, None, convolution)


def _read_dtensor(
    label: str, value: DTensor, keep: Tensor | None, feature_dim: int
) -> tuple[Part, Tensor, Tensor | None]:
    """This rank's part of an input, its values, and what it has of ``keep``."""
    from torch.distributed.tensor.placement_types import Replicate, Shard

    from distprune.shards.geometry import Split, dim_coordinates

    mesh = value.device_mesh
    coordinate = mesh.get_coordinate() or [0] * mesh.ndim
    local = local_tensor(value).detach()
    splits, is_in_order = [], True
    # Where in the mesh ranks have the same tokens as this one, and where the same features too.
    same_tokens: list[slice | int] = [slice(None)] * mesh.ndim
    same_all = [*same_tokens]
    for axis, placement in enumerate(value.placements):
        size, place = mesh.size(axis), coordinate[axis]
        if isinstance(placement, Replicate) or size == 1:
            continue
        dim = getattr(placement, "dim", feature_dim) % value.ndim
        # What _StridedShard cuts are tokens of different ranks, but in no simple order.
        is_strided = type(placement).__name__ == "_StridedShard" and dim != feature_dim
        if not (isinstance(placement, Shard) or is_strided):
            raise NotImplementedError(
                f"{label}: the input has the placement {placement}; expected Replicate, or Shard "
                "of its features or of its tokens. Redistribute the input before the layer."
            )
        splits.append(Split(dim, size, place))
        is_in_order &= not is_strided
        same_all[axis] = place
        if dim != feature_dim:
            same_tokens[axis] = place
    coordinates = dim_coordinates(value.shape, splits)
    fits = [len(c) == size for c, size in zip(coordinates, local.shape, strict=True)]
    if not fits[feature_dim] or (keep is not None and not (is_in_order and all(fits))):
        raise NotImplementedError(
            f"{label}: this rank has {tuple(local.shape)} of an input of shape "
            f"{tuple(value.shape)} with {value.placements}, and which features or tokens these are "
            "is not known. Expected chunks as torch.chunk cuts them, or, if only tokens are cut "
            "otherwise, a batch without padding and without attention_mask."
        )
    for dim, rows in enumerate(coordinates[:-1] if keep is not None else ()):
        assert keep is not None
        keep = keep.narrow(dim, rows.start, len(rows))
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
    """Sums over the rows of the input of a linear layer.

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


def sums_of_windows(images: Tensor, layer: Convolution) -> tuple[int, Tensor]:
    """Sums over the columns of the unfolded input of a convolution.

    For the input channel c and the offset k in the kernel, the column is what the weight
    [:, c, k] meets: x[c, k * dilation + o * stride] of the padded input, for all positions o of
    the output. It is summed as a strided view: nothing is unfolded.

    Args:
        images: [samples, channels, *sizes].
        layer: says kernel size, stride, dilation and padding.

    Returns:
        The number of tokens: one per sample and position of the output; and sums as of
        :func:`sums_of_rows`, of inputs in the order [channels, *kernel].

    Cost: a read per offset in the kernel; temporaries in fp64 of a chunk of samples, at least one.
    """
    shape = images.shape[1], *layer.kernel_size
    totals = torch.zeros(2, *shape, dtype=torch.float64, device=images.device)
    num_tokens = 0
    for padded in _padded_chunks(images, layer, torch.float64, images.shape[1:].numel()):
        for total, values in zip(totals, (padded, padded.square()), strict=True):
            windows = _windows(values, layer)
            positions = windows.shape[2 : windows.ndim - len(layer.kernel_size)]
            total += windows.sum([0, *range(2, 2 + len(positions))])
        num_tokens += len(padded) * positions.numel()
    return num_tokens, totals.view(2, -1)


def products_of_windows(images: Tensor, layer: Convolution) -> Tensor:
    """x x^T of the columns of the unfolded input, of each group: [groups, inputs, inputs].

    Args:
        images, layer: as for :func:`sums_of_windows`.

    Returns:
        Sums over samples and positions, in fp32 (fp64 of such images); of each group the inputs in
        the order [channels, *kernel].

    Cost: temporaries for the unfolded input of a chunk of samples, at least one.
    """
    dims, groups = len(layer.kernel_size), layer.groups
    num_inputs = images.shape[1] // groups * math.prod(layer.kernel_size)
    dtype = torch.promote_types(images.dtype, torch.float32)
    total = torch.zeros(groups, num_inputs, num_inputs, dtype=dtype, device=images.device)
    size = images.shape[1:].numel() * math.prod(layer.kernel_size)
    # From [samples, channels, *positions, *kernel] to [channels, *kernel, samples, *positions].
    order = [1, *range(2 + dims, 2 + 2 * dims), 0, *range(2, 2 + dims)]
    for padded in _padded_chunks(images, layer, dtype, size):
        columns = _windows(padded, layer).permute(order).reshape(groups, num_inputs, -1)
        total.baddbmm_(columns, columns.mT)
    return total


def _padded_chunks(
    images: Tensor, layer: Convolution, dtype: torch.dtype, size: int
) -> Iterator[Tensor]:
    """Chunks of images with their padding; ``size`` is the elements that one of them becomes."""
    if layer.padding == "same":
        reaches = zip(layer.kernel_size, layer.dilation, strict=True)
        totals = [reach * (width - 1) for width, reach in reaches]
        pairs = [(total // 2, total - total // 2) for total in totals]
    elif layer.padding == "valid":
        pairs = [(0, 0)] * len(layer.kernel_size)
    else:
        pairs = [(int(width), int(width)) for width in layer.padding]
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    sides = [side for pair in reversed(pairs) for side in pair]
    for start, stop in spans(len(images), size, images.device):
        yield functional.pad(images[start:stop].to(dtype), sides, mode=mode)


def _windows(padded: Tensor, layer: Convolution) -> Tensor:
    """A view of padded images: [samples, channels, *positions of the output, *kernel]."""
    axes = zip(layer.kernel_size, layer.dilation, layer.stride, strict=True)
    for dim, (width, reach, step) in enumerate(axes):
        padded = padded.unfold(2 + dim, reach * (width - 1) + 1, step)[..., ::reach]
    return padded


def spans(length: int, size: int, device: torch.device) -> Iterator[tuple[int, int]]:
    """Spans of a dimension; with ``size`` elements in each place they are chunks."""
    chunk = _CPU_CHUNK if device.type == "cpu" else _DEVICE_CHUNK
    step = max(1, chunk // max(1, size))
    for start in range(0, length, step):
        yield start, min(start + step, length)
