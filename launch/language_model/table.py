"""Prune one model by each criterion, over each scope, to each sparsity; a file for every cell."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

import distprune as prune
from distprune import language_models
from distprune.language_models import KeptStates, TextScores, TokenWindows
from jobs.processes import Job
from jobs.ranking import Pairs, Scores
from jobs.scopes import is_meaningful, keywords_of
from jobs.work import Folder, read_json

from .criteria import CRITERIA, NEEDS_TEXT, method_of, scores_of
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
        name = f"{self.criterion}_{self.scope}_{100 * self.sparsity:g}{update}"
        return re.sub(r"[^\w.-]+", "-", name) + ".json"


@dataclass(frozen=True, slots=True)
class Texts:
    """Windows of tokens for each purpose."""

    calibration: TokenWindows
    evaluation: TokenWindows
    more: TokenWindows | None
    recovery: TokenWindows | None


class Table:
    """The model as it was loaded, and what all cells have in common.

    Args:
        folder: of the cells.
        more: of the cells that are measured on more text; None: there is none.
        recovered: of the cells after recovery; None: there is no recovery.
    """

    def __init__(
        self,
        settings: TableSettings,
        model: nn.Module,
        texts: Texts,
        folder: Folder,
        more: Folder | None,
        recovered: Folder | None,
        job: Job,
    ) -> None:
        self.settings, self.model, self.texts = settings, model, texts
        self.folder, self.recovered, self.job = folder, recovered, job
        self.measured = [(folder, texts.evaluation)]
        if more is not None and texts.more is not None:
            self.measured.append((more, texts.more))
        self.parameters: Pairs = prune.select(model, settings.include or None, settings.exclude)
        self.scores = TextScores(
            model,
            texts.calibration,
            self.parameters,
            batch_size=settings.batch_size,
            progress=job.progress("calibrating"),
            statistics=folder.path / "statistics.safetensors",
            gradients=folder.path / "gradients.safetensors",
        )
        self._dense: dict[str, Scores | None] = {}
        # This rank's part.
        self._loaded = {key: part.clone() for key, part in get_model_state_dict(model).items()}

    def fill(self) -> None:
        """Make all cells that are not there yet. Collective."""
        for folder, windows in self.measured:
            folder.once("dense.json", partial(self._measure, windows))
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
        before, sparsities = self.settings.rounds_before, sorted(self.settings.sparsities)
        cells = [Cell(criterion, "global", sparsity, "rounds") for sparsity in sparsities]
        rounds = [*before, *sparsities]
        earlier = [rounds[: len(before) + number] for number in range(len(cells))]
        for cell, expected in zip(cells, earlier, strict=True):
            self._check_rounds(cell, expected)
        if all(map(self.is_measured, cells)):
            return

        for number, facts in enumerate(self._rounds(criterion, rounds), start=-len(before)):
            if number >= 0:
                self.measure_cell(cells[number], {"rounds": earlier[number], **facts})
        self._restore()

    def _rounds(self, criterion: str, rounds: list[float]) -> Iterator[dict[str, Any]]:
        """Give the model what each round makes; what the table says of its pruning. Collective.

        A round is kept in the folder `rounds`, and read from there if it was made before.
        """
        kept = Folder(self.folder.path / "rounds", self.settings.facts(), self.job)
        percents = [f"{100 * sparsity:g}" for sparsity in rounds]
        names = ["_".join([criterion, *percents[: n + 1]]) for n in range(len(rounds))]
        states = KeptStates(self.model, kept.path, names.__getitem__)
        finished = self.job.of_rank_0(
            lambda: next(
                (n for n, name in enumerate(names) if not (kept.path / name).exists()), len(names)
            )
        )
        for number, name in enumerate(names[:finished]):
            states.load(number)
            yield kept.once(f"{name}.json", dict)

        def scores() -> Iterator[Scores]:
            dense = None if finished else self._scores(criterion)
            if dense is not None:
                yield dense
            while True:
                yield self.scores.of_round(CRITERIA[criterion] or "")

        for made in language_models.prune_in_rounds(
            self.model,
            self.texts.calibration,
            self.parameters,
            rounds,
            scores().__next__,
            batch_size=self.settings.batch_size,
            finished=finished,
        ):
            name = names[made.number]
            facts = kept.once(f"{name}.json", partial(facts_of, made.pruning))
            states.save(made.number)
            self.job.say(f"{criterion}: round of {made.sparsity:g}")
            yield facts

    def _check_rounds(self, cell: Cell, expected: list[float]) -> None:
        """ValueError if the cell was made after other rounds; on every rank."""
        for folder, _ in self.measured:
            file = folder.path / "cells" / cell.file
            found = self.job.of_rank_0(partial(read_json, file))
            if found is not None and found["rounds"] != expected:
                raise ValueError(
                    f"{file} was made after rounds of {found['rounds']}, and would be after those "
                    f"of {expected}; expected the same --rounds-before and --sparsities, or "
                    "another output folder; remove the file to make it anew."
                )

    def is_measured(self, cell: Cell) -> bool:
        """Whether all that is asked of the cell is there. Collective."""
        files = [folder.path / "cells" / cell.file for folder, _ in self.measured]
        return self.job.of_rank_0(lambda: all(file.exists() for file in files))

    def measure_cell(self, cell: Cell, facts: dict[str, Any]) -> None:
        """Write the cell of the model as it is, as far as it is not there. Collective."""
        for folder, windows in self.measured:

            def measure(windows: TokenWindows = windows) -> dict[str, Any]:
                return {**asdict(cell), **facts, **self._measure(windows)}

            self._say(cell, folder.once(f"cells/{cell.file}", measure))

    def _say(self, cell: Cell, made: dict[str, Any]) -> None:
        self.job.say(f"{cell.file}: perplexity {made['all']['perplexity']:.2f}")

    def _fill_cell(self, cell: Cell) -> None:
        def recover_and_measure() -> dict[str, Any]:
            with self._pruned(cell):
                return {**asdict(cell), **self._recover(label=None)}

        if not self.is_measured(cell):
            with self._pruned(cell) as report:
                self.measure_cell(cell, facts_of(report))
        if self.recovered is not None:
            made = self.recovered.once(f"cells/{cell.file}", recover_and_measure)
            self._say(cell, made)

    @contextlib.contextmanager
    def _pruned(self, cell: Cell) -> Iterator[prune.PruningReport]:
        """The model is pruned meanwhile, and then what it was."""
        scores = self._scores(cell.criterion)
        ratios = self.scores.statistics if cell.scope == "owl" else None
        # Before anything is pruned: the first who asks collects them.
        grams = self.scores.grams if cell.update == "least-squares" else None
        torch.manual_seed(self.settings.seed)
        with warnings.catch_warnings():
            # Of emptied layers: the cell says how sparse the sparsest one is.
            warnings.simplefilter("ignore", UserWarning)
            report = prune.global_unstructured(
                self.parameters,
                method_of(cell.criterion),
                scores,
                amount=None if cell.scope == "2:4" else cell.sparsity,
                **keywords_of(cell.scope, ratios),
            )
        if grams is not None:
            prune.reconstruct(self.parameters, grams)
        yield report
        self._restore()

    def _scores(self, criterion: str) -> Scores | None:
        """Of the dense model."""
        if criterion not in self._dense:
            self._dense[criterion] = scores_of(criterion, self.scores)
        return self._dense[criterion]

    def _restore(self) -> None:
        """Make the model what it was when it was loaded."""
        for module, name in self.parameters:
            prune.remove(module, name)
        self.reload()

    def _recover(self, label: str | None) -> dict[str, Any]:
        assert self.texts.recovery is not None
        recover(self.model, self.texts.recovery, self.settings.recovery, self.job, label=label)
        return self._measure(self.texts.evaluation)

    def _recover_dense(self) -> dict[str, Any]:
        """As many steps as the pruned models have: what more training alone does."""
        made = self._recover("the dense model trains on")
        self.reload()
        return made

    def _measure(self, windows: TokenWindows) -> dict[str, Any]:
        report = language_models.perplexity(
            self.model, windows, batch_size=self.settings.batch_size
        )
        return report.as_values()

    def reload(self) -> None:
        """Give the model the values with which it was loaded; it is not pruned. Collective."""
        # It renames keys in what it is given.
        set_model_state_dict(self.model, dict(self._loaded))


def facts_of(report: prune.PruningReport) -> dict[str, Any]:
    """What the table says of a pruning."""
    return {
        "num_elements": report.num_elements,
        "num_pruned": report.num_pruned,
        "sparsity_of_parameters": {p.name: p.sparsity for p in report.parameters},
    }


def open_table(settings: TableSettings, job: Job) -> Table:
    """Load the model and the texts. Collective."""
    folder = Folder(settings.output, settings.facts(), job)
    more = recovered = None
    if settings.more_text:
        more = Folder(settings.output / "more_text", settings.facts(of_more_text=True), job)
    if settings.recover:
        recovered = Folder(settings.output / "recovered", settings.facts(recovered=True), job)
    tokenizer = language_models.load_tokenizer(settings.model)
    read, length = language_models.read_windows, settings.length
    texts = Texts(
        read(tokenizer, settings.calibrate, length).sample(settings.windows, seed=settings.seed),
        read(tokenizer, settings.evaluate, length, limit=settings.evaluation_windows),
        read(tokenizer, settings.more_text, length, limit=settings.more_windows) if more else None,
        read(tokenizer, settings.recover, length) if recovered else None,
    )
    model = language_models.load_sharded(
        settings.model, wrap=settings.wrap, dtype=torch.float32, device=job.device
    )
    model.eval()
    job.say(f"loaded {settings.model}; {job.num_ranks} ranks, {settings.wrap}")
    return Table(settings, model, texts, folder, more, recovered, job)
