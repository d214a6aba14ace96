"""``dense_gradients``: gradients of pruned elements, too, for a while."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from distprune._common.mask_values import write_product
from distprune._common.naming import checked_pair, unwrap
from distprune._common.pruned_form import name_without_orig
from distprune.masks.hook import find_hook, named_hooks
from distprune.shards.gradients import available_gradient
from distprune.shards.reader import ShardReader
from distprune.torch_private import masked_value

Places = list[tuple[nn.Module, str]]


@contextmanager
def dense_gradients(parameters: nn.Module | Iterable[tuple[nn.Module, str]]) -> Iterator[None]:
    """Let ``.grad`` of pruned parameters have the gradients of pruned elements, too.

    Inside, the forward uses the masked weights, bit for bit, as outside. The backward gives
    ``weight_orig.grad`` (under FSDP its shard) the gradient of the loss with respect to the masked
    weight, at pruned places too: a straight-through estimator. On leaving, also by an error,
    ``.grad`` is masked, so leave before the optimizer's step::

        with prune.dense_gradients(model):
            loss(model, batch).backward()
            criterion.update()
        optimizer.step()

    Run forward and backward both inside. With several backward passes into one ``.grad``, those
    inside add dense gradients and those before added masked ones; on leaving the sum is masked.
    What a backward adds after leaving is masked, also if its forward was inside or if its
    gradients are reduced later (``no_sync``). Contexts may nest, the outermost one masks.
    A model that ``torch.compile`` compiled is compiled once more.

    Args:
        parameters: a model, for all its pruned parameters; or (module, name) pairs, as ``select``
            lists them. Those that are not pruned are left as they are: their gradients are dense.

    Raises:
        TypeError: neither a module nor pairs.
        RuntimeError: under FSDP, a backward without synchronisation before the context has left
            gradients that are not reduced yet: masking them later would be too late.
        NotImplementedError: a method with an ``apply_mask`` of its own. Nothing has changed then.

    Source: Bengio et al., arXiv 1308.3432 (the estimator); RigL, arXiv 1911.11134, and movement
    pruning, arXiv 2005.07683, need such gradients.

    Cost: no memory, no communication; on leaving, one pass over the gradients.
    """
    places = _pruned_places(parameters)
    _check(places)
    for module, name in places:
        masked_value.enter_dense(module, name)
    try:
        yield
    finally:
        for module, name in places:
            masked_value.leave_dense(module, name)
        _mask_gradients([place for place in places if not masked_value.has_dense_gradient(*place)])


def _pruned_places(parameters: nn.Module | Iterable[tuple[nn.Module, str]]) -> Places:
    """Every (module, name) of the pruned ones, with all names of those that are tied."""
    expected = "a model, or (module, name) pairs as select(model) lists them"
    given: Places = []
    if isinstance(parameters, nn.Module):
        modules = dict(parameters.named_modules())
        given = [(modules[path], name) for path, name, _ in named_hooks(parameters)]
    elif isinstance(parameters, Iterable):
        for position, pair in enumerate(parameters):
            given.append(checked_pair(pair, f"parameters[{position}]", expected))
    else:
        raise TypeError(f"parameters is a {type(parameters).__name__}; expected {expected}.")
    places: dict[tuple[int, str], tuple[nn.Module, str]] = {}
    reader = ShardReader()
    for place in given:
        present = find_hook(*place)
        if present is None:
            continue
        managed = reader.managed(*place)
        owners = [] if managed is None else managed.owners
        tied = [(owner, name_without_orig(name)) for owner, name in owners]
        for module, name in (place, *present.tied_places, *tied):
            places[id(unwrap(module)), name] = unwrap(module), name
    return [place for place in places.values() if find_hook(*place) is not None]


def _check(places: Places) -> None:
    reader = ShardReader()
    for module, name in places:
        present = find_hook(module, name)
        assert present is not None
        if not present.multiplies:
            raise NotImplementedError(
                f"{type(module).__name__}.{name}: {type(present).__name__} defines apply_mask, "
                "so its mask is not a factor; expected a method that leaves apply_mask as it is."
            )
        managed = reader.managed(module, name)
        if (
            managed is not None
            and managed.has_unreduced_gradient
            and not masked_value.has_dense_gradient(module, name)
        ):
            raise RuntimeError(
                f"{type(module).__name__}.{name}: a backward without gradient synchronisation "
                "(no_sync, set_requires_gradient_sync(False)) has left gradients that are masked "
                "when they are reduced; expected dense_gradients around all backward passes of a "
                "step, or after one that reduces."
            )


@torch.no_grad()
def _mask_gradients(places: Places) -> None:
    """Mask ``.grad`` in place, where there is one. One that is not reduced yet FSDP masks later."""
    reader = ShardReader()
    done = set()
    for module, name in places:
        if find_hook(module, name) is None:  # removed inside the context
            continue
        shard = reader.read(module, name, f"{type(module).__name__}.{name}")
        gradient = available_gradient(shard)
        if shard.key in done or gradient is None or shard.mask is None:
            continue
        done.add(shard.key)
        if shard.mask.dtype == torch.bool:
            write_product(gradient, shard.mask.to(gradient.device), out=gradient)
        else:
            gradient.mul_(shard.mask.to(gradient.device, gradient.dtype))
