"""Counts of what is unpruned, and comparison of replicas, before anything is decided."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from distprune._common.collectives import Communicator
from distprune.selection.passes import count_each_live
from distprune.shards.checksum import checksums, of_shard, replicas_agree
from distprune.shards.shard import LocalShard
from distprune.shards.target import Target


def count_live_and_compare(
    targets: Sequence[Target], reads_values: bool, communicator: Communicator
) -> list[int]:
    """Count the unpruned elements of every whole parameter, and compare replicas.

    Args:
        reads_values: compare values (or scores) too, not only masks.

    Raises:
        ValueError: replicas of a parameter differ; on every rank.

    Cost: a read of the masks, and of replicated values; an all-reduce of 24 bytes per parameter;
    see checksum.[Note: no differences cancel].
    """

    def count() -> Tensor:
        shards = [target.shard for target in targets]
        live = count_each_live(
            [None if shard.mask is None else shard.flat(shard.mask) for shard in shards],
            [shard.counted for shard in shards],
        )
        # What is compared: values and mask of every replicated parameter.
        compared = [_compared(target, reads_values) for target in targets]
        sums = iter(checksums([tensor for tensors in compared for tensor in tensors]))
        rows = []
        for shard, num_live, tensors in zip(shards, live, compared, strict=True):
            of_replica = for_comparison(shard, communicator.rank, *(next(sums) for _ in tensors))
            rows.append([num_live, *of_replica])
        return torch.tensor(rows, dtype=torch.int64).view(-1)

    shared = communicator.reduce(3 * len(targets), count).view(-1, 3).tolist()
    for target, (_, of_all, of_first) in zip(targets, shared, strict=True):
        if not replicas_agree(target.shard.num_replicas, of_all, of_first):
            raise ValueError(
                f"{target.label}: the ranks hold replicas of this parameter (or of its scores or "
                "mask) that differ; expected equal ones, as under DistributedDataParallel. "
                "Broadcast them from one rank first. If the ranks prune models of their own, pass "
                "a group that holds only the calling rank; if they are meant to differ in a part "
                "(experts), pass pipeline_parallel=True and names that tell these parts apart."
            )
    return [live for live, _, _ in shared]


def for_comparison(shard: LocalShard, rank: int, *parts: int) -> tuple[int, int]:
    """What a rank adds to the sum over all replicas, and to the sum over first replicas."""
    if shard.num_replicas == 1 or not is_on_rank(shard, rank):
        return 0, 0
    mixed = of_shard(shard, *parts)
    return mixed, mixed if shard.replica == 0 else 0


def is_on_rank(shard: LocalShard, rank: int) -> bool:
    """Whether a rank has a part of a parameter; a rank outside of its mesh has none."""
    return shard.ranks is None or rank in shard.ranks


def _compared(target: Target, reads_values: bool) -> list[Tensor]:
    shard = target.shard
    if shard.num_replicas == 1:
        return []
    # Factors of scores are compared with the arguments: they are whole on every rank.
    scores = target.scores if isinstance(target.scores, Tensor) else shard.values
    ranked = [scores] if reads_values else []
    return ranked if shard.mask is None else [*ranked, shard.mask]
