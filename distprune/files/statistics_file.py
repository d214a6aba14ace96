"""Files of statistics: safetensors, a few kilobytes per layer, read without torch.

[Note: statistics file] Of each parameter of a model, by its full name, the file has two tensors,
F64, of one number for each input feature that the weight multiplies, or for each output::

    statistics of activations
    layers.0.fc.weight.input_sum              of the input shape: sum of x over all tokens
    layers.0.fc.weight.input_square_sum       of the input shape: sum of x**2 over all tokens

    statistics of gradients
    layers.0.fc.weight.gradient_sum_by_output   [outputs]: sum over a row of weight * g**2
    layers.0.fc.weight.gradient_sum_by_input    of the input shape: sum over a column of the same

Its metadata are::

    format      "distprune-activation-statistics-1" or "distprune-gradient-statistics-1"
    mode        of activations, "one_pass" or "sequential": see ActivationStatistics.mode
    parameters  JSON, by name: {"layout": ..., "shape": [...], "groups": n, "num_tokens": n};
                of gradients "weight", the sum of the weights of all batches, for "num_tokens"

``shape`` is that of the whole weight. ``layout`` says which of its dimensions are the inputs:

    layout                   weight                  input shape    outputs     num_tokens
    linear                   [out, in]               [in]           out         an integer
    conv1d_of_transformers   [in, out]               [in]           out         an integer
    convolution              [out, in / groups, *k]  [in, *k]       out         an integer
    experts                  [E, out, in]            [E, in]        E * out     a list of E integers
    transposed_experts       [E, in, out]            [E, in]        E * out     a list of E integers

The last two are E fused experts: matrices with tokens of their own. Row e of the sums is of the
tokens that came to expert e, and ``num_tokens[e]`` is their number. Outputs are those of expert 0,
then those of expert 1, and so on.

Statistics are of the whole weight, whatever the sharding of the model that they were collected on.
Sums divide by ``num_tokens``, which may be 0 (an expert), or by ``weight``.

[Note: empty] A matrix that saw nothing, such as an expert that no token came to, would have equal
scores, all 0: it would lose its first elements, and in a ranking of several matrices all of them.
It is scored as if each of its inputs had the mean that inputs of its siblings have: by magnitude
times their typical score per magnitude. Siblings are the other experts of the layer: of a fused
parameter, or those whose names differ in the last number. Where none saw anything, all others are.

[Note: names] Statistics have the names of a model's parameters, which are those of the checkpoint's
tensors, except that one of the two may have the prefix of a base model ("model." before each name),
and that experts which have tensors of their own may be one parameter.

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
import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import add
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np

from distprune.base.amount import listed
from distprune.base.blocks import EXPERT_LAYOUTS, LAYOUTS, Layout, WeightLayout, layout_along
from distprune.files.checkpoint import SourceFile, TensorEntry, make_header, read_header
from distprune.files.disk import write_atomically
from distprune.files.errors import CheckpointError, SelectionError

StrPath = str | os.PathLike[str]
MODES = ("one_pass", "sequential")


S = TypeVar("S", bound="StoredSums")


@dataclass(frozen=True)
class StoredSums:
    """The statistics of one parameter.

    Attributes:
        layout: of the weight.
        count: how much was seen: the number of tokens, of fused experts that of each of them; of
            gradients the sum of the weights of all batches.
        first, second: float64, what was added up.
        FORMAT: of the file.
        COUNT: the name of the count in it.
        SUFFIXES: what the names of the arrays end with in it.
        ABOUT: what such statistics are of, for messages.
        EMPTY: what is said of matrices that saw nothing.
    """

    layout: WeightLayout
    count: Any
    first: np.ndarray
    second: np.ndarray

    FORMAT: ClassVar[str]
    COUNT: ClassVar[str]
    SUFFIXES: ClassVar[tuple[str, str]]
    ABOUT: ClassVar[str]
    EMPTY: ClassVar[str]

    @property
    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """What was added up."""
        return self.first, self.second

    @property
    def most(self) -> Any:
        """The count; of fused experts, that of the one that saw most."""
        return max(self.count, default=0) if isinstance(self.count, tuple) else self.count

    @property
    def num_units(self) -> int:
        """How many matrices may see nothing alone: the experts, or 1."""
        return self.layout.num_matrices if self.layout.are_experts else 1

    def units(self) -> list[np.ndarray]:
        """Copies of the arrays, with one row for each matrix that may see nothing alone."""
        return [each.reshape(self.num_units, -1).copy() for each in self.arrays]

    def typical(self, number: int) -> tuple[float, float] | None:
        """Two means over a matrix, by which its siblings can be scored; None if it saw nothing."""
        raise NotImplementedError

    def filled(self: S, numbers: Sequence[int], first: float, second: float) -> S:
        """The same, where some matrices have the means of others; see :meth:`typical`."""
        raise NotImplementedError

    def _with(self: S, rows: Sequence[np.ndarray], count: Any) -> S:
        first, second = (own.reshape(o.shape) for own, o in zip(rows, self.arrays, strict=True))
        return replace(self, first=first, second=second, count=count)


class StoredStatistics(StoredSums):
    """The sums of the inputs, and those of their squares, both of the input shape."""

    FORMAT = "distprune-activation-statistics-1"
    COUNT = "num_tokens"
    SUFFIXES = (".input_sum", ".input_square_sum")
    ABOUT = "activations"
    EMPTY = "no token came to"

    def typical(self, number: int) -> tuple[float, float] | None:
        count = np.reshape(self.count, -1)[number]
        if not count or not self.second.size:
            return None
        first, second = (each[number] / count for each in self.units())
        return float((first**2).mean()), float(second.mean())

    def filled(self, numbers: Sequence[int], first: float, second: float) -> StoredStatistics:
        counts, rows = np.array(self.count).reshape(-1), self.units()
        counts[numbers], rows[0][numbers], rows[1][numbers] = 1, math.sqrt(first), second
        is_fused = self.layout.are_experts
        return self._with(rows, tuple(counts.tolist()) if is_fused else int(counts[0]))


class StoredGradients(StoredSums):
    """The sums of weight * g**2 over each row, [outputs], and each column, of the input shape."""

    FORMAT = "distprune-gradient-statistics-1"
    COUNT = "weight"
    SUFFIXES = (".gradient_sum_by_output", ".gradient_sum_by_input")
    ABOUT = "gradients"
    EMPTY = "all gradients are zero of"

    def typical(self, number: int) -> tuple[float, float] | None:
        by_output, by_input = (each[number] for each in self.units())
        mean = float(by_input.sum()) / (self.count or 1.0) / max(1, len(by_output))
        return (0.0, mean) if mean else None

    def filled(self, numbers: Sequence[int], first: float, second: float) -> StoredGradients:
        rows = self.units()
        rows[0][numbers], rows[1][numbers] = second * self.count, 1.0
        return self._with(rows, self.count)


def write_statistics(path: StrPath, mode: str, parameters: Mapping[str, StoredSums]) -> None:
    """Write statistics; an existing file is replaced at the end, or stays.

    Args:
        path: of the file.
        mode: of activations, how they were collected; "gradients" of gradients.
        parameters: the statistics by name of the parameter, all of one kind.

    Raises:
        OutputError: it cannot be written.
    """
    metadata = {"format": StoredStatistics.FORMAT, "mode": mode}
    if mode == "gradients":
        metadata = {"format": StoredGradients.FORMAT}
    described, tensors, data = {}, {}, []
    for name, stored in parameters.items():
        layout = stored.layout
        facts = {"layout": layout.kind, "shape": list(layout.shape), "groups": layout.groups}
        described[name] = {**facts, stored.COUNT: stored.count}
        for suffix, values in zip(stored.SUFFIXES, stored.arrays, strict=True):
            data.append(np.ascontiguousarray(values, "<f8").tobytes())
            tensors[name + suffix] = ("F64", values.shape, len(data[-1]))
    header = make_header(tensors, metadata | {"parameters": json.dumps(described)})
    write_atomically(os.path.abspath(path), [header, *data])


def read_statistics(path: StrPath) -> tuple[str, dict[str, StoredStatistics]]:
    """The mode, and the statistics of activations by name of the parameter, in the file's order.

    Raises:
        CheckpointError: there is no such file, or it is malformed.

    Cost: a read of the file, and as much memory.
    """
    file, _, stored = _read(path, StoredStatistics)
    return file.metadata["mode"], stored


def read_gradient_statistics(path: StrPath) -> dict[str, StoredGradients]:
    """The statistics of gradients by name of the parameter; see :func:`read_statistics`."""
    return _read(path, StoredGradients)[2]


def _read(path: StrPath, kind: type[S]) -> tuple[SourceFile, np.ndarray, dict[str, S]]:
    """A file, its bytes, and the statistics in them."""
    name = os.fspath(path)
    file = read_header(name, name)
    form, mode = file.metadata.get("format"), file.metadata.get("mode", "")
    if form != kind.FORMAT:
        others = {each.FORMAT: each.ABOUT for each in (StoredStatistics, StoredGradients)}
        has = f"statistics of {others[form]}" if form in others else "no statistics"
        how = " --gradients`" if kind is StoredGradients else "` without --gradients"
        raise CheckpointError(
            f"{name} holds {has}; expected those of {kind.ABOUT}, which `distprune calibrate{how} "
            "writes, or `save` of the statistics of a model."
        )
    if kind is StoredStatistics and mode not in MODES:
        raise CheckpointError(f"{name}: its mode is {mode!a}; expected one of {MODES}.")
    raw = np.fromfile(file.path, dtype=np.uint8)
    try:
        arrays = {
            # A view of what was read, unless numbers lie across the words of memory.
            entry.name: np.require(raw[entry.start : entry.stop].view("<f8"), np.float64, "A")
            .reshape(entry.shape)
            for entry in file.tensors
        }  # fmt: skip
        facts = json.loads(file.metadata["parameters"])
        return file, raw, {each: _stored(kind, each, facts[each], arrays) for each in facts}
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{name} is malformed: {error}.") from error


def _stored(kind: type[S], name: str, facts: Any, arrays: Mapping[str, np.ndarray]) -> S:
    """The statistics of a parameter; raises KeyError, TypeError or ValueError if they are wrong."""
    layout = WeightLayout(facts["layout"], tuple(facts["shape"]), facts["groups"])
    count, shapes = facts[kind.COUNT], [layout.input_shape, layout.input_shape]
    fits = len(layout.shape) == 3 if layout.are_experts else len(layout.shape) > 1
    if layout.kind not in LAYOUTS or min(*layout.shape, layout.groups - 1) < 0 or not fits:
        raise ValueError(f"{name} has the layout {layout}")
    if kind is StoredGradients:
        shapes[0] = (layout.num_outputs,)
    elif layout.are_experts:
        count = tuple(count)
    counts = np.array(count)
    has_count = counts.size == (1 if kind is StoredGradients else layout.num_token_counts)
    if not (has_count and np.isfinite(counts).all() and (counts >= 0).all()):
        raise ValueError(f"{name} has the count {count}")
    stored = kind(layout, count, *(arrays[name + suffix] for suffix in kind.SUFFIXES))
    found = [array.shape for array in stored.arrays]
    if found != shapes:
        raise ValueError(f"{name} has sums of the shapes {found}; expected {shapes}")
    sums_of_squares = stored.arrays[kind is StoredStatistics :]
    are_finite = all(np.isfinite(array).all() for array in stored.arrays)
    if not are_finite or any((array < 0).any() for array in sums_of_squares):
        raise ValueError(f"{name} has sums that are not finite or negative")
    return stored


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
        file: where they were read.
        data: its bytes, of which they are made.
        mode: "one_pass" or "sequential"; of gradients "gradients".
        of_tensor: by name of the tensor.
        warnings: sentences on what is no error, but probably not meant.
    """

    file: SourceFile
    data: bytes
    mode: str
    of_tensor: Mapping[str, StoredSums]
    warnings: Sequence[str] = ()

    def facts(self) -> dict[str, Any]:
        """What decides the scores, as JSON: with the largest number of tokens, or weight."""
        digest, stored = hashlib.sha256(self.data).hexdigest(), list(self.of_tensor.values())
        most = {stored[0].COUNT: max(each.most for each in stored)} if stored else {}
        return {"sha256": digest, "mode": self.mode, **most}


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

    Cost: a read of the file, and twice as much memory.
    """
    kind: type[StoredSums] = StoredGradients if of_gradients else StoredStatistics
    file, raw, stored = _read(path, kind)
    label_of = _renaming([entry.name for entry, _ in tensors], stored)
    # Of each matrix of an expert, how many experts have a tensor of it.
    num_experts = Counter(map(_matrix_of_experts, names))
    needed: dict[str, StoredSums] = {}
    sources: dict[str, tuple[TensorEntry, Origin, str, int]] = {}
    for entry, layout in tensors:
        origins = [o for o in origins_of(entry.name) if label_of(o.parameter) in stored]
        if not origins:
            raise SelectionError(
                f"{path} has no statistics of {entry.name}, but of {listed(list(stored))}; "
                "calibrate a model with this layer, or exclude the tensor."
            )
        label, matrix = label_of(origins[0].parameter), _matrix_of_experts(entry.name)
        number = 1 if matrix is None else num_experts[matrix]
        found = _statistics_of(entry, origins[0], stored[label], number)
        if found is None:
            experts = f" and is of one of {number} experts" if number > 1 else ""
            raise SelectionError(
                f"{entry.name} has the shape {list(entry.shape)}{experts}, and its statistics are "
                f"those of {label}, of shape {list(stored[label].layout.shape)}; expected "
                "statistics of this model."
            )
        if of_gradients and not found.count:
            raise SelectionError(
                f"{path}: the weights of all batches of {label} are 0; expected statistics of at "
                "least one batch that counts."
            )
        if not of_gradients and layout is not None:
            dims = list(range(1, len(entry.shape)))
            if found.layout.kind in _INPUT_DIMS:
                dims = [_INPUT_DIMS[found.layout.kind]]
            if layout != layout_along(entry.name, entry.shape, dims):
                raise SelectionError(
                    f"{entry.name}: its statistics say that the inputs are along the dimensions "
                    f"{dims} ({found.layout.kind}), and the selection says otherwise; correct "
                    "input_dims (--input-dim)."
                )
        needed[entry.name] = found
        sources[entry.name] = entry, origins[0], label, number
    filled, empty = scored_as_siblings({label: stored[label] for *_, label, _ in sources.values()})
    if empty is not None:
        empty = scored_as_siblings(needed)[1]  # by the names of tensors
        for name, (entry, origin, label, number) in sources.items():
            needed[name] = _statistics_of(entry, origin, filled[label], number) or needed[name]
    own = {label_of(origin.parameter) for name in names for origin in origins_of(name)}
    warnings = [] if empty is None else [empty]
    if others := [label for label in stored if label not in own]:
        warnings.append(
            f"{path} has statistics of {listed(others)}, which the checkpoint does not have; "
            "expected statistics of this model."
        )
    mode = "gradients" if of_gradients else file.metadata["mode"]
    return TensorStatistics(file, raw.tobytes(), mode, needed, warnings)


def _renaming(tensors: Sequence[str], stored: Collection[str]) -> Callable[[str], str]:
    """How parameters that tensors may be are called in statistics.

    One of the two may have the prefix of a base model. Names stay as they are if some are equal, or
    if not exactly one prefix fits.
    """

    def fits(rename: Callable[[str], str], check: Callable[[Iterable[bool]], bool] = all) -> bool:
        return check(
            any(rename(o.parameter) in stored for o in origins_of(name)) for name in tensors
        )

    if fits(str, any):
        return str
    prefixes = sorted({name.partition(".")[0] + "." for name in [*tensors[:1], *stored]})
    renamings: list[Callable[[str], str]] = [partial(add, prefix) for prefix in prefixes]
    renamings.append(lambda name: name.removeprefix(tensors[0].partition(".")[0] + "."))
    fitting = list(filter(fits, renamings))
    return fitting[0] if len(fitting) == 1 else str


def scored_as_siblings(stored: Mapping[str, S]) -> tuple[dict[str, S], str | None]:
    """Statistics by name in which no matrix is empty; a warning if some were. See [Note: empty]."""
    typical: dict[str, list[tuple[float, float] | None]] = {}
    by_key: dict[str, list[tuple[float, float]]] = {}
    for name, each in stored.items():
        typical[name] = [each.typical(number) for number in range(each.num_units)]
        by_key.setdefault(_siblings_of(each, name), []).extend(filter(None, typical[name]))
    empty = {name: [n for n, t in enumerate(found) if t is None] for name, found in typical.items()}
    empty = {name: numbers for name, numbers in empty.items() if numbers}
    if not empty:
        return dict(stored), None
    filled, everything = dict(stored), [each for found in by_key.values() for each in found]
    for name, numbers in empty.items():
        known = by_key[_siblings_of(stored[name], name)] or everything or [(0.0, 1.0)]
        means = [math.fsum(column) / len(column) for column in zip(*known, strict=True)]
        filled[name] = stored[name].filled(numbers, *means)
    experts = {n: f" (experts {listed(map(str, empty[n]), 8)})" for n in empty}
    whole = [n for n in empty if len(empty[n]) == len(typical[n])]
    names = [name + experts[name] * (name not in whole) for name in empty]
    num_empty, total = (sum(map(len, each.values())) for each in (empty, typical))
    return filled, (
        f"{stored[next(iter(empty))].EMPTY} {listed(names)} ({num_empty} of {total} matrices): "
        "these are ranked by magnitude, times what matrices beside them score for it. Calibrate on "
        "more text, or exclude them."
    )


def _siblings_of(stored: StoredSums, name: str) -> str:
    """What the names of siblings have in common; see [Note: empty]."""
    return name if stored.num_units > 1 else siblings_key(name)


def siblings_key(name: str) -> str:
    """A name without its last number."""
    return re.sub(r"\.\d+(?=\.(?!.*\.\d+\.))", ".*", name)


class Origin(NamedTuple):
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
        origin._replace(parameter=origin.parameter.replace(own, other))
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
    entry: TensorEntry, origin: Origin, stored: StoredSums, num_experts: int
) -> StoredSums | None:
    """The statistics of a tensor; None if those of its parameter are of another shape.

    Matrices of experts may be stored the other way round. transformers transposes them on loading
    if their shape is not the expected one (qwen3_vl_moe), and so only then.

    Args:
        entry: the tensor.
        origin: the parameter, and which part of it the tensor is.
        stored: statistics of the parameter.
        num_experts: that the checkpoint has tensors of, beside this one and of it.
    """
    layout, row = stored.layout, origin.expert
    if row is None:
        count, *matrix = layout.shape
        if entry.shape == layout.shape:
            return stored
        if not layout.are_experts or entry.shape != (count, *reversed(matrix)):
            return None
        turned = WeightLayout(EXPERT_LAYOUTS[not layout.is_transposed], entry.shape)
        return replace(stored, layout=turned)
    whole = (entry.shape[0] * origin.num_parts, *entry.shape[1:])
    fits = layout.are_experts and num_experts == layout.num_matrices and row < num_experts
    if not fits or whole != layout.matrix_shape:
        return None
    linear, second = WeightLayout("linear", entry.shape), stored.second[row]
    if isinstance(stored, StoredGradients):
        rows = stored.first.reshape(num_experts, origin.num_parts, -1)[row, origin.part]
        return StoredGradients(linear, stored.count, rows, second)
    return StoredStatistics(linear, stored.count[row], stored.first[row], second)
