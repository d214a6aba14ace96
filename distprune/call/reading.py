"""Reading the parameters of a call on every rank, and agreeing on what they are."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from distprune._common.amount import Bounded, Bounds, to_bounds
from distprune._common.collectives import Communicator
from distprune._common.naming import checked_pair, label_of, tied_places
from distprune.call import pipeline_parallel as stages
from distprune.call.grouping import Grouping, agree_on_grouping
from distprune.call.importance_scores import by_parameter
from distprune.call.replicas import count_copies_on_other_meshes
from distprune.call.request import (
    ByBudget,
    Divided,
    Fact,
    InGroups,
    ParameterArguments,
    PruningArguments,
    Together,
)
from distprune.masks.checks import check_binary, check_idle, check_owners, check_state
from distprune.shards.factored import FactoredScores
from distprune.shards.parameters import Target
from distprune.shards.reader import ShardReader, local_part, unflattened, whole_checksum
from distprune.shards.shard import LocalShard

A = TypeVar("A", bound=ParameterArguments)


def read_parameters(
    make_arguments: Callable[[], A], communicator: Communicator
) -> tuple[A, list[Target]]:
    """Read this rank's part of every parameter, and agree on what the parameters are.

    Args:
        make_arguments: a local step that may fail: makes and checks the arguments.
        communicator: the ranks that take part.

    Returns:
        The arguments, and the same list of parameters on every rank.

    Raises:
        Exception: what any rank raised, on every rank.
        ValueError: ranks have different parameters or facts.

    Cost: an all-reduce of 40 bytes; more where parameters lie on several meshes (replicas.py) or
    under ``pipeline_parallel`` (pipeline_parallel.join).
    """

    def read() -> tuple[A, list[Target]]:
        arguments = make_arguments()
        return arguments, _read(arguments, communicator)

    def facts_of(result: tuple[A, list[Target]]) -> list[Fact]:
        arguments, targets = result
        # Ranks of a pipeline have different parameters: they are compared when they are joined.
        return arguments.all_facts() + ([] if arguments.pipeline_parallel else _describe(targets))

    arguments, targets = communicator.run(read, facts_of)
    if arguments.pipeline_parallel:
        targets = stages.join(targets, communicator)
        if not targets:
            raise ValueError("parameters is empty on every rank; expected at least one pair.")
        return arguments, targets
    return arguments, count_copies_on_other_meshes(targets, communicator)


def agree_on_share(
    arguments: PruningArguments, targets: Sequence[Target], communicator: Communicator
) -> Together | Grouping:
    """How the pruned elements are shared, settled for the parameters of the call.

    Raises:
        TypeError: a bound that is no number.
        ValueError: a bound outside [0, 1], a floor above a ceiling, a key that is no parameter; a
            budget or a pattern that does not fit the parameters; any of them differs between
            ranks. On every rank.

    Cost: an all-reduce of 40 bytes for bounds, for a budget, and for groups.
    """
    share = arguments.share
    if isinstance(share, InGroups):
        return agree_on_grouping(
            share.rule,
            share.input_dims,
            targets,
            communicator,
            pipeline_parallel=arguments.pipeline_parallel,
        )
    bounds, bounded = None, _bounded(targets)
    if share.has_bounds:
        bounds = communicator.run(
            lambda: to_bounds(bounded, share.min_sparsity, share.max_sparsity),
            lambda bounds: _describe_bounds(targets, bounds),
        )
    if not isinstance(share, ByBudget):
        return Together(bounds)
    division = communicator.run(
        lambda: share.budget.divide(bounded), lambda division: division.facts
    )
    return Divided(bounds, division=division, has_amount=share.has_amount)


def _bounded(targets: Sequence[Target]) -> list[Bounded]:
    return [
        Bounded(t.label, (t.label, *t.places), t.shard.numel, tuple(t.shard.shape)) for t in targets
    ]


def _describe_bounds(targets: Sequence[Target], bounds: Bounds | None) -> list[Fact]:
    if bounds is None:
        return []
    return [
        (f"bounds of {target.label}", f"{low} to {high} pruned elements")
        for target, low, high in zip(targets, bounds.lowest, bounds.highest, strict=True)
    ]


@dataclass
class _Parameter:
    """A parameter of a call, with all pairs under which the caller passed it.

    Attributes:
        label: its full name, or what stands for it in messages.
        is_named: whether the label is a full name.
        shard: this rank's part.
        places: all its (module, name) pairs.
        is_tied: whether a pair stands for several places.
    """

    label: str
    is_named: bool
    shard: LocalShard
    places: list[tuple[nn.Module, str]] = field(default_factory=list)
    is_tied: bool = False

    def add_places(self, places: Sequence[tuple[nn.Module, str]]) -> None:
        """Add the places of a pair that are not listed yet."""
        self.is_tied |= len(places) > 1
        for module, name in places:
            if not any(module is m and name == n for m, n in self.places):
                self.places.append((module, name))


def _read(arguments: ParameterArguments, communicator: Communicator) -> list[Target]:
    """Read every parameter; one with several names is one target, counted once."""
    reader = ShardReader(communicator.index, communicator.size)
    pairs = list(arguments.parameters)  # may be a generator
    if not pairs and not arguments.pipeline_parallel:
        raise ValueError("parameters is empty; expected at least one (module, name) pair.")
    parameters: dict[Hashable, _Parameter] = {}
    for position, pair in enumerate(pairs):
        module, name = checked_pair(pair, f"parameters[{position}]")
        fqn = getattr(pair, "fqn", None)
        if fqn is None and arguments.pipeline_parallel:
            raise TypeError(
                f"parameters[{position}] is a pair without a full name; expected those that "
                "select(stage) lists, or NamedParameter(module, name, fqn), because "
                "pipeline_parallel=True joins the lists of all ranks by name."
            )
        label = label_of(pair, position)
        shard = _read_one(reader, module, name, label)
        parameter = parameters.setdefault(shard.key, _Parameter(label, fqn is not None, shard))
        parameter.add_places(tied_places(pair))
    if arguments.pipeline_parallel:
        _check_names(parameters.values())
    check_ranks([parameter.shard for parameter in parameters.values()], set(communicator.ranks))
    for parameter in parameters.values():
        for module, name in parameter.places[1:]:
            shard = _read_one(reader, module, name, parameter.label)
            _check_tied(parameter.label, parameter.shard, shard)
    scores_of = by_parameter(
        arguments.importance_scores or {},
        {key: parameter.places for key, parameter in parameters.items()},
        {key: parameter.label for key, parameter in parameters.items()},
        reader,
    )
    return [
        Target(
            parameter.label,
            tuple(parameter.places),
            parameter.is_tied,
            reader.managed(*parameter.places[0]),
            parameter.shard,
            *_local_scores(
                scores_of.get(key, ()), parameter.label, parameter.shard, arguments.scores_name
            ),
            parameter.is_named,
        )
        for key, parameter in parameters.items()
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


def _check_names(parameters: Iterable[_Parameter]) -> None:
    labels = [parameter.label for parameter in parameters]
    if len(set(labels)) < len(labels):
        twice = next(label for label in labels if labels.count(label) > 1)
        raise ValueError(
            f"{twice} is the name of two different parameters on one rank; expected names that are "
            "unique over all stages: select(stage, prefix=...) tells stages apart."
        )


def check_ranks(shards: Iterable[LocalShard], inside: set[int]) -> None:
    """Raise ValueError if ranks that take no part in a call have a part of a parameter."""
    # Parameters of one mesh share their tuple of ranks, which may be long: it is checked once.
    checked: set[int] = set()
    for shard in shards:
        if shard.ranks is None or id(shard.ranks) in checked:
            continue
        checked.add(id(shard.ranks))
        outside = sorted(set(shard.ranks) - inside)
        if outside:
            raise ValueError(
                f"{shard.name}: ranks {outside} hold a part of the parameter but do not take part "
                f"in the call (ranks {sorted(inside)}); expected a group that holds all of them."
            )


def _check_tied(label: str, first: LocalShard, other: LocalShard) -> None:
    if first.mask is None or other.mask is None:
        are_equal = first.mask is other.mask
    else:
        are_equal = first.mask is other.mask or torch.equal(first.mask, other.mask)
    if not are_equal:
        raise ValueError(
            f"{label} is tied, and pruned differently under its names; expected equal masks on "
            "tied parameters. Remove the pruning of all of them first, or prune one of them."
        )


def _local_scores(
    scores: Sequence[Any], label: str, shard: LocalShard, what: str
) -> tuple[Tensor | FactoredScores | None, str]:
    """This rank's part of the scores, and what must be equal on all ranks.

    A tied parameter may have its scores under several names.
    """
    if not scores:
        return None, "none"
    parts = [part_of_scores(tensor, label, shard, what) for tensor in scores]
    first, about = parts[0]
    if any(not _are_equal(part, first) for part, _ in parts[1:]):
        raise ValueError(
            f"{label} is tied, and {what} has different tensors under several of its names; "
            "expected one under one name, or equal ones."
        )
    return first, about


def _are_equal(one: Tensor | FactoredScores, other: Tensor | FactoredScores) -> bool:
    if isinstance(one, FactoredScores):
        return isinstance(other, FactoredScores) and one.equals(other)
    return isinstance(other, Tensor) and torch.equal(one, other)


def part_of_scores(
    scores: Any, label: str, shard: LocalShard, what: str = "importance_scores"
) -> tuple[Tensor | FactoredScores, str]:
    """This rank's part of the scores of a parameter, and what must be equal on all ranks.

    Args:
        scores: like the parameter, or whole; or the factors of them.
        what: the name of the argument, for messages.

    Raises:
        TypeError, ValueError: scores of another type or layout.
    """
    if isinstance(scores, FactoredScores):
        scores.check_shape(label, shard.shape)
        return scores, f"factors, checksum {scores.checksum()}"
    if not isinstance(scores, Tensor):
        raise TypeError(
            f"{label}: {what} is a {type(scores).__name__}; expected a tensor or FactoredScores."
        )
    whole = unflattened(label, what, scores, shard)
    part = local_part(label, what, whole, shard)
    return part, f"{part.dtype}, checksum {whole_checksum(scores, shard)}"


def _describe(targets: Sequence[Target]) -> list[Fact]:
    """Everything about the parameters that must be the same on every rank."""
    facts = [("number of parameters", str(len(targets)))]
    return facts + [(target.label, target.facts) for target in targets]
