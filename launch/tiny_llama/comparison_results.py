"""The numbers of a comparison: for people in `results.md`, for programs in `results.json`."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass

from jobs.document import command_line, machine_facts, markdown_table
from jobs.processes import Job

from .comparison import Cell, Comparison
from .data import BATCH, WINDOW, Corpus
from .settings import Settings


@dataclass(frozen=True, slots=True)
class ComparisonResults:
    """A comparison, and how its masks compare with a single process's."""

    comparison: Comparison
    num_compared: int  # mask elements, over all cells and ranks
    num_differing: int
    seconds: float


def comparison_tables(results: ComparisonResults, settings: Settings) -> str:
    """Held-out loss by sparsity, criterion and scope, and the sparsest parameter of each cell."""
    comparison = results.comparison
    parts = [
        f"Held-out loss just after pruning, nats per byte; dense: {comparison.loss_dense:.3f}",
        _table(comparison, settings, lambda cell: cell.loss_pruned, "{:.3f}"),
    ]
    if settings.finetune_steps:
        parts += [
            f"Held-out loss after {settings.finetune_steps} steps of fine-tuning; dense, as many "
            f"steps: {comparison.loss_trained_on:.3f}",
            _table(comparison, settings, lambda cell: cell.loss_finetuned, "{:.3f}"),
        ]
    parts += [
        "Sparsity of the parameter that lost most, %",
        _table(comparison, settings, _highest_sparsity, "{:.1f}"),
    ]
    return "\n\n".join(parts)


def write_comparison(
    results: ComparisonResults, corpus: Corpus, settings: Settings, job: Job
) -> None:
    """Write `results.md` and `results.json`. For rank 0."""
    comparison = results.comparison
    folder = settings.output
    (folder / "results.md").write_text(_document(results, corpus, settings, job))
    kept = ("criterion", "scope", "sparsity", "loss_pruned", "loss_finetuned")
    numbers = {
        "settings": {**asdict(settings), "output": str(settings.output)},
        "num_ranks": job.num_ranks,
        "machine": machine_facts(job),
        "command": command_line(job),
        "loss_dense": comparison.loss_dense,
        "loss_trained_on": comparison.loss_trained_on,
        "cells": [
            {name: getattr(cell, name) for name in kept}
            | {"num_pruned": cell.report.num_pruned, "num_elements": cell.report.num_elements}
            | {"highest_sparsity_of_a_parameter": _highest_sparsity(cell) / 100}
            for cell in comparison.cells
        ],
        "num_mask_elements_compared": results.num_compared,
        "num_mask_elements_differing": results.num_differing,
        "seconds": results.seconds,
    }
    (folder / "results.json").write_text(json.dumps(numbers, indent=2))


def mask_sentence(results: ComparisonResults) -> str:
    """How the masks of all cells compare."""
    return (
        f"{results.num_differing:,} of {results.num_compared:,} mask elements differ from a single "
        f"process's, over {len(results.comparison.cells)} prunings and all ranks"
    )


def _table(
    comparison: Comparison, settings: Settings, value_of: Callable[[Cell], float], form: str
) -> str:
    """A row per sparsity and criterion, a column per scope."""
    rows = [("sparsity, criterion", *settings.scopes)]
    for sparsity in settings.sparsities:
        for criterion in settings.criteria:
            cells = [comparison.cell(criterion, scope, sparsity) for scope in settings.scopes]
            numbers = ["-" if cell is None else form.format(value_of(cell)) for cell in cells]
            rows.append((f"{100 * sparsity:g} %, {criterion}", *numbers))
    return markdown_table(rows)


def _highest_sparsity(cell: Cell) -> float:
    return 100 * max(entry.sparsity for entry in cell.report.parameters)


def _document(results: ComparisonResults, corpus: Corpus, settings: Settings, job: Job) -> str:
    machine = "\n".join(f"- {what}: {value}" for what, value in machine_facts(job).items())
    amounts = {cell.sparsity: cell.report for cell in results.comparison.cells}
    counts = "; ".join(f"{100 * s:g} %: {r.num_pruned:,}" for s, r in amounts.items())
    return f"""# Criteria for pruning a small Llama, `--wrap {settings.wrap}`, {job.num_ranks} ranks

{comparison_tables(results, settings)}

Lower losses are better. Every cell is one pruning of the same trained model, in one shot. Criteria
learn from {settings.calibration_batches} batches of {BATCH} x {WINDOW} bytes of training text.
All cells of a sparsity have exactly as many zeros ({counts}, of
{next(iter(amounts.values())).num_elements:,}).

![Held-out loss by criterion and scope](loss_by_criterion.png)

## Masks against a single process

{mask_sentence(results)}. A lone process
repeated each pruning on a plain model with the same weights and scores; every rank compared the
masks that it holds bit for bit. Replicas count once per rank.

## How it was run

{machine}
- data: Python standard library; {len(corpus.train):,} bytes of {corpus.num_train_files} files for
  training, {corpus.held_out.numel():,} bytes of {corpus.num_held_out_files} other files held out
- training: {settings.steps} steps of {BATCH} x {WINDOW} bytes, seed {settings.seed}
- seconds: {results.seconds:.0f}

```
{command_line(job)}
```
"""
