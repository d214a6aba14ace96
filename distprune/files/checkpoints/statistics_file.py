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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from distprune.files.checkpoints.header import (
    WeightFile,
    are_sizes,
    load_json,
    make_header,
    read_header,
)
from distprune.files.disk.access import write_atomically
from distprune.files.errors import CheckpointError

FORMAT = "distprune-activation-statistics-1"
FORMAT_OF_GRADIENTS = "distprune-gradient-statistics-1"
MODES = ("one_pass", "sequential")
EXPERT_LAYOUTS = ("experts", "transposed_experts")
TRANSPOSED_LAYOUTS = ("conv1d_of_transformers", "transposed_experts")
_LAYOUTS = ("linear", "conv1d_of_transformers", "convolution", *EXPERT_LAYOUTS)
_SUFFIXES = (".input_sum", ".input_square_sum")
_SUFFIXES_OF_GRADIENTS = (".gradient_sum_by_output", ".gradient_sum_by_input")


@dataclass(frozen=True)
class StoredWeight:
    """The weight that statistics are of.

    Attributes:
        layout: "linear", "conv1d_of_transformers", "convolution", "experts" or
            "transposed_experts".
        shape: the shape of the whole weight.
        groups: how many groups a convolution has; 1 otherwise.
    """

    layout: str
    shape: tuple[int, ...]
    groups: int

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of what has one number for each input, as the layout says."""
        return input_shape(self.layout, self.shape, self.groups)

    @property
    def num_matrices(self) -> int:
        """How many matrices it is: fused experts, or groups of a convolution."""
        return self.shape[0] if self.layout in EXPERT_LAYOUTS else self.groups

    @property
    def num_outputs(self) -> int:
        """Number of outputs; of experts, those of each counted."""
        if self.layout in EXPERT_LAYOUTS:
            dim = 2 if self.layout in TRANSPOSED_LAYOUTS else 1
            return self.shape[0] * self.shape[dim]
        return self.shape[1 if self.layout in TRANSPOSED_LAYOUTS else 0]


@dataclass(frozen=True)
class StoredStatistics(StoredWeight):
    """The statistics of the inputs of one parameter.

    Attributes:
        num_tokens: how many inputs were seen; of fused experts, by each of them.
        sums, squares: float64, of the input shape.
    """

    num_tokens: int | tuple[int, ...]
    sums: np.ndarray
    squares: np.ndarray

    @property
    def most_tokens(self) -> int:
        """How many inputs were seen; of fused experts, by the one that saw most."""
        if isinstance(self.num_tokens, int):
            return self.num_tokens
        return max(self.num_tokens, default=0)


@dataclass(frozen=True)
class StoredGradients(StoredWeight):
    """The statistics of the gradients of one parameter.

    Attributes:
        weight: the sum of the weights of all batches.
        by_output: float64 [outputs]: the sum of weight * g**2 over each row and all batches.
        by_input: float64, of the input shape: the same over each column.
    """

    weight: float
    by_output: np.ndarray
    by_input: np.ndarray


def input_shape(layout: str, shape: tuple[int, ...], groups: int) -> tuple[int, ...]:
    """The shape of a statistic of a weight: one number for each input feature."""
    if layout == "linear":
        return shape[1:]
    if layout == "conv1d_of_transformers":
        return shape[:1]
    if layout == "experts":
        return (shape[0], shape[2])
    if layout == "transposed_experts":
        return shape[:2]
    return (groups * shape[1], *shape[2:])


def write_statistics(
    path: str | os.PathLike[str], mode: str, parameters: Mapping[str, StoredStatistics]
) -> None:
    """Write statistics of activations; an existing file is replaced at the end, or stays.

    Raises:
        OutputError: it cannot be written.
    """
    facts = {name: {"num_tokens": stored.num_tokens} for name, stored in parameters.items()}
    arrays = {
        name + suffix: values
        for name, stored in parameters.items()
        for suffix, values in zip(_SUFFIXES, (stored.sums, stored.squares), strict=True)
    }
    _write(path, {"format": FORMAT, "mode": mode}, parameters, facts, arrays)


def write_gradient_statistics(
    path: str | os.PathLike[str], parameters: Mapping[str, StoredGradients]
) -> None:
    """Write statistics of gradients; see :func:`write_statistics`."""
    facts = {name: {"weight": stored.weight} for name, stored in parameters.items()}
    arrays = {
        name + suffix: values
        for name, stored in parameters.items()
        for suffix, values in zip(
            _SUFFIXES_OF_GRADIENTS, (stored.by_output, stored.by_input), strict=True
        )
    }
    _write(path, {"format": FORMAT_OF_GRADIENTS}, parameters, facts, arrays)


def _write(
    path: str | os.PathLike[str],
    metadata: Mapping[str, str],
    parameters: Mapping[str, StoredWeight],
    facts: Mapping[str, Mapping[str, Any]],
    arrays: Mapping[str, np.ndarray],
) -> None:
    described = {
        name: {
            "layout": stored.layout,
            "shape": list(stored.shape),
            "groups": stored.groups,
            **facts[name],
        }
        for name, stored in parameters.items()
    }
    tensors, data = {}, []
    for name, values in arrays.items():
        data.append(np.ascontiguousarray(values, "<f8").tobytes())
        tensors[name] = ("F64", values.shape, len(data[-1]))
    header, _ = make_header(tensors, {**metadata, "parameters": json.dumps(described)})
    write_atomically(os.path.abspath(path), [header, *data])


def read_statistics(path: str | os.PathLike[str]) -> tuple[str, dict[str, StoredStatistics]]:
    """The mode, and the statistics of activations by name of the parameter, in the file's order.

    Raises:
        CheckpointError: there is no such file, or it is malformed.

    Cost: a read of the file, and as much memory.
    """
    name = os.fspath(path)
    file = read_header(name, name)
    mode = file.metadata.get("mode")
    if file.metadata.get("format") == FORMAT_OF_GRADIENTS:
        raise CheckpointError(
            f"{name} holds statistics of gradients; expected those of activations, which "
            "ActivationStatistics.save and `distprune calibrate` without --gradients write."
        )
    if file.metadata.get("format") != FORMAT or mode not in MODES:
        raise CheckpointError(
            f"{name} holds no activation statistics of format {FORMAT}; expected a file that "
            "ActivationStatistics.save has written."
        )
    stored = {}
    for parameter, fact, sums, squares in _read(file, name, _are_facts, _SUFFIXES):
        counts = fact["num_tokens"]
        num_tokens = tuple(counts) if isinstance(counts, list) else counts
        of_one = StoredStatistics(
            fact["layout"], tuple(fact["shape"]), fact["groups"], num_tokens, sums, squares
        )
        if not sums.shape == squares.shape == of_one.input_shape:
            raise CheckpointError(
                f"{name}: {parameter} has sums of shape {list(sums.shape)} and "
                f"{list(squares.shape)}; expected {list(of_one.input_shape)}."
            )
        if not (squares >= 0).all():
            raise CheckpointError(_NO_SUMS.format(name, parameter))
        stored[parameter] = of_one
    assert isinstance(mode, str)
    return mode, stored


def read_gradient_statistics(path: str | os.PathLike[str]) -> dict[str, StoredGradients]:
    """The statistics of gradients by name of the parameter; see :func:`read_statistics`."""
    name = os.fspath(path)
    file = read_header(name, name)
    if file.metadata.get("format") == FORMAT:
        raise CheckpointError(
            f"{name} holds statistics of activations; expected those of gradients, which "
            "GradientStatistics.save and `distprune calibrate --gradients` write."
        )
    if file.metadata.get("format") != FORMAT_OF_GRADIENTS:
        raise CheckpointError(
            f"{name} holds no gradient statistics of format {FORMAT_OF_GRADIENTS}; expected a "
            "file that GradientStatistics.save has written."
        )
    stored = {}
    for parameter, fact, by_output, by_input in _read(
        file, name, _are_facts_of_gradients, _SUFFIXES_OF_GRADIENTS
    ):
        of_one = StoredGradients(
            fact["layout"],
            tuple(fact["shape"]),
            fact["groups"],
            float(fact["weight"]),
            by_output,
            by_input,
        )
        shapes = [(of_one.num_outputs,), of_one.input_shape]
        if [by_output.shape, by_input.shape] != shapes:
            raise CheckpointError(
                f"{name}: {parameter} has sums of shape {list(by_output.shape)} and "
                f"{list(by_input.shape)}; expected {list(shapes[0])} and {list(shapes[1])}."
            )
        if not ((by_output >= 0).all() and (by_input >= 0).all()):
            raise CheckpointError(_NO_SUMS.format(name, parameter))
        stored[parameter] = of_one
    return stored


_NO_SUMS = "{}: {} has sums that are not finite or negative."


def _read(
    file: WeightFile,
    name: str,
    are_facts: Callable[[object], bool],
    suffixes: Sequence[str],
) -> list[tuple[str, dict[str, Any], np.ndarray, np.ndarray]]:
    """(parameter, its facts, its first and its second array) of each parameter of a file."""
    facts = load_json(file.metadata.get("parameters", ""), f"{name}: parameters")
    if not isinstance(facts, dict) or not all(map(are_facts, facts.values())):
        raise CheckpointError(f"{name}: the parameters in its metadata are malformed.")
    arrays = _read_arrays(file, name)
    expected = {parameter + suffix for parameter in facts for suffix in suffixes}
    if expected != set(arrays):
        wrong = sorted(expected ^ set(arrays))
        raise CheckpointError(
            f"{name}: its metadata and its tensors name different parameters, such as {wrong[0]}."
        )
    found = []
    for parameter, fact in facts.items():
        first, second = (arrays[parameter + suffix] for suffix in suffixes)
        if not (np.isfinite(first).all() and np.isfinite(second).all()):
            raise CheckpointError(_NO_SUMS.format(name, parameter))
        found.append((parameter, fact, first, second))
    return found


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


def _are_facts(value: object) -> bool:
    if not isinstance(value, dict) or not _describes_weight(value, "num_tokens"):
        return False
    shape, counts = value["shape"], value["num_tokens"]
    if value["layout"] in EXPERT_LAYOUTS:
        return are_sizes(counts) and len(counts) == shape[0]
    return are_sizes([counts])


def _are_facts_of_gradients(value: object) -> bool:
    if not isinstance(value, dict) or not _describes_weight(value, "weight"):
        return False
    weight = value["weight"]
    is_number = isinstance(weight, (int, float)) and not isinstance(weight, bool)
    return is_number and math.isfinite(weight) and weight >= 0


def _describes_weight(value: Mapping[str, Any], count: str) -> bool:
    """Whether facts are a layout, a shape, a number of groups, and one more."""
    if value.keys() != {"layout", "shape", "groups", count}:
        return False
    shape, groups = value["shape"], value["groups"]
    if not are_sizes(shape) or value["layout"] not in _LAYOUTS or len(shape) < 2:
        return False
    if value["layout"] in EXPERT_LAYOUTS and len(shape) != 3:
        return False
    return are_sizes([groups]) and groups >= 1
