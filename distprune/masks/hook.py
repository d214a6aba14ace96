"""The forward pre-hook that marks a pruned parameter and keeps its masked value fresh."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from distprune.base.naming import Pair, full_name, named_modules
from distprune.base.pruned_form import lost_mask, mask_key, masked_product, orig_key
from distprune.wrappers import masked_value
from distprune.wrappers.held import Held, find_held
from distprune.wrappers.wrapper import active_ddp, ignore_buffers, managed_parameters


class MaskRecord(NamedTuple):
    """The mask of one whole parameter as two numbers; the same on every rank, on any sharding.

    Attributes:
        fingerprint: int64, as fingerprint.fingerprint_part adds it up over all shards.
        num_pruned: elements under the mask.
    """

    fingerprint: int
    num_pruned: int


class PruningHook:
    """Base of every pruning method: what torch keeps in ``module._forward_pre_hooks``.

    Attributes:
        _tensor_name: name of the pruned parameter, without "_orig".
        record: the mask that the last pruning left; None if unknown.
        tied_places: every (module, name) of a tied parameter, which is pruned and removed as one.
    """

    _tensor_name: str
    record: MaskRecord | None = None
    tied_places: tuple[tuple[nn.Module, str], ...] = ()
    # The module that has the hook; not pickled, but set again at the next forward.
    _module_ref: weakref.ref[nn.Module] | None = None
    # The DDP wrapper that already ignores the mask.
    _ddp_ref: weakref.ref[nn.Module] | None = None

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        """Before forward: recompute ``module.<name>``, as torch does, or hold zeros on shards."""
        name = self._tensor_name
        if torch.compiler.is_compiling():
            if orig_key(name) in module._parameters and not masked_value.is_live(module, name):
                _exempt_masks_from_ddp()
                setattr(module, name, self.apply_mask(module))
        elif holds_zeros(module, name):
            holder_of(module, name).before_forward()
        elif module._buffers.get(mask_key(name)) is None:
            raise lost_mask(module, name)
        elif not masked_value.is_live(module, name):
            if self._module_ref is None or self._module_ref() is not module:
                self.register_module(module)
            _exempt_masks_from_ddp(self)
            masked_value.release_graph(module, name)
            try:
                masked_value.assign(module, name, self.apply_mask(module))
            except (RuntimeError, TypeError) as error:
                original = module._parameters.get(orig_key(name))
                if name not in module._parameters and (original is None or not original.is_meta):
                    raise
                raise RuntimeError(
                    f"{type(module).__name__}.{name} is pruned, and something has put another "
                    f"parameter in its place (fusing, quantisation), or keeps {orig_key(name)} "
                    "elsewhere (offloading); expected a model whose zeros distprune.remove has "
                    "made permanent before."
                ) from error

    def apply_mask(self, module: nn.Module) -> Tensor:
        """The product of mask and original parameter, in the parameter's dtype.

        Returns:
            A tensor of the parameter's shape, part of the autograd graph.
        """
        name = getattr(self, "_tensor_name", None)
        assert name is not None, f"Module {module} has to be pruned"
        # Where they are registered, first: torch's own look-up takes three times as long.
        mask = module._buffers.get(mask_key(name))
        if mask is None:
            mask = getattr(module, mask_key(name))
        original = module._parameters.get(orig_key(name))
        if original is None:
            original = getattr(module, orig_key(name))
        return masked_value.product(module, name, original, mask)

    @property
    def multiplies(self) -> bool:
        """Whether the mask acts by multiplication: the method does not override apply_mask."""
        return getattr(self.apply_mask, "__func__", None) is PruningHook.apply_mask

    @property
    def __name__(self) -> str:
        """What torch.jit.script reads of each hook."""
        raise AttributeError(
            "torch.jit.script does not know masks; expected a model of which the pruning is "
            "removed first: distprune.remove makes the zeros permanent."
        )

    def register_module(self, module: nn.Module) -> None:
        """Remember the module, for copies of it."""
        self._module_ref = weakref.ref(module)

    def __getstate__(self) -> dict[str, Any]:
        own = ("_module_ref", "_ddp_ref")
        return {key: value for key, value in self.__dict__.items() if key not in own}

    def __deepcopy__(self, memo: dict[int, Any]) -> PruningHook:
        # [Note: deepcopy] ``module.<name>`` is a product inside the autograd graph,
        # which torch refuses to copy. A module's hooks are copied before its plain
        # attributes, so the copied product can be entered into the memo here.
        module = None if self._module_ref is None else self._module_ref()
        copied = None if module is None else memo.get(id(module))
        if module is not None and copied is not None:
            name = self._tensor_name
            product = module.__dict__.get(name)
            if isinstance(product, Tensor) and not product.is_leaf and id(product) not in memo:
                mask = copy.deepcopy(module._buffers[mask_key(name)], memo)
                original = copy.deepcopy(module._parameters[orig_key(name)], memo)
                assert mask is not None and original is not None
                memo[id(product)] = masked_product(original, mask)
        clone = memo[id(self)] = object.__new__(type(self))
        clone.__dict__.update(copy.deepcopy(self.__getstate__(), memo))
        if copied is not None:
            clone._module_ref = weakref.ref(copied)
        return clone


def holds_zeros(module: nn.Module, name: str) -> bool:
    """Whether the pruned parameter ``module.<name>`` has no product: its shards have zeros."""
    parameters = module._parameters
    return orig_key(name) not in parameters and (
        name in parameters or find_held(module, name) is not None
    )


def forgets_pruned(module: nn.Module, name: str) -> bool:
    """Whether the values under the mask of ``module.<name>`` are gone: zeros were written there."""
    held = find_held(module, name)
    return held is not None and held.is_zero


def holder_of(module: nn.Module, name: str) -> Held:
    """What holds the zeros of a sharded parameter; a copied module gets its own here."""
    held = find_held(module, name)
    if held is None:
        held = Held([(module, name)], managed_parameters(module).get((id(module), name)))
        held.attach()
    return held


def hooks_on(module: nn.Module) -> list[PruningHook]:
    """The pruning hooks of a module: one for each of its pruned parameters."""
    hooks = module._forward_pre_hooks.values()
    return [hook for hook in hooks if isinstance(hook, PruningHook)]


def find_hook(module: nn.Module, name: str) -> PruningHook | None:
    """The pruning hook of a parameter; None if it is not pruned."""
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, PruningHook) and hook._tensor_name == name:
            return hook
    return None


def register(module: nn.Module, hook: PruningHook) -> None:
    """Register the hook of a parameter, in the place of the present one if there is one."""
    name = hook._tensor_name
    hook.register_module(module)
    for key, present in module._forward_pre_hooks.items():
        if isinstance(present, PruningHook) and present._tensor_name == name:
            module._forward_pre_hooks[key] = hook
            return
    # Before the hooks of wrappers, which may gather what is to be zero; and before those of the old
    # weight_norm and spectral_norm, which compute the weight from what may be pruned.
    others = module._forward_pre_hooks.values()
    is_normed = any(type(other).__module__.startswith("torch.nn.utils.") for other in others)
    module.register_forward_pre_hook(hook, prepend=is_normed or holds_zeros(module, name))


def unregister(module: nn.Module, name: str) -> None:
    """Delete the pruning hook of a parameter."""
    for key, hook in list(module._forward_pre_hooks.items()):
        if isinstance(hook, PruningHook) and hook._tensor_name == name:
            del module._forward_pre_hooks[key]


def refresh_product(module: nn.Module, hook: PruningHook) -> None:
    """Compute ``module.<name>`` anew, as the hook does, if the module keeps it."""
    name = hook._tensor_name
    is_kept = isinstance(module.__dict__.get(name), Tensor)
    if is_kept and not masked_value.is_live(module, name) and not holds_zeros(module, name):
        setattr(module, name, hook.apply_mask(module))


def refresh_products(places: Iterable[Pair]) -> None:
    """:func:`refresh_product` of those parameters that are pruned."""
    for module, name in places:
        hook = find_hook(module, name)
        if hook is not None:
            refresh_product(module, hook)


def named_hooks(root: nn.Module) -> Iterator[tuple[str, str, PruningHook]]:
    """(module's name, parameter's name, hook) of every pruned parameter below a module."""
    for prefix, module in root.named_modules():
        for hook in hooks_on(module):
            yield prefix, hook._tensor_name, hook


def pruned_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Module, PruningHook]]:
    """(full name, module, hook) of every pruned parameter, whatever wraps the model."""
    for path, module in named_modules(model):
        for hook in hooks_on(module):
            yield full_name(path, hook._tensor_name), module, hook


def records_of(model: nn.Module) -> dict[str, list[int]]:
    """[fingerprint, pruned elements] of every parameter that has a record, by full name.

    They are the same on any sharding, and on every rank that has the parameter.
    """
    return {
        name: list(hook.record)
        for name, _, hook in pruned_parameters(model)
        if hook.record is not None
    }


def put_records(model: nn.Module, records: Mapping[str, Sequence[int]]) -> None:
    """Store the records of loaded masks in the hooks of a model."""
    for name, _, hook in pruned_parameters(model):
        hook.record = MaskRecord(*records[name]) if name in records else None


def _exempt_masks_from_ddp(hook: PruningHook | None = None) -> None:
    """Make the DDP wrapper whose forward is running ignore the masks below it.

    Args:
        hook: of one of these masks; records for which wrapper this is done already.
    """
    wrapper = active_ddp()
    last_wrapper = None if hook is None or hook._ddp_ref is None else hook._ddp_ref()
    if wrapper is None or last_wrapper is wrapper:
        return
    hooks = list(named_hooks(wrapper.module))
    masks = (mask_key(full_name(prefix, name)) for prefix, name, _ in hooks)
    ignore_buffers(wrapper, masks)
    for _, _, other in hooks:
        other._ddp_ref = weakref.ref(wrapper)


# Dynamo is to call it while tracing, and to leave nothing of it in the graph. (A second model that
# runs code compiled for a first one is not exempted.) The decorator for this,
# torch.compiler.assume_constant_result, imports Dynamo.
_exempt_masks_from_ddp._dynamo_marked_constant = True  # type: ignore[attr-defined]
