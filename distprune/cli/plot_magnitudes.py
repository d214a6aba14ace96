"""The part of the picture that shows how large the weights are."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from distprune.cli.console import count
from distprune.cli.picture import Picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_TAIL = 0.0005  # of the numbers, at each end of the histogram, may lie outside of it
_MAX_POWERS = 40  # that the histogram shows


def draw_magnitudes(axes: Axes, picture: Picture) -> None:
    """A histogram by powers of two, of what is not zero; a few far numbers do not stretch it."""
    from matplotlib.ticker import MaxNLocator

    when = " before pruning" if picture.zeros == "pruned" else ""
    axes.set_title(f"Magnitudes above zero{when}", fontsize=10)
    powers = [math.log2(value) for value in picture.thresholds if 0 < value < math.inf]
    limits = robust_limits(picture.exponents)
    if limits is None:
        axes.text(0.5, 0.5, "no numbers", ha="center", transform=axes.transAxes)
        axes.set_axis_off()
        return
    low, high = limits
    if powers:  # a threshold widens the axis, but not without end: the legend has its value
        high = min(max(high, math.floor(max(powers))), low + _MAX_POWERS)
        low = max(min(low, math.floor(min(powers))), high - _MAX_POWERS)
    total = sum(picture.exponents.values())
    heights = [100 * picture.exponents.get(e, 0) / total for e in range(low, high + 1)]
    axes.bar(range(low, high + 1), heights, width=0.94, align="edge", color="#4c72b0")
    axes.set_xlim(low - 0.3, high + 1.3)
    axes.xaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 2.5, 5, 10], integer=True))
    axes.xaxis.set_major_formatter(lambda power, _: f"$2^{{{power:.0f}}}$")
    axes.yaxis.set_major_formatter(lambda share, _: f"{share:g} %")
    axes.tick_params(labelsize=8)
    axes.set_xlabel(_outside(picture.exponents, low, high), fontsize=8)
    sample = "" if picture.sampled >= 1 else f", a sample of {100 * picture.sampled:.2g} %"
    axes.set_ylabel(f"of {count(total)} elements{sample}", fontsize=8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if powers:
        _mark_thresholds(axes, picture.thresholds, powers)


def _mark_thresholds(axes: Axes, thresholds: Sequence[float], powers: Sequence[float]) -> None:
    if len(powers) == 1 or min(powers) == max(powers):
        label = f"threshold {max(thresholds):.4g}"
        axes.axvline(powers[0], color="#c44e52", linestyle="--", linewidth=1.5, label=label)
    else:
        lowest = min(value for value in thresholds if value > 0)
        label = f"thresholds of the tensors: {lowest:.3g} to {max(thresholds):.3g}"
        axes.axvspan(min(powers), max(powers), color="#c44e52", alpha=0.25, label=label)
    axes.legend(fontsize=8, framealpha=0.9, edgecolor="none", loc="upper left")


def robust_limits(exponents: Mapping[int, int]) -> tuple[int, int] | None:
    """The first and the last power of two that a histogram shows; None of no numbers.

    A small share of the numbers at either end, and whatever is many powers away, is outside.
    """
    powers = sorted(power for power, number in exponents.items() if number)
    if not powers:
        return None
    spare = _TAIL * sum(exponents.values())
    low, high = 0, len(powers) - 1
    left = 0.0
    while low < high and left + exponents[powers[low]] <= spare:
        left += exponents[powers[low]]
        low += 1
    left = 0.0
    while high > low and left + exponents[powers[high]] <= spare:
        left += exponents[powers[high]]
        high -= 1
    return max(powers[low], powers[high] - _MAX_POWERS + 1), powers[high]


def _outside(exponents: Mapping[int, int], low: int, high: int) -> str:
    """What the axis is, and how many numbers it does not show."""
    smaller = sum(number for power, number in exponents.items() if power < low)
    larger = sum(number for power, number in exponents.items() if power > high)
    parts = [
        f"{count(number)} {word}"
        for number, word in ((smaller, "smaller"), (larger, "larger"))
        if number
    ]
    return "magnitude" + (f" (not shown: {' and '.join(parts)})" if parts else "")
