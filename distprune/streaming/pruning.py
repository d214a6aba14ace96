"""Prune a language model in a folder by text, one decoder layer in memory at a time.

text --> forward  --> backward --> ranking  --> update --> DST
         (hidden      (scores by   (of the      (least     (files.pruning)
          states)      factors)     stored       squares)
                                    weights)
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from distprune._common.collectives import Communicator
from distprune._common.process_groups import world
from distprune._version import __version__
from distprune.files.checkpoints.checkpoint import Checkpoint, open_checkpoint
from distprune.files.checkpoints.statistics_file import (
    read_gradient_statistics,
    read_statistics,
    write_gradient_statistics,
    write_statistics,
)
from distprune.files.disk.destination import Lock, resolve_destination
from distprune.files.errors import CheckpointError, Interrupted, SelectionError
from distprune.files.kept_values import KeptValues
from distprune.files.places import check_free, check_place, check_replaceable
from distprune.files.planning import plan, source_facts
from distprune.files.pruning import RankedMasks
from distprune.files.pruning import prune as prune_files
from distprune.files.recipe import FileRecipe
from distprune.files.reports.report import REPORT_FILE, Report, read_report
from distprune.files.scoring import are_of_gradients
from distprune.files.selecting import select_tensors
from distprune.files.team import Progress, Team
from distprune.language_models.loading import require_extra
from distprune.language_models.running import Report as ReportProgress
from distprune.language_models.running import Reporter
from distprune.language_models.text import TokenWindows
from distprune.statistics.activation import ActivationStatistics
from distprune.statistics.gradients import GradientStatistics
from distprune.streaming.cost import StreamCost, cost_of
from distprune.streaming.layers import StreamedModel
from distprune.streaming.updating import StoredLayers, prune_layer, write_tensors
from distprune.streaming.windows import WindowStream
from distprune.streaming.work import Work

Update = Literal["least_squares", "none"]
# About how long a layer takes on a window, in forwards of it.
_WEIGHTS = {"forward": 1, "backward": 3, "update": 2}


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
    recipe: FileRecipe,
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
    stop: Callable[[], bool] | None = None,
    take_over: bool = False,
    replace: bool = False,
    tell: Callable[[str], None] | None = None,
) -> PrunedFolder:
    """Prune the decoder in a Hugging Face folder by text. Collective over all ranks.

    The model may be larger than memory: one decoder layer at a time is read, run on all windows,
    and freed. Hidden states are files in a folder beside the destination. The ranks share the
    windows; each reads every layer.

    1. A forward through all layers. Scores "wanda", "stade" and "ria" get their statistics here.
    2. For score "fisher" a backward, layer by layer, which adds up squared gradients by output and
       by input: 16 bytes for each, and nothing of the size of a weight.
    3. ``files.pruning`` ranks the stored weights by these, as it does for a file of statistics.
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
        recipe: what to prune. Score "fisher" or one of activations, without ``statistics``, is
            computed from the windows; any other is taken as it is.
        windows: text from which scores and the update learn; the same on every rank.
        update: "least_squares", or "none": kept weights stay what they are.
        damping: as for ``reconstruct``.
        evaluation: held-out text; its perplexity before and after comes into the report.
        rounds: sparsities below that of the recipe, rising: the model is pruned to each of them
            first, with scores and an update of the model that the round before left. Each round
            costs as much as the whole, and for a while a copy of the model on the disk.
        batch_size: windows that a rank runs at a time.
        dtype: in which the model computes; None: that of the config. Values are stored in the dtype
            of the source.
        device: where it computes; by default the CPU.
        progress: called after every layer.
        progress_of_files, stop, take_over, replace, tell: as for ``files.pruning.prune``.

    Returns:
        The report, and what was measured.

    Raises:
        NotImplementedError: a model that is no chain of decoder layers; as ``load_sharded``.
        SelectionError: a tensor outside of the decoder layers is to be pruned.
        ValueError: a loss that is not finite; tokens that the model does not have.
        OutputError: the disk has no room for all files, which is checked before; the destination is
            taken.
        FilesError: of any other kind, as ``files.pruning.prune``. Each on every rank.

    Cost: per window a forward for the hidden states, a forward and a backward for score "fisher",
    and a forward for the update. Memory: one layer, for "fisher" with its gradients, for the update
    with its Gram matrices (4 bytes x inputs**2 for each different input) and the solver's copies of
    one matrix; or embedding and head; and one batch. Disk: tokens x width x (layers + 3) elements,
    and for the update a copy of the pruned tensors; both are removed at the end. Reads of the
    checkpoint: one for each pass, those of ``files.pruning.prune``, and one for the masks of the
    update.
    """
    require_extra()
    communicator = world()
    target = communicator.run(lambda: resolve_destination(destination))
    communicator.run(lambda: _check_rounds(recipe, rounds))
    checkpoint = communicator.run(lambda: open_checkpoint(source, follow_links=True))
    facts = _facts(checkpoint, recipe, windows, evaluation, update, damping, batch_size, dtype)
    facts |= {"rounds": list(rounds)} if rounds else {}
    text = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
    communicator.agree([("text, recipe and model", text)])
    tell = tell or (lambda text: None)
    made = communicator.run(lambda: _finished(target, text))
    if made is not None:
        tell(f"{target} is finished: this command made it before. Nothing was changed.")
        return made
    communicator.run(lambda: _check_target(checkpoint, target, replace))
    places = [target.with_name(f"{target.name}.partial-text-{n}") for n in range(len(rounds))]
    done = communicator.run(lambda: [_finished(place, text) for place in places])
    first = max((number + 1 for number, found in enumerate(done) if found), default=0)
    for number, sparsity in list(enumerate([*rounds, recipe.sparsity]))[first:]:
        if rounds:
            tell(f"Round {number + 1} of {len(rounds) + 1}: {sparsity:.0%}.")
        is_last = number == len(rounds)
        before = done[number - 1] if number else None
        once = _Once(
            source if number == 0 else places[number - 1],
            target if is_last else places[number],
            recipe if is_last else recipe.replaced(sparsity=sparsity, masks=False, card=False),
            facts | ({"round": number} if rounds else {}),
            text,
            evaluation if is_last or number == 0 else None,
            None if before is None else before.before,
        )
        made = once.run(
            windows, update, damping, batch_size, dtype, torch.device(device or "cpu"),
            progress, progress_of_files, stop, take_over, replace and is_last, tell,
        )  # fmt: skip
        done = [*done[:number], made, *done[number + 1 :]]
        if number:
            _remove(places[number - 1], communicator)
    assert made is not None
    return made


def _check_rounds(recipe: FileRecipe, rounds: Sequence[float]) -> None:
    steps = [0.0, *rounds, recipe.sparsity or 0.0]
    if rounds and (recipe.groups or steps != sorted(set(steps))):
        raise SelectionError(
            f"rounds {list(rounds)} before a sparsity of {recipe.sparsity}; expected rising ones "
            "below the sparsity of a recipe without groups, such as 0.35 and 0.5 before 0.6."
        )


def _check_target(checkpoint: Checkpoint, target: Path, replace: bool) -> None:
    check_place(checkpoint.root, target)
    if replace:
        check_replaceable(target, [file.path for file in checkpoint.all_files])
    else:
        check_free(target, is_replaceable=True)


def _remove(place: Path, communicator: Communicator) -> None:
    """Remove the result of a round, which the next one has read. Collective."""

    def remove() -> None:
        if communicator.index == 0:
            shutil.rmtree(place, ignore_errors=True)

    communicator.run(remove)


@dataclass(frozen=True)
class _Once:
    """One pruning: the only one, or that of a round.

    Attributes:
        facts: what decides the result.
        text: hash of what the whole command depends on.
        evaluation: held-out text to measure with.
        before: its perplexity under the dense model, if that is known.
    """

    source: str | Path
    target: Path
    recipe: FileRecipe
    facts: dict[str, Any]
    text: str
    evaluation: TokenWindows | None
    before: float | None

    def run(
        self,
        windows: TokenWindows,
        update: Update,
        damping: float,
        batch_size: int,
        dtype: torch.dtype | None,
        device: torch.device,
        progress: ReportProgress | None,
        progress_of_files: Callable[[Progress], None] | None,
        stop: Callable[[], bool] | None,
        take_over: bool,
        replace: bool,
        tell: Callable[[str], None],
    ) -> PrunedFolder:
        """Score, rank, update and write; see :func:`prune_folder`."""
        communicator, lock = world(), Lock(self.target)

        def begin() -> StreamedModel:
            if communicator.index == 0:
                lock.acquire(take_over)
            checkpoint = open_checkpoint(self.source, follow_links=True)
            return StreamedModel(checkpoint, dtype, device)

        try:
            with closing(communicator.run(begin)) as streamed:
                run = _Run(
                    streamed, self.recipe, windows, self.evaluation, self.before, update, damping,
                    batch_size,
                )  # fmt: skip
                num_bytes = communicator.run(run.num_bytes)
                work = Work(self.target, self.facts, num_bytes, communicator)
                if work.is_resumed:
                    tell(f"Resuming what is in {work.path}.")
                with communicator.raising_everywhere():
                    recipe, values = run.in_layers(work, communicator, self._told(), progress, stop)
        finally:
            lock.release()
        planned = communicator.run(
            lambda: plan(self.source, recipe, follow_links=True, values=values)
        )
        report = prune_files(
            planned,
            self.target,
            progress=progress_of_files,
            stop=stop,
            take_over=take_over,
            replace=replace,
            tell=tell,
            cuts=work.get("cuts"),
        )
        work.remove()
        return _result_of(report)

    def _told(self) -> dict[str, Any]:
        """What a report says of the command."""
        told: dict[str, Any] = {"text": self.text}
        if "rounds" in self.facts:
            told["rounds"] = self.facts["rounds"]
        return told


def estimate(
    source: str | Path,
    recipe: FileRecipe,
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
    checkpoint = open_checkpoint(source, follow_links=True)
    with closing(StreamedModel(checkpoint, dtype, torch.device("cpu"))) as streamed:
        windows, evaluation = (_without_text(num, length) for num in (num_windows, num_evaluated))
        return _Run(streamed, recipe, windows, evaluation, None, update, 0.0, batch_size).cost()


def _without_text(num_windows: int, length: int) -> TokenWindows:
    tokens = torch.zeros(num_windows, length, dtype=torch.int64)
    return TokenWindows(("",), tokens, tokens[:, 0], None, has_bos=False)


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


def _facts(
    checkpoint: Checkpoint,
    recipe: FileRecipe,
    windows: TokenWindows,
    evaluation: TokenWindows | None,
    update: Update,
    damping: float,
    batch_size: int,
    dtype: torch.dtype | None,
) -> dict[str, Any]:
    """What decides the result, as JSON."""
    import transformers

    texts = {"windows": windows, "evaluation": evaluation}
    return {
        **source_facts(checkpoint),
        "recipe": recipe.as_stored().as_fields(),
        **{name: w.digests() for name, w in texts.items() if w is not None},
        "update": update,
        "damping": damping,
        "batch_size": batch_size,
        "dtype": str(dtype),
        "versions": [__version__, str(torch.__version__), transformers.__version__],
    }


@dataclass
class _Run:
    """One pruning, as the arguments of :func:`prune_folder` say."""

    streamed: StreamedModel
    recipe: FileRecipe
    windows: TokenWindows
    evaluation: TokenWindows | None
    before: float | None
    update: Update
    damping: float
    batch_size: int

    def __post_init__(self) -> None:
        parts = [part for part in self.recipe.parts if part.reads_statistics]
        needs = bool(parts) and self.recipe.statistics is None
        self.collects_gradients = needs and are_of_gradients(parts)
        self.collects_activations = needs and not self.collects_gradients
        self.moves = self.update == "least_squares"
        selection = select_tensors(self.streamed.checkpoint, self.recipe)
        self.entries = [entry for entries in selection.groups for entry in entries]
        self.stored = StoredLayers(self.streamed, [entry.name for entry in self.entries])
        self.num_layers = len(self.streamed.layers)

    @property
    def passes(self) -> list[str]:
        """The passes over all layers, in their order."""
        has_update = self.moves or self.evaluation is not None
        return [
            "forward",
            *(["backward"] if self.collects_gradients else []),
            *(["update"] if has_update else []),
        ]

    def cost(self) -> StreamCost:
        """What it takes, at most."""
        return cost_of(
            self.streamed,
            self.stored.parameters,
            passes=[name for name in self.passes if name != "update" or self.moves],
            num_windows=len(self.windows),
            length=self.windows.length,
            batch_size=self.batch_size,
            num_evaluated=0 if self.evaluation is None else len(self.evaluation),
        )

    def num_bytes(self) -> int:
        """Bytes on the disk that the folder of work and the result take; checks memory, too."""
        cost = self.cost()
        cost.check(self.streamed.device)
        return cost.disk + sum(file.size for file in self.streamed.checkpoint.files)

    def in_layers(
        self,
        work: Work,
        communicator: Communicator,
        told: Mapping[str, Any],
        progress: ReportProgress | None,
        stop: Callable[[], bool] | None,
    ) -> tuple[FileRecipe, KeptValues]:
        """Everything that runs text through layers. Collective.

        Args:
            told: what the report says beside what is found here.

        Returns:
            The recipe with its statistics, and the values of kept weights.
        """
        needs_stages = self.collects_gradients or self.moves
        reads = needs_stages or self.collects_activations
        states = work.folder("states")
        dense = self._stream(states, "dense", self.windows) if reads else None
        evaluation = self.evaluation if self.before is None else None
        before = self._stream(states, "before", evaluation)
        pace = _Pace(self, work, progress, stop, communicator)
        for number in pace.layers("forward", range(self.num_layers)):
            with self.streamed.layer(number):
                if dense is not None and self.collects_activations:
                    self._collect(dense, number, work)
                for stream in (dense, before):
                    if stream is not None:
                        stream.advance(number)
            if before is not None:  # a run that is killed now needs the stage after it
                before.remove("state", number - 1)
        perplexities = {} if self.before is None else {"before": self.before}
        if before is not None:
            perplexities["before"] = self._perplexity(before, work, "before")
        if self.collects_gradients:
            assert dense is not None
            if work.get("head") is None:
                communicator.run(dense.differentiate)
                work.record("head", True)
            for number in pace.layers("backward", reversed(range(self.num_layers))):
                with self.streamed.layer(number):
                    self._differentiate(dense, number, work)
                dense.remove("gradient", number + 2)
        recipe = self._with_statistics(work, communicator)
        planned = communicator.run(
            lambda: plan(self.streamed.checkpoint.folder, recipe, follow_links=True)
        )
        after = self._stream(states, "after", self.evaluation)
        if after is not None or self.moves:
            with self._masks(planned, work, communicator, stop) as masks:
                for number in pace.layers("update", range(self.num_layers)):
                    with self.streamed.layer(number):
                        self._update(dense if self.moves else None, number, work, masks)
                        if after is not None:
                            after.advance(number)
                    if after is not None:
                        after.remove("state", number - 1)
        if after is not None:
            perplexities["after"] = self._perplexity(after, work, "after")
        tensors = [name for n in range(self.num_layers) for name in self.stored.names_of(n)]
        facts: dict[str, Any] = {
            **told,
            "update": self.update,
            "windows": list(self.windows.tokens.shape),
            "errors": work.get("errors", []),
        }
        if self.moves:
            facts["damping"] = self.damping
        if perplexities:
            facts["perplexity"] = perplexities
        folder = work.folder("values")
        return recipe, KeptValues(facts, tuple(tensors) if self.moves else (), folder)

    def _stream(self, folder: Path, name: str, windows: TokenWindows | None) -> WindowStream | None:
        if windows is None:
            return None
        return world().run(
            lambda: WindowStream(self.streamed, windows, self.batch_size, folder, name)
        )

    def _perplexity(self, stream: WindowStream, work: Work, name: str) -> float:
        found: float | None = work.get(name)
        if found is None:
            found = stream.perplexity().perplexity
            work.record(name, found)
        return found

    def _collect(self, stream: WindowStream, number: int, work: Work) -> None:
        if parameters := self.stored.parameters[number]:
            statistics = ActivationStatistics(parameters, allow_empty="*")
            stream.collect(number, statistics)
            statistics.save(_file(work, "statistics", number))

    def _differentiate(self, stream: WindowStream, number: int, work: Work) -> None:
        parameters = self.stored.parameters[number]
        for module, name in parameters:
            module.get_parameter(name).requires_grad_(True)
        statistics = GradientStatistics(parameters) if parameters else None
        stream.differentiate_layer(number, statistics)
        if statistics is not None:
            statistics.save(_file(work, "statistics", number))

    def _with_statistics(self, work: Work, communicator: Communicator) -> FileRecipe:
        """The recipe with the statistics of all layers in one file."""
        if not (self.collects_gradients or self.collects_activations):
            return self.recipe
        path = work.path / "statistics.safetensors"

        def merge() -> None:
            if communicator.index:
                return
            files = [
                _file(work, "statistics", number)
                for number, parameters in enumerate(self.stored.parameters)
                if parameters
            ]
            if self.collects_gradients:
                gradients = [read_gradient_statistics(file) for file in files]
                write_gradient_statistics(
                    path, {k: v for each in gradients for k, v in each.items()}
                )
                return
            activations = [read_statistics(file)[1] for file in files]
            write_statistics(
                path, "one_pass", {k: v for each in activations for k, v in each.items()}
            )

        if work.get("statistics") is None:
            communicator.run(merge)
            work.record("statistics", True)
        return self.recipe.replaced(statistics=str(path))

    @contextmanager
    def _masks(
        self,
        planned: Any,
        work: Work,
        communicator: Communicator,
        stop: Callable[[], bool] | None,
    ) -> Iterator[RankedMasks]:
        with ExitStack() as stack:
            masks = RankedMasks(planned, Team(communicator, stop=stop), work.get("cuts"))
            stack.callback(masks.close)
            if work.get("cuts") is None:
                work.record("cuts", masks.cuts)
            yield masks

    def _update(
        self, stream: WindowStream | None, number: int, work: Work, masks: RankedMasks
    ) -> None:
        made, errors = prune_layer(
            self.stored,
            number,
            lambda name: torch.from_numpy(masks.keep(name)),
            stream,
            self.damping,
        )

        def write() -> None:
            if made and world().index == 0:
                write_tensors(_file(work, "values", number), made, self.streamed.checkpoint)

        world().run(write)
        kept = [row for row in work.get("errors", []) if row[0] not in {e.name for e in errors}]
        rows = [[e.name, e.error_before, e.error_after] for e in errors]
        work.record("errors", kept + rows)


def _file(work: Work, kind: str, number: int) -> Path:
    return work.folder(kind) / f"{number:05}.safetensors"


class _Pace:
    """Goes through the layers of each pass, from where an earlier run was; tells how far it is."""

    def __init__(
        self,
        run: _Run,
        work: Work,
        progress: ReportProgress | None,
        stop: Callable[[], bool] | None,
        communicator: Communicator,
    ) -> None:
        self._work = work
        self._stop = stop or (lambda: False)
        self._communicator = communicator
        self._num_windows = len(run.windows)
        missing = sum(
            _WEIGHTS[name] * (run.num_layers - len(work.get(name, []))) for name in run.passes
        )
        self._reporter = Reporter("prune", missing * self._num_windows, progress)

    def layers(self, name: str, numbers: Iterable[int]) -> Iterator[int]:
        """The layers of a pass that are not done yet; one is done when the next is asked for."""
        done: list[int] = self._work.get(name, [])
        for number in numbers:
            if number in done:
                continue
            self._communicator.agree()  # an error of a rank in the layer before
            if int(self._communicator.max(torch.tensor([int(self._stop())]))):
                raise Interrupted(
                    f"stopped as asked; {self._work.path} keeps what is finished. The same command "
                    "goes on."
                )
            yield number
            done = [*done, number]
            self._work.record(name, done)
            self._reporter.add(self._num_windows * _WEIGHTS[name])
