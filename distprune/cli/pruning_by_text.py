"""``distprune prune --text``: scores and an update from text, one decoder layer at a time."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click
from pydantic import Field

from distprune.cli import process
from distprune.cli.console import Meter, Terminal
from distprune.cli.language_models import (
    Dtype,
    backend_of,
    dtype_named,
    kind_of_device,
    load_tokenizer,
    need_libraries,
)
from distprune.cli.options import Options, WritingOptions, option_name, recipe_of
from distprune.cli.process import translated
from distprune.files.errors import SelectionError, TextError
from distprune.files.text import format_size
from distprune.recipes import Recipe

if TYPE_CHECKING:  # torch comes with it
    from distprune.files.planning import Plan
    from distprune.files.reports import Report
    from distprune.streaming import StreamCost


class TextOptions(Options):
    """The options of pruning by text."""

    texts: tuple[Path, ...] = Field(
        default=(), description="UTF-8 text: its gradients rank weights; kept ones move."
    )
    eval_texts: tuple[Path, ...] = Field(
        default=(), description="Held-out text: perplexity before and after."
    )
    eval_windows: int | None = Field(
        default=None, ge=1, description="Windows of each held-out text (all)."
    )
    windows: int = Field(default=32, ge=1, description="Windows of text, drawn at random (32).")
    length: int = Field(default=1024, ge=2, description="Tokens of a window (1024).")
    batch_size: int = Field(default=1, ge=1, description="Windows at a time of each process (1).")
    update: Literal["least-squares", "none"] = Field(
        default="least-squares", description="What moves kept weights."
    )
    rounds: tuple[float, ...] = Field(
        default=(), description="Prune to this sparsity first. Repeat it."
    )
    keep_scores: Path | None = Field(
        default=None, description="Folder for the scores of taylor and the like."
    )
    dtype: Dtype | None = Field(
        default=None, description="dtype of the loaded weights (the model's)."
    )
    device: str | None = Field(default=None, description="cpu or cuda (an accelerator, if any).")
    tokenizer: Path | None = Field(default=None, description="Its tokenizer (that in SRC).")

    def check(self) -> None:
        """Raise SelectionError for an option that has no effect without ``--text``."""
        if self.model_fields_set and not self.texts:
            names = ", ".join(map(option_name, sorted(self.model_fields_set)))
            raise SelectionError(f"{names} have no effect without --text; add it, or leave it out.")

    def arguments(self) -> dict[str, Any]:
        """Arguments of all functions of ``streaming``."""
        return {
            "update": self.update.replace("-", "_"),
            "batch_size": self.batch_size,
            "dtype": dtype_named(self.dtype),
        }


def chosen_recipe(context: click.Context, name: str | None, by_text: TextOptions) -> Recipe:
    """The recipe of a command; with text, gradients rank the weights unless it says otherwise."""
    return recipe_of(context, name, {"score": "fisher"} if by_text.texts else {})


def cost_by_text(source: Path, recipe: Recipe, given: TextOptions) -> StreamCost:
    """What pruning by text takes beside what pruning takes."""
    need_libraries(source)
    with translated(SelectionError):
        from distprune import streaming

        return streaming.estimate(
            source,
            recipe,
            given.windows,
            given.length,
            num_evaluated=given.windows if given.eval_texts else 0,
            **given.arguments(),
        )


def cost_text(cost: StreamCost) -> str:
    """The cost in a sentence."""
    memory = ", ".join(f"{name} {format_size(size)}" for name, size in cost.memory.items())
    return (
        f"By text, each process needs at most {format_size(cost.peak)} of memory ({memory}) and "
        f"reads {format_size(cost.reads)}; for a while {format_size(cost.disk)} of the disk are "
        "needed beside the result."
    )


def prune_by_text(
    terminal: Terminal,
    source: Path,
    destination: Path,
    recipe: Recipe,
    given: TextOptions,
    writing: WritingOptions,
) -> tuple[Report, Plan]:
    """Prune on this rank; see ``streaming.prune_folder``."""
    need_libraries(source)
    kind = kind_of_device(given.device)
    with process.process_group(writing.timeout, backend_of(kind)):
        with translated(SelectionError):
            from distprune import language_models, streaming

            tokenizer = load_tokenizer(given.tokenizer or source)
        with translated(TextError):
            read = language_models.read_windows
            windows = read(tokenizer, given.texts, given.length).sample(given.windows)
            evaluation = None
            if given.eval_texts:
                limit = given.eval_windows
                evaluation = read(tokenizer, given.eval_texts, given.length, limit=limit)
        update = "" if given.update == "none" else ", then least squares for the kept weights"
        score = recipe.score_text if not recipe.groups else "the scores of the recipe"
        num, length = windows.tokens.shape
        terminal.note(f"{num:,} windows of {length:,} tokens: score {score}{update}.")
        with translated(SelectionError), Meter(terminal) as meter:
            pruned = streaming.prune_folder(
                source,
                destination,
                recipe,
                windows,
                evaluation=evaluation,
                rounds=given.rounds,
                device=kind,
                progress=meter.windows,
                progress_of_files=meter.files,
                keep_scores=given.keep_scores,
                replace=writing.force,
                tell=terminal.note,
                **given.arguments(),
            )
    if pruned.before is not None and pruned.after is not None:
        terminal.note(
            f"Perplexity of the held-out text: {pruned.before:.2f} before, {pruned.after:.2f} "
            "after."
        )
    from distprune.files.planning import plan

    # What scores were made from is not asked again.
    return pruned.report, plan(source, recipe, awaits_statistics=True)
