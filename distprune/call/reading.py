"""Reading the parameters of a call on every rank, and agreeing on what they are."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from distprune._common.bounds import Bounded, Bounds, SparsityBound, to_bounds
from distprune._common.collectives import Communicator
from distprune._common.naming import unwrap
from distprune.call import pipeline_parallel as stages
from distprune.call.score_keys import by_parameter
from distprune.masks.checks import check_binary, check_idle, check_owners, check_state
from distprune.shards.reader import ShardReader, local_part, unflattened, whole_checksum
from distprune.shards.shard import LocalShard
from distprune.shards.target import Scores, Target


def read_together(
    parameters: Iterable[tuple[nn.Module, str]],
    scores: Scores | None,
    communicator: Communicator,
    facts: Sequence[tuple[str, str]],
    error: BaseException | None,
    min_sparsity: SparsityBound | None = None,
    max_sparsity: SparsityBound | None = None,
    *,
    pipeline_parallel: bool = False,
) -> tuple[list[Target], Bounds | None]:
    """Read every parameter; raises on every rank if one could not, or read other ones.

    Args:
        parameters, scores, communicator, facts, error, min_sparsity, max_sparsity: see
            pipeline.prune_together.
        pipeline_parallel: ranks have lists of their own, which are joined by name.

    Returns:
        The same list of parameters on every rank, each copy knowing of the others.
    """
    facts = [*facts, ("pipeline_parallel", str(pipeline_parallel))]

    def read() -> tuple[list[Target], list[tuple[str, str]]]:
        if error is not None:
            raise error
        targets = _read(parameters, scores or {}, communicator, pipeline_parallel)
        return targets, [] if pipeline_parallel else _describe(targets)

    if pipeline_parallel:
        targets, _ = communicator.run(read, lambda _: facts)
        targets = stages.join(targets, communicator)
        if not targets:
            raise ValueError("parameters is empty on every rank; expected at least one pair.")
        bounds = communicator.run(
            lambda: _bounds_of(targets, min_sparsity, max_sparsity),
            lambda bounds: _describe_bounds(targets, bounds),
        )
        return targets, bounds

    def read_all() -> tuple[list[Target], Bounds | None, list[tuple[str, str]]]:
        targets, described = read()
        bounds = _bounds_of(targets, min_sparsity, max_sparsity)
        return targets, bounds, [*described, *_describe_bounds(targets, bounds)]

    targets, bounds, _ = communicator.run(read_all, lambda done: [*facts, *done[2]])
    return _count_copies_on_other_meshes(targets, communicator), bounds


def _bounds_of(
    targets: Sequence[Target],
    min_sparsity: SparsityBound | None,
    max_sparsity: SparsityBound | None,
) -> Bounds | None:
    if min_sparsity is None and max_sparsity is None:
        return None
    bounded = [Bounded(t.label, (t.label, *t.places), t.shard.numel) for t in targets]
    return to_bounds(bounded, min_sparsity, max_sparsity)


def _describe_bounds(targets: Sequence[Target], bounds: Bounds | None) -> list[tuple[str, str]]:
    facts = [("bounds on the sparsity of parameters", "none" if bounds is None else "given")]
    if bounds is not None:
        for target, low, high in zip(targets, bounds.lowest, bounds.highest, strict=True):
            facts.append((f"bounds of {target.label}", f"{low} to {high} pruned elements"))
    return facts


def _read(
    parameters: Iterable[tuple[nn.Module, str]],
    scores: Scores,
    communicator: Communicator,
    pipeline_parallel: bool,
) -> list[Target]:
    """Read every parameter; those given under several names are one target, counted once."""
    reader = ShardReader(communicator.index, communicator.size)
    pairs = list(parameters)  # a generator is read once, here
    if not pairs and not pipeline_parallel:
        raise ValueError("parameters is empty; expected at least one (module, name) pair.")
    places: dict[Hashable, list[tuple[nn.Module, str]]] = {}
    shards: dict[Hashable, tuple[str, LocalShard]] = {}
    tied: set[Hashable] = set()
    inside = set(communicator.ranks)
    named: set[str] = set()
    # By identity: parameters of one mesh share their list of ranks, which may be long.
    checked: dict[int, tuple[int, ...]] = {}
    for position, pair in enumerate(pairs):
        module, name = _checked_pair(pair, position)
        label = getattr(pair, "fqn", None)
        if label is None and pipeline_parallel:
            raise TypeError(
                f"parameters[{position}] is a pair without a full name; expected those that "
                "select(stage) lists, or NamedParameter(module, name, fqn), because "
                "pipeline_parallel=True joins the lists of all ranks by name."
            )
        if label is not None:
            named.add(label)
        label = label or f"{type(module).__name__}.{name} (#{position})"
        shard = _read_one(reader, module, name, label)
        key = shard.key
        known = places.setdefault(key, [])
        for place in getattr(pair, "places", ((module, name),)):
            if not any(place[0] is m and place[1] == n for m, n in known):
                known.append(place)
        if len(getattr(pair, "places", ())) > 1:
            tied.add(key)
        if key not in shards:
            if shard.ranks is not None and id(shard.ranks) not in checked:
                _check_ranks(shard, shard.ranks, inside)
                checked[id(shard.ranks)] = shard.ranks
            shards[key] = (label, shard)
    labels = [label for label, _ in shards.values()]
    if pipeline_parallel and len(set(labels)) < len(labels):
        twice = next(label for label in labels if labels.count(label) > 1)
        raise ValueError(
            f"{twice} is the name of two different parameters on one rank; expected names that are "
            "unique over all stages: select(stage, prefix=...) tells stages apart."
        )
    for key, (label, shard) in shards.items():
        for module, name in places[key][1:]:
            _check_tied(label, shard, _read_one(reader, module, name, label))
    given = by_parameter(scores, places, {key: shards[key][0] for key in shards}, reader)
    return [
        Target(
            label,
            tuple(places[key]),
            key in tied,
            reader.managed(*places[key][0]),
            shard,
            *_scores_of(given.get(key, ()), label, shard),
            label in named,
        )
        for key, (label, shard) in shards.items()
    ]


def _read_one(reader: ShardReader, module: nn.Module, name: str, label: str) -> LocalShard:
    """Read a parameter at one place, if it can be pruned there as it is now."""
    check_state(module, name)
    managed = reader.managed(module, name)
    if managed is not None:
        check_idle(module, label)
        check_owners(managed.owners, name)
    shard = reader.read(module, name, label)
    if shard.is_sharded and shard.mask is not None and reader.has_whole_mask(module, name):
        check_binary(shard.mask, label)
    return shard


def _checked_pair(pair: Any, position: int) -> tuple[nn.Module, str]:
    try:
        module, name = pair
    except (TypeError, ValueError):
        raise TypeError(
            f"parameters[{position}] is {type(pair).__name__}; expected a (module, name) pair. "
            "select(model) makes a list of them."
        ) from None
    if not isinstance(module, nn.Module) or not isinstance(name, str):
        raise TypeError(
            f"parameters[{position}] is a pair of {type(module).__name__} and "
            f"{type(name).__name__}; expected (module, name), as select(model) makes them."
        )
    # A layer that is wrapped by itself: model.layer is the wrapper then.
    return unwrap(module), name


def _check_ranks(shard: LocalShard, ranks: tuple[int, ...], inside: set[int]) -> None:
    outside = sorted(set(ranks) - inside)
    if outside:
        raise ValueError(
            f"{shard.name}: ranks {outside} hold a part of the parameter but do not take part in "
            f"the call (ranks {sorted(inside)}); expected a group that holds all of them."
        )


def _check_tied(label: str, first: LocalShard, other: LocalShard) -> None:
    same = (other.mask is None) == (first.mask is None) and (
        other.mask is first.mask or torch.equal(other.mask, first.mask)
    )
    if not same:
        raise ValueError(
            f"{label} is tied, and pruned differently under its names; expected equal masks on "
            "tied parameters. Remove the pruning of all of them first, or prune one of them."
        )


def _scores_of(given: Sequence[Any], label: str, shard: LocalShard) -> tuple[Tensor | None, str]:
    """This rank's part of the scores, and what must be equal on all ranks.

    A tied parameter may have its scores under several names.
    """
    if not given:
        return None, "none"
    parts = [_part_of(each, label, shard) for each in given]
    first, about = parts[0]
    if any(not torch.equal(part, first) for part, _ in parts[1:]):
        raise ValueError(
            f"{label} is tied, and importance_scores has different scores under several of its "
            "names; expected them under one name, or equal ones."
        )
    return first, about


def _part_of(given: Any, label: str, shard: LocalShard) -> tuple[Tensor, str]:
    if not isinstance(given, Tensor):
        raise TypeError(
            f"{label}: importance_scores is a {type(given).__name__}; expected a tensor."
        )
    whole = unflattened(label, "importance_scores", given, shard)
    part = local_part(label, "importance_scores", whole, shard)
    return part, f"{part.dtype}, checksum {whole_checksum(given, shard)}"


def _describe(targets: Sequence[Target]) -> list[tuple[str, str]]:
    """Everything about the parameters that must be the same on every rank."""
    facts = [("number of parameters", str(len(targets)))]
    return facts + [(target.label, target.facts) for target in targets]


def _count_copies_on_other_meshes(
    targets: list[Target], communicator: Communicator
) -> list[Target]:
    """Let every shard know of the copies that lie outside its own mesh.

    Under FSDP2 with tensor parallelism, a layer that is not parallelised is sharded
    over the data-parallel ranks only, once for every tensor-parallel rank. Each of
    these meshes holds the whole parameter.

    [Note: kinds of meshes] A rank knows its own mesh of a parameter only, and a rank outside of
    all meshes knows some mesh. So two parameters are known to be on the same meshes by a number
    that all ranks make together: a sum over ranks of a hash of the mesh that each one sees.

    Cost: if there are such parameters, two all-reduces: 8 bytes per parameter, and per rank and
    kind of meshes.
    """
    smaller = [t.shard for t in targets if _is_on_part(t.shard, communicator)]
    if not smaller:
        return targets

    def hash_meshes() -> Tensor:
        by_ranks = {
            ranks: _mesh_hash(ranks, communicator.rank)
            for ranks in {shard.ranks for shard in smaller}
        }
        return torch.tensor([by_ranks[shard.ranks] for shard in smaller], dtype=torch.int64)

    kind_of = communicator.reduce(len(smaller), hash_meshes).tolist()
    mesh_of = dict(zip(kind_of, (shard.ranks for shard in smaller), strict=True))

    def mark_first() -> Tensor:
        is_first = torch.zeros(len(mesh_of), communicator.size, dtype=torch.int64)
        for row, ranks in enumerate(mesh_of.values()):
            is_first[row, communicator.index] = communicator.rank == ranks[0]
        return is_first.view(-1)

    is_first = communicator.reduce(len(mesh_of) * communicator.size, mark_first)
    # By kind: which of how many meshes this rank's is.
    copies = {}
    for (kind, ranks), row in zip(mesh_of.items(), is_first.chunk(len(mesh_of)), strict=True):
        firsts = row.nonzero().squeeze(1).tolist()
        copies[kind] = (firsts.index(communicator.ranks.index(ranks[0])), len(firsts))
    found, kinds = [], iter(kind_of)
    for target in targets:
        shard = target.shard
        if _is_on_part(shard, communicator):
            which, num_copies = copies[next(kinds)]
            shard = replace(
                shard,
                replica=which * shard.num_replicas + shard.replica,
                num_replicas=num_copies * shard.num_replicas,
            )
            target = replace(target, shard=shard)
        found.append(target)
    return found


def _mesh_hash(ranks: tuple[int, ...], rank: int) -> int:
    data = repr((rank, ranks)).encode()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little", signed=True)


def _is_on_part(shard: LocalShard, communicator: Communicator) -> bool:
    return shard.ranks is not None and len(shard.ranks) < communicator.size
