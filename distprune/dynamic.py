"""Methods that change the masks while a model trains: they drop elements, and let others grow.

They are a few lines on :func:`distprune.global_mask` and :func:`distprune.set_masks`; others are
written the same way, as ``examples/projections.py`` shows for AC/DC, ADMM and a proximal method.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from distprune._common.naming import Pair, label_of, unwrap
from distprune._common.process_groups import world
from distprune._common.pruned_form import local_tensor
from distprune.api.global_mask import global_mask
from distprune.api.replacing_masks import Optimizer, StateRule, get_masks, set_masks
from distprune.call.report import MaskUpdateReport
from distprune.call.request import ParameterArguments
from distprune.call.run import count_live
from distprune.masks.hook import find_hook
from distprune.shards.gradients import local_gradient
from distprune.shards.reader import ShardReader
from distprune.torch_private import masked_value

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["cosine_fraction", "rigl_step", "set_step"]


def rigl_step(
    parameters: Iterable[Pair],
    fraction: float,
    *,
    optimizer: Optimizer | None = None,
    state: StateRule = "zero",
    group: ProcessGroup | None = None,
) -> MaskUpdateReport:
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
        optimizer, state, group: as for :func:`set_masks`.

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
    return _drop_and_grow(parameters, fraction, _gradients, optimizer, state, group)


def set_step(
    parameters: Iterable[Pair],
    fraction: float,
    *,
    optimizer: Optimizer | None = None,
    state: StateRule = "zero",
    group: ProcessGroup | None = None,
) -> MaskUpdateReport:
    """Update masks as SET does, over all ranks. Collective.

    It is :func:`rigl_step` with growth at random among the pruned elements of each parameter.
    The random numbers come from a seed that is drawn from torch's default generator on the leading
    rank, and from the places of the elements: the masks do not depend on the sharding. Call it
    after ``optimizer.step()``; it needs no gradients.

    Source: Mocanu et al., arXiv 1707.04780.
    """
    return _drop_and_grow(parameters, fraction, lambda pairs: "random", optimizer, state, group)


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
    optimizer: Optimizer | None,
    state: StateRule,
    group: ProcessGroup | None,
) -> MaskUpdateReport:
    pairs: list[Pair] = []

    def arguments() -> ParameterArguments:
        pairs.extend(parameters)
        if not 0 <= fraction <= 1:
            raise ValueError(f"fraction={fraction!r}; expected a number in [0, 1].")
        return ParameterArguments(parameters=pairs, facts=[("fraction", repr(fraction))])

    counted = count_live(arguments, world(group))
    masks, scores = world(group).run(lambda: (get_masks(pairs), growth(pairs)))
    num_live = counted.num_live
    num_dropped = [round(fraction * live) for live in num_live]
    num_kept = [live - dropped for live, dropped in zip(num_live, num_dropped, strict=True)]
    with torch.no_grad():
        kept = global_mask(pairs, num_kept, candidates=masks, group=group).masks
        free = [local_tensor(mask).logical_not_() for mask in kept]  # in place: what may grow
        grown = global_mask(pairs, num_dropped, scores=scores, candidates=kept, group=group).masks
        for mask, others in zip(grown, free, strict=True):
            local_tensor(mask).logical_or_(others.logical_not_())
    return set_masks(pairs, grown, optimizer=optimizer, state=state, group=group)


def _gradients(pairs: list[Pair]) -> list[Tensor]:
    """Local: the dense gradient of every parameter, laid out like it."""
    reader, gradients = ShardReader(), []
    for position, pair in enumerate(pairs):
        module, name = unwrap(pair[0]), pair[1]
        label = label_of(pair, position)
        if find_hook(module, name) is not None and not masked_value.has_dense_gradient(
            module, name
        ):
            raise RuntimeError(
                f"{label}: the gradients of its pruned elements are masked; expected the call "
                "inside dense_gradients, after the backward."
            )
        shard = reader.read(module, name, label)
        gradient = local_gradient(shard)
        gradients.append(shard.as_parameter_layout(gradient))
    return gradients
