"""Reading the parameters of a call on every rank, and agreeing on what they are."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from distprune.base.naming import checked_pair, tied_places
from distprune.call.replicas import agree_on_copies
from distprune.call.request import Fact, ParameterArguments
from distprune.masks.checks import check_idle, check_state
from distprune.ranks.collectives import Communicator
from distprune.shards.factored import FactoredScores
from distprune.shards.reader import Scores, ShardReader, local_part, whole_checksum
from distprune.shards.shard import Shard

A = TypeVar("A", bound=ParameterArguments)

_PAIRS = (
    "(module, name) pairs, as select(model) lists them: "
    "{pair: scores[pair.fqn] for pair in select(model)}"
)


def read_parameters(
    make_arguments: Callable[[], A], communicator: Communicator
) -> tuple[A, list[Shard]]:
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
    under ``pipeline_parallel`` (replicas.join).
    """

    def read() -> tuple[A, list[Shard]]:
        arguments = make_arguments()
        return arguments, _read(arguments, communicator)

    def facts_of(result: tuple[A, list[Shard]]) -> list[Fact]:
        arguments, targets = result
        # Ranks of a pipeline have different parameters: they are compared when they are joined.
        return arguments.all_facts() + ([] if arguments.pipeline_parallel else describe(targets))

    arguments, targets = communicator.run(read, facts_of)
    return arguments, agree_on_copies(
        targets, communicator, "parameters", pipeline_parallel=arguments.pipeline_parallel
    )


def _read(arguments: ParameterArguments, communicator: Communicator) -> list[Shard]:
    """Read every parameter; one with several names is one shard, counted once."""
    reader = ShardReader(communicator.index, communicator.size)
    shards: dict[Hashable, Shard] = {}
    for position, pair in enumerate(arguments.parameters):
        module, name = checked_pair(pair, f"parameters[{position}]")
        full_name = getattr(pair, "fqn", None)
        if full_name is None and arguments.pipeline_parallel:
            raise TypeError(
                f"parameters[{position}] is a pair without a full name; expected those that "
                "select(stage) lists, or NamedParameter(module, name, fqn), because "
                "pipeline_parallel=True joins the lists of all ranks by name."
            )
        check_state(module, name)
        label = full_name or f"{type(module).__name__}.{name} (#{position})"
        read = read_at_rest(reader, module, name, label)
        shard = shards.setdefault(read.key, read)
        if shard is read:
            shard.is_named, shard.places = full_name is not None, ((module, name),)
        if shard is not read or full_name is not None:
            tied = tied_places(pair)
            shard.is_tied |= len(tied) > 1
            # By id: modules need not be hashable.
            places = {(id(m), n): (m, n) for m, n in [*shard.places, (module, name), *tied]}
            shard.places = tuple(places.values())
    if not shards and not arguments.pipeline_parallel:
        raise ValueError("parameters is empty; expected at least one (module, name) pair.")
    if arguments.pipeline_parallel:
        check_names([shard.name for shard in shards.values()], "different parameters")
    check_ranks(shards.values(), set(communicator.ranks))
    for shard in shards.values():
        for module, name in shard.places[1:]:
            check_state(module, name)
            _check_tied(shard, read_at_rest(reader, module, name, shard.name).mask)
    for key, scores in by_parameter(arguments.importance_scores or {}, shards, reader).items():
        shard = shards[key]
        shard.scores, shard.about_scores = local_scores(
            scores, shard.name, shard, arguments.scores_name
        )
    return list(shards.values())


def read_at_rest(reader: ShardReader, module: nn.Module, name: str, label: str) -> Shard:
    """Read a parameter; raise if a forward or a backward of it is running."""
    shard = reader.read(module, name, label)
    if shard.is_sharded:
        check_idle(module, label)
    return shard


def check_names(labels: Sequence[str], what: str) -> None:
    """Raise ValueError if parameters that a pipeline joins by name have one name on this rank."""
    if len(set(labels)) < len(labels):
        twice = next(label for label in labels if labels.count(label) > 1)
        raise ValueError(
            f"{twice} is the name of two {what} on one rank; expected names that are "
            "unique over all stages: select(stage, prefix=...) tells stages apart."
        )


def check_ranks(shards: Iterable[Shard], inside: set[int]) -> None:
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


def _check_tied(shard: Shard, other: Tensor | None) -> None:
    """Raise ValueError if a tied parameter has another mask under another name."""
    mask = shard.mask
    if mask is not other and (mask is None or other is None or not torch.equal(mask, other)):
        raise ValueError(
            f"{shard.name} is tied, and pruned differently under its names; expected equal masks "
            "on tied parameters. Remove the pruning of all of them first, or prune one of them."
        )


def describe(targets: Sequence[Shard], what: str = "parameters") -> list[Fact]:
    """Everything about the parameters that must be the same on every rank."""
    facts = [(f"number of {what}", str(len(targets)))]
    return facts + [(target.name, target.facts) for target in targets]


def check_mapping(scores: object) -> None:
    """Raise TypeError for scores that are no mapping."""
    if scores is not None and not isinstance(scores, Mapping):
        raise TypeError(
            f"importance_scores is a {type(scores).__name__}; expected a dict from "
            "(module, name) to a tensor."
        )


def by_parameter(
    scores: Scores, targets: Mapping[Hashable, Shard], reader: ShardReader
) -> dict[Hashable, list[Tensor | FactoredScores]]:
    """Group the scores by parameter; a tied parameter may have them under any of its names.

    Args:
        scores: the caller's scores, by (module, name).
        targets: the parameters of the call.
        reader: knows which names are tied.

    Raises:
        TypeError: a key that is no (module, name) pair.
        ValueError: a pair that is none of the parameters. Its scores would be ignored in silence,
            and the parameter that was meant would be ranked by its values.
    """
    owner = {(id(m), name): key for key, target in targets.items() for m, name in target.places}
    grouped: dict[Hashable, list[Tensor | FactoredScores]] = {}
    for pair, tensor in scores.items():
        place = checked_pair(pair, "a key of importance_scores", _PAIRS)
        key = owner.get((id(place[0]), place[1]))
        if key is None:
            with suppress(AttributeError, TypeError):  # no such parameter
                key = reader.identity(*place)[0]
        if key not in targets:
            raise ValueError(
                f"importance_scores has ({type(place[0]).__name__}, {place[1]!r}), which is none "
                "of the parameters of this call; expected (module, name) pairs among them."
            )
        grouped.setdefault(key, []).append(tensor)
    return grouped


def local_scores(
    scores: Sequence[Any], label: str, shard: Shard, what: str
) -> tuple[Tensor | FactoredScores, str]:
    """This rank's part of the scores, and what must be equal on all ranks.

    A tied parameter may have its scores under several names.
    """
    parts = [part_of_scores(tensor, label, shard, what) for tensor in scores]
    first, about = parts[0]
    for other, about_other in parts[1:]:
        is_same = about_other == about
        if isinstance(first, Tensor) and isinstance(other, Tensor):
            is_same &= torch.equal(first, other)
        if not is_same:
            raise ValueError(
                f"{label} is tied, and {what} has different tensors under several of its names; "
                "expected one under one name, or equal ones."
            )
    return first, about


def part_of_scores(
    scores: Any, label: str, shard: Shard, what: str = "importance_scores"
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
    part = local_part(label, what, scores, shard)
    return part, f"{part.dtype}, checksum {whole_checksum(scores, shard)}"


S = TypeVar("S", Tensor, FactoredScores, Tensor | FactoredScores)


class SignedScores(dict[tuple[nn.Module, str], S]):
    """Importance scores of which the lowest, signed, are to be pruned: -2 before -1 before 1.

    A criterion with signed scores returns them. A method that ranks by |score| would prune those
    next to zero, which are neither the best nor the worst, so it is refused.
    """


def check_order(scores: object, method: object) -> None:
    """Refuse signed scores for a method that ranks by their absolute values.

    Raises:
        TypeError: says which method to take.
    """
    if isinstance(scores, SignedScores) and getattr(method, "IGNORES_SIGN", False):
        raise TypeError(
            f"{type(method).__name__} ranks |score|, and these importance_scores are signed: the "
            "lowest are to be pruned, and negative ones first. Expected "
            "pruning_method=prune.LowestScore, which is criterion.pruning_method."
        )


def check_signed(scores: object, is_signed: bool) -> None:
    """Refuse signed scores where they would be ranked by their absolute values.

    Raises:
        TypeError: says which argument to pass.
    """
    if isinstance(scores, SignedScores) and not is_signed:
        raise TypeError(
            "scores are those of a signed criterion, and signed=False ranks |score|; expected "
            "signed=True."
        )
