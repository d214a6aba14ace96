"""Which tensors of a checkpoint are pruned, in which group of the recipe, and why others are not.

Names and headers decide: a file does not say what a tensor is for. `base.selecting`` has the
rules for names; ``include`` replaces them, and ``also`` adds to what they select.

[Note: layouts] N:M patterns run along the inputs, and scope "row" ranks the elements that one
output sums over. A header has shapes without meaning. Matrices are [out, in], except the modules of
transformers' Conv1D, in families that are known to use it. Stacked matrices of experts, [experts,
out, in] or [experts, in, out], are told by the shapes of two that follow each other. Convolutions
are [out, in, *kernel]. Of anything else the user is asked for ``input_dims``.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from distprune.base.blocks import Layout, layout_along
from distprune.base.selecting import PLAIN_FLOATS, matcher, reason_of_shape, reason_to_keep
from distprune.files.checkpoint import Checkpoint, TensorEntry
from distprune.files.errors import SelectionError, translated
from distprune.recipes import GroupRecipe, Recipe

_OTHER = "not included"
# The head and the embedding that ``tie_word_embeddings`` makes one.
_TIED = (
    re.compile(r"(^|\.)(lm_head|embed_out)\."),
    re.compile(r"(^|\.)(embed_tokens|wte|word_embeddings|embed_in)\."),
)


# A tensor; the number of its group in the recipe, None if it is left alone; and why it is left
# alone, "" if it is pruned.
Verdict = tuple[TensorEntry, int | None, str]


def select_tensors(checkpoint: Checkpoint, recipe: Recipe) -> tuple[list[Verdict], list[str]]:
    """Decide for every tensor whether it is pruned, and in which group.

    Returns:
        The verdict on every tensor, in the order of the checkpoint; and sentences on what is no
        error, but probably not meant.

    Raises:
        SelectionError: the recipe has keys of models, a pattern of ``include``, ``also`` or
            ``input_dims`` matches nothing, a selected tensor is no plain float or does not fit the
            pattern, its inputs are along an unknown dimension, tied weights are stored twice,
            nothing is selected, or a tensor is in two groups; the first problem. An ``exclude``
            that matches nothing is a warning.
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
            reasons, own_warnings = _reasons(checkpoint, part)
        except SelectionError as error:
            text = f"the selection in {checkpoint.folder}: {where}{error}"
            raise SelectionError(text) from error
        by_group.append(reasons)
        warnings += [where + warning for warning in own_warnings]
    verdicts: list[Verdict] = []
    for entry, *own in zip(checkpoint.tensors, *by_group, strict=True):
        numbers = [number for number, reason in enumerate(own) if not reason]
        if len(numbers) > 1:
            groups = " and ".join(f"groups[{number}]" for number in numbers)
            raise SelectionError(
                f"tensor {entry.name} is in {groups}; expected every tensor in one group at most, "
                "as each has a budget of its own. Exclude it from the others."
            )
        if numbers:
            verdicts.append((entry, numbers[0], ""))
            continue
        is_common = own.count(own[0]) == len(own) and not (recipe.groups and own[0] == _OTHER)
        verdicts.append((entry, None, own[0] if is_common else "in no group"))
    return verdicts, warnings


def _reasons(checkpoint: Checkpoint, recipe: GroupRecipe) -> tuple[list[str], list[str]]:
    """Why a recipe without groups leaves each tensor alone ("" if it does not); and warnings."""
    names = [entry.name for entry in checkpoint.tensors]
    patterns = recipe.include or recipe.also
    named = matched("also" if recipe.include is None else "include", patterns, names)
    warnings: list[str] = []
    excluded = matched("exclude", recipe.exclude, names, warnings)
    reasons = []
    of_shape = functools.cache(functools.partial(reason_of_shape, min_ndim=recipe.min_ndim))
    for entry in checkpoint.tensors:
        is_named = entry.name in named
        if entry.name in excluded:
            reason = "excluded"
        elif recipe.include is not None and not is_named:
            reason = _OTHER
        else:
            reason = of_shape(entry.shape)  # there are few
            if reason and is_named and recipe.include is None:
                warnings.append(f"also: {entry.name} is left alone all the same: {reason}.")
            if not reason and not is_named:
                reason = reason_to_keep(entry.name, entry.shape, entry.dtype)
        reasons.append(reason)
    selected = [e for e, reason in zip(checkpoint.tensors, reasons, strict=True) if not reason]
    layouts, rule = Layouts(checkpoint, recipe.input_dims), recipe.group_rule
    for entry in selected:
        if entry.dtype not in PLAIN_FLOATS:
            raise SelectionError(
                f"tensor {entry.name} is {entry.dtype}; expected one of "
                f"{', '.join(PLAIN_FLOATS)}. Dequantise the checkpoint, or exclude the tensor."
            )
    for entry in selected if rule.needs_input_dim else ():
        misfit = rule.misfit(f"tensor {entry.name}", entry.shape, layouts.of(entry))
        if misfit is not None:
            raise SelectionError(misfit)
    _check_tied(checkpoint, {entry.name for entry in selected})
    if not selected:
        raise SelectionError(
            f"nothing is selected: the {len(reasons)} tensors are left out as "
            f"{'; '.join(sorted(set(reasons)))}."
        )
    return reasons, warnings


def _check_tied(checkpoint: Checkpoint, selected: set[str]) -> None:
    """Raise SelectionError if a head and an embedding, which a model ties, would differ."""
    text = checkpoint.config.get("text_config")
    configs = [checkpoint.config, text if isinstance(text, dict) else {}]
    if not any(config.get("tie_word_embeddings") is True for config in configs):
        return
    names = [entry.name for entry in checkpoint.tensors]
    heads, inputs = ([name for name in names if pattern.search(name)] for pattern in _TIED)
    if heads and inputs and (pruned := selected & {*heads, *inputs}):
        raise SelectionError(
            f"config.json ties {inputs[0]} and {heads[0]} (tie_word_embeddings), but both are "
            "stored, and a model loads one of them for both. Exclude "
            f"{' and '.join(sorted(pruned))}."
        )


def matched(
    field: str, patterns: Iterable[str], names: Sequence[str], warnings: list[str] | None = None
) -> set[str]:
    """The names that match one of the patterns; see :mod:`distprune.base.selecting`.

    Args:
        field: the recipe's field, for messages.
        patterns: globs or regular expressions.
        names: of all tensors.
        warnings: gets a sentence on each pattern that matches nothing; None: it is an error.

    Raises:
        SelectionError: a pattern matches nothing; the search for one does not end.
    """
    found: set[str] = set()
    for pattern in patterns:
        with translated(SelectionError, f"{field}: "):
            matching = list(filter(matcher(pattern), names))
        text = (
            f"{field}: {pattern!r} matches none of the {len(names)} tensors; a pattern has to "
            f"match the whole name of a tensor, such as {names[0]}, or of its module."
        )
        if not matching and warnings is None:
            raise SelectionError(text)
        if not matching and warnings is not None:
            warnings.append(text)
        found.update(matching)
    return found


class Layouts:
    """The layouts of a checkpoint's tensors.

    Args:
        checkpoint: with config and shapes.
        input_dims: by pattern for names, the dimensions that an output sums over, as in a recipe.
            They have precedence, the first pattern that matches.

    Raises:
        SelectionError: a pattern matches nothing.
    """

    def __init__(
        self, checkpoint: Checkpoint, input_dims: Mapping[str, Sequence[int]] | None = None
    ) -> None:
        self._entries = {entry.name: entry for entry in checkpoint.tensors}
        self._types = model_types(checkpoint.config)
        self.given: dict[str, Sequence[int]] = {}  # by name of a tensor
        for pattern, dims in (input_dims or {}).items():
            for name in matched("input_dims", (pattern,), list(self._entries)):
                self.given.setdefault(name, dims)

    def of(self, entry: TensorEntry) -> Layout:
        """The layout of a tensor.

        Raises:
            SelectionError: its input dimension is not known, with the reason, and how to give
                ``input_dims``; or those that are given do not fit it.
        """
        shape, name = entry.shape, entry.name
        if name in self.given:
            with translated(SelectionError):
                return layout_along(f"tensor {name}", shape, self.given[name])
        if len(shape) < 2:
            return Layout(1, entry.numel)
        *outer, rows, columns = shape
        if len(shape) == 2:
            if not _OF_MODULE.fullmatch(name.rpartition(".")[2]):
                raise self._unknown(entry, "it is a matrix without a module of its own")
            is_conv1d = _CONV1D_NAMES.search(name) is not None
            if is_conv1d and not self._types:
                raise self._unknown(entry, "some families store such modules [in, out]")
            is_turned = is_conv1d and bool(self._types & _CONV1D_FAMILIES)
        elif (partner := self._is_turned_by_partner(entry)) is not None:
            is_turned = partner
        elif len(shape) == 3 and (
            _EXPERTS.search(name) or not ("conv" in name.lower() or columns == 1)
        ):
            raise self._unknown(entry, "families differ in how they stack matrices")
        elif _ENLARGES.search(name):
            raise self._unknown(entry, "it may be a transposed convolution")
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

    def _unknown(self, entry: TensorEntry, why: str) -> SelectionError:
        family = f"model_type {', '.join(sorted(self._types)) or 'unknown'}"
        pattern, ndim = pattern_of(entry.name), len(entry.shape)
        return SelectionError(
            f"{pattern} {list(entry.shape)} ({family}): its input dimension is not known, because "
            f"{why}. Give it with --input-dim '{pattern}=DIM', or in a recipe with input_dims; DIM "
            f"is {ndim - 1} for [..., out, in], {ndim - 2} for [..., in, out], and for a "
            "convolution the dimension of the inputs and those of the kernel: 1,2,3 for "
            "[out, in, *kernel]."
        )


def model_types(config: Mapping[str, Any]) -> set[str]:
    """Every ``model_type`` in a config and its parts."""
    types = {config["model_type"]} if isinstance(config.get("model_type"), str) else set()
    return types.union(*(model_types(v) for v in config.values() if isinstance(v, Mapping)))


def pattern_of(name: str) -> str:
    """A pattern that matches a tensor and its counterparts in other layers."""
    escaped = re.sub(r"([*?\[])", r"[\1]", name)
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", escaped)


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
