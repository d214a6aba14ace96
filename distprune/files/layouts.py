"""The input dimension of stored tensors.

N:M patterns run along the inputs, and scope "row" ranks the elements that one output sums over. A
header has shapes without meaning: ``torch.nn.Linear`` stores [out, in]; GPT-2's Conv1D, and the
experts of some families, [in, out]. The layout follows from the length of a bias or the shapes of
two consecutive matrices, else from the ``model_type`` if the family is known: the tables of
families are read from their definitions in transformers. It is never guessed: otherwise
:class:`UnknownLayout` asks the user for ``input_dims``.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from distprune.base import blocks
from distprune.base.blocks import Layout
from distprune.base.selecting import matcher
from distprune.files.checkpoints.checkpoint import Checkpoint
from distprune.files.checkpoints.header import TensorEntry
from distprune.files.errors import SelectionError


def matched(
    field: str, patterns: Sequence[str], names: Sequence[str], problems: list[str]
) -> set[str]:
    """The names that match one of the patterns; see :mod:`distprune.base.selecting`.

    Args:
        field: the recipe's field, for messages.
        patterns: globs or regular expressions.
        names: of all tensors.
        problems: a sentence is added for each pattern that matches nothing.

    Raises:
        SelectionError: the search for a pattern does not end.
    """
    matched_names: set[str] = set()
    for pattern in patterns:
        try:
            matching = list(filter(matcher(pattern), names))
        except ValueError as error:
            raise SelectionError(f"{field}: {error}") from error
        if not matching:
            example = next(iter(names), "(none)")
            problems.append(
                f"{field}: {pattern!r} matches none of the {len(names)} tensors; a pattern has to "
                f"match the whole name of a tensor, such as {example}, or of its module."
            )
        matched_names.update(matching)
    return matched_names


class UnknownLayout(SelectionError):
    """The input dimension of a tensor is not known, or two sources of it disagree."""


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
        self._config = checkpoint.config
        self._types = model_types(checkpoint.config)
        self._given: dict[str, Sequence[int]] = {}
        problems: list[str] = []
        for pattern, dims in input_dims:
            for name in matched("input_dims", (pattern,), list(self._entries), problems):
                self._given.setdefault(name, dims)
        if problems:
            raise SelectionError(problems[0], problems[1:])

    def is_given(self, entry: TensorEntry) -> bool:
        """Whether the layout comes from ``input_dims``."""
        return entry.name in self._given

    def of(self, entry: TensorEntry) -> Layout:
        """The layout of a tensor.

        Raises:
            UnknownLayout: with the reason, and how to give ``input_dims``.
        """
        shape = entry.shape
        if entry.name in self._given:
            return layout_along(entry, self._given[entry.name])
        if len(shape) < 2:
            return Layout(1, entry.numel)
        if len(shape) == 2:
            return self._of_matrix(entry)
        if len(shape) == 3 and (layout := self._of_known(entry)) is not None:
            return layout
        if EXPERTS.search(entry.name) or (len(shape) == 3 and self._partner(entry)):
            return self._of_experts(entry)
        return self._of_convolution(entry)

    def _of_matrix(self, entry: TensorEntry) -> Layout:
        rows, columns = entry.shape
        if "dbrx" in self._types and entry.name.endswith("experts.mlp.w2"):
            count = _number_of_experts(self._config)
            if count is None or rows % count:
                raise _unknown(entry, self._types, "the config does not have the number of experts")
            return Layout(count, rows // count, columns)
        own = entry.name.rpartition(".")[2]
        if own in RAW_TURNED:
            return Layout(1, rows, columns)
        if not OF_MODULE.fullmatch(own):
            if not any(own in RAW_STRAIGHT.get(family, ()) for family in self._types):
                raise _unknown(entry, self._types, "it is a matrix without a module of its own")
            return Layout(rows, columns)
        is_turned = self._is_turned_by_bias(entry)
        if CONV1D_NAMES.search(entry.name):
            if is_turned is None:
                is_turned = self._is_conv1d()
            elif self._types & CONV1D_FAMILIES and not is_turned:
                raise _unknown(
                    entry, self._types, "its bias is as long as the first dimension, not the second"
                )
            if is_turned is None:
                raise _unknown(
                    entry, self._types, "modules of this name are stored [in, out] in some families"
                )
        return Layout(1, rows, columns) if is_turned else Layout(rows, columns)

    def _of_known(self, entry: TensorEntry) -> Layout | None:
        first, second, third = entry.shape
        for family, names, form in KNOWN:
            if family in self._types and names.fullmatch(entry.name):
                return {
                    "in first": Layout(1, first, second * third),
                    "out first": Layout(first, second * third),
                    "in last": Layout(first * second, third),
                    "out last": Layout(first, second, third),
                }[form]
        return None

    def _of_experts(self, entry: TensorEntry) -> Layout:
        """Stacked matrices, [..., out, in] or [..., in, out]."""
        *stacked, rows, columns = entry.shape
        is_turned = self._is_turned_by_partner(entry)
        if is_turned is None and self._types & TURNED_EXPERTS:
            is_turned = True
        if is_turned is None and self._types & STRAIGHT_EXPERTS:
            is_turned = False
        if is_turned is None:
            raise _unknown(entry, self._types, "families differ in how they store stacked experts")
        outer = math.prod(stacked)
        if is_turned:
            return Layout(outer, rows, columns)
        return Layout(outer * rows, columns)

    def _of_convolution(self, entry: TensorEntry) -> Layout:
        """[out, in, *kernel], or [in, out, *kernel] if a bias shows a transposed convolution."""
        first, second, *kernel = entry.shape
        is_turned = self._is_turned_by_bias(entry)
        if is_turned is None and ENLARGES.search(entry.name):
            raise _unknown(entry, self._types, "it may be a transposed convolution")
        is_named = CONVOLUTION.search(entry.name) or kernel == [1] or len(kernel) > 1
        if is_turned is None and not is_named:
            raise _unknown(entry, self._types, "it may be a convolution, or stacked matrices")
        size = math.prod(kernel)
        return Layout(1, first, second, size) if is_turned else Layout(first, second, 1, size)

    def _is_conv1d(self) -> bool | None:
        """Whether modules named as Conv1D modules are such; the bias of one shows it for all."""
        if self._types & CONV1D_FAMILIES:
            return True
        if self._types & LINEAR_FAMILIES:
            return False
        return next(iter(self._conv1d_votes)) if len(self._conv1d_votes) == 1 else None

    @functools.cached_property
    def _conv1d_votes(self) -> set[bool]:
        """The answers of all biases of modules named as Conv1D modules."""
        matrices = (entry for entry in self._entries.values() if len(entry.shape) == 2)
        named = (entry for entry in matrices if CONV1D_NAMES.search(entry.name))
        votes = {self._is_turned_by_bias(entry) for entry in named}
        return {vote for vote in votes if vote is not None}

    def _is_turned_by_bias(self, entry: TensorEntry) -> bool | None:
        """Whether the bias has as many elements as the second dimension; None if both fit."""
        match = WEIGHT.search(entry.name)
        bias = self._entries.get(entry.name[: match.start()] + ".bias") if match else None
        if bias is None or len(bias.shape) != 1:
            return None
        fits = [size == bias.shape[0] for size in entry.shape[:2]]
        return fits[1] if fits[0] != fits[1] else None

    def _partner(self, entry: TensorEntry) -> tuple[TensorEntry, TensorEntry] | None:
        """A gated matrix and the next one, if the tensor is one of them."""
        for pair in GATED_PAIRS:
            for leaf in pair:
                if entry.name.endswith("." + leaf):
                    stem = entry.name.removesuffix(leaf)
                    up, down = (self._entries.get(stem + ending) for ending in pair)
                    if up and down and len(up.shape) == len(down.shape) == len(entry.shape):
                        return up, down
        return None

    def _is_turned_by_partner(self, entry: TensorEntry) -> bool | None:
        """Compare the gated matrix's outputs with the next one's inputs, in both layouts."""
        pair = self._partner(entry)
        if pair is None:
            return None
        (*_, a, b), (*_, c, d) = pair[0].shape, pair[1].shape
        fits = [(a, b) == (2 * d, c), (a, b) == (d, 2 * c)]
        return fits[1] if fits[0] != fits[1] else None


def layout_along(entry: TensorEntry, dims: Sequence[int]) -> Layout:
    """:func:`distprune.base.blocks.layout_along` of a stored tensor.

    Raises:
        UnknownLayout: the tensor has no such dimensions, or they do not make a layout.
    """
    try:
        return blocks.layout_along(f"tensor {entry.name}", entry.shape, dims)
    except ValueError as error:
        raise UnknownLayout(str(error)) from error


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
        f"or in a recipe with select.input_dims; DIM is {forms}."
    )


def _number_of_experts(config: Mapping[str, Any]) -> int | None:
    inner = config.get("ffn_config")
    for part in (inner, config):
        value = part.get("moe_num_experts") if isinstance(part, Mapping) else None
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


# Families that store [in, out]: in modules of transformers' Conv1D, and experts [experts, in, out].
CONV1D_FAMILIES = {
    "gpt2", "gpt-sw3", "openai-gpt", "imagegpt", "decision_transformer", "clvp", "clvp_decoder",
}  # fmt: skip
TURNED_EXPERTS = {
    "gpt_oss", "openai_privacy_filter", "llama4", "llama4_text", "aria", "aria_text",
}  # fmt: skip
# Families whose modules of the same names are torch.nn.Linear.
LINEAR_FAMILIES = {
    "gpt_bigcode", "gpt_neo", "starcoder2", "bridgetower", "bridgetower_text_model", "qwen",
}  # fmt: skip
# Families whose experts are [experts, out, in], without a gate that would prove it.
STRAIGHT_EXPERTS = {
    "nemotron_h", "nemotron_h_omni", "nemo_speechlm", "jetmoe", "inkling_text", "inkling_mm_model",
}  # fmt: skip
# By family, names of other 3-d tensors that are not of convolutions: [in, ...], [out, ...],
# [..., out, in] or [..., in, out].
KNOWN = (
    ("xlnet", re.compile(r".*\.rel_attn\.[qkvr]"), "in first"),
    ("xlnet", re.compile(r".*\.rel_attn\.o"), "out first"),
    ("funnel", re.compile(r".*\.r_kernel"), "in first"),
    ("zamba", re.compile(r".*\.(x|dt)_proj_weight"), "in last"),
    ("recurrent_gemma", re.compile(r".*\.rg_lru\.\w+_gate_weight"), "out last"),
)
CONV1D_NAMES = re.compile(r"(?:^|\.)(?:c_attn|c_proj|c_fc|q_attn)\.weight$")
# Matrices that are not the weight of a module may be either [in, out] or [out, in]. Some are known.
OF_MODULE = re.compile(r"(.*_)?weight(_.*)?|original1")
RAW_TURNED = ("mm_input_projection_weight", "prompts_visual_projection")
RAW_STRAIGHT = {
    "dbrx": ("w1", "v1"), "deepseek_v4": ("fn", "hc_fn"), "hy_v4": ("fn", "hc_fn"),
    "glm5_next": ("fn", "index_kpool_compress_gate"),
    "glm5_next_text": ("fn", "index_kpool_compress_gate"),
}  # fmt: skip
EXPERTS = re.compile(r"(?:^|\.)(?:shared_)?experts(?:\.|$)")
CONVOLUTION = re.compile(r"(?i)conv")
# Modules that enlarge pictures or sounds; some of them are transposed convolutions.
ENLARGES = re.compile(
    r"(?i)upsampl|upscal|deconv|convt|conv_t|transpos|\.resize|(^|\.)fpn\d|\.ups\."
)
# A matrix whose outputs are gates and values, and the next one, which has half as many inputs.
GATED_PAIRS = (
    ("gate_up_proj", "down_proj"),
    ("gate_and_up_projs", "down_projs"),
    ("input_linear.weight", "output_linear.weight"),
    ("fc1.weight", "fc2.weight"),
)
WEIGHT = re.compile(r"\.(?:weight|weight_v|parametrizations\.weight\.original1)$")
