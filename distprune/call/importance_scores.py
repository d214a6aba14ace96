"""``importance_scores``: the parameter that each key stands for, and scores whose sign counts."""

from __future__ import annotations

import difflib
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor, nn

from distprune._common.naming import Pair, is_pair, unwrap
from distprune.shards.factored import FactoredScores
from distprune.shards.parameters import Scores
from distprune.shards.reader import ShardReader


def by_parameter(
    scores: Scores,
    places: Mapping[Hashable, Sequence[Pair]],
    labels: Mapping[Hashable, str],
    reader: ShardReader,
) -> dict[Hashable, list[Tensor | FactoredScores]]:
    """Group the scores by parameter; a tied parameter may have them under any of its names.

    Args:
        scores: by (module, name), as the caller gave them.
        places: the (module, name) pairs of every parameter of the call.
        labels: their names, for messages.
        reader: knows which names are tied.

    Raises:
        TypeError: a key that is no (module, name) pair.
        ValueError: a pair that is none of the parameters. Its scores would be ignored in silence,
            and the parameter that was meant would be ranked by its values.
    """
    owner = {(id(m), name): key for key, pairs in places.items() for m, name in pairs}
    grouped: dict[Hashable, list[Tensor | FactoredScores]] = {}
    for pair, tensor in scores.items():
        place = _checked(pair, labels)
        key = owner.get((id(place[0]), place[1]))
        if key is None:
            key = _identity(place, reader)
        if key not in places:
            raise ValueError(
                f"importance_scores has ({type(place[0]).__name__}, {place[1]!r}), which is none "
                f"of the parameters of this call; expected (module, name) pairs among them"
                f"{_closest(place, places, labels)}."
            )
        grouped.setdefault(key, []).append(tensor)
    return grouped


def without_others(
    scores: Scores | None, mine: Sequence[Pair], others: Sequence[Pair]
) -> Scores | None:
    """The scores without those of parameters that another call prunes.

    What belongs to neither stays: :func:`by_parameter` refuses it.
    """
    if not others or not isinstance(scores, Mapping):
        return scores
    reader = ShardReader()
    own = {_identity(place, reader) for place in mine}
    foreign = {_identity(place, reader) for place in others} - own - {None}
    kept = {
        key: tensor
        for key, tensor in scores.items()
        if not (is_pair(key) and _identity(key, reader) in foreign)
    }
    return SignedScores(kept) if isinstance(scores, SignedScores) else kept


def _identity(place: Pair, reader: ShardReader) -> Hashable | None:
    """What is the same for all names of a parameter; None if there is no such parameter."""
    try:
        return reader.identity(*place)[0]
    except (AttributeError, TypeError):
        return None


def _checked(key: Any, labels: Mapping[Hashable, str]) -> Pair:
    if is_pair(key):
        return unwrap(key[0]), key[1]
    close = difflib.get_close_matches(str(key), list(labels.values()), n=1)
    hint = f" Did you mean the parameter {close[0]!r}?" if close else ""
    raise TypeError(
        f"importance_scores has the key {_shown(key)}; expected (module, name) pairs, as "
        f"select(model) lists them: {{pair: scores[pair.fqn] for pair in select(model)}}.{hint}"
    )


def _shown(key: Any) -> str:
    if isinstance(key, tuple):
        return f"({', '.join(type(item).__name__ for item in key)})"
    return repr(key) if isinstance(key, str | int | float) else type(key).__name__


def _closest(
    place: Pair, places: Mapping[Hashable, Sequence[Pair]], labels: Mapping[Hashable, str]
) -> str:
    """The parameter that was most likely meant: another name of the module, or a like module."""
    module, name = place
    names = {n: key for key, pairs in places.items() for m, n in pairs if m is module}
    close = difflib.get_close_matches(name, list(names), n=1, cutoff=0.3)
    if close:
        return f"; did you mean ({type(module).__name__}, {close[0]!r}), {labels[names[close[0]]]}?"
    same = [
        labels[key]
        for key, pairs in places.items()
        if any(n == name and type(m) is type(module) for m, n in pairs)
    ]
    return f", such as {(same or list(labels.values()) or ['(none)'])[0]}"


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
