"""``distprune prune --text``: scores and an update from text, one decoder layer at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distprune.cli import process
from distprune.cli.console import Meter, Terminal
from distprune.cli.language_models import (
    ModelOptions,
    backend_of,
    dtype_named,
    translated,
)
from distprune.cli.options import WritingOptions, name_of, option, resolve, same_option
from distprune.files.errors import SelectionError, TextError
from distprune.files.recipe import FileRecipe
from distprune.files.text import format_size

if TYPE_CHECKING:  # torch comes with it
    from distprune.files.planning import Plan
    from distprune.files.reports import Report
    from distprune.streaming import StreamCost

_UPDATES = {"least-squares": "least_squares", "none": "none"}


@dataclass(frozen=True)
class TextOptions:
    """The options of pruning by text."""

    PANEL = "Language models: prune by text"

    text: list[Path] | None = option(
        "Text in UTF-8, such as the model was trained on. Scores come from gradients on "
        "it (fisher, unless --score says otherwise), and kept weights move so that the outputs "
        "of their layers change least. The model may be larger than memory. Repeat it for "
        "more.",
        metavar="FILE",
    )
    windows: int = option("Windows of text, drawn at random.", 32, min=1)
    length: int = same_option(ModelOptions, "length")
    update: str | None = option(
        "What moves the kept weights (least-squares).", metavar="least-squares|none"
    )
    round_shares: list[float] | None = option(
        "Prune to this sparsity first, with an update of its own, as in --round 0.35 "
        "--round 0.5 -s 0.6: it loses less, and takes longer.",
        metavar="SHARE",
    )
    eval_text: list[Path] | None = option(
        "Held-out text: its perplexity before and after comes into the report and the "
        "card. Repeat it for more.",
        metavar="FILE",
    )
    eval_windows: int | None = option(
        "Windows that are read of each held-out text, at most (all).", min=1
    )
    batch_size: int = same_option(ModelOptions, "batch_size")
    dtype: str | None = same_option(ModelOptions, "dtype")
    device: str | None = same_option(ModelOptions, "device")
    tokenizer: Path | None = same_option(ModelOptions, "tokenizer")
    keep_scores: Path | None = option(
        "Where the scores of single weights (taylor, elementwise_fisher) stay. "
        "verify needs them, and --scores FOLDER ranks by them again.",
        metavar="FOLDER",
    )

    def check(self) -> None:
        """Check what needs no file.

        Raises:
            SelectionError: for a wrong value, or one that has no effect without --text.
        """
        changed = [f.name for f in fields(self) if getattr(self, f.name) not in (f.default, [])]
        if changed and not self.text:
            name = name_of(changed[0])
            raise SelectionError(f"{name} has no effect without --text; add it, or leave this out.")
        if self.update is not None and self.update not in _UPDATES:
            raise SelectionError(f"--update {self.update}: expected {', '.join(_UPDATES)}.")

    def of_model(self, source: Path) -> ModelOptions:
        """What these options say of the model and all texts, checked."""
        texts = [*(self.text or []), *(self.eval_text or [])]
        model = ModelOptions(
            source,
            texts,
            self.length,
            dtype=self.dtype,
            device=self.device,
            tokenizer=self.tokenizer,
        )
        model.check()
        return model

    def of_streaming(self) -> dict[str, Any]:
        """Arguments of all functions of ``streaming``."""
        return {
            "update": _UPDATES[self.update or "least-squares"],
            "batch_size": self.batch_size,
            "dtype": dtype_named(self.dtype),
        }


def with_score(name: str | None, options: dict[str, Any], given: TextOptions) -> FileRecipe:
    """The recipe; with text, it ranks by gradients what it would rank by magnitude."""
    chosen = resolve(name, options)
    if given.text and not (options.get("score") or chosen.groups) and chosen.ranks_magnitudes:
        chosen = resolve(name, options | {"score": "fisher"})
    return chosen


def cost_by_text(source: Path, recipe: FileRecipe, given: TextOptions) -> StreamCost:
    """What pruning by text takes beside what pruning takes."""
    replace(given, eval_text=None).of_model(source)
    with translated(SelectionError):
        from distprune import streaming

        return streaming.estimate(
            source,
            recipe,
            given.windows,
            given.length,
            num_evaluated=given.windows if given.eval_text else 0,
            **given.of_streaming(),
        )


def described_cost(cost: StreamCost) -> str:
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
    make_recipe: Callable[[], FileRecipe],
    given: TextOptions,
    writing: WritingOptions,
) -> tuple[Report, Plan]:
    """Prune on this rank; see ``streaming.prune_folder``."""
    model = given.of_model(source)
    recipe = make_recipe()
    kind = model.kind_of_device()
    with process.resumable(), process.process_group(writing.timeout, backend_of(kind)):
        with translated(SelectionError):
            from distprune import language_models, streaming

            tokenizer = model.load_tokenizer()
        with translated(TextError):
            read = language_models.read_windows
            windows = read(tokenizer, given.text or [], given.length).sample(given.windows)
            evaluation = None
            if given.eval_text:
                limit = given.eval_windows
                evaluation = read(tokenizer, given.eval_text, given.length, limit=limit)
        terminal.note(_told(recipe, windows.tokens.shape, given))
        with translated(SelectionError), Meter(terminal) as meter:
            made = streaming.prune_folder(
                source,
                destination,
                recipe,
                windows,
                evaluation=evaluation,
                rounds=given.round_shares or (),
                device=kind,
                progress=meter.windows,
                progress_of_files=meter,
                keep_scores=given.keep_scores,
                replace=writing.force,
                tell=terminal.note,
                **given.of_streaming(),
            )
    if terminal.is_leader and made.before is not None and made.after is not None:
        terminal.note(
            f"Perplexity of the held-out text: {made.before:.2f} before, {made.after:.2f} after."
        )
    from distprune.files.planning import plan

    # What scores were made from is not asked again.
    return made.report, plan(source, recipe, awaits_statistics=True)


def _told(recipe: FileRecipe, shape: Sequence[int], given: TextOptions) -> str:
    """What is going to be done, in a sentence."""
    update = "" if given.update == "none" else ", then least squares for the kept weights"
    score = recipe.score_text if not recipe.groups else "the scores of the recipe"
    return f"{shape[0]:,} windows of {shape[1]:,} tokens: score {score}{update}."
