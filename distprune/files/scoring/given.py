"""Scores that were made elsewhere: a tensor of the same name and shape for each pruned one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from distprune._common.float_formats import PLAIN_FLOATS
from distprune.files.checkpoints.checkpoint import Checkpoint, open_checkpoint
from distprune.files.errors import SelectionError, headline
from distprune.files.formats.header import TensorEntry

_MAX_PROBLEMS = 12


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

    def with_times(self, facts: object) -> GivenScores:
        """The scores with the times of change that :meth:`facts` had; a copy has others."""
        times = facts if isinstance(facts, dict) else {}
        files = []
        for file in self.checkpoint.files:
            stored = times.get(file.name)
            time = stored.get("mtime_ns") if isinstance(stored, dict) else None
            files.append(replace(file, mtime_ns=time) if type(time) is int else file)
        return replace(self, checkpoint=replace(self.checkpoint, files=tuple(files)))


def find_scores(path: str, tensors: Sequence[TensorEntry]) -> GivenScores:
    """Read the headers of scores, and find those of some tensors.

    Args:
        path: a folder, or a safetensors file.
        tensors: that are ranked by them.

    Raises:
        SelectionError: a tensor has no scores, or scores of another shape or of no floating-point
            dtype; names all.
        CheckpointError: the scores are malformed.
    """
    checkpoint = open_checkpoint(path, follow_links=True)
    found = {entry.name: entry for entry in checkpoint.tensors}
    problems = []
    for tensor in tensors:
        scores = found.get(tensor.name)
        if scores is None:
            problems.append(f"{tensor.name} has no scores; add them, or exclude the tensor.")
        elif scores.shape != tensor.shape:
            problems.append(
                f"{tensor.name}: its scores have the shape {list(scores.shape)}; expected that of "
                f"the tensor, {list(tensor.shape)}."
            )
        elif scores.dtype not in PLAIN_FLOATS:
            problems.append(
                f"{tensor.name}: its scores are {scores.dtype}; expected one of "
                f"{', '.join(PLAIN_FLOATS)}."
            )
    if problems:
        num_more = len(problems) - _MAX_PROBLEMS
        shown = problems[:_MAX_PROBLEMS]
        shown += [f"{num_more} more tensors."] if num_more > 0 else []
        raise SelectionError(headline(f"the scores in {path}", problems), shown)
    return GivenScores(checkpoint, {tensor.name: found[tensor.name] for tensor in tensors})
