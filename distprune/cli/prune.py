"""``distprune prune``: by the weights alone, or by text, one decoder layer at a time."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from distprune.cli import console
from distprune.cli.language_models import TextRunOptions, on_ranks_with_text
from distprune.cli.options import (
    RecipeOptions,
    WritingOptions,
    command,
    make_recipe_from,
    option_name,
)
from distprune.cli.process import on_every_rank, process_group, translated
from distprune.files.errors import SelectionError, TextError
from distprune.files.text import format_size
from distprune.recipes import GroupRecipe, Recipe

if TYPE_CHECKING:  # torch comes with it
    from distprune.files.reports import GroupReport, Report


class TextOptions(TextRunOptions, RecipeOptions):
    """A recipe, and the options of pruning by text."""

    texts: tuple[Path, ...] = Field((), description="UTF-8 text whose gradients rank weights.")
    eval_texts: tuple[Path, ...] = Field((), description="Held-out text, for its perplexity.")
    eval_windows: int | None = Field(None, ge=1, description="Windows of each held-out text (all).")
    windows: int = Field(32, ge=1, description="Windows of text, drawn at random (32).")
    update: Literal["least-squares", "none"] = Field(
        "least-squares", description="What moves kept weights (least-squares)."
    )
    rounds: tuple[float, ...] = Field((), description="Prune to this sparsity first. Repeat it.")
    keep_scores: Path | None = Field(None, description="Folder for scores of single weights.")

    def recipe_with(self, keys: dict[str, Any]) -> Recipe:
        """The recipe; with text, gradients rank the weights unless it says otherwise.

        Args:
            keys: those that options give.

        Raises:
            SelectionError: an option that has no effect without ``--text``; a wrong recipe.
        """
        others = {*RecipeOptions.model_fields, *WritingOptions.model_fields}
        useless = sorted(self.model_fields_set - others)
        if useless and not self.texts:
            names = ", ".join(map(option_name, useless))
            raise SelectionError(f"{names} have no effect without --text; add it, or leave it out.")
        defaults = {"score": "fisher"} if self.texts else {}
        return make_recipe_from(self.recipe, keys, **defaults)

    def arguments(self) -> dict[str, Any]:
        """Arguments of all functions of ``streaming``."""
        update, dtype = self.update.replace("-", "_"), self.torch_dtype()
        return {"update": update, "batch_size": self.batch_size, "dtype": dtype}


class PruneOptions(TextOptions, WritingOptions):
    """The options of prune."""


@command("prune", PruneOptions, "SRC", "DST")
def prune(given: PruneOptions, keys: dict[str, Any], src: Path, dst: Path) -> None:
    """Write a pruned copy of a checkpoint; the same to the byte on any number of processes.

    Only the bytes of pruned elements change, to zero; DST/distprune holds masks, recipe and report.
    With --text, gradients on the text rank the weights of a language model, and its kept weights
    move. After an interruption the same command continues.

    \b
    distprune prune Llama-3.2-1B Llama-3.2-1B-50 -s 0.5
    distprune prune SRC DST -s 0.6 --text train.txt --eval held-out.txt
    torchrun --nproc-per-node 8 -m distprune prune SRC DST -r semi_structured_2_4
    """
    terminal = given.terminal()
    if given.discard:
        console.discard_unfinished(terminal, dst)
        return
    recipe = given.recipe_with(keys)
    run = _prune_by_text if given.texts else _prune_by_weights
    report = run(terminal, given, recipe, src, dst)
    if not terminal.is_leader:
        return
    for warning in report.warnings:
        terminal.note(f"Warning: {warning}")
    if given.as_json:
        terminal.json(report.model_dump() | {"not_copied": dict(report.skipped)})
        return
    if given.verbose:
        console.show_counts(
            terminal, [(t.name, t.num_elements, t.num_pruned) for t in report.tensors]
        )
    num_tensors = console.counted(len(report.tensors), "tensor")
    terminal.text(
        f"Pruned {console.share_text(report.num_pruned, report.num_elements)} in {num_tensors}."
    )
    for index, (group, part) in enumerate(zip(report.groups, recipe.parts, strict=True)):
        name = f"Group {index}: " if recipe.groups else ""
        _show_group(terminal, group, part, name)
    from distprune.base.memory import peak_rss_bytes

    peak = max(*report.run["peak_rss_bytes"], peak_rss_bytes())  # after the last file, too
    terminal.text(
        f"{dst}: {console.time_text(report.run['seconds'], report.run['num_ranks'])}, "
        f"peak memory {format_size(peak)}."
    )


def _show_group(
    terminal: console.Terminal, group: GroupReport, recipe: GroupRecipe, name: str
) -> None:
    """The sparsity of a group, if there are several; the threshold and its ties, if it has one."""
    if name:
        terminal.text(f"{name}{console.share_text(group.num_pruned, group.num_elements)}.")
    if group.threshold is not None:
        is_magnitude = recipe.ranks_magnitudes and recipe.divisor is None
        what = "magnitude" if is_magnitude else "score"
        terminal.text(
            f"{name}Largest pruned {what}: {group.threshold:.6g}{recipe.by_divisor('times the')}; "
            f"{group.num_ties_pruned or 0:,} of {group.num_ties or 0:,} elements of this {what} "
            "were pruned."
        )


def _prune_by_weights(
    terminal: console.Terminal, given: PruneOptions, recipe: Recipe, src: Path, dst: Path
) -> Report:
    """Prune by the weights, and files of scores or statistics."""

    from distprune.files import planning, pruning

    with process_group(given.timeout), console.Meter(terminal) as meter:
        plan = on_every_rank(lambda: planning.plan(src, recipe))
        console.note_files(terminal, plan.checkpoint)
        console.show_warnings(terminal, plan)
        terminal.note(console.summary(plan))
        return pruning.prune(
            plan, dst, progress=meter.files, replace=given.force, tell=terminal.note
        )


def _prune_by_text(
    terminal: console.Terminal, given: PruneOptions, recipe: Recipe, src: Path, dst: Path
) -> Report:
    """Prune by text; see ``streaming.prune_folder``."""
    with on_ranks_with_text(given, src, given.timeout) as (kind, _, read):
        from distprune import streaming

        with translated(TextError):
            windows = read(given.texts, None).sample(given.windows)
        evaluation = None
        if given.eval_texts:
            evaluation = read(given.eval_texts, given.eval_windows)
        score = "the scores of the recipe" if recipe.groups else f"score {recipe.score_text}"
        update = "" if given.update == "none" else ", then least squares for the kept weights"
        terminal.note(f"{len(windows):,} windows of {windows.length:,} tokens: {score}{update}.")
        with translated(SelectionError), console.Meter(terminal) as meter:
            pruned = streaming.prune_folder(
                src,
                dst,
                recipe,
                windows,
                evaluation=evaluation,
                rounds=given.rounds,
                device=kind,
                progress=meter.windows,
                progress_of_files=meter.files,
                keep_scores=given.keep_scores,
                replace=given.force,
                tell=terminal.note,
                **given.arguments(),
            )
    if pruned.before is not None and pruned.after is not None:
        terminal.note(
            f"Perplexity of the held-out text: {pruned.before:.2f} before, {pruned.after:.2f} "
            "after."
        )
    return pruned.report
