"""Which parameters a backward may still reach: the autograd graphs that are alive, and not used up.

Autograd has no register of graphs. A parameter does not know the graphs that it is in, but graphs
refer to it: while its reference count is 1 there is none. If it is more, the graphs are found
from their other ends, the tensors of this process that have a ``grad_fn``, and are walked down to
the parameters. A node whose saved tensors have been freed ends a walk: no backward can pass it.
So the ``loss`` that a training loop still refers to after ``backward()`` does not count.

Saved tensors are inspected and never unpacked, because unpacking runs a forward again under
activation checkpointing.
"""

from __future__ import annotations

import functools
import gc
import time
from typing import Any

import torch
from torch import Tensor

from distprune._common.pruned_form import local_tensor

_SAVED = "_raw_saved_"
# Other threads count their nodes themselves.
_MAX_AGE = 1.0  # seconds
# When graphs were last walked (the number of the next autograd node, and the time), and what they
# reached.
_walked_at: int | None = None
_walked_time = 0.0
_reached: tuple[frozenset[int], frozenset[int]] = (frozenset(), frozenset())


def reaches(parameter: Tensor) -> bool:
    """Whether a backward may still reach a parameter, or use the values that it has.

    Args:
        parameter: a leaf of graphs, such as a gathered parameter of FSDP.

    Cost: nothing while no graph refers to the parameter. Else one walk over all Python objects and
    the graphs of this process, for all parameters of a call: 0.3 s for a million objects.
    """
    num_references: int = parameter._use_count()  # type: ignore[attr-defined]
    if num_references <= 1 or not _reaches(parameter):
        return False
    # The graph may have been dropped since the walk, or may wait for garbage collection in a cycle.
    gc.collect()
    _walk()
    return _reaches(parameter)


def _reaches(parameter: Tensor) -> bool:
    if _walked_at != _clock() or time.monotonic() - _walked_time > _MAX_AGE:
        _walk()
    leaves, storages = _reached
    return id(parameter) in leaves or storage_of(parameter) in storages


def _clock() -> int:
    """The number of the next autograd node of this thread: every forward changes it."""
    return torch._C._autograd._get_sequence_nr()


def _walk() -> None:
    """Walk every graph of this process, from the tensors that refer to it."""
    global _walked_at, _walked_time, _reached
    leaves: set[int] = set()
    storages: set[int] = set()
    # By identity; kept, because an id is that of another object later.
    visited: dict[int, Any] = {}
    with torch._C.DisableTorchFunctionSubclass():
        pending = _roots()
        while pending:
            node = pending.pop()
            if id(node) in visited:
                continue
            visited[id(node)] = node
            saved = _saved(node)
            if saved is None:
                continue
            for data in saved:
                if isinstance(data, Tensor):
                    storages.add(storage_of(data))
            variable = getattr(node, "variable", None)  # of an AccumulateGrad
            if isinstance(variable, Tensor):
                leaves.add(id(variable))
            pending += [following for following, _ in node.next_functions if following is not None]
    _walked_at, _walked_time = _clock(), time.monotonic()
    _reached = (frozenset(leaves), frozenset(storages - {0}))


def _roots() -> list[Any]:
    roots = []
    for value in gc.get_objects():
        if not issubclass(type(value), Tensor):
            continue
        try:
            # A mere view of a leaf is no forward: FSDP1 keeps views of its flat parameter.
            is_view_of_leaf = value._is_view() and value._base is not None and value._base.is_leaf
            node = None if value.is_leaf or is_view_of_leaf else value.grad_fn
        except RuntimeError:  # a view that was changed where autograd does not allow it
            continue
        if node is not None:
            roots.append(node)
    return roots


def _saved(node: Any) -> list[Any] | None:
    """What a node saves for its backward, as it is packed; None if that has been freed."""
    values: list[Any] = []
    kind: type = type(node)
    names = _saved_names(kind)
    try:
        for name in names:
            saved = getattr(node, name)  # a function in Python raises once it is freed
            if saved is not None:
                variables = saved if isinstance(saved, (tuple, list)) else (saved,)
                values += [variable.data for variable in variables if variable.data is not None]
        if names and not values:
            # It was freed, or nothing was saved: nothing can be unpacked.
            for name in names:
                getattr(node, name.replace(_SAVED, "_saved_"), None)
    except RuntimeError:
        return None
    return values


@functools.cache
def _saved_names(kind: type) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith(_SAVED))


def storage_of(tensor: Tensor) -> int:
    """Identifies the memory of a tensor, or of what a DTensor holds; 0 if it has none."""
    try:
        with torch.no_grad():  # else to_local() is a node itself
            local = local_tensor(tensor)
        address: int = local.untyped_storage()._cdata
        return address
    except (NotImplementedError, RuntimeError):  # sparse
        return 0
