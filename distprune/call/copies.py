"""Copies of a parameter on several meshes: which of them this rank has."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import torch
from torch import Tensor

from distprune._common.collectives import Communicator
from distprune.shards.shard import LocalShard
from distprune.shards.target import Target


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
