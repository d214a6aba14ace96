"""Compare criteria, scopes and updates on a language model by perplexity.

    torchrun --standalone --nproc-per-node 2 launch/compare_on_language_model.py MODEL OUT \
        --calibrate train.txt --evaluate held_out.txt --sparsities 0.5 0.6

Each cell of the table prunes the same model, and is measured on text that no score has seen.
OUT/cells.jsonl has a line for each finished cell: a run that was killed goes on where it stopped,
and criteria, scopes, sparsities and updates may be added later. OUT/results.md has the table,
OUT/results.json all numbers.
"""

from __future__ import annotations

import argparse
import json
import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

import distprune as prune
from common import Job, join, leave, markdown_table
from language_model import CRITERIA, SCOPES, UPDATES, LanguageModel, make_parser

Cell = dict[str, Any]
DENSE: Cell = {"criterion": "dense", "scope": "", "sparsity": 0.0, "update": "none"}
# These options choose cells, or how the work is divided; a cell does not depend on them.
NOT_OF_A_CELL = (
    "output", "criteria", "scopes", "sparsities", "updates", "rounds_before", "wrap",
    "tensor_parallel",
)  # fmt: skip


def parse_settings(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; a wrong value ends every rank with the same message."""
    parser = make_parser(
        "Perplexity of a language model by criterion, scope, sparsity and update. A run that was "
        "killed goes on when it is started again.",
        output="folder for the cells and the table",
    )

    add = parser.add_argument
    criteria = ["magnitude", "wanda", "ria", "taylor", "fisher"]
    add("--criteria", nargs="+", choices=CRITERIA, default=criteria, help="what ranks weights")
    scopes = ["global", "global-rms", "layer", "row", "owl", "2:4"]
    add(
        "--scopes", nargs="+", choices=SCOPES, default=scopes, help="what competes; 2:4 at 0.5 only"
    )
    sparsities = [0.3, 0.5, 0.6, 0.7]
    add("--sparsities", nargs="+", type=float, default=sparsities, help="shares to prune")
    updates = "how kept weights move; rounds: over all weights, by criteria that read text"
    add("--updates", nargs="+", choices=UPDATES, default=["none"], help=updates)
    settings = parser.parse_args(arguments)
    if not (settings.calibrate and settings.evaluate):
        parser.error("expected --calibrate FILE... and --evaluate FILE...")
    if any(not 0 < sparsity < 1 for sparsity in settings.sparsities):
        parser.error(f"expected --sparsities between 0 and 1, got {settings.sparsities}")
    settings.sparsities.sort()
    return settings


class Cells:
    """The finished cells, on every rank; rank 0 keeps them in a file.

    Args:
        file: one line of JSON per cell, below a line with the facts.
        facts: what all cells depend on.

    Raises:
        ValueError: the file has cells that depend on other facts; on every rank.
    """

    def __init__(self, file: Path, facts: dict[str, Any], job: Job) -> None:
        self.file, self.job = file, job
        self.facts = json.loads(json.dumps(facts, default=str))
        self.found: list[Cell] = job.on_rank_0(self._read)

    def has(self, cell: Cell) -> bool:
        return _key(cell) in map(_key, self.found)

    def add(self, cell: Cell) -> None:
        """Add a cell that has been measured."""
        self.found.append(cell)
        if self.job.rank == 0:
            self._append(cell)
        name = " ".join(f"{value}" for value in _key(cell)[:-1])
        self.job.say(f"{name}: perplexity {short(cell['all']['perplexity'])}")

    def _read(self) -> list[Cell]:
        if not self.file.exists():
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self._append({"facts": self.facts})
        *lines, unfinished = self.file.read_text(encoding="utf-8").split("\n")
        if unfinished:  # the run was killed while it wrote this line
            self.file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        first, *cells = map(json.loads, lines)
        if first["facts"] != self.facts:
            raise ValueError(
                f"{self.file} depends on {first['facts']}, and this run on {self.facts}; expected "
                "the same, or another output folder."
            )
        return cells

    def _append(self, value: dict[str, Any]) -> None:
        with self.file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(value) + "\n")
            stream.flush()
            os.fsync(stream.fileno())


def _key(cell: Cell) -> tuple[Any, ...]:
    names = ("criterion", "scope", "sparsity", "update")
    return (*(cell[name] for name in names), tuple(cell.get("rounds", ())))


def cells_of_one_shot(settings: argparse.Namespace) -> Iterable[Cell]:
    """The cells to make by a single pruning each."""
    for update in (update for update in settings.updates if update != "rounds"):
        for sparsity in settings.sparsities:
            for scope in settings.scopes:
                for criterion in settings.criteria:
                    is_without = criterion == "random" and scope == "global-rms"  # one scale
                    if not is_without and (scope != "2:4" or sparsity == 0.5):
                        yield {
                            "criterion": criterion,
                            "scope": scope,
                            "sparsity": sparsity,
                            "update": update,
                        }


def fill(cells: Cells, language_model: LanguageModel, settings: argparse.Namespace) -> None:
    """Measure all cells that are not there yet."""
    model = language_model.model
    loaded = {key: part.clone() for key, part in get_model_state_dict(model).items()}
    if not cells.has(DENSE):
        cells.add(DENSE | language_model.perplexity())
    for cell in cells_of_one_shot(settings):
        if not cells.has(cell):
            criterion, scope, sparsity, update, _ = _key(cell)
            amount = None if scope == "2:4" else sparsity
            report, _ = language_model.prune(criterion, scope, amount, update)
            cells.add(cell | facts_of(report) | language_model.perplexity())
            restore(language_model, loaded)
    if "rounds" in settings.updates:
        for criterion in filter(CRITERIA.get, settings.criteria):
            fill_rounds(cells, language_model, settings, criterion)
            restore(language_model, loaded)


def fill_rounds(
    cells: Cells, language_model: LanguageModel, settings: argparse.Namespace, criterion: str
) -> None:
    """Measure the cells of a criterion whose rounds go on from one sparsity to the next."""
    rounds = [*settings.rounds_before, *settings.sparsities]
    wanted = [
        {
            "criterion": criterion,
            "scope": "global",
            "sparsity": sparsity,
            "update": "rounds",
            "rounds": rounds[: rounds.index(sparsity)],
        }
        for sparsity in settings.sparsities
    ]
    missing = {cell["sparsity"]: cell for cell in wanted if not cells.has(cell)}
    if missing:
        for made in language_model.prune_in_rounds(criterion, settings.sparsities):
            if made.sparsity in missing:
                facts = facts_of(made.pruning)
                cells.add(missing[made.sparsity] | facts | language_model.perplexity())


def restore(language_model: LanguageModel, loaded: dict[str, Tensor]) -> None:
    """Make the model what it was when it was loaded."""
    for module, name in language_model.parameters:
        if prune.is_pruned(module):
            prune.remove(module, name)
    set_model_state_dict(language_model.model, dict(loaded))  # it renames keys in what it gets


def facts_of(report: prune.PruningReport) -> dict[str, Any]:
    """What a cell says of its pruning."""
    return {
        "num_elements": report.num_elements,
        "num_pruned": report.num_pruned,
        "sparsity_of_parameters": {p.name: p.sparsity for p in report.parameters},
    }


def short(value: float) -> str:
    """A perplexity as the tables have it."""
    return f"{value:.2f}" if value < 100 else f"{value:,.0f}"


def perplexity_of(cell: Cell) -> str:
    """Of all texts together, as the tables have it."""
    return short(cell["all"]["perplexity"])


def row_of(cell: Cell) -> str:
    """The criterion, and what moved the kept weights."""
    update = cell.get("update", "none")
    return str(cell["criterion"]) if update == "none" else f"{cell['criterion']}, {update}"


def table_of(cells: Iterable[Cell], text_of: Callable[[Cell], str] = perplexity_of) -> str:
    """A row per sparsity and criterion, a column per scope; "-" where there is no cell."""
    texts = {(cell["sparsity"], row_of(cell), cell["scope"]): text_of(cell) for cell in cells}
    sparsities, criteria, scopes = (set(names) for names in zip(*texts, strict=True))
    columns = _in_order(scopes, SCOPES)
    rows = [("sparsity, criterion", *columns)]
    for sparsity in sorted(sparsities):
        for criterion in _in_order(criteria, tuple(CRITERIA)):
            found = [texts.get((sparsity, criterion, scope), "-") for scope in columns]
            if set(found) != {"-"}:
                rows.append((f"{100 * sparsity:g} %, {criterion}", *found))
    return markdown_table(rows)


def _in_order(names: set[str], known: Sequence[str]) -> list[str]:
    return sorted(names, key=lambda name: ([*known, name].index(name), name))


def write_results(cells: Cells, folder: Path) -> None:
    """Write the table for people, and all numbers for programs."""
    (dense,) = (cell for cell in cells.found if cell["criterion"] == "dense")
    others = [cell for cell in cells.found if cell is not dense]
    results = {"facts": cells.facts, "dense": dense, "cells": others}
    (folder / "results.json").write_text(json.dumps(results, indent=1))
    parts = ["# Perplexity just after pruning"]
    parts += [f"All texts; the dense model: {perplexity_of(dense)}", table_of(others)]
    for number, text in enumerate(dense["texts"]):

        def value(cell: Cell, number: int = number) -> str:
            return short(cell["texts"][number]["perplexity"])

        name, size = Path(text["text"]).name, f"{text['num_tokens']:,} tokens"
        parts += [f"{name}, {size}; the dense model: {value(dense)}", table_of(others, value)]
    (folder / "results.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def open_table(settings: argparse.Namespace, job: Job) -> Cells:
    """The cells that are there already."""
    facts = {name: value for name, value in vars(settings).items() if name not in NOT_OF_A_CELL}
    return Cells(settings.output / "cells.jsonl", facts, job)


def main() -> None:
    settings = parse_settings()
    job = join()
    cells = open_table(settings, job)
    # Of emptied layers: a cell has the sparsity of each parameter.
    warnings.simplefilter("ignore", UserWarning)
    fill(cells, LanguageModel(settings, job), settings)
    if job.rank == 0:
        write_results(cells, settings.output)
    job.say(f"results in {settings.output}")
    leave()


if __name__ == "__main__":
    main()
