"""Which masks of a file are for which parameters of a model.

A mask has the name of a tensor of a checkpoint, or of a parameter of the model that it was saved
from. :func:`match_masks` finds the parameter by that name alone; what a library does to names and
tensors when it loads a checkpoint is a :class:`LoadingRules` (see transformers_names).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

Shape = tuple[int, ...]
# From a name in the file to the whole mask, bool, of its shape there.
ReadMask = Callable[[str], Tensor]

# Of so many names close matches are looked for, and so many are shown.
_NUM_COMPARED = 20
_NUM_SHOWN = 200


class MaskSource(Protocol):
    """Where the mask of one parameter comes from.

    Attributes:
        names: of the masks in the file that it is made of.
    """

    @property
    def names(self) -> tuple[str, ...]: ...

    def read(self, read_mask: ReadMask) -> Tensor:
        """The whole mask, bool, of the parameter's shape."""
        ...


@dataclass(frozen=True)
class SameTensor:
    """A mask that is for the whole parameter as it is.

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
    """What :func:`match_masks` found.

    Attributes:
        sources: by parameter, where its mask comes from.
        unexpected: masks that no parameter is for; by name, why not, or "".
        mismatched: masks of another shape than their parameter has; by name, what differs.
    """

    sources: dict[str, MaskSource] = field(default_factory=dict)
    unexpected: dict[str, str] = field(default_factory=dict)
    mismatched: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, shape: Shape, parameter: str, expected: Shape) -> None:
        """Note that a mask is for a parameter, as it is; the first one, if there are several."""
        if parameter in self.sources:
            first = ", ".join(self.sources[parameter].names[:3])
            self.unexpected[name] = f"{parameter} has the mask {first}"
        elif shape != expected:
            mask = "its mask" if name == parameter else f"its mask {name}"
            self.mismatched[name] = f"{parameter} has shape {expected}; {mask} has {shape}"
        else:
            self.sources[parameter] = SameTensor(name)


class LoadingRules(Protocol):
    """What a library does to a checkpoint when it loads it into a model."""

    def match(
        self, masks: Mapping[str, Shape], parameters: Mapping[str, Shape], others: Iterable[str]
    ) -> Matching:
        """Find the parameters of masks that have the names of a checkpoint.

        Args:
            masks: shapes, by name in the checkpoint.
            parameters: shapes, by name in the model.
            others: names of other tensors of the checkpoint, as far as they are known.
        """
        ...

    def with_other_prefix(self, name: str, parameters: Mapping[str, Shape]) -> str | None:
        """A parameter of this name but for the prefix of the base model; None without one."""
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

    [Note: whose names] A name of a checkpoint may be that of a parameter whose tensor comes from
    elsewhere, or that is transposed on loading. So the names of a checkpoint go through the
    rules, and those of a model only if the model has no parameter of this name.

    Args:
        masks: shapes, by name in the file.
        parameters: shapes, by name in the model; a tied one under all its names.
        rules: of the library that the model is from; None: names stay as they are.
        is_checkpoint: whether the names are those of a checkpoint, or of a model.
        others: names of other tensors of the checkpoint, as far as they are known.
    """
    found = Matching()
    left = dict(masks)
    if rules is None or not is_checkpoint:
        for name, shape in masks.items():
            parameter: str | None = name if name in parameters else None
            if parameter is None and rules is not None:
                parameter = rules.with_other_prefix(name, parameters)
            if parameter is not None:
                found.add(name, shape, parameter, parameters[parameter])
                del left[name]
    if rules is not None and left:
        by_rules = rules.match(left, parameters, others)
        found.unexpected |= by_rules.unexpected
        for parameter, source in by_rules.sources.items():
            if parameter in found.sources:
                reason = f"{parameter} has a mask of its own name"
                found.unexpected |= dict.fromkeys(source.names, reason)
            else:
                found.sources[parameter] = source
        found.mismatched |= by_rules.mismatched
    else:
        found.unexpected |= dict.fromkeys(left, "")
    return found


def with_close_names(names: Sequence[str], known: Iterable[str]) -> str:
    """Names, each with the known one that is most like it, one to a line.

    Cost: a comparison of each of the first names with each kind of known ones; those that differ
    in numbers alone are of one kind.
    """
    kinds: dict[str, list[str]] = {}
    for name in known:
        kinds.setdefault(_kind(name), []).append(name)
    lines = []
    for which, name in enumerate(names[:_NUM_SHOWN]):
        close = None
        if which < _NUM_COMPARED:
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
