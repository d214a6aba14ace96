"""Put masks on modules and take them off, all of them or none.

| parameter   | the mask acts                              | ``<name>_mask``            |
|-------------|--------------------------------------------|----------------------------|
| plain       | ``module.<name> = mask * orig`` in a hook  | as the parameter, its dtype |
| TP          | ``mask * orig`` whenever it is read        | as the parameter, its dtype |
| FSDP2       | on the shard, before the all-gather        | as the parameter, bool      |
| FSDP1       | the same, on the flat parameter's slice    | this rank's run, bool       |

The Parameter object stays, and its place in ``module._parameters``: optimizers
made before pruning go on working.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from distprune._common.pruned_form import local_tensor, mask_key, orig_key
from distprune.masks import loading, survival
from distprune.masks.hook import PruningHook, find_hook
from distprune.torch_private import live_property
from distprune.torch_private.wrapper import masked_by


class Transaction:
    """Changes to modules that can be taken back together.

    A failure half way through a list of parameters must leave every module as it
    was, on this rank and, once it is shared, on all.
    """

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def attach(
        self, module: nn.Module, name: str, hook: PruningHook, mask: Tensor, managed: Any | None
    ) -> None:
        """Prune ``module.<name>``: a first mask, or another one if it is pruned already.

        Args:
            hook: what to register; takes the place of the parameter's present hook.
            mask: laid out as the parameter.
            managed: the wrapper's record (torch_private.wrapper.Managed) of it, if any.
        """
        owners = _owners(module, name, managed)
        self._remember(owners, name, managed)
        if managed is None:
            _reparametrize(module, name, hook, mask)
        else:
            _mask_shards(owners, name, mask, managed)
        hook.bind(module)
        hook.note_parameter(module, is_managed=managed is not None)
        for owner in owners:
            survival.install(owner, name)
            loading.install(owner)
            present = find_hook(owner, name)
            if present is None:
                owner.register_forward_pre_hook(hook)
            else:
                owner._forward_pre_hooks[present[0]] = hook

    def detach(
        self, module: nn.Module, name: str, final: Tensor | None, managed: Any | None
    ) -> None:
        """Make the pruning of ``module.<name>`` final; all that is left of it is the hook.

        Args:
            final: the masked values, local, with pruned elements at +0; None leaves the
                unmasked ones.
            managed: the wrapper's record (torch_private.wrapper.Managed) of it, if any.
        """
        if managed is not None:
            owners = _owners(module, name, managed)
            self._remember(owners, name, managed)
            if final is not None:
                managed.write(final)
            _unmask_shards(owners, name, managed)
            others = [(owner, name) for owner in owners[1:]]
        else:
            parameter = module._parameters[orig_key(name)]
            others = _tied_places(module, name)
            if final is not None:
                local_tensor(parameter.detach()).copy_(final)
            for owner, owned_name in [(module, name), *others]:
                self._remember([owner], owned_name, None)
                _restore_parameter(owner, owned_name)
        # The module's own hook is the caller's to delete, as in torch.
        for owner, owned_name in others:
            unregister(owner, owned_name)

    def rollback(self) -> None:
        """Leave every module as it was."""
        while self._undo:
            self._undo.pop()()

    def _remember(self, owners: list[nn.Module], name: str, managed: Any | None) -> None:
        key = live_property.shard_mask_key(name)
        shard_mask = owners[0].__dict__.get(key)
        restore = [_snapshot(owner, name) for owner in owners]
        was_renamed = _is_renamed(managed, name)

        def undo() -> None:
            now = owners[0].__dict__.get(key)
            if managed is not None and now is not shard_mask:
                if now is not None:
                    now.detach()
                if was_renamed != _is_renamed(managed, name):
                    pair = (name, orig_key(name))
                    managed.rename(*(pair if was_renamed else reversed(pair)))
                if shard_mask is not None:
                    shard_mask.attach()
            for each in restore:
                each()

        self._undo.append(undo)


def _snapshot(module: nn.Module, name: str) -> Callable[[], None]:
    """Remember what pruning changes on a module; the result puts it back."""
    cls = module.__class__
    dicts = [
        module._parameters,
        module._buffers,
        module._forward_pre_hooks,
        module._load_state_dict_post_hooks,
    ]
    saved = [dict(each) for each in dicts]
    non_persistent = module._non_persistent_buffers_set
    saved_non_persistent = set(non_persistent)
    keys = (name, orig_key(name), live_property.shard_mask_key(name), survival.KEY)
    attributes = {key: module.__dict__[key] for key in keys if key in module.__dict__}

    def restore() -> None:
        module.__class__ = cls
        for each, contents in zip(dicts, saved, strict=True):
            each.clear()
            each.update(contents)
        non_persistent.clear()
        non_persistent.update(saved_non_persistent)
        for key in keys:
            module.__dict__.pop(key, None)
        module.__dict__.update(attributes)
        _refresh_flat_weights(module, name)

    return restore


def _owners(module: nn.Module, name: str, managed: Any | None) -> list[nn.Module]:
    """The modules that hold the parameter under this name; FSDP masks it for all of them."""
    if managed is None:
        return [module]
    names = (name, orig_key(name))
    others = [owner for owner, n in managed.owners if n in names and owner is not module]
    return [module, *others]


def _is_renamed(managed: Any | None, name: str) -> bool:
    """Whether the wrapper knows the parameter by its name in the pruned form."""
    return managed is not None and any(n == orig_key(name) for _, n in managed.owners)


def _tied_places(module: nn.Module, name: str) -> list[tuple[nn.Module, str]]:
    """Where else a parameter was pruned together with this place, and still is."""
    present = find_hook(module, name)
    places = present[1].tied_places if present is not None else ()
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
    if live_property.is_needed(module, name):
        live_property.install(module, name)
    else:
        # Through setattr: recurrent modules keep a list of their weights in step.
        setattr(module, name, hook.apply_mask(module))


def _restore_parameter(module: nn.Module, name: str) -> None:
    if live_property.is_live(module, name):
        live_property.uninstall(module, name)
    module.__dict__.pop(name, None)
    del module._buffers[mask_key(name)]
    survival.uninstall(module)
    loading.uninstall(module)
    _rename_parameter(module, orig_key(name), name)
    _refresh_flat_weights(module, name)


def _mask_shards(owners: list[nn.Module], name: str, mask: Tensor, managed: Any) -> None:
    original, buffer = orig_key(name), mask_key(name)
    key = live_property.shard_mask_key(name)
    # The gathered copy, if there is one, was made without this mask.
    managed.reshard()
    previous = owners[0].__dict__.get(key)
    shard_mask = masked_by(managed, mask)
    # Pruned before it was wrapped, the parameter has its new name already.
    is_renamed = _is_renamed(managed, name)
    for owner in owners:
        if not is_renamed:
            _check_free(owner, original, buffer)
            _rename_parameter(owner, name, original)
        if previous is None:
            owner._buffers.pop(buffer, None)
            owner.register_buffer(buffer, mask, persistent=managed.persists_mask)
        owner._buffers[buffer] = mask
        owner.__dict__[key] = shard_mask
        live_property.install(owner, name)
    if not is_renamed:
        managed.rename(name, original)
    if previous is not None:
        previous.detach()
    shard_mask.attach()


def _unmask_shards(owners: list[nn.Module], name: str, managed: Any) -> None:
    key = live_property.shard_mask_key(name)
    managed.reshard()
    owners[0].__dict__[key].detach()
    managed.rename(orig_key(name), name)
    for owner in owners:
        live_property.uninstall(owner, name)
        del owner.__dict__[key]
        delattr(owner, mask_key(name))
        survival.uninstall(owner)
        loading.uninstall(owner)
        _rename_parameter(owner, orig_key(name), name)


def _rename_parameter(module: nn.Module, old: str, new: str) -> None:
    """Rename in place, at its place: optimizers save their state by index."""
    if old in module.__dict__:  # FSDP1 without use_orig_params registers no parameter
        module.__dict__[new] = module.__dict__.pop(old)
        return
    parameters = module._parameters
    items = [(new if key == old else key, value) for key, value in parameters.items()]
    parameters.clear()
    parameters.update(items)


def _refresh_flat_weights(module: nn.Module, name: str) -> None:
    """Let a recurrent module see what now stands behind a name of its."""
    if name in getattr(module, "_flat_weights_names", ()):
        setattr(module, name, getattr(module, name))


def _check_free(module: nn.Module, *names: str) -> None:
    for name in names:
        if hasattr(module, name):
            raise KeyError(
                f"{type(module).__name__} has an attribute {name!r} already; expected none, "
                "because pruning stores its state under that name."
            )


def unregister(module: nn.Module, name: str) -> None:
    """Delete the pruning hook of a parameter."""
    present = find_hook(module, name)
    if present is not None:
        del module._forward_pre_hooks[present[0]]
