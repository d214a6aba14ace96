"""Records of the masks of a model as plain values, to be saved with the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import nn

from distprune._common.naming import full_name, named_modules
from distprune.masks.hook import PruningHook
from distprune.masks.record import MaskRecord


def records_of(model: nn.Module) -> dict[str, list[int]]:
    """[fingerprint, pruned elements] of every parameter that has a record, by full name.

    They are the same on any sharding, and on every rank that has the parameter.
    """
    return {
        name: [hook.record.fingerprint, hook.record.num_pruned]
        for name, hook in _named_hooks(model)
        if hook.record is not None
    }


def put_records(model: nn.Module, records: Mapping[str, Sequence[int]]) -> None:
    """Store the records of loaded masks in the hooks of a model.

    Args:
        records: from :func:`records_of`. The mask of a parameter without one becomes unknown.
    """
    for name, hook in _named_hooks(model):
        hook.record = MaskRecord(*records[name]) if name in records else None


def _named_hooks(model: nn.Module) -> Iterator[tuple[str, PruningHook]]:
    for path, module in named_modules(model):
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, PruningHook):
                name = hook._tensor_name
                yield full_name(path, name), hook
