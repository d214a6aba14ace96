"""The picture: sparsity by layer and kind of weight, and how large the weights are."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from distprune.cli.console import count, percent
from distprune.cli.picture import Picture, plain
from distprune.cli.plot_grid import MAX_LABELS, draw_grid
from distprune.cli.plot_magnitudes import draw_magnitudes
from distprune.cli.sparsity_grid import make_grid
from distprune.files.errors import OutputError, SelectionError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FORMATS = (".pdf", ".png", ".svg")
_MAX_INCHES = 22.0


def check(path: Path) -> None:
    """Check that a picture can be drawn, before hours of work.

    Raises:
        SelectionError: matplotlib is missing, or the file's name has another ending.
        OutputError: the folder does not exist.
    """
    if path.suffix.lower() not in _FORMATS:
        raise SelectionError(f"--plot {path}: expected a name that ends in {', '.join(_FORMATS)}.")
    if not path.absolute().parent.is_dir():
        raise OutputError(f"--plot {path}: its folder does not exist; make it first.")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        text = "--plot needs matplotlib: pip install 'distprune[plot]'"
        raise SelectionError(text) from error


def draw(path: Path, picture: Picture) -> None:
    """Draw a picture; needs no display.

    Args:
        path: of the file; its ending sets the format.
        picture: what to show.

    Raises:
        OutputError: it cannot be written.
    """
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
