"""``distprune inspect``: how sparse the tensors of a checkpoint are."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distprune._common.blocks import Pattern
from distprune.cli import process
from distprune.cli.console import (
    Meter,
    Reading,
    Terminal,
    count,
    counted,
    percent,
    shape_text,
    without_numbers,
)
from distprune.cli.describing import ranking_text
from distprune.cli.options import (
    OutputOptions,
    Plot,
    Source,
    check_folder,
    dims_by_pattern,
    option,
    takes_options,
)
from distprune.files.errors import CheckpointError, FilesError, OutputError, SelectionError
from distprune.files.text import role_of

if TYPE_CHECKING:
    from distprune.cli.plotting import Picture
    from distprune.files.inspecting import TensorFacts
    from distprune.files.recipe import FileRecipe

CSV_COLUMNS = (
    "name", "file", "dtype", "shape", "elements", "zeros", "sparsity", "nan", "inf", "pruned",
    "layer", "kind",
)  # fmt: skip
# What a spreadsheet takes for a formula at the beginning of a cell.
_FORMULA = "=+-@"


def _check_csv(path: Path) -> None:
    """Check that the file can be written, before all weights are read; "-" is stdout."""
    if str(path) == "-":
        return
    check_folder("--csv", path)
    if path.is_dir():
        raise OutputError(f"--csv {path}: this is a folder; expected the name of a file, or -.")


def _write_csv(
    path: Path, facts: Iterable[TensorFacts], num_pruned: Mapping[str, int] | None
) -> None:
    """Write a heading and a row for each tensor.

    A cell has no control characters in it: those in names are written as in Python ("\\n",
    "\\x1b"), and so is a backslash, and a first character that would make the cell a formula.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for tensor in facts:
        writer.writerow(_csv_row(tensor, num_pruned))
    if str(path) == "-":
        process.write(text.getvalue())
        return
    try:
        path.write_text(text.getvalue(), encoding="utf-8", newline="")
    except OSError as error:
        raise OutputError(f"--csv {path} cannot be written: {error.strerror}.") from error


def _cell(text: str) -> str:
    """A name for a cell; ``text.encode().decode("unicode_escape")`` undoes it for ASCII."""
    escaped = "".join(
        character.encode("unicode_escape").decode()
        if character == "\\" or not character.isprintable()
        else character
        for character in text
    )
    return f"\\x{ord(escaped[0]):02x}{escaped[1:]}" if escaped[:1] in [*_FORMULA] else escaped


def _csv_row(facts: TensorFacts, num_pruned: Mapping[str, int] | None) -> tuple[object, ...]:
    entry, place, num_zero = facts.entry, role_of(facts.entry.name), facts.num_zero
    layer = ".".join([place.stack, *map(str, place.layer)]).strip(".") if place.layer else ""
    return (
        _cell(entry.name),
        _cell(entry.file),
        _cell(entry.dtype),
        "x".join(map(str, entry.shape)) or "scalar",
        entry.numel,
        "" if num_zero is None else num_zero,
        "" if num_zero is None or not entry.numel else repr(num_zero / entry.numel),
        facts.num_nan,
        facts.num_inf,
        "" if num_pruned is None else num_pruned.get(entry.name, 0),
        _cell(layer),
        _cell(place.kind),
    )


@dataclass(frozen=True)
class InspectOptions:
    """What to look for, and where it is written."""

    pattern: list[str] = option(
        "N:M patterns to look for; repeatable.", ("2:4",), metavar="N:M", show_default="2:4"
    )
    input_dim: list[str] | None = option(
        "The dimension of the inputs of tensors, from 0: '*.c_fc.weight=0'; by default as in the "
        "recipe that SRC was pruned by, if any. Repeat it for more.",
        metavar="PATTERN=DIM",
    )
    histogram: bool = option("Show how large the numbers are, by powers of two.", False)
    csv: Path | None = option(
        "Write a row of numbers for each tensor to a file, or to stdout (-) instead of the table.",
        metavar="FILE|-",
    )


@takes_options
def inspect(
    source: Source, given: InspectOptions, plot: Plot = None, *, output: OutputOptions
) -> None:
    """Show the sparsity of each tensor, and the share of its groups that follow an N:M pattern.

    Reads all weights once. Names that differ only in numbers share a line; -v and --csv list every
    tensor. The last line is the total of all floats.

    [bold]Examples[/bold]

      distprune inspect Llama-3.2-1B-2of4 --pattern 2:4 --pattern 4:8

      distprune inspect Llama-3.2-1B --histogram

      distprune inspect Llama-3.2-1B-50 --csv sparsity.csv --plot sparsity.png
    """
    from distprune.cli import plotting
    from distprune.files.checkpoints.checkpoint import open_checkpoint
    from distprune.files.inspecting import inspect as inspect_tensors

    patterns, csv = _by_kept_of(given.pattern), given.csv
    if plot is not None:
        plotting.check(plot)
    checkpoint = open_checkpoint(source)  # nothing is copied
    recipe = _recipe_of(source)
    input_dims = _input_dims(recipe, given.input_dim)
    if csv is not None:
        if output.as_json and str(csv) == "-":
            raise SelectionError("--csv - and --json both write to stdout; leave one of them out.")
        _check_csv(csv)
    terminal = output.terminal()
    with Meter(terminal) as meter:
        reading = Reading(meter, checkpoint.num_bytes)
        facts = list(
            inspect_tensors(checkpoint, tuple(patterns), on_bytes=reading, input_dims=input_dims)
        )
    if plot is not None:
        plotting.draw(plot, _picture(source, facts))
    if csv is not None:
        _write_csv(csv, facts, _pruned_counts(terminal, source))
    if output.as_json:
        terminal.json(
            {
                "source": str(source),
                "recipe": None if recipe is None else recipe.as_mapping(),
                "tensors": [_tensor_values(tensor, patterns) for tensor in facts],
            }
        )
    elif str(csv) != "-":
        _show_table(terminal, facts, patterns, one_by_one=output.verbose > 0)
        if recipe is not None:
            how = "; ".join(dict.fromkeys(ranking_text(part) for part in recipe.parts))
            terminal.text(f"Pruned by distprune, {how}.")
        if given.histogram:
            terminal.text()
            _show_histogram(terminal, facts)


def _recipe_of(source: Path) -> FileRecipe | None:
    """What a checkpoint was pruned by; None if it was not, or not by a recipe."""
    from distprune.files.reports import read_report, recipe_of

    try:
        return recipe_of(read_report(source), str(source))
    except FilesError:
        return None


def _input_dims(recipe: FileRecipe | None, options: list[str] | None) -> Sequence[Any]:
    """What ``--input-dim`` says, or what the recipe said that a checkpoint was pruned by."""
    if options:
        return list(dims_by_pattern(options).items())
    if recipe is None:
        return ()
    return [pair for part in recipe.parts for pair in part.input_dims]


def _by_kept_of(texts: Sequence[str]) -> dict[tuple[int, int], Pattern]:
    """The patterns of the options, by (N, M)."""
    found = {}
    for text in texts:
        try:
            pattern = Pattern.parse(text, tiles=False)
        except ValueError as error:
            raise SelectionError(f"--pattern {text}: expected {error}.") from error
        assert pattern.kept_of is not None
        found[pattern.kept_of] = pattern
    return found


def _pruned_counts(terminal: Terminal, folder: Path) -> dict[str, int] | None:
    """Of a pruned checkpoint, from its report; None if it has none that can be read."""
    from distprune.files.reports import REPORT_FILE, read_report

    if not (folder / REPORT_FILE).is_file():
        return None
    try:
        return {tensor.name: tensor.num_pruned for tensor in read_report(folder).tensors}
    except CheckpointError as error:
        terminal.note(f"The column of pruned elements stays empty: {error}")
        return None


def _picture(source: Path, facts: list[TensorFacts]) -> Picture:
    """Matrices of floats; vectors would be columns without zeros."""
    from distprune.cli.plotting import Picture
    from distprune.files.inspecting import is_float
    from distprune.files.reports.model_card import cached_name

    floats = [f for f in facts if f.num_zero is not None and is_float(f.entry.dtype)]
    shown = [f for f in floats if sum(size > 1 for size in f.entry.shape) > 1] or floats
    num_left = len(facts) - len(shown)
    return Picture(
        title=cached_name(source) or source.absolute().name,
        zeros="zero",
        tensors=[(tensor.entry.name, tensor.entry.numel, tensor.num_zero or 0) for tensor in shown],
        exponents=_exponents(shown),
        notes=[f"Not shown: {counted(num_left, 'other tensor')}."] if num_left else [],
    )


def _show_table(
    terminal: Terminal,
    facts: list[TensorFacts],
    patterns: Mapping[tuple[int, int], Pattern],
    *,
    one_by_one: bool,
) -> None:
    from distprune.files.inspecting import is_float

    groups: dict[tuple[str, ...], list[TensorFacts]] = {}
    for tensor in facts:
        entry = tensor.entry
        name = entry.name if one_by_one else without_numbers(entry.name)
        shape = shape_text(entry.shape)
        groups.setdefault((name, entry.dtype, shape), []).append(tensor)
    rows = [(*key, *_sums(members, patterns)) for key, members in groups.items()]
    floats = [f for f in facts if f.num_zero is not None and is_float(f.entry.dtype)]
    what = "all" if len(floats) == len(facts) else "all floats"
    rows.append((what, "", "", *_sums(floats, patterns)))
    numbers = ("number", "elements", "zeros", "sparsity", *patterns.values(), "NaN", "inf")
    terminal.table(("tensor", "dtype", "shape", *numbers), rows, right=numbers)


def _sums(facts: list[TensorFacts], patterns: Mapping[tuple[int, int], Pattern]) -> tuple[str, ...]:
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


def _tensor_values(
    facts: TensorFacts, patterns: Mapping[tuple[int, int], Pattern]
) -> dict[str, Any]:
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
        "exponents": {str(power): number for power, number in sorted(facts.exponents.items())},
    }


def _exponents(facts: Iterable[TensorFacts]) -> Counter[int]:
    """The exponents of all numbers."""
    exponents: Counter[int] = Counter()
    for tensor in facts:
        exponents.update(tensor.exponents)
    return exponents


def _show_histogram(terminal: Terminal, facts: list[TensorFacts]) -> None:
    exponents = _exponents(facts)
    largest = max(exponents.values(), default=1)
    powers = range(min(exponents), max(exponents) + 1) if exponents else ()
    rows = [
        (f"2^{power}", count(exponents[power]), "#" * -(-40 * exponents[power] // largest))
        for power in powers
    ]
    terminal.table(("magnitude from", "elements", ""), rows, right=("magnitude from", "elements"))
