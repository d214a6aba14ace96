"""``distprune plan`` and ``prune``: by the weights, or by text, one decoder layer at a time."""

from __future__ import annotations

import math
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pydantic import Field

from distprune.base import without_garbage_collection
from distprune.cli import console
from distprune.cli.language_models import CalibrationRunOptions, kind_of_device, ranks_with_text
from distprune.cli.options import (
    ListingOptions,
    WritingOptions,
    command,
    make_recipe_from,
    option_name,
)
from distprune.files.checkpoint import open_checkpoint
from distprune.files.disk import folder_bytes, free_bytes, partial_folders, resolve_destination
from distprune.files.errors import SelectionError, format_size, translated
from distprune.files.selecting import pattern_of
from distprune.recipes import Recipe, read_keys

if TYPE_CHECKING:
    from distprune.files.planning import Plan
    from distprune.files.reports import Report
    from distprune.streaming import StreamCost


# What a folder with a tokenizer has one of.
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


class TextOptions(CalibrationRunOptions, ListingOptions):
    """A recipe, and the options of pruning by text."""

    recipe: str | None = Field(None, description="YAML file, or the name of a shipped recipe.")
    polish: int | None = Field(
        None, ge=0, description="Steps of training at the end (40, if they fit in memory)."
    )
    rounds: tuple[float, ...] = Field((), description="Prune to this sparsity first. Repeat it.")
    update: Literal["training", "least-squares", "none"] | None = Field(
        None, description="What moves kept weights (least-squares; training if no polish fits)."
    )
    keep_scores: Path | None = Field(None, description="Folder for scores of single weights.")

    def choose(self, src: Path, keys: dict[str, Any]) -> Choice:
        """The recipe, and how the model is pruned; the same on every rank.

        Text, given or the model's own, ranks by factored Fisher unless the recipe has a score.
        Without text, a language model is pruned by its own, unless the recipe has a score.

        Args:
            src: the checkpoint.
            keys: of the recipe that options give.

        Raises:
            SelectionError: an option that has no effect without text; a wrong recipe; a language
                model that does not fit in memory, without text.
        """
        with translated(SelectionError):
            known = keys if self.recipe is None else keys | read_keys(self.recipe)
        has_score = not {"score", "scores", "groups", "schedule"}.isdisjoint(known)
        is_asked = bool(self.texts) or self.own_text is True
        if not is_asked and (has_score or self.own_text is False or not _is_language_model(src)):
            others = {*WritingOptions.model_fields, "recipe", "own_text"}
            if useless := sorted(self.model_fields_set - others):
                names = ", ".join(map(option_name, useless))
                raise SelectionError(
                    f"{names} have no effect without text; add --text or --own-text, or drop them."
                )
            return Choice(make_recipe_from(self.recipe, keys), 0, False, 0, "none")
        recipe, length = make_recipe_from(self.recipe, keys, score="fisher"), self.length_for(src)
        try:
            most = Choice(recipe, length, True, 1, self.update or "training")
            needs = self.cost(src, most, self.windows).memory
        except SelectionError as error:
            way_out = "--score magnitude prunes by the weights alone."
            raise SelectionError(f"{error} {way_out}") from error
        from distprune.language_models.polishing import STEPS
        from distprune.streaming import room_of

        room = room_of(kind_of_device(self.device))
        own_text = self.writes_own_text(src, needs["own text"], room, "--score magnitude")
        polish = STEPS * (needs["polish"] <= room) if self.polish is None else self.polish
        trains = self.polish is None and not polish and needs.get("training", math.inf) <= room
        update = self.update or ("training" if trains else "least-squares")
        return Choice(recipe, length, own_text, polish, update)

    def cost(
        self, src: Path, choice: Choice, num_windows: int, num_evaluated: int = 0
    ) -> StreamCost:
        """What pruning by text takes beside what pruning takes; see ``streaming.estimate``."""
        how: Any = self.arguments(choice) | {"own_text": choice.own_text, "polish": choice.polish}
        with translated(SelectionError):
            from distprune import streaming

            text = num_windows, choice.length
            return streaming.estimate(src, choice.recipe, *text, num_evaluated=num_evaluated, **how)

    def arguments(self, choice: Choice) -> dict[str, Any]:
        """Arguments of all functions of ``streaming``."""
        update, dtype = choice.update.replace("-", "_"), self.torch_dtype()
        return {"update": update, "batch_size": self.batch_size, "dtype": dtype}


class Choice(NamedTuple):
    """How a model is pruned: by its weights, or by text, given or written, and polished.

    Attributes:
        recipe: with its score.
        length: tokens of a window; 0: there is no text.
        own_text: whether the model writes text.
        polish: steps of the polishing.
        update: what moves kept weights.
    """

    recipe: Recipe
    length: int
    own_text: bool
    polish: int
    update: str


def _is_language_model(src: Path) -> bool:
    """Whether a checkpoint is a causal language model of transformers, with a tokenizer."""
    checkpoint = open_checkpoint(src)
    classes = checkpoint.config.get("architectures") or [""]
    files = {other.name for other in checkpoint.others}
    is_causal = str(classes[0]).endswith(("ForCausalLM", "LMHeadModel"))
    return is_causal and "model_type" in checkpoint.config and not files.isdisjoint(_TOKENIZERS)


class PruneOptions(TextOptions, WritingOptions):
    """The options of prune."""


@command("prune", PruneOptions, "SRC", "DST")
def prune(given: PruneOptions, keys: dict[str, Any], src: Path, dst: Path) -> None:
    """Write a pruned copy of a checkpoint; the same to the byte on any number of processes.

    Only the bytes of pruned elements change, to zero; DST/distprune holds masks, recipe and report.
    A language model is pruned by text: that of --text, and text that it writes itself. Gradients on
    it rank the weights, the kept ones move, and some steps of training follow. After an
    interruption the same command continues.

    \b
    distprune prune Llama-3.2-1B Llama-3.2-1B-50 -s 0.5
    distprune prune SRC DST -s 0.6 --text train.txt --eval held-out.txt
    torchrun --nproc-per-node 8 -m distprune prune SRC DST -r semi_structured_2_4
    """
    terminal = given.terminal()
    if given.discard:
        return console.discard_unfinished(terminal, dst)
    choice = given.choose(src, keys)
    if choice.length:
        report = _prune_by_text(terminal, given, choice, src, dst)
    else:
        from distprune.files import planning, pruning
        from distprune.files.team import process_group

        with process_group(given.timeout) as team, console.Meter(terminal) as meter:
            plan = team.run(lambda: planning.plan(src, choice.recipe))
            console.note_files(terminal, plan.checkpoint)
            console.show_warnings(terminal, plan)
            terminal.note(console.summary(plan))
            report = pruning.prune(
                plan, dst, progress=meter.show, replace=given.force, tell=terminal.note
            )
    for warning in report.warnings:
        terminal.note(f"Warning: {warning}")
    if given.as_json:
        terminal.json(report.model_dump() | {"not_copied": dict(report.skipped)})
    elif terminal.is_leader:
        _show_report(terminal, given, choice.recipe, report, dst)


def _show_report(
    terminal: console.Terminal, given: PruneOptions, recipe: Recipe, report: Report, dst: Path
) -> None:
    """What was pruned in all and of each group, thresholds and their ties, time and memory."""
    from distprune.base.memory import peak_rss_bytes

    if given.verbose:
        console.show_counts(terminal, report.tensors)
    num_tensors = console.counted(len(report.tensors), "tensor")
    terminal.text(
        f"Pruned {console.share_text(report.num_pruned, report.num_elements)} in {num_tensors}."
    )
    for index, (group, part) in enumerate(zip(report.groups, recipe.parts, strict=True)):
        name = f"Group {index}: " if recipe.groups else ""
        if name:
            terminal.text(f"{name}{console.share_text(group.num_pruned, group.num_elements)}.")
        if group.threshold is not None:
            is_magnitude = part.score == "magnitude" and part.divisor is None
            what = "magnitude" if is_magnitude else "score"
            terminal.text(
                f"{name}Largest pruned {what}: {group.threshold:.6g}"
                f"{part.by_divisor('times the')}; {group.num_ties_pruned or 0:,} of "
                f"{group.num_ties or 0:,} elements of this {what} were pruned."
            )
    peak = max(*report.run["peak_rss_bytes"], peak_rss_bytes())  # after the last file, too
    terminal.text(f"{dst}: {console.time_text(report.run)}, peak memory {format_size(peak)}.")


def _prune_by_text(
    terminal: console.Terminal, given: PruneOptions, choice: Choice, src: Path, dst: Path
) -> Report:
    """Prune by text; see ``streaming.prune_folder``."""
    recipe = choice.recipe
    with ranks_with_text(given, src, given.timeout, terminal) as (kind, tokenizer, read, meter):
        from distprune import streaming

        (windows, evaluation), own_text = given.read(read), None
        if choice.own_text:
            own_text = streaming.OwnText(tokenizer, given.windows, choice.length)
        terminal.note(_method(given, choice))
        with translated(SelectionError):
            pruned = streaming.prune_folder(
                src,
                dst,
                recipe,
                windows,
                own_text=own_text,
                polish=choice.polish,
                evaluation=evaluation,
                rounds=given.rounds,
                device=kind,
                progress=meter.show,
                keep_scores=given.keep_scores,
                replace=given.force,
                tell=terminal.note,
                **given.arguments(choice),
            )
    if pruned.before is not None and pruned.after is not None:
        terminal.note(
            f"Perplexity of the held-out text: {pruned.before:.2f} before, {pruned.after:.2f} "
            "after."
        )
    return pruned.report


def _method(given: TextOptions, choice: Choice) -> str:
    """What prunes a model by text, in a sentence."""
    sources = [*map(str, given.texts), *["text that the model writes"] * choice.own_text]
    recipe = choice.recipe
    steps = ["the scores of the recipe" if recipe.groups else f"score {recipe.score_text}"]
    steps += ["least squares for the kept weights"] * (choice.update != "none")
    steps += ["training of each layer"] * (choice.update == "training")
    steps += [f"{choice.polish} steps of polishing"] * bool(choice.polish)
    size = f"{given.windows:,} windows of {choice.length:,} tokens"
    return f"{size} of each of {', '.join(sources)}: {', then '.join(steps)}."


@command("plan", TextOptions, "SRC", "[DST]")
@without_garbage_collection()
def plan(given: TextOptions, keys: dict[str, Any], src: Path, dst: Path | None) -> None:
    """Show what would be pruned, what would not and why, and the disk space that is needed.

    Reads headers alone; writes nothing. Without a sparsity, a pattern or a recipe, it shows the
    default selection. Names that differ only in numbers share a line; -v lists every tensor. The
    exit code is 1 if there is not enough space at DST.

    \b
    distprune plan Llama-3.2-1B Llama-3.2-1B-50 -s 0.5
    distprune plan Llama-3.2-1B -r semi_structured_2_4 --exclude "*.up_proj.*"
    distprune plan Llama-3-70B -s 0.6 --text train.txt --length 2048
    """
    from distprune.files.planning import plan as make_plan

    has_amount = given.recipe is not None or not {"sparsity", "pattern"}.isdisjoint(keys)
    choice = given.choose(src, keys if has_amount else keys | {"sparsity": 0.0})
    recipe = choice.recipe
    by_text = None
    if choice.length:
        num_windows = given.windows * (len(given.texts) + choice.own_text)
        num_evaluated = given.windows if given.eval_texts else 0
        by_text = given.cost(src, choice, num_windows, num_evaluated)
    awaits = by_text is not None and recipe.statistics is None
    plan = make_plan(src, recipe, awaits_statistics=awaits)
    cost = estimate(plan, dst, 0 if by_text is None else by_text.disk)
    fits = cost.get("missing_bytes", 0) <= cost.get("free_bytes", 0)
    terminal = given.terminal()
    console.note_files(terminal, plan.checkpoint)
    console.show_warnings(terminal, plan)
    values = _as_values(plan) | {"cost": cost}
    if by_text is not None:
        values["cost_by_text"] = asdict(by_text)
    if given.as_json:
        terminal.json(values)
    else:
        _show_tensors(terminal, values["tensors"], given.verbose, has_amount)
        for number, group in enumerate(plan.groups if len(plan.groups) > 1 else ()):
            share = console.share_text(group.num_to_prune, group.num_elements)
            how = console.ranking_text(group.recipe)
            terminal.text(f"Group {number}: prunes {share}, {how}.")
        terminal.text(
            console.summary(plan)
            if has_amount
            else f"Selects {plan.num_elements:,} elements in {len(plan.tensors):,} of "
            f"{console.counted(len(plan.verdicts), 'tensor')}. No sparsity is given: --sparsity, "
            "--pattern or --recipe says how many of them are pruned."
        )
        if by_text is not None:
            memory = ", ".join(f"{k} {format_size(size)}" for k, size in by_text.memory.items())
            terminal.text(_method(given, choice))
            terminal.text(
                f"By text, each process needs at most {format_size(by_text.peak)} of memory "
                f"({memory}) and reads {format_size(by_text.reads)}; for a while "
                f"{format_size(by_text.disk)} of the disk are needed beside the result."
            )
        sizes = {name: format_size(size) for name, size in cost.items()}
        terminal.text(f"Pruning reads {sizes['read_bytes']} and writes {sizes['write_bytes']}.")
        if dst is not None:
            terminal.text(
                f"{'' if fits else 'There is not enough space: '}{sizes['missing_bytes']} are "
                f"needed and {sizes['free_bytes']} are free at {dst}."
            )
    if not fits:
        sys.exit(1)


def _as_values(plan: Plan) -> dict[str, Any]:
    """A plan as plain values, for JSON."""
    planned = {tensor.entry.name: tensor for tensor in plan.tensors}
    tensors = []
    for entry, group, reason in plan.verdicts:
        known: int | None = 0
        if tensor := planned.get(entry.name):
            known = tensor.lowest if tensor.lowest == tensor.highest else None
            known = known if tensor.num_to_prune is None else tensor.num_to_prune
        place = {key: getattr(entry, key) for key in ("name", "file", "dtype")}
        facts = {"is_pruned": group is not None, "reason": reason, "group": group}
        tensors.append({**place, "shape": list(entry.shape), **facts, "num_to_prune": known})
    return {
        "source": plan.checkpoint.folder,
        "recipe": plan.recipe.as_values(),
        "digest": plan.digest,
        "warnings": list(plan.warnings),
        "num_elements": plan.num_elements,
        "num_to_prune": plan.num_to_prune,
        "tensors": tensors,
        "not_copied": dict(plan.checkpoint.skipped),
        "copied": [file.name for file in plan.copied],
    }


def _show_tensors(
    terminal: console.Terminal, tensors: list[dict[str, Any]], one_by_one: bool, has_amount: bool
) -> None:
    """A table in which tensors share a line if their names differ only in numbers."""
    lines: dict[tuple[Any, ...], list[int | None]] = {}
    for each in tensors:
        name = each["name"] if one_by_one else pattern_of(each["name"])
        key = (name, each["dtype"], tuple(each["shape"]), each["reason"], each["group"])
        lines.setdefault(key, []).append(each["num_to_prune"])
    has_groups = any(each["group"] for each in tensors)
    rows = []
    for (name, dtype, shape, reason, group), numbers in lines.items():
        action = f"keep: {reason}"
        if not reason:
            known = [number for number in numbers if number is not None]
            is_known = has_amount and len(known) == len(numbers)
            action = f"prune {sum(known):,}" if is_known else "prune"
            action += f", group {group}" if has_groups else ""
        elements = len(numbers) * math.prod(shape)
        rows.append((name, len(numbers), dtype, console.shape_text(shape), elements, action))
    columns = ("tensor", "number", "dtype", "shape", "elements", "plan")
    terminal.table(columns, rows, right=("number", "elements"))
    terminal.text()


def estimate(plan: Plan, destination: Path | None, other_bytes: int = 0) -> dict[str, int]:
    """Bytes that a plan reads and writes, of which those of masks and report are estimated.

    Args:
        other_bytes: that something else needs at the destination for a while.

    Returns:
        With a destination, also ``missing_bytes``, without those that an unfinished result has, and
        ``free_bytes``.
    """
    from distprune.files.planning import bytes_to_count

    size = plan.checkpoint.num_bytes + sum(file.size for file in plan.checkpoint.others)
    masks = sum(-(-tensor.entry.numel // 8) for tensor in plan.tensors)
    report = 2 * sum(len(entry.name) + 200 for entry, *_ in plan.verdicts)
    writes = size + masks + report
    cost = {"read_bytes": size + bytes_to_count(plan), "write_bytes": writes}
    if destination is not None:
        path = resolve_destination(destination, plan.checkpoint.root)
        num_written = sum(map(folder_bytes, partial_folders(path)))
        cost["missing_bytes"] = max(writes + other_bytes - num_written, 0)
        cost["free_bytes"] = free_bytes(path.parent)
    return cost
