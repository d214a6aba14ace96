"""Prune the model as the command line says: one call, whatever the sharding."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import distprune as prune
from distprune import budgets, language_models
from distprune.language_models import KeptStates, TextScores, TokenWindows
from distprune.schedule import Cubic, Linear, ScheduledPruner
from distprune.statistics import ActivationStatistics, GramMatrices
from jobs.ranking import Pairs
from jobs.work import Folder

from .criteria import CRITERIA, method_of, scores_of
from .settings import Settings


def keywords_of(settings: Settings, text: TextScores) -> dict[str, Any]:
    """What the command line adds to the arguments of `global_unstructured`. Collective."""
    keywords: dict[str, Any] = {
        "scope": settings.scope, "pattern": settings.pattern, "normalize": settings.normalize
    }  # fmt: skip
    if settings.budget is not None:
        is_owl = settings.budget == "owl"
        keywords["budget"] = budgets.OWL(text.statistics) if is_owl else settings.budget
    return keywords


def prune_in_one_shot(settings: Settings, text: TextScores) -> list[dict[str, Any]]:
    """Prune all parameters; a row of the report for each. Collective."""
    scores = scores_of(settings.criterion, text)
    torch.manual_seed(settings.seed)
    report = prune.global_unstructured(
        text.parameters,
        method_of(settings.criterion),
        scores,
        amount=settings.sparsity,
        **keywords_of(settings, text),
    )
    return rows_of(report)


def prune_and_move(
    settings: Settings, text: TextScores, work: Folder, finished: int
) -> Iterator[list[dict[str, Any]]]:
    """Prune in rounds, and move the kept weights; a row for each parameter after each. Collective.

    Args:
        work: keeps the decoder layers of a run block by block, which goes on after the last.
        finished: rounds that are done, whose masks and weights the model has.
    """
    if not settings.rounds:
        if not finished and settings.sequential:
            yield prune_block_by_block(settings, text, work)
        elif not finished:
            grams = text.grams  # of the dense model
            rows = prune_in_one_shot(settings, text)
            yield with_errors(rows, prune.reconstruct(text.parameters, grams))
        return

    for made in language_models.prune_in_rounds(
        text.model,
        windows_of(text),
        text.parameters,
        [*settings.rounds, settings.sparsity or 0.0],
        lambda: text.of_round(CRITERIA[settings.criterion] or ""),
        update=settings.update != "none",
        batch_size=settings.batch_size,
        progress=work.job.progress("collecting the inputs of layers"),
        finished=finished,
    ):
        yield with_errors(rows_of(made.pruning), made.update)


def prune_block_by_block(
    settings: Settings,
    text: TextScores,
    work: Folder,
    statistics_file: Path | None = None,
) -> list[dict[str, Any]]:
    """Prune each block by statistics of inputs that the pruned blocks before it give. Collective.

    Each block loses the same share of its elements.

    Args:
        work: keeps each block that is done, if kept weights move.
        statistics_file: gets the statistics; None: kept weights move, too.
    """
    moves = statistics_file is None
    statistics = (GramMatrices if moves else ActivationStatistics)(text.parameters)
    kept = KeptStates(text.model, work.path, "block-{}".format)
    rows: list[list[dict[str, Any]]] = []
    for number in range(kept.finished(len(text.parameters)) if moves else 0):
        kept.load(number)
        rows.append(work.once(f"block-{number}.json", list))

    def prune_block(of_block: Pairs) -> list[dict[str, Any]]:
        scores = getattr(statistics, settings.criterion)(of_block)
        keywords = keywords_of(settings, text)
        report = prune.global_unstructured(
            of_block, prune.L1Unstructured, scores, amount=settings.sparsity, **keywords
        )
        if not isinstance(statistics, GramMatrices):
            return rows_of(report)
        made = with_errors(rows_of(report), prune.reconstruct(of_block, statistics))
        work.once(f"block-{len(rows)}.json", lambda: made)
        kept.save(len(rows), of_block)
        rows.append(made)
        return made

    made = language_models.prune_block_by_block(
        text.model,
        windows_of(text),
        statistics,
        prune_block,
        batch_size=settings.batch_size,
        progress=work.job.progress("pruning block by block"),
        finished=len(rows),
    )
    if statistics_file is not None:
        rows = made
        statistics.save(statistics_file)
    return [row for of_block in rows for row in of_block]


def make_pruner(settings: Settings, text: TextScores) -> ScheduledPruner:
    """Prunes in steps while the model recovers, by scores that were learnt before. Collective.

    The last pruning comes when three quarters of the steps are done, so that a quarter recovers.
    """
    scores = scores_of(settings.criterion, text)
    end = max(settings.prunings, 3 * settings.recovery_steps // 4)
    kind = {"linear": Linear, "cubic": Cubic}[settings.schedule]
    schedule = kind(0, end, max(1, end // settings.prunings), final_sparsity=settings.sparsity)
    return ScheduledPruner(
        text.parameters,
        schedule,
        pruning_method=method_of(settings.criterion),
        importance_scores=scores,
        **keywords_of(settings, text),
    )


def windows_of(text: TextScores) -> TokenWindows:
    """The text, which the settings have asked for."""
    assert text.windows is not None
    return text.windows


def rows_of(report: prune.PruningReport) -> list[dict[str, Any]]:
    """What the report says of each parameter; the same on any number of ranks."""
    return report.to_dict()["parameters"]


def with_errors(
    rows: list[dict[str, Any]], moved: prune.ReconstructionReport | None
) -> list[dict[str, Any]]:
    """The rows, with the relative error of each layer's outputs before and after its update."""
    if moved is None:
        return rows
    errors = [
        {"error_before": entry.error_before, "error_after": entry.error_after}
        for entry in moved.parameters
    ]
    return [{**row, **error} for row, error in zip(rows, errors, strict=True)]
