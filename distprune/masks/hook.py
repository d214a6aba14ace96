"""The forward pre-hook that marks a pruned parameter and keeps its masked value fresh."""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from distprune.base.naming import Pair, full_name, named_modules
from distprune.base.pruned_form import is_dtensor, lost_mask, mask_key, masked_product, orig_key
from distprune.wrappers import masked_value
from distprune.wrappers.masked_value import ShardMask
from distprune.wrappers.wrapper import active_ddp, ignore_buffers, is_managed

# Modules that got a hook, or were copied with one, and that new_modules has not yielded yet.
_bound: weakref.WeakSet[nn.Module] = weakref.WeakSet()


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
    # id of the ``_orig`` parameter at the last forward; a new id means that the module was wrapped
    # since. None: the user has been warned.
    _last_original_id: int | None = 0
    # The DDP wrapper that already ignores the mask.
    _ddp_ref: weakref.ref[nn.Module] | None = None

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        """Recompute ``module.<name>`` before forward, as torch does."""
        name = self._tensor_name
        is_live = masked_value.is_live(module, name)
        if torch.compiler.is_compiling():
            if not is_live:
                _exempt_masks_from_ddp()
                setattr(module, name, self.apply_mask(module))
            return
        if module._buffers.get(mask_key(name)) is None:
            raise lost_mask(module, name)
        if is_live:
            shard_mask = module.__dict__.get(masked_value.shard_mask_key(name))
            if shard_mask is not None:
                _check_attached(module, name, shard_mask)
            return
        self._before_forward(module)
        masked_value.release_graph(module, name)
        masked_value.assign(module, name, self.apply_mask(module))

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

    def refresh_product(self, module: nn.Module) -> None:
        """Compute ``module.<name>`` anew if the module keeps it, and not only its factors."""
        name = self._tensor_name
        if isinstance(module.__dict__.get(name), Tensor) and not masked_value.is_live(module, name):
            setattr(module, name, self.apply_mask(module))

    @property
    def multiplies(self) -> bool:
        """Whether the mask acts by multiplication: the method does not override apply_mask."""
        return getattr(self.apply_mask, "__func__", None) is PruningHook.apply_mask

    def register_module(self, module: nn.Module) -> None:
        """Remember the module, for :meth:`__deepcopy__` and :func:`new_modules`."""
        self._module_ref = weakref.ref(module)
        _bound.add(module)

    def _before_forward(self, module: nn.Module) -> None:
        if self._module_ref is None or self._module_ref() is not module:
            self.register_module(module)
        original = module._parameters.get(orig_key(self._tensor_name))
        if self._last_original_id is not None and id(original) != self._last_original_id:
            self._last_original_id = id(original)
            _bound.add(module)
            self._check_wrapping(module, original)
        _exempt_masks_from_ddp(self)

    def _check_wrapping(self, module: nn.Module, original: Tensor | None) -> None:
        """Warn, or raise, if the module was wrapped after it had been pruned."""
        name = self._tensor_name
        label = f"{type(module).__name__}.{name}"
        mask = module._buffers[mask_key(name)]
        needs_sharding = False
        if is_dtensor(original):
            if not is_dtensor(mask):
                raise RuntimeError(
                    f"{label} was parallelised after it had been pruned, and its mask is whole; "
                    "expected a mask that is sharded like the parameter. Call "
                    "distprune.shard_masks(model) after parallelize_module."
                )
            needs_sharding = mask.placements != original.placements
        if needs_sharding or is_managed(module, name):
            # FSDP registers another tensor at every forward: warn only once.
            self._last_original_id = None
            warnings.warn(
                f"{label} was wrapped after it had been pruned: its mask is whole on every rank, "
                "and FSDP cannot free the masked weights. Call distprune.shard_masks(model) after "
                "wrapping.",
                stacklevel=2,
            )

    def __getstate__(self) -> dict[str, Any]:
        own = ("_module_ref", "_ddp_ref", "_last_original_id")
        return {key: value for key, value in self.__dict__.items() if key not in own}

    def __deepcopy__(self, memo: dict[int, Any]) -> PruningHook:
        # [Note: deepcopy] ``module.<name>`` is a product inside the autograd graph,
        # which torch refuses to copy. A module's hooks are copied before its plain
        # attributes, so the copied product can be entered into the memo here.
        module = self._module_ref() if self._module_ref is not None else None
        in_copy = module is not None and id(module) in memo
        if in_copy:
            assert module is not None
            name = self._tensor_name
            product = module.__dict__.get(name)
            if isinstance(product, Tensor) and not product.is_leaf and id(product) not in memo:
                mask = copy.deepcopy(module._buffers[mask_key(name)], memo)
                original = copy.deepcopy(module._parameters[orig_key(name)], memo)
                assert mask is not None and original is not None
                memo[id(product)] = masked_product(original, mask)
        clone = type(self).__new__(type(self))
        memo[id(self)] = clone
        clone.__dict__.update(copy.deepcopy(self.__getstate__(), memo))
        if in_copy:
            clone.register_module(memo[id(module)])
        return clone


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
    present = find_hook(module, hook._tensor_name)
    if present is None:
        module.register_forward_pre_hook(hook)
        return
    hooks = module._forward_pre_hooks
    hooks[next(key for key, each in hooks.items() if each is present)] = hook


def unregister(module: nn.Module, name: str) -> None:
    """Delete the pruning hook of a parameter."""
    present = find_hook(module, name)
    for key, hook in list(module._forward_pre_hooks.items()):
        if hook is present:
            del module._forward_pre_hooks[key]


def refresh_products(places: Iterable[Pair]) -> None:
    """Compute ``module.<name>`` anew, as the hooks do, where modules keep it."""
    for module, name in places:
        hook = find_hook(module, name)
        if hook is not None:
            hook.refresh_product(module)


def new_modules() -> Iterator[nn.Module]:
    """The modules that were bound to a hook since they were last yielded.

    One is forgotten once the caller asks for the next. Copies get their attributes when all of them
    have been copied; those without are still being made, or their copying has failed.
    """
    for module in list(_bound) if _bound else ():  # an empty set takes longer to walk than to ask
        if "_forward_pre_hooks" in vars(module):
            yield module
            _bound.discard(module)


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


def _check_attached(module: nn.Module, name: str, shard_mask: ShardMask) -> None:
    if not shard_mask.is_attached():
        raise RuntimeError(
            f"the mask of {type(module).__name__}.{name} no longer acts: its sharded tensor was "
            "replaced without FSDP2's knowledge, by .to() or to_empty() on a module that is not "
            "an FSDPModule itself. Expected the call on the FSDP root; put the mask back with "
            f"custom_from_mask(module, {name!r}, module.{mask_key(name)})."
        )
