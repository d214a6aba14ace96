"""Totals as plain dictionaries and as files, whatever the sharding."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from distprune.files.formats.statistics_file import MODES, StoredStatistics
from distprune.statistics.collecting import LocalStatistics
from distprune.statistics.layers import WeightLayout
from distprune.statistics.totals import Totals

VERSION = 1


def as_stored(layout: WeightLayout, totals: Totals) -> StoredStatistics:
    """What a file has of one parameter."""
    return StoredStatistics(
        layout.kind,
        layout.shape,
        layout.groups,
        totals.num_tokens,
        totals.sums.numpy(),
        totals.squares.numpy(),
    )


def as_entry(layout: WeightLayout, totals: Totals) -> dict[str, Any]:
    """What a state dictionary has of one parameter."""
    return {
        "layout": layout.kind,
        "shape": list(layout.shape),
        "groups": layout.groups,
        "num_tokens": totals.num_tokens,
        "input_sum": totals.sums.clone(),
        "input_square_sum": totals.squares.clone(),
    }


def checked_entries(state: object) -> tuple[str, dict[str, StoredStatistics]]:
    """The mode and the statistics in a state dictionary.

    Raises:
        ValueError: it is none of ``state_dict``.
    """
    if not isinstance(state, Mapping) or state.get("version") != VERSION:
        raise ValueError(
            f"state is no state dictionary of ActivationStatistics of version {VERSION}; expected "
            "what state_dict() returns."
        )
    mode = state["mode"]
    if mode not in MODES:
        raise ValueError(f"state has the mode {mode!r}; expected one of {MODES}.")
    return mode, {
        name: StoredStatistics(
            entry["layout"],
            tuple(entry["shape"]),
            int(entry["groups"]),
            _number_of_tokens(entry["num_tokens"]),
            _array(entry["input_sum"]),
            _array(entry["input_square_sum"]),
        )
        for name, entry in state["parameters"].items()
    }


def fitting(
    parameters: Sequence[LocalStatistics], stored: Mapping[str, StoredStatistics], where: str
) -> dict[str, Totals]:
    """The statistics of parameters among those that are stored.

    Args:
        parameters: those that are needed.
        stored: by name; more than is needed does no harm.
        where: they are stored, for messages.

    Raises:
        ValueError: statistics of a parameter are missing, or are those of another weight.
    """
    missing = [p.label for p in parameters if p.label not in stored]
    if missing:
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        raise ValueError(
            f"{where} has no statistics of {', '.join(missing[:5])}{more}; it has those of "
            f"{', '.join(list(stored)[:3])}{', ...' if len(stored) > 3 else ''}. Expected the full "
            "names of the model that they were collected on."
        )
    totals = {}
    for parameter in parameters:
        found, layout = stored[parameter.label], parameter.layout
        if (found.layout, tuple(found.shape), found.groups) != (
            layout.kind,
            layout.shape,
            layout.groups,
        ):
            raise ValueError(
                f"{parameter.label}: {where} has statistics of a weight of shape "
                f"{tuple(found.shape)} ({found.layout}, {found.groups} groups); expected "
                f"{layout.shape} ({layout.kind}, {layout.groups} groups)."
            )
        totals[parameter.label] = Totals(
            found.num_tokens, torch.from_numpy(found.sums), torch.from_numpy(found.squares)
        )
    return totals


def digest_of(totals: Mapping[str, Totals]) -> str:
    """A short text that is the same for the same statistics."""
    made = hashlib.sha256()
    for label, of_one in totals.items():
        made.update(f"{label} {of_one.num_tokens}".encode())
        made.update(of_one.sums.numpy().tobytes() + of_one.squares.numpy().tobytes())
    return made.hexdigest()[:16]


def _number_of_tokens(value: int | Sequence[int]) -> int | tuple[int, ...]:
    return tuple(map(int, value)) if isinstance(value, Sequence) else int(value)


def _array(values: Tensor) -> Any:
    return values.detach().double().cpu().numpy().copy()
