"""Which layer of a model a tensor belongs to, and which kind of weight it is, by its name.

Layers repeat: "model.layers.12.mlp.up_proj.weight" is the kind "mlp.up_proj" of layer 12 in the
stack "model.layers". This is how a table or a picture of a hundred layers stays readable; nothing
that is pruned depends on it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

_EXPERT = re.compile(r"experts?_[0-9]+")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor is.

    Attributes:
        stack: name of the list of layers; "" for a tensor outside of any.
        layer: its number in the stack, or two numbers where stages have blocks; () for a tensor
            outside of any.
        kind: the rest of the name without ".weight"; all experts of a layer are one kind.
    """

    stack: str
    layer: tuple[int, ...]
    kind: str


def place_of(name: str) -> Place:
    """Find the layer and the kind of a tensor.

    Args:
        name: of the tensor.
    """
    parts = name.split(".")
    if len(parts) > 1 and parts[-1] == "weight":
        parts.pop()
    first = next((i for i, part in enumerate(parts) if _is_number(part)), None)
    if first is None:
        return Place("", (), ".".join(parts))
    layer, inner = [int(parts[first])], parts[first + 1 :]
    if len(inner) > 2 and inner[0].endswith(("blocks", "layers")) and _is_number(inner[1]):
        layer.append(int(inner[1]))
        inner = inner[2:]
    rest: list[str] = []
    for part in inner:
        if not (_is_number(part) and rest and rest[-1].endswith("experts")):
            rest.append("expert" if _EXPERT.fullmatch(part) else part)
    return Place(".".join(parts[:first]), tuple(layer), ".".join(rest) or "weight")


def short_names(kinds: Iterable[str]) -> dict[str, str]:
    """As few last parts of each kind as tell it from all others: "mlp.up_proj" is "up_proj"."""
    names: dict[str, str] = {}
    pending = list(dict.fromkeys(kinds))
    length = 1
    while pending:
        endings: dict[str, list[str]] = {}
        for kind in pending:
            endings.setdefault(".".join(kind.split(".")[-length:]), []).append(kind)
        taken = set(names.values())
        left = []
        for ending, sharing in endings.items():
            for kind in sharing:
                if kind == ending or (len(sharing) == 1 and ending not in taken):
                    names[kind] = ending
                else:
                    left.append(kind)
        pending, length = left, length + 1
    return names


def _is_number(part: str) -> bool:
    return part.isascii() and part.isdigit() and len(part) < 10
