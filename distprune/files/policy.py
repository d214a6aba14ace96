"""Which tensors of a checkpoint are pruned, and of each other one why not.

By name and header alone: a file does not say what a tensor is for. The rules for names are those
of common model families; ``include`` takes their place.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from distprune.files.checkpoint import Checkpoint
from distprune.files.errors import SelectionError, counted
from distprune.files.header import TensorEntry
from distprune.files.recipe import FileRecipe

PRUNED_DTYPES = ("BF16", "F16", "F32", "F64")
_INTEGERS = ("BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64", "C64")
# Parts of names, between dots. The first that matches is the reason.
_NAMES = (
    (r"(?i).*(_|^)?scales?(_inv)?$|.*zero_points?$|.*zeros$", "scales of quantised weights"),
    (r"(?i).*embed.*|wte|wpe|shared|.*_emb", "an embedding"),
    (r"(?i)lm_head|embed_out", "the output head"),
    (r"(?i).*norm.*|ln(_.*)?|ln[0-9]*", "a normalisation"),
    (r"(?i).*router.*|gate|.*expert_gate", "a router"),
    (r"(?i)bias|.*_bias", "a bias"),
)
_WHOLE_NAMES = {"output.weight": "the output head"}
_MAX_PROBLEMS = 12


@dataclass(frozen=True, slots=True)
class Choice:
    """A tensor and what becomes of it.

    Attributes:
        entry: the tensor.
        is_pruned: whether it takes part.
        reason: why not; "" if it does.
    """

    entry: TensorEntry
    is_pruned: bool
    reason: str


def choose(checkpoint: Checkpoint, recipe: FileRecipe) -> list[Choice]:
    """Decide for every tensor, in the order of the checkpoint.

    Raises:
        SelectionError: with every problem: a pattern that matches nothing, a selected tensor
            that is no plain float or does not fit the pattern, tied weights stored twice,
            nothing selected.
    """
    problems: list[str] = []
    tensors = checkpoint.tensors
    included = _matched("include", recipe.include, tensors, problems)
    excluded = _matched("exclude", recipe.exclude, tensors, problems)
    choices = []
    for entry in tensors:
        if entry.name in excluded:
            reason = "excluded"
        elif recipe.include is not None and entry.name not in included:
            reason = "not included"
        elif len(entry.shape) < recipe.min_ndim:
            reason = f"fewer than {recipe.min_ndim} dimensions"
        elif entry.numel == 0:
            reason = "no elements"
        else:
            reason = _reason(entry, is_asked_for=recipe.include is not None)
        choices.append(Choice(entry, not reason, reason))
    chosen = [choice.entry for choice in choices if choice.is_pruned]
    bad = [problem for entry in chosen for problem in _entry_problems(entry, recipe)]
    problems += bad[:_MAX_PROBLEMS]
    if len(bad) > _MAX_PROBLEMS:
        problems.append(f"{len(bad) - _MAX_PROBLEMS} more tensors have the same problems.")
    problems += _tied_problems(checkpoint, chosen)
    if not chosen and not problems:
        reasons = sorted({choice.reason for choice in choices})
        problems.append(
            f"nothing is selected: the {len(choices)} tensors are left out as {'; '.join(reasons)}."
        )
    if problems:
        raise SelectionError(counted(f"the selection in {checkpoint.folder}", problems), problems)
    return choices


def input_groups(entry: TensorEntry) -> tuple[int, int, int]:
    """How a tensor's elements lie: (outputs, inputs, kernel), row-major.

    A matrix is [out, in], as in ``torch.nn.Linear``. Of three dimensions and more, matrices of
    stacked experts ("experts" in the name) are [..., out, in]; everything else is a convolution,
    [out, in, *kernel].
    """
    shape = entry.shape
    if len(shape) == 1:
        return 1, shape[0], 1
    if len(shape) == 2 or "experts" in entry.name:
        return _product(shape[:-1]), shape[-1], 1
    return shape[0], shape[1], _product(shape[2:])


def _reason(entry: TensorEntry, *, is_asked_for: bool) -> str:
    if is_asked_for:
        return ""
    if entry.dtype in _INTEGERS:
        return f"{entry.dtype} is no float"
    if entry.name in _WHOLE_NAMES:
        return _WHOLE_NAMES[entry.name]
    rule = min(map(_rule_of, entry.name.split(".")))
    return _NAMES[rule][1] if rule < len(_NAMES) else ""


@functools.lru_cache(maxsize=4096)
def _rule_of(part: str) -> int:
    """Which rule a part of a name falls under; names are made of few different parts."""
    matches = (i for i, (pattern, _) in enumerate(_NAMES) if re.fullmatch(pattern, part))
    return next(matches, len(_NAMES))


def _entry_problems(entry: TensorEntry, recipe: FileRecipe) -> list[str]:
    if entry.dtype not in PRUNED_DTYPES:
        return [
            f"tensor {entry.name} is {entry.dtype}; expected one of {', '.join(PRUNED_DTYPES)}. "
            "Dequantise the checkpoint, or exclude the tensor."
        ]
    if recipe.kept_of is not None:
        group, inputs = recipe.kept_of[1], input_groups(entry)[1]
        if inputs % group:
            return [
                f"tensor {entry.name} has {inputs} inputs (shape {list(entry.shape)}), which "
                f"{group} does not divide: {recipe.pattern} does not fit. Exclude it."
            ]
    return []


def _matched(
    field: str,
    patterns: Sequence[str] | None,
    tensors: Sequence[TensorEntry],
    problems: list[str],
) -> set[str]:
    """Names of tensors that match one of the patterns, by themselves or by their module's name.

    As in the library's ``select``. A pattern that matches nothing is a problem.
    """
    found: set[str] = set()
    for pattern in patterns or ():
        matches = _matcher(pattern)
        names = [
            entry.name
            for entry in tensors
            if matches(entry.name) or matches(entry.name.rpartition(".")[0])
        ]
        if not names:
            known = [entry.name for entry in tensors]
            close = difflib.get_close_matches(pattern, known, n=1, cutoff=0.3)
            example = (close or known[:1] or ["(none)"])[0]
            problems.append(
                f"{field}: {pattern!r} matches none of the {len(known)} tensors; a pattern has to "
                f"match the whole name of a tensor, such as {example}, or of its module."
            )
        found.update(names)
    return found


def _matcher(pattern: str) -> Callable[[str], Any]:
    if pattern.startswith("re:"):
        return re.compile(pattern[3:]).fullmatch
    return lambda name: fnmatchcase(name, pattern)


def _tied_problems(checkpoint: Checkpoint, chosen: Iterable[TensorEntry]) -> list[str]:
    """An embedding and a head that a model joins are one tensor; two on disk would drift apart."""
    text = checkpoint.config.get("text_config")
    configs = [checkpoint.config, text if isinstance(text, dict) else {}]
    if not any(config.get("tie_word_embeddings") is True for config in configs):
        return []
    names = [entry.name for entry in checkpoint.tensors]
    heads = [n for n in names if re.search(r"(^|\.)(lm_head|embed_out)\.", n)]
    inputs = [
        n for n in names if re.search(r"(^|\.)(embed_tokens|wte|word_embeddings|embed_in)\.", n)
    ]
    taken = {entry.name for entry in chosen} & {*heads, *inputs}
    if heads and inputs and taken:
        names = " and ".join(sorted(taken))
        return [
            f"config.json ties {inputs[0]} and {heads[0]} (tie_word_embeddings), but both are "
            f"stored, and a model loads one of them for both. Exclude {names}."
        ]
    return []


def _product(sizes: Iterable[int]) -> int:
    product = 1
    for size in sizes:
        product *= size
    return product
