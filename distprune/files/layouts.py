"""The input dimension of stored tensors.

N:M patterns run along the inputs, and scope "row" ranks the elements that one output sums over. A
header has shapes without meaning. Matrices are [out, in], except the modules of transformers'
Conv1D, in families that are known to use it. Stacked matrices of experts, [experts, out, in] or
[experts, in, out], are told by the shapes of two that follow each other. Convolutions are [out, in,
*kernel]. Of anything else :class:`UnknownLayout` asks the user for ``input_dims``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from distprune.base.blocks import Layout, layout_along
from distprune.base.selecting import matcher
from distprune.files.checkpoints.checkpoint import Checkpoint
from distprune.files.checkpoints.header import TensorEntry
from distprune.files.errors import SelectionError


def matched(field: str, patterns: Sequence[str], names: Sequence[str]) -> set[str]:
    """The names that match one of the patterns; see :mod:`distprune.base.selecting`.

    Args:
        field: the recipe's field, for messages.
        patterns: globs or regular expressions.
        names: of all tensors.

    Raises:
        NoMatch: a pattern matches nothing.
        SelectionError: the search for one does not end.
    """
    matched_names: set[str] = set()
    for pattern in patterns:
        try:
            matching = list(filter(matcher(pattern), names))
        except ValueError as error:
            raise SelectionError(f"{field}: {error}") from error
        if not matching:
            example = next(iter(names), "(none)")
            raise NoMatch(
                f"{field}: {pattern!r} matches none of the {len(names)} tensors; a pattern has to "
                f"match the whole name of a tensor, such as {example}, or of its module."
            )
        matched_names.update(matching)
    return matched_names


class NoMatch(SelectionError):
    """A pattern matches no tensor."""


class UnknownLayout(SelectionError):
    """The input dimension of a tensor is not known."""


class Layouts:
    """The layouts of a checkpoint's tensors.

    Args:
        checkpoint: with config and shapes.
        input_dims: pairs of a pattern for names and the dimensions that an output sums over, as in
            a recipe. They have precedence.

    Raises:
        SelectionError: a pattern matches nothing.
    """

    def __init__(
        self, checkpoint: Checkpoint, input_dims: Iterable[tuple[str, Sequence[int]]] = ()
    ) -> None:
        self._entries = {entry.name: entry for entry in checkpoint.tensors}
        self._types = model_types(checkpoint.config)
        self._given: dict[str, Sequence[int]] = {}
        for pattern, dims in input_dims:
            for name in matched("input_dims", (pattern,), list(self._entries)):
                self._given.setdefault(name, dims)

    def is_given(self, entry: TensorEntry) -> bool:
        """Whether the layout comes from ``input_dims``."""
        return entry.name in self._given

    def of(self, entry: TensorEntry) -> Layout:
        """The layout of a tensor.

        Raises:
            UnknownLayout: with the reason, and how to give ``input_dims``.
        """
        shape, name = entry.shape, entry.name
        if name in self._given:
            try:
                return layout_along(f"tensor {name}", shape, self._given[name])
            except ValueError as error:
                raise UnknownLayout(str(error)) from error
        if len(shape) < 2:
            return Layout(1, entry.numel)
        *outer, rows, columns = shape
        if len(shape) == 2:
            if not _OF_MODULE.fullmatch(name.rpartition(".")[2]):
                raise _unknown(entry, self._types, "it is a matrix without a module of its own")
            is_conv1d = _CONV1D_NAMES.search(name) is not None
            if is_conv1d and not self._types:
                raise _unknown(entry, self._types, "some families store such modules [in, out]")
            is_turned = is_conv1d and bool(self._types & _CONV1D_FAMILIES)
        elif (partner := self._is_turned_by_partner(entry)) is not None:
            is_turned = partner
        elif len(shape) == 3 and (_EXPERTS.search(name) or not _is_convolution(entry)):
            raise _unknown(entry, self._types, "families differ in how they stack matrices")
        elif _ENLARGES.search(name):
            raise _unknown(entry, self._types, "it may be a transposed convolution")
        else:  # [out, in, *kernel]
            return Layout(shape[0], shape[1], 1, math.prod(shape[2:]))
        stacked = math.prod(outer)
        return Layout(stacked, rows, columns) if is_turned else Layout(stacked * rows, columns)

    def _is_turned_by_partner(self, entry: TensorEntry) -> bool | None:
        """Compare a gated matrix's outputs with the next one's inputs, in both layouts.

        None if the tensor is neither of the two, or both layouts fit.
        """
        for pair in _GATED_PAIRS:
            stem = next((entry.name.removesuffix(e) for e in pair if entry.name.endswith(e)), None)
            up, down = (self._entries.get(f"{stem}{ending}") for ending in pair)
            if up and down and len(up.shape) == len(down.shape) == 3:
                (_, a, b), (_, c, d) = up.shape, down.shape
                fits = [(a, b) == (2 * d, c), (a, b) == (d, 2 * c)]
                return fits[1] if fits[0] != fits[1] else None
        return None


def _is_convolution(entry: TensorEntry) -> bool:
    """Whether a tensor of three dimensions is the weight of a convolution."""
    return "conv" in entry.name.lower() or entry.shape[2] == 1


def model_types(config: Mapping[str, Any], depth: int = 4) -> set[str]:
    """Every ``model_type`` in a config and its parts."""
    types = {config["model_type"]} if isinstance(config.get("model_type"), str) else set()
    if depth:
        for value in config.values():
            if isinstance(value, Mapping):
                types |= model_types(value, depth - 1)
    return types


def pattern_of(name: str) -> str:
    """A pattern that matches a tensor and its counterparts in other layers."""
    escaped = re.sub(r"([*?\[])", r"[\1]", name)
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", escaped)


def _unknown(entry: TensorEntry, types: set[str], why: str) -> UnknownLayout:
    family = f"model_type {', '.join(map(repr, sorted(types)))}" if types else "no model_type"
    ndim = len(entry.shape)
    forms = f"{ndim - 1} for [..., out, in], {ndim - 2} for [..., in, out]"
    if ndim > 2:
        kernel = ",".join(map(str, range(2, ndim)))
        forms += f", 1,{kernel} for [out, in, *kernel], 0,{kernel} for [in, out, *kernel]"
    return UnknownLayout(
        f"{pattern_of(entry.name)} {list(entry.shape)} ({family}): its input dimension is not "
        f"known, because {why}. Give it with --input-dim '{pattern_of(entry.name)}=DIM', "
        f"or in a recipe with input_dims; DIM is {forms}."
    )


# Families of transformers' Conv1D, whose modules of these names store [in, out].
_CONV1D_FAMILIES = {
    "gpt2", "gpt-sw3", "openai-gpt", "imagegpt", "decision_transformer", "clvp", "clvp_decoder",
}  # fmt: skip
_CONV1D_NAMES = re.compile(r"(?:^|\.)(?:c_attn|c_proj|c_fc|q_attn)\.weight$")
# Matrices that are not the weight of a module may be either [in, out] or [out, in].
_OF_MODULE = re.compile(r"(.*_)?weight(_.*)?|original1")
_EXPERTS = re.compile(r"(?:^|\.)(?:shared_)?experts(?:\.|$)")
# Modules that enlarge pictures or sounds; some of them are transposed convolutions.
_ENLARGES = re.compile(
    r"(?i)upsampl|upscal|deconv|convt|conv_t|transpos|\.resize|(^|\.)fpn\d|\.ups\."
)
# A matrix whose outputs are gates and values, and the next one, which has half as many inputs.
_GATED_PAIRS = (
    (".gate_up_proj", ".down_proj"),
    (".gate_and_up_projs", ".down_projs"),
    (".input_linear.weight", ".output_linear.weight"),
    (".fc1.weight", ".fc2.weight"),
)
