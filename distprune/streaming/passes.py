"""The passes of a pruning by text over the layers of a model."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distprune._common.mask_bits import pack_words, unpack_words
from distprune._common.naming import NamedParameter
from distprune._common.process_groups import world
from distprune.criteria.gradient_moment import GradientMoment
from distprune.files.checkpoints.header import INDEX_SUFFIX, read_header
from distprune.files.checkpoints.statistics_file import (
    read_gradient_statistics,
    read_statistics,
    write_statistics,
)
from distprune.files.disk.access import write_atomically
from distprune.files.errors import Interrupted
from distprune.files.planning import Plan, plan
from distprune.files.pruning import RankedMasks
from distprune.files.recipe import FileRecipe
from distprune.files.scoring import KeptValues
from distprune.files.team import Team
from distprune.language_models.running import Reporter
from distprune.language_models.scoring import elementwise_criterion
from distprune.language_models.text import TokenWindows
from distprune.statistics.activation import ActivationStatistics
from distprune.statistics.gradients import GradientStatistics
from distprune.streaming.layers import StreamedModel
from distprune.streaming.settings import Settings
from distprune.streaming.updating import Keep, StoredLayers, prune_layer, write_tensors
from distprune.streaming.windows import WindowStream
from distprune.streaming.work import Work

# About how long a layer takes on a window, in forwards of it.
_WEIGHTS = {"forward": 1, "backward": 3, "update": 2}


class Passes:
    """Everything that runs text through the layers of a model, for one pruning.

    Args:
        streamed: the model.
        stored: its layers, as they lie in the checkpoint.
        settings: of the pruning.
        work: the folder of what is done so far.
        before: the perplexity of the evaluation text under the dense model, if that is known.
    """

    def __init__(
        self,
        streamed: StreamedModel,
        stored: StoredLayers,
        settings: Settings,
        work: Work,
        before: float | None,
    ) -> None:
        self._streamed = streamed
        self._stored = stored
        self._settings = settings
        self._work = work
        self._before = before
        self._numbers = range(len(streamed.layers))
        self._communicator = world()

    def run(self, told: Mapping[str, Any]) -> tuple[FileRecipe, KeptValues]:
        """Score, rank, and update the layers. Collective.

        Args:
            told: what the report says beside what is found here.

        Returns:
            The recipe with its statistics, and the values of kept weights.
        """
        settings, work = self._settings, self._work
        needs_stages = settings.needs_backward or settings.moves
        reads = needs_stages or settings.collects_activations
        dense = self._stream("dense", settings.windows if reads else None)
        before = self._stream("before", settings.evaluation if self._before is None else None)
        pace = _Pace(settings, len(self._numbers), work)
        for number in pace.layers("forward", self._numbers):
            with self._streamed.layer(number):
                if dense is not None and settings.collects_activations:
                    self._collect(dense, number)
                for stream in (dense, before):
                    if stream is not None:
                        stream.advance(number)
            if before is not None:  # a run that is killed now needs the stage after it
                before.remove("state", number - 1)
        perplexities = {} if self._before is None else {"before": self._before}
        if before is not None:
            perplexities["before"] = self._perplexity(before, "before")
        if settings.needs_backward:
            assert dense is not None
            if work.get("head") is None:
                with self._streamed.weights_around():
                    self._communicator.run(dense.differentiate)
                work.record("head", True)
            for number in pace.layers("backward", reversed(self._numbers)):
                with self._streamed.layer(number):
                    self._differentiate(dense, number)
                dense.remove("gradient", number + 2)
        recipe = self._with_scores(self._with_statistics())
        folder = self._streamed.checkpoint.folder
        planned = self._communicator.run(lambda: plan(folder, recipe, follow_links=True))
        after = self._stream("after", settings.evaluation)
        if after is not None or settings.moves:
            with self._masks(planned) as masks:
                for number in pace.layers("update", self._numbers):
                    with self._streamed.layer(number):
                        self._update(dense if settings.moves else None, number, masks)
                        if after is not None:
                            after.advance(number)
                    if after is not None:
                        after.remove("state", number - 1)
        if after is not None:
            perplexities["after"] = self._perplexity(after, "after")
        tensors = [name for number in self._numbers for name in self._stored.names_of(number)]
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

    def _stream(self, name: str, windows: TokenWindows | None) -> WindowStream | None:
        if windows is None:
            return None
        size, folder = self._settings.batch_size, self._work.folder("states")
        with self._streamed.weights_around():
            return self._communicator.run(
                lambda: WindowStream(self._streamed, windows, size, folder, name)
            )

    def _perplexity(self, stream: WindowStream, name: str) -> float:
        found: float | None = self._work.get(name)
        if found is None:
            with self._streamed.weights_around():
                found = stream.perplexity().perplexity
            self._work.record(name, found)
        return found

    def _collect(self, stream: WindowStream, number: int) -> None:
        if parameters := self._stored.parameters[number]:
            statistics = ActivationStatistics(parameters, allow_empty="*")
            stream.collect(number, statistics)
            statistics.save(self._work.file("statistics", number))

    def _differentiate(self, stream: WindowStream, number: int) -> None:
        parameters = self._stored.parameters[number]
        statistics, criteria = gradients_of(parameters, self._settings)
        stream.differentiate_layer(number, [*statistics, *criteria.values()])
        for each in statistics:
            each.save(self._work.file("statistics", number))
        if criteria:
            self._write_scores(number, criteria)

    def _write_scores(self, number: int, criteria: Mapping[str, GradientMoment]) -> None:
        """Write the scores of a layer, as its tensors lie in the checkpoint."""
        found: dict[str, Tensor] = {}
        parameters = self._stored.parameters[number]
        for score, criterion in criteria.items():
            values = criterion.scores()
            scores = {p.fqn: values[p].cpu().to(self._settings.score_dtype) for p in parameters}
            found |= self._stored.scores(scores, score)

        def write() -> None:
            if self._communicator.index == 0:
                path = self._work.scores / f"{number:05}.safetensors"
                write_tensors(path, found)
                # The report has the times of scores: that of a run which was killed is no other.
                os.utime(path, ns=(0, 0))

        self._communicator.run(write)

    def _with_statistics(self) -> FileRecipe:
        """The recipe with the statistics of all layers in one file."""
        settings, work = self._settings, self._work
        if not (settings.collects_gradients or settings.collects_activations):
            return settings.recipe
        path = work.path / "statistics.safetensors"

        def merge() -> None:
            if self._communicator.index:
                return
            parameters = enumerate(self._stored.parameters)
            files = [work.file("statistics", number) for number, some in parameters if some]
            if settings.collects_gradients:
                gradients = [read_gradient_statistics(file) for file in files]
                write_statistics(
                    path, "gradients", {k: v for each in gradients for k, v in each.items()}
                )
                return
            activations = [read_statistics(file)[1] for file in files]
            write_statistics(
                path, "one_pass", {k: v for each in activations for k, v in each.items()}
            )

        if work.get("statistics") is None:
            self._communicator.run(merge)
            work.record("statistics", True)
        return settings.recipe.replaced(statistics=str(path))

    def _with_scores(self, recipe: FileRecipe) -> FileRecipe:
        """The recipe with the folder of the scores of single weights."""
        settings, place = self._settings, self._work.scores
        if not settings.elementwise:
            return recipe

        def write_index() -> None:
            if self._communicator.index == 0:
                files = map(read_header, sorted(place.glob("*.safetensors")))
                weight_map = {entry.name: file.name for file in files for entry in file.tensors}
                index = json.dumps({"metadata": {}, "weight_map": weight_map})
                write_atomically(place / f"model{INDEX_SUFFIX}", index.encode())

        if self._work.get("scores") is None:
            self._communicator.run(write_index)
            self._work.record("scores", True)
        return recipe.replaced(scores=str(place))

    @contextmanager
    def _masks(self, planned: Plan) -> Iterator[RankedMasks]:
        cuts = self._work.get("cuts")
        with ExitStack() as stack:
            team = Team(self._communicator, stop=self._settings.stop)
            masks = RankedMasks(planned, team, cuts)
            stack.callback(masks.close)
            if cuts is None:
                self._work.record("cuts", masks.cuts)
            yield masks

    def _keep(self, number: int, masks: RankedMasks) -> Keep:
        """The masks of a layer. Collective if ranks share the reading: each ranks some tensors."""
        communicator, names = self._communicator, self._stored.names_of(number)
        if not self._streamed.holding.shares:
            return lambda name: torch.from_numpy(masks.keep(name))
        mine = names[communicator.index :: communicator.size]
        own = communicator.run(
            lambda: {name: pack_words(masks.keep(name).ravel()) for name in mine}
        )

        def words(name: str) -> Tensor:
            num_words = -(-self._stored.numel(name) // 64)
            found = own.pop(name, None)
            return torch.from_numpy(np.zeros(num_words, "<i8") if found is None else found)

        packed = {name: communicator.sum(words(name)).numpy() for name in names}
        numel = self._stored.numel
        return lambda name: torch.from_numpy(unpack_words(packed[name], numel(name)))

    def _update(self, stream: WindowStream | None, number: int, masks: RankedMasks) -> None:
        made, errors = prune_layer(
            self._stored,
            number,
            self._keep(number, masks),
            stream,
            self._settings.damping,
        )
        work = self._work

        def write() -> None:
            if made and self._communicator.index == 0:
                write_tensors(work.file("values", number), made)

        self._communicator.run(write)
        kept = [row for row in work.get("errors", []) if row[0] not in {e.name for e in errors}]
        rows = [[e.name, e.error_before, e.error_after] for e in errors]
        work.record("errors", kept + rows)


def gradients_of(
    parameters: Sequence[NamedParameter], settings: Settings
) -> tuple[list[GradientStatistics], dict[str, GradientMoment]]:
    """What is collected of the gradients of a layer's parameters, which need them from now on."""
    if not parameters:
        return [], {}
    for module, name in parameters:
        module.get_parameter(name).requires_grad_(True)
    statistics = [GradientStatistics(parameters)] if settings.collects_gradients else []
    criteria = {name: elementwise_criterion(name, parameters) for name in settings.elementwise}
    return statistics, criteria


class _Pace:
    """Goes through the layers of each pass, from where an earlier run was; tells how far it is."""

    def __init__(self, settings: Settings, num_layers: int, work: Work) -> None:
        self._work = work
        self._stop = settings.stop or (lambda: False)
        self._communicator = world()
        self._num_windows = len(settings.windows)
        missing = sum(
            _WEIGHTS[name] * (num_layers - len(work.get(name, []))) for name in settings.passes
        )
        self._reporter = Reporter(
            "prune", missing * self._num_windows, settings.progress, "forwards of a layer"
        )

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
