"""Totals: the statistics of one parameter's inputs, as state dictionaries and files store them."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from distprune._common.collectives import Communicator
from distprune._common.naming import listed
from distprune.files.checkpoints.statistics_file import MODES, StoredStatistics, StoredWeight
from distprune.statistics.layers import WeightLayout

VERSION = 1  # of state dictionaries


@dataclass(frozen=True)
class Totals:
    """The statistics of one parameter's inputs over all ranks; equal on all of them.

    Attributes:
        num_tokens: how many inputs were seen; of fused experts, by each of them.
        sums: fp64, of the input shape: the sum of each input feature over all tokens.
        squares: fp64, of the same shape: the sum of its squares.
    """

    num_tokens: int | tuple[int, ...]
    sums: Tensor
    squares: Tensor

    def plus(self, other: Totals | None) -> Totals:
        """The statistics of all tokens of both."""
        if other is None:
            return self
        if isinstance(self.num_tokens, int):
            assert isinstance(other.num_tokens, int)
            num_tokens: int | tuple[int, ...] = self.num_tokens + other.num_tokens
        else:
            assert isinstance(other.num_tokens, tuple)
            num_tokens = tuple(map(sum, zip(self.num_tokens, other.num_tokens, strict=True)))
        return Totals(num_tokens, self.sums + other.sums, self.squares + other.squares)

    def as_stored(self, layout: WeightLayout) -> StoredStatistics:
        """What a file has of the parameter."""
        sums, squares = self.sums.numpy(), self.squares.numpy()
        return StoredStatistics(
            layout.kind, layout.shape, layout.groups, self.num_tokens, sums, squares
        )

    def as_entry(self, layout: WeightLayout) -> dict[str, Any]:
        """What a state dictionary has of the parameter."""
        return {
            "layout": layout.kind,
            "shape": list(layout.shape),
            "groups": layout.groups,
            "num_tokens": self.num_tokens,
            "input_sum": self.sums.clone(),
            "input_square_sum": self.squares.clone(),
        }


def checked_entries(state: object) -> tuple[str, dict[str, StoredStatistics]]:
    """The mode and the statistics in a state dictionary; ValueError if it is none."""
    if not isinstance(state, Mapping) or state.get("version") != VERSION:
        raise ValueError(
            f"state is no state dictionary of ActivationStatistics of version {VERSION}; expected "
            "what state_dict() returns."
        )
    mode = state["mode"]
    if mode not in MODES:
        raise ValueError(f"state has the mode {mode!r}; expected one of {MODES}.")
    stored = {}
    for name, entry in state["parameters"].items():
        count = entry["num_tokens"]
        sums, squares = (
            entry[key].detach().double().cpu().numpy().copy()
            for key in ("input_sum", "input_square_sum")
        )
        stored[name] = StoredStatistics(
            entry["layout"],
            tuple(entry["shape"]),
            int(entry["groups"]),
            tuple(map(int, count)) if isinstance(count, Sequence) else int(count),
            sums,
            squares,
        )
    return mode, stored


def fitting(
    layouts: Mapping[str, WeightLayout], stored: Mapping[str, StoredStatistics], where: str
) -> dict[str, Totals]:
    """The statistics of parameters among those that are stored; see :func:`check_fit`."""
    check_fit(layouts, stored, where)
    totals = {}
    for label in layouts:
        found = stored[label]
        sums, squares = torch.from_numpy(found.sums), torch.from_numpy(found.squares)
        totals[label] = Totals(found.num_tokens, sums, squares)
    return totals


def check_fit(
    layouts: Mapping[str, WeightLayout], stored: Mapping[str, StoredWeight], where: str
) -> None:
    """Check that stored statistics are those of some parameters.

    Args:
        layouts: of the parameters that are needed, by name.
        stored: by name; more than is needed does no harm.
        where: they are stored, for messages.

    Raises:
        ValueError: statistics of a parameter are missing, or are those of another weight.
    """
    missing = [label for label in layouts if label not in stored]
    if missing:
        raise ValueError(
            f"{where} has no statistics of {listed(missing)}; it has those of "
            f"{', '.join(list(stored)[:3])}{', ...' if len(stored) > 3 else ''}. Expected the full "
            "names of the model that they were collected on."
        )
    for label, layout in layouts.items():
        found = stored[label]
        if WeightLayout(found.layout, tuple(found.shape), found.groups) != layout:
            raise ValueError(
                f"{label}: {where} has statistics of a weight of shape "
                f"{tuple(found.shape)} ({found.layout}, {found.groups} groups); expected "
                f"{layout.shape} ({layout.kind}, {layout.groups} groups)."
            )


def digest_of(statistics: Iterable[tuple[str, Sequence[Tensor]]]) -> str:
    """A short text that is the same for the same statistics: of each, words and sums."""
    made = hashlib.sha256()
    for words, sums in statistics:
        made.update(words.encode() + b"".join(each.numpy().tobytes() for each in sums))
    return made.hexdigest()[:16]


def warn_of_empty(by_label: Mapping[str, Totals], communicator: Communicator) -> None:
    """Warn, on the first rank, of parameters and experts that saw no token: scores of zero."""
    empty = []
    for label, totals in by_label.items():
        if isinstance(totals.num_tokens, int):
            empty += [] if totals.num_tokens else [label]
        elif not all(totals.num_tokens):
            empty.append(named_experts(totals.num_tokens, label))
    warn_of_zero_scores("no token came to", empty, "text", communicator, stacklevel=5)


def named_experts(counts: Sequence[int], label: str) -> str:
    """The experts of a parameter whose count is 0, in words."""
    experts = [str(number) for number, count in enumerate(counts) if not count]
    return f"{'experts' if len(experts) > 1 else 'expert'} {listed(experts, 8)} of {label}"


def warn_of_zero_scores(
    why: str, labels: Sequence[str], more: str, communicator: Communicator, stacklevel: int
) -> None:
    """Warn, on the first rank, of parameters and experts whose scores are all zero, if any."""
    if labels and communicator.index == 0:
        warnings.warn(
            f"{why} {listed(labels, separator='; ')}: all their scores are zero, so that they are "
            f"pruned first, in the order of their elements. Collect statistics of more {more}, or "
            "leave them out.",
            stacklevel=stacklevel,
        )
