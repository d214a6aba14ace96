"""The parameters that transformers makes of the tensors of experts when it loads a checkpoint.

Statistics have the names of parameters. On disk, most families have a tensor for each matrix of
each expert; in the model, one parameter has those of all experts of a layer::

    ...block_sparse_moe.experts.3.w1.weight  [I, H]   part of [3] of  ...mlp.experts.gate_up_proj
    ...block_sparse_moe.experts.3.w3.weight  [I, H]   part of [3] of  the same  [E, 2 I, H]
    ...block_sparse_moe.experts.3.w2.weight  [H, I]   [3] of  ...mlp.experts.down_proj  [E, H, I]

An expert has one input for all outputs of such a parameter. So the statistics of a tensor are those
of its expert, in whatever order the outputs are merged.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from distprune.files.formats.header import TensorEntry
from distprune.files.formats.statistics_file import EXPERT_LAYOUTS, StoredStatistics

_OF_EXPERT = re.compile(r"(?P<experts>.+\.experts)\.(?P<number>[0-9]+)\.(?P<matrix>\w+)\.weight")
# By name of a matrix: the parameters that it may be a part of, and how many such parts one has.
_GATED, _UNGATED, _LAST = ("gate_up_proj", 2), ("up_proj", 1), ("down_proj", 1)
_MERGED = {
    "w1": (_GATED,), "w3": (_GATED,), "w2": (_LAST,),
    "gate_proj": (_GATED,), "up_proj": (_GATED, _UNGATED), "down_proj": (_LAST,),
}  # fmt: skip
# What transformers renames in families with experts (Mixtral, Granite, Nemotron-H).
_RENAMED = (
    (".block_sparse_moe.", ".mlp."),
    (".block_sparse_moe.input_linear.weight", ".block_sparse_moe.experts.gate_up_proj"),
    (".block_sparse_moe.output_linear.weight", ".block_sparse_moe.experts.down_proj"),
    ("backbone.layers.", "model.layers."),
)


@dataclass(frozen=True)
class Origin:
    """A parameter that a tensor on disk may be, or may be a part of.

    Attributes:
        parameter: its name, except for the prefix of a base model.
        expert: the index of its dimension 0 where the tensor is; None: the tensor is all of it.
        num_parts: the outputs of an expert are those of so many tensors of one shape.
    """

    parameter: str
    expert: int | None = None
    num_parts: int = 1


def origins_of(name: str) -> tuple[Origin, ...]:
    """What a tensor may be in a model: first the parameter of its own name."""
    origins = [Origin(name)]
    match = _OF_EXPERT.fullmatch(name)
    if match is not None:
        origins += [
            Origin(f"{match['experts']}.{merged}", int(match["number"]), num_parts)
            for merged, num_parts in _MERGED.get(match["matrix"], ())
        ]
    renamed = [
        replace(origin, parameter=origin.parameter.replace(own, other))
        for origin in origins
        for own, other in _RENAMED
        if own in origin.parameter
    ]
    return (*origins, *renamed)


class ExpertCounts:
    """How many experts the layers of a checkpoint have.

    Args:
        names: of all its tensors.
    """

    def __init__(self, names: Iterable[str]) -> None:
        matches = filter(None, map(_OF_EXPERT.fullmatch, names))
        self._counts = Counter((match["experts"], match["matrix"]) for match in matches)

    def of(self, name: str) -> int:
        """The number of tensors that differ from this one by the expert only, and of itself."""
        match = _OF_EXPERT.fullmatch(name)
        return self._counts[match["experts"], match["matrix"]] if match is not None else 1


def statistics_of(
    entry: TensorEntry, origin: Origin, stored: StoredStatistics, num_experts: int
) -> StoredStatistics | None:
    """The statistics of a tensor; None if those of its parameter are of another shape.

    Args:
        entry: the tensor.
        origin: the parameter, and which part of it the tensor is.
        stored: statistics of the parameter.
        num_experts: that the checkpoint has tensors of, beside this one and of it.
    """
    if origin.expert is None:
        return _as_on_disk(entry, stored)
    if stored.layout not in EXPERT_LAYOUTS or isinstance(stored.num_tokens, int):
        return None
    count, outputs, inputs = stored.shape
    if stored.layout == "transposed_experts":
        inputs, outputs = outputs, inputs
    row = origin.expert
    if num_experts != count or row >= count or len(entry.shape) != 2:
        return None
    if (entry.shape[0] * origin.num_parts, entry.shape[1]) != (outputs, inputs):
        return None
    return StoredStatistics(
        "linear", entry.shape, 1, stored.num_tokens[row], stored.sums[row], stored.squares[row]
    )


def _as_on_disk(entry: TensorEntry, stored: StoredStatistics) -> StoredStatistics | None:
    """Statistics of a tensor that is a whole parameter.

    Matrices of experts may be stored the other way round. transformers transposes them on loading
    if their shape is not the expected one (qwen3_vl_moe), and so only then.
    """
    if entry.shape == stored.shape:
        return stored
    count, *matrix = stored.shape
    if stored.layout not in EXPERT_LAYOUTS or entry.shape != (count, *reversed(matrix)):
        return None
    first, second = EXPERT_LAYOUTS
    return replace(stored, layout=second if stored.layout == first else first, shape=entry.shape)
