"""The finders of parameters that are stored as runs: DeepSpeed's, and those that users register."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import nn

from distprune._common.pruned_form import orig_key
from distprune.torch_private import deepspeed
from distprune.torch_private.stored_run import StoredRun

# (module, name that it registers) -> the record of the parameter; None if it is none of its kind
Finder = Callable[[nn.Module, str], StoredRun | None]

finders: list[Finder] = [deepspeed.find]


def find(module: nn.Module, name: str) -> StoredRun | None:
    """The record of a parameter, pruned or not; None if no finder knows it."""
    for key in (orig_key(name), name):
        if key in module._parameters:
            for finder in finders:
                record = finder(module, key)
                if record is not None:
                    return record
    return None


def found_in(root: nn.Module) -> Iterator[tuple[tuple[int, str], StoredRun]]:
    """Every record below a model, by (id(module), registered name)."""
    for module in root.modules():
        for name in module._parameters:
            for finder in finders:
                record = finder(module, name)
                if record is not None:
                    yield (id(module), name), record
                    break
