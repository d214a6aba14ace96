"""Prune a language model in a folder by text, one decoder layer in memory at a time.

text --> forward  --> backward --> ranking  --> update --> DST
         (hidden      (scores by   (of the      (least     (files.pruning)
          states)      factors)     stored       squares)
                                    weights)
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from distprune.files.checkpoints.checkpoint import Checkpoint, open_checkpoint
from distprune.files.errors import CheckpointError, SelectionError
from distprune.files.output import check_place, check_taken, locked, resolve_destination
from distprune.files.planning import STATISTICS_FILE, plan
from distprune.files.pruning import prune as prune_files
from distprune.files.reports import REPORT_FILE, Report, read_report
from distprune.files.scoring import check_scores
from distprune.files.team import Progress
from distprune.language_models.loading import require_extra
from distprune.language_models.running import Report as ReportProgress
from distprune.language_models.text import TokenWindows
from distprune.ranks.collectives import Communicator
from distprune.ranks.process_groups import world
from distprune.recipes import Recipe
from distprune.recipes.recipe import ELEMENTWISE
from distprune.streaming.cost import StreamCost, cost_of
from distprune.streaming.layers import StoredLayers, StreamedModel
from distprune.streaming.passes import Passes
from distprune.streaming.settings import Settings, Update
from distprune.streaming.work import Work


@dataclass(frozen=True)
class PrunedFolder:
    """What :func:`prune_folder` has done; the same on every rank.

    Attributes:
        report: of the pruning.
        before, after: the perplexity of the evaluation text; None: there was none.
        errors: by parameter, the relative error of its layer's outputs before and after the
            update.
    """

    report: Report
    before: float | None
    after: float | None
    errors: Mapping[str, tuple[float, float]]


def prune_folder(
    source: str | Path,
    destination: str | Path,
    recipe: Recipe,
    windows: TokenWindows,
    *,
    update: Update = "least_squares",
    damping: float = 0.01,
    evaluation: TokenWindows | None = None,
    rounds: Sequence[float] = (),
    batch_size: int = 1,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    progress: ReportProgress | None = None,
    progress_of_files: Callable[[Progress], None] | None = None,
    keep_scores: str | Path | None = None,
    replace: bool = False,
    tell: Callable[[str], None] | None = None,
) -> PrunedFolder:
    """Prune the decoder in a Hugging Face folder by text. Collective over all ranks.

    The model may be larger than memory: one decoder layer at a time is read, run on all windows,
    and freed. Hidden states are files in a folder beside the destination. The ranks share the
    windows, and each reads every layer.

    1. A forward through all layers. Scores "wanda", "stade" and "ria" get their statistics here.
    2. For scores of gradients a backward, layer by layer. For "fisher" it adds up squared gradients
       by output and by input: 16 bytes for each, and nothing of the size of a weight. For "taylor"
       and "elementwise_fisher" it writes the score of each weight to a file.
    3. ``files.pruning`` ranks the stored weights by these, as it does for a file of statistics or a
       folder of scores.
    4. For each layer: the Gram matrices of the inputs that it has in the dense model, and least
       squares for its kept weights (``distprune.reconstruct``).
    5. ``files.pruning`` writes the destination: what it writes without text, but for the kept
       values of pruned tensors.

    A run that was killed goes on at the layer where it was, and ends with the same bytes, on the
    same number of ranks.

    Args:
        source: a folder with config.json and safetensors files, or the name of a model in the
            local Hugging Face cache.
        destination: a free name, in a folder that all ranks see.
        recipe: what to prune. Score "fisher" or one of activations, without ``statistics``, and
            "taylor" and "elementwise_fisher", without ``scores``, are computed from the windows;
            any other is taken as it is.
        windows: text from which scores and the update learn; the same on every rank.
        update: "least_squares", or "none": kept weights stay what they are.
        damping: as for ``reconstruct``.
        evaluation: held-out text; its perplexity before and after comes into the report.
        rounds: sparsities below that of the recipe, rising: the model is pruned to each of them
            first, with scores and an update of the model that the round before left. For "fisher"
            the sums of gradients stay those of the dense model: what is pruned has no gradient, so
            that a row which lost much would seem to matter little. Else each round costs as much as
            the whole; and for a while a copy of the model on the disk.
        batch_size: windows that a rank runs at a time.
        dtype: in which the model computes; None: that of the config. Values are stored in the dtype
            of the source.
        device: where it computes; by default the CPU.
        progress: called after every layer.
        progress_of_files, replace, tell: as for ``files.pruning.prune``.
        keep_scores: a free name for a folder, which gets the scores of single weights and stays:
            ``verify`` needs them, and other recipes can rank by them.

    Returns:
        The report, and what was measured.

    Raises:
        NotImplementedError: a model that is no chain of decoder layers; as ``load_sharded``.
        SelectionError: a tensor outside of the decoder layers is to be pruned; nothing says where
            given scores are.
        ValueError: a loss that is not finite; tokens that the model does not have.
        OutputError: the disk has no room for all files, which is checked before; the destination is
            taken.
        FilesError: of any other kind, as ``files.pruning.prune``. Each on every rank.

    Cost: per window a forward for the hidden states, a forward and a backward for scores of
    gradients, and a forward for the update. Memory: one layer, for scores of gradients with these
    (and 12 bytes for each weight that has a score of its own), for the update with its Gram
    matrices (4 bytes x inputs**2 for each different input) and the solver's copies of one matrix;
    or embedding and head; and one batch. Disk: tokens x width x (layers + 3) elements, for the
    update a copy of the pruned tensors, and 4 bytes for each weight that has a
    score of its own; all are removed at the end, unless scores are kept. Reads of the
    checkpoint: one for each pass, those of ``files.pruning.prune``, and one for the masks of the
    update.
    """
    require_extra()
    settings = Settings(
        recipe=recipe,
        windows=windows,
        evaluation=evaluation,
        update=update,
        damping=damping,
        batch_size=batch_size,
        dtype=dtype,
        device=torch.device(device or "cpu"),
        progress=progress,
        progress_of_files=progress_of_files,
        replace=replace,
        keep_scores=None if keep_scores is None else Path(keep_scores).absolute(),
        tell=tell or (lambda text: None),
    )
    communicator = world()
    target = communicator.run(lambda: resolve_destination(destination))
    communicator.run(lambda: _check_request(settings, rounds))
    checkpoint = communicator.run(lambda: open_checkpoint(source))
    facts = settings.facts(checkpoint) | ({"rounds": list(rounds)} if rounds else {})
    text = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
    communicator.agree([("text, recipe and model", text)])
    made = communicator.run(lambda: _finished(target, text))
    if made is not None:
        settings.tell(f"{target} is finished: this command made it before. Nothing was changed.")
        return made
    communicator.run(lambda: _check_target(checkpoint, target, replace))
    places = [target.with_name(f"{target.name}.partial-text-{n}") for n in range(len(rounds))]
    done = communicator.run(lambda: [_finished(place, text) for place in places])
    first = max((number + 1 for number, found in enumerate(done) if found), default=0)
    for number, sparsity in list(enumerate([*rounds, recipe.sparsity]))[first:]:
        is_last = number == len(rounds)
        of_round = settings
        if not is_last:
            step = recipe.model_copy(update={"sparsity": sparsity, "masks": False, "card": False})
            held_out = None if number else evaluation
            of_round = dataclasses.replace(
                settings, recipe=step, evaluation=held_out, keep_scores=None, replace=False
            )
        if number and settings.collects_gradients:
            dense = str(places[number - 1] / STATISTICS_FILE)
            of_round = dataclasses.replace(
                of_round, recipe=of_round.recipe.model_copy(update={"statistics": dense})
            )
        if rounds:
            settings.tell(f"Round {number + 1} of {len(rounds) + 1}: {sparsity:.0%}.")
        before = done[number - 1] if number else None
        made = _pruned_once(
            source if number == 0 else places[number - 1],
            target if is_last else places[number],
            of_round,
            facts | ({"round": number} if rounds else {}),
            text,
            None if before is None else before.before,
        )
        done = [*done[:number], made, *done[number + 1 :]]
        if number:
            _remove(places[number - 1], communicator)
    assert made is not None
    return made


def _check_request(settings: Settings, rounds: Sequence[float]) -> None:
    """Check what would be found out after hours else."""
    recipe = settings.recipe
    check_scores(recipe, made=settings.elementwise)
    if settings.keep_scores is not None and not settings.elementwise:
        raise SelectionError(
            f"scores are to be kept in {settings.keep_scores}, and single weights get none; "
            f"expected score {' or '.join(ELEMENTWISE)}, without a folder of scores."
        )
    steps = [0.0, *rounds, recipe.sparsity or 0.0]
    if rounds and (recipe.groups or steps != sorted(set(steps))):
        raise SelectionError(
            f"rounds {list(rounds)} before a sparsity of {recipe.sparsity}; expected rising ones "
            "below the sparsity of a recipe without groups, such as 0.35 and 0.5 before 0.6."
        )


def _check_target(checkpoint: Checkpoint, target: Path, replace: bool) -> None:
    check_place(checkpoint.root, target)
    inputs = [file.path for file in checkpoint.all_files]
    check_taken(target, replaces=replace, inputs=inputs)


def _remove(place: Path, communicator: Communicator) -> None:
    """Remove the result of a round, which the next one has read. Collective."""
    is_first = communicator.index == 0
    communicator.run(lambda: shutil.rmtree(place, ignore_errors=True) if is_first else None)


def _pruned_once(
    source: str | Path,
    target: Path,
    settings: Settings,
    facts: dict[str, Any],
    text: str,
    before: float | None,
) -> PrunedFolder:
    """One pruning: the only one, or that of a round. Collective.

    Args:
        facts: what decides the result.
        text: hash of what the whole command depends on.
        before: the perplexity of the evaluation text under the dense model, if that is known.
    """
    communicator, lock = world(), contextlib.ExitStack()

    def begin() -> StreamedModel:
        if communicator.index == 0:
            lock.enter_context(locked(target))
        return StreamedModel(source, settings.dtype, settings.device)

    told = {"text": text} | {name: facts[name] for name in ("rounds",) if name in facts}
    try:
        streamed = communicator.run(begin)
        stored = communicator.run(lambda: StoredLayers(streamed, settings.recipe))
        cost = communicator.run(lambda: cost_of(streamed, stored, settings))
        communicator.run(lambda: cost.check(settings.device))
        num_bytes = cost.disk + sum(file.size for file in streamed.checkpoint.files)
        work = Work(target, facts, num_bytes, communicator, settings.keep_scores)
        if work.is_resumed:
            settings.tell(f"Resuming what is in {work.path}.")
        with communicator.raising_everywhere():
            recipe, values = Passes(streamed, stored, settings, work, before).run(told)
    finally:
        lock.close()
    planned = communicator.run(lambda: plan(source, recipe, values=values))
    report = prune_files(
        planned,
        target,
        progress=settings.progress_of_files,
        replace=settings.replace,
        tell=settings.tell,
        cuts=work.get("cuts"),
    )
    work.remove()
    return _result_of(report)


def estimate(
    source: str | Path,
    recipe: Recipe,
    num_windows: int,
    length: int,
    *,
    update: Update = "least_squares",
    num_evaluated: int = 0,
    batch_size: int = 1,
    dtype: torch.dtype | None = None,
) -> StreamCost:
    """What :func:`prune_folder` would need of each process, and of the disk. Local.

    Args:
        source, recipe, update, batch_size, dtype: as for :func:`prune_folder`.
        num_windows, length: of the text.
        num_evaluated: windows of held-out text.

    Raises: as :func:`prune_folder`, for what the headers show.

    Cost: builds the model without weights; some seconds.
    """
    require_extra()
    windows, evaluation = (
        TokenWindows.without_text(torch.zeros(number, length, dtype=torch.int64))
        for number in (num_windows, num_evaluated)
    )
    settings = Settings(
        recipe,
        windows,
        evaluation if num_evaluated else None,
        update=update,
        batch_size=batch_size,
        dtype=dtype,
    )
    streamed = StreamedModel(source, dtype, settings.device)
    return cost_of(streamed, StoredLayers(streamed, recipe), settings)


def _finished(target: Path, text: str) -> PrunedFolder | None:
    """The destination, if this command has made it."""
    if not (target / REPORT_FILE).exists():
        return None
    try:
        report = read_report(target)
    except CheckpointError:
        return None
    made = (report.inputs or {}).get("update", {}).get("text")
    return _result_of(report) if made == text else None


def _result_of(report: Report) -> PrunedFolder:
    facts = (report.inputs or {})["update"]
    measured = facts.get("perplexity", {})
    errors = {name: (before, after) for name, before, after in facts["errors"]}
    return PrunedFolder(report, measured.get("before"), measured.get("after"), errors)
