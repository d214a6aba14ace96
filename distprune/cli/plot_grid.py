"""The part of the picture that shows sparsity by layer and kind of weight."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from distprune.cli.picture import plain
from distprune.cli.sparsity_grid import Count, Grid, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_DENSE = 0.0005  # of zeros; below it a cell is drawn as dense
MAX_LABELS = 48  # rows with a label
_ALL_LAYERS = "all layers"
_STEPS = (1, 2, 5, 10, 20, 50, 100, 1000, 10**4, 10**6, 10**12)  # between labels of layers
_MAX_TEXTS = 700  # cells with a number in them


def draw_grid(figure: Figure, axes: Axes, grid: Grid, zeros: str) -> None:
    """A row for each layer and a column for each kind; tensors in no layer are rows below."""
    import numpy as np
    from matplotlib.colors import Normalize

    totals = Row(_ALL_LAYERS, "", grid.totals, _sum(grid.totals.values()))
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
    colours = _colours()
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


def _sum(counts: Iterable[Count]) -> Count:
    total = Count()
    for part in counts:
        total.add(part.num_elements, part.num_zero)
    return total


def _colours() -> Any:
    from matplotlib import colormaps

    return colormaps["viridis"].with_extremes(under="0.87", bad="white")


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
