"""What ``global_mask`` returns."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from distprune.selection.start import Start

MasksT = TypeVar("MasksT")


@dataclass(frozen=True)
class MaskStart:
    """Where the next call of the same kind looks first: a few numbers per group.

    Attributes:
        groups: by label of the group.
    """

    groups: Mapping[Hashable, Start]


@dataclass(frozen=True)
class GlobalMask(Generic[MasksT]):
    """Masks, and facts about them that are the same on all ranks.

    Attributes:
        masks: a bool tensor for each tensor of the call, laid out like it, True where it was
            selected: a dict if the call was given a mapping, otherwise a list.
        thresholds: by label of the group, the score at which its order was cut (|score| unless
            ``signed``); None where nothing or everything was selected, and for random scores.
            Without groups, the only label is None.
        num_ties: by label of the group, the elements whose score is the threshold ...
        num_ties_selected: ... and how many of them were selected.
        start: pass it to the next call: a few numbers.
        num_collectives: all-reduces of the call.
        bytes_sent: payload of those, per rank.
    """

    masks: MasksT
    thresholds: Mapping[Hashable, float | None]
    num_ties: Mapping[Hashable, int]
    num_ties_selected: Mapping[Hashable, int]
    start: MaskStart
    num_collectives: int
    bytes_sent: int

    @property
    def threshold(self) -> float | None:
        """The threshold of a call without groups, or with one.

        Raises:
            ValueError: there are several groups.
        """
        if len(self.thresholds) != 1:
            raise ValueError(
                f"the call had {len(self.thresholds)} groups; expected one. Read `thresholds`."
            )
        return next(iter(self.thresholds.values()))
