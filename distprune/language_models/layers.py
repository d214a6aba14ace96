"""Which layers of a language model are calibrated, its tokenizer, and the extra that it needs."""

from __future__ import annotations

import glob
import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from distprune._common.naming import NamedParameter, full_name, named_modules
from distprune.api.select import head_of, select
from distprune.files.checkpoints.locating import locate
from distprune.files.errors import CheckpointError
from distprune.statistics.layers import layout_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# The weights of transformers' fused experts; those of JetMoe are called "weight".
_OF_EXPERTS = ("gate_up_proj", "up_proj", "down_proj")


def linear_layers(
    model: nn.Module,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] = (),
) -> list[NamedParameter]:
    """The weights of a language model that have activation statistics.

    Args:
        model: of transformers, plain or wrapped.
        include: patterns, as ``select`` takes them; by default all linear layers and fused experts
            but the head, which makes logits, and layers with a forward of their own, such as some
            routers.
        exclude: patterns of those that are left out.

    Returns:
        Weights of nn.Linear, of transformers' Conv1D and of its fused experts, as ``select`` lists
        them.

    Raises:
        ValueError: a pattern that matches nothing; nothing is left.

    Cost: a walk over the modules; no communication.
    """
    require_extra()
    from transformers.pytorch_utils import Conv1D

    experts = {type(module) for _, module in named_modules(model) if _are_fused_experts(module)}
    left_out, types, names = list(exclude), (nn.Linear, Conv1D, *experts), ("weight", *_OF_EXPERTS)
    if include is not None:
        return select(
            model, include=include, exclude=left_out, types=types, names=names, everything=True
        )
    head = head_of(model)
    left_out += [
        glob.escape(path) for path, module in named_modules(model) if path and module is head
    ]
    selected = select(model, None, left_out, types, names, everything=True)
    return [pair for pair in selected if type(pair[0]) in experts or not _has_own_forward(pair[0])]


def without_statistics(model: nn.Module) -> list[str]:
    """Names of weights whose inputs are not seen: some fused experts, and some routers."""
    return [
        full_name(path, name)
        for path, module in named_modules(model)
        for name, parameter in module.named_parameters(recurse=False)
        if (parameter.ndim == 3 and "expert" in path and not _are_fused_experts(module))
        or (isinstance(module, nn.Linear) and parameter.ndim == 2 and _has_own_forward(module))
    ]


def _are_fused_experts(module: nn.Module) -> bool:
    """Whether a module has weights of three dimensions that are known to be fused experts."""
    shape = torch.Size((1, 1, 1))  # nothing but the number of dimensions matters
    layout = layout_of(module, "weight", shape)
    return not isinstance(layout, str) and layout.are_experts


def _has_own_forward(module: nn.Module) -> bool:
    """Whether a linear layer does something else than nn.Linear or transformers' Conv1D."""
    shape = torch.Size((1, 1))  # nothing but the number of dimensions matters
    return isinstance(layout_of(module, "weight", shape), str)


def load_tokenizer(folder: str | os.PathLike[str]) -> PreTrainedTokenizerBase:
    """The tokenizer of a Hugging Face folder, or of a model in the local cache; no downloads.

    Raises:
        CheckpointError: there is none, or it cannot be read.
        ImportError: the extra ``language-models`` is not installed.
    """
    require_extra()
    from transformers import AutoTokenizer

    place = locate(Path(folder)).folder
    try:
        made: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(place, local_files_only=True)
    except (OSError, ValueError, TypeError, KeyError, ImportError) as error:
        text = str(error).strip().splitlines()
        raise CheckpointError(
            f"{folder} has no tokenizer that transformers can load ({text[0] if text else error!r})"
            "; expected tokenizer.json or the like. Give the folder of one that has."
        ) from error
    return made


_PACKAGES = ("transformers", "safetensors")


def require_extra() -> None:
    """Raise ImportError, which names the extra, if a package of it is not installed."""
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(
            f"distprune.language_models needs {' and '.join(missing)}; expected the extra "
            "language-models. Install it: pip install 'distprune[language-models]'"
        )
