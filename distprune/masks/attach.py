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

import copy
import sys
from collections.abc import Iterable, Sequence
from types import FrameType

import torch
from torch import Tensor, nn

from distprune.base.memory import ordinary_tensors, zero_pruned
from distprune.base.naming import Pair, label_of, registered_parameters
from distprune.base.pruned_form import (
    is_dtensor,
    local_tensor,
    lost_mask,
    mask_key,
    name_without_orig,
    orig_key,
)
from distprune.masks.hook import (
    PruningHook,
    find_hook,
    holder_of,
    holds_zeros,
    register,
    unregister,
    unwatch,
    watch,
)
from distprune.shards.reader import ShardReader
from distprune.shards.shard import Shard
from distprune.wrappers import deepspeed, masked_value
from distprune.wrappers.held import Held, find_held, zero_new
from distprune.wrappers.managed import StoredRun
from distprune.wrappers.wrapper import may_be_managed

# A module that gets a hook for the parameter of this name, and, if it is a plain one that keeps the
# masked value, that value.
Place = tuple[nn.Module, str, PruningHook, Tensor | None]
# The mask of one parameter, all places that get it, and what holds the zeros of a sharded one. It
# only has to be stored.
Prepared = tuple[Tensor, Sequence[Place], Held | None]
_CALL = nn.Module._call_impl.__code__


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
        NotImplementedError: a method overrides apply_mask, and the parameter is sharded.
    """
    pairs, record = zip(shard.places, hooks, strict=True), shard.managed
    if not hooks or not _is_held(shard):  # no hooks: of another stage of a pipeline
        return mask, [_prepare_plain(*place, hook, mask) for place, hook in pairs], None
    places: list[Place] = [(*place, hook, None) for place, hook in pairs]
    if record is not None:
        record.free_gathered()  # it was gathered without this mask
        places += [
            (owner, name, hooks[0], None)
            for owner, name in record.owners
            if name == hooks[0]._tensor_name and (owner, name) not in shard.places
        ]
    for module, name, hook, _ in places:
        check_hook(hook, shard.name)
        if find_hook(module, name) is None:
            _check_free(module, mask_key(name))
    held = find_held(*shard.places[0])
    if held is None:
        held = Held([(module, name) for module, name, *_ in places], record)
    if not is_dtensor(mask) and mask.dtype is not torch.bool:
        mask = mask != 0
    return mask, places, held


def _prepare_plain(module: nn.Module, name: str, hook: PruningHook, mask: Tensor) -> Place:
    original_key, buffer = orig_key(name), mask_key(name)
    original = module._parameters.get(name)
    if original is None:
        original = module._parameters[original_key]
    else:
        _check_free(module, original_key, buffer)
    assert original is not None
    if masked_value.must_be_live(module):
        return module, name, hook, None
    if hook.multiplies:
        return module, name, hook, masked_value.product(module, name, original, mask)
    stand_in = copy.copy(module)  # has the names that the commit makes
    stand_in._parameters = {**module._parameters, original_key: original}
    stand_in._buffers = {**module._buffers, buffer: mask}
    return module, name, hook, hook.apply_mask(stand_in)


def commit(prepared: Iterable[Prepared]) -> None:
    """Put masks on their modules, by stores that cannot fail; then zero what is sharded."""
    to_zero = []
    for mask, places, held in prepared:
        if held is not None:
            held.attach()
            to_zero.append(held)
        for module, name, hook, product in places:
            buffer = mask_key(name)
            module._buffers[buffer] = mask
            if held is None:
                if name in module._parameters:
                    _rename_parameter(module, name, orig_key(name))
                if product is None:
                    masked_value.make_live(module, name)
                else:
                    # Recurrent modules have a __setattr__ that keeps a list of their weights.
                    masked_value.assign(module, name, product)
            elif isinstance(held.record, StoredRun):
                module._non_persistent_buffers_set.add(buffer)
            register(module, hook)
            watch(module, is_held=held is not None)
    if to_zero:
        with ordinary_tensors(), torch.no_grad():
            for held in to_zero:
                zero_new(held)


def detach(module: nn.Module, hook: PruningHook, *, is_final: bool) -> None:
    """Take the mask of a parameter off, at all its places, with all hooks but the first.

    Args:
        is_final: whether pruned elements of a plain parameter become +0; else it keeps its unmasked
            values. It gets new memory then, as in torch: a state dict that was taken before, and
            a graph whose backward is still to come, keep the old one.

    Raises:
        RuntimeError: the mask is gone; the parameter was pruned before it was sharded, or is in
            use (see :func:`check_idle`).
        ValueError: see :func:`check_removable`. Nothing has changed then.
    """
    name = hook._tensor_name
    places, held = [(module, name), *check_removable(module, name)], None
    if holds_zeros(module, name):
        check_idle(module, label_of((module, name)))
        held = holder_of(module, name)
        held.zero()
        places = held.places
        held.detach()
    elif is_final:
        original, mask = module._parameters.get(orig_key(name)), module._buffers[mask_key(name)]
        if type(original) is not nn.Parameter or may_be_managed():
            ShardReader().managed(module, name)  # it may have been sharded since
        assert original is not None and mask is not None
        with ordinary_tensors():
            if hook.multiplies:
                factors = mask.to(original.dtype)
                final = original.detach() * factors  # in its memory format, as torch
                zero_pruned(final, mask)  # +0 also where -0.0, inf or NaN stood
            else:
                final = hook.apply_mask(module).detach()
            original.data = final
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
        unwatch(owner)
        if owner is not module or owned != name:
            unregister(owner, owned)


def _rename_parameter(module: nn.Module, old: str, new: str) -> None:
    """Rename without a change of order: optimizers save their state by position."""
    parameters = module._parameters
    renamed = {new if key == old else key: value for key, value in parameters.items()}
    parameters.clear()
    parameters.update(renamed)


def _check_free(module: nn.Module, *names: str) -> None:
    for name in names:
        # Not hasattr(module): torch's error for what is missing takes longer than all else.
        if (
            name in module.__dict__
            or name in module._parameters
            or name in module._buffers
            or name in module._modules
            or hasattr(type(module), name)
        ):
            raise KeyError(
                f"{type(module).__name__} has an attribute {name!r} already; expected none, "
                "because pruning stores its state under that name."
            )


def check_state(module: nn.Module, name: str) -> PruningHook | None:
    """Raise if ``module.<name>`` is pruned, but not in the form of this library; find its hook.

    Raises:
        RuntimeError: its mask was deleted.
        ValueError: torch.nn.utils.prune has pruned it. Two hooks would multiply two masks, and
            the hook that remains after a removal fails at the next forward.
    """
    for hook in module._forward_pre_hooks.values():
        if getattr(hook, "_tensor_name", None) != name:
            continue
        if not isinstance(hook, PruningHook):
            raise ValueError(
                f"{type(module).__name__}.{name} was pruned by torch.nn.utils.prune already; "
                "expected a parameter that it has not pruned. To keep its mask, take it over: "
                f"mask = module.{mask_key(name)}; torch.nn.utils.prune.remove(module, {name!r}); "
                f"distprune.custom_from_mask(module, {name!r}, mask)."
            )
        if module._buffers.get(mask_key(name)) is None:
            raise lost_mask(module, name)
        return hook
    return None


def check_idle(module: nn.Module, label: str) -> None:
    """Raise inside a backward, or inside a forward of the module or of one that contains it.

    For sharded parameters: a gathered copy, or the graph, has the values under the present mask.

    Raises:
        RuntimeError: names the parameter and what is running.

    Cost: a comparison per frame of the stack.
    """
    running = "" if torch._C._current_graph_task_id() == -1 else "a backward"
    frame: FrameType | None = sys._getframe()
    while not running and frame is not None:
        caller = frame.f_locals["self"] if frame.f_code is _CALL else None
        if caller is not None and any(each is module for each in caller.modules()):
            running = f"the forward of {type(caller).__name__}"
        frame = frame.f_back
    if running:
        raise RuntimeError(
            f"{label} is sharded, and {running} is running, which has read it; "
            "expected a call between two steps, such as after optimizer.step(), and none from a "
            "hook of a module or of a tensor."
        )


def check_binary(mask: Tensor, label: str) -> None:
    """Raise ValueError if the mask of a sharded parameter has values other than 0 and 1."""
    other = (mask != 0) & (mask != 1)
    if bool(other.any()):
        raise ValueError(
            f"{label}: its mask has the value {float(mask[other][0]):g}; expected 0 and 1 only, "
            "because the mask of a sharded parameter says what is kept, and scales nothing. "
            "Multiply the factors into the parameter, and pass (mask != 0)."
        )


def check_hook(hook: PruningHook, label: str) -> None:
    """Raise NotImplementedError if a method overrides apply_mask: shards are masked without it."""
    if not hook.multiplies:
        raise NotImplementedError(
            f"{label}: {type(hook).__name__} has an apply_mask of its own, and the parameter is "
            "sharded, where a mask acts without it; expected the apply_mask of BasePruningMethod."
        )


def check_removable(module: nn.Module, name: str) -> list[Pair]:
    """Check that the pruning of ``module.<name>`` can be made final; returns its other places.

    These are the places of a tied parameter at which it is still pruned as one with this place.

    Raises:
        RuntimeError, ValueError: see :func:`check_state`.
        ValueError: the parameter has another mask at another of these places by now.
    """
    hook, parameter = check_state(module, name), module._parameters.get(orig_key(name))
    places: list[Pair] = []
    for pair in () if hook is None or parameter is None else hook.tied_places:
        other, owned = pair
        if pair == (module, name) or other._parameters.get(orig_key(owned)) is not parameter:
            continue
        if check_state(other, owned) is not None:
            masks = [m._buffers[mask_key(n)] for m, n in ((module, name), pair)]
            _check_equal(label_of((module, name)), masks[0], label_of(pair), masks[1])
            places.append(pair)
    return places


def check_ties(model: nn.Module) -> None:
    """Raise if a tied parameter of a model is pruned differently under its names, or under one.

    Raises:
        RuntimeError: a mask was deleted.
        ValueError: names both.
    """
    first: dict[int, tuple[str, Tensor | None]] = {}
    for fqn, module, registered, parameter in registered_parameters(model):
        name, mask = name_without_orig(registered), None
        if find_hook(module, name) is not None:
            check_state(module, name)
            fqn, mask = name_without_orig(fqn), module._buffers[mask_key(name)]
        _check_equal(*first.setdefault(id(parameter), (fqn, mask)), fqn, mask)


def _check_equal(name: str, mask: Tensor | None, other: str, of_other: Tensor | None) -> None:
    if mask is of_other:
        return
    if mask is not None and of_other is not None:
        local = local_tensor(mask)
        if torch.equal(local, local_tensor(of_other).to(local)):
            return
    raise ValueError(
        f"{name} is tied to {other}, and pruned differently there; expected equal "
        "masks, because one parameter can hold the zeros of one mask only, and the other name "
        "would lose its own. Prune all names together (select lists them as one), or give each "
        "name the other's mask too, by custom_from_mask: then both have the zeros of both."
    )
