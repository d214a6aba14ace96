"""The hooks of a pruned module: before a forward, and around state dicts.

The forward pre-hook marks a pruned parameter and keeps its masked value fresh. Those
of state dicts are plain functions, which copies and pickles of a module keep.
"""

from __future__ import annotations

import contextlib
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
from distprune.wrappers.managed import StoredRun
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
        elif not masked_value.is_live(module, name):
            if self._module_ref is None or self._module_ref() is not module:
                self._module_ref = weakref.ref(module)
            _exempt_masks_from_ddp(self)
            masked_value.release_graph(module, name)
            original = module._parameters.get(orig_key(name))
            is_away = original is not None and original.is_meta
            is_away = is_away and not getattr(module, mask_key(name)).is_meta
            if is_away or name in module._parameters:
                raise RuntimeError(
                    f"{type(module).__name__}.{name} is pruned, and its parameter was replaced "
                    "(fusing, quantisation) or moved away (offloading); expected a model whose "
                    "zeros distprune.remove has made permanent before."
                )
            masked_value.assign(module, name, self.apply_mask(module))

    def apply_mask(self, module: nn.Module) -> Tensor:
        """The product of mask and original parameter, in the parameter's dtype.

        Returns:
            A tensor of the parameter's shape, part of the autograd graph.
        """
        name = getattr(self, "_tensor_name", None)
        assert name is not None, f"Module {module} has to be pruned"
        # Where they are registered, first: torch's own look-up takes three times as long.
        mask, original = module._buffers.get(mask_key(name)), module._parameters.get(orig_key(name))
        if mask is None:
            mask = getattr(module, mask_key(name), None)
        if mask is None:
            raise lost_mask(module, name)
        if original is None:
            original = getattr(module, orig_key(name))
        return masked_value.product(module, name, original, mask)

    @property
    def __name__(self) -> str:
        """What torch.jit.script reads of each hook."""
        raise AttributeError(
            "torch.jit.script does not know masks; expected a model whose zeros "
            "distprune.remove has made permanent before."
        )

    @property
    def multiplies(self) -> bool:
        """Whether the mask acts by multiplication: the method does not override apply_mask."""
        return type(self).apply_mask is PruningHook.apply_mask

    def __getstate__(self) -> dict[str, Any]:
        own = ("_module_ref", "_ddp_ref")
        return {key: value for key, value in self.__dict__.items() if key not in own}

    def __deepcopy__(self, memo: dict[int, Any]) -> PruningHook:
        # [Note: deepcopy] ``module.<name>`` is a product inside the autograd graph,
        # which torch refuses to copy. A module's hooks are copied before its plain
        # attributes, so the copied product can be entered into the memo here.
        module = None if self._module_ref is None else self._module_ref()
        clone = memo[id(self)] = object.__new__(type(self))
        if module is not None and id(module) in memo:
            product = module.__dict__.get(self._tensor_name)
            if isinstance(product, Tensor) and not product.is_leaf:
                original = module._parameters[orig_key(self._tensor_name)]
                both: Any = original, module._buffers[mask_key(self._tensor_name)]
                memo[id(product)] = masked_product(*copy.deepcopy(both, memo))
            clone._module_ref = weakref.ref(memo[id(module)])
        clone.__dict__.update(copy.deepcopy(self.__getstate__(), memo))
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
    hooks, name = module._forward_pre_hooks, hook._tensor_name
    hook._module_ref = weakref.ref(module)
    # Before the hooks of wrappers, which may gather what is to be zero; and before those of the old
    # weight_norm and spectral_norm, which compute the weight from what may be pruned.
    is_first = holds_zeros(module, name)
    for key, other in hooks.items():
        if isinstance(other, PruningHook) and other._tensor_name == name:
            hooks[key] = hook
            return
        is_first |= type(other).__module__.startswith("torch.nn.utils.")
    module.register_forward_pre_hook(hook, prepend=is_first)


def unregister(module: nn.Module, name: str) -> None:
    """Delete the pruning hook of a parameter."""
    for key, hook in list(module._forward_pre_hooks.items()):
        if isinstance(hook, PruningHook) and hook._tensor_name == name:
            del module._forward_pre_hooks[key]


def refresh_products(places: Iterable[Pair]) -> None:
    """Compute the masked values anew that plain modules keep of their pruned parameters."""
    for module, name in places:
        hook, kept = find_hook(module, name), module.__dict__.get(name)
        if hook is not None and isinstance(kept, Tensor) and not holds_zeros(module, name):
            setattr(module, name, hook.apply_mask(module))


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
    done = None if hook is None or hook._ddp_ref is None else hook._ddp_ref()
    if wrapper is None or done is wrapper:
        return
    masks = []
    for path, module in wrapper.module.named_modules():
        for other in hooks_on(module):
            masks.append(mask_key(full_name(path, other._tensor_name)))
            other._ddp_ref = weakref.ref(wrapper)
    ignore_buffers(wrapper, masks)


# Dynamo is to call it while tracing, and to leave nothing of it in the graph. (A second model that
# runs code compiled for a first one is not exempted.) The decorator for this,
# torch.compiler.assume_constant_result, imports Dynamo.
_exempt_masks_from_ddp._dynamo_marked_constant = True  # type: ignore[attr-defined]


# Under which a module registers each of these functions: torch counts its hooks from 0 on.
_KEY = -1


def watch(module: nn.Module, *, is_held: bool) -> None:
    """Call the functions of this file from now on."""
    module._load_state_dict_post_hooks[_KEY] = _after_loading
    if is_held and _KEY not in module._state_dict_pre_hooks:
        module._state_dict_pre_hooks[_KEY] = _before_saving
        module._state_dict_hooks[_KEY] = _after_saving
        # Of all, torch passes the module only to this one if it is registered so.
        handle = module.register_load_state_dict_pre_hook(_before_loading)  # type: ignore[no-untyped-call]
        before = module._load_state_dict_pre_hooks
        before[_KEY] = before.pop(handle.id)


def unwatch(module: nn.Module) -> None:
    """Undo :func:`watch`, once the module has no mask any more."""
    if not _masked(module):
        for hooks in (
            module._load_state_dict_post_hooks,
            module._state_dict_pre_hooks,
            module._state_dict_hooks,
            module._load_state_dict_pre_hooks,
        ):
            hooks.pop(_KEY, None)


def _masked(module: nn.Module) -> list[str]:
    """Names of the parameters that still have a mask."""
    names = [hook._tensor_name for hook in hooks_on(module)]
    return [name for name in names if module._buffers.get(mask_key(name)) is not None]


def _held_by(module: nn.Module) -> Iterator[tuple[str, Held]]:
    for name in _masked(module):
        if holds_zeros(module, name):
            yield mask_key(name), holder_of(module, name)


def _runs_of(module: nn.Module) -> Iterator[tuple[str, Tensor, StoredRun]]:
    """Key and mask of the parameters of which ranks store runs, and their records."""
    for key, held in _held_by(module):
        if isinstance(held.record, StoredRun):
            yield key, held.mask, held.record


def _before_saving(module: nn.Module, *_: Any) -> None:
    for _key, held in _held_by(module):
        held.zero()


def _after_saving(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    for key, mask, record in _runs_of(module):
        saved = record.mask_in_state_dict(mask)
        if saved is not None:
            state_dict[prefix + key] = saved


def _before_loading(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, _: Any, strict: bool, *lists: Any
) -> None:
    missing_keys, _unexpected_keys, error_msgs = lists
    for name, mask, record in _runs_of(module):
        key = prefix + name
        if key in state_dict:
            saved = state_dict.pop(key)
            try:
                mask.copy_(record.run_in_state_dict(saved) != 0)
            except ValueError as error:
                error_msgs.append(
                    f"size mismatch for {key}: the state dict has {tuple(saved.size())}, expected "
                    f"{error}."
                )
        elif strict:
            missing_keys.append(key)


def _after_loading(module: nn.Module, incompatible_keys: Any) -> None:
    """Zero what was loaded; compute the masked values of a plain module anew."""
    for name in _masked(module):
        if holds_zeros(module, name):
            holder_of(module, name).zero()
        else:
            # What does not fit, where only one of both was assigned, is told by the next forward.
            with torch.enable_grad(), contextlib.suppress(RuntimeError):
                refresh_products([(module, name)])
