"""Files of activation statistics: safetensors, a few kilobytes per layer, read without torch.

[Note: statistics file] Of each parameter of a model, by its full name, the file has two tensors,
F64, of the *input shape*: one number for each input feature that the weight multiplies::

    layers.0.fc.weight.input_sum            sum of x over all tokens
    layers.0.fc.weight.input_square_sum     sum of x**2 over all tokens

Its metadata are::

    format      "distprune-activation-statistics-1"
    mode        "one_pass" or "sequential": see ActivationStatistics.mode
    parameters  JSON, by name: {"layout": ..., "shape": [...], "groups": n, "num_tokens": n}

``shape`` is that of the whole weight. ``layout`` says which of its dimensions are the inputs:

    layout                   weight                  input shape    num_tokens
    linear                   [out, in]               [in]           an integer
    conv1d_of_transformers   [in, out]               [in]           an integer
    convolution              [out, in / groups, *k]  [in, *k]       an integer
    experts                  [E, out, in]            [E, in]        a list of E integers
    transposed_experts       [E, in, out]            [E, in]        a list of E integers

The last two are E fused experts: matrices with tokens of their own. Row e of the sums is of the
tokens that came to expert e, and ``num_tokens[e]`` is their number.

Statistics are of the whole weight, whatever the sharding of the model that they were collected on.
Sums divide by ``num_tokens``, which may be 0 (an expert).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass

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
MODES = ("one_pass", "sequential")
EXPERT_LAYOUTS = ("experts", "transposed_experts")
_LAYOUTS = ("linear", "conv1d_of_transformers", "convolution", *EXPERT_LAYOUTS)
_SUFFIXES = (".input_sum", ".input_square_sum")


@dataclass(frozen=True)
class StoredStatistics:
    """The statistics of one parameter.

    Attributes:
        layout: "linear", "conv1d_of_transformers", "convolution", "experts" or
            "transposed_experts".
        shape: the shape of the whole weight.
        groups: how many groups a convolution has; 1 otherwise.
        num_tokens: how many inputs were seen; of fused experts, by each of them.
        sums, squares: float64, of the input shape.
    """

    layout: str
    shape: tuple[int, ...]
    groups: int
    num_tokens: int | tuple[int, ...]
    sums: np.ndarray
    squares: np.ndarray

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of the sums, as the layout says."""
        return input_shape(self.layout, self.shape, self.groups)

    @property
    def most_tokens(self) -> int:
        """How many inputs were seen; of fused experts, by the one that saw most."""
        if isinstance(self.num_tokens, int):
            return self.num_tokens
        return max(self.num_tokens, default=0)


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
    """Write a file; an existing one is replaced at the end, or stays as it was.

    Raises:
        OutputError: it cannot be written.
    """
    facts = {
        name: {
            "layout": stored.layout,
            "shape": list(stored.shape),
            "groups": stored.groups,
            "num_tokens": stored.num_tokens,
        }
        for name, stored in parameters.items()
    }
    metadata = {"format": FORMAT, "mode": mode, "parameters": json.dumps(facts)}
    tensors, data = {}, []
    for name, stored in parameters.items():
        for suffix, values in zip(_SUFFIXES, (stored.sums, stored.squares), strict=True):
            data.append(np.ascontiguousarray(values, "<f8").tobytes())
            tensors[name + suffix] = ("F64", stored.input_shape, len(data[-1]))
    header, _ = make_header(tensors, metadata)
    write_atomically(os.path.abspath(path), [header, *data])


def read_statistics(path: str | os.PathLike[str]) -> tuple[str, dict[str, StoredStatistics]]:
    """The mode, and the statistics by name of the parameter, in the order of the file.

    Raises:
        CheckpointError: there is no such file, or it is malformed.

    Cost: a read of the file, and as much memory.
    """
    name = os.fspath(path)
    file = read_header(name, name)
    mode = file.metadata.get("mode")
    if file.metadata.get("format") != FORMAT or mode not in MODES:
        raise CheckpointError(
            f"{name} holds no activation statistics of format {FORMAT}; expected a file that "
            "ActivationStatistics.save has written."
        )
    facts = load_json(file.metadata.get("parameters", ""), f"{name}: parameters")
    if not isinstance(facts, dict) or not all(map(_are_facts, facts.values())):
        raise CheckpointError(f"{name}: the parameters in its metadata are malformed.")
    arrays = _read_arrays(file, name)
    expected = {parameter + suffix for parameter in facts for suffix in _SUFFIXES}
    if expected != set(arrays):
        wrong = sorted(expected ^ set(arrays))
        raise CheckpointError(
            f"{name}: its metadata and its tensors name different parameters, such as {wrong[0]}."
        )
    stored = {}
    for parameter, fact in facts.items():
        sums, squares = (arrays[parameter + suffix] for suffix in _SUFFIXES)
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
        if not (np.isfinite(sums).all() and np.isfinite(squares).all() and (squares >= 0).all()):
            raise CheckpointError(f"{name}: {parameter} has sums that are not finite or negative.")
        stored[parameter] = of_one
    assert isinstance(mode, str)
    return mode, stored


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
    if not isinstance(value, dict) or value.keys() != {"layout", "shape", "groups", "num_tokens"}:
        return False
    shape, groups, counts = value["shape"], value["groups"], value["num_tokens"]
    if not are_sizes(shape) or value["layout"] not in _LAYOUTS or len(shape) < 2:
        return False
    is_of_experts = value["layout"] in EXPERT_LAYOUTS
    if is_of_experts and (len(shape) != 3 or not are_sizes(counts) or len(counts) != shape[0]):
        return False
    return (is_of_experts or are_sizes([counts])) and are_sizes([groups]) and groups >= 1
