"""The table: for people in `results.md` and `perplexity.png`, for programs in `results.json`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from jobs.document import command_line, machine_facts, markdown_table
from jobs.processes import Job
from jobs.work import FACTS, read_json

Key = tuple[str, str, float]  # criterion and update, scope, sparsity
Cells = dict[Key, dict[str, Any]]


def write_results(folder: Path, job: Job) -> None:
    """Write the three files of all cells that are there. For rank 0.

    Args:
        folder: with `dense.json` and `cells/`, the same of more text in `more_text/`, and after
            recovery in `recovered/`.
    """
    dense, cells = _read(folder)
    more_dense, more = _read(folder / "more_text")
    later_dense, later = _read(folder / "recovered")
    results = {
        "command": command_line(job),
        "facts": read_json(folder / FACTS),
        "machine": machine_facts(job),
        "dense": dense,
        "cells": list(cells.values()),
        "more_text": list(more.values()),
        "dense_more_text": more_dense,
        "recovered": list(later.values()),
        "dense_recovered": later_dense,
        "recovery": read_json(folder / "recovered" / FACTS) if later else None,
        "facts_more_text": read_json(folder / "more_text" / FACTS) if more else None,
    }
    (folder / "results.json").write_text(json.dumps(results, indent=1))
    (folder / "results.md").write_text(_document(results, cells, more, later))
    measured = [("just pruned", dense, cells)]
    if later:
        measured.append(("recovered", later_dense, later))
    draw(measured, folder / "perplexity.png")


def _read(folder: Path) -> tuple[dict[str, Any] | None, Cells]:
    found = [read_json(file) for file in sorted((folder / "cells").glob("*.json"))]
    cells = {(row_of(cell), cell["scope"], cell["sparsity"]): cell for cell in found}
    return read_json(folder / "dense.json"), cells


def row_of(cell: dict[str, Any]) -> str:
    """The criterion, and what moved the kept weights."""
    update = cell.get("update", "none")
    return str(cell["criterion"]) if update == "none" else f"{cell['criterion']}, {update}"


def table_of(cells: Cells, value_of: Any) -> str:
    """A row per sparsity and criterion, a column per scope; "-" where there is no cell."""
    criteria, scopes, sparsities = _axes(cells)
    rows = [("sparsity, criterion", *scopes)]
    for sparsity in sparsities:
        for criterion in criteria:
            found = [cells.get((criterion, scope, sparsity)) for scope in scopes]
            if any(found):
                numbers = ["-" if cell is None else value_of(cell) for cell in found]
                rows.append((f"{100 * sparsity:g} %, {criterion}", *numbers))
    return markdown_table(rows)


def draw(measured: Sequence[tuple[str, dict[str, Any], Cells]], file: Path) -> None:
    """A panel per sparsity, a row per criterion, a colour per scope.

    Args:
        measured: a row of panels for each: when it was measured, the dense model, the cells.
    """
    every = {key: cell for _, _, cells in measured for key, cell in cells.items()}
    if not every:
        return
    criteria, scopes, sparsities = _axes(every)
    size = (4 * len(sparsities), len(measured) * (1.4 + 0.4 * len(criteria)) + 0.8)
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(
        len(measured), len(sparsities), sharey=True, sharex="col", squeeze=False
    )
    colours = colormaps["viridis"](np.linspace(0, 0.9, len(scopes)))
    places = np.arange(len(criteria))
    for row, (when, dense, cells) in zip(panels, measured, strict=True):
        row[0].set_ylabel(when)
        for axes, sparsity in zip(row, sparsities, strict=True):
            for scope, colour in zip(scopes, colours, strict=True):
                found = [cells.get((criterion, scope, sparsity)) for criterion in criteria]
                values = [np.nan if c is None else _perplexity(c) for c in found]
                axes.plot(values, places, "o", color=colour, alpha=0.8, label=scope)
            axes.axvline(_perplexity(dense), color="0.5", linestyle=":", label="dense")
            axes.set_xscale("log")
            axes.xaxis.set_minor_formatter("")
            axes.set_title(f"{100 * sparsity:g} % pruned")
            axes.grid(alpha=0.25)
    for axes in panels[-1]:
        axes.set_xlabel("perplexity")
        low, high = axes.get_xlim()
        if high < 100 * low:  # powers of ten alone would be too few
            axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.xaxis.set_major_formatter("{x:g}")
    panels[0][0].set_yticks(places, criteria)
    panels[0][0].invert_yaxis()
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(file, dpi=150)


def _axes(cells: Cells) -> tuple[list[str], list[str], list[float]]:
    """The criteria, scopes and sparsities that occur."""
    return (
        _in_order((key[0] for key in cells), ["magnitude", "wanda", "ria", "taylor", "fisher"]),
        _in_order((key[1] for key in cells), ["global", "global-rms", "layer", "row"]),
        sorted({key[2] for key in cells}),
    )


def _in_order(names: Any, first: Sequence[str]) -> list[str]:
    found = set(names)
    return [name for name in first if name in found] + sorted(found - set(first))


def _perplexity(cell: dict[str, Any]) -> float:
    return float(cell["all"]["perplexity"])


def perplexity_text(cell: dict[str, Any]) -> str:
    """That of all texts, as the tables have it."""
    return short(_perplexity(cell))


def tables_of_texts(dense: dict[str, Any], cells: Cells) -> list[str]:
    """For each text on its own what it is, and its table."""
    parts = []
    for number, text in enumerate(dense["texts"]):

        def value(cell: dict[str, Any], number: int = number) -> str:
            return short(cell["texts"][number]["perplexity"])

        parts += [
            f"{Path(text['text']).name}, {text['num_tokens']:,} tokens; the dense model: "
            f"{value(dense)}",
            table_of(cells, value),
        ]
    return parts


def short(value: float) -> str:
    """A perplexity as the tables have it."""
    return f"{value:.2f}" if value < 100 else f"{value:,.0f}"


def _highest(cell: dict[str, Any]) -> str:
    return f"{100 * max(cell['sparsity_of_parameters'].values()):.1f}"


def _first_round(cells: Cells) -> str:
    """What was pruned before the first cell of rounds."""
    found = min((cell["rounds"] for cell in cells.values() if cell.get("rounds")), default=[])
    return f", the first from {', '.join(f'{100 * s:g} %' for s in found)}" if found else ""


def _document(results: dict[str, Any], cells: Cells, more: Cells, later: Cells) -> str:
    facts, dense = results["facts"], results["dense"]
    num_tokens = dense["all"]["num_tokens"]
    texts = ", ".join(Path(text["text"]).name for text in dense["texts"])
    parts = [
        f"# Perplexity of {Path(facts['model']).name} by criterion, scope and sparsity",
        f"Just after pruning; the dense model: {perplexity_text(dense)}",
        table_of(cells, perplexity_text),
    ]
    if more:
        parts += tables_of_texts(results["dense_more_text"], more)
    if later:
        steps, trained = results["recovery"], results["dense_recovered"]
        parts += [
            f"After {steps['recovery_steps']} steps of fine-tuning, {steps['recovery_batch']} "
            f"sequences each, learning rate {steps['learning_rate']:g}; the dense model after as "
            f"many: {perplexity_text(trained)}",
            table_of(later, perplexity_text),
        ]
    machine = "\n".join(f"- {what}: {value}" for what, value in results["machine"].items())
    parts += [
        "Sparsity of the parameter that lost most, %",
        table_of(cells, _highest),
        f"Lower perplexities are better. They are of {num_tokens:,} tokens ({texts}), windows of "
        f"{facts['length']}; criteria learnt from {facts['windows']} windows of other text. Every "
        "cell is one pruning of the same model, in one shot; only rounds go on from the sparsity "
        f"before{_first_round(cells)}. A sparsity has the same number of "
        "zeros in each, but for rounding per layer or row. The text is not WikiText: numbers do "
        "not compare with other tables.",
        f"{machine}\n\n```\n{results['command']}\n```",
    ]
    return "\n\n".join(parts) + "\n"
