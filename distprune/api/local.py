"""The functions of torch.nn.utils.prune for one parameter, plain or sharded."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import Tensor, nn

from distprune.base.amount import Amount
from distprune.base.naming import unwrap
from distprune.masks.hook import find_hook, hooks_on, unregister
from distprune.methods import base, channels

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def identity(module: ModuleT, name: str) -> ModuleT:
    """Give ``module.<name>`` a mask of ones, so that it is in the pruned form.

    Args:
        module: owns the parameter; changed in place.
        name: the parameter's name.

    Returns:
        The module.
    """
    base.Identity.apply(module, name)
    return module


def random_unstructured(module: ModuleT, name: str, amount: Amount) -> ModuleT:
    """Prune elements of ``module.<name>`` at random.

    Collective over the parameter's mesh if it is sharded; then the mask is the
    same on any sharding, and the seed comes from the leading rank's generator.

    Args:
        module: owns the parameter; changed in place.
        name: the parameter's name.
        amount: a fraction of what is unpruned in [0, 1], or a count.

    Returns:
        The module.
    """
    base.RandomUnstructured.apply(module, name, amount)
    return module


def l1_unstructured(
    module: ModuleT, name: str, amount: Amount, importance_scores: Tensor | None = None
) -> ModuleT:
    """Prune the elements of ``module.<name>`` that are smallest in magnitude.

    Exactly as many as asked for; among equal ones the lower index goes first.
    Collective over the parameter's mesh if it is sharded.

    Args:
        module: owns the parameter; changed in place.
        name: the parameter's name.
        amount: a fraction of what is unpruned in [0, 1], or a count.
        importance_scores: rank by |scores| instead: the parameter's shape; for a
            sharded one whole, or a DTensor laid out like it.

    Returns:
        The module.
    """
    base.L1Unstructured.apply(module, name, amount=amount, importance_scores=importance_scores)
    return module


def random_structured(module: ModuleT, name: str, amount: Amount, dim: int) -> ModuleT:
    """Prune whole channels of ``module.<name>`` at random.

    Collective over the parameter's mesh if it is sharded; the mask is that of one
    process with the leading rank's generator.

    Args:
        module: owns the parameter; changed in place.
        name: the parameter's name.
        amount: a fraction of the channels that are left in [0, 1], or a count.
        dim: the channels' dimension.

    Returns:
        The module.
    """
    channels.RandomStructured.apply(module, name, amount, dim)
    return module


def ln_structured(
    module: ModuleT,
    name: str,
    amount: Amount,
    n: Any,
    dim: int,
    importance_scores: Tensor | None = None,
) -> ModuleT:
    """Prune the channels of ``module.<name>`` that have the smallest L_n norm.

    Collective over the parameter's mesh if it is sharded: norms are reduced over
    the shards of each channel, exactly.

    Args:
        module: owns the parameter; changed in place.
        name: the parameter's name.
        amount: a fraction of the channels that are left in [0, 1], or a count.
        n: order of the norm, as in ``torch.norm``; 1, 2 or inf if the parameter is sharded.
        dim: the channels' dimension.
        importance_scores: take norms of these instead: the parameter's shape; for a
            sharded one whole, or a DTensor laid out like it.

    Returns:
        The module.
    """
    channels.LnStructured.apply(module, name, amount, n, dim, importance_scores=importance_scores)
    return module


def custom_from_mask(module: ModuleT, name: str, mask: Tensor) -> ModuleT:
    """Prune ``module.<name>`` where a mask is 0.

    Args:
        module: owns the parameter; changed in place.
        name: the parameter's name.
        mask: the parameter's shape, 1 = keep. For a sharded parameter whole, and
            equal on all ranks, or a DTensor laid out like it. Other values than 0 and 1 are
            multiplied in, as in torch, if the parameter is not sharded.

    Returns:
        The module.

    Raises:
        ValueError: another value than 0 and 1 for a sharded parameter; on every rank, and
            nothing has changed then.
    """
    base.CustomFromMask.apply(module, name, mask)
    return module


def remove(module: ModuleT, name: str) -> ModuleT:
    """Make the pruning of ``module.<name>`` final: an ordinary parameter with zeros in it.

    Local on every rank. The parameter keeps its identity, so optimizers go on. If it is tied,
    its zeros are those of all its names from then on, as in torch. Also as in torch, a plain one
    gets other memory, so that tensors taken before keep their values; shards have their zeros.

    Args:
        module: owns the parameter; changed in place.
        name: the parameter's name.

    Returns:
        The module.

    Raises:
        ValueError: the parameter is not pruned; or it was pruned as one with its other names, and
            has another mask there by now. Nothing has changed then.
        RuntimeError: the mask was deleted; or the parameter is sharded, and a forward or a
            backward of it is running.
    """
    owner = unwrap(module)
    hook: Any = find_hook(owner, name)
    if hook is None:
        raise ValueError(
            f"Parameter '{name}' of module {module} has to be pruned before pruning can be removed"
        )
    hook.remove(owner)
    unregister(owner, name)
    return module


def is_pruned(module: nn.Module) -> bool:
    """Whether a parameter of the module, or of a module below it, is pruned."""
    return any(hooks_on(submodule) for submodule in module.modules())
