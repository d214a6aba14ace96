"""Along which dimension of a stored tensor the inputs of its outputs lie.

N:M patterns go along the inputs, and scope "row" ranks what one output sums over. A header gives
shapes and no meaning: ``torch.nn.Linear`` stores [out, in]; GPT-2's Conv1D, and the experts of
some families, [in, out]. What proves a layout comes first (the length of a bias, the shapes of two
matrices that follow each other), then the families that are known by their ``model_type``. Where
neither tells, nothing is guessed: :class:`UnknownLayout`, and the user says it (``input_dims``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from distprune.files.checkpoints.checkpoint import Checkpoint
from distprune.files.errors import SelectionError
from distprune.files.formats.header import TensorEntry
from distprune.files.selecting.matching import matched

# Families that store [in, out], read from their definitions in transformers: of transformers'
# Conv1D, and experts [experts, in, out].
_CONV1D_FAMILIES = {
    "gpt2", "gpt-sw3", "openai-gpt", "imagegpt", "decision_transformer", "clvp", "clvp_decoder",
}  # fmt: skip
_TURNED_EXPERTS = {
    "gpt_oss", "openai_privacy_filter", "llama4", "llama4_text", "aria", "aria_text",
}  # fmt: skip
# Families whose modules of the same names are torch.nn.Linear ...
_LINEAR_FAMILIES = {
    "gpt_bigcode", "gpt_neo", "starcoder2", "bridgetower", "bridgetower_text_model", "qwen",
}  # fmt: skip
# ... and whose experts are [experts, out, in], without a gate that would prove it.
_STRAIGHT_EXPERTS = {
    "nemotron_h", "nemotron_h_omni", "nemo_speechlm", "jetmoe", "inkling_text", "inkling_mm_model",
}  # fmt: skip
# Other tensors of three dimensions that are no convolutions: [in, ...], [out, ...],
# [..., out, in] or [..., in, out].
_KNOWN = (
    ("xlnet", re.compile(r".*\.rel_attn\.[qkvr]"), "in first"),
    ("xlnet", re.compile(r".*\.rel_attn\.o"), "out first"),
    ("funnel", re.compile(r".*\.r_kernel"), "in first"),
    ("zamba", re.compile(r".*\.(x|dt)_proj_weight"), "in last"),
    ("recurrent_gemma", re.compile(r".*\.rg_lru\.\w+_gate_weight"), "out last"),
)
_CONV1D_NAMES = re.compile(r"(?:^|\.)(?:c_attn|c_proj|c_fc|q_attn)\.weight$")
# Matrices that are no weight of a module are used either way. Some are known to be [in, out],
# others [out, in].
_OF_MODULE = re.compile(r"(.*_)?weight(_.*)?|original1")
_RAW_TURNED = ("mm_input_projection_weight", "prompts_visual_projection")
_RAW_STRAIGHT = {
    "dbrx": ("w1", "v1"), "deepseek_v4": ("fn", "hc_fn"), "hy_v4": ("fn", "hc_fn"),
    "glm5_next": ("fn", "index_kpool_compress_gate"),
    "glm5_next_text": ("fn", "index_kpool_compress_gate"),
}  # fmt: skip
_EXPERTS = re.compile(r"(?:^|\.)(?:shared_)?experts(?:\.|$)")
_CONVOLUTION = re.compile(r"(?i)conv")
# Modules that enlarge pictures or sounds: many are transposed convolutions, many are not.
_ENLARGES = re.compile(
    r"(?i)upsampl|upscal|deconv|convt|conv_t|transpos|\.resize|(^|\.)fpn\d|\.ups\."
)
# A matrix whose outputs are gates and values, and the one that takes half as many inputs.
_GATED_PAIRS = (
    ("gate_up_proj", "down_proj"),
    ("gate_and_up_projs", "down_projs"),
    ("input_linear.weight", "output_linear.weight"),
    ("fc1.weight", "fc2.weight"),
)
_WEIGHT = re.compile(r"\.(?:weight|weight_v|parametrizations\.weight\.original1)$")


class UnknownLayout(SelectionError):
    """Nothing says along which dimension the inputs of a tensor lie, or two things disagree."""


@dataclass(frozen=True, slots=True)
class Layout:
    """A tensor as [outer, inputs, columns, kernel], row-major.

    An output is a pair of an index of ``outer`` and one of ``columns``; it sums over ``inputs`` and
    ``kernel``. A matrix [out, in] is (out, in, 1, 1); [in, out] is (1, in, out, 1); a convolution
    [out, in, *kernel] is (out, in, 1, product of kernel).
    """

    outer: int
    inputs: int
    columns: int = 1
    kernel: int = 1

    @property
    def outputs(self) -> int:
        return self.outer * self.columns

    @property
    def stride(self) -> int:
        """How far apart neighbours along the inputs are."""
        return self.columns * self.kernel


class Layouts:
    """The layouts of a checkpoint's tensors.

    Args:
        checkpoint: whose config and shapes tell.
        input_dims: pairs of a pattern for names and the dimensions that an output sums over,
            as in a recipe. They come first.

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
        self._conv1d_votes = self._votes()

    def is_given(self, entry: TensorEntry) -> bool:
        """Whether ``input_dims`` says it."""
        return entry.name in self._given

    def of(self, entry: TensorEntry) -> Layout:
        """How a tensor's elements lie.

        Raises:
            UnknownLayout: with what is not known, and how to say it.
        """
        shape = entry.shape
        if entry.name in self._given:
            return layout_along(entry, self._given[entry.name])
        if len(shape) < 2:
            return Layout(1, entry.numel)
        if len(shape) == 2:
            return self._of_matrix(entry)
        if len(shape) == 3 and (known := self._of_known(entry)) is not None:
            return known
        if _EXPERTS.search(entry.name) or (len(shape) == 3 and self._partner(entry)):
            return self._of_experts(entry)
        return self._of_convolution(entry)

    def _of_matrix(self, entry: TensorEntry) -> Layout:
        rows, columns = entry.shape
        if "dbrx" in self._types and entry.name.endswith("experts.mlp.w2"):
            count = _number_of_experts(self._config)
            if count is None or rows % count:
                raise _unknown(entry, self._types, "how many experts it holds is not in the config")
            return Layout(count, rows // count, columns)
        own = entry.name.rpartition(".")[2]
        if own in _RAW_TURNED:
            return Layout(1, rows, columns)
        if not _OF_MODULE.fullmatch(own):
            if not any(own in _RAW_STRAIGHT.get(each, ()) for each in self._types):
                raise _unknown(entry, self._types, "it is a matrix without a module of its own")
            return Layout(rows, columns)
        is_turned = self._is_turned_by_bias(entry)
        if _CONV1D_NAMES.search(entry.name):
            if is_turned is None:
                is_turned = self._is_conv1d()
            elif self._types & _CONV1D_FAMILIES and not is_turned:
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
        for family, names, form in _KNOWN:
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
        if is_turned is None and self._types & _TURNED_EXPERTS:
            is_turned = True
        if is_turned is None and self._types & _STRAIGHT_EXPERTS:
            is_turned = False
        if is_turned is None:
            raise _unknown(entry, self._types, "families differ in how they store stacked experts")
        outer = _product(stacked)
        return Layout(outer, rows, columns) if is_turned else Layout(outer * rows, columns)

    def _of_convolution(self, entry: TensorEntry) -> Layout:
        """[out, in, *kernel], or [in, out, *kernel] of a transposed one, which its bias shows."""
        first, second, *kernel = entry.shape
        is_turned = self._is_turned_by_bias(entry)
        if is_turned is None and _ENLARGES.search(entry.name):
            raise _unknown(entry, self._types, "it may be a transposed convolution")
        is_named = _CONVOLUTION.search(entry.name) or kernel == [1] or len(kernel) > 1
        if is_turned is None and not is_named:
            raise _unknown(entry, self._types, "it may be a convolution, or stacked matrices")
        size = _product(kernel)
        return Layout(1, first, second, size) if is_turned else Layout(first, second, 1, size)

    def _is_conv1d(self) -> bool | None:
        """Whether modules with the names of Conv1D are; a bias of one of them shows it for all."""
        if self._types & _CONV1D_FAMILIES:
            return True
        if self._types & _LINEAR_FAMILIES:
            return False
        return next(iter(self._conv1d_votes)) if len(self._conv1d_votes) == 1 else None

    def _votes(self) -> set[bool]:
        matrices = (entry for entry in self._entries.values() if len(entry.shape) == 2)
        named = (entry for entry in matrices if _CONV1D_NAMES.search(entry.name))
        return {self._is_turned_by_bias(entry) for entry in named} - {None}

    def _is_turned_by_bias(self, entry: TensorEntry) -> bool | None:
        """A bias has an element for every output: which of the first two dimensions it fits."""
        found = _WEIGHT.search(entry.name)
        bias = self._entries.get(entry.name[: found.start()] + ".bias") if found else None
        if bias is None or len(bias.shape) != 1:
            return None
        fits = [size == bias.shape[0] for size in entry.shape[:2]]
        return fits[1] if fits[0] != fits[1] else None

    def _partner(self, entry: TensorEntry) -> tuple[TensorEntry, TensorEntry] | None:
        """A gated matrix and the one that follows it, if a tensor is one of them."""
        for pair in _GATED_PAIRS:
            for leaf in pair:
                if entry.name.endswith("." + leaf):
                    stem = entry.name.removesuffix(leaf)
                    up, down = (self._entries.get(stem + each) for each in pair)
                    if up and down and len(up.shape) == len(down.shape) == len(entry.shape):
                        return up, down
        return None

    def _is_turned_by_partner(self, entry: TensorEntry) -> bool | None:
        """Half of the outputs of the one are the inputs of the other, and the other way round."""
        pair = self._partner(entry)
        if pair is None:
            return None
        (*_, a, b), (*_, c, d) = pair[0].shape, pair[1].shape
        fits = [(a, b) == (2 * d, c), (a, b) == (d, 2 * c)]
        return fits[1] if fits[0] != fits[1] else None


def layout_along(entry: TensorEntry, dims: Sequence[int]) -> Layout:
    """The layout of a tensor whose outputs sum over these dimensions.

    Args:
        entry: the tensor.
        dims: the one that N:M goes along, and after it the last ones of the tensor, if outputs
            sum over these too, as over the kernel of a convolution; negative ones from the end.

    Raises:
        UnknownLayout: the tensor has no such dimensions, or they are no layout.
    """
    shape, ndim = entry.shape, len(entry.shape)
    inner = [dim + ndim if dim < 0 else dim for dim in dims]
    kernel = inner[1:]
    is_good = (
        bool(inner)
        and all(0 <= dim < ndim for dim in inner)
        and kernel == list(range(ndim - len(kernel), ndim))
        and (not kernel or inner[0] < kernel[0])
    )
    if not is_good:
        raise UnknownLayout(
            f"tensor {entry.name} has the shape {list(shape)}, and input_dims says {list(dims)}; "
            "expected one of its dimensions, counted from 0, and after it, for a convolution, "
            "those of the kernel: the last ones."
        )
    first, start = inner[0], ndim - len(kernel)
    return Layout(
        _product(shape[:first]),
        shape[first],
        _product(shape[first + 1 : start]),
        _product(shape[start:]),
    )


def model_types(config: Mapping[str, Any], depth: int = 4) -> set[str]:
    """Every ``model_type`` in a config, those of its parts too."""
    found = {config["model_type"]} if isinstance(config.get("model_type"), str) else set()
    if depth:
        for value in config.values():
            if isinstance(value, Mapping):
                found |= model_types(value, depth - 1)
    return found


def pattern_of(name: str) -> str:
    """A pattern that matches a tensor and its like in other layers."""
    escaped = re.sub(r"([*?\[])", r"[\1]", name)
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", escaped)


def _unknown(entry: TensorEntry, types: set[str], why: str) -> UnknownLayout:
    known = f"model_type {', '.join(map(repr, sorted(types)))}" if types else "no model_type"
    ndim = len(entry.shape)
    forms = f"{ndim - 1} for [..., out, in], {ndim - 2} for [..., in, out]"
    if ndim > 2:
        kernel = ",".join(map(str, range(2, ndim)))
        forms += f", 1,{kernel} for [out, in, *kernel], 0,{kernel} for [in, out, *kernel]"
    return UnknownLayout(
        f"{pattern_of(entry.name)} {list(entry.shape)} ({known}): along which dimension its inputs "
        f"lie is not known, because {why}. Say it with --input-dim '{pattern_of(entry.name)}=DIM', "
        f"or in a recipe with select.input_dims; DIM is {forms}."
    )


def _number_of_experts(config: Mapping[str, Any]) -> int | None:
    inner = config.get("ffn_config")
    for each in (inner, config):
        value = each.get("moe_num_experts") if isinstance(each, Mapping) else None
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def _product(sizes: Iterable[int]) -> int:
    product = 1
    for size in sizes:
        product *= size
    return product
