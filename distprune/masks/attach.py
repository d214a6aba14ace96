"""Put masks on modules and take them off, all of them or none.

| parameter   | the mask acts                              | ``<name>_mask``             |
|-------------|--------------------------------------------|-----------------------------|
| plain       | ``module.<name> = mask * orig`` in a hook  | as the parameter, its dtype |
| TP          | ``mask * orig`` whenever it is read        | as the parameter, bool      |
| FSDP2       | on the shard, before the all-gather        | as the parameter, bool      |
| FSDP1       | the same, on the flat parameter's slice    | this rank's run, bool       |
| ZeRO-1, -2  | as plain, and on what the optimizer steps  | as the parameter, its dtype |
| ZeRO-3      | on all that a rank stores, optimizer too   | this rank's run, bool       |

Registered layouts are masked as ZeRO-3.

The Parameter object and its position in ``module._parameters`` stay the same, so that
optimizers made before pruning keep working.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from distprune.base.pruned_form import is_dtensor, mask_key, orig_key
from distprune.masks.hook import PruningHook, find_hook, hooks_on, register, unregister
from distprune.shards.shard import Shard
from distprune.wrappers import deepspeed, masked_value
from distprune.wrappers.dtensor import rebind
from distprune.wrappers.managed import Managed
from distprune.wrappers.masked_value import ShardMask
from distprune.wrappers.wrapper import masked_by


def mask_dtype(shard: Shard) -> torch.dtype:
    """The dtype of a new mask: as torch has it on plain parameters; bool where they are sharded."""
    is_sharded = shard.managed is not None or is_dtensor(shard.parameter)
    return torch.bool if is_sharded else shard.parameter.dtype


class Transaction:
    """Changes to modules that can be undone together.

    A failure half way through a list of parameters must leave every module as it
    was, on this rank and, once the ranks have shared it, on all.
    """

    def __init__(self) -> None:
        self._changes: list[_Change] = []
        self._settle: list[Callable[[], None]] = []

    def attach(
        self, module: nn.Module, name: str, hook: PruningHook, mask: Tensor, managed: Managed | None
    ) -> None:
        """Prune ``module.<name>``, or replace its mask if it is pruned already.

        Args:
            hook: the hook to register; replaces the parameter's present hook.
            mask: laid out like the parameter.
            managed: the wrapper's record of the parameter, if a wrapper manages it.
        """
        owners, is_renamed = _owners(module, name, managed)
        self._remember(owners, name, managed, is_renamed)
        if managed is None:
            _reparametrize(module, name, hook, mask)
            if deepspeed.has_master(module._parameters[orig_key(name)]):
                self.hold(module, name)
        else:
            shard_mask = _mask_shards(owners, name, mask, managed, is_renamed)
            self._settle.append(shard_mask.settle)
        hook.register_module(module)
        for owner in owners:
            _update_after_loading(owner)
            register(owner, hook)

    def hold(self, module: nn.Module, name: str) -> None:
        """Let the mask of a plain parameter act, too, on what ZeRO's optimizer steps."""
        self._settle.append(functools.partial(deepspeed.hold_master, module, name))

    def detach(
        self, module: nn.Module, name: str, final: Tensor | None, managed: Managed | None
    ) -> None:
        """:func:`detach`, but for the values, so that it can be undone."""
        if managed is not None:
            owners, is_renamed = _owners(module, name, managed)
            self._remember(owners, name, managed, is_renamed)
        else:
            for owner, owned_name in [(module, name), *_tied_places(module, name)]:
                self._remember([owner], owned_name, None, False)
        detach(module, name, final, managed)

    def commit(self) -> None:
        """Let the masks act for good, on every rank: nothing is undone any more."""
        if not self._settle:
            return
        with torch.inference_mode(False), torch.no_grad():
            for settle in self._settle:
                settle()

    def rollback(self) -> None:
        """Leave every module as it was."""
        while self._changes:
            self._changes.pop().undo()

    def _remember(
        self, owners: list[nn.Module], name: str, managed: Managed | None, was_renamed: bool
    ) -> None:
        shard_mask = owners[0].__dict__.get(masked_value.shard_mask_key(name))
        saved = [_saved(owner, name) for owner in owners]
        self._changes.append(_Change(owners, name, managed, was_renamed, shard_mask, saved))


def detach(module: nn.Module, name: str, final: Tensor | None, managed: Managed | None) -> None:
    """Make the pruning of ``module.<name>`` final. The caller deletes the hook, as in torch.

    Args:
        final: the local masked values, with pruned elements at +0; None keeps the unmasked
            values. Outside FSDP the parameter gets this memory, as in torch: a state dict that
            was taken before, and a graph whose backward is still to come, keep the old one.
        managed: the wrapper's record of the parameter, if a wrapper manages it.
    """
    if managed is not None:
        owners, _ = _owners(module, name, managed)
        if final is not None:
            managed.write(final)
        _unmask_shards(owners, name, managed)
        others = [(owner, name) for owner in owners[1:]]
    else:
        parameter = module._parameters[orig_key(name)]
        assert parameter is not None
        others = _tied_places(module, name)
        if final is not None:
            if deepspeed.has_master(parameter):  # ZeRO keeps the memory of parameters
                parameter.data.copy_(final)
                deepspeed.update_master(parameter)
            else:
                rebind(parameter, final)
        for owner, owned_name in [(module, name), *others]:
            _restore_parameter(owner, owned_name)
            _refresh_flat_weights(owner, owned_name)
    for owner, owned_name in others:
        unregister(owner, owned_name)


# What pruning changes of a module: its class, the contents of its registries, its buffers that are
# not persistent, and attributes.
_Saved = tuple[type, list[dict[Any, Any]], set[str], dict[str, Any]]


class _Change(NamedTuple):
    """One parameter as it was before a change."""

    owners: list[nn.Module]
    name: str
    managed: Managed | None
    was_renamed: bool
    shard_mask: ShardMask | None
    saved: list[_Saved]

    def undo(self) -> None:
        """Leave the modules of the parameter, and its wrapper, as they were."""
        first, name, managed = self.owners[0], self.name, self.managed
        present: ShardMask | None = first.__dict__.get(masked_value.shard_mask_key(name))
        if managed is not None and present is not self.shard_mask:
            if present is not None:
                present.detach()
            if self.was_renamed != _owners(first, name, managed)[1]:
                pair = (name, orig_key(name))
                managed.rename(*(pair if self.was_renamed else pair[::-1]))
            if self.shard_mask is not None:
                self.shard_mask.attach()
        for owner, saved in zip(self.owners, self.saved, strict=True):
            _restore(owner, name, saved)


def _registries(module: nn.Module) -> tuple[dict[Any, Any], ...]:
    return (
        module._parameters,
        module._buffers,
        module._forward_pre_hooks,
        module._load_state_dict_post_hooks,
    )


@functools.lru_cache(maxsize=1 << 10)
def _attributes(name: str) -> tuple[str, ...]:
    """The attributes that pruning sets or deletes."""
    return (name, orig_key(name), masked_value.shard_mask_key(name))


def _saved(module: nn.Module, name: str) -> _Saved:
    own = module.__dict__
    return (
        module.__class__,
        [dict(registry) for registry in _registries(module)],
        set(module._non_persistent_buffers_set),
        {key: own[key] for key in _attributes(name) if key in own},
    )


def _restore(module: nn.Module, name: str, saved: _Saved) -> None:
    module.__class__, all_contents, non_persistent, attributes = saved
    for registry, contents in zip(_registries(module), all_contents, strict=True):
        registry.clear()
        registry.update(contents)
    module._non_persistent_buffers_set.clear()
    module._non_persistent_buffers_set.update(non_persistent)
    for key in _attributes(name):
        module.__dict__.pop(key, None)
    module.__dict__.update(attributes)
    _refresh_flat_weights(module, name)


def _owners(module: nn.Module, name: str, managed: Managed | None) -> tuple[list[nn.Module], bool]:
    """The modules that share the parameter under this name, for all of which FSDP masks it.

    And whether the wrapper knows the parameter under its ``_orig`` name.
    """
    if managed is None:
        return [module], False
    original, places = orig_key(name), managed.owners
    others = [owner for owner, n in places if n in (name, original) and owner is not module]
    return [module, *others], any(n == original for _, n in places)


def _tied_places(module: nn.Module, name: str) -> list[tuple[nn.Module, str]]:
    """The other places of a tied parameter at which it is still pruned as one with this place."""
    present = find_hook(module, name)
    places = () if present is None else present.tied_places
    parameter = module._parameters[orig_key(name)]
    return [
        (other, other_name)
        for other, other_name in places
        if (other is not module or other_name != name)
        and other._parameters.get(orig_key(other_name)) is parameter
        and find_hook(other, other_name) is not None
    ]


def _reparametrize(module: nn.Module, name: str, hook: PruningHook, mask: Tensor) -> None:
    original, buffer = orig_key(name), mask_key(name)
    if original not in module._parameters:
        _check_free(module, original, buffer)
        _rename_parameter(module, name, original)
        module.register_buffer(buffer, mask)
    else:
        module._buffers[buffer] = mask
    if masked_value.must_be_live(module, name):
        masked_value.make_live(module, name)
    else:
        # Recurrent modules have a __setattr__ that keeps a list of their weights in step.
        masked_value.assign(module, name, hook.apply_mask(module))


def _restore_parameter(module: nn.Module, name: str) -> None:
    if masked_value.is_live(module, name):
        masked_value.end_live(module, name)
    module.__dict__.pop(name, None)
    delattr(module, mask_key(name))
    _stop_updating(module)
    _rename_parameter(module, orig_key(name), name)


def _mask_shards(
    owners: list[nn.Module], name: str, mask: Tensor, managed: Managed, is_renamed: bool
) -> ShardMask:
    """Mask a parameter's shards; if it was pruned before it was wrapped, it is renamed already."""
    original, buffer = orig_key(name), mask_key(name)
    key = masked_value.shard_mask_key(name)
    # A gathered copy was made without this mask.
    managed.free_gathered()
    previous = owners[0].__dict__.get(key)
    shard_mask = masked_by(managed)
    for owner in owners:
        if not is_renamed:
            _check_free(owner, original, buffer)
            _rename_parameter(owner, name, original)
        if previous is None:
            owner._buffers.pop(buffer, None)
            owner.register_buffer(buffer, mask, persistent=managed.persists_mask)
        owner._buffers[buffer] = mask
        owner.__dict__[key] = shard_mask
        masked_value.make_live(owner, name)
    if not is_renamed:
        managed.rename(name, original)
    if previous is not None:
        previous.detach()
    shard_mask.attach()
    return shard_mask


def _unmask_shards(owners: list[nn.Module], name: str, managed: Managed) -> None:
    key = masked_value.shard_mask_key(name)
    managed.free_gathered()
    owners[0].__dict__[key].detach()
    managed.rename(orig_key(name), name)
    for owner in owners:
        del owner.__dict__[key]
        _restore_parameter(owner, name)


def _rename_parameter(module: nn.Module, old: str, new: str) -> None:
    """Rename without a change of order: optimizers save their state by position."""
    if old in module.__dict__:  # FSDP1 without use_orig_params registers no parameter
        module.__dict__[new] = module.__dict__.pop(old)
        return
    parameters = module._parameters
    items = [(new if key == old else key, value) for key, value in parameters.items()]
    parameters.clear()
    parameters.update(items)


def _refresh_flat_weights(module: nn.Module, name: str) -> None:
    """Update the list of weights that a recurrent module keeps."""
    if name in getattr(module, "_flat_weights_names", ()):
        setattr(module, name, getattr(module, name))


def _check_free(module: nn.Module, *names: str) -> None:
    # All that hasattr looks through; torch's error for what is missing takes longer than all else.
    is_plain = type(module).__getattr__ is nn.Module.__getattr__
    for name in names:
        if (
            name in module.__dict__
            or name in module._parameters
            or name in module._buffers
            or name in module._modules
            or hasattr(type(module) if is_plain else module, name)
        ):
            raise KeyError(
                f"{type(module).__name__} has an attribute {name!r} already; expected none, "
                "because pruning stores its state under that name."
            )


def _update_after_loading(module: nn.Module) -> None:
    """Update the module after each ``load_state_dict`` from now on."""
    if not any(isinstance(hook, _AfterLoading) for hook in _hooks(module).values()):
        register_hook: Callable[[Any], object] = module.register_load_state_dict_post_hook
        register_hook(_AfterLoading())


def _stop_updating(module: nn.Module) -> None:
    """Undo :func:`_update_after_loading`, once the module has no mask any more."""
    for key, hook in list(_hooks(module).items()):
        if isinstance(hook, _AfterLoading) and not any(hook.pruned(module)):
            del _hooks(module)[key]


class _AfterLoading:
    """Updates a pruned module after ``load_state_dict``.

    The masked weight of a plain module, which its hook computes before forward, would otherwise
    keep the previous values.
    """

    def __call__(self, module: nn.Module, incompatible_keys: Any) -> None:
        for hook in self.pruned(module):
            if _fit(module, hook._tensor_name):
                with torch.enable_grad():
                    hook.refresh_product(module)

    @staticmethod
    def pruned(module: nn.Module) -> list[PruningHook]:
        """The hooks of the parameters that still have a mask."""
        return [
            hook
            for hook in hooks_on(module)
            if isinstance(module._buffers.get(mask_key(hook._tensor_name)), Tensor)
        ]


def _fit(module: nn.Module, name: str) -> bool:
    """Whether the loaded mask and parameter can be multiplied."""
    original, mask = module._parameters.get(orig_key(name)), module._buffers[mask_key(name)]
    return (
        original is not None
        and mask is not None
        and original.shape == mask.shape
        and original.device == mask.device
        and is_dtensor(original) == is_dtensor(mask)
    )


def _hooks(module: nn.Module) -> dict[int, Any]:
    return module._load_state_dict_post_hooks
