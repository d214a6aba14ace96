"""Reading the parameters of a call on every rank, and agreeing on what they are."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from distprune import stages
from distprune.bounds import Bounded, Bounds, SparsityBound, to_bounds
from distprune.collectives import Communicator, attempt
from distprune.naming import unwrap
from distprune.shard import LocalShard
from distprune.sharding import ShardReader, local_part
from distprune.target import Scores, Target


def read_together(
    parameters: Iterable[tuple[nn.Module, str]],
    scores: Scores | None,
    communicator: Communicator,
    facts: Sequence[tuple[str, str]],
    error: Exception | None,
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
    targets: list[Target] | None = None
    if error is None:
        targets, error = attempt(_read, parameters, scores or {}, communicator, pipeline_parallel)
    facts = [*facts, ("pipeline_parallel", str(pipeline_parallel))]
    if pipeline_parallel:
        communicator.agree(facts, error)
        assert targets is not None
        targets = stages.join(targets, communicator)
        if not targets:
            raise ValueError("parameters is empty on every rank; expected at least one pair.")
    bounds: Bounds | None = None
    if error is None:
        bounds, error = attempt(_bounds_of, targets, min_sparsity, max_sparsity)
    limits = [("bounds on the sparsity of parameters", "none" if bounds is None else "given")]
    if bounds is not None:
        assert targets is not None
        for target, low, high in zip(targets, bounds.lowest, bounds.highest, strict=True):
            limits.append((f"bounds of {target.label}", f"{low} to {high} pruned elements"))
    described = [] if pipeline_parallel else _describe(targets or [])
    communicator.agree([*facts, *described, *limits], error)
    assert targets is not None
    if not pipeline_parallel:
        targets = _count_copies_on_other_meshes(targets, communicator)
    return targets, bounds


def _bounds_of(
    targets: Sequence[Target],
    min_sparsity: SparsityBound | None,
    max_sparsity: SparsityBound | None,
) -> Bounds | None:
    if min_sparsity is None and max_sparsity is None:
        return None
    bounded = [Bounded(t.label, (t.label, *t.places), t.shard.numel) for t in targets]
    return to_bounds(bounded, min_sparsity, max_sparsity)


def _read(
    parameters: Iterable[tuple[nn.Module, str]],
    scores: Scores,
    communicator: Communicator,
    pipeline_parallel: bool,
) -> list[Target]:
    """Read every parameter; those given under several names are one target, counted once."""
    reader = ShardReader(communicator.index, communicator.size)
    pairs = list(parameters)  # a generator is read once, here
    scores = {(unwrap(module), name): given for (module, name), given in scores.items()}
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
        shard = reader.read(module, name, label)
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
            _check_tied(label, shard, reader.read(module, name, label))
    return [
        Target(
            label,
            tuple(places[key]),
            key in tied,
            reader.managed(*places[key][0]),
            shard,
            _scores_of(places[key], scores, label, shard),
            label in named,
        )
        for key, (label, shard) in shards.items()
    ]


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


def _scores_of(
    places: Sequence[tuple[nn.Module, str]], scores: Scores, label: str, shard: LocalShard
) -> Tensor | None:
    given = next((scores[place] for place in places if place in scores), None)
    if given is None:
        return None
    if not isinstance(given, Tensor):
        raise TypeError(
            f"{label}: importance_scores is a {type(given).__name__}; expected a tensor."
        )
    flat_and_whole = given.ndim == 1 and given.numel() == shard.numel
    if flat_and_whole and given.shape != shard.shape:
        given = given.view(shard.shape)
    return local_part(label, "importance_scores", given, shard)


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
    these meshes holds the whole parameter. One all-reduce of 8 bytes per rank and
    kind of mesh, if there are such parameters.
    """
    smaller = [t.shard for t in targets if _is_on_part(t.shard, communicator)]
    # Ranks meet kinds of meshes in the same order, as their lists are the same.
    kinds = list(dict.fromkeys(shard.ranks for shard in smaller))
    if not kinds:
        return targets
    is_first = torch.zeros(len(kinds), communicator.size, dtype=torch.int64)
    for row, ranks in enumerate(kinds):
        is_first[row, communicator.index] = communicator.rank == ranks[0]
    # By kind: which of how many meshes this rank's is.
    copies = {}
    for ranks, row in zip(kinds, communicator.sum(is_first), strict=True):
        firsts = row.nonzero().squeeze(1).tolist()
        copies[ranks] = (firsts.index(communicator.ranks.index(ranks[0])), len(firsts))
    found = []
    for target in targets:
        shard = target.shard
        if _is_on_part(shard, communicator):
            which, num_copies = copies[shard.ranks]
            shard = replace(
                shard,
                replica=which * shard.num_replicas + shard.replica,
                num_replicas=num_copies * shard.num_replicas,
            )
            target = replace(target, shard=shard)
        found.append(target)
    return found


def _is_on_part(shard: LocalShard, communicator: Communicator) -> bool:
    return shard.ranks is not None and len(shard.ranks) < communicator.size
