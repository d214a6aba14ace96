"""Find the parameters of a model to which the masks of a file belong.

A mask has the name of a tensor of a checkpoint, or of a parameter of the model from which it was
saved. :func:`match_masks` finds the parameter by this name alone; the changes that a library makes
to names and tensors when it loads a checkpoint are :class:`LoadingRules` (see loading.py).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

Shape = tuple[int, ...]
# From a name in the file to the whole mask, bool, of its shape in the file.
ReadMask = Callable[[str], Tensor]

# Close matches are searched for this many names, and this many names are shown.
_NUM_COMPARED = 20
_NUM_SHOWN = 200


class MaskSource(Protocol):
    """The origin of one parameter's mask.

    Attributes:
        names: of the masks in the file from which it is made.
    """

    @property
    def names(self) -> tuple[str, ...]: ...

    def read(self, read_mask: ReadMask) -> Tensor:
        """The whole mask, bool, of the parameter's shape."""
        ...


@dataclass(frozen=True)
class SameTensor:
    """A mask of the file that applies to the parameter unchanged.

    Attributes:
        name: of the mask.
    """

    name: str

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,)

    def read(self, read_mask: ReadMask) -> Tensor:
        return read_mask(self.name)


@dataclass
class Matching:
    """The result of :func:`match_masks`.

    Attributes:
        sources: the origin of each parameter's mask, by parameter.
        unexpected: masks without a parameter: the reason, or "", by name of the mask.
        mismatched: masks of another shape than their parameter: the difference, by name.
    """

    sources: dict[str, MaskSource] = field(default_factory=dict)
    unexpected: dict[str, str] = field(default_factory=dict)
    mismatched: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, shape: Shape, parameter: str, expected: Shape) -> None:
        """Assign a mask to a parameter, unchanged; if there are several, the first one counts."""
        if parameter in self.sources:
            first = ", ".join(self.sources[parameter].names[:3])
            self.unexpected[name] = f"{parameter} has the mask {first}"
        elif shape != expected:
            mask = "its mask" if name == parameter else f"its mask {name}"
            self.mismatched[name] = f"{parameter} has shape {expected}; {mask} has {shape}"
        else:
            self.sources[parameter] = SameTensor(name)


class LoadingRules(Protocol):
    """The changes that a library makes to a checkpoint when it loads it into a model."""

    def match(
        self, masks: Mapping[str, Shape], parameters: Mapping[str, Shape], others: Iterable[str]
    ) -> Matching:
        """Find the parameters of masks that have the names of a checkpoint.

        Args:
            masks: shapes, by name in the checkpoint.
            parameters: shapes, by name in the model.
            others: known names of other tensors of the checkpoint.
        """
        ...

    def with_other_prefix(self, name: str, parameters: Mapping[str, Shape]) -> str | None:
        """The parameter with this name except for the prefix of the base model; None if none."""
        ...


def match_masks(
    masks: Mapping[str, Shape],
    parameters: Mapping[str, Shape],
    rules: LoadingRules | None,
    *,
    is_checkpoint: bool,
    others: Iterable[str] = (),
) -> Matching:
    """Find the parameters of masks.

    [Note: whose names] A name in a checkpoint may be that of a parameter which is loaded from
    another tensor, or transposed on loading. So names of a checkpoint always go through the
    rules, and names of a model only if the model has no parameter of this name.

    Args:
        masks: shapes, by name in the file.
        parameters: shapes, by name in the model; a tied one under all its names.
        rules: of the model's library; None: names do not change.
        is_checkpoint: whether the names are those of a checkpoint, or of a model.
        others: known names of other tensors of the checkpoint.
    """
    matching = Matching()
    unmatched = dict(masks)
    if rules is None or not is_checkpoint:
        for name, shape in masks.items():
            parameter: str | None = name if name in parameters else None
            if parameter is None and rules is not None:
                parameter = rules.with_other_prefix(name, parameters)
            if parameter is not None:
                matching.add(name, shape, parameter, parameters[parameter])
                del unmatched[name]
    if rules is not None and unmatched:
        by_rules = rules.match(unmatched, parameters, others)
        matching.unexpected |= by_rules.unexpected
        for parameter, source in by_rules.sources.items():
            if parameter in matching.sources:
                reason = f"{parameter} has a mask of its own name"
                matching.unexpected |= dict.fromkeys(source.names, reason)
            else:
                matching.sources[parameter] = source
        matching.mismatched |= by_rules.mismatched
    else:
        matching.unexpected |= dict.fromkeys(unmatched, "")
    return matching


def with_close_names(names: Sequence[str], candidates: Iterable[str]) -> str:
    """The names, one per line, each with the most similar candidate.

    Cost: a comparison of each of the first names with each kind of candidate; names that differ
    only in their numbers are of one kind.
    """
    kinds: dict[str, list[str]] = {}
    for name in candidates:
        kinds.setdefault(_kind(name), []).append(name)
    lines = []
    for position, name in enumerate(names[:_NUM_SHOWN]):
        close = None
        if position < _NUM_COMPARED:
            for kind in difflib.get_close_matches(_kind(name), kinds, 1):
                alike = _with_numbers(kind, name)
                close = alike if alike in kinds[kind] else kinds[kind][0]
        lines.append(f"  {name}{f' (there is {close})' if close is not None else ''}")
    if len(names) > _NUM_SHOWN:
        lines.append(f"  and {len(names) - _NUM_SHOWN} more")
    return "\n".join(lines)


def _kind(name: str) -> str:
    return re.sub(r"[0-9]+", "#", name)


def _with_numbers(kind: str, name: str) -> str:
    """A kind of names with the numbers of a name, as far as there are any."""
    for number in re.findall(r"[0-9]+", name):
        kind = kind.replace("#", number, 1)
    return kind
