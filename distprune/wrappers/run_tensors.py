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

from distprune.wrappers.managed import StoredRun


def run_as_sharded_tensor(label: str, piece: StoredRun, run: Tensor) -> ShardedTensor:
    """A run as DCP saves and loads it: in place, and without communication.

    Args:
        label: of the parameter, for messages.
        piece: the parameter.
        run: this rank's run of a tensor like it, 1-d; the result has views of it.

    Raises:
        NotImplementedError: a parameter that is not row-major in memory.
    """
    if piece.stride != torch.empty(piece.shape, device="meta").stride():
        raise NotImplementedError(
            f"{label}: its memory is not row-major (stride {tuple(piece.stride)}), so runs of it "
            "are no boxes, which checkpoints need. Call .contiguous() before wrapping, or wrap "
            "with fully_shard."
        )
    group, shards, metadata = piece.groups[0], [], []
    for rank, (first, size) in enumerate(piece.runs):
        place = f"rank:{get_global_rank(group, rank)}/{run.device}"
        taken = 0
        for box in boxes_of_run(piece.shape, first, first + size):  # see [Note: boxes]
            sizes = list(map(len, box))
            metadata.append(ShardMetadata([rows.start for rows in box], sizes, place))
            if rank == group.rank():
                end = taken + math.prod(sizes)
                shards.append(Shard(run[taken:end].view(sizes), metadata[-1]))
                taken = end
    assert sum(shard.tensor.numel() for shard in shards) == run.numel()
    properties = TensorProperties(dtype=run.dtype)
    whole = ShardedTensorMetadata(metadata, piece.shape, properties)
    return ShardedTensor._init_from_local_shards_and_global_metadata(shards, whole, group)


def matching_boxes(
    label: str, piece: StoredRun, tensor: ShardedTensor, run: Tensor
) -> list[tuple[Tensor, Tensor]]:
    """The boxes of a run, as views of it, and those of a tensor that is cut in the same way.

    Raises:
        ValueError: the tensor is cut in another way; names the boxes.
    """
    like = run_as_sharded_tensor(label, piece, run)
    found, expected = (
        [(tuple(s.metadata.shard_offsets), tuple(s.metadata.shard_sizes)) for s in t.local_shards()]
        for t in (tensor, like)
    )
    if found != expected or tensor.size() != piece.shape:
        raise ValueError(
            f"{label}: the state has boxes {found} of a tensor of shape {tuple(tensor.size())} on "
            f"this rank; expected {expected} of {tuple(piece.shape)}. Load it with "
            "torch.distributed.checkpoint, which reshards."
        )
    pairs = zip(like.local_shards(), tensor.local_shards(), strict=True)
    return [(own.tensor, other.tensor) for own, other in pairs]


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
