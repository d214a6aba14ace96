"""What a picture shows, and names as matplotlib can draw them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Picture:
    """What a picture shows.

    Attributes:
        title: what was looked at.
        zeros: what zeros are called: "zero", or "pruned".
        tensors: name, elements, and zeros of each.
        exponents: how many numbers lie in [2**e, 2**(e+1)), by e.
        sampled: the share of the numbers that ``exponents`` counts.
        thresholds: the largest magnitude that was pruned: of all, or of each tensor.
        notes: sentences below the title.
    """

    title: str
    zeros: str
    tensors: Sequence[tuple[str, int, int]]
    exponents: Mapping[int, int]
    sampled: float = 1.0
    thresholds: Sequence[float] = ()
    notes: Sequence[str] = ()


def plain(text: str, most: int) -> str:
    """A name that has no formulas of matplotlib and no characters that a font may lack."""
    text = ascii(text)[1:-1]
    if len(text) > most:
        text = f"{text[: most // 2 - 2]}...{text[-(most // 2) :]}"
    return text.replace("$", r"\$")
