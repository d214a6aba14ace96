"""The passes of a pruning by text over the layers of a model."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distprune.api.local import custom_from_mask, remove
from distprune.base.naming import NamedParameter
from distprune.criteria.gradient_moment import GradientMoment
from distprune.files.checkpoints.header import INDEX_SUFFIX, make_header, read_header
from distprune.files.checkpoints.statistics_file import (
    StoredSums,
    read_gradient_statistics,
    read_statistics,
    write_statistics,
)
from distprune.files.disk.access import write_atomically
from distprune.files.planning import Plan, plan
from distprune.files.pruning import RankedMasks
from distprune.files.scoring import KeptValues
from distprune.files.team import Team
from distprune.language_models.running import Reporter
from distprune.language_models.scoring import elementwise_criterion
from distprune.language_models.text import TokenWindows
from distprune.ranks.collectives import Communicator
from distprune.ranks.process_groups import world
from distprune.recipes import Recipe
from distprune.reconstruction.reconstructing import ReconstructedParameter, reconstruct
from distprune.statistics.activation import ActivationStatistics
from distprune.statistics.gradients import GradientStatistics
from distprune.statistics.gram import GramMatrices
from distprune.streaming.layers import StoredLayers, StreamedModel
from distprune.streaming.reading import DTYPE_NAMES
from distprune.streaming.settings import Settings
from distprune.streaming.windows import WindowStream
from distprune.streaming.work import Work

# About how long a layer takes on a window, in forwards of it.
_WEIGHTS = {"forward": 1, "backward": 3, "update": 2}


@dataclass(frozen=True)
class Passes:
    """Everything that runs text through the layers of a model, for one pruning.

    Args:
        streamed: the model.
        stored: its layers, as they lie in the checkpoint.
        settings: of the pruning.
        work: the folder of what is done so far.
        before: the perplexity of the evaluation text under the dense model, if that is known.
    """

    streamed: StreamedModel
    stored: StoredLayers
    settings: Settings
    work: Work
    before: float | None
    communicator: Communicator = field(default_factory=world)

    def run(self, told: Mapping[str, Any]) -> tuple[Recipe, KeptValues]:
        """Score, rank, and update the layers. Collective.

        Args:
            told: what the report says beside what is found here.

        Returns:
            The recipe with its statistics, and the values of kept weights.
        """
        settings, work, numbers = self.settings, self.work, range(len(self.streamed.layers))
        needs_stages = settings.needs_backward or settings.moves
        reads = needs_stages or settings.collects_activations
        dense = self._stream("dense", settings.windows if reads else None)
        before = self._stream("before", settings.evaluation if self.before is None else None)
        missing = sum(
            _WEIGHTS[name] * (len(numbers) - len(work.get(name, []))) for name in settings.passes
        )
        reporter = Reporter(
            "prune", missing * len(settings.windows), settings.progress, "forwards of a layer"
        )
        layers = partial(self._layers, reporter)
        for number in layers("forward", numbers):
            with self.streamed.layer(number):
                if dense is not None and settings.collects_activations:
                    self._collect(dense, number)
                for stream in (dense, before):
                    if stream is not None:
                        stream.advance(number)
            if before is not None:  # a run that is killed now needs the stage after it
                before.remove("state", number - 1)
        perplexities = {} if self.before is None else {"before": self.before}
        if before is not None:
            perplexities["before"] = self._perplexity(before, "before")
        if settings.needs_backward:
            assert dense is not None
            if work.get("head") is None:
                with self.streamed.weights_around():
                    self.communicator.run(dense.differentiate)
                work.record("head", True)
            for number in layers("backward", reversed(numbers)):
                with self.streamed.layer(number):
                    self._differentiate(dense, number)
                dense.remove("gradient", number + 2)
        recipe = self._with_scores(self._with_statistics())
        folder = self.streamed.checkpoint.folder
        planned = self.communicator.run(lambda: plan(folder, recipe))
        after = self._stream("after", settings.evaluation)
        if after is not None or settings.moves:
            masks = self._masks(planned)
            for number in layers("update", numbers):
                with self.streamed.layer(number):
                    self._update(dense if settings.moves else None, number, masks)
                    if after is not None:
                        after.advance(number)
                if after is not None:
                    after.remove("state", number - 1)
        if after is not None:
            perplexities["after"] = self._perplexity(after, "after")
        tensors = [name for number in numbers for name in self.stored.names_of(number)]
        facts: dict[str, Any] = {
            **told,
            "update": settings.update,
            "windows": list(settings.windows.tokens.shape),
            "errors": work.get("errors", []),
        }
        if settings.moves:
            facts["damping"] = settings.damping
        if perplexities:
            facts["perplexity"] = perplexities
        moved = tuple(tensors) if settings.moves else ()
        return recipe, KeptValues(facts, moved, work.folder("values"))

    def _layers(self, reporter: Reporter, name: str, numbers: Iterable[int]) -> Iterator[int]:
        """The layers of a pass that are not done yet; one is done when the next is asked for."""
        settings, work, communicator = self.settings, self.work, self.communicator
        done: list[int] = work.get(name, [])
        for number in numbers:
            if number in done:
                continue
            communicator.agree()  # an error of a rank in the layer before
            yield number
            done = [*done, number]
            work.record(name, done)
            reporter.add(len(settings.windows) * _WEIGHTS[name])

    def _stream(self, name: str, windows: TokenWindows | None) -> WindowStream | None:
        if windows is None:
            return None
        size, folder = self.settings.batch_size, self.work.folder("states")
        with self.streamed.weights_around():
            return self.communicator.run(
                lambda: WindowStream(self.streamed, windows, size, folder, name)
            )

    def _perplexity(self, stream: WindowStream, name: str) -> float:
        found: float | None = self.work.get(name)
        if found is None:
            with self.streamed.weights_around():
                found = stream.perplexity().perplexity
            self.work.record(name, found)
        return found

    def _collect(self, stream: WindowStream, number: int) -> None:
        if parameters := self.stored.parameters[number]:
            statistics = ActivationStatistics(parameters, allow_empty="*")
            stream.collect(number, statistics)
            statistics.save(self.work.file("statistics", number))

    def _differentiate(self, stream: WindowStream, number: int) -> None:
        settings, parameters = self.settings, self.stored.parameters[number]
        for module, name in parameters:
            module.get_parameter(name).requires_grad_(True)
        collects = bool(parameters) and settings.collects_gradients
        statistics = [GradientStatistics(parameters)] if collects else []
        scores = settings.elementwise if parameters else []
        criteria = {score: elementwise_criterion(score, parameters) for score in scores}
        stream.differentiate_layer(number, [*statistics, *criteria.values()])
        for each in statistics:
            each.save(self.work.file("statistics", number))
        if criteria:
            self._write_scores(number, criteria)

    def _write_scores(self, number: int, criteria: Mapping[str, GradientMoment]) -> None:
        """Write the scores of a layer, as its tensors lie in the checkpoint."""
        found: dict[str, Tensor] = {}
        parameters = self.stored.parameters[number]
        for score, criterion in criteria.items():
            values = criterion.scores()
            scores = {p.fqn: values[p].cpu().float() for p in parameters}
            found |= self.stored.scores(scores, score)

        def write() -> None:
            path = self.work.scores / f"{number:05}.safetensors"
            _write_tensors(path, found)
            # The report has the times of scores: that of a run which was killed is no other.
            os.utime(path, ns=(0, 0))

        self.work.on_first_rank(write)

    def _with_statistics(self) -> Recipe:
        """The recipe with the statistics of all layers in one file."""
        settings, work = self.settings, self.work
        if not (settings.collects_gradients or settings.collects_activations):
            return settings.recipe
        path = work.path / "statistics.safetensors"

        def merge() -> None:
            found: dict[str, StoredSums] = {}
            for number, parameters in enumerate(self.stored.parameters):
                file = work.file("statistics", number)
                if parameters and settings.collects_gradients:
                    found |= read_gradient_statistics(file)
                elif parameters:
                    found |= read_statistics(file)[1]
            mode = "gradients" if settings.collects_gradients else "one_pass"
            write_statistics(path, mode, found)

        if work.get("statistics") is None:
            work.on_first_rank(merge)
            work.record("statistics", True)
        return settings.recipe.model_copy(update={"statistics": str(path)})

    def _with_scores(self, recipe: Recipe) -> Recipe:
        """The recipe with the folder of the scores of single weights."""
        settings, place = self.settings, self.work.scores
        if not settings.elementwise:
            return recipe

        def write_index() -> None:
            files = map(read_header, sorted(place.glob("*.safetensors")))
            weight_map = {entry.name: file.name for file in files for entry in file.tensors}
            index = json.dumps({"metadata": {}, "weight_map": weight_map})
            write_atomically(place / f"model{INDEX_SUFFIX}", index.encode())

        if self.work.get("scores") is None:
            self.work.on_first_rank(write_index)
            self.work.record("scores", True)
        return recipe.model_copy(update={"scores": str(place)})

    def _masks(self, planned: Plan) -> RankedMasks:
        cuts = self.work.get("cuts")
        masks = RankedMasks(planned, Team(self.communicator), cuts)
        if cuts is None:
            self.work.record("cuts", masks.cuts)
        return masks

    def _update(self, stream: WindowStream | None, number: int, masks: RankedMasks) -> None:
        """Prune a layer, which is in memory, and move its kept weights for some windows, if any.

        Afterwards it has the weights that a checkpoint with the new tensors has.
        """
        stored, work, parameters = self.stored, self.work, self.stored.parameters[number]
        grams = None
        if stream is not None and parameters:
            grams = GramMatrices(parameters, allow_empty="*")
            stream.collect(number, grams)
        for parameter in parameters:
            mask = stored.mask(parameter.fqn, lambda name: torch.from_numpy(masks.keep(name)))
            custom_from_mask(*parameter, mask.to(_weight(parameter).device))
        errors: Sequence[ReconstructedParameter] = ()
        if grams is not None:
            errors = reconstruct(parameters, grams, damping=self.settings.damping).parameters
        for parameter in parameters:
            remove(*parameter)
        if grams is not None:
            made = stored.stored({p.fqn: _weight(p).detach().cpu() for p in parameters})
            _round(parameters, {tensor.dtype for tensor in made.values()})
            work.on_first_rank(lambda: _write_tensors(work.file("values", number), made))
        kept = [row for row in work.get("errors", []) if row[0] not in {e.name for e in errors}]
        rows = [[e.name, e.error_before, e.error_after] for e in errors]
        work.record("errors", kept + rows)


def _weight(parameter: NamedParameter) -> Tensor:
    weight: Tensor = getattr(*parameter)
    return weight


def _round(parameters: Sequence[NamedParameter], dtypes: Collection[torch.dtype]) -> None:
    """Give parameters values that the dtypes of the checkpoint can hold."""
    with torch.no_grad():
        for parameter in parameters:
            for dtype in dtypes:
                weight = _weight(parameter)
                weight.copy_(weight.to(dtype))


def _write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors to a safetensors file."""
    described = {
        name: (DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), tensor.nbytes)
        for name, tensor in tensors.items()
    }
    header, _ = make_header(described, {"format": "pt"})
    parts = (
        tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        for tensor in tensors.values()
    )
    write_atomically(path, [header, *parts])
