"""Names and shapes of tensors in tables."""

from __future__ import annotations

import re
from collections.abc import Sequence

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def without_numbers(name: str) -> str:
    """A name with ``*`` for every part that is a number: "layers.*.mlp.weight"."""
    return _NUMBER.sub("*", name)


def shape_text(shape: Sequence[int]) -> str:
    """ "4096 x 1024"; "scalar" for no dimensions."""
    return " x ".join(map(str, shape)) or "scalar"
