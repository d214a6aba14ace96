"""How a mask acts: the only code that changes modules. Hooks, and what puts them on and takes off.

| parameter            | the mask acts                              | ``<name>_mask``             |
|----------------------|--------------------------------------------|-----------------------------|
| plain, DDP           | ``module.<name> = mask * orig`` in a hook  | as the parameter, its dtype |
| TP, EP, FSDP2, HSDP  | by zeros in the shard                      | as the parameter, bool      |
| FSDP1, ZeRO-3        | by zeros in all that a rank stores         | this rank's run, bool       |
| ZeRO-1, -2           | by zeros, also in what the optimizer steps | as the parameter, bool      |

Registered layouts are masked as ZeRO-3; ``wrappers.held`` says how zeros are held. The Parameter
object and its position in ``module._parameters`` stay the same, so that optimizers made before
pruning keep working.

The forward pre-hook marks a pruned parameter and keeps its masked value fresh. Hooks of state dicts
are plain functions, which copies and pickles of a module keep.
"""

from __future__ import annotations

import contextlib
import copy
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from distprune.base.memory import ordinary_tensors, zero_pruned
from distprune.base.naming import Pair, full_name, label_of, named_modules, registered_parameters
from distprune.base.pruned_form import MASK, ORIG, local_tensor, lost_mask, masked_product
from distprune.shards.reader import ShardReader
from distprune.shards.shard import Shard
from distprune.wrappers import masked_value, wrapper
from distprune.wrappers.held import Held, find_held, zero_new
from distprune.wrappers.managed import StoredRun

_CALL = nn.Module._call_impl.__code__
# Under which a module registers hooks of state dicts: torch counts its own from 0 on.
_KEY = -1
_OF_SHARDS = ("_state_dict_pre_hooks", "_state_dict_hooks", "_load_state_dict_pre_hooks")


class PruningHook:
    """Base of every pruning method: what torch keeps in ``module._forward_pre_hooks``.

    Attributes:
        _tensor_name: name of the pruned parameter, without "_orig".
        record: the mask that the last pruning left, as two numbers that are the same on every rank
            and any sharding: its fingerprint, see masks.fingerprint, and the number of elements
            under it; None if unknown.
        tied_places: every (module, name) of a tied parameter, which is pruned and removed as one.
        multiplies: whether the mask acts by multiplication: the class has no other apply_mask.
    """

    _tensor_name: str
    record: Sequence[int] | None = None
    tied_places: tuple[tuple[nn.Module, str], ...] = ()
    multiplies = True
    # The module that has the hook; not pickled, but set again at the next forward.
    _module_ref: weakref.ref[nn.Module] | None = None
    # The DDP wrapper that already ignores the mask.
    _ddp_ref: weakref.ref[nn.Module] | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.multiplies = cls.apply_mask is PruningHook.apply_mask

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        """Before forward: recompute ``module.<name>``, as torch does, or hold zeros on shards."""
        name = self._tensor_name
        if torch.compiler.is_compiling():
            if name + ORIG in module._parameters and not masked_value.is_live(module, name):
                _exempt_masks_from_ddp()
                setattr(module, name, self.apply_mask(module))
        elif holds_zeros(module, name):
            holder_of(module, name).before_forward()
        elif not masked_value.is_live(module, name):
            if self._module_ref is None or self._module_ref() is not module:
                self._module_ref = weakref.ref(module)
            _exempt_masks_from_ddp(self)
            masked_value.release_graph(module, name)
            original = module._parameters.get(name + ORIG)
            is_away = original is not None and original.is_meta
            is_away = is_away and not getattr(module, name + MASK).is_meta
            if is_away or name in module._parameters:
                raise RuntimeError(
                    f"{type(module).__name__}.{name} is pruned, and its parameter was replaced or "
                    "moved away (fused, quantised, offloaded); call distprune.remove before."
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
        mask, original = module._buffers.get(name + MASK), module._parameters.get(name + ORIG)
        if mask is None:
            raise lost_mask(module, name)
        if original is None:  # of a replica of DataParallel
            original = getattr(module, name + ORIG)
        return masked_value.product(module, name, original, mask)

    @property
    def __name__(self) -> str:
        """What torch.jit.script reads of each hook."""
        raise AttributeError("torch.jit.script does not know masks; call distprune.remove before.")

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in ("_module_ref", "_ddp_ref")}

    def __deepcopy__(self, memo: dict[int, Any]) -> PruningHook:
        # [Note: deepcopy] ``module.<name>`` is a product inside the autograd graph,
        # which torch refuses to copy. A module's hooks are copied before its plain
        # attributes, so the copied product can be entered into the memo here.
        module = None if self._module_ref is None else self._module_ref()
        clone = memo[id(self)] = object.__new__(type(self))
        if module is not None and id(module) in memo:
            product = module.__dict__.get(self._tensor_name)
            if isinstance(product, Tensor) and not product.is_leaf:
                original = module._parameters[self._tensor_name + ORIG]
                both: Any = original, module._buffers[self._tensor_name + MASK]
                memo[id(product)] = masked_product(*copy.deepcopy(both, memo))
            clone._module_ref = weakref.ref(memo[id(module)])
        clone.__dict__.update(copy.deepcopy(self.__getstate__(), memo))
        return clone


def holds_zeros(module: nn.Module, name: str) -> bool:
    """Whether the pruned parameter ``module.<name>`` has no product: its shards have zeros."""
    parameters = module._parameters
    return name + ORIG not in parameters and (
        name in parameters or find_held(module, name) is not None
    )


def forgets_pruned(module: nn.Module, name: str) -> bool:
    """Whether the values under the mask of ``module.<name>`` are gone: zeros were written there."""
    return getattr(find_held(module, name), "is_zero", False)


def holder_of(module: nn.Module, name: str) -> Held:
    """What holds the zeros of a sharded parameter; a copied module gets its own here."""
    held = find_held(module, name)
    if held is None:
        held = Held([(module, name)], wrapper.managed_parameters(module).get((id(module), name)))
        held.attach()
    return held


def hooks_on(module: nn.Module) -> list[PruningHook]:
    """The pruning hooks of a module: one for each of its pruned parameters."""
    hooks = module._forward_pre_hooks.values()
    return [hook for hook in hooks if isinstance(hook, PruningHook)]


def find_hook(module: nn.Module, name: str) -> PruningHook | None:
    """The pruning hook of a parameter; None if it is not pruned."""
    return module._forward_pre_hooks.get(name)  # type: ignore[call-overload]


def unregister(module: nn.Module, name: str) -> None:
    """Delete the pruning hook of a parameter."""
    module._forward_pre_hooks.pop(name, None)  # type: ignore[call-overload]


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
    """[fingerprint, pruned elements] of every parameter that has a record, by full name."""
    return {n: list(h.record) for n, _, h in pruned_parameters(model) if h.record is not None}


def put_records(model: nn.Module, records: Mapping[str, Sequence[int]]) -> None:
    """Store the records of loaded masks in the hooks of a model."""
    for name, _, hook in pruned_parameters(model):
        hook.record = records.get(name)


def _exempt_masks_from_ddp(hook: PruningHook | None = None) -> None:
    """Make the DDP wrapper whose forward is running ignore the masks below it.

    Args:
        hook: of one of these masks; records for which wrapper this is done already.
    """
    ddp = wrapper.active_ddp()
    if ddp is None or (hook is not None and hook._ddp_ref is not None and hook._ddp_ref() is ddp):
        return
    masks = []
    for path, module in ddp.module.named_modules():
        for other in hooks_on(module):
            masks.append(full_name(path, other._tensor_name) + MASK)
            other._ddp_ref = weakref.ref(ddp)
    wrapper.ignore_buffers(ddp, masks)


# Dynamo is to call it while tracing, and to leave nothing of it in the graph. (A second model that
# runs code compiled for a first one is not exempted.) The decorator for this,
# torch.compiler.assume_constant_result, imports Dynamo.
_exempt_masks_from_ddp._dynamo_marked_constant = True  # type: ignore[attr-defined]


# A module that gets a hook for the parameter of this name, and this mask; its masked value, if it
# is a plain module that keeps it; and what holds the zeros of a sharded one.
Place = tuple[nn.Module, str, PruningHook, Tensor, Tensor | None, Held | None]


def prepare(
    shard: Shard, mask: Tensor, make_hook: Callable[[nn.Module, str], PruningHook]
) -> list[Place]:
    """Do all that can fail of pruning a parameter, or of replacing its mask.

    Args:
        shard: the parameter, with its places.
        mask: laid out like the parameter.
        make_hook: makes what is registered at a place, instead of the present hook.

    Returns:
        What :func:`commit` only has to store.

    Raises:
        KeyError: a name that pruning needs is taken.
        NotImplementedError: a method overrides apply_mask, and the parameter is sharded.
    """
    places: list[Place] = []
    pairs, record, held = list(shard.places), shard.managed, None
    if shard.is_held and pairs:  # there are none of another stage of a pipeline
        if record is not None:
            record.free_gathered()  # it was gathered without this mask
            name = pairs[0][1]
            pairs += [pair for pair in record.owners if pair[1] == name and pair not in pairs]
        held = find_held(*pairs[0]) or Held(pairs, record)
        if mask.dtype is not torch.bool:
            mask = mask != 0
    for module, name in pairs:
        hook, product = make_hook(module, name), None
        if shard.is_tied:
            hook.tied_places = shard.places
        if held is not None:
            check_hook(hook, shard.name)
            if find_hook(module, name) is None:
                _check_free(module, name + MASK)
        else:
            if name in module._parameters:
                _check_free(module, name + ORIG, name + MASK)
            if not masked_value.must_be_live(module):
                product = _product(module, name, hook, mask)
        places.append((module, name, hook, mask, product, held))
    return places


def _product(module: nn.Module, name: str, hook: PruningHook, mask: Tensor) -> Tensor:
    """The masked value of a plain module that has not been changed yet."""
    parameters: dict[str, Any] = module._parameters
    is_new = name in parameters  # no context has made its gradient dense
    original = parameters[name] if is_new else parameters[name + ORIG]
    if hook.multiplies:
        if is_new:
            return masked_product(original, mask)
        return masked_value.product(module, name, original, mask)
    stand_in: Any = copy.copy(module)  # has the names that the commit makes
    stand_in._parameters = {**parameters, name + ORIG: original}
    stand_in._buffers = {**module._buffers, name + MASK: mask}
    return hook.apply_mask(stand_in)


def commit(places: Sequence[Place]) -> None:
    """Put masks on their modules, by stores that cannot fail; then zero what is sharded."""
    holders = dict.fromkeys([held for *_, held in places if held is not None])
    for each in holders:
        each.attach()
    for module, name, hook, mask, product, held in places:
        module._buffers[name + MASK] = mask
        module._load_state_dict_post_hooks[_KEY] = _after_loading
        hooks: Any = module._forward_pre_hooks  # torch's keys are numbers, ours are names
        # Before the old weight_norm and spectral_norm, which compute the weight from what may be
        # pruned; and before the hooks of wrappers, which may gather what is to be zero.
        is_first = held is not None
        for other in hooks.values() if hooks else ():
            is_first |= type(other).__module__.startswith("torch.nn.utils.")
        is_first &= name not in hooks
        hooks[name], hook._module_ref = hook, weakref.ref(module)
        if is_first:
            hooks.move_to_end(name, last=False)
        if held is not None:
            if isinstance(held.record, StoredRun):
                module._non_persistent_buffers_set.add(name + MASK)
            _watch_state_dicts(module)
            continue
        if name in module._parameters:
            _rename_parameter(module, name, name + ORIG)
        if product is None:
            masked_value.make_live(module, name)
        else:
            # Recurrent modules have a __setattr__ that keeps a list of their weights.
            masked_value.assign(module, name, product)
    for each in holders:
        with ordinary_tensors(), torch.no_grad():
            zero_new(each)


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
        original, mask = module._parameters.get(name + ORIG), module._buffers[name + MASK]
        if type(original) is not nn.Parameter or wrapper.may_be_managed():
            ShardReader().managed(module, name)  # it may have been sharded since
        assert original is not None and mask is not None
        with ordinary_tensors():
            if hook.multiplies:
                final = original.detach() * mask.to(original.dtype)  # its memory format, as torch
                zero_pruned(final, mask)  # +0 also where -0.0, inf or NaN stood
            else:
                final = hook.apply_mask(module).detach()
            original.data = final
    for owner, owned in places:
        if held is None:
            if masked_value.is_live(owner, owned):
                masked_value.end_live(owner, owned)
            owner.__dict__.pop(owned, None)
            _rename_parameter(owner, owned + ORIG, owned)
            # A recurrent module keeps a list of its weights.
            if owned in owner.__dict__.get("_flat_weights_names", ()):
                setattr(owner, owned, getattr(owner, owned))
        owner._buffers.pop(owned + MASK, None)
        owner._non_persistent_buffers_set.discard(owned + MASK)
        if not any(_masks(owner)):
            owner._load_state_dict_post_hooks.pop(_KEY, None)
            for kind in _OF_SHARDS if _KEY in owner._state_dict_pre_hooks else ():
                getattr(owner, kind).pop(_KEY, None)
        if owner is not module or owned != name:
            unregister(owner, owned)


def _rename_parameter(module: nn.Module, old: str, new: str) -> None:
    """Rename without a change of order: optimizers save their state by position."""
    parameters = module._parameters
    present = list(parameters.items())
    parameters.clear()
    for key, value in present:
        parameters[new if key == old else key] = value


def _check_free(module: nn.Module, *names: str) -> None:
    # Not hasattr(module): torch's error for what is missing takes longer than all else.
    taken = {*module.__dict__, *module._parameters, *module._buffers, *module._modules}
    for name in names:
        if name in taken or hasattr(type(module), name):
            text = f"{type(module).__name__} has an attribute {name!r} already; expected none, "
            raise KeyError(text + "because pruning stores its state under that name.")


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
                f"{type(module).__name__}.{name} was pruned by torch.nn.utils.prune already. To "
                f"keep its mask: mask = module.{name + MASK}; torch.nn.utils.prune.remove(module, "
                f"{name!r}); distprune.custom_from_mask(module, {name!r}, mask)."
            )
        if module._buffers.get(name + MASK) is None:
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
    frame: Any = sys._getframe()
    while not running and frame is not None:
        caller = frame.f_locals["self"] if frame.f_code is _CALL else None
        if caller is not None and any(each is module for each in caller.modules()):
            running = f"the forward of {type(caller).__name__}"
        frame = frame.f_back
    if running:
        text = f"{label} is sharded, and {running} is running, which has read it; expected a call "
        raise RuntimeError(text + "between two steps, as after optimizer.step(), not in a hook.")


def check_binary(mask: Tensor, label: str) -> None:
    """Raise ValueError if the mask of a sharded parameter has values other than 0 and 1."""
    other = (mask != 0) & (mask != 1)
    if bool(other.any()):
        text = f"{label}: its mask has the value {float(mask[other][0]):g}; expected 0 and 1 only. "
        raise ValueError(text + "To scale, multiply the parameter, and pass (mask != 0).")


def check_hook(hook: PruningHook, label: str) -> None:
    """Raise NotImplementedError if a method overrides apply_mask: its mask may be no factor."""
    if not hook.multiplies:
        reason = "acts neither on shards nor with dense gradients; expected that of torch"
        raise NotImplementedError(f"{label}: the apply_mask of {type(hook).__name__} {reason}.")


def check_removable(module: nn.Module, name: str) -> list[Pair]:
    """Check that the pruning of ``module.<name>`` can be made final; returns its other places.

    These are the places of a tied parameter at which it is still pruned as one with this place.

    Raises:
        RuntimeError, ValueError: see :func:`check_state`.
        ValueError: the parameter has another mask at another of these places by now.
    """
    hook, parameter = check_state(module, name), module._parameters.get(name + ORIG)
    places, label, own = [], label_of((module, name)), module._buffers.get(name + MASK)
    for pair in () if hook is None or parameter is None else hook.tied_places:
        other, owned = pair
        is_same = other._parameters.get(owned + ORIG) is parameter and pair != (module, name)
        if is_same and check_state(other, owned) is not None:
            _check_equal(label, own, label_of(pair), other._buffers[owned + MASK])
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
        name, mask = registered.removesuffix(ORIG), None
        if find_hook(module, name) is not None:
            check_state(module, name)
            fqn, mask = fqn.removesuffix(ORIG), module._buffers[name + MASK]
        _check_equal(*first.setdefault(id(parameter), (fqn, mask)), fqn, mask)


def _check_equal(name: str, mask: Tensor | None, other: str, of_other: Tensor | None) -> None:
    if mask is of_other:
        return
    if mask is not None and of_other is not None:
        local = local_tensor(mask)
        if torch.equal(local, local_tensor(of_other).to(local)):
            return
    text = f"{name} is tied to {other}, and pruned differently there; expected equal masks. Prune "
    raise ValueError(text + "all names together, or give each both masks by custom_from_mask.")


def _watch_state_dicts(module: nn.Module) -> None:
    """Zero what is saved and loaded of sharded parameters, and convert the masks of runs."""
    if _KEY not in module._state_dict_pre_hooks:
        module._state_dict_pre_hooks[_KEY] = _before_saving
        module._state_dict_hooks[_KEY] = _after_saving
        # Of all, torch passes the module only to this one if it is registered so.
        before = module._load_state_dict_pre_hooks
        handle = module.register_load_state_dict_pre_hook(_before_loading)  # type: ignore[no-untyped-call]
        before[_KEY] = before.pop(handle.id)


def _masks(module: nn.Module) -> Iterator[tuple[str, Held | None]]:
    """Names of the parameters that still have a mask, and what holds the zeros of sharded ones."""
    for hook in hooks_on(module):
        name = hook._tensor_name
        if module._buffers.get(name + MASK) is not None:
            yield name, holder_of(module, name) if holds_zeros(module, name) else None


def _runs_of(module: nn.Module) -> Iterator[tuple[str, Tensor, StoredRun]]:
    """Key and mask of the parameters of which ranks store runs, and their records."""
    for name, held in _masks(module):
        if held is not None and isinstance(held.record, StoredRun):
            yield name + MASK, held.mask, held.record


def _before_saving(module: nn.Module, *_: Any) -> None:
    for _name, held in _masks(module):
        if held is not None:
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
                shape = tuple(saved.size())
                error_msgs.append(f"size mismatch for {key}: {shape} was saved, expected {error}.")
        elif strict:
            missing_keys.append(key)


def _after_loading(module: nn.Module, incompatible_keys: Any) -> None:
    """Zero what was loaded; compute the masked values of a plain module anew."""
    for name, held in _masks(module):
        if held is not None:
            held.zero()
        else:
            # What does not fit, where only one of both was assigned, is told by the next forward.
            with torch.enable_grad(), contextlib.suppress(RuntimeError):
                refresh_products([(module, name)])
