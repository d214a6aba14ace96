"""``distprune inspect``: how sparse the tensors of a checkpoint are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from pydantic import Field

from distprune.base.blocks import parse_pattern
from distprune.cli.console import (
    Meter,
    Terminal,
    count,
    percent,
    shape_text,
    without_numbers,
)
from distprune.cli.describing import ranking_text
from distprune.cli.options import Options, OutputOptions, command, dims_by_pattern, made, source
from distprune.files.errors import FilesError, SelectionError
from distprune.files.text import role_of
from distprune.recipes import Recipe

if TYPE_CHECKING:
    from distprune.files.inspecting import TensorFacts


class InspectOptions(Options):
    """What to look for, and where it is written."""

    patterns: tuple[str, ...] = Field(
        default=("2:4",), description="N:M pattern to look for (2:4). Repeat it for more."
    )
    input_dims: tuple[str, ...] = Field(
        default=(),
        description="PATTERN=DIM: the dimension of the inputs, from 0, as '*.c_fc.weight=0' (that "
        "in the recipe of SRC).",
    )
    plot: Path | None = Field(
        default=None,
        description="Picture (png, svg, pdf) of the sparsity by layer and kind of weight.",
    )


@command("inspect", InspectOptions, OutputOptions)
@source
def inspect(context: click.Context, source: Path) -> None:
    """Show the sparsity of each tensor, and the share of its groups that follow an N:M pattern.

    Reads all weights once. Names that differ only in numbers share a line; -v lists every tensor.
    The last line is the total of all floats.

    \b
    distprune inspect Llama-3.2-1B-2of4 --pattern 2:4 --pattern 4:8
    distprune inspect Llama-3.2-1B-50 --plot sparsity.png
    """
    output, given = made(context, OutputOptions), made(context, InspectOptions)
    from distprune.files.checkpoints.checkpoint import open_checkpoint
    from distprune.files.inspecting import inspect as inspect_tensors

    try:
        patterns = {parse_pattern(text): text for text in given.patterns}
    except ValueError as error:
        raise SelectionError(f"--pattern: {error}.") from error
    if given.plot is not None:
        from distprune.cli import plotting

        plotting.check(given.plot)
    checkpoint = open_checkpoint(source)  # nothing is copied
    recipe = _recipe_of(source)
    input_dims = _input_dims(recipe, given.input_dims)
    terminal = output.terminal()
    with Meter(terminal) as meter:
        reading = meter.reading(checkpoint.num_bytes)
        facts = list(
            inspect_tensors(checkpoint, tuple(patterns), on_bytes=reading, input_dims=input_dims)
        )
    if given.plot is not None:
        from distprune.files.reports.model_card import cached_name

        # Matrices of floats; vectors would be columns without zeros.
        matrices = [f for f in _floats(facts) if sum(size > 1 for size in f.entry.shape) > 1]
        counts = [(f.entry.name, f.entry.numel, f.num_zero or 0) for f in matrices]
        plotting.draw(given.plot, cached_name(source) or source.absolute().name, counts)
    if output.as_json:
        terminal.json(
            {
                "source": str(source),
                "recipe": None if recipe is None else recipe.as_values(),
                "tensors": [_tensor_values(tensor, patterns) for tensor in facts],
            }
        )
    else:
        _show_table(terminal, facts, patterns, one_by_one=output.verbose)
        if recipe is not None:
            how = "; ".join(dict.fromkeys(ranking_text(part) for part in recipe.parts))
            terminal.text(f"Pruned by distprune, {how}.")


def _recipe_of(source: Path) -> Recipe | None:
    """What a checkpoint was pruned by; None if it was not, or not by a recipe."""
    from distprune.files.reports import read_report, recipe_of

    try:
        return recipe_of(read_report(source), str(source))
    except FilesError:
        return None


def _input_dims(recipe: Recipe | None, options: Sequence[str]) -> Sequence[Any]:
    """What ``--input-dim`` says, or what the recipe said that a checkpoint was pruned by."""
    if options:
        return list(dims_by_pattern(options).items())
    if recipe is None:
        return ()
    return [pair for part in recipe.parts for pair in part.input_dims.items()]


def _floats(facts: list[TensorFacts]) -> list[TensorFacts]:
    return [f for f in facts if f.num_zero is not None]


def _show_table(
    terminal: Terminal,
    facts: list[TensorFacts],
    patterns: Mapping[tuple[int, int], str],
    *,
    one_by_one: bool,
) -> None:
    groups: dict[tuple[str, ...], list[TensorFacts]] = {}
    for tensor in facts:
        entry = tensor.entry
        name = entry.name if one_by_one else without_numbers(entry.name)
        shape = shape_text(entry.shape)
        groups.setdefault((name, entry.dtype, shape), []).append(tensor)
    rows = [(*key, *_sums(members, patterns)) for key, members in groups.items()]
    floats = _floats(facts)
    what = "all" if len(floats) == len(facts) else "all floats"
    rows.append((what, "", "", *_sums(floats, patterns)))
    numbers = ("number", "elements", "zeros", "sparsity", *patterns.values(), "NaN", "inf")
    terminal.table(("tensor", "dtype", "shape", *numbers), rows, right=numbers)


def _sums(facts: list[TensorFacts], patterns: Mapping[tuple[int, int], str]) -> tuple[str, ...]:
    numel = sum(tensor.entry.numel for tensor in facts)
    zeros = ("-", "-")  # of a dtype whose values are not supported
    nums_zero = [tensor.num_zero for tensor in facts if tensor.num_zero is not None]
    if len(nums_zero) == len(facts):
        zeros = (count(sum(nums_zero)), percent(sum(nums_zero), numel))
    kept = [
        percent(
            sum(tensor.num_kept.get(pattern, 0) for tensor in facts),
            sum(tensor.num_groups.get(pattern, 0) for tensor in facts),
        )
        for pattern in patterns
    ]
    others = [sum(tensor.num_nan for tensor in facts), sum(tensor.num_inf for tensor in facts)]
    return (count(len(facts)), count(numel), *zeros, *kept, *map(count, others))


def _tensor_values(facts: TensorFacts, patterns: Mapping[tuple[int, int], str]) -> dict[str, Any]:
    entry = facts.entry
    return {
        "name": entry.name,
        "file": entry.file,
        "kind": role_of(entry.name).kind,
        "dtype": entry.dtype,
        "shape": list(entry.shape),
        "num_elements": entry.numel,
        "num_zero": facts.num_zero,
        "num_nan": facts.num_nan,
        "num_inf": facts.num_inf,
        "patterns": {
            patterns[kept_of]: {"num_groups": groups, "num_kept": facts.num_kept[kept_of]}
            for kept_of, groups in facts.num_groups.items()
        },
    }
