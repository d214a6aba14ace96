"""The files that a recipe's scores need, found, checked and described.

A plan has them as headers and small files: statistics of activations are read, some bytes for each
input of a layer; of given scores only the headers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from distprune._common.element_groups import Layout
from distprune.files.errors import SelectionError
from distprune.files.formats.header import TensorEntry
from distprune.files.recipe import FileRecipe

if TYPE_CHECKING:  # numpy comes with it
    from distprune.files.scoring.given import GivenScores
    from distprune.files.scoring.matching import TensorStatistics

# Group by group of the recipe, its tensors, each with the place of its inputs if that is known.
ScoredGroups = Sequence[tuple[FileRecipe, Sequence[tuple[TensorEntry, Layout | None]]]]


@dataclass(frozen=True)
class ScoreInputs:
    """What scores are made from besides weights.

    Attributes:
        statistics: of activations, for the tensors that need them.
        given: scores from files.
    """

    statistics: TensorStatistics | None = None
    given: GivenScores | None = None

    @property
    def warnings(self) -> tuple[str, ...]:
        """Sentences on what is no error, but probably not meant."""
        return () if self.statistics is None else self.statistics.warnings

    def facts(self) -> dict[str, Any]:
        """What decides the scores, as JSON, without paths: for digests and reports.

        Empty without such inputs, so that plans and reports are those of earlier versions.
        """
        facts: dict[str, Any] = {}
        if self.statistics is not None:
            facts["statistics"] = self.statistics.facts()
        if self.given is not None:
            facts["scores"] = self.given.facts()
        return facts

    def with_times(self, facts: Mapping[str, Any]) -> ScoreInputs:
        """The inputs with the times of change that :meth:`facts` had; copies have others."""
        if self.given is None:
            return self
        return replace(self, given=self.given.with_times(facts.get("scores")))


def find_inputs(recipe: FileRecipe, groups: ScoredGroups, names: Collection[str]) -> ScoreInputs:
    """Find what the scores of some tensors are made from.

    Args:
        recipe: the whole of it.
        groups: of the recipe.
        names: of all tensors of the checkpoint.

    Raises:
        SelectionError: the recipe does not say where statistics or scores are, or they do not fit
            the tensors; with all problems.
        CheckpointError: they cannot be read, or are malformed.

    Cost: a read of the statistics; headers of the scores.
    """
    measured, given = _Wanted(), _Wanted()
    for part, tensors in groups:
        wanted = measured if part.needs_statistics else given if part.score == "given" else None
        if wanted is not None:
            wanted.scores.append(part.score)
            wanted.tensors += tensors
    statistics = scores = None
    if measured.scores:
        if recipe.statistics is None:
            raise SelectionError(
                f"score {measured.scores[0]} needs statistics of activations; expected "
                "--statistics FILE, or 'statistics' in the recipe: the file that `distprune "
                "calibrate` or ActivationStatistics.save writes."
            )
        from distprune.files.scoring.matching import match_statistics

        statistics = match_statistics(recipe.statistics, measured.tensors, names)
    if given.scores:
        if recipe.scores is None:
            raise SelectionError(
                "score given needs scores; expected --scores FOLDER, or 'scores' in the recipe: "
                "safetensors files with a tensor of the same name and shape for each pruned one."
            )
        from distprune.files.scoring.given import find_scores

        scores = find_scores(recipe.scores, [entry for entry, _ in given.tensors])
    return ScoreInputs(statistics, scores)


@dataclass
class _Wanted:
    """Tensors that need inputs of one kind."""

    scores: list[str] = field(default_factory=list)
    tensors: list[tuple[TensorEntry, Layout | None]] = field(default_factory=list)
