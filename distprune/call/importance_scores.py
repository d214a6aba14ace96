"""``importance_scores``: the parameter that each key stands for, and scores whose sign counts."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from distprune.base.naming import Pair, is_pair, unwrap
from distprune.shards.factored import FactoredScores
from distprune.shards.parameters import Scores
from distprune.shards.reader import ShardReader, local_part, whole_checksum
from distprune.shards.shard import Shard


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
        place = _checked(pair)
        key = owner.get((id(place[0]), place[1]))
        if key is None:
            key = _identity(place, reader)
        if key not in targets:
            raise ValueError(
                f"importance_scores has ({type(place[0]).__name__}, {place[1]!r}), which is none "
                "of the parameters of this call; expected (module, name) pairs among them."
            )
        grouped.setdefault(key, []).append(tensor)
    return grouped


def _identity(place: Pair, reader: ShardReader) -> Hashable | None:
    """What is the same for all names of a parameter; None if there is no such parameter."""
    try:
        return reader.identity(*place)[0]
    except (AttributeError, TypeError):
        return None


def _checked(key: Any) -> Pair:
    if is_pair(key):
        return unwrap(key[0]), key[1]
    raise TypeError(
        f"importance_scores has the key {_shown(key)}; expected (module, name) pairs, as "
        f"select(model) lists them: {{pair: scores[pair.fqn] for pair in select(model)}}."
    )


def _shown(key: Any) -> str:
    if isinstance(key, tuple):
        return f"({', '.join(type(item).__name__ for item in key)})"
    return repr(key) if isinstance(key, str | int | float) else type(key).__name__


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
