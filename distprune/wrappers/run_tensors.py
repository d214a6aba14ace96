"""A run of a parameter's elements as torch.distributed.checkpoint (DCP) saves and loads it.

[Note: boxes] torch.distributed.checkpoint (DCP) saves boxes of an N-d tensor. A run of elements in
row-major order is a few boxes, here elements 4 to 13 of a [4, 4] parameter:

    .  .  .  .
    4  5  6  7      rows 1 and 2, a box of [2, 4]
    8  9 10 11
   12 13  .  .      the rest of the run, a box of [1, 2]
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.distributed import get_global_rank
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
from torch.distributed._shard.sharded_tensor.shard import Shard

from distprune.wrappers.managed import ManagedRun

# (offsets, sizes) in the whole tensor.
Box = tuple[tuple[int, ...], tuple[int, ...]]


def run_as_sharded_tensor(label: str, piece: ManagedRun, run: Tensor) -> ShardedTensor:
    """A run as DCP saves and loads it: in place, and without communication.

    Args:
        label: of the parameter, for messages.
        piece: the parameter.
        run: this rank's run of a tensor like it, 1-d; the result has views of it.

    Raises:
        NotImplementedError: a parameter that is not row-major in memory.
    """
    shape = tuple(piece.shape)
    if piece.stride != torch.empty(shape, device="meta").stride():
        raise NotImplementedError(
            f"{label}: its memory is not row-major (stride {tuple(piece.stride)}, channels_last "
            "say), so runs of it are no boxes, which checkpoints need. Expected a contiguous "
            "parameter: call .contiguous() before wrapping, or wrap with fully_shard."
        )
    group = piece.groups[0]
    shards, metadata = [], []
    for rank, (first, size) in enumerate(piece.runs):
        taken = 0
        for box in boxes_of_run(shape, first, first + size):  # see [Note: boxes]
            sizes = list(map(len, box))
            place = f"rank:{get_global_rank(group, rank)}/{run.device}"
            metadata.append(ShardMetadata([rows.start for rows in box], sizes, place))
            if rank == group.rank():
                end = taken + math.prod(sizes)
                shards.append(Shard(run[taken:end].view(sizes), metadata[-1]))
                taken = end
    assert sum(shard.tensor.numel() for shard in shards) == run.numel()
    properties = TensorProperties(
        dtype=run.dtype,
        layout=torch.strided,
        requires_grad=False,
        memory_format=torch.contiguous_format,
        pin_memory=False,
    )
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        shards, ShardedTensorMetadata(metadata, torch.Size(shape), properties), group
    )


def check_boxes(label: str, piece: ManagedRun, tensor: ShardedTensor, run: Tensor) -> None:
    """Refuse a tensor that has other boxes than :func:`run_as_sharded_tensor` makes of a run.

    Raises:
        ValueError: names the boxes.
    """
    expected = _boxes(run_as_sharded_tensor(label, piece, run))
    if _boxes(tensor) != expected or tensor.size() != piece.shape:
        raise ValueError(
            f"{label}: the state has boxes {_boxes(tensor)} of a tensor of shape "
            f"{tuple(tensor.size())} on this rank; expected {expected} of {tuple(piece.shape)}. "
            "Load it with torch.distributed.checkpoint, which reshards."
        )


def load_run(label: str, piece: ManagedRun, tensor: ShardedTensor, run: Tensor) -> None:
    """Copy a tensor of :func:`run_as_sharded_tensor` into a run, of the same boxes."""
    targets = run_as_sharded_tensor(label, piece, run).local_shards()
    for target, source in zip(targets, tensor.local_shards(), strict=True):
        target.tensor.copy_(source.tensor)


def _boxes(tensor: ShardedTensor) -> list[Box]:
    metadata = [shard.metadata for shard in tensor.local_shards()]
    return [(tuple(each.shard_offsets), tuple(each.shard_sizes)) for each in metadata]


def boxes_of_run(sizes: Sequence[int], first: int, last: int) -> Iterator[tuple[range, ...]]:
    """The boxes that hold the elements [first, last) of an array, in row-major order.

    At most 2 * len(sizes) - 1 of them: whole rows together, and parts of the rows at both ends.
    """
    if len(sizes) < 2:
        if first < last:
            yield (range(first, last),) if sizes else ()
        return
    row_size = math.prod(sizes[1:])
    while first < last:
        row, column = divmod(first, row_size)
        if column or last - first < row_size:
            stop = min(last - row * row_size, row_size)
            for ranges in boxes_of_run(sizes[1:], column, stop):
                yield (range(row, row + 1), *ranges)
            first = row * row_size + stop
        else:
            yield (range(row, last // row_size), *(range(size) for size in sizes[1:]))
            first = last // row_size * row_size
