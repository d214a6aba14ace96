"""Who else has a parameter: copies on other meshes, parameters of other pipeline stages, replicas.

A single process cannot know in which order stages would list their parameters, so the order of a
joined list is that of the full names, whoever holds them: "layers.2" before "layers.10". A rank
takes part in the ranking of parameters that it does not have with empty shards.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import NamedTuple

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
    shards: list[Shard], communicator: Communicator, what: str, *, pipeline_parallel: bool
) -> list[Shard]:
    """The parameters of all ranks, the same list on each, with the number of their replicas.

    Args:
        shards: this rank's; all ranks have the same, except in a pipeline.
        what: the name of the argument, for messages.
    """
    if not pipeline_parallel:
        _count_copies_on_other_meshes(shards, communicator)
        return shards
    shards = _join(shards, communicator)
    if not shards:
        raise ValueError(f"{what} is empty on every rank; expected at least one {what[:-1]}.")
    return shards


def _count_copies_on_other_meshes(shards: Sequence[Shard], communicator: Communicator) -> None:
    """Tell every shard how many copies of it lie outside its own mesh.

    Under FSDP2 with tensor parallelism, a layer that is not parallelised is sharded
    over the data-parallel ranks only, once for every tensor-parallel rank. Each of
    these meshes holds the whole parameter, and a rank knows its own mesh only.

    Cost: if there are such parameters, two all-reduces: 16 bytes per rank, and for each mesh its
    ranks and a number per parameter.
    """
    smaller = [s for s in shards if s.ranks is not None and len(s.ranks) < communicator.size]
    if not smaller:
        return
    meshes = list(dict.fromkeys(shard.ranks for shard in smaller))
    number_of = {ranks: number for number, ranks in enumerate(meshes)}
    mine = json.dumps([meshes, [number_of[shard.ranks] for shard in smaller]])
    texts, _ = communicator.distinct_texts(mine)
    holders: list[set[tuple[int, ...]]] = [set() for _ in smaller]
    for text in texts:
        of_rank, numbers = json.loads(text)
        for of_shard, number in zip(holders, numbers, strict=True):
            of_shard.add(tuple(of_rank[number]))
    for shard, of_shard in zip(smaller, holders, strict=True):
        _set_copies(shard, of_shard)


def _set_copies(shard: Shard, holders: Iterable[tuple[int, ...]]) -> None:
    """Let a shard know of all copies of its elements, on whatever rank or mesh."""
    assert shard.ranks is not None
    ordered = sorted(holders)
    first = ordered.index(shard.ranks) * shard.num_replicas
    shard.be_replica(first + shard.replica, shard.num_replicas * len(ordered))


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
        rows: list[int] = []
        for target, num_live, tensors in zip(targets, live, compared, strict=True):
            parts = [next(sums) for _ in tensors]
            rows += (num_live, *for_comparison(target, communicator.rank, *parts))
        return torch.tensor(rows, dtype=torch.int64)

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


class _Entry(NamedTuple):
    """What one rank tells the others of one parameter, as JSON."""

    facts: str
    shape: tuple[int, ...]
    dtype: str  # of the scores, if there are some
    ranks: tuple[int, ...]  # that hold it together; empty: each has a copy of its own
    num_replicas: int  # among these ranks


def _join(shards: Sequence[Shard], communicator: Communicator) -> list[Shard]:
    """Every parameter that any rank has, in the order of names; the same list on all ranks.

    Args:
        shards: this rank's, with full names as labels, each name once.
        communicator: all ranks that take part.

    Raises:
        ValueError: ranks describe a parameter of one name differently; on every rank.

    Cost: four all-reduces: 16 bytes per rank, about 200 bytes per parameter and kind of stage, and
    two small ones.
    """
    mine = communicator.run(lambda: json.dumps({shard.name: _entry(shard) for shard in shards}))
    texts, kinds = communicator.distinct_texts(mine)
    own = {shard.name: shard for shard in shards}
    device = shards[0].values.device if shards else torch.device("cpu")

    def join() -> list[Shard]:
        stages = [{name: _Entry(*row) for name, row in json.loads(text).items()} for text in texts]
        entries: dict[str, _Entry] = {}
        holders: dict[str, set[tuple[int, ...]]] = {}
        for rank, kind in zip(communicator.ranks, kinds, strict=True):
            for name, entry in stages[kind].items():
                first = entries.setdefault(name, entry)
                if first.facts != entry.facts:
                    raise ValueError(
                        f"{name}: ranks hold different parameters of this name ({first.facts}; and "
                        f"{entry.facts}). Expected names that are unique over all stages: "
                        "select(stage, prefix=...) puts a stage's place in the model before its "
                        "names."
                    )
                holders.setdefault(name, set()).add(tuple(entry.ranks) or (rank,))
        for name, shard in own.items():
            if shard.ranks is None:  # it was read as if every rank of the call had a copy
                shard.ranks = (communicator.rank,)
                shard.be_replica(0, 1)
            _set_copies(shard, holders[name])
        return [
            own.get(name) or _absent(name, entries[name], len(holders[name]), device)
            for name in sorted(entries, key=natural_key)
        ]

    return communicator.run(join)


def _entry(shard: Shard) -> _Entry:
    scores = shard.scores if isinstance(shard.scores, Tensor) else shard.values
    dtype = scores.dtype
    if isinstance(shard.scores, FactoredScores):
        dtype = torch.promote_types(dtype, torch.float32)
    num_replicas = 1 if shard.ranks is None else shard.num_replicas
    name = str(dtype).removeprefix("torch.")
    return _Entry(shard.facts, tuple(shard.shape), name, shard.ranks or (), num_replicas)


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
