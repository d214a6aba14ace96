"""Methods that change the masks while a model trains: they drop elements, and let others grow.

They are a few lines on :func:`distprune.global_mask` and :func:`distprune.set_masks`; others are
written the same way, as ``examples/projections.py`` shows for AC/DC, ADMM and a proximal method.
What grows by its gradient needs :func:`distprune.dense_gradients`, which is here, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from distprune.api.chosen_masks import get_masks, set_masks
from distprune.api.global_mask import global_mask
from distprune.base.memory import zero_pruned
from distprune.base.naming import Pair, checked_pair, label_of, unwrap
from distprune.base.pruned_form import local_tensor
from distprune.call.report import PruningReport
from distprune.call.request import ParameterArguments
from distprune.call.run import count_live
from distprune.masks.hook import check_hook, find_hook, pruned_parameters
from distprune.ranks.collectives import world
from distprune.shards.reader import ShardReader, available_gradient, local_gradient
from distprune.wrappers import masked_value

__all__ = ["cosine_fraction", "rigl_step", "set_step"]


def rigl_step(
    parameters: Iterable[Pair],
    fraction: float,
    *,
    optimizer: Any = None,
    group: ProcessGroup | None = None,
) -> PruningReport:
    """Update masks as RigL does, over all ranks. Collective.

    Of each parameter the smallest unpruned weights are dropped, and as many elements that are
    pruned then grow: those of the largest gradients, with weight 0 (an element that was just
    dropped and grows again keeps its weight). Call it every hundred steps or so, in place of
    ``optimizer.step()``, inside :func:`dense_gradients`, after the last backward of the step::

        with prune.dense_gradients(model):
            loss(model, batch).backward()
            if step % 100 == 0:
                fraction = dynamic.cosine_fraction(step, last_step)
                dynamic.rigl_step(parameters, fraction, optimizer=optimizer)
        if step % 100:
            optimizer.step()
        optimizer.zero_grad()

    Args:
        parameters: (module, name) pairs, as ``select`` lists them: pruned ones (by an "erk" budget
            and ``RandomUnstructured``, say); on any wrapper.
        fraction: the share of each parameter's unpruned elements to drop, in [0, 1].
        optimizer, group: as for :func:`set_masks`.

    Returns:
        A report with the numbers of dropped and grown elements; the same on every rank. Each
        parameter has as many unpruned elements as before.

    Raises:
        RuntimeError: outside of ``dense_gradients``, where pruned elements have no gradients, or
            without gradients. On every rank; nothing has changed then.
        TypeError, ValueError, NotImplementedError: as :func:`global_mask` and :func:`set_masks`.

    Cost: two reads of weights or gradients and of masks, and three writes of masks; about 25
    all-reduces, which all parameters share: about 150 KB per parameter, whatever its size. Memory
    for 4 bytes per element, for a moment.

    Source: Evci et al., arXiv 1911.11134.
    """
    return _drop_and_grow(parameters, fraction, _gradients, optimizer, group)


def set_step(
    parameters: Iterable[Pair],
    fraction: float,
    *,
    optimizer: Any = None,
    group: ProcessGroup | None = None,
) -> PruningReport:
    """Update masks as SET does, over all ranks. Collective.

    It is :func:`rigl_step` with growth at random among the pruned elements of each parameter.
    The random numbers come from a seed that is drawn from torch's default generator on the leading
    rank, and from the places of the elements: the masks do not depend on the sharding. Call it
    after ``optimizer.step()``; it needs no gradients.

    Source: Mocanu et al., arXiv 1707.04780.
    """
    return _drop_and_grow(parameters, fraction, lambda pairs: "random", optimizer, group)


def cosine_fraction(step: int, last_step: int, first: float = 0.3) -> float:
    """Which fraction to drop at a step: it falls from ``first`` to 0, along a cosine.

    Args:
        step: the step of the training; from ``last_step`` on the fraction is 0.
        last_step: at which the masks stop to change; RigL takes three quarters of all steps.
        first: the fraction at step 0.
    """
    if step >= last_step:
        return 0.0
    return first / 2 * (1 + math.cos(math.pi * step / last_step))


def _drop_and_grow(
    parameters: Iterable[Pair],
    fraction: float,
    growth: Callable[[list[Pair]], Any],
    optimizer: Any,
    group: ProcessGroup | None,
) -> PruningReport:
    pairs: list[Pair] = []

    def arguments() -> ParameterArguments:
        pairs.extend(parameters)
        if not 0 <= fraction <= 1:
            raise ValueError(f"fraction={fraction!r}; expected a number in [0, 1].")
        return ParameterArguments(parameters=pairs, facts=[("fraction", repr(fraction))])

    _, num_live = count_live(arguments, world(group))
    masks, scores = world(group).run(lambda: (get_masks(pairs), growth(pairs)))
    num_dropped = [round(fraction * live) for live in num_live]
    num_kept = [live - dropped for live, dropped in zip(num_live, num_dropped, strict=True)]
    with torch.no_grad():
        kept = global_mask(pairs, num_kept, candidates=masks, group=group).masks
        free = [local_tensor(mask).logical_not_() for mask in kept]  # in place: what may grow
        grown = global_mask(pairs, num_dropped, scores=scores, candidates=kept, group=group).masks
        for mask, others in zip(grown, free, strict=True):
            local_tensor(mask).logical_or_(others.logical_not_())
    return set_masks(pairs, grown, optimizer=optimizer, group=group)


def _gradients(pairs: list[Pair]) -> list[Tensor]:
    """Local: the dense gradient of every parameter, laid out like it."""
    reader, gradients = ShardReader(), []
    for position, pair in enumerate(pairs):
        place, label = (unwrap(pair[0]), pair[1]), label_of(pair, position)
        if find_hook(*place) is not None and not masked_value.has_dense_gradient(*place):
            raise RuntimeError(
                f"{label}: the gradients of its pruned elements are masked; expected the call "
                "inside dense_gradients, after the backward."
            )
        shard = reader.read(*place, label)
        gradients.append(shard.as_parameter_layout(local_gradient(shard)))
    return gradients


@contextmanager
def dense_gradients(parameters: nn.Module | Iterable[Pair]) -> Iterator[None]:
    """Let ``.grad`` of pruned parameters have the gradients of pruned elements, too.

    Inside, the forward uses the masked weights, bit for bit, as outside. The backward gives the
    parameter's ``.grad`` (that of its shard) the gradient of the loss with respect to the masked
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
    A model that ``torch.compile`` compiled is compiled once more. If it is not sharded, a backward
    after leaving whose forward was inside adds dense gradients: leave after the backward.

    Args:
        parameters: a model, for all its pruned parameters; or (module, name) pairs, as ``select``
            lists them. Those that are not pruned are left as they are: their gradients are dense.

    Raises:
        TypeError: what is no (module, name) pair.
        RuntimeError: under FSDP, a backward without synchronisation before the context has left
            gradients that are not reduced yet: masking them later would be too late.
        NotImplementedError: a method with an ``apply_mask`` of its own. Nothing has changed then.

    Source: Bengio et al., arXiv 1308.3432 (the estimator); RigL, arXiv 1911.11134, and movement
    pruning, arXiv 2005.07683, need such gradients.

    Cost: no memory, no communication; on leaving, one pass over the gradients.
    """
    places = _pruned_places(parameters)
    for place in places:
        masked_value.enter_dense(*place)
    try:
        yield
    finally:
        for place in places:
            masked_value.leave_dense(*place)
        _mask_gradients([place for place in places if not masked_value.has_dense_gradient(*place)])


def _pruned_places(parameters: nn.Module | Iterable[Pair]) -> list[Pair]:
    """Every (module, name) of the pruned ones, with all names of those that are tied.

    Raises:
        NotImplementedError, RuntimeError: gradients that cannot be dense, or are masked already.
    """
    if isinstance(parameters, nn.Module):
        given = [(module, hook._tensor_name) for _, module, hook in pruned_parameters(parameters)]
    else:
        given = [checked_pair(pair, f"parameters[{i}]") for i, pair in enumerate(parameters)]
    reader = ShardReader()
    places: dict[tuple[int, str], Pair] = {}  # by id: modules need not be hashable
    for module, name in given:
        hook, managed = find_hook(module, name), reader.managed(module, name)
        if hook is None:
            continue
        label = f"{type(module).__name__}.{name}"
        check_hook(hook, label)
        has_masked = managed is not None and managed.has_unreduced_gradient
        if has_masked and not masked_value.has_dense_gradient(module, name):
            raise RuntimeError(
                f"{label}: a backward without gradient synchronisation (no_sync) left gradients "
                "that are masked when they are reduced; expected all of a step in dense_gradients."
            )
        owners = () if managed is None else managed.owners
        for other, key in ((module, name), *hook.tied_places, *owners):
            place = unwrap(other), key
            if find_hook(*place) is not None:
                places[id(place[0]), key] = place
    return list(places.values())


@torch.no_grad()
def _mask_gradients(places: Iterable[Pair]) -> None:
    """Mask ``.grad`` in place, where there is one. One that is not reduced yet FSDP masks later."""
    reader, done = ShardReader(), set()
    for module, name in places:
        if find_hook(module, name) is None:  # removed inside the context
            continue
        shard = reader.read(module, name, f"{type(module).__name__}.{name}")
        gradient, mask = available_gradient(shard), shard.mask
        if shard.key in done or gradient is None or mask is None:
            continue
        done.add(shard.key)
        if mask.dtype == torch.bool:
            zero_pruned(gradient, mask)
        else:
            gradient.mul_(mask.to(gradient.device, gradient.dtype))
