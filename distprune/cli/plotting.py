"""The picture of --plot: sparsity by layer and kind of weight, and how large the weights are."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distprune._common.selecting import natural_key
from distprune.cli.console import count, percent
from distprune.cli.options import check_folder
from distprune.files.errors import OutputError, SelectionError
from distprune.files.text import Role, role_of, short_names

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


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


OTHERS = "others"


@dataclass
class Count:
    """Elements, and how many of them are zero."""

    num_elements: int = 0
    num_zero: int = 0

    def add(self, num_elements: int, num_zero: int) -> None:
        self.num_elements += num_elements
        self.num_zero += num_zero

    @property
    def share(self) -> float:
        """Of zeros, in [0, 1]; NaN of nothing."""
        return self.num_zero / self.num_elements if self.num_elements else float("nan")


@dataclass
class Row:
    """A layer, or a tensor that is in none.

    Attributes:
        label: the number of the layer, or the name of the tensor.
        stack: of the layer, as short as tells it from others; "" of a tensor that is in none.
        cells: by kind of weight; empty for a tensor that is in no layer.
        total: of the row.
    """

    label: str
    stack: str
    cells: dict[str, Count] = field(default_factory=dict)
    total: Count = field(default_factory=Count)


@dataclass(frozen=True)
class Grid:
    """A table of sparsity.

    Attributes:
        kinds: the columns, as short as tells them apart.
        layers: the rows, in order of stack and layer.
        outside: rows of tensors that are in no layer.
        totals: of the layers, by kind.
        total: of everything.
    """

    kinds: tuple[str, ...]
    layers: tuple[Row, ...]
    outside: tuple[Row, ...]
    totals: dict[str, Count]
    total: Count


def make_grid(
    tensors: Iterable[tuple[str, int, int]], max_kinds: int = 32, max_outside: int = 24
) -> Grid:
    """Add tensors up.

    All experts of a layer are one cell. Where there are too many kinds, or tensors in no layer, the
    largest have a column or a row of their own, and the rest share one.
    """
    placed = [(role_of(name), name, elements, zeros) for name, elements, zeros in tensors]
    inside = [tensor for tensor in placed if tensor[0].layer]
    sizes: dict[str, int] = {}
    for place, _, elements, _ in inside:
        sizes[place.kind] = sizes.get(place.kind, 0) + elements
    kinds = _names(sizes, max_kinds)
    stacks = short_names(place.stack for place, *_ in inside)
    layers: dict[tuple[object, ...], Row] = {}
    totals: dict[str, Count] = {}
    total = Count()
    for place, _, elements, zeros in sorted(inside, key=lambda tensor: _order(tensor[0])):
        label = ".".join(map(str, place.layer))
        row = layers.setdefault((place.stack, place.layer), Row(label, stacks[place.stack]))
        kind = kinds[place.kind]
        counts = row.cells.setdefault(kind, Count()), totals.setdefault(kind, Count())
        for each in (*counts, row.total, total):
            each.add(elements, zeros)
    alone = [(name, elements, zeros) for place, name, elements, zeros in placed if not place.layer]
    names = _names({name: elements for name, elements, _ in alone}, max_outside, shorten=False)
    outside: dict[str, Row] = {}
    for name, elements, zeros in alone:
        label = names[name].removesuffix(".weight")
        for each in (outside.setdefault(label, Row(label, "")).total, total):
            each.add(elements, zeros)
    columns = sorted(totals, key=lambda kind: (kind == OTHERS, natural_key(kind)))
    rows = sorted(outside.values(), key=lambda row: row.label == OTHERS)
    return Grid(tuple(columns), tuple(layers.values()), tuple(rows), totals, total)


def _names(sizes: dict[str, int], most: int, *, shorten: bool = True) -> dict[str, str]:
    """The name of each; all but the largest are "others"."""
    shown = list(sizes)
    if len(sizes) > most:
        shown = sorted(sizes, key=lambda name: (-sizes[name], name))[: most - 1]
    names = short_names(shown) if shorten else {name: name for name in shown}
    return {name: names.get(name, OTHERS) for name in sizes}


def _order(place: Role) -> tuple[object, ...]:
    return natural_key(place.stack), place.stack, place.layer


_DENSE = 0.0005  # of zeros; below it a cell is drawn as dense
MAX_LABELS = 48  # rows with a label
_ALL_LAYERS = "all layers"
_STEPS = (1, 2, 5, 10, 20, 50, 100, 1000, 10**4, 10**6, 10**12)  # between labels of layers
_MAX_TEXTS = 700  # cells with a number in them


def draw_grid(figure: Figure, axes: Axes, grid: Grid, zeros: str) -> None:
    """A row for each layer and a column for each kind; tensors in no layer are rows below."""
    import numpy as np
    from matplotlib import colormaps
    from matplotlib.colors import Normalize

    totals = Row(_ALL_LAYERS, "", grid.totals)
    for of_kind in grid.totals.values():
        totals.total.add(of_kind.num_elements, of_kind.num_zero)
    rows = [*grid.layers, *([totals] if len(grid.layers) > 1 else []), *grid.outside]
    width = len(grid.kinds) + 1
    shares = np.full((max(len(rows), 1), width), np.nan)
    for y, row in enumerate(rows):
        for x, kind in enumerate(grid.kinds):
            shares[y, x] = row.cells[kind].share if kind in row.cells else np.nan
        if row.cells:
            shares[y, -1] = row.total.share
        else:  # a tensor in no layer has no kind: its row is one cell
            shares[y, :] = row.total.share
    low, high = _limits(shares[shares >= _DENSE])
    colours = colormaps["viridis"].with_extremes(under="0.87", bad="white")
    drawn = np.where(shares < _DENSE, -1.0, shares)  # below the limits: in grey
    # Rows below those of many layers are higher, so that there is room for their names.
    high_row = max(1.0, len(rows) / 180)
    heights = [1.0 if y < len(grid.layers) else high_row for y in range(len(shares))]
    edges = np.cumsum([0.0, *heights])
    middles = [(above + below) / 2 for above, below in pairwise(edges.tolist())]
    image = axes.pcolormesh(
        np.arange(width + 1) - 0.5, edges, np.ma.masked_invalid(drawn), cmap=colours,
        norm=Normalize(low, high),
    )  # fmt: skip
    axes.invert_yaxis()
    _separate(axes, rows, edges.tolist(), width)
    _write_texts(axes, rows, middles, shares, image)
    axes.set_xticks(
        range(width) if grid.kinds else [],
        [*(plain(kind, 28) for kind in grid.kinds), "all kinds"] if grid.kinds else [],
        rotation=60, ha="right", rotation_mode="anchor", fontsize=8,
    )  # fmt: skip
    labels = _row_labels(rows, len(grid.layers))
    axes.set_yticks([middles[y] for y in labels], list(labels.values()), fontsize=7.5)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.set_facecolor("white")
    axes.set_title(f"Sparsity by layer and kind: % of the elements are {zeros}", fontsize=10)
    if (shares < _DENSE).any():
        axes.set_xlabel(f"grey: none are {zeros}, or fewer than {100 * _DENSE:g} %", fontsize=8)
    bar = figure.colorbar(
        image, ax=axes, fraction=0.035, pad=0.02, aspect=5 * figure.get_figheight()
    )
    bar.ax.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g} %")
    bar.ax.tick_params(labelsize=7.5)


def _limits(shares: Any) -> tuple[float, float]:
    """Of the colours: they show differences, but do not blow up small ones."""
    if not shares.size:
        return 0.0, 1.0
    low, high = math.floor(20 * shares.min() + 1e-9) / 20, math.ceil(20 * shares.max() - 1e-9) / 20
    if high - low < 0.2:  # centred on what there is
        middle = (low + high) / 2
        low, high = middle - 0.1, middle + 0.1
        low, high = (max(low, 0.0), max(high, 0.2)) if low < 0 else (low, high)
        low, high = (min(low, 0.8), min(high, 1.0)) if high > 1 else (low, high)
    return low, high


def _separate(axes: Axes, rows: Sequence[Row], edges: Sequence[float], width: int) -> None:
    """White lines between stacks, totals, and what is in no layer."""
    last = edges[sum(bool(row.cells) for row in rows)]
    axes.vlines(width - 1.5, 0, last, color="white", linewidth=3)
    for edge, (above, below) in zip(edges[1:], pairwise(rows), strict=False):
        if above.stack != below.stack or not below.cells or below.label == _ALL_LAYERS:
            axes.axhline(edge, color="white", linewidth=3 if above.cells else 1)


def _write_texts(
    axes: Axes, rows: Sequence[Row], middles: Sequence[float], shares: Any, image: Any
) -> None:
    """Percent in the cells, where there is room for them."""
    if shares.size > _MAX_TEXTS or len(rows) > MAX_LABELS or shares.shape[1] > 20:
        return
    middle = (shares.shape[1] - 1) / 2
    for y, row in enumerate(rows):
        cells = [(x, shares[y, x]) for x in range(shares.shape[1])]
        for x, share in cells if row.cells else [(middle, row.total.share)]:
            if math.isnan(share):
                continue
            red, green, blue, _ = image.cmap(image.norm(share if share >= _DENSE else -1.0))
            is_light = 0.3 * red + 0.59 * green + 0.11 * blue > 0.5
            text = "0" if share == 0 else f"{100 * share:.1f}" if share < 1 else "100"
            colour = "black" if is_light else "white"
            axes.text(x, middles[y], text, ha="center", va="center", fontsize=6, color=colour)


def _row_labels(rows: Sequence[Row], num_layers: int) -> dict[int, str]:
    """By row: the layer's number, with the stack's name at its first layer; not too many."""
    step = next(step for step in _STEPS if len(rows) <= step * MAX_LABELS)
    labels: dict[int, str] = {}
    first = 0
    for y, row in enumerate(rows):
        is_first = y == 0 or row.stack != rows[y - 1].stack
        if is_first:
            first = y
        if y >= num_layers:
            labels[y] = plain(row.label, 36)
        elif is_first:
            labels[y] = plain(f"{row.stack}.{row.label}".strip("."), 36)
        elif (y - first) % step == 0:
            labels[y] = row.label
    return labels


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


_FORMATS = (".pdf", ".png", ".svg")
_MAX_INCHES = 22.0


def check(path: Path) -> None:
    """Check that a picture can be drawn, before hours of work."""
    if path.suffix.lower() not in _FORMATS:
        raise SelectionError(f"--plot {path}: expected a name that ends in {', '.join(_FORMATS)}.")
    check_folder("--plot", path)
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        text = "--plot needs matplotlib: pip install 'distprune[plot]'"
        raise SelectionError(text) from error


def draw(path: Path, picture: Picture) -> None:
    """Draw a picture; needs no display."""
    figure = make_figure(picture)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise OutputError(f"--plot {path} cannot be written: {error.strerror}.") from error


def make_figure(picture: Picture) -> Figure:
    """The figure, of matplotlib, before it is written."""
    from matplotlib.figure import Figure

    grid = make_grid(picture.tensors)
    num_rows = len(grid.layers) + len(grid.outside) + 1
    row = 0.2 if num_rows <= MAX_LABELS else 0.11
    wide = 2.2 + min(max(0.42 * (len(grid.kinds) + 1), 3.2), 11)
    size = (wide + 5.2, min(max(row * num_rows + 2.6, 4.8), _MAX_INCHES))
    figure = Figure(figsize=size, layout="constrained")
    figure.suptitle(plain(picture.title, 90), fontweight="bold", fontsize=12)
    # The histogram stays as it is, however many layers there are.
    shown = min(1.0, 4.6 / size[1])
    axes = figure.subplot_mosaic(
        [["grid", "magnitudes"], ["grid", "."]] if shown < 0.9 else [["grid", "magnitudes"]],
        width_ratios=(wide, 5.2),
        height_ratios=(shown, 1 - shown) if shown < 0.9 else None,
    )
    left, right = axes["grid"], axes["magnitudes"]
    draw_grid(figure, left, grid, picture.zeros)
    draw_magnitudes(right, picture)
    notes = [
        f"{count(grid.total.num_zero)} of {count(grid.total.num_elements)} elements are "
        f"{picture.zeros} ({percent(grid.total.num_zero, grid.total.num_elements)}) in "
        f"{count(len(picture.tensors))} tensors.",
        *picture.notes,
    ]
    figure.supxlabel("  ".join(notes), fontsize=8, color="0.25")
    return figure
