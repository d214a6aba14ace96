"""Prune one model by each criterion, over each scope, to each sparsity; a file for every cell."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

import distprune as prune
from distprune import language_models
from distprune.language_models import TokenWindows
from jobs.processes import Job
from jobs.ranking import Pairs, Ranking
from jobs.scopes import is_meaningful, keywords_of
from jobs.work import Folder

from .rankings import CRITERIA, NEEDS_TEXT, Calibration, method_of
from .recovery import recover
from .table_settings import TableSettings


@dataclass(frozen=True, slots=True)
class Cell:
    """One entry of the table."""

    criterion: str
    scope: str
    sparsity: float
    update: str = "none"

    @property
    def file(self) -> str:
        """Its name in the folder of cells."""
        update = "" if self.update == "none" else f"_{self.update}"
        scope = self.scope.replace(":", "-")
        return f"{self.criterion}_{scope}_{100 * self.sparsity:g}{update}.json"


@dataclass(frozen=True, slots=True)
class Texts:
    """Windows of tokens for each purpose."""

    calibration: TokenWindows
    evaluation: TokenWindows
    recovery: TokenWindows | None


class Table:
    """The model as it was loaded, and what all cells have in common.

    Args:
        folder: of the cells.
        recovered: of the cells after recovery; None: there is no recovery.
    """

    def __init__(
        self,
        settings: TableSettings,
        model: nn.Module,
        texts: Texts,
        folder: Folder,
        recovered: Folder | None,
        job: Job,
    ) -> None:
        self.settings, self.model, self.texts = settings, model, texts
        self.folder, self.recovered, self.job = folder, recovered, job
        self.parameters: Pairs = prune.select(model, settings.include or None, settings.exclude)
        file = folder.path / "statistics.safetensors"
        windows = texts.calibration
        self.calibration = Calibration(
            model, self.parameters, windows, file, settings.batch_size, job
        )
        self._rankings: dict[str, Ranking] = {}
        # This rank's part.
        self._loaded = {key: part.clone() for key, part in get_model_state_dict(model).items()}

    def fill(self) -> None:
        """Make all cells that are not there yet. Collective."""
        self.folder.once("dense.json", self._measure)
        if self.recovered is not None:
            self.recovered.once("dense.json", self._recover_dense)
        for update in self.settings.updates:
            if update == "rounds":
                for criterion in self.settings.criteria:
                    self._fill_rounds(criterion)
                continue
            for sparsity in self.settings.sparsities:
                for scope in self.settings.scopes:
                    for criterion in self.settings.criteria:
                        if is_meaningful(scope, method_of(criterion), sparsity):
                            self._fill_cell(Cell(criterion, scope, sparsity, update))

    def _fill_rounds(self, criterion: str) -> None:
        """The cells of one criterion, each made from the one before."""
        if criterion not in NEEDS_TEXT:
            return
        cells = [Cell(criterion, "global", s, "rounds") for s in sorted(self.settings.sparsities)]
        files = [self.folder.path / "cells" / cell.file for cell in cells]
        if self.job.of_rank_0(lambda: all(file.exists() for file in files)):
            return

        rounds = language_models.prune_in_rounds(
            self.model,
            self.texts.calibration,
            self.parameters,
            [cell.sparsity for cell in cells],
            lambda: self.calibration.scores_anew(criterion),
            batch_size=self.settings.batch_size,
        )
        for cell, made in zip(cells, rounds, strict=True):

            def measure(cell: Cell = cell, made: language_models.Round = made) -> dict[str, Any]:
                return {**asdict(cell), **facts_of(made.pruning), **self._measure()}

            self._say(cell, self.folder.once(f"cells/{cell.file}", measure))
        self._restore()

    def _say(self, cell: Cell, made: dict[str, Any]) -> None:
        self.job.say(f"{cell.file}: perplexity {made['all']['perplexity']:.2f}")

    def _fill_cell(self, cell: Cell) -> None:
        def prune_and_measure() -> dict[str, Any]:
            with self._pruned(cell) as report:
                return {**asdict(cell), **facts_of(report), **self._measure()}

        def recover_and_measure() -> dict[str, Any]:
            with self._pruned(cell):
                return {**asdict(cell), **self._recover(label=None)}

        self._say(cell, self.folder.once(f"cells/{cell.file}", prune_and_measure))
        if self.recovered is not None:
            made = self.recovered.once(f"cells/{cell.file}", recover_and_measure)
            self._say(cell, made)

    @contextlib.contextmanager
    def _pruned(self, cell: Cell) -> Iterator[prune.PruningReport]:
        """The model is pruned meanwhile, and then what it was."""
        if cell.criterion not in self._rankings:
            self._rankings[cell.criterion] = CRITERIA[cell.criterion](self.calibration)
        ranking = self._rankings[cell.criterion]
        ratios = self.calibration.statistics if cell.scope == "owl" else None
        # Before anything is pruned: the first who asks collects them.
        grams = self.calibration.grams if cell.update == "least-squares" else None
        torch.manual_seed(self.settings.seed)
        with warnings.catch_warnings():
            # Of emptied layers: the cell says how sparse the sparsest one is.
            warnings.simplefilter("ignore", UserWarning)
            report = prune.global_unstructured(
                self.parameters,
                ranking.method,
                ranking.scores,
                amount=None if cell.scope == "2:4" else cell.sparsity,
                **keywords_of(cell.scope, ratios),
            )
        if grams is not None:
            prune.reconstruct(self.parameters, grams)
        yield report
        self._restore()

    def _restore(self) -> None:
        """Make the model what it was when it was loaded."""
        for module, name in self.parameters:
            prune.remove(module, name)
        self._reload()

    def _recover(self, label: str | None) -> dict[str, Any]:
        assert self.texts.recovery is not None
        recover(self.model, self.texts.recovery, self.settings.recovery, self.job, label=label)
        return self._measure()

    def _recover_dense(self) -> dict[str, Any]:
        """As many steps as the pruned models have: what more training alone does."""
        made = self._recover("the dense model trains on")
        self._reload()
        return made

    def _measure(self) -> dict[str, Any]:
        report = language_models.perplexity(
            self.model, self.texts.evaluation, batch_size=self.settings.batch_size
        )
        return report.as_values()

    def _reload(self) -> None:
        # It renames keys in what it is given.
        set_model_state_dict(self.model, dict(self._loaded))


def facts_of(report: prune.PruningReport) -> dict[str, Any]:
    """What the table says of a pruning."""
    return {
        "num_elements": report.num_elements,
        "num_pruned": report.num_pruned,
        "sparsity_of_parameters": {p.name: p.sparsity for p in report.parameters},
    }
