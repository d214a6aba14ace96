"""Which tensors of a checkpoint make which parameters, and what does not fit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from distprune._transformers.building import ignored_on_load, tensors_of_checkpoints
from distprune._transformers.mask_matching import MaskSource
from distprune._transformers.names import TransformersRules
from distprune.files.checkpoints.checkpoint import Checkpoint

_NUM_SHOWN = 20


@dataclass(frozen=True)
class TensorSource:
    """A parameter or persistent buffer, and the tensors that it is read from.

    Attributes:
        names: all its names in the model.
        source: of one of them.
    """

    names: tuple[str, ...]
    source: MaskSource


def find_sources(
    model: Any, checkpoint: Checkpoint, *, ignore_unexpected: bool
) -> list[TensorSource]:
    """Find what each tensor of a model is read from, as ``from_pretrained`` does.

    Args:
        model: of transformers, on the meta device, not sharded. Tied parameters of which the
            checkpoint holds only one are left tied.
        checkpoint: its headers.
        ignore_unexpected: do not raise for tensors of the checkpoint that the model does not use.

    Raises:
        ValueError: with every missing, unexpected and wrongly shaped tensor.
    """
    tensors = dict(tensors_of_checkpoints(model))
    stored = {entry.name: entry.shape for entry in checkpoint.tensors}
    rules = TransformersRules(model)
    matching = rules.match(stored, {n: tuple(t.shape) for n, t in tensors.items()}, ())
    # As from_pretrained: saving undoes the conversions that were used.
    model._weight_conversions = rules.used()
    ignored = ignored_on_load(model)
    unexpected = {
        name: reason
        for name, reason in matching.unexpected.items()
        if not (ignored is not None and ignored.search(name))
    }
    found: list[TensorSource] = []
    missing: list[str] = []
    for names in _by_tensor(tensors):
        sources = [matching.sources[name] for name in names if name in matching.sources]
        if sources:
            found.append(TensorSource(tuple(names), sources[0]))
        else:
            missing += names
    problems = [f"missing: {name}" for name in missing if name not in matching.mismatched]
    problems += [f"wrong shape: {reason}" for reason in matching.mismatched.values()]
    if not ignore_unexpected:
        problems += [
            f"unexpected: {name}{f' ({reason})' if reason else ''}"
            for name, reason in unexpected.items()
        ]
    if problems:
        raise ValueError(_text(model, checkpoint, problems))
    return found


def doubly_stored(model: Any, checkpoint: Checkpoint) -> list[tuple[str, list[str]]]:
    """Tied parameters of which the checkpoint holds a tensor under more than one name."""
    stored = {entry.name for entry in checkpoint.tensors}
    groups = _by_tensor(dict(tensors_of_checkpoints(model)))
    present = [[name for name in names if name in stored] for names in groups]
    return [(names[0], names[1:]) for names in present if len(names) > 1]


def _by_tensor(tensors: dict[str, Tensor]) -> list[list[str]]:
    names: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), []).append(name)
    return list(names.values())


def _text(model: Any, checkpoint: Checkpoint, problems: list[str]) -> str:
    shown = "\n  ".join(problems[:_NUM_SHOWN])
    more = len(problems) - _NUM_SHOWN
    rest = f"\n  and {more} more" if more > 0 else ""
    return (
        f"{checkpoint.folder} does not fit {type(model).__name__}, the model of its config.json:"
        f"\n  {shown}{rest}\nExpected a complete checkpoint of this model. "
        "ignore_unexpected=True loads one that has other tensors besides."
    )
