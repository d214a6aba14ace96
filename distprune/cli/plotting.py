"""Pictures: sparsity by tensor, and a histogram of magnitudes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from distprune.files.errors import OutputError, SelectionError
from distprune.files.inspecting import TensorFacts

_FORMATS = (".pdf", ".png", ".svg")


def check(path: Path) -> None:
    """See that a picture can be made before hours of work.

    Raises:
        SelectionError: matplotlib is missing, or the name is not that of a picture.
        OutputError: the folder does not exist.
    """
    if path.suffix not in _FORMATS:
        raise SelectionError(f"--plot {path}: expected a name that ends in {', '.join(_FORMATS)}.")
    if not path.absolute().parent.is_dir():
        raise OutputError(f"--plot {path}: its folder does not exist; make it first.")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        text = "--plot needs matplotlib: pip install 'distprune[plot]'"
        raise SelectionError(text) from error


def draw(
    path: Path,
    sparsities: Mapping[str, float],
    facts: Iterable[TensorFacts],
    threshold: float | None = None,
) -> None:
    """Draw both.

    Args:
        path: of the picture.
        sparsities: by tensor, in [0, 1].
        facts: whose ``exponents`` make the histogram.
        threshold: marked in it.

    Raises:
        OutputError: it cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.bar(range(len(sparsities)), [100 * value for value in sparsities.values()])
    left.set(ylim=(0, 100), ylabel="zeros, %", title="Sparsity")
    names = list(sparsities)
    step = max(1, math.ceil(len(names) / 16))
    ticks = range(0, len(names), step)
    left.set_xticks(ticks, [names[i] for i in ticks], rotation=90, fontsize=6)
    exponents: Counter[int] = Counter()
    for each in facts:
        exponents.update(each.exponents)
    right.bar(list(exponents), list(exponents.values()), width=1.0, align="edge", edgecolor="white")
    if threshold:
        right.axvline(math.log2(threshold), color="black", linestyle="--", label="threshold")
        right.legend()
    right.set(xlabel="log2 of the magnitude", ylabel="elements", title="Magnitudes above zero")
    try:
        figure.savefig(path)
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error.strerror}.") from error
