"""Which statistics of activations or gradients belong to which tensors of a checkpoint.

Statistics have the names of a model's parameters, which are those of the checkpoint's tensors,
except that one of the two may have the prefix of a base model ("model." before each name), and that
experts which have tensors of their own may be one parameter.

[Note: experts] On disk, most families have a tensor for each matrix of each expert; in the model,
one parameter has those of all experts of a layer::

    ...block_sparse_moe.experts.3.w1.weight  [I, H]   part of [3] of  ...mlp.experts.gate_up_proj
    ...block_sparse_moe.experts.3.w3.weight  [I, H]   part of [3] of  the same  [E, 2 I, H]
    ...block_sparse_moe.experts.3.w2.weight  [H, I]   [3] of  ...mlp.experts.down_proj  [E, H, I]

An expert has one input for all outputs of such a parameter. So the statistics of activations of a
tensor are those of its expert, in whatever order the outputs are merged. Those of gradients by
output are of the tensor's part: transformers merges by concatenation, w1 or gate_proj first.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from distprune.base.blocks import EXPERT_LAYOUTS, Layout, WeightLayout, layout_along
from distprune.base.report_text import listed
from distprune.files.checkpoints.header import TensorEntry
from distprune.files.checkpoints.statistics_file import (
    StoredGradients,
    StoredStatistics,
    read_gradient_statistics,
    read_statistics,
)
from distprune.files.errors import CheckpointError, SelectionError

Stored = StoredStatistics | StoredGradients

_BLOCK = 1 << 20
# By layout, the dimension of the inputs; of others, all but the first.
_INPUT_DIMS = {"conv1d_of_transformers": 0, "experts": 2, "transposed_experts": 1}
_OF_EXPERT = re.compile(r"(?P<experts>.+\.experts)\.(?P<number>[0-9]+)\.(?P<matrix>\w+)\.weight")
# By name of a matrix: the parameters that it may be a part of, and how many such parts one has.
_GATED, _UNGATED, _LAST = ("gate_up_proj", 2), ("up_proj", 1), ("down_proj", 1)
_MERGED = {
    "w1": (_GATED,), "w3": (_GATED,), "w2": (_LAST,),
    "gate_proj": (_GATED,), "up_proj": (_GATED, _UNGATED), "down_proj": (_LAST,),
}  # fmt: skip
_SECOND_PARTS = ("w3", "up_proj")  # of a merged parameter: the outputs after those of the first
# What transformers renames in families with experts (Mixtral, Granite, Nemotron-H).
_RENAMED = (
    (".block_sparse_moe.", ".mlp."),
    (".block_sparse_moe.input_linear.weight", ".block_sparse_moe.experts.gate_up_proj"),
    (".block_sparse_moe.output_linear.weight", ".block_sparse_moe.experts.down_proj"),
    ("backbone.layers.", "model.layers."),
)


@dataclass(frozen=True)
class TensorStatistics:
    """Statistics of activations or of gradients, by tensor.

    Attributes:
        path: of the file.
        sha256: of its bytes.
        mode: "one_pass" or "sequential"; of gradients "gradients".
        of_tensor: by name of the tensor.
        warnings: sentences on what is no error, but probably not meant.
    """

    path: str
    sha256: str
    mode: str
    of_tensor: Mapping[str, Stored]
    warnings: tuple[str, ...] = ()

    @property
    def num_tokens(self) -> int:
        """The tokens that most layers saw; experts may have seen fewer."""
        return max(
            (s.most_tokens for s in self.of_tensor.values() if isinstance(s, StoredStatistics)),
            default=0,
        )

    @property
    def weight(self) -> float | None:
        """The largest weight of the batches of gradients; None: statistics of activations."""
        weights = (s.weight for s in self.of_tensor.values() if isinstance(s, StoredGradients))
        return max(weights, default=None)

    def facts(self) -> dict[str, Any]:
        """What decides the scores, as JSON."""
        if self.weight is not None:
            return {"sha256": self.sha256, "mode": self.mode, "weight": self.weight}
        return {"sha256": self.sha256, "mode": self.mode, "num_tokens": self.num_tokens}

    def blocks(self) -> Iterator[bytes]:
        """The file again, a megabyte at a time.

        Raises:
            CheckpointError: it has changed, or is gone; at the end at the latest.
        """
        digest = hashlib.sha256()
        for block in _blocks(self.path):
            digest.update(block)
            yield block
        if digest.hexdigest() != self.sha256:
            raise CheckpointError(
                f"{self.path} has changed since it was opened; expected statistics that stay as "
                "they are."
            )


def match_statistics(
    path: str,
    tensors: Sequence[tuple[TensorEntry, Layout | None]],
    names: Collection[str],
    of_gradients: bool = False,
) -> TensorStatistics:
    """Read statistics, and find those of some tensors.

    Args:
        path: of the file.
        tensors: that need them, with the place of their inputs if that is known.
        names: of all tensors of the checkpoint.
        of_gradients: whether the file has statistics of gradients, and not of activations.

    Raises:
        SelectionError: a tensor has no statistics, or those of another weight; names the first.
        CheckpointError: the file cannot be read, or is malformed.

    Cost: two reads of the file, and as much memory.
    """
    digest = hashlib.sha256()
    for block in _blocks(path):
        digest.update(block)
    mode, stored = _read(path, of_gradients)
    renamed = _renaming([entry.name for entry, _ in tensors], stored)
    # Of each matrix of an expert, how many experts have a tensor of it.
    counts = Counter(map(_matrix_of_experts, names))
    needed: dict[str, Stored] = {}
    for entry, layout in tensors:
        origin = next((o for o in origins_of(entry.name) if renamed(o.parameter) in stored), None)
        if origin is None:
            raise SelectionError(
                f"{path} has no statistics of {entry.name}, but of {listed(list(stored))}; "
                "calibrate a model with this layer, or exclude the tensor."
            )
        label = renamed(origin.parameter)
        matrix = _matrix_of_experts(entry.name)
        num_experts = 1 if matrix is None else counts[matrix]
        found = _statistics_of(entry, origin, stored[label], num_experts)
        if found is None:
            raise SelectionError(_other_weight(entry, label, stored[label].layout, num_experts))
        _check_dims(entry, layout, found)
        needed[entry.name] = found
    own = {renamed(origin.parameter) for name in names for origin in origins_of(name)}
    others = [label for label in stored if label not in own]
    return TensorStatistics(path, digest.hexdigest(), mode, needed, _warnings(path, needed, others))


def _read(path: str, of_gradients: bool) -> tuple[str, Mapping[str, Stored]]:
    """The mode of a file, and its statistics by parameter."""
    if not of_gradients:
        return read_statistics(path)
    stored = read_gradient_statistics(path)
    empty = [name for name, of_one in stored.items() if not of_one.weight]
    if empty:
        raise SelectionError(
            f"{path}: the weights of all batches of {listed(empty)} are 0; expected statistics "
            "of at least one batch that counts."
        )
    return "gradients", stored


def _renaming(tensors: Sequence[str], stored: Collection[str]) -> Callable[[str], str]:
    """How parameters that tensors may be are called in statistics.

    One of the two may have the prefix of a base model. Names stay as they are if some are equal, or
    if not exactly one prefix fits.
    """
    labels = [[origin.parameter for origin in origins_of(name)] for name in tensors]
    if not labels or any(label in stored for of_one in labels for label in of_one):
        return str
    pairs = [(label, own) for label in stored for own in labels[0]]
    # What a name begins with on the disk, and in statistics.
    prefixes = {("", label.removesuffix(own)) for label, own in pairs if label.endswith(f".{own}")}
    prefixes |= {(own.removesuffix(label), "") for label, own in pairs if own.endswith(f".{label}")}
    fitting = [
        (old, new)
        for old, new in prefixes
        if (old + new).count(".") == 1
        and all(any(new + label.removeprefix(old) in stored for label in one) for one in labels)
    ]
    if len(fitting) != 1:
        return str
    old, new = fitting[0]
    return lambda name: new + name.removeprefix(old)


def _other_weight(entry: TensorEntry, label: str, stored: WeightLayout, num_experts: int) -> str:
    """That statistics are those of another weight."""
    tensor = f"{entry.name} has the shape {list(entry.shape)}"
    if label == entry.name or num_experts == 1:
        whose = "its statistics are those of a weight"
    else:
        tensor += f" and is of one of {num_experts} experts"
        whose = f"its statistics are those of {label},"
    return (
        f"{tensor}, and {whose} of shape {list(stored.shape)}; expected statistics of this model."
    )


def _check_dims(entry: TensorEntry, layout: Layout | None, stored: Stored) -> None:
    """Raise SelectionError if the inputs of a weight are along another dimension."""
    if isinstance(stored, StoredGradients):
        return  # which of its dimensions are called inputs makes no difference
    dims = list(range(1, len(entry.shape)))
    if stored.layout.kind in _INPUT_DIMS:
        dims = [_INPUT_DIMS[stored.layout.kind]]
    if layout is not None and layout != layout_along(entry.name, entry.shape, dims):
        raise SelectionError(
            f"{entry.name}: its statistics say that the inputs are along the dimensions {dims} "
            f"({stored.layout.kind}), and the selection says otherwise; correct input_dims "
            "(--input-dim)."
        )


def _warnings(
    path: str,
    needed: Mapping[str, Stored],
    others: Sequence[str],
) -> tuple[str, ...]:
    warnings = []
    silent: list[str] = []
    zero: list[str] = []
    for name, stored in needed.items():
        if isinstance(stored, StoredStatistics):
            silent += _without_tokens(name, stored)
        elif not stored.by_input.any():
            zero.append(name)
    for what, empty in (("no token came to", silent), ("all gradients are zero of", zero)):
        if empty:
            warnings.append(
                f"{what} {listed(empty)} in {path}: all scores are zero, so that these are pruned "
                "first, in the order of their elements. Calibrate on more text, or exclude them."
            )
    if others:
        warnings.append(
            f"{path} has statistics of {listed(others)}, which the checkpoint does not have; "
            "expected statistics of this model."
        )
    return tuple(warnings)


def _without_tokens(name: str, stored: StoredStatistics) -> Iterator[str]:
    counts = stored.num_tokens
    if not stored.most_tokens:
        yield name
    elif isinstance(counts, tuple) and not all(counts):
        experts = [str(number) for number, count in enumerate(counts) if not count]
        yield f"{name} (experts {listed(experts)})"


def _blocks(path: str) -> Iterator[bytes]:
    try:
        with open(path, "rb") as file:
            while block := file.read(_BLOCK):
                yield block
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error


@dataclass(frozen=True)
class Origin:
    """A parameter that a tensor on disk may be, or may be a part of.

    Attributes:
        parameter: its name, except for the prefix of a base model.
        expert: the index of its dimension 0 where the tensor is; None: the tensor is all of it.
        num_parts: the outputs of an expert are those of so many tensors of one shape.
        part: which of them this one is.
    """

    parameter: str
    expert: int | None = None
    num_parts: int = 1
    part: int = 0


def origins_of(name: str) -> tuple[Origin, ...]:
    """What a tensor may be in a model: first the parameter of its own name."""
    origins = [Origin(name)]
    match = _OF_EXPERT.fullmatch(name)
    if match is not None:
        origins += [
            Origin(
                f"{match['experts']}.{merged}",
                int(match["number"]),
                num_parts,
                int(num_parts > 1 and match["matrix"] in _SECOND_PARTS),
            )
            for merged, num_parts in _MERGED.get(match["matrix"], ())
        ]
    renamed = [
        replace(origin, parameter=origin.parameter.replace(own, other))
        for origin in origins
        for own, other in _RENAMED
        if own in origin.parameter
    ]
    return (*origins, *renamed)


def _matrix_of_experts(name: str) -> tuple[str, str] | None:
    """What the tensors of all experts have in common that differ by the expert only."""
    match = _OF_EXPERT.fullmatch(name)
    return None if match is None else (match["experts"], match["matrix"])


def _statistics_of(
    entry: TensorEntry,
    origin: Origin,
    stored: Stored,
    num_experts: int,
) -> Stored | None:
    """The statistics of a tensor; None if those of its parameter are of another shape.

    Args:
        entry: the tensor.
        origin: the parameter, and which part of it the tensor is.
        stored: statistics of the parameter.
        num_experts: that the checkpoint has tensors of, beside this one and of it.
    """
    if origin.expert is None:
        return _as_on_disk(entry, stored)
    if not stored.layout.are_experts:
        return None
    count, (outputs, inputs) = stored.layout.num_matrices, stored.layout.matrix_shape
    row, layout = origin.expert, WeightLayout("linear", entry.shape)
    if num_experts != count or row >= count or len(entry.shape) != 2:
        return None
    if (entry.shape[0] * origin.num_parts, entry.shape[1]) != (outputs, inputs):
        return None
    if isinstance(stored, StoredGradients):
        rows = stored.by_output.reshape(count, origin.num_parts, -1)[row, origin.part]
        return StoredGradients(layout, stored.weight, rows, stored.by_input[row])
    if isinstance(stored.num_tokens, int):
        return None
    return StoredStatistics(layout, stored.num_tokens[row], stored.sums[row], stored.squares[row])


def _as_on_disk(entry: TensorEntry, stored: Stored) -> Stored | None:
    """Statistics of a tensor that is a whole parameter.

    Matrices of experts may be stored the other way round. transformers transposes them on loading
    if their shape is not the expected one (qwen3_vl_moe), and so only then.
    """
    layout = stored.layout
    if entry.shape == layout.shape:
        return stored
    count, *matrix = layout.shape
    if not layout.are_experts or entry.shape != (count, *reversed(matrix)):
        return None
    return replace(
        stored, layout=WeightLayout(EXPERT_LAYOUTS[not layout.is_transposed], entry.shape)
    )
