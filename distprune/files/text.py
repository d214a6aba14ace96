"""Names, sizes and fractions as texts, for messages and for the files of a result."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass


def printable(text: str) -> str:
    """A text with escape sequences in place of what is not visible, such as "\\x1b" or "\\n"."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


def format_size(num_bytes: float) -> str:
    """ "1.5 GB": a size in decimal units, which are those of disks."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"


def format_percent(part: int, whole: int) -> str:
    """ "12.34 %"; 0.00 and 100.00 only if the fraction is exactly that, or the whole is 0."""
    percent = 100 * part / whole if whole else 0.0
    if 0 < part < whole:
        percent = min(max(percent, 0.01), 99.99)
    return f"{percent:.2f} %"


_EXPERT = re.compile(r"experts?_[0-9]+")


@dataclass(frozen=True, slots=True)
class Role:
    """The position of a tensor in a model.

    Attributes:
        stack: name of the list of layers; "" for a tensor outside of all layers.
        layer: number in the stack, or two numbers where stages have blocks; () for a tensor outside
            of all layers.
        kind: the rest of the name without ".weight"; all experts of a layer are one kind.
    """

    stack: str
    layer: tuple[int, ...]
    kind: str


def role_of(name: str) -> Role:
    """The layer and the kind of a tensor, by its name."""
    parts = name.split(".")
    if len(parts) > 1 and parts[-1] == "weight":
        parts.pop()
    first = next((i for i, part in enumerate(parts) if _is_number(part)), None)
    if first is None:
        return Role("", (), ".".join(parts))
    layer, inner = [int(parts[first])], parts[first + 1 :]
    if len(inner) > 2 and inner[0].endswith(("blocks", "layers")) and _is_number(inner[1]):
        layer.append(int(inner[1]))
        inner = inner[2:]
    rest: list[str] = []
    for part in inner:
        if not (_is_number(part) and rest and rest[-1].endswith("experts")):
            rest.append("expert" if _EXPERT.fullmatch(part) else part)
    return Role(".".join(parts[:first]), tuple(layer), ".".join(rest) or "weight")


def short_names(kinds: Iterable[str]) -> dict[str, str]:
    """By kind, an ending of as many parts as distinguish all: "up_proj" for "mlp.up_proj"."""
    parts = {kind: kind.split(".") for kind in kinds}
    length, names = 1, dict[str, str]()
    while len(set(names.values())) < len(parts):
        names = {kind: ".".join(own[-length:]) for kind, own in parts.items()}
        length += 1
    return names


def _is_number(part: str) -> bool:
    return part.isascii() and part.isdigit() and len(part) < 10
