"""How ``module.weight`` is computed: the masked product, with a dense gradient if that is wanted.

A value set before forward is not enough in two cases:

- Under FSDP the registered parameter is swapped between shard and gathered copy
  all the time; ``weight`` has to follow.
- ``nn.MultiheadAttention`` reads ``out_proj.weight`` without calling ``out_proj``,
  so no hook on ``out_proj`` ever runs.

A class may also compute ``weight`` in a property of its own; then that gets the masked value.

There the module gets a subclass of its class with a property, made once per class and set of
names, as ``torch.nn.utils.parametrize`` does. Every other module keeps its class.

A dense gradient leaves the value as it is, bit for bit; only the backward differs. On plain modules
and under tensor parallelism it passes the gradient of ``mask * weight_orig`` on as it is. Under
FSDP the mask is not part of the graph, and the adapters leave the gradient as it is (fsdp1_mask,
fsdp2).
"""

from __future__ import annotations

import functools
import inspect
from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.utils.hooks import RemovableHandle

from distprune.base.pruned_form import (
    is_dtensor,
    lost_mask,
    mask_key,
    masked_product,
    name_without_orig,
    orig_key,
)
from distprune.wrappers.managed import Managed, ManagedRun

_NAMES = "_distprune_live_names"
_BASE = "_distprune_base"


def live_names(module: nn.Module) -> tuple[str, ...]:
    """Names of the parameters that are computed at each access."""
    names: tuple[str, ...] = getattr(type(module), _NAMES, ())
    return names


def is_live(module: nn.Module, name: str) -> bool:
    """Whether ``module.<name>`` is computed at each access."""
    return name in live_names(module)


def must_be_live(module: nn.Module, name: str) -> bool:
    """Whether ``module.<name>``, pruned outside FSDP2, has to be computed at each access."""
    is_read_by_parent = isinstance(module, NonDynamicallyQuantizableLinear)
    return is_read_by_parent or is_dtensor(module._parameters[orig_key(name)])


def shard_mask_key(name: str) -> str:
    """Attribute of a module under which a wrapper's ShardMask is kept."""
    return f"_distprune_{name}_shard_mask"


def make_live(module: nn.Module, name: str) -> None:
    """Compute ``module.<name>`` from now on."""
    names = {*live_names(module), name}
    module.__dict__.pop(name, None)  # a value that an earlier hook had set
    module.__class__ = _live_class(base_class(module), tuple(sorted(names)))


def end_live(module: nn.Module, name: str) -> None:
    """Undo :func:`make_live`; the class is the original one after the last name."""
    names = {*live_names(module)} - {name}
    base = base_class(module)
    module.__class__ = _live_class(base, tuple(sorted(names))) if names else base


def assign(module: nn.Module, name: str, value: Tensor) -> None:
    """``module.<name> = value``, of a name that nothing is registered under.

    torch's own ``__setattr__`` looks through all registries first, which takes as long as the
    product of a small weight.
    """
    cls = type(module)
    if (
        cls.__setattr__ is nn.Module.__setattr__
        and name not in module._parameters
        and not hasattr(cls, name)
    ):
        module.__dict__[name] = value
    else:
        setattr(module, name, value)


def release_graph(module: nn.Module, name: str) -> None:
    """Take the graph away from the value that a module keeps, before the next one is computed.

    The node of ``weight_orig`` that accumulates its gradient lives as long as a graph that has it,
    and belongs to the stream on which it was made. A dense model makes a new one in each forward.
    If the last product kept its graph until there is the next, one node would serve all forwards,
    and a backward could not be captured in a CUDA graph, which runs on a stream of its own. A CPU
    has no streams, and saves the time.

    The value stays: the product may fail, and other threads may read it.
    """
    kept = module.__dict__.get(name)
    if not isinstance(kept, Tensor) or kept.is_cpu:
        return
    if kept.requires_grad and torch.is_grad_enabled():
        # Not detach(), which fails on what is left of a forward inside torch.func.vmap.
        assign(module, name, kept.data)


class ShardMask(ABC):
    """The mask of one managed parameter at work.

    Attributes:
        may_be_elsewhere: whether the mask acts from another device than that of the parameter, too.
    """

    may_be_elsewhere: ClassVar[bool] = False

    @abstractmethod
    def attach(self) -> None:
        """Let the next all-gather, and the gradient, see the mask."""

    @abstractmethod
    def detach(self) -> None:
        """Undo :meth:`attach`."""

    @abstractmethod
    def is_attached(self) -> bool:
        """Whether the mask still acts."""

    def settle(self) -> None:  # noqa: B027
        """Let the mask act for good, once no rank can fail any more."""

    def problem(self) -> str | None:
        """Why the mask, attached, does not act all the same; None if it does."""
        return None

    @abstractmethod
    def value(self, module: nn.Module, name: str) -> Tensor:
        """``module.<name>`` as the mask leaves it, in whatever state the wrapper has it."""

    @abstractmethod
    def managed(self) -> Managed | None:
        """The wrapper's record of the parameter; None if the wrapper is gone."""

    @property
    @abstractmethod
    def place(self) -> tuple[nn.Module, str]:
        """The module and the name, without "_orig", of the parameter; the first if it is tied."""

    @property
    def buffer(self) -> Tensor:
        """The mask as the module has it now: whatever is loaded into it or put in its place.

        Raises:
            RuntimeError: it is gone.
        """
        module, name = self.place
        mask = module._buffers.get(mask_key(name))
        if mask is None:
            raise lost_mask(module, name)
        return mask

    @property
    def has_dense_gradient(self) -> bool:
        """Whether the gradient is not to be masked for now."""
        return has_dense_gradient(*self.place)


class RunMask(ShardMask):
    """A mask of which each rank has a run; hooks of the modules put it into their state dicts."""

    def __init__(self) -> None:
        self._hooks: list[RemovableHandle] = []

    @abstractmethod
    def managed(self) -> ManagedRun: ...

    @abstractmethod
    def saved(self) -> Any:
        """What a state dict gets of the mask now; None: nothing, on this rank."""

    @abstractmethod
    def load(self, value: Any) -> str:
        """Take what :meth:`saved` returned, if it fits; else say what was expected."""

    @property
    def place(self) -> tuple[nn.Module, str]:
        module, registered = self.managed().owners[0]
        return module, name_without_orig(registered)

    def attach(self) -> None:
        for module, name in self.managed().owners:
            key = mask_key(name_without_orig(name))
            self._hooks += [
                module.register_state_dict_post_hook(  # type: ignore[no-untyped-call]
                    functools.partial(self._save, key)
                ),
                module.register_load_state_dict_pre_hook(  # type: ignore[no-untyped-call]
                    functools.partial(self._load, key)
                ),
            ]

    def detach(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _save(
        self, key: str, module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any
    ) -> None:
        found = self.saved()
        if found is not None:
            state_dict[prefix + key] = found

    def _load(
        self,
        key: str,
        module: nn.Module,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        key = prefix + key
        if key not in state_dict:
            if strict:
                missing_keys.append(key)
            return
        value = state_dict.pop(key)
        if expected := self.load(value):
            error_msgs.append(
                f"size mismatch for {key}: the state dict has {tuple(value.size())}, expected "
                f"{expected}."
            )


def masked_value(module: nn.Module, name: str) -> Tensor:
    """The parameter as the mask leaves it, in whatever state a wrapper has it."""
    shard_mask: ShardMask | None = module.__dict__.get(shard_mask_key(name))
    if shard_mask is not None:
        return shard_mask.value(module, name)
    original = module._parameters[orig_key(name)]
    mask = module._buffers[mask_key(name)]
    assert original is not None and mask is not None
    return product(module, name, original, mask)


def base_class(module: nn.Module) -> type:
    """The class of a module before :func:`make_live`."""
    base: type = getattr(type(module), _BASE, type(module))
    return base


@functools.cache
def _live_class(base: type, names: tuple[str, ...]) -> type:
    attributes: dict[str, Any] = {
        _NAMES: names,
        _BASE: base,
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "__reduce_ex__": _reduce,
    }
    for name in names:
        computed = own_property(base, name)
        attributes[name] = (
            _live_value(name) if computed is None else _computed_value(name, computed)
        )
    if hasattr(base, "_orig_cls_mro_index"):  # where FSDPModule.__new__ finds the user's class
        attributes["_orig_cls_mro_index"] = base._orig_cls_mro_index + 1
    return type(base.__name__, (base,), attributes)


@functools.cache
def _live_value(name: str) -> property:
    """One for all classes: a list of experts may have hundreds of names."""

    def get(module: nn.Module) -> Tensor:
        return masked_value(module, name)

    return property(get, _refuse)


def _computed_value(name: str, computed: property) -> property:
    def get(module: nn.Module) -> Tensor:
        result: Tensor = computed.__get__(_WithValue(module, name, masked_value(module, name)))
        return result

    return property(get, _refuse)


def own_property(cls: type, name: str) -> property | None:
    """The property by which a class computes ``module.<name>`` of what it registers, if it does.

    torchtitan's SimpleFSDP gathers parameters in such properties.
    """
    value = inspect.getattr_static(cls, name, None)
    return value if isinstance(value, property) else None


class _WithValue:
    """A module whose registered parameter is another tensor: what its own property reads."""

    def __init__(self, module: nn.Module, name: str, value: Tensor) -> None:
        self._module = module
        self._parameters = {**module._parameters, name: value}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _refuse(module: nn.Module, value: Any) -> None:
    raise AttributeError(
        f"a pruned parameter of {type(module).__name__} cannot be assigned to; change "
        f"{orig_key('<name>')} in place, or remove() the pruning first."
    )


def _reduce(module: nn.Module, protocol: int) -> Any:
    """Pickle and deepcopy through the original class: the generated one cannot be imported."""
    own_state = getattr(module, "__getstate__", None)
    state = module.__dict__ if own_state is None else own_state()
    if state is module.__dict__:
        state = dict(state)
    return _restore, (base_class(module), live_names(module)), state


def _restore(base: type, names: tuple[str, ...]) -> nn.Module:
    module: nn.Module = object.__new__(_live_class(base, names))
    return module


class _Depth:
    """How many contexts make the gradient of a parameter dense now; in the module's ``__dict__``.

    There, because ``torch.compile`` compiles a module again whose attributes change. A copy of the
    module is inside none of the contexts.
    """

    def __init__(self) -> None:
        self.count = 0

    def __reduce__(self) -> tuple[type[_Depth], tuple[()]]:
        return _Depth, ()


def has_dense_gradient(module: nn.Module, name: str) -> bool:
    """Whether the gradient of the pruned parameter ``module.<name>`` is to be dense now."""
    depth: _Depth | None
    if torch.compiler.is_compiling():
        # Compiled code has a guard for this, and is compiled again when the attribute changes.
        depth = getattr(module, _depth_key(name), None)
    else:
        depth = module.__dict__.get(_depth_key(name))  # ten times as fast where there is none
    return depth is not None and depth.count > 0


def enter_dense(module: nn.Module, name: str) -> None:
    """Make it dense until :func:`leave_dense`; calls may nest."""
    depth: _Depth = module.__dict__.setdefault(_depth_key(name), _Depth())
    depth.count += 1


def leave_dense(module: nn.Module, name: str) -> None:
    """Undo one call of :func:`enter_dense`."""
    depth: _Depth = module.__dict__[_depth_key(name)]
    depth.count -= 1
    if not depth.count:
        del module.__dict__[_depth_key(name)]  # graphs may still refer to it


def product(module: nn.Module, name: str, original: Tensor, mask: Tensor) -> Tensor:
    """``mask * original``, as :func:`masked_product`, with a dense gradient if that is wanted."""
    if not has_dense_gradient(module, name):
        return masked_product(original, mask)
    depth = module.__dict__[_depth_key(name)]
    result: Tensor = _StraightThrough.apply(original, mask, depth)  # type: ignore[no-untyped-call]
    return result


class _StraightThrough(torch.autograd.Function):
    """The masked product, whose backward leaves the mask out: a straight-through estimator."""

    @staticmethod
    def forward(ctx: Any, original: Tensor, mask: Tensor, depth: _Depth) -> Tensor:
        ctx.depth = depth
        ctx.save_for_backward(mask)
        return masked_product(original, mask)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        if ctx.depth.count:
            return gradient, None, None
        # The context was left between forward and backward.
        (mask,) = ctx.saved_tensors
        return masked_product(gradient, mask), None, None


def _depth_key(name: str) -> str:
    return f"_distprune_{name}_dense_gradient"
