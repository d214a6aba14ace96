"""``distprune inspect``: how sparse the tensors of a checkpoint are, as a table and a picture."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from distprune.base.blocks import parse_pattern
from distprune.base.selecting import natural_key
from distprune.cli import console
from distprune.cli.options import ListingOptions, command, dims_by_pattern
from distprune.files.disk import writing
from distprune.files.errors import FilesError, SelectionError, format_percent, translated
from distprune.files.selecting import pattern_of

if TYPE_CHECKING:
    from distprune.files.verifying import TensorFacts

_FORMATS = (".pdf", ".png", ".svg")  # of a picture
_MAX_KINDS, _MAX_LABELS = 32, 48  # in a picture
# (n, m) -> "n:m", as it was given.
Patterns = Mapping[tuple[int, int], str]


class InspectOptions(ListingOptions):
    """What to look for, and where it is written."""

    patterns: tuple[str, ...] = Field(("2:4",), description="N:M to look for (2:4). Repeat it.")
    input_dims: tuple[str, ...] = Field(
        (), description="PATTERN=DIM: dimension of the inputs, from 0 (that in the recipe of SRC)."
    )
    plot: Path | None = Field(None, description="Picture (png, svg, pdf) of the sparsity by layer.")


@command("inspect", InspectOptions, "SRC")
def inspect(given: InspectOptions, src: Path) -> None:
    """Show the sparsity of each tensor, and the share of its groups that follow an N:M pattern.

    Reads all weights once. Names that differ only in numbers share a line; -v lists every tensor.
    The last line is the total of all floats.

    \b
    distprune inspect Llama-3.2-1B-2of4 --pattern 2:4 --pattern 4:8
    distprune inspect Llama-3.2-1B-50 --plot sparsity.png
    """
    from distprune.files.checkpoint import open_checkpoint
    from distprune.files.reports import cached_name, read_report, recipe_of
    from distprune.files.verifying import inspect as inspect_tensors

    with translated(SelectionError, "--pattern: "):
        patterns = {parse_pattern(text): text for text in given.patterns}
    if given.plot is not None:
        check_picture(given.plot)
    checkpoint = open_checkpoint(src)  # nothing is copied
    recipe = None  # it was not pruned, or not by one
    with contextlib.suppress(FilesError):
        recipe = recipe_of(read_report(src), str(src))
    dims: dict[str, Sequence[int]] = {**dims_by_pattern(given.input_dims)}
    for part in () if recipe is None or given.input_dims else recipe.parts:
        dims = {**part.input_dims, **dims}
    terminal = given.terminal()
    with console.Meter(terminal) as meter:
        facts = list(inspect_tensors(checkpoint, tuple(patterns), dims, progress=meter.show))
    if given.plot is not None:
        # Matrices of floats; vectors would be columns without zeros.
        counts = [
            (f.entry.name, f.entry.numel, f.num_zero)
            for f in facts
            if f.num_zero is not None and sum(size > 1 for size in f.entry.shape) > 1
        ]
        draw_picture(given.plot, cached_name(src) or src.absolute().name, counts)
    if given.as_json:
        terminal.json(
            {
                "source": str(src),
                "recipe": None if recipe is None else recipe.as_values(),
                "tensors": [_tensor_values(tensor, patterns) for tensor in facts],
            }
        )
        return
    _show_table(terminal, facts, patterns, one_by_one=given.verbose)
    if recipe is not None:
        how = "; ".join(dict.fromkeys(map(console.ranking_text, recipe.parts)))
        terminal.text(f"Pruned by distprune, {how}.")


def _show_table(
    terminal: console.Terminal, facts: list[TensorFacts], patterns: Patterns, *, one_by_one: bool
) -> None:
    groups: dict[tuple[str, ...], list[TensorFacts]] = {}
    for tensor in facts:
        entry = tensor.entry
        name = entry.name if one_by_one else pattern_of(entry.name)
        groups.setdefault((name, entry.dtype, console.shape_text(entry.shape)), []).append(tensor)
    rows: list[tuple[str | int, ...]] = [
        (*key, *_sums(members, patterns)) for key, members in groups.items()
    ]
    floats = [tensor for tensor in facts if tensor.num_zero is not None]
    what = "all" if len(floats) == len(facts) else "all floats"
    rows.append((what, "", "", *_sums(floats, patterns)))
    numbers = ("number", "elements", "zeros", "sparsity", *patterns.values(), "NaN", "inf")
    terminal.table(("tensor", "dtype", "shape", *numbers), rows, right=numbers)


def _sums(facts: list[TensorFacts], patterns: Patterns) -> tuple[str | int, ...]:
    numel = sum(tensor.entry.numel for tensor in facts)
    zeros: tuple[str | int, ...] = ("-", "-")  # of a dtype whose values are not supported
    nums_zero = [tensor.num_zero for tensor in facts if tensor.num_zero is not None]
    if len(nums_zero) == len(facts):
        zeros = (sum(nums_zero), format_percent(sum(nums_zero), numel))
    kept = [
        format_percent(
            sum(tensor.num_kept.get(pattern, 0) for tensor in facts),
            sum(tensor.num_groups.get(pattern, 0) for tensor in facts),
        )
        for pattern in patterns
    ]
    others = [sum(tensor.num_nan for tensor in facts), sum(tensor.num_inf for tensor in facts)]
    return (len(facts), numel, *zeros, *kept, *others)


def _tensor_values(facts: TensorFacts, patterns: Patterns) -> dict[str, Any]:
    entry = facts.entry
    return {
        **{key: getattr(entry, key) for key in ("name", "file", "dtype")},
        "kind": place_of(entry.name)[2],
        "shape": list(entry.shape),
        "num_elements": entry.numel,
        **{key: getattr(facts, key) for key in ("num_zero", "num_nan", "num_inf")},
        "patterns": {
            patterns[pattern]: {"num_groups": groups, "num_kept": facts.num_kept[pattern]}
            for pattern, groups in facts.num_groups.items()
        },
    }


def make_grid(
    tensors: Iterable[tuple[str, int, int]],
) -> tuple[list[str], list[str], list[list[float]]]:
    """Add up (name, elements, zeros) of tensors; all experts of a layer are one kind.

    Only the kinds with most elements have a column.

    Returns:
        The names of layers, the last of which may be of tensors that are in none; the names of
        kinds; and for each layer the sparsity of each kind, NaN where it has no such weight.
    """
    sums: dict[tuple[str, str], dict[str, list[int]]] = {}
    sizes: dict[str, int] = {}
    for name, num_elements, num_zero in tensors:
        stack, layer, kind = place_of(name)
        cell = sums.setdefault((stack, layer), {}).setdefault(kind, [0, 0])
        cell[0] += num_elements
        cell[1] += num_zero
        sizes[kind] = sizes.get(kind, 0) + num_elements
    largest = sorted(sizes, key=lambda kind: -sizes[kind])[:_MAX_KINDS]
    names, stacks = short_names(largest), short_names(stack for stack, layer in sums if layer)
    kinds = sorted(largest, key=lambda kind: natural_key(names[kind]))
    rows = sorted(sums, key=lambda row: (not row[1], *map(natural_key, row)))
    labels, shares = [], []
    for stack, layer in rows:
        has_stack = layer and len(stacks) > 1
        labels.append(f"{stacks[stack]}.{layer}" if has_stack else layer or "no layer")
        cells = [sums[stack, layer].get(kind, (0, 0)) for kind in kinds]
        shares.append([zero / total if total else float("nan") for total, zero in cells])
    return labels, [names[kind] for kind in kinds], shares


def check_picture(path: Path) -> None:
    """Check that a picture can be drawn, before all weights are read."""
    if path.suffix.lower() not in _FORMATS:
        raise SelectionError(f"--plot {path}: expected a name that ends in {', '.join(_FORMATS)}.")
    with writing(path):
        path.absolute().parent.stat()
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise SelectionError("--plot needs matplotlib: pip install 'distprune[plot]'") from error


def draw_picture(path: Path, title: str, tensors: list[tuple[str, int, int]]) -> None:
    """Draw (name, elements, zeros) of tensors; needs no display."""
    import numpy as np
    from matplotlib.figure import Figure

    layers, kinds, shares = make_grid(tensors)
    num_rows, num_columns = max(len(layers), 1), max(len(kinds), 1)
    size = (3 + 0.45 * num_columns, min(4 + 0.2 * num_rows, 22.0))
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    percents = 100 * np.array(shares or [[float("nan")]])
    image = axes.imshow(percents, vmin=0, vmax=100, aspect="auto")
    figure.colorbar(image, ax=axes, label="% of the elements are zero")
    names = list(map(_plain, kinds))
    axes.set_xticks(range(len(names)), names, rotation=60, ha="right", rotation_mode="anchor")
    step = -(-num_rows // _MAX_LABELS)
    axes.set_yticks(range(0, len(layers), step), list(map(_plain, layers[::step])))
    axes.tick_params(labelsize=8)
    axes.set_title(_plain(title), fontsize=11)
    num_elements, num_zero = sum(size for _, size, _ in tensors), sum(z for _, _, z in tensors)
    axes.set_xlabel(f"{console.share_text(num_zero, num_elements)} are zero.", fontsize=8)
    with writing(path):
        figure.savefig(path, dpi=150)


def _plain(text: str) -> str:
    """A name without formulas of matplotlib and characters that a font may lack."""
    return ascii(text)[1:-1][-40:].replace("$", r"\$")


def place_of(name: str) -> tuple[str, str, str]:
    """The list of layers, the layer and the kind of a tensor, by its name.

    The first number is that of the layer; list and layer are "" for a tensor outside of all layers.
    All experts of a layer are one kind.
    """
    name = name.removesuffix(".weight")
    match = re.fullmatch(r"(?:(.*?)\.)?([0-9]{1,9})(?:\.(.*))?", name, re.DOTALL)
    stack, layer, kind = match.groups("") if match else ("", "", name)
    return stack, layer, re.sub(r"(experts?)[._][0-9]+(?![^.])", r"\1", kind) or "weight"


def short_names(kinds: Iterable[str]) -> dict[str, str]:
    """By kind, an ending of as many parts as distinguish all: "up_proj" for "mlp.up_proj"."""
    parts = {kind: kind.split(".") for kind in kinds}
    length, names = 1, dict[str, str]()
    while len(set(names.values())) < len(parts):
        names = {kind: ".".join(own[-length:]) for kind, own in parts.items()}
        length += 1
    return names
