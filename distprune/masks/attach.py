"""Put masks on modules and take them off: prepare everything that can fail, then commit.

| parameter            | the mask acts                              | ``<name>_mask``             |
|----------------------|--------------------------------------------|-----------------------------|
| plain, DDP           | ``module.<name> = mask * orig`` in a hook  | as the parameter, its dtype |
| TP, EP, FSDP2, HSDP  | by zeros in the shard                      | as the parameter, bool      |
| FSDP1, ZeRO-3        | by zeros in all that a rank stores         | this rank's run, bool       |
| ZeRO-1, -2           | by zeros, also in what the optimizer steps | as the parameter, bool      |

Registered layouts are masked as ZeRO-3; ``wrappers.held`` says how zeros are held. The Parameter
object and its position in ``module._parameters`` stay the same, so that optimizers made before
pruning keep working.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from distprune.base.memory import ordinary_tensors
from distprune.base.naming import Pair
from distprune.base.pruned_form import is_dtensor, mask_key, orig_key
from distprune.masks import state_dicts
from distprune.masks.hook import PruningHook, find_hook, register, unregister
from distprune.shards.shard import Shard
from distprune.wrappers import deepspeed, masked_value
from distprune.wrappers.held import Held, find_held, zero_new
from distprune.wrappers.managed import StoredRun

# A module that gets a hook for the parameter of this name, and, if it is a plain one that keeps the
# masked value, that value.
Place = tuple[nn.Module, str, PruningHook, Tensor | None]
# The mask of one parameter, all places that get it, and what holds the zeros of a sharded one. It
# only has to be stored.
Prepared = tuple[Tensor, Sequence[Place], Held | None]


def mask_dtype(shard: Shard) -> torch.dtype:
    """The dtype of a new mask: as torch has it on plain parameters; bool where they are sharded."""
    return torch.bool if _is_held(shard) else shard.parameter.dtype


def _is_held(shard: Shard) -> bool:
    return (
        shard.managed is not None or shard.mesh is not None or deepspeed.has_master(shard.parameter)
    )


def prepare(shard: Shard, hooks: Sequence[PruningHook], mask: Tensor) -> Prepared:
    """Do all that can fail of pruning a parameter, or of replacing its mask.

    Args:
        shard: the parameter, with its places.
        hooks: what to register at each place; replaces the present hook.
        mask: laid out like the parameter.

    Raises:
        KeyError: a name that pruning needs is taken.
    """
    pairs = zip(shard.places, hooks, strict=True)
    if not hooks or not _is_held(shard):  # no hooks: of another stage of a pipeline
        return mask, [_prepare_plain(*place, hook, mask) for place, hook in pairs], None
    places: list[Place] = [(module, name, hook, None) for (module, name), hook in pairs]
    record, (first, own_name) = shard.managed, shard.places[0]
    if record is not None:
        record.free_gathered()  # it was gathered without this mask
        listed = {(id(module), name) for module, name in shard.places}
        for owner, name in record.owners:
            if name == own_name and (id(owner), name) not in listed:
                places.append((owner, name, hooks[0], None))
    for module, name, *_ in places:
        if find_hook(module, name) is None:
            _check_free(module, mask_key(name))
    held = find_held(first, own_name)
    if held is None or not held.is_attached:
        held = Held([(module, name) for module, name, *_ in places], record)
    if not is_dtensor(mask) and mask.dtype is not torch.bool:
        mask = mask != 0
    return mask, places, held


def _prepare_plain(module: nn.Module, name: str, hook: PruningHook, mask: Tensor) -> Place:
    original_key, buffer = orig_key(name), mask_key(name)
    original = module._parameters.get(name)
    if original is not None:
        _check_free(module, original_key, buffer)
    else:
        original = module._parameters[original_key]
        assert original is not None
    if masked_value.must_be_live(module):
        return module, name, hook, None
    if hook.multiplies:
        return module, name, hook, masked_value.product(module, name, original, mask)
    # It reads the names that the commit makes.
    stand_in: nn.Module = object.__new__(type(module))
    stand_in.__dict__.update(
        module.__dict__,
        _parameters={**module._parameters, original_key: original},
        _buffers={**module._buffers, buffer: mask},
    )
    return module, name, hook, hook.apply_mask(stand_in)


def commit(prepared: Iterable[Prepared]) -> None:
    """Put masks on their modules, by stores that cannot fail; then zero what is sharded."""
    to_zero = []
    for mask, places, held in prepared:
        for module, name, hook, product in places:
            buffer = mask_key(name)
            module._buffers[buffer] = mask
            if held is not None:
                if isinstance(held.record, StoredRun):
                    module._non_persistent_buffers_set.add(buffer)
                held.attach()
            else:
                if name in module._parameters:
                    _rename_parameter(module, name, orig_key(name))
                if product is None:
                    masked_value.make_live(module, name)
                else:
                    # Recurrent modules have a __setattr__ that keeps a list of their weights.
                    masked_value.assign(module, name, product)
            register(module, hook)
            state_dicts.watch(module, is_held=held is not None)
        if held is not None:
            to_zero.append(held)
    if to_zero:
        with ordinary_tensors(), torch.no_grad():
            for held in to_zero:
                zero_new(held)


def detach(module: nn.Module, name: str, final: Tensor | None, tied: Iterable[Pair]) -> None:
    """Take the mask of ``module.<name>`` off, at all its places, with all hooks but the first.

    Args:
        final: the masked values of a plain parameter, with pruned elements at +0; None keeps the
            unmasked ones. The parameter gets this memory, as in torch: a state dict that was taken
            before, and a graph whose backward is still to come, keep the old one.
        tied: as :func:`tied_places` lists them.
    """
    held = find_held(module, name)
    places = [(module, name), *tied]
    if held is not None:
        held.zero()
        places = held.places
        held.detach()
    elif final is not None:
        parameter = module._parameters[orig_key(name)]
        assert parameter is not None
        parameter.data = final
    for owner, owned in places:
        if held is None:
            if masked_value.is_live(owner, owned):
                masked_value.end_live(owner, owned)
            owner.__dict__.pop(owned, None)
            _rename_parameter(owner, orig_key(owned), owned)
            # A recurrent module keeps a list of its weights.
            if owned in owner.__dict__.get("_flat_weights_names", ()):
                setattr(owner, owned, getattr(owner, owned))
        buffer = mask_key(owned)
        owner._buffers.pop(buffer, None)
        owner._non_persistent_buffers_set.discard(buffer)
        state_dicts.unwatch(owner)
        if owner is not module or owned != name:
            unregister(owner, owned)


def tied_places(module: nn.Module, hook: PruningHook | None) -> list[Pair]:
    """The other places of a tied parameter at which it is still pruned as one with this place."""
    if hook is None or not hook.tied_places:
        return []
    parameter = module._parameters.get(orig_key(hook._tensor_name))
    return [
        (other, name)
        for other, name in hook.tied_places
        if (other is not module or name != hook._tensor_name)
        and parameter is not None
        and other._parameters.get(orig_key(name)) is parameter
        and find_hook(other, name) is not None
    ]


def _rename_parameter(module: nn.Module, old: str, new: str) -> None:
    """Rename without a change of order: optimizers save their state by position."""
    parameters = module._parameters
    renamed = {new if key == old else key: value for key, value in parameters.items()}
    parameters.clear()
    parameters.update(renamed)


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
