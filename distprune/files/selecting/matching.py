"""The tensors that a recipe's patterns match."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from distprune._common.patterns import matcher
from distprune.files.errors import SelectionError

_MAX_COMPARED = 2000  # names, for a hint: comparing one takes some 10 microseconds


def matched(
    field: str, patterns: Sequence[str], names: Sequence[str], problems: list[str]
) -> set[str]:
    """The names that match one of the patterns; see :mod:`distprune._common.patterns`.

    Args:
        field: the recipe's field, for messages.
        patterns: globs or regular expressions.
        names: of all tensors.
        problems: a sentence is added for each pattern that matches nothing.

    Raises:
        SelectionError: the search for a pattern does not end.
    """
    matched_names: set[str] = set()
    for pattern in patterns:
        try:
            matching = list(filter(matcher(pattern), names))
        except ValueError as error:
            raise SelectionError(f"{field}: {error}") from error
        if not matching:
            close = difflib.get_close_matches(pattern, names[:_MAX_COMPARED], n=1, cutoff=0.3)
            example = (close or [*names[:1], "(none)"])[0]
            problems.append(
                f"{field}: {pattern!r} matches none of the {len(names)} tensors; a pattern has to "
                f"match the whole name of a tensor, such as {example}, or of its module."
            )
        matched_names.update(matching)
    return matched_names
