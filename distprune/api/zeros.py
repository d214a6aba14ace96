"""The zeros of sharded parameters: when they are written again, and when not yet."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from distprune.masks.hook import pruned_parameters
from distprune.wrappers.held import find_held, putting_off_zeros


def hold_zeros(model: nn.Module) -> None:
    """Set the pruned elements of a model's sharded parameters to zero. Local.

    Each forward, each state dict and each step of an optimizer of torch does this. Call it after
    anything else that writes weights if they are read before the next of these: the step of an
    optimizer that is not a ``torch.optim.Optimizer``, or a moving average.

    Args:
        model: wrapped or not. Plain parameters, whose masks are factors, do not change.

    Cost: a read of the masks and a write of the weights.
    """
    for _name, module, hook in pruned_parameters(model):
        held = find_held(module, hook._tensor_name)
        if held is not None:
            held.zero()


@contextmanager
def keep_pruned_values() -> Iterator[None]:
    """Keep the values under new masks of sharded parameters until the context ends.

    On a sharded parameter a mask sets what it prunes to zero at once. :func:`reconstruct` needs the
    weights before the pruning, so there the two belong into one context::

        with prune.keep_pruned_values():
            prune.global_unstructured(parameters, prune.L1Unstructured, amount=0.6)
            prune.reconstruct(parameters, grams)

    A forward, an optimizer step or a state dict inside the context sets them to zero, too. Plain
    modules keep their values in ``weight_orig`` anyway.

    Cost: no memory, no communication.
    """
    with putting_off_zeros():
        yield
