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

    format      "distprune-statistics-2"
    mode        of activations, "one_pass" or "sequential": see ActivationStatistics.mode; or
                "gradients"
    parameters  JSON, by name: {"layout": ..., "shape": [...], "groups": n, "count": n}: the number
                of tokens; of gradients the sum of the weights of all batches

``shape`` is that of the whole weight. ``layout`` says which of its dimensions are the inputs:

    layout                   weight                  input shape    outputs     tokens
    linear                   [out, in]               [in]           out         an integer
    conv1d_of_transformers   [in, out]               [in]           out         an integer
    convolution              [out, in / groups, *k]  [in, *k]       out         an integer
    experts                  [E, out, in]            [E, in]        E * out     a list of E integers
    transposed_experts       [E, in, out]            [E, in]        E * out     a list of E integers

The last two are E fused experts: matrices with tokens of their own. Row e of the sums is of the
tokens that came to expert e, and ``count[e]`` is their number. Outputs are those of expert 0,
then those of expert 1, and so on.

Statistics are of the whole weight, whatever the sharding of the model that they were collected on.
Sums divide by ``count``, which may be 0 (an expert).

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
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import add
from typing import Any

import numpy as np

from distprune.base.amount import listed
from distprune.base.blocks import EXPERT_LAYOUTS, LAYOUTS, Layout, WeightLayout, layout_along
from distprune.files.checkpoint import SourceFile, TensorEntry, make_header, read_header
from distprune.files.disk import write_atomically
from distprune.files.errors import CheckpointError, SelectionError

StrPath = str | os.PathLike[str]
_FORMAT = "distprune-statistics-2"
MODES = ("one_pass", "sequential", "gradients")
# What the names of the two arrays of a parameter end with: of activations, and of gradients.
_SUFFIXES = (
    (".input_sum", ".input_square_sum"),
    (".gradient_sum_by_output", ".gradient_sum_by_input"),
)


@dataclass(frozen=True)
class StoredStatistics:
    """The statistics of one parameter.

    Attributes:
        layout: of the weight.
        count: how much was seen: the number of tokens, of fused experts that of each of them; of
            gradients the sum of the weights of all batches.
        first, second: float64, what was added up: inputs and their squares, both of the input
            shape; or weight * g**2 over each row, [outputs], and each column, of the input shape.
        of_gradients: whether it is the latter.
        rows: the sums over all rows of the matrix, where ``first`` has those over a part of them.
    """

    layout: WeightLayout
    count: Any
    first: np.ndarray
    second: np.ndarray
    of_gradients: bool = False
    rows: np.ndarray | None = None

    def _by_matrix(self) -> list[np.ndarray]:
        """Copies of the sums, with one row for each matrix that may see nothing alone."""
        num_rows = self.layout.num_matrices if self.layout.are_experts else 1
        return [each.reshape(num_rows, -1).copy() for each in (self.first, self.second)]

    def typical(self) -> list[tuple[float, float] | None]:
        """Of each matrix two means by which siblings can be scored; None if it saw nothing."""
        first, second = self._by_matrix()
        counts = np.full(len(second), self.count)
        return [
            (float(((sums / n) ** 2).mean()), float((squares / n).mean()))
            if n and (squares.any() if self.of_gradients else len(squares))
            else None
            for n, sums, squares in zip(counts, first, second, strict=True)
        ]

    def filled(self, numbers: Sequence[int], means: Sequence[float]) -> StoredStatistics:
        """The same, where some matrices have the means of others; see :meth:`typical`."""
        (first, second), count = self._by_matrix(), self.count
        if self.of_gradients:
            first[numbers], second[numbers] = 1.0, means[1] * count
        else:
            counts = np.array(count).reshape(-1)
            counts[numbers], first[numbers], second[numbers] = 1, math.sqrt(means[0]), means[1]
            count = tuple(counts.tolist()) if self.layout.are_experts else int(counts[0])
        first, second = first.reshape(self.first.shape), second.reshape(self.second.shape)
        return replace(self, count=count, first=first, second=second)


def write_statistics(path: StrPath, mode: str, parameters: Mapping[str, StoredStatistics]) -> None:
    """Write statistics; an existing file is replaced at the end, or stays.

    Args:
        path: of the file.
        mode: of activations, how they were collected; "gradients" of gradients.
        parameters: the statistics by name of the parameter, all of one kind.

    Raises:
        OutputError: it cannot be written.
    """
    described, tensors, data = {}, {}, []
    for name, stored in parameters.items():
        layout = stored.layout
        facts = {"layout": layout.kind, "shape": list(layout.shape), "groups": layout.groups}
        described[name] = {**facts, "count": stored.count}
        arrays = zip(_SUFFIXES[stored.of_gradients], (stored.first, stored.second), strict=True)
        for suffix, values in arrays:
            data.append(np.ascontiguousarray(values, "<f8").tobytes())
            tensors[name + suffix] = ("F64", values.shape, len(data[-1]))
    metadata = {"format": _FORMAT, "mode": mode, "parameters": json.dumps(described)}
    header = make_header(tensors, metadata)
    write_atomically(os.path.abspath(path), header + b"".join(data))


def read_statistics(
    path: StrPath, of_gradients: bool = False
) -> tuple[str, dict[str, StoredStatistics]]:
    """The mode, and the statistics by name of the parameter, in the file's order.

    Raises:
        CheckpointError: there is no such file, it is malformed, or has those of the other kind.

    Cost: a read of the file, and as much memory.
    """
    return _read(path, of_gradients)[2:]


def _read(
    path: StrPath, of_gradients: bool
) -> tuple[SourceFile, np.ndarray, str, dict[str, StoredStatistics]]:
    """A file, its bytes, the mode, and the statistics in them."""
    name = os.fspath(path)
    file = read_header(name, name)
    mode = file.metadata.get("mode", "")
    kinds = ("activations", "gradients")
    is_known = file.metadata.get("format") == _FORMAT and mode in MODES
    if not is_known or of_gradients != (mode == "gradients"):
        has = f"statistics of {kinds[mode == 'gradients']}" if is_known else "no statistics"
        how = "with" if of_gradients else "without"
        raise CheckpointError(
            f"{name} holds {has}; expected those of {kinds[of_gradients]}, which `distprune "
            f"calibrate` {how} --gradients writes, or `save` of the statistics of a model."
        )
    raw = np.fromfile(file.path, dtype=np.uint8)
    try:
        arrays = {
            # A view of what was read, unless numbers lie across the words of memory.
            entry.name: np.require(raw[entry.start : entry.stop].view("<f8"), np.float64, "A")
            .reshape(entry.shape)
            for entry in file.tensors
        }  # fmt: skip
        described = json.loads(file.metadata["parameters"])
        stored = {each: _stored(each, described[each], arrays, of_gradients) for each in described}
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{name} is malformed: {error}.") from error
    return file, raw, mode, stored


def _stored(
    name: str, facts: Any, arrays: Mapping[str, np.ndarray], of_gradients: bool
) -> StoredStatistics:
    """The statistics of a parameter; raises KeyError, TypeError or ValueError if they are wrong."""
    layout = WeightLayout(facts["layout"], tuple(facts["shape"]), facts["groups"])
    fits = len(layout.shape) == 3 if layout.are_experts else len(layout.shape) > 1
    if layout.kind not in LAYOUTS or min(*layout.shape, layout.groups - 1) < 0 or not fits:
        raise ValueError(f"{name} has the layout {layout}")
    has_many = layout.are_experts and not of_gradients
    count = tuple(facts["count"]) if has_many else facts["count"]
    counts = np.array(count)
    has_count = counts.size == (layout.num_token_counts if has_many else 1)
    are_counts = np.isfinite(counts) & ((counts > 0) if of_gradients else (counts >= 0))
    if not (has_count and are_counts.all()):
        raise ValueError(f"{name} has the count {count}")
    first, second = (arrays[name + suffix] for suffix in _SUFFIXES[of_gradients])
    expected = (layout.num_outputs,) if of_gradients else layout.input_shape, layout.input_shape
    if (first.shape, second.shape) != expected:
        found = [first.shape, second.shape]
        raise ValueError(f"{name} has sums of the shapes {found}; expected {list(expected)}")
    are_finite = np.isfinite(first).all() and np.isfinite(second).all()
    if not are_finite or (second < 0).any() or (of_gradients and (first < 0).any()):
        raise ValueError(f"{name} has sums that are not finite or negative")
    return StoredStatistics(layout, count, first, second, of_gradients)


_OF_EXPERT = re.compile(r"(?P<experts>.+\.experts)\.(?P<number>[0-9]+)\.(?P<matrix>\w+)\.weight")
# By name of a matrix: the parameters that it may be a part of, how many such parts one has, and
# which of them it is. The first part of a merged parameter has the first outputs.
_GATE, _UP, _DOWN = ("gate_up_proj", 2, 0), ("gate_up_proj", 2, 1), ("down_proj", 1, 0)
_MERGED = {
    "w1": (_GATE,), "w3": (_UP,), "w2": (_DOWN,),
    "gate_proj": (_GATE,), "up_proj": (_UP, ("up_proj", 1, 0)), "down_proj": (_DOWN,),
}  # fmt: skip
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
    of_tensor: Mapping[str, StoredStatistics]
    warnings: Sequence[str] = ()

    def facts(self) -> dict[str, Any]:
        """What decides the scores, as JSON: with the largest number of tokens, or weight."""
        counts = [np.max(each.count, initial=0).item() for each in self.of_tensor.values()]
        digest = hashlib.sha256(self.data).hexdigest()
        return {"sha256": digest, "mode": self.mode, "count": max(counts)}


def match_statistics(
    path: str, tensors: Sequence[tuple[TensorEntry, Layout | None]], of_gradients: bool = False
) -> TensorStatistics:
    """Read statistics, and find those of some tensors.

    Args:
        path: of the file.
        tensors: that need them, with the place of their inputs if that is known.
        of_gradients: whether the file has statistics of gradients, and not of activations.

    Raises:
        SelectionError: a tensor has no statistics, or those of another weight; names the first.
        CheckpointError: the file cannot be read, or is malformed.

    Cost: a read of the file, and twice as much memory.
    """
    file, raw, mode, stored = _read(path, of_gradients)
    label_of = _renaming([entry.name for entry, _ in tensors], stored)
    needed: dict[str, StoredStatistics] = {}
    sources: dict[str, tuple[TensorEntry, Origin, str]] = {}
    for entry, layout in tensors:
        origins = [o for o in origins_of(entry.name) if label_of(o[0]) in stored]
        if not origins:
            raise SelectionError(
                f"{path} has no statistics of {entry.name}, but of {listed(list(stored))}; "
                "calibrate a model with this layer, or exclude the tensor."
            )
        label = label_of(origins[0][0])
        found = _statistics_of(entry, origins[0], stored[label])
        if found is None:
            raise SelectionError(
                f"{entry.name} has the shape {list(entry.shape)}, and its statistics are those of "
                f"{label}, of shape {list(stored[label].layout.shape)}; expected statistics of "
                "this model."
            )
        if not of_gradients and layout is not None:
            is_convolution = found.layout.kind == "convolution"
            dims = [*range(1, len(entry.shape))] if is_convolution else [found.layout.input_dim]
            if layout != layout_along(entry.name, entry.shape, dims):
                raise SelectionError(
                    f"{entry.name}: its statistics say that the inputs are along the dimensions "
                    f"{dims} ({found.layout.kind}), and the selection says otherwise; correct "
                    "input_dims (--input-dim)."
                )
        needed[entry.name] = found
        sources[entry.name] = entry, origins[0], label
    filled, empty = scored_as_siblings({label: stored[label] for *_, label in sources.values()})
    if empty is not None:
        empty = scored_as_siblings(needed)[1]  # by the names of tensors
        for name, (entry, origin, label) in sources.items():
            needed[name] = _statistics_of(entry, origin, filled[label]) or needed[name]
    warnings = [] if empty is None else [empty]
    return TensorStatistics(file, raw.tobytes(), mode, needed, warnings)


def _renaming(tensors: Sequence[str], stored: Collection[str]) -> Callable[[str], str]:
    """How parameters that tensors may be are called in statistics.

    One of the two may have the prefix of a base model. Names stay as they are if some are equal, or
    if not exactly one prefix fits.
    """

    def fits(rename: Callable[[str], str], check: Callable[[Iterable[bool]], bool] = all) -> bool:
        return check(any(rename(o[0]) in stored for o in origins_of(name)) for name in tensors)

    if fits(str, any):
        return str
    prefixes = sorted({name.partition(".")[0] + "." for name in [*tensors[:1], *stored]})
    renamings: list[Callable[[str], str]] = [partial(add, prefix) for prefix in prefixes]
    renamings.append(lambda name: name.removeprefix(tensors[0].partition(".")[0] + "."))
    fitting = list(filter(fits, renamings))
    return fitting[0] if len(fitting) == 1 else str


def scored_as_siblings(
    stored: Mapping[str, StoredStatistics],
) -> tuple[dict[str, StoredStatistics], str | None]:
    """Statistics by name in which no matrix is empty; a warning if some were. See [Note: empty]."""
    typical = {name: each.typical() for name, each in stored.items()}
    of_gradients = any(each.of_gradients for each in stored.values())
    found, warning = means_of_siblings(typical, of_gradients)
    return {**stored, **{n: stored[n].filled(*empty) for n, empty in found.items()}}, warning


def means_of_siblings(
    typical: Mapping[str, Sequence[tuple[float, ...] | None]], of_gradients: bool
) -> tuple[dict[str, tuple[list[int], list[float]]], str | None]:
    """What matrices that saw nothing are scored by; a warning if some did. See [Note: empty].

    Args:
        typical: by name of the parameter, two means of each of its matrices; None if it saw
            nothing, and an empty tuple if it has nothing to rank.
        of_gradients: what was to be seen.

    Returns:
        By name, the numbers of matrices that saw nothing, and the means for them.
    """
    siblings = {name: name if len(own) > 1 else siblings_key(name) for name, own in typical.items()}
    by_key: dict[str, list[tuple[float, ...]]] = {key: [] for key in siblings.values()}
    for name, own in typical.items():
        by_key[siblings[name]] += filter(None, own)
    everything = [each for known in by_key.values() for each in known]
    found, names = {}, []
    for name, own in typical.items():
        numbers = [number for number, means in enumerate(own) if means is None]
        if numbers:
            known = by_key[siblings[name]] or everything or [(0.0, 1.0)]
            columns = zip(*known, strict=True)
            found[name] = numbers, [math.fsum(column) / len(column) for column in columns]
            experts = f" (experts {listed(map(str, numbers), 8)})"
            names.append(name + experts * (len(numbers) < len(own)))
    num_empty, total = sum(len(n) for n, _ in found.values()), sum(map(len, typical.values()))
    warning = (
        f"{'all gradients are zero of' if of_gradients else 'no token came to'} {listed(names)} "
        f"({num_empty} of {total} matrices): these are ranked by magnitude, times what matrices "
        "beside them score for it. Calibrate on more text, or exclude them."
    )
    return found, warning if found else None


def siblings_key(name: str) -> str:
    """A name without its last number."""
    return re.sub(r"\.\d+(?=\.(?!.*\.\d+\.))", ".*", name)


# A parameter that a tensor on disk may be a part of: its name, but for the prefix of a base model;
# the index of its dimension 0 where the tensor is, None if the tensor is all of it; of how many
# tensors the outputs of an expert are; and which of them this one is.
Origin = tuple[str, int | None, int, int]


def origins_of(name: str) -> tuple[Origin, ...]:
    """What a tensor may be in a model: first the parameter of its own name."""
    origins: list[Origin] = [(name, None, 1, 0)]
    if match := _OF_EXPERT.fullmatch(name):
        experts, number = match["experts"], int(match["number"])
        for merged, num_parts, part in _MERGED.get(match["matrix"], ()):
            origins.append((f"{experts}.{merged}", number, num_parts, part))
    renamed = [
        (parameter.replace(own, other), expert, num_parts, part)
        for parameter, expert, num_parts, part in origins
        for own, other in _RENAMED
        if own in parameter
    ]
    return (*origins, *renamed)


def _statistics_of(
    entry: TensorEntry, origin: Origin, stored: StoredStatistics
) -> StoredStatistics | None:
    """The statistics of a tensor; None if those of its parameter are of another shape.

    Matrices of experts may be stored the other way round. transformers transposes them on loading
    if their shape is not the expected one (qwen3_vl_moe), and so only then.

    Args:
        entry: the tensor.
        origin: the parameter, and which part of it the tensor is.
        stored: statistics of the parameter.
    """
    layout, (_, row, num_parts, part) = stored.layout, origin
    if row is None:
        count, *matrix = layout.shape
        if entry.shape == layout.shape:
            return stored
        if not layout.are_experts or entry.shape != (count, *reversed(matrix)):
            return None
        turned = WeightLayout(EXPERT_LAYOUTS[not layout.is_transposed], entry.shape)
        return replace(stored, layout=turned)
    whole = (entry.shape[0] * num_parts, *entry.shape[1:])
    if not layout.are_experts or row >= layout.num_matrices or whole != layout.matrix_shape:
        return None
    count, first, rows = stored.count, stored.first, None
    if stored.of_gradients:
        rows = first.reshape(layout.num_matrices, num_parts, -1)[row]
        first = rows[part]
    else:
        count, first = count[row], first[row]
    linear, second = WeightLayout("linear", entry.shape), stored.second[row]
    return replace(stored, layout=linear, count=count, first=first, second=second, rows=rows)
