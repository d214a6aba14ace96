"""Which tensors of a checkpoint are pruned, in which group of the recipe, and why others are not.

Names and headers decide: a file does not say what a tensor is for. `base.selecting`` has the
rules for names; ``include`` replaces them, and ``also`` adds to what they select.

[Note: layouts] N:M patterns run along the inputs, and scope "row" ranks the elements that one
output sums over. A header has shapes without meaning. Matrices are [out, in], except the modules of
transformers' Conv1D, in families that are known to use it. Stacked matrices of experts, [experts,
out, in] or [experts, in, out], are told by the shapes of two that follow each other. Convolutions
are [out, in, *kernel]. Of anything else :class:`UnknownLayout` asks the user for ``input_dims``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from distprune.base.blocks import Layout, layout_along
from distprune.base.float_formats import PLAIN_FLOATS
from distprune.base.selecting import ADAPTER, matcher, reason_of_shape, reason_to_keep
from distprune.files.checkpoint import Checkpoint, TensorEntry
from distprune.files.errors import SelectionError
from distprune.recipes import GroupRecipe, Recipe

_ADAPTER_CONFIG = "adapter_config.json"
_MAX_WARNINGS = 12  # about tensors that are left alone


class Verdict(NamedTuple):
    """Whether a tensor is pruned.

    Attributes:
        entry: the tensor.
        is_pruned: whether it takes part.
        reason: why it is left alone; "" if it is pruned.
    """

    entry: TensorEntry
    is_pruned: bool
    reason: str


@dataclass(frozen=True)
class Selection:
    """Which tensors of a checkpoint are pruned, and in which group of the recipe.

    Attributes:
        verdicts: of every tensor, in the order of the checkpoint.
        groups: per group of the recipe, its tensors in that order; one group if the recipe has
            none.
        warnings: sentences on what is no error, but probably not meant.
    """

    verdicts: tuple[Verdict, ...]
    groups: tuple[list[TensorEntry], ...]
    warnings: tuple[str, ...]


def select_tensors(checkpoint: Checkpoint, recipe: Recipe) -> Selection:
    """Decide for every tensor whether it is pruned, and in which group.

    Raises:
        SelectionError: the recipe has keys of models, a pattern of ``include``, ``also`` or
            ``input_dims`` matches nothing, a selected tensor is no plain float or does not fit the
            pattern, its inputs are along an unknown dimension, tied weights are stored twice, the
            recipe does not name the factors of an adapter, nothing is selected, or a tensor is in
            two groups; the first problem. An ``exclude`` that matches nothing is a warning.
    """
    if any(part.schedule is not None or part.names is not None for part in recipe.parts):
        raise SelectionError(
            "the recipe has schedule or names, which are for models; expected sparsity or pattern, "
            "because a checkpoint is pruned at once, and include, which matches names of tensors."
        )
    warnings: list[str] = []
    by_group = []
    for number, part in enumerate(recipe.parts):
        where = f"groups[{number}]: " if recipe.groups else ""
        try:
            verdicts, own_warnings = _select(checkpoint, part)
        except SelectionError as error:
            text = f"the selection in {checkpoint.folder}: {where}{error}"
            raise SelectionError(text) from error
        by_group.append(verdicts)
        warnings += [where + warning for warning in own_warnings]
    groups = tuple([v.entry for v in verdicts if v.is_pruned] for verdicts in by_group)
    verdicts = by_group[0] if not recipe.groups else list(map(_merged, *by_group))
    return Selection(tuple(verdicts), groups, tuple(warnings))


def _merged(*verdicts: Verdict) -> Verdict:
    """The verdict on a tensor from those of all groups."""
    entry = verdicts[0].entry
    numbers = [number for number, verdict in enumerate(verdicts) if verdict.is_pruned]
    if len(numbers) > 1:
        where = " and ".join(f"groups[{number}]" for number in numbers)
        raise SelectionError(
            f"tensor {entry.name} is in {where}; expected every tensor in one group at most, as "
            "each has a budget of its own. Exclude it from the others."
        )
    if numbers:
        return Verdict(entry, True, "")
    reasons = {verdict.reason for verdict in verdicts}
    common = reasons.pop() if len(reasons) == 1 else ""
    return Verdict(entry, False, common if common not in ("", "not included") else "in no group")


def _select(checkpoint: Checkpoint, recipe: GroupRecipe) -> tuple[list[Verdict], list[str]]:
    """Verdicts on all tensors by a recipe without groups; and warnings."""
    names = [entry.name for entry in checkpoint.tensors]
    included = matched("include", recipe.include or (), names)
    also = matched("also", recipe.also, names)
    excluded: set[str] = set()
    warnings = []
    for pattern in recipe.exclude:
        try:
            excluded |= matched("exclude", (pattern,), names)
        except NoMatch as error:
            warnings.append(str(error))
    verdicts = []
    has_include, of_shapes = recipe.include is not None, {}
    named = included if has_include else also
    for entry in checkpoint.tensors:
        is_named = entry.name in named
        if entry.name in excluded:
            reason = "excluded"
        elif has_include and not is_named:
            reason = "not included"
        else:
            if entry.shape not in of_shapes:  # there are few
                of_shapes[entry.shape] = reason_of_shape(entry.shape, recipe.min_ndim)
            reason = of_shapes[entry.shape]
            if not reason and not is_named:
                reason = reason_to_keep(entry.name, entry.shape, entry.dtype)
        verdicts.append(Verdict(entry, not reason, reason))
    selected = [verdict.entry for verdict in verdicts if verdict.is_pruned]
    if not has_include and not also:
        _refuse_adapter(checkpoint, verdicts)
    _check_entries(checkpoint, selected, recipe)
    _check_tied(checkpoint, selected)
    if not selected:
        reasons = "; ".join(sorted({verdict.reason for verdict in verdicts}))
        raise SelectionError(
            f"nothing is selected: the {len(verdicts)} tensors are left out as {reasons}."
        )
    left_out = [
        f"also: {verdict.entry.name} is left alone all the same: {verdict.reason}."
        for verdict in verdicts
        if verdict.entry.name in also and verdict.reason not in ("", "excluded")
    ]
    return verdicts, [*warnings, *left_out[:_MAX_WARNINGS]]


def _check_entries(
    checkpoint: Checkpoint, selected: Iterable[TensorEntry], recipe: GroupRecipe
) -> None:
    """Raise SelectionError if a tensor cannot be pruned by the recipe."""
    layouts = Layouts(checkpoint, recipe.input_dims.items())
    for entry in selected:
        if entry.dtype not in PLAIN_FLOATS:
            raise SelectionError(
                f"tensor {entry.name} is {entry.dtype}; expected one of "
                f"{', '.join(PLAIN_FLOATS)}. Dequantise the checkpoint, or exclude the tensor."
            )
        if recipe.needs_input_dim:
            name = f"tensor {entry.name}"
            misfit = recipe.group_rule.misfit(name, entry.shape, layouts.of(entry))
            if misfit is not None:
                raise SelectionError(misfit)


def _refuse_adapter(checkpoint: Checkpoint, verdicts: Sequence[Verdict]) -> None:
    """Raise SelectionError for an adapter, which has factors of an update, not weights."""
    is_folder = any(other.name == _ADAPTER_CONFIG for other in checkpoint.others) and all(
        file.name.startswith("adapter_model") for file in checkpoint.files
    )
    has_factors = any(verdict.reason == ADAPTER for verdict in verdicts)
    if is_folder or (has_factors and not any(verdict.is_pruned for verdict in verdicts)):
        sign = f" ({_ADAPTER_CONFIG})" if is_folder else " (names such as lora_A)"
        raise SelectionError(
            f"the checkpoint is an adapter{sign}: its tensors are factors of an update, and "
            "pruning them is seldom meant. Merge it into its model and prune that, or name the "
            "tensors to prune with include."
        )


def _check_tied(checkpoint: Checkpoint, selected: Iterable[TensorEntry]) -> None:
    """Raise SelectionError if a head and an embedding, which a model ties, would differ."""
    text = checkpoint.config.get("text_config")
    configs = [checkpoint.config, text if isinstance(text, dict) else {}]
    if not any(config.get("tie_word_embeddings") is True for config in configs):
        return
    names = [entry.name for entry in checkpoint.tensors]
    heads = [n for n in names if re.search(r"(^|\.)(lm_head|embed_out)\.", n)]
    inputs = [
        n for n in names if re.search(r"(^|\.)(embed_tokens|wte|word_embeddings|embed_in)\.", n)
    ]
    pruned = {entry.name for entry in selected} & {*heads, *inputs}
    if heads and inputs and pruned:
        both = " and ".join(sorted(pruned))
        raise SelectionError(
            f"config.json ties {inputs[0]} and {heads[0]} (tie_word_embeddings), but both are "
            f"stored, and a model loads one of them for both. Exclude {both}."
        )


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
