"""The passes of a pruning by text over the layers of a model."""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from distprune._version import __version__
from distprune.api.local import custom_from_mask, remove
from distprune.base.naming import NamedParameter
from distprune.files.checkpoint import INDEX_SUFFIX, Checkpoint, TensorEntry, read_header
from distprune.files.disk import new_file, write_atomically
from distprune.files.planning import KeptValues, are_of_gradients, plan, source_facts
from distprune.files.ranked import RankedTensors
from distprune.files.statistics_file import StoredStatistics, read_statistics, write_statistics
from distprune.files.team import Team
from distprune.language_models.calibrating import elementwise_criterion
from distprune.language_models.losses import BatchLosses
from distprune.language_models.polishing import BATCH, polishing_steps
from distprune.language_models.running import Report, check_finite, reporter
from distprune.language_models.text import TokenWindows
from distprune.recipes import ELEMENTWISE, Recipe
from distprune.reconstruction import ReconstructedParameter, reconstruct
from distprune.statistics.activation import ActivationStatistics
from distprune.statistics.gradients import GradientStatistics
from distprune.statistics.gram import GramMatrices
from distprune.streaming.layers import StoredLayers, StreamedModel
from distprune.streaming.windows import WindowStream
from distprune.streaming.work import Work

Update = Literal["training", "least_squares", "none"]
# How often each window trains a layer, and the learning rate; see ``polish``.
_EPOCHS, _RATE = 4, 2e-3
# About how long passes take for a layer and a window, in forwards of it; others take one.
_WEIGHTS = {"backward": 3, "training": 3 + 3 * _EPOCHS, "least_squares": 2}
# Between two states of the polishing that are written, from which a killed run goes on.
_SECONDS_BETWEEN_SAVES = 300


@dataclass(frozen=True)
class TextSettings:
    """Arguments of ``prune_folder`` and ``shrink_folder`` that decide the result; see there."""

    windows: TokenWindows
    evaluation: TokenWindows | None
    update: Update
    damping: float
    batch_size: int
    dtype: torch.dtype | None
    device: torch.device
    progress: Report | None = None

    @property
    def moves(self) -> bool:
        """Whether kept weights move."""
        return self.update != "none"

    def facts(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """What decides the result, as JSON."""
        import transformers

        texts = {"windows": self.windows, "evaluation": self.evaluation}
        return {
            **source_facts(checkpoint),
            **{name: w.digests() for name, w in texts.items() if w is not None},
            "update": self.update,
            "damping": self.damping,
            "batch_size": self.batch_size,
            "dtype": str(self.dtype),
            "versions": [__version__, str(torch.__version__), transformers.__version__],
        }


@dataclass(frozen=True, kw_only=True)
class Settings(TextSettings):
    """The arguments of ``prune_folder`` that decide the result of a round; see there."""

    recipe: Recipe
    polish: int = 0

    @property
    def collects(self) -> Literal["gradients", "activations"] | None:
        """The statistics that scores or budgets need, if they are made from the windows."""
        measured = [part for part in self.recipe.parts if part.reads_statistics]
        if not measured or self.recipe.statistics is not None:
            return None
        return "gradients" if are_of_gradients(measured) else "activations"

    @property
    def elementwise(self) -> list[str]:
        """The scores of single weights that are made of gradients on the windows."""
        wanted = {part.score for part in self.recipe.parts if self.recipe.scores is None}
        return [score for score in ELEMENTWISE if score in wanted]

    @property
    def passes(self) -> list[str]:
        """The passes over all layers, in their order."""
        has_backward = self.collects == "gradients" or bool(self.elementwise)
        has_update = self.moves or self.evaluation is not None or self.polish > 0
        needed = {"forward": True, "backward": has_backward, self.update: has_update}
        needed["after"] = self.polish > 0 and self.evaluation is not None
        return [name for name, is_needed in needed.items() if is_needed]

    def facts(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """What decides the result, as JSON."""
        own = {"recipe": self.recipe.as_stored().as_values(), "polish": self.polish}
        return super().facts(checkpoint) | own


@dataclass(frozen=True)
class LayerPasses:
    """Passes over the layers of a model, of which a folder records what is done.

    Args:
        streamed: the model.
        settings: what runs.
        work: the folder.
    """

    streamed: StreamedModel
    settings: TextSettings
    work: Work

    def _finished(self, phase: str, passes: Mapping[str, Sequence[int]]) -> Callable[[int], None]:
        """What is told of progress that passes make; the numbers of their layers, by name."""
        todo = {
            name: len(numbers) - len(self.work.get(name, [])) for name, numbers in passes.items()
        }
        total = sum(_WEIGHTS.get(name, 1) * number for name, number in todo.items())
        windows, progress = len(self.settings.windows), self.settings.progress
        return reporter(phase, total * windows, progress, "forwards of a layer")

    def _layers(
        self, finished: Callable[[int], None], name: str, numbers: Iterable[int]
    ) -> Iterator[int]:
        """The layers of a pass that are not done, each in memory until the next is asked for."""
        done: list[int] = self.work.get(name, [])
        for number in numbers:
            if number in done:
                continue
            self.work.communicator.agree()  # an error of a rank in the layer before
            with self.streamed.layer(number):
                yield number
            done = [*done, number]
            self.work.record(name, done)
            finished(len(self.settings.windows) * _WEIGHTS.get(name, 1))

    def _stream(self, name: str, windows: TokenWindows, batch_size: int = 0) -> WindowStream:
        size, place = batch_size or self.settings.batch_size, self.work.folder("states") / name
        make = partial(WindowStream, self.streamed, windows, size, place, self.work.forget)
        return self.work.communicator.run(make)


@dataclass(frozen=True)
class Passes(LayerPasses):
    """Everything that runs text through the layers of a model, for one pruning.

    Args:
        streamed, settings, work: as for LayerPasses.
        stored: the layers, as they lie in the checkpoint.
        before: the perplexity of the evaluation text under the dense model, if that is known.
        teacher: the dense model, of which this is a round; None: it is the model itself.
    """

    settings: Settings
    stored: StoredLayers
    before: float | None
    teacher: StreamedModel | None = None

    def run(self, told: Mapping[str, Any]) -> tuple[Recipe, KeptValues, RankedTensors | None]:
        """Score, rank, and update the layers. Collective.

        Args:
            told: what the report says beside what is found here.

        Returns:
            The recipe with its statistics; the values of kept weights; and the ranking, if it was
            made already.
        """
        settings, work, numbers = self.settings, self.work, range(len(self.streamed.layers))
        dense = self._stream("dense", settings.windows)
        evaluation = settings.evaluation
        held_out = [self._stream("before", evaluation)] if evaluation and not self.before else []
        names = [*settings.passes, *(["teacher"] if settings.polish and self.teacher else [])]
        finished = self._finished("prune", dict.fromkeys(names, numbers))
        layers = partial(self._layers, finished)
        for number in layers("forward", numbers):
            if settings.collects == "activations" and self.stored.parameters[number]:
                statistics = ActivationStatistics(self.stored.parameters[number], allow_empty="*")
                dense.collect(number, statistics)
                statistics.save(self.work.file("statistics", number))
            dense.advance(number)
            for stream in held_out:
                stream.move_on(number)
        perplexities = {} if self.before is None else {"before": self.before}
        for stream in held_out:
            perplexities["before"] = work.once("before", partial(_perplexity, stream))
        if "backward" in settings.passes:
            work.once("head", lambda: work.communicator.run(dense.differentiate))
            for number in layers("backward", reversed(numbers)):
                self._differentiate(dense, number)
                dense.remove("gradient", number + 2)
        recipe, masks = self._with_scores(), None
        if settings.update in settings.passes:
            last = None if settings.polish else evaluation
            held_out = [self._stream("after", last)] if last else []
            trains, streams = settings.update == "training", [dense]
            streams += [self._stream("pruned", settings.windows, 1)] if trains else []
            planned = work.communicator.run(lambda: plan(self.streamed.checkpoint.folder, recipe))
            masks = RankedTensors(planned, Team(work.communicator))
            masks.find_cuts()
            for number in layers(settings.update, numbers):
                self._update(streams, number, masks)
                for stream in streams[1:] + held_out:
                    stream.move_on(number)
            for stream in held_out:
                perplexities["after"] = work.once("after", partial(_perplexity, stream))
        moved = "values"
        if settings.polish:
            assert masks is not None
            moved = "polished"
            work.once("polish", partial(self._polish, dense, masks, finished))
            # What runs from now on has the polished weights.
            self.streamed.entries |= work.communicator.run(lambda: _entries_in(work.folder(moved)))
        if "after" in settings.passes and evaluation is not None:
            stream = self._stream("polished", evaluation)
            for number in layers("after", numbers):
                stream.move_on(number)
            perplexities["after"] = work.once("perplexity", partial(_perplexity, stream))
        facts: dict[str, Any] = {
            **told,
            "update": settings.update,
            "windows": list(settings.windows.tokens.shape),
            "errors": work.get("errors", []),
            **({"damping": settings.damping} if settings.moves else {}),
            **({"polish": work.get("polish")} if settings.polish else {}),
            **({"perplexity": perplexities} if perplexities else {}),
        }
        values = work.communicator.run(lambda: _entries_in(work.folder(moved)))
        return recipe, KeptValues(facts, values), masks

    def _differentiate(self, stream: WindowStream, number: int) -> None:
        """Collect what scores are made of from the gradients of a layer, and write it."""
        parameters = self.stored.parameters[number]
        for module, name in parameters:
            module.get_parameter(name).requires_grad_(True)
        of_gradients = bool(parameters) and self.settings.collects == "gradients"
        statistics = [GradientStatistics(parameters)] if of_gradients else []
        scores = self.settings.elementwise if parameters else []
        criteria = {score: elementwise_criterion(score, parameters) for score in scores}
        stream.differentiate_layer(number, [*statistics, *criteria.values()])
        for each in statistics:
            each.save(self.work.file("statistics", number))
        found: dict[str, Tensor] = {}
        for score, criterion in criteria.items():
            values = criterion.scores()
            found |= self.stored.scores({p.fqn: values[p].cpu() for p in parameters}, score)

        def write() -> None:
            path = self.work.scores / f"{number:05}.safetensors"
            write_tensors(path, found)
            # The report has the times of scores: that of a run which was killed is no other.
            os.utime(path, ns=(0, 0))

        if criteria:
            self.work.on_first_rank(write)

    def _with_scores(self) -> Recipe:
        """The recipe with one file of statistics of all layers, and the folder of scores."""
        settings, work = self.settings, self.work
        file, place, added = work.path / "statistics.safetensors", work.scores, dict[str, str]()

        def merge() -> None:
            of_gradients, sums = settings.collects == "gradients", dict[str, StoredStatistics]()
            names = self.stored.statistics_names()
            for number, parameters in enumerate(self.stored.parameters):
                if parameters:
                    found = read_statistics(work.file("statistics", number), of_gradients)[1]
                    sums |= {names[name]: each for name, each in found.items()}
            write_statistics(file, "gradients" if of_gradients else "one_pass", sums)

        def write_index() -> None:
            weight_map = {name: entry.file for name, entry in _entries_in(place).items()}
            index = json.dumps({"metadata": {}, "weight_map": weight_map})
            write_atomically(place / f"model{INDEX_SUFFIX}", index.encode())

        if settings.collects is not None:
            work.once("statistics", lambda: work.on_first_rank(merge))
            added["statistics"] = str(file)
        if settings.elementwise:
            work.once("scores", lambda: work.on_first_rank(write_index))
            added["scores"] = str(place)
        return settings.recipe.model_copy(update=added)

    def _polish(
        self, dense: WindowStream, masks: RankedTensors, finished_layer: Callable[[int], None]
    ) -> dict[str, Any]:
        """Train the pruned model, which is whole in memory, towards the dense one; its losses."""
        settings, work, communicator = self.settings, self.work, self.work.communicator
        if self.teacher is not None:
            passes = LayerPasses(self.teacher, settings, work)
            numbers = range(len(self.teacher.layers))
            dense = passes._stream("teacher", settings.windows)
            for number in passes._layers(finished_layer, "teacher", numbers):
                dense.move_on(number)

        saved = work.path / "polish.pt"
        is_half = self.streamed.model.dtype == torch.float16  # its gradients would vanish
        dtype = torch.float32 if is_half else self.streamed.model.dtype

        def begin() -> tuple[StreamedModel, StoredLayers, dict[str, Any]]:
            model = StreamedModel(self.streamed.checkpoint.folder, dtype, settings.device)
            model.entries |= _entries_in(work.folder("values"))
            state = torch.load(saved, "cpu") if saved.exists() else {}
            return model, StoredLayers(model, settings.recipe), state

        streamed, stored, state = communicator.run(
            begin, lambda found: [("losses of the polishing", str(found[2].get("losses", [])))]
        )
        finished = reporter("polish", settings.polish, settings.progress, "steps")
        finished(len(state.get("losses", [])))
        parameters = list(itertools.chain(*stored.parameters))
        with streamed.whole() as model:
            communicator.run(lambda: _attach(stored, parameters, masks, zeros_too=True))
            losses = BatchLosses(model)

            def loss_of(row: int) -> Tensor:
                tokens = settings.windows.tokens[row : row + 1]
                at_end = dense.of_window(len(streamed.layers), row)
                with streamed.through(lambda embedded: at_end.to(embedded)):
                    target = losses.prediction(tokens)
                return losses.divergence(tokens, target)

            polishing = polishing_steps(
                model, loss_of, settings.windows, parameters, steps=settings.polish, state=state
            )
            written_at = time.monotonic()
            for _ in polishing:
                finished(1)
                is_due = time.monotonic() - written_at >= _SECONDS_BETWEEN_SAVES
                if communicator.index == 0 and is_due:
                    with (
                        new_file(saved) as descriptor,
                        open(descriptor, "wb", closefd=False) as output,
                    ):
                        torch.save(state, output)
                    written_at = time.monotonic()
            for parameter in parameters:
                remove(*parameter)
            for number, of_layer in enumerate(stored.parameters):
                if of_layer:
                    made = communicator.run(partial(_stored, stored, of_layer))
                    file = work.file("polished", number)
                    work.on_first_rank(partial(write_tensors, file, made))
        return {"steps": settings.polish, "losses": state["losses"]}

    def _update(self, streams: Sequence[WindowStream], number: int, masks: RankedTensors) -> None:
        """Prune a layer, which is in memory, and move its kept weights, if any move.

        Afterwards it has the weights that a checkpoint with the new tensors has.

        Args:
            streams: what the dense model computes of the windows; and what the pruned layers before
                this one do, if layers are trained.
        """
        stored, work, parameters = self.stored, self.work, self.stored.parameters[number]
        grams = None
        if self.settings.moves and parameters:
            grams = GramMatrices(parameters, allow_empty="*")
            streams[0].collect(number, grams)
        _attach(stored, parameters, masks)
        errors: Sequence[ReconstructedParameter] = ()
        if grams is not None:
            errors = reconstruct(parameters, grams, damping=self.settings.damping).parameters
            if len(streams) > 1:
                self._train(number, *streams)
        for parameter in parameters:
            remove(*parameter)
        if grams is not None:
            made = _stored(stored, parameters)
            for weight in map(_weight, parameters):
                for dtype in {tensor.dtype for tensor in made.values()}:
                    weight.data.copy_(weight.data.to(dtype))
            work.on_first_rank(lambda: write_tensors(work.file("values", number), made))
        kept = [row for row in work.get("errors", []) if row[0] not in {e.name for e in errors}]
        rows = [[e.name, e.error_before, e.error_after] for e in errors]
        work.record("errors", kept + rows)

    def _train(self, number: int, dense: WindowStream, pruned: WindowStream) -> None:
        """Train a pruned layer to return what it does in the dense model, of what comes to it."""
        layer, parameters = self.streamed.layers[number], self.stored.parameters[number]
        windows = self.settings.windows
        steps = _EPOCHS * len(windows) // BATCH

        def loss_of(row: int) -> Tensor:
            # Its other arguments are those of any window: see hidden_states.[Note: a chain].
            made = pruned.call(number, 0, pruned.of_window(number, row)).float()
            target = dense.of_window(number + 1, row).to(made)
            # Of each token alike: some have states that are thousands of times as large.
            return ((made - target).square() / target.square().mean(-1, keepdim=True)).sum()

        list(polishing_steps(layer, loss_of, windows, parameters, steps=steps, lr=_RATE, state={}))


def _attach(
    stored: StoredLayers,
    parameters: Iterable[NamedParameter],
    masks: RankedTensors,
    zeros_too: bool = False,
) -> None:
    """Prune parameters, which are in memory, as the ranking says; or also what is zero already.

    They have gradients from then on.
    """
    for parameter in parameters:
        _weight(parameter).requires_grad_(True)
        mask = stored.mask(parameter.fqn, lambda name: torch.from_numpy(masks.keep(name)))
        mask = mask.to(_weight(parameter).device)
        custom_from_mask(*parameter, mask * (_weight(parameter) != 0) if zeros_too else mask)


def _stored(stored: StoredLayers, parameters: Iterable[NamedParameter]) -> dict[str, Tensor]:
    """Moved weights as tensors of the checkpoint."""
    made = stored.stored({p.fqn: _weight(p).detach().cpu() for p in parameters})
    check_finite(made)
    return made


def _entries_in(folder: Path) -> dict[str, TensorEntry]:
    """The tensors of the safetensors files in a folder, by name."""
    files = map(read_header, sorted(folder.glob("*.safetensors")))
    return {entry.name: entry for file in files for entry in file.tensors}


def _perplexity(stream: WindowStream) -> float:
    return stream.perplexity().perplexity


def _weight(parameter: NamedParameter) -> Tensor:
    weight: Tensor = getattr(*parameter)
    return weight


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file, whole or not at all."""
    from safetensors.torch import save

    write_atomically(path, save({k: t.contiguous() for k, t in tensors.items()}, {"format": "pt"}))
