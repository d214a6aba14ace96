"""The picture of ``inspect --plot``: the sparsity of each layer, by kind of weight."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from distprune.base.selecting import natural_key
from distprune.cli.console import share_text
from distprune.files.errors import OutputError, SelectionError
from distprune.files.text import role_of, short_names

_FORMATS = (".pdf", ".png", ".svg")
_MAX_KINDS, _MAX_LABELS = 32, 48


class Grid(NamedTuple):
    """The sparsity of a checkpoint.

    Attributes:
        layers: the names of the rows; the last one may be of tensors that are in no layer.
        kinds: the names of the columns.
        shares: for each row, the sparsity in each column; NaN where the layer has no such weight.
    """

    layers: list[str]
    kinds: list[str]
    shares: list[list[float]]


def make_grid(tensors: Iterable[tuple[str, int, int]]) -> Grid:
    """Add up (name, elements, zeros) of tensors; all experts of a layer are one kind.

    Only the kinds with most elements have a column.
    """
    sums: dict[tuple[str, tuple[int, ...]], dict[str, list[int]]] = {}
    sizes: dict[str, int] = {}
    for name, num_elements, num_zero in tensors:
        role = role_of(name)
        cell = sums.setdefault((role.stack, role.layer), {}).setdefault(role.kind, [0, 0])
        cell[0] += num_elements
        cell[1] += num_zero
        sizes[role.kind] = sizes.get(role.kind, 0) + num_elements
    largest = sorted(sizes, key=lambda kind: -sizes[kind])[:_MAX_KINDS]
    names, stacks = short_names(largest), short_names(stack for stack, layer in sums if layer)
    kinds = sorted(largest, key=lambda kind: natural_key(names[kind]))
    rows = sorted(sums, key=lambda row: (not row[1], natural_key(row[0]), row))
    labels, shares = [], []
    for stack, layer in rows:
        label = ".".join(map(str, layer)) or "no layer"
        labels.append(f"{stacks[stack]}.{label}" if layer and len(stacks) > 1 else label)
        cells = [sums[stack, layer].get(kind, (0, 0)) for kind in kinds]
        shares.append([zero / total if total else float("nan") for total, zero in cells])
    return Grid(labels, [names[kind] for kind in kinds], shares)


def check(path: Path) -> None:
    """Check that a picture can be drawn, before all weights are read."""
    if path.suffix.lower() not in _FORMATS:
        raise SelectionError(f"--plot {path}: expected a name that ends in {', '.join(_FORMATS)}.")
    if not path.absolute().parent.is_dir():
        raise OutputError(f"--plot {path}: its folder does not exist; make it first.")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise SelectionError("--plot needs matplotlib: pip install 'distprune[plot]'") from error


def draw(path: Path, title: str, tensors: list[tuple[str, int, int]]) -> None:
    """Draw (name, elements, zeros) of tensors; needs no display."""
    import numpy as np
    from matplotlib.figure import Figure

    grid = make_grid(tensors)
    num_rows, num_columns = max(len(grid.layers), 1), max(len(grid.kinds), 1)
    size = (3 + 0.45 * num_columns, min(4 + 0.2 * num_rows, 22.0))
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    percents = 100 * np.array(grid.shares or [[float("nan")]])
    image = axes.imshow(percents, vmin=0, vmax=100, aspect="auto")
    figure.colorbar(image, ax=axes, label="% of the elements are zero")
    kinds = list(map(_plain, grid.kinds))
    axes.set_xticks(range(len(kinds)), kinds, rotation=60, ha="right", rotation_mode="anchor")
    step = -(-num_rows // _MAX_LABELS)
    axes.set_yticks(range(0, len(grid.layers), step), list(map(_plain, grid.layers[::step])))
    axes.tick_params(labelsize=8)
    axes.set_title(_plain(title), fontsize=11)
    num_elements, num_zero = sum(size for _, size, _ in tensors), sum(z for _, _, z in tensors)
    axes.set_xlabel(f"{share_text(num_zero, num_elements)} are zero.", fontsize=8)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise OutputError(f"--plot {path} cannot be written: {error.strerror}.") from error


def _plain(text: str) -> str:
    """A name without formulas of matplotlib and characters that a font may lack."""
    return ascii(text)[1:-1][-40:].replace("$", r"\$")
