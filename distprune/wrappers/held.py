"""Held zeros: how a mask acts on a sharded parameter.

The parameter keeps its name and its object, and what the mask prunes is 0 in what each rank stores:

- when the mask is put on, and after ``load_state_dict``;
- before each gather (FSDP1, FSDP2) or forward (any other), so that no other write can bring pruned
  elements back;
- after each step of an optimizer of torch, whatever it does (momentum, weight decay);
- before a state dict is taken.

The reduced gradient is masked too, before it is clipped or stepped, so that norms and momenta are
those of the masked model.

[Note: no new version] Zeros are written through ``.data``. Under tensor parallelism autograd saves
the shard itself in a forward, and a second forward may come before the first backward.

[Note: ownership] A module owns its :class:`Held`. Tensors refer to it weakly: a cycle through a
tensor's hook is not seen by the garbage collector.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim import optimizer as of_torch
from torch.utils.hooks import RemovableHandle

from distprune.base.memory import ordinary_tensors, zero_pruned
from distprune.base.naming import Pair
from distprune.base.pruned_form import MASK, is_dtensor, local_tensor, lost_mask
from distprune.ranks.collectives import resolved
from distprune.wrappers import deepspeed
from distprune.wrappers.managed import Managed, StoredRun
from distprune.wrappers.masked_value import NotCopied, has_dense_gradient
from distprune.wrappers.wrapper import laid_out_like

_ATTRIBUTE = "_distprune_held"


def find_held(module: nn.Module, name: str) -> Held | None:
    """What holds the zeros of ``module.<name>``; None if it is plain, not pruned, or a copy."""
    return module.__dict__.get(_ATTRIBUTE, {}).get(name)


def held_names(module: nn.Module) -> tuple[str, ...]:
    """Names of the parameters of a module whose zeros are held."""
    return tuple(module.__dict__.get(_ATTRIBUTE, ()))


class Held:
    """The zeros of one sharded parameter.

    Args:
        places: every (module, name) of the parameter; each has the mask as its buffer.
        record: the wrapper's record of it; None under tensor parallelism and ZeRO-1 and -2.

    Attributes:
        is_zero: whether the values under the present mask are gone.
    """

    def __init__(self, places: Sequence[Pair], record: Managed | None) -> None:
        self._places = [(weakref.ref(module), name) for module, name in places]
        self.record = record
        self.is_zero = False
        self._handle: RemovableHandle | None = None

    @property
    def places(self) -> list[Pair]:
        """Every (module, name) that is still there."""
        return [(module, n) for ref, n in self._places if (module := ref()) is not None]

    @property
    def mask(self) -> Tensor:
        """This rank's part of the mask that the module has now, whoever put it there.

        Raises:
            RuntimeError: it is gone.
        """
        module, name = self.places[0]
        mask = module._buffers.get(name + MASK)
        if mask is None:
            raise lost_mask(module, name)
        return _local(mask)

    @property
    def has_dense_gradient(self) -> bool:
        """Whether the gradient is not to be masked for now."""
        return has_dense_gradient(*self.places[0])

    def stored(self) -> list[tuple[Tensor, Tensor]]:
        """What this rank stores of the parameter, and the part of the mask of each.

        Raises:
            RuntimeError: the mask is gone, or not laid out like the parameter.
        """
        mask = self.mask
        if self.record is not None:
            pairs = [(values, mask) for values in self.record.stored]
        else:
            masters = deepspeed.masters_of(self._present)
            pairs = [(master, mask.reshape(-1)[run]) for master, run in masters]
            pairs.append((_local(self._present), mask))
        for values, part in pairs:
            if values.shape != part.shape and values.numel():
                module, name = self.places[0]
                raise RuntimeError(
                    f"the mask of {type(module).__name__}.{name} was replaced by one of shape "
                    f"{tuple(part.shape)} on this rank; expected {tuple(values.shape)}, laid out "
                    "like the parameter. Pass a whole mask to custom_from_mask."
                )
        return [(values, part) for values, part in pairs if values.numel()]

    def zero(self) -> None:
        """Write +0 wherever the mask is 0, in all that this rank stores. Local.

        Cost: a read of the mask and a write of the values.
        """
        with ordinary_tensors():
            self._follow()
            for values, mask in self.stored():
                zero_pruned(values.data, mask)
        self.is_zero = True

    def before_forward(self) -> None:
        """Zero what no gather zeroes, before a forward reads it."""
        if self.record is None or not self.record.tells_gathers:
            self.zero()

    def attach(self) -> None:
        """Hold zeros from now on. A second call does nothing."""
        for module, name in self.places:
            module.__dict__.setdefault(_ATTRIBUTE, NotCopied())[name] = self
        if self.record is not None:
            self.record.free_gathered()  # it was gathered without this mask
            self.record.hold(self)
        self._follow()

    def detach(self) -> None:
        """Undo :meth:`attach`."""
        for module, name in self.places:
            del module.__dict__[_ATTRIBUTE][name]
            if not module.__dict__[_ATTRIBUTE]:
                del module.__dict__[_ATTRIBUTE]
        if self.record is not None:
            self.record.free_gathered()
            self.record.release(self)
        if self._handle is not None:
            self._handle.remove()
        getattr(self._present, _ATTRIBUTE, {}).pop(id(self), None)
        _in_memory.discard(self)

    @property
    def _present(self) -> Tensor:
        """What an optimizer gets of the parameter."""
        if self.record is not None:
            return self.record.optimizer_tensor[0]
        module, name = self.places[0]
        parameter = module._parameters[name]
        assert parameter is not None
        return parameter

    def _follow(self) -> None:
        """Turn to the parameter that ``load_state_dict(assign=True)`` put in place, if it did."""
        present, record, reference = self._present, self.record, weakref.ref(self)
        known = getattr(present, _ATTRIBUTE, {}).get(id(self))
        if known is not None and known() is self:
            return
        if record is None and not isinstance(present, nn.Parameter):
            return  # transformers registers local tensors while the experts of a layer run
        if not _handles:
            _handles.append(of_torch.register_optimizer_step_pre_hook(_before_step))
            _handles.append(of_torch.register_optimizer_step_post_hook(_after_step))
        present.__dict__.setdefault(_ATTRIBUTE, NotCopied())[id(self)] = reference
        has_master = deepspeed.has_master(present)
        if has_master or not (record is None or record.tells_gathers):
            _in_memory.add(self)  # what an optimizer steps in its place is another tensor
        if self._handle is not None:
            self._handle.remove()
        if record is None and has_master and present.requires_grad:
            # DeepSpeed reduces it as it comes; masked first, the sum is masked.
            hook: Callable[..., Any] = functools.partial(_masked, reference)
            self._handle = present.register_hook(hook)  # type: ignore[no-untyped-call]
        if is_dtensor(present):
            is_frozen = not present.requires_grad  # it may be trained later
            if is_frozen:
                present.requires_grad_(True)
            hooks = present._post_accumulate_grad_hooks
            if hooks is not None:  # a swap of tensors has left them without effect
                present._post_accumulate_grad_hooks = hooks
            hook = functools.partial(_on_gradient, reference)
            register: Callable[[Any], RemovableHandle] = present.register_post_accumulate_grad_hook
            self._handle = register(hook)
            if is_frozen:
                present.requires_grad_(False)


@torch.no_grad()
def _on_gradient(reference: weakref.ref[Held], parameter: Tensor) -> None:
    """Mask a gradient that has just been accumulated; FSDP2 calls this once it is reduced."""
    held, gradient = reference(), parameter.grad
    if held is None or held.has_dense_gradient or gradient is None:
        return
    mask = held.mask
    if _local(gradient).shape != mask.shape:  # tensor parallelism left it in other placements
        assert is_dtensor(gradient) and is_dtensor(parameter)
        local = resolved(gradient, parameter.placements)
        parameter.grad = gradient = laid_out_like(parameter, local, {})
    zero_pruned(_local(gradient), mask)


def _masked(reference: weakref.ref[Held], gradient: Tensor) -> Tensor | None:
    """The gradient of a whole parameter without what is pruned; None: as it is."""
    held = reference()
    if held is None or held.has_dense_gradient:
        return None
    return gradient.masked_fill(held.mask.logical_not(), 0)


def _local(tensor: Tensor) -> Tensor:
    """The memory of this rank, no operation of autograd."""
    return tensor._local_tensor if is_dtensor(tensor) else tensor.data


# [Note: steps] An optimizer is asked what it steps. Most parameters say who holds zeros in them.
# Those of which a wrapper steps another copy, which may move, are found by its memory.
_in_memory: weakref.WeakSet[Held] = weakref.WeakSet()
_handles: list[RemovableHandle] = []


@torch.no_grad()
def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Mask the gradients of copies, which autograd does not know."""
    for stepped, master, mask, held in _copies_of(optimizer):
        if stepped.grad is not None and not held.has_dense_gradient:
            first = master.storage_offset() - stepped.storage_offset()
            run = stepped.grad.view(-1)[first : first + master.numel()]
            zero_pruned(run, mask.reshape(-1))


@torch.no_grad()
def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        for stepped in group["params"]:
            for reference in getattr(stepped, _ATTRIBUTE, {}).values():
                held = reference()
                if held is not None:
                    held.zero()
    for _, master, mask, _ in _copies_of(optimizer):
        zero_pruned(master.data, mask)


def _copies_of(optimizer: Optimizer) -> Iterator[tuple[Tensor, Tensor, Tensor, Held]]:
    """What an optimizer steps in whose memory copies are: (stepped, copy, its mask, held)."""
    by_memory: dict[int, list[tuple[Tensor, Tensor, Held]]] = {}
    for held in list(_in_memory):
        for master, mask in held.stored():
            by_memory.setdefault(_storage_of(master), []).append((master, mask, held))
    for group in optimizer.param_groups if by_memory else ():
        for stepped in group["params"]:
            for copy in by_memory.get(_storage_of(stepped), ()):
                yield stepped, *copy


def _storage_of(tensor: Tensor) -> int:
    """Identifies the memory of a tensor, or of what a DTensor holds."""
    return local_tensor(tensor).untyped_storage()._cdata


_kept: list[Held] | None = None  # those whose zeros a context puts off


def zero_new(held: Held) -> None:
    """Let a new mask act on what is stored, now or after :func:`keep_pruned_values`."""
    held.is_zero = False
    if _kept is not None and held not in _in_memory:  # copies would have to be brought up to date
        _kept.append(held)
        return
    held.zero()
    if isinstance(held.record, StoredRun):
        held.record.gather_again()


@contextmanager
def keep_pruned_values() -> Iterator[None]:
    """Keep the values under new masks of sharded parameters until the context ends.

    On a sharded parameter a mask sets what it prunes to zero at once. ``reconstruct`` needs the
    weights before the pruning, so there the two belong into one context::

        with prune.keep_pruned_values():
            prune.global_unstructured(parameters, prune.L1Unstructured, amount=0.6)
            prune.reconstruct(parameters, grams)

    A forward, an optimizer step or a state dict inside the context sets them to zero, too. Plain
    modules keep their values in ``weight_orig`` anyway.

    Cost: no memory, no communication.
    """
    global _kept
    outer, _kept = _kept, []
    try:
        yield
    finally:
        kept, _kept = _kept, outer
        for held in kept:
            if not held.is_zero and held.places and find_held(*held.places[0]) is held:
                zero_new(held)
