"""Who else has a parameter: copies on other meshes, parameters of other pipeline stages, replicas.

A single process cannot know in which order stages would list their parameters, so the order of a
joined list is that of the full names, whoever holds them: "layers.2" before "layers.10". A rank
takes part in the ranking of parameters that it does not have with empty shards.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from distprune.base.selecting import natural_key
from distprune.ranking.chunks import count_live
from distprune.ranks.collectives import Communicator
from distprune.shards.checksum import at_position, checksums, replicas_agree
from distprune.shards.factored import FactoredScores
from distprune.shards.geometry import run_index_map
from distprune.shards.shard import Shard


def agree_on_copies(
    targets: list[Shard], communicator: Communicator, what: str, *, pipeline_parallel: bool
) -> list[Shard]:
    """The parameters of all ranks, the same list on each, with the number of their replicas.

    Args:
        targets: this rank's; all ranks have the same, except in a pipeline.
        what: the name of the argument, for messages.
    """
    if not pipeline_parallel:
        return count_copies_on_other_meshes(targets, communicator)
    targets = join(targets, communicator)
    if not targets:
        raise ValueError(f"{what} is empty on every rank; expected at least one {what[:-1]}.")
    return targets


def count_copies_on_other_meshes(targets: list[Shard], communicator: Communicator) -> list[Shard]:
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
    meshes = [m for m in (_smaller_mesh(t, communicator) for t in targets) if m is not None]
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
        if _smaller_mesh(target, communicator) is not None:
            mesh_index, num_copies = copies[next(kinds)]
            target = replace(
                target,
                replica=mesh_index * target.num_replicas + target.replica,
                num_replicas=num_copies * target.num_replicas,
            )
        counted.append(target)
    return counted


def _mesh_hash(ranks: tuple[int, ...], rank: int) -> int:
    data = repr((rank, ranks)).encode()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little", signed=True)


def _smaller_mesh(shard: Shard, communicator: Communicator) -> tuple[int, ...] | None:
    """The ranks of a mesh that holds a parameter, if they are not all ranks of the call."""
    if shard.ranks is None or len(shard.ranks) >= communicator.size:
        return None
    return shard.ranks


def count_live_and_compare(
    targets: Sequence[Shard], reads_values: bool, communicator: Communicator
) -> list[int]:
    """Count the unpruned elements of every whole parameter, and compare replicas.

    Args:
        reads_values: compare values (or scores) too, not only masks.

    Raises:
        ValueError: replicas of a parameter differ; on every rank.

    Cost: a read of the masks, and of replicated values; an all-reduce of 24 bytes per parameter;
    see checksum.[Note: no differences cancel].
    """

    def count_own() -> list[int]:
        return count_live(
            [target.flat_mask for target in targets], [target.counted for target in targets]
        )

    if communicator.size == 1:  # nobody to compare with
        return count_own()

    def count() -> Tensor:
        live = count_own()
        # What is compared: values and mask of every replicated parameter.
        compared = [_compared(target, reads_values) for target in targets]
        sums = iter(checksums([tensor for tensors in compared for tensor in tensors]))
        rows = []
        for target, num_live, tensors in zip(targets, live, compared, strict=True):
            of_replica = for_comparison(target, communicator.rank, *(next(sums) for _ in tensors))
            rows.append([num_live, *of_replica])
        return torch.tensor(rows, dtype=torch.int64).view(-1)

    shared = communicator.reduce(3 * len(targets), count).view(-1, 3).tolist()
    for target, (_, of_all, of_first) in zip(targets, shared, strict=True):
        if not replicas_agree(target.num_replicas, of_all, of_first):
            raise ValueError(
                f"{target.name}: the ranks hold replicas of this parameter (or of its scores or "
                "mask) that differ; expected equal ones, as under DistributedDataParallel. "
                "Broadcast them from one rank first. If the ranks prune models of their own, pass "
                "a group that holds only the calling rank; if they are meant to differ in a part "
                "(experts), pass pipeline_parallel=True and names that tell these parts apart."
            )
    return [live for live, _, _ in shared]


def for_comparison(shard: Shard, rank: int, *parts: int) -> tuple[int, int]:
    """What a rank adds to the sum over all replicas, and to the sum over first replicas."""
    if shard.num_replicas == 1 or not is_on_rank(shard, rank):
        return 0, 0
    mixed = at_position(shard.position, *parts)
    return mixed, mixed if shard.replica == 0 else 0


def is_on_rank(shard: Shard, rank: int) -> bool:
    """Whether a rank has a part of a parameter; a rank outside of its mesh has none."""
    return shard.ranks is None or rank in shard.ranks


def _compared(shard: Shard, reads_values: bool) -> list[Tensor]:
    if shard.num_replicas == 1:
        return []
    # Factors of scores are compared with the arguments: they are whole on every rank.
    scores = shard.scores if isinstance(shard.scores, Tensor) else shard.values
    ranked = [scores] if reads_values else []
    return ranked if shard.mask is None else [*ranked, shard.mask]


@dataclass(frozen=True)
class _Entry:
    """What one rank tells the others of one parameter."""

    facts: str
    shape: tuple[int, ...]
    dtype: str  # of the scores, if there are some
    ranks: tuple[int, ...]  # that hold it together; empty: each has a copy of its own
    num_replicas: int  # among these ranks


def join(targets: Sequence[Shard], communicator: Communicator) -> list[Shard]:
    """Every parameter that any rank has, in the order of names; the same list on all ranks.

    Args:
        targets: this rank's, with full names as labels, each name once.
        communicator: all ranks that take part.

    Raises:
        ValueError: ranks describe a parameter of one name differently; on every rank.

    Cost: four all-reduces: 16 bytes per rank, about 200 bytes per parameter and kind of stage, and
    two small ones.
    """
    mine = communicator.run(lambda: json.dumps({t.name: vars(_entry(t)) for t in targets}))
    texts, kind_of_rank = communicator.distinct_texts(mine)
    return communicator.run(lambda: _joined(targets, texts, kind_of_rank, communicator))


def _joined(
    targets: Sequence[Shard],
    texts: Sequence[str],
    kind_of_rank: Sequence[int],
    communicator: Communicator,
) -> list[Shard]:
    """Local: every rank gets the same list of names from what all ranks have told."""
    stages = [{name: _read_entry(e) for name, e in json.loads(text).items()} for text in texts]
    entries: dict[str, _Entry] = {}
    holders: dict[str, set[tuple[int, ...]]] = {}
    for rank, kind in zip(communicator.ranks, kind_of_rank, strict=True):
        for name, entry in stages[kind].items():
            first = entries.setdefault(name, entry)
            if first.facts != entry.facts:
                raise ValueError(
                    f"{name}: ranks hold different parameters of this name ({first.facts}; and "
                    f"{entry.facts}). Expected names that are unique over all stages: "
                    "select(stage, prefix=...) puts a stage's place in the model before its names."
                )
            holders.setdefault(name, set()).add(entry.ranks or (rank,))
    own = {target.name: target for target in targets}
    device = targets[0].values.device if targets else torch.device("cpu")
    return [
        _with_copies(own[name], sorted(holders[name]), communicator.rank)
        if name in own
        else _absent(name, entries[name], len(holders[name]), device)
        for name in sorted(entries, key=natural_key)
    ]


def _entry(shard: Shard) -> _Entry:
    scores = shard.scores if isinstance(shard.scores, Tensor) else shard.values
    score_dtype = scores.dtype
    if isinstance(shard.scores, FactoredScores):
        score_dtype = torch.promote_types(score_dtype, torch.float32)
    dtype = str(score_dtype).removeprefix("torch.")
    if shard.ranks is None:  # it was read as if every rank of the call had a copy
        return _Entry(shard.facts, tuple(shard.shape), dtype, (), 1)
    return _Entry(shard.facts, tuple(shard.shape), dtype, shard.ranks, shard.num_replicas)


def _read_entry(data: dict[str, Any]) -> _Entry:
    return _Entry(**data | {"shape": tuple(data["shape"]), "ranks": tuple(data["ranks"])})


def _with_copies(shard: Shard, holders: list[tuple[int, ...]], rank: int) -> Shard:
    """Let a shard know of all copies of its elements, on whatever rank or mesh."""
    ranks = shard.ranks
    if ranks is None:
        ranks = (rank,)
        shard = replace(shard, ranks=ranks, replica=0, num_replicas=1)
    copies = len(holders) * shard.num_replicas
    replica = holders.index(ranks) * shard.num_replicas + shard.replica
    return replace(shard, replica=replica, num_replicas=copies)


def _absent(name: str, entry: _Entry, num_holders: int, device: torch.device) -> Shard:
    """A parameter of other ranks: no element of it is here."""
    values = torch.empty(0, dtype=getattr(torch, entry.dtype), device=device)
    index = run_index_map((0,), (1,), 0)
    assert index is not None
    return Shard(
        name=name,
        parameter=values,
        values=values,
        mask=None,
        shape=torch.Size(entry.shape),
        index=index,
        is_run=True,
        num_replicas=num_holders * entry.num_replicas,
        ranks=(),
        key=name,
    )
