"""Pipeline stages: ranks that own different parameters, joined into one list by name.

A single process cannot know in which order stages would list their parameters, so the order
is that of the full names, whoever holds them: "layers.2" before "layers.10". A rank takes part
in the ranking of parameters that it does not have with empty shards.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from distprune._common.collectives import Communicator
from distprune._common.selecting import natural_key
from distprune.shards.factored import FactoredScores
from distprune.shards.geometry import run_index_map
from distprune.shards.parameters import Target
from distprune.shards.shard import FlatShard


@dataclass(frozen=True)
class _Entry:
    """What one rank tells the others of one parameter."""

    facts: str
    shape: tuple[int, ...]
    dtype: str  # of the scores, if there are some
    ranks: tuple[int, ...]  # that hold it together; empty: each has a copy of its own
    num_replicas: int  # among these ranks


def join(targets: Sequence[Target], communicator: Communicator) -> list[Target]:
    """Every parameter that any rank has, in the order of names; the same list on all ranks.

    Args:
        targets: this rank's, with full names as labels, each name once.
        communicator: all ranks that take part.

    Raises:
        ValueError: ranks describe a parameter of one name differently; on every rank.

    Cost: four all-reduces: 16 bytes per rank, about 200 bytes per parameter and kind of stage, and
    two small ones.
    """
    mine = communicator.run(lambda: json.dumps({t.label: vars(_entry(t)) for t in targets}))
    texts, kind_of_rank = communicator.distinct_texts(mine)
    return communicator.run(lambda: _joined(targets, texts, kind_of_rank, communicator))


def _joined(
    targets: Sequence[Target],
    texts: Sequence[str],
    kind_of_rank: Sequence[int],
    communicator: Communicator,
) -> list[Target]:
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
    own = {target.label: target for target in targets}
    device = targets[0].shard.values.device if targets else torch.device("cpu")
    return [
        _with_copies(own[name], sorted(holders[name]), communicator.rank)
        if name in own
        else _absent(name, entries[name], len(holders[name]), device)
        for name in sorted(entries, key=natural_key)
    ]


def _entry(target: Target) -> _Entry:
    shard = target.shard
    scores = target.scores if isinstance(target.scores, Tensor) else shard.values
    score_dtype = scores.dtype
    if isinstance(target.scores, FactoredScores):
        score_dtype = torch.promote_types(score_dtype, torch.float32)
    dtype = str(score_dtype).removeprefix("torch.")
    if shard.ranks is None:  # it was read as if every rank of the call had a copy
        return _Entry(target.facts, tuple(shard.shape), dtype, (), 1)
    return _Entry(target.facts, tuple(shard.shape), dtype, shard.ranks, shard.num_replicas)


def _read_entry(data: dict[str, Any]) -> _Entry:
    return _Entry(**data | {"shape": tuple(data["shape"]), "ranks": tuple(data["ranks"])})


def _with_copies(target: Target, holders: list[tuple[int, ...]], rank: int) -> Target:
    """Let a shard know of all copies of its elements, on whatever rank or mesh."""
    shard = target.shard
    ranks = shard.ranks
    if ranks is None:
        ranks = (rank,)
        shard = replace(shard, ranks=ranks, replica=0, num_replicas=1)
    copies = len(holders) * shard.num_replicas
    replica = holders.index(ranks) * shard.num_replicas + shard.replica
    return replace(target, shard=replace(shard, replica=replica, num_replicas=copies))


def _absent(name: str, entry: _Entry, num_holders: int, device: torch.device) -> Target:
    """A parameter of other ranks: no element of it is here."""
    values = torch.empty(0, dtype=getattr(torch, entry.dtype), device=device)
    index = run_index_map((0,), (1,), 0)
    assert index is not None
    shard = FlatShard(
        name=name,
        parameter=values,
        values=values,
        mask=None,
        shape=torch.Size(entry.shape),
        coordinates=(),
        order=(0,),
        index=index,
        num_replicas=num_holders * entry.num_replicas,
        ranks=(),
        key=name,
    )
    return Target(name, (), False, None, shard, None)
