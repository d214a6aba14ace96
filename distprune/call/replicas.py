"""Replicas of a parameter: how many there are on all meshes, and whether they are equal."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from distprune._common.collectives import Communicator
from distprune.selection.passes import count_each_live
from distprune.shards.checksum import checksums, of_shard, replicas_agree
from distprune.shards.parameters import Target
from distprune.shards.shard import LocalShard


def count_copies_on_other_meshes(targets: list[Target], communicator: Communicator) -> list[Target]:
    """Tell every shard how many copies of it lie outside its own mesh.

    Under FSDP2 with tensor parallelism, a layer that is not parallelised is sharded
    over the data-parallel ranks only, once for every tensor-parallel rank. Each of
    these meshes holds the whole parameter.

    [Note: kinds of meshes] A rank knows its own mesh of a parameter only, and a rank outside of
    all meshes knows some mesh. So two parameters are known to be on the same meshes by a number
    that all ranks make together: a sum over ranks of a hash of the mesh that each one sees.

    Cost: if there are such parameters, two all-reduces: 8 bytes per parameter, and per rank and
    kind of meshes.
    """
    meshes = [m for m in (_smaller_mesh(t.shard, communicator) for t in targets) if m is not None]
    if not meshes:
        return targets

    def hash_meshes() -> Tensor:
        hashes = {ranks: _mesh_hash(ranks, communicator.rank) for ranks in set(meshes)}
        return torch.tensor([hashes[ranks] for ranks in meshes], dtype=torch.int64)

    kind_of = communicator.reduce(len(meshes), hash_meshes).tolist()
    mesh_of = dict(zip(kind_of, meshes, strict=True))

    def mark_first() -> Tensor:
        is_first = torch.zeros(len(mesh_of), communicator.size, dtype=torch.int64)
        for row, ranks in enumerate(mesh_of.values()):
            is_first[row, communicator.index] = communicator.rank == ranks[0]
        return is_first.view(-1)

    is_first = communicator.reduce(len(mesh_of) * communicator.size, mark_first)
    # By kind: (index of this rank's mesh, number of meshes).
    copies = {}
    for (kind, ranks), row in zip(mesh_of.items(), is_first.chunk(len(mesh_of)), strict=True):
        firsts = row.nonzero().squeeze(1).tolist()
        copies[kind] = (firsts.index(communicator.ranks.index(ranks[0])), len(firsts))
    counted, kinds = [], iter(kind_of)
    for target in targets:
        shard = target.shard
        if _smaller_mesh(shard, communicator) is not None:
            mesh_index, num_copies = copies[next(kinds)]
            shard = replace(
                shard,
                replica=mesh_index * shard.num_replicas + shard.replica,
                num_replicas=num_copies * shard.num_replicas,
            )
            target = replace(target, shard=shard)
        counted.append(target)
    return counted


def _mesh_hash(ranks: tuple[int, ...], rank: int) -> int:
    data = repr((rank, ranks)).encode()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little", signed=True)


def _smaller_mesh(shard: LocalShard, communicator: Communicator) -> tuple[int, ...] | None:
    """The ranks of a mesh that holds a parameter, if they are not all ranks of the call."""
    if shard.ranks is None or len(shard.ranks) >= communicator.size:
        return None
    return shard.ranks


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
