"""The files that a recipe's scores need, found, checked and described.

A plan has them as headers and small files: statistics are read, some bytes for each input of a
layer; of given scores, a tensor of the same name and shape for each pruned one, only the
headers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distprune.base.blocks import Layout
from distprune.files.checkpoints.checkpoint import Checkpoint, open_checkpoint
from distprune.files.checkpoints.header import TensorEntry
from distprune.files.errors import CheckpointError, SelectionError
from distprune.recipes import GroupRecipe, Recipe
from distprune.recipes.recipe import ELEMENTWISE

if TYPE_CHECKING:  # numpy comes with it
    from distprune.files.matching import TensorStatistics


@dataclass(frozen=True)
class KeptValues:
    """What an update of the kept weights has made of some tensors.

    Attributes:
        facts: what decides the values, as JSON: the digest of a plan covers them.
        tensors: the names of the tensors.
        folder: safetensors files with these tensors, in the dtype of the source; None: nobody reads
            them, as where a result is compared with its checksums.
    """

    facts: Mapping[str, Any]
    tensors: tuple[str, ...]
    folder: Path | None = None

    def as_json(self) -> dict[str, Any]:
        """For a report, and for :meth:`from_json`."""
        return {**self.facts, "tensors": list(self.tensors)}

    @classmethod
    def from_json(cls, values: Any) -> KeptValues:
        """What :meth:`as_json` has made.

        Raises:
            CheckpointError: it was something else.
        """
        names = values.get("tensors") if isinstance(values, dict) else None
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise CheckpointError("the report names no tensors whose kept values were changed.")
        facts = {key: value for key, value in values.items() if key != "tensors"}
        return cls(facts, tuple(names))

    @cached_property
    def names(self) -> Collection[str]:
        """The tensors, for lookups."""
        return frozenset(self.tensors)


@dataclass(frozen=True)
class ScoreInputs:
    """What scores are made from besides weights, and kept values from besides the source.

    Attributes:
        statistics: of activations or gradients, for the tensors that need them.
        given: scores from files.
        values: of kept elements, which are not those of the source.
    """

    statistics: TensorStatistics | None = None
    given: GivenScores | None = None
    values: KeptValues | None = None

    def facts(self) -> dict[str, Any]:
        """What decides the scores, as JSON, without paths: for digests and reports.

        Empty without such inputs, so that plans and reports are those of earlier versions.
        """
        facts: dict[str, Any] = {}
        if self.statistics is not None:
            facts["statistics"] = self.statistics.facts()
        if self.given is not None:
            facts["scores"] = self.given.facts()
        if self.values is not None:
            facts["update"] = self.values.as_json()
        return facts


def _without_file(part: GroupRecipe) -> str:
    """What to do where the recipe names no statistics."""
    need = f"score {part.score}" if part.needs_statistics else f"budget {part.budget}"
    if part.needs_statistics and part.reads_gradients:
        kind, how = "gradients", "calibrate --gradients` or GradientStatistics.save"
    else:
        kind, how = "activations", "calibrate` or ActivationStatistics.save"
    return (
        f"{need} needs statistics of {kind}; expected --statistics FILE, or 'statistics' in the "
        f"recipe: the file that `distprune {how} writes. For a language model, --text FILE makes "
        "them."
    )


def check_scores(recipe: Recipe, made: Collection[str] = ()) -> None:
    """Raise SelectionError if a score needs scores of single weights, and nothing says where.

    Args:
        recipe: the whole of it.
        made: scores that will be made.
    """
    missing = [p.score for p in recipe.parts if p.reads_scores and p.score not in made]
    if missing and recipe.scores is None:
        text = ""
        if missing[0] in ELEMENTWISE:
            text = " For a language model, --text FILE makes them."
        raise SelectionError(
            f"score {missing[0]} needs scores; expected --scores FOLDER, or 'scores' in the "
            "recipe: safetensors files with a tensor of the same name and shape for each pruned "
            f"one.{text}"
        )


def are_of_gradients(parts: Iterable[GroupRecipe]) -> bool:
    """Whether the statistics that parts of a recipe need are of gradients; all need one kind."""
    needs: dict[bool, str] = {}
    for part in parts:
        of_activations = not part.reads_gradients or part.budget == "owl"
        if part.needs_statistics:
            needs.setdefault(part.reads_gradients, f"score {part.score}")
        if of_activations:
            needs.setdefault(False, f"budget {part.budget}")
    if len(needs) > 1:
        raise SelectionError(
            f"{needs[True]} needs statistics of gradients and {needs[False]} those of activations, "
            "and a pruning reads one file of statistics; expected one of the two."
        )
    return True in needs


def find_inputs(
    recipe: Recipe,
    tensors: Sequence[tuple[GroupRecipe, TensorEntry, Layout | None]],
    names: Collection[str],
) -> ScoreInputs:
    """Find what the scores of some tensors are made from.

    Args:
        recipe: the whole of it.
        tensors: each with the recipe of its group, and the place of its inputs if that is known.
        names: of all tensors of the checkpoint.

    Raises:
        SelectionError: the recipe does not say where statistics or scores are, or they do not fit
            the tensors; with all problems.
        CheckpointError: they cannot be read, or are malformed.

    Cost: a read of the statistics; headers of the scores.
    """
    statistics = scores = None
    if measured := [each for each in tensors if each[0].reads_statistics]:
        if recipe.statistics is None:
            raise SelectionError(_without_file(measured[0][0]))
        from distprune.files.matching import match_statistics

        of_gradients = are_of_gradients(part for part, _, _ in measured)
        pairs = [(entry, layout) for _, entry, layout in measured]
        statistics = match_statistics(recipe.statistics, pairs, names, of_gradients)
    if given := [entry for part, entry, _ in tensors if part.reads_scores]:
        check_scores(recipe)
        assert recipe.scores is not None
        scores = find_scores(recipe.scores, given)
    return ScoreInputs(statistics, scores)


@dataclass(frozen=True)
class GivenScores:
    """Scores in safetensors files.

    Attributes:
        checkpoint: their headers.
        entries: of the scores, by name of the tensor.
    """

    checkpoint: Checkpoint
    entries: Mapping[str, TensorEntry]

    def facts(self) -> dict[str, dict[str, int]]:
        """Size, checksum of the header and time of change, by name of a file."""
        return {
            file.name: {
                "size": file.size,
                "header_crc32": file.header_crc,
                "mtime_ns": file.mtime_ns,
            }
            for file in self.checkpoint.files
        }


def find_scores(path: str, tensors: Sequence[TensorEntry]) -> GivenScores:
    """Read the headers of scores, and find those of some tensors.

    Args:
        path: a folder, or a safetensors file.
        tensors: that are ranked by them.

    Raises:
        SelectionError: a tensor has no scores, or scores of another shape or of no floating-point
            dtype; names the first.
        CheckpointError: the scores are malformed.
    """
    from distprune.base.float_formats import PLAIN_FLOATS  # numpy comes with it

    checkpoint = open_checkpoint(path)
    found = {entry.name: entry for entry in checkpoint.tensors}
    for tensor in tensors:
        scores = found.get(tensor.name)
        if scores is None:
            raise SelectionError(
                f"{path} has no scores of {tensor.name}; add them, or exclude the tensor."
            )
        if scores.shape != tensor.shape or scores.dtype not in PLAIN_FLOATS:
            raise SelectionError(
                f"the scores of {tensor.name} in {path} are {scores.dtype} {list(scores.shape)}; "
                f"expected {list(tensor.shape)}, of one of {', '.join(PLAIN_FLOATS)}."
            )
    return GivenScores(checkpoint, {tensor.name: found[tensor.name] for tensor in tensors})
