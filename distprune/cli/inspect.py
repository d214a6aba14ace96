"""``distprune inspect``: how sparse the tensors of a checkpoint are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from distprune.base.blocks import parse_pattern
from distprune.cli import console, plotting
from distprune.cli.options import ListingOptions, command, dims_by_pattern
from distprune.files.errors import FilesError, SelectionError
from distprune.files.text import role_of
from distprune.recipes import Recipe

if TYPE_CHECKING:
    from distprune.files.verifying import TensorFacts

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
    from distprune.files.verifying import inspect as inspect_tensors

    try:
        patterns = {parse_pattern(text): text for text in given.patterns}
    except ValueError as error:
        raise SelectionError(f"--pattern: {error}.") from error
    if given.plot is not None:
        plotting.check(given.plot)
    checkpoint = open_checkpoint(src)  # nothing is copied
    recipe = _recipe_of(src)
    dims: dict[str, Sequence[int]] = {**dims_by_pattern(given.input_dims)}
    for part in () if recipe is None or given.input_dims else recipe.parts:
        dims = {**part.input_dims, **dims}
    terminal = given.terminal()
    with console.Meter(terminal) as meter:
        reading = meter.reading(checkpoint.num_bytes)
        facts = list(inspect_tensors(checkpoint, tuple(patterns), reading, dims))
    if given.plot is not None:
        from distprune.files.reports import cached_name

        # Matrices of floats; vectors would be columns without zeros.
        counts = [
            (f.entry.name, f.entry.numel, f.num_zero)
            for f in facts
            if f.num_zero is not None and sum(size > 1 for size in f.entry.shape) > 1
        ]
        plotting.draw(given.plot, cached_name(src) or src.absolute().name, counts)
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


def _recipe_of(source: Path) -> Recipe | None:
    """What a checkpoint was pruned by; None if it was not, or not by a recipe."""
    from distprune.files.reports import read_report, recipe_of

    try:
        return recipe_of(read_report(source), str(source))
    except FilesError:
        return None


def _show_table(
    terminal: console.Terminal, facts: list[TensorFacts], patterns: Patterns, *, one_by_one: bool
) -> None:
    groups: dict[tuple[str, ...], list[TensorFacts]] = {}
    for tensor in facts:
        entry = tensor.entry
        name = entry.name if one_by_one else console.without_numbers(entry.name)
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
        zeros = (sum(nums_zero), console.percent(sum(nums_zero), numel))
    kept = [
        console.percent(
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
        "kind": role_of(entry.name).kind,
        "shape": list(entry.shape),
        "num_elements": entry.numel,
        **{key: getattr(facts, key) for key in ("num_zero", "num_nan", "num_inf")},
        "patterns": {
            patterns[pattern]: {"num_groups": groups, "num_kept": facts.num_kept[pattern]}
            for pattern, groups in facts.num_groups.items()
        },
    }
