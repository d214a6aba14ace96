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
from distprune.files.checkpoints.header import WeightFile, make_header, read_header
from distprune.files.disk.access import write_atomically
from distprune.files.errors import CheckpointError

MODES = ("one_pass", "sequential")


@dataclass(frozen=True)
class StoredSums:
    """The statistics of one parameter: a count, and two arrays of float64.

    Attributes:
        layout: of the weight.
        FORMAT: of the file.
        COUNT: the field that says how much was seen.
        ARRAYS: the fields that are arrays, and what their names end with in a file.
        ABOUT, MAKERS: what such statistics are of, and what writes them, for messages.
    """

    layout: WeightLayout

    FORMAT: ClassVar[str]
    COUNT: ClassVar[str]
    ARRAYS: ClassVar[Mapping[str, str]]
    ABOUT: ClassVar[str]
    MAKERS: ClassVar[str]

    @property
    def count(self) -> Any:
        """How much was seen."""
        return getattr(self, self.COUNT)

    @property
    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """What was added up."""
        first, second = (getattr(self, field) for field in self.ARRAYS)
        return first, second

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Those that the arrays should have."""
        raise NotImplementedError


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
    ARRAYS: ClassVar = {"sums": ".input_sum", "squares": ".input_square_sum"}
    ABOUT = "activations"
    MAKERS = "ActivationStatistics.save and `distprune calibrate` without --gradients"

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self.layout.input_shape, self.layout.input_shape

    @property
    def most_tokens(self) -> int:
        """How many inputs were seen; of fused experts, by the one that saw most."""
        if isinstance(self.num_tokens, int):
            return self.num_tokens
        return max(self.num_tokens, default=0)


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
    ARRAYS: ClassVar = {
        "by_output": ".gradient_sum_by_output",
        "by_input": ".gradient_sum_by_input",
    }
    ABOUT = "gradients"
    MAKERS = "GradientStatistics.save and `distprune calibrate --gradients`"

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
        for suffix, values in zip(stored.ARRAYS.values(), stored.arrays, strict=True):
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
    mode = file.metadata.get("mode", "")
    if mode not in MODES:
        raise CheckpointError(f"{file.name}: its mode is {mode!a}; expected one of {MODES}.")
    return mode, stored


def read_gradient_statistics(path: str | os.PathLike[str]) -> dict[str, StoredGradients]:
    """The statistics of gradients by name of the parameter; see :func:`read_statistics`."""
    return _read(path, StoredGradients)[1]


def _read(path: str | os.PathLike[str], kind: type[Stored]) -> tuple[WeightFile, dict[str, Stored]]:
    name = os.fspath(path)
    file = read_header(name, name)
    form = file.metadata.get("format")
    if form != kind.FORMAT:
        others = {each.FORMAT: each.ABOUT for each in (StoredStatistics, StoredGradients)}
        has = f"statistics of {others[form]}" if form in others else "no statistics"
        raise CheckpointError(
            f"{name} holds {has}; expected those of {kind.ABOUT}, which {kind.MAKERS} write."
        )
    raw = np.fromfile(file.path, dtype=np.uint8)
    try:
        arrays = {
            # A view of what was read, unless numbers lie across the words of memory.
            entry.name: np.require(raw[entry.start : entry.stop].view("<f8"), np.float64, "A")
            .reshape(entry.shape)
            for entry in file.tensors
        }  # fmt: skip
        facts = json.loads(file.metadata["parameters"])
        return file, {each: _stored(kind, each, facts[each], arrays) for each in facts}
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{name} is malformed: {error}.") from error


def _stored(kind: type[Stored], name: str, facts: Any, arrays: Mapping[str, np.ndarray]) -> Stored:
    """The statistics of a parameter; raises KeyError, TypeError or ValueError if they are wrong."""
    layout = WeightLayout(facts["layout"], tuple(facts["shape"]), facts["groups"])
    sizes = (*layout.shape, layout.groups - 1)
    fits = len(layout.shape) == 3 if layout.are_experts else len(layout.shape) > 1
    if layout.kind not in LAYOUTS or min(sizes) < 0 or not fits:
        raise ValueError(f"{name} has the layout {layout}")
    count = facts[kind.COUNT]
    counts = count if isinstance(count, Sequence) else (count,)
    num_counts = 1
    if kind is StoredStatistics:
        num_counts, integers = layout.num_token_counts, [int(each) for each in counts]
        if integers != list(counts) or isinstance(count, Sequence) != layout.are_experts:
            raise ValueError(f"{name} has the count {count}")
        count = tuple(integers) if layout.are_experts else integers[0]
    if len(counts) != num_counts or not all(math.isfinite(each) and each >= 0 for each in counts):
        raise ValueError(f"{name} has the count {count}")
    fields = {field: arrays[name + suffix] for field, suffix in kind.ARRAYS.items()}
    stored = kind(layout, **{kind.COUNT: count}, **fields)
    shapes = tuple(array.shape for array in stored.arrays)
    if shapes != stored.shapes:
        raise ValueError(f"{name} has sums of the shapes {shapes}; expected {stored.shapes}")
    sums_of_squares = stored.arrays[kind is StoredStatistics :]
    if not all(np.isfinite(array).all() for array in stored.arrays) or any(
        (array < 0).any() for array in sums_of_squares
    ):
        raise ValueError(f"{name} has sums that are not finite or negative")
    return stored
