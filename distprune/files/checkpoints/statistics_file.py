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
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import numpy as np

from distprune.base.blocks import LAYOUTS, WeightLayout
from distprune.files.checkpoints.header import (
    WeightFile,
    are_sizes,
    load_json,
    make_header,
    read_header,
)
from distprune.files.disk.access import write_atomically
from distprune.files.errors import CheckpointError

MODES = ("one_pass", "sequential")


@dataclass(frozen=True)
class StoredSums:
    """The statistics of one parameter: a count, and two arrays of float64.

    Attributes:
        layout: of the weight.
        FORMAT, SUFFIXES: of the file, and of the names of its arrays.
        COUNT: the name of the count.
        WHAT, ABOUT, MAKERS: what such statistics are called, and what writes them, for messages.
    """

    layout: WeightLayout

    FORMAT: ClassVar[str]
    COUNT: ClassVar[str]
    SUFFIXES: ClassVar[tuple[str, str]]
    WHAT: ClassVar[str]
    ABOUT: ClassVar[str]
    MAKERS: ClassVar[tuple[str, str]]

    @property
    def count(self) -> Any:
        """How much was seen."""
        return vars(self)[self.COUNT]

    @property
    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """What was added up."""
        *_, first, second = vars(self).values()
        return first, second

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Those that the arrays should have."""
        raise NotImplementedError

    @classmethod
    def as_count(cls, value: Any) -> Any:
        """How much was seen, of the type of the field."""
        return float(value)


@dataclass(frozen=True)
class StoredStatistics(StoredSums):
    """The statistics of the inputs of one parameter.

    Attributes:
        num_tokens: how many inputs were seen; of fused experts, by each of them.
        sums, squares: float64, of the input shape.
    """

    num_tokens: int | tuple[int, ...]
    sums: np.ndarray
    squares: np.ndarray

    FORMAT = "distprune-activation-statistics-1"
    COUNT = "num_tokens"
    SUFFIXES = (".input_sum", ".input_square_sum")
    WHAT, ABOUT = "activation", "activations"
    MAKERS = ("ActivationStatistics.save", "`distprune calibrate` without --gradients")

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self.layout.input_shape, self.layout.input_shape

    @property
    def most_tokens(self) -> int:
        """How many inputs were seen; of fused experts, by the one that saw most."""
        if isinstance(self.num_tokens, int):
            return self.num_tokens
        return max(self.num_tokens, default=0)

    @classmethod
    def as_count(cls, value: Any) -> int | tuple[int, ...]:
        return tuple(map(int, value)) if isinstance(value, Sequence) else int(value)


@dataclass(frozen=True)
class StoredGradients(StoredSums):
    """The statistics of the gradients of one parameter.

    Attributes:
        weight: the sum of the weights of all batches.
        by_output: float64 [outputs]: the sum of weight * g**2 over each row and all batches.
        by_input: float64, of the input shape: the same over each column.
    """

    weight: float
    by_output: np.ndarray
    by_input: np.ndarray

    FORMAT = "distprune-gradient-statistics-1"
    COUNT = "weight"
    SUFFIXES = (".gradient_sum_by_output", ".gradient_sum_by_input")
    WHAT, ABOUT = "gradient", "gradients"
    MAKERS = ("GradientStatistics.save", "`distprune calibrate --gradients`")

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (self.layout.num_outputs,), self.layout.input_shape


Stored = TypeVar("Stored", bound=StoredSums)


def write_statistics(
    path: str | os.PathLike[str], mode: str, parameters: Mapping[str, StoredSums]
) -> None:
    """Write statistics; an existing file is replaced at the end, or stays.

    Args:
        path: of the file.
        mode: of activations, how they were collected; "gradients" of gradients.
        parameters: the statistics by name of the parameter, all of one kind.

    Raises:
        OutputError: it cannot be written.
    """
    if mode == "gradients":
        metadata = {"format": StoredGradients.FORMAT}
    else:
        metadata = {"format": StoredStatistics.FORMAT, "mode": mode}
    described, tensors, data = {}, {}, []
    for name, stored in parameters.items():
        layout = stored.layout
        described[name] = {
            "layout": layout.kind,
            "shape": list(layout.shape),
            "groups": layout.groups,
            stored.COUNT: stored.count,
        }
        for suffix, values in zip(stored.SUFFIXES, stored.arrays, strict=True):
            data.append(np.ascontiguousarray(values, "<f8").tobytes())
            tensors[name + suffix] = ("F64", values.shape, len(data[-1]))
    header, _ = make_header(tensors, metadata | {"parameters": json.dumps(described)})
    write_atomically(os.path.abspath(path), [header, *data])


def read_statistics(path: str | os.PathLike[str]) -> tuple[str, dict[str, StoredStatistics]]:
    """The mode, and the statistics of activations by name of the parameter, in the file's order.

    Raises:
        CheckpointError: there is no such file, or it is malformed.

    Cost: a read of the file, and as much memory.
    """
    file, stored = _read(path, StoredStatistics)
    mode = file.metadata.get("mode")
    if mode not in MODES:
        raise _of_other_format(file.name, StoredStatistics)
    return str(mode), stored


def read_gradient_statistics(path: str | os.PathLike[str]) -> dict[str, StoredGradients]:
    """The statistics of gradients by name of the parameter; see :func:`read_statistics`."""
    return _read(path, StoredGradients)[1]


def _of_other_format(name: str, kind: type[StoredSums]) -> CheckpointError:
    return CheckpointError(
        f"{name} holds no {kind.WHAT} statistics of format {kind.FORMAT}; expected a file that "
        f"{kind.MAKERS[0]} has written."
    )


def _read(path: str | os.PathLike[str], kind: type[Stored]) -> tuple[WeightFile, dict[str, Stored]]:
    name = os.fspath(path)
    file = read_header(name, name)
    form = file.metadata.get("format")
    for other in (StoredStatistics, StoredGradients):
        if form == other.FORMAT != kind.FORMAT:
            raise CheckpointError(
                f"{name} holds statistics of {other.ABOUT}; expected those of {kind.ABOUT}, which "
                f"{' and '.join(kind.MAKERS)} write."
            )
    if form != kind.FORMAT:
        raise _of_other_format(name, kind)
    facts = load_json(file.metadata.get("parameters", ""), f"{name}: parameters")
    if not isinstance(facts, dict):
        raise CheckpointError(_MALFORMED.format(name))
    layouts = {parameter: _layout_in(value, kind, name) for parameter, value in facts.items()}
    arrays = _read_arrays(file, name)
    expected = {parameter + suffix for parameter in facts for suffix in kind.SUFFIXES}
    if expected != set(arrays):
        wrong = sorted(expected ^ set(arrays))
        raise CheckpointError(
            f"{name}: its metadata and its tensors name different parameters, such as {wrong[0]}."
        )
    found = {}
    for parameter, layout in layouts.items():
        count = facts[parameter][kind.COUNT]
        both = [arrays[parameter + suffix] for suffix in kind.SUFFIXES]
        stored = kind(layout, kind.as_count(count), *both)  # type: ignore[call-arg]
        shapes = tuple(array.shape for array in both)
        if shapes != stored.shapes:
            has, should = (
                " and ".join(str(list(s)) for s in pair) for pair in (shapes, stored.shapes)
            )
            raise CheckpointError(
                f"{name}: {parameter} has sums of shape {has}; expected {should}."
            )
        is_finite = all(np.isfinite(array).all() for array in both)
        squares = both[1:] if isinstance(stored, StoredStatistics) else both
        if not is_finite or not all((array >= 0).all() for array in squares):
            raise CheckpointError(f"{name}: {parameter} has sums that are not finite or negative.")
        found[parameter] = stored
    return file, found


_MALFORMED = "{}: the parameters in its metadata are malformed."


def _layout_in(value: Any, kind: type[StoredSums], name: str) -> WeightLayout:
    """The layout in the facts of a parameter, which are checked."""
    if isinstance(value, dict) and value.keys() == {"layout", "shape", "groups", kind.COUNT}:
        shape, groups = value["shape"], value["groups"]
        if are_sizes(shape) and value["layout"] in LAYOUTS and are_sizes([groups]) and groups:
            layout = WeightLayout(value["layout"], tuple(shape), groups)
            fits = len(shape) == 3 if layout.are_experts else len(shape) > 1
            if fits and _is_count(value[kind.COUNT], kind, layout):
                return layout
    raise CheckpointError(_MALFORMED.format(name))


def _is_count(value: Any, kind: type[StoredSums], layout: WeightLayout) -> bool:
    """Whether a value of JSON is how much was seen."""
    if kind is StoredGradients:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return is_number and math.isfinite(value) and value >= 0
    if layout.are_experts:
        return are_sizes(value) and len(value) == layout.shape[0]
    return are_sizes([value])


def _read_arrays(file: WeightFile, name: str) -> dict[str, np.ndarray]:
    raw = np.fromfile(file.path, dtype=np.uint8)
    arrays = {}
    for entry in file.tensors:
        if entry.dtype != "F64":
            raise CheckpointError(f"{name}: {entry.name} is {entry.dtype}; expected F64.")
        if entry.stop > len(raw):
            raise CheckpointError(f"{name} has changed while it was read.")
        # Views of what was read, unless numbers lie across the words of memory.
        values = raw[entry.start : entry.stop].view("<f8")
        arrays[entry.name] = np.require(values, np.float64, "A").reshape(entry.shape)
    return arrays
