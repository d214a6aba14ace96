"""Which part of a layer's input a rank sees, what of it counts, and its sums over tokens.

                          input of the layer       tokens of the ranks     features of the ranks
    plain, DDP, FSDP      a plain tensor           different               all
    colwise TP            Replicate                the same: one counts    all
    rowwise TP            Shard(-1)                the same: one counts    different
    sequence parallel     Shard(0), Shard(1)       different               all

A plain input of a layer that is not parallelised, in a model with layers that are, is the same on
the ranks of a tensor-parallel group. These ranks are known from the other layers:
``parameters.peers_of``.

transformers' own tensor parallelism calls layers with the local tensors: :func:`parallel_input`.
That they are what they are taken for is seen when ranks that should have the same are compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from distprune.base.pruned_form import is_dtensor, local_tensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


Convolution = nn.Conv1d | nn.Conv2d


@dataclass(frozen=True)
class Part:
    """What a rank has of an input.

    Attributes:
        features: which of the input's features.
        token_ranks: the ranks that have these tokens; None: a plain tensor does not tell.
        ranks: those of them that have these features of them.
    """

    features: range
    token_ranks: tuple[int, ...] | None = None
    ranks: tuple[int, ...] | None = None


# Which part of a layer's input this rank has, the local tensor, and which of its tokens count:
# bool, in the order of the rows (None: all do).
LocalInput = tuple[Part, Tensor, Tensor | None]


def read_input(
    label: str, value: Tensor, weight: Tensor | None, mask: Tensor | None, feature_dim: int
) -> LocalInput:
    """This rank's part of an input.

    Args:
        label: the parameter, for messages.
        value: what the layer is called with.
        weight: what is registered as the layer's weight during this call.
        mask: bool [batch, tokens], True = a token; None: all are tokens.
        feature_dim: the dimension of the features.

    Raises:
        NotImplementedError: a layout whose sums are not known.
        ValueError: a mask that does not fit.
    """
    if is_dtensor(value):
        return _read_dtensor(label, value, mask, feature_dim)
    if is_dtensor(weight):
        raise NotImplementedError(
            f"{label}: the weight is a DTensor ({weight.placements} on a mesh of shape "
            f"{tuple(weight.device_mesh.shape)}), but the input that is seen is a plain tensor of "
            f"shape {tuple(value.shape)}: it may be a part of the input, and which one is not "
            "known. Expected a DTensor, as the layer gets from parallelize_module."
        )
    keep = None if mask is None else _keep_of(label, value.shape, mask).reshape(-1)
    return Part(range(value.shape[feature_dim])), value.detach(), keep


def parallel_input(value: Tensor, weight: DTensor, input_dim: int) -> Tensor:
    """The plain input of a parallelised linear layer, as the DTensor of which it is a part.

    Args:
        value: [..., features]: all features, the same on every rank, or those that the rank's part
            of the weight multiplies.
        weight: what is registered as the layer's weight during this call.
        input_dim: the weight's dimension of the inputs.

    Returns:
        ``value`` itself if it has another number of features.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard

    num_inputs = weight.shape[input_dim]
    if value.shape[-1] not in (num_inputs, local_tensor(weight).shape[input_dim]):
        return value
    is_whole = value.shape[-1] == num_inputs
    placements = [
        Replicate() if is_whole or placement != Shard(input_dim) else Shard(value.ndim - 1)
        for placement in weight.placements
    ]
    shape = torch.Size((*value.shape[:-1], num_inputs))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        value.detach(), weight.device_mesh, placements, run_check=False, shape=shape, stride=stride
    )


def _read_dtensor(label: str, value: DTensor, mask: Tensor | None, feature_dim: int) -> LocalInput:
    from torch.distributed.tensor.placement_types import Replicate, Shard

    from distprune.shards.geometry import Split, dim_coordinates

    mesh, ndim = value.device_mesh, value.ndim
    coordinate = mesh.get_coordinate() or [0] * mesh.ndim
    local = local_tensor(value).detach()
    splits, apart = [], False
    # Where in the mesh ranks have the same tokens as this one, and where the same features too.
    same_tokens: list[slice | int] = [slice(None)] * mesh.ndim
    same_all = [*same_tokens]
    for axis, placement in enumerate(value.placements):
        size, place = mesh.size(axis), coordinate[axis]
        is_shard = isinstance(placement, Shard)
        is_strided = type(placement).__name__ == "_StridedShard"
        dim = getattr(placement, "dim", 0) % ndim
        is_of_features = dim == feature_dim % ndim
        if isinstance(placement, Replicate) or size == 1:
            continue
        if not is_shard and (not is_strided or is_of_features):
            raise NotImplementedError(
                f"{label}: the input has the placement {placement}; expected Replicate, or Shard "
                "of its features or of its tokens. Redistribute the input before the layer."
            )
        splits.append(Split(dim, size, place))
        same_all[axis] = place
        if not is_of_features:
            same_tokens[axis] = place
            apart |= is_strided  # tokens of different ranks, but in no simple order
    coordinates = dim_coordinates(value.shape, splits)
    features = coordinates[feature_dim]
    if local.shape[feature_dim] != len(features):
        raise NotImplementedError(
            f"{label}: this rank has {local.shape[feature_dim]} features of an input of shape "
            f"{tuple(value.shape)} with {value.placements}; expected {len(features)}, as "
            "torch.chunk cuts them."
        )
    keep = None
    if mask is not None:
        whole = _keep_of(label, value.shape, mask)
        if apart or any(len(c) != n for c, n in zip(coordinates, local.shape, strict=True)):
            raise NotImplementedError(
                f"{label}: the input has the placements {value.placements} and the shape "
                f"{tuple(value.shape)}, of which this rank has {tuple(local.shape)}; which tokens "
                "these are is not known, so no attention_mask can be used. Expected tokens in "
                "equal chunks, or a batch without padding and without attention_mask."
            )
        for dim, rows in enumerate(coordinates[:-1]):
            whole = whole.narrow(dim, rows.start, len(rows))
        keep = whole.reshape(-1)
    part = Part(features, ranks_at(mesh, same_tokens), ranks_at(mesh, same_all))
    return part, local, keep


def ranks_at(mesh: DeviceMesh, where: Sequence[slice | int]) -> tuple[int, ...]:
    """The ranks at some places of a mesh, given for each of its axes; sorted."""
    return tuple(sorted(mesh.mesh[tuple(where)].flatten().tolist()))


def _keep_of(label: str, shape: torch.Size, mask: Tensor) -> Tensor:
    """The mask in the shape of the tokens of an input, [..., features]."""
    if shape[:-1] == mask.shape:
        return mask
    if shape[:-1] == (mask.numel(),):
        return mask.reshape(-1)
    if [size for size in shape[:-1] if size > 1] == [size for size in mask.shape if size > 1]:
        return mask.view(shape[:-1])  # a dimension of size 1 between batch and tokens
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
    channels, dims = images.shape[1], len(layer.kernel_size)
    totals = torch.zeros(2, channels, *layer.kernel_size, dtype=torch.float64, device=images.device)
    num_tokens = 0
    for start, stop in spans(images.shape[0], images.shape[1:].numel(), images.device):
        chunk = _padded(images[start:stop].to(torch.float64), layer)
        for total, padded in zip(totals, (chunk, chunk.square()), strict=True):
            windows = _windows(padded, layer)
            total += windows.sum([0, *range(2, 2 + dims)])
        num_tokens += len(chunk) * windows.shape[2 : 2 + dims].numel()
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
    num_inputs = images.shape[1] // groups * torch.Size(layer.kernel_size).numel()
    dtype = torch.promote_types(images.dtype, torch.float32)
    total = torch.zeros(groups, num_inputs, num_inputs, dtype=dtype, device=images.device)
    size = images.shape[1:].numel() * torch.Size(layer.kernel_size).numel()
    for start, stop in spans(images.shape[0], size, images.device):
        windows = _windows(_padded(images[start:stop].to(dtype), layer), layer)
        # From [samples, channels, *positions, *kernel] to [channels, *kernel, samples, *positions].
        order = [1, *range(2 + dims, 2 + 2 * dims), 0, *range(2, 2 + dims)]
        columns = windows.permute(order).reshape(groups, num_inputs, -1)
        total.baddbmm_(columns, columns.mT)
    return total


def _padded(images: Tensor, layer: Convolution) -> Tensor:
    if layer.padding == "same":
        reaches = zip(layer.kernel_size, layer.dilation, strict=True)
        totals = [reach * (width - 1) for width, reach in reaches]
        pairs = [(total // 2, total - total // 2) for total in totals]
    else:
        sizes = layer.padding if layer.padding != "valid" else (0,) * len(layer.kernel_size)
        pairs = [(int(size), int(size)) for size in sizes]
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    return functional.pad(images, [size for pair in reversed(pairs) for size in pair], mode=mode)


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
