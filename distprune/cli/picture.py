"""What a picture shows, and names as matplotlib can draw them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Picture:
    """What a picture shows.

    Attributes:
        title: the name of the checkpoint.
        zeros: the word for zeros: "zero" or "pruned".
        tensors: (name, number of elements, number of zeros).
        exponents: number of elements in [2**e, 2**(e+1)), by e.
        sampled: the share of the elements that ``exponents`` counts.
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
    """A name without formulas of matplotlib and characters that a font may lack."""
    text = ascii(text)[1:-1]
    if len(text) > most:
        text = f"{text[: most // 2 - 2]}...{text[-(most // 2) :]}"
    return text.replace("$", r"\$")
