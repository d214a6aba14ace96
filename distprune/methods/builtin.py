"""The pruning methods of torch.nn.utils.prune for single elements, and for given masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from distprune._common.amount import Amount, validate_amount
from distprune._common.process_groups import is_distributed
from distprune._common.pruned_form import local_tensor, mask_key
from distprune.call.request import Decision, LocalMasks, PruningCall
from distprune.masks.checks import check_binary
from distprune.masks.hook import find_hook
from distprune.methods import ranking
from distprune.methods.base import BasePruningMethod, PruningContainer, joined
from distprune.selection.keys import Order
from distprune.shards.reader import local_part, whole_checksum


class Identity(BasePruningMethod):
    """Prunes nothing: gives a parameter a mask of ones."""

    PRUNING_TYPE = "unstructured"
    READS_VALUES = False

    def compute_mask(self, t: Tensor, default_mask: Tensor) -> Tensor:
        """The default mask."""
        return default_mask

    def decide(self, call: PruningCall) -> Decision:
        def finish() -> LocalMasks:
            masks = [call.start_mask(position) for position in range(len(call.shards))]
            return LocalMasks(masks, [0] * len(masks))

        return Decision(finish)

    @classmethod
    def apply(cls, module: nn.Module, name: str) -> BasePruningMethod:  # type: ignore[override]
        """Give ``module.<name>`` a mask of ones; see :meth:`BasePruningMethod.apply`."""
        return super().apply(module, name)


class RandomUnstructured(BasePruningMethod):
    """Prunes elements at random.

    On unsharded parameters of one process the random numbers are torch's, from
    the same seed. On sharded parameters, or with a process group, they are a
    function of a seed, drawn from torch's generator on the leading rank, and of
    the element's global index: the same mask on any sharding.

    Args:
        amount: a fraction of what is unpruned in [0, 1], or a count.
    """

    PRUNING_TYPE = "unstructured"
    READS_VALUES = False

    def __init__(self, amount: Amount) -> None:
        validate_amount(amount)
        self.amount = amount

    def compute_mask(self, t: Tensor, default_mask: Tensor) -> Tensor:
        """Zero the elements of ``k`` largest random numbers."""
        return ranking.without_lowest(
            t, default_mask, self.amount, Order.DESCENDING, torch.rand_like
        )

    def decide(self, call: PruningCall) -> Decision:
        # Torch's own numbers go with torch's own arguments.
        is_torch = not call.is_limited and call.is_local and not is_distributed()
        if type(self).compute_mask is not _BUILT_IN[RandomUnstructured] or is_torch:
            return super().decide(call)
        return ranking.rank(call, self.amount, ranking.AT_RANDOM)

    @classmethod
    def apply(cls, module: nn.Module, name: str, amount: Amount) -> BasePruningMethod:  # type: ignore[override]
        """Prune ``module.<name>`` at random; see :meth:`BasePruningMethod.apply`."""
        return super().apply(module, name, amount=amount)


class _Ranked(BasePruningMethod):
    """What methods have in common that prune the elements that come first in an order.

    Each has a constructor of its own: Python names it when an argument is missing.

    Attributes:
        RANKING: how elements are ordered, within one parameter and across several.
        amount: a fraction of what is unpruned in [0, 1], or a count.
    """

    PRUNING_TYPE = "unstructured"
    RANKING: ClassVar[ranking.ByScore]
    amount: Amount

    def compute_mask(self, t: Tensor, default_mask: Tensor) -> Tensor:
        """Zero the ``k`` elements of ``t`` that come first; NaN rank last, as in torch."""
        return ranking.without_lowest(t, default_mask, self.amount, self.RANKING.order)

    def decide(self, call: PruningCall) -> Decision:
        if type(self).compute_mask is not _BUILT_IN[_Ranked]:
            return super().decide(call)
        return ranking.rank(call, self.amount, self.RANKING)


class L1Unstructured(_Ranked):
    """Prunes the elements of smallest magnitude; equal ones by ascending index.

    Args:
        amount: a fraction of what is unpruned in [0, 1], or a count.
    """

    IGNORES_SIGN = True
    RANKING = ranking.BY_MAGNITUDE

    def __init__(self, amount: Amount) -> None:
        validate_amount(amount)
        self.amount = amount

    @classmethod
    def apply(  # type: ignore[override]
        cls,
        module: nn.Module,
        name: str,
        amount: Amount,
        importance_scores: Tensor | None = None,
    ) -> BasePruningMethod:
        """Prune ``module.<name>`` by magnitude; see :meth:`BasePruningMethod.apply`."""
        return super().apply(module, name, amount=amount, importance_scores=importance_scores)


class LowestScore(_Ranked):
    """Prunes the elements of the lowest scores, signed: -2 before -1 before 1.

    For scores whose sign counts, such as those of movement pruning and of GraSP
    (``L1Unstructured`` ranks |scores|). It ranks ``importance_scores`` only, never values:
    every parameter needs scores. -0.0 equals 0.0; among equal scores the lower index goes first.

    Args:
        amount: a fraction of what is unpruned in [0, 1], or a count.
    """

    RANKING = ranking.BY_SIGNED_SCORE

    def __init__(self, amount: Amount) -> None:
        validate_amount(amount)
        self.amount = amount

    @classmethod
    def apply(  # type: ignore[override]
        cls, module: nn.Module, name: str, amount: Amount, importance_scores: Tensor
    ) -> BasePruningMethod:
        """Prune ``module.<name>`` by signed scores; see :meth:`BasePruningMethod.apply`.

        Raises:
            TypeError: scores that are no tensor.
        """
        if not isinstance(importance_scores, Tensor):
            raise TypeError(
                f"importance_scores is a {type(importance_scores).__name__}; expected a tensor of "
                "the parameter's shape, because LowestScore never ranks values."
            )
        return super().apply(module, name, amount=amount, importance_scores=importance_scores)


class CustomFromMask(BasePruningMethod):
    """Prunes where a given mask is 0.

    Args:
        mask: the parameter's shape; on a sharded parameter also a DTensor laid out
            like it. A whole mask must be equal on all ranks. Values are 0 and 1; on a parameter
            that is not sharded others are multiplied in, as in torch.
    """

    PRUNING_TYPE = "global"
    READS_VALUES = False

    def __init__(self, mask: Tensor | None) -> None:
        # None: a global pruning chose the mask, and the module's buffer is the only copy.
        self._mask = mask
        self._is_in_buffer = mask is None

    @property
    def mask(self) -> Tensor:
        """The given mask; after a global pruning, the mask that is in force on the module."""
        if self._mask is not None:
            return self._mask
        module = self._module_ref() if self._module_ref is not None else None
        if module is None:
            raise RuntimeError("the module that held this mask is gone.")
        mask = module._buffers[mask_key(self._tensor_name)]
        assert mask is not None
        return mask

    def register_module(self, module: nn.Module) -> None:
        super().register_module(module)
        if self._is_in_buffer:
            self._mask = None

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        if self._mask is None and self._module_ref is not None:
            state["_mask"] = self.mask  # stored once, with the buffer
        return state

    @classmethod
    def describe_arguments(
        cls, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[tuple[str, str]]:
        """Not the mask: a rank may give its part only. ``decide`` compares whole ones."""
        return super().describe_arguments((), {})

    def compute_mask(self, t: Tensor, default_mask: Tensor) -> Tensor:
        """The product of both masks."""
        assert default_mask.shape == self.mask.shape, (
            f"mask has shape {tuple(self.mask.shape)}; expected {tuple(default_mask.shape)}."
        )
        return default_mask * self.mask.to(dtype=default_mask.dtype)

    def decide(self, call: PruningCall) -> Decision:
        shard = call.shards[0]

        def check() -> None:
            # Torch multiplies factors in; a mask on shards only says what is kept.
            if shard.is_sharded:
                check_binary(local_tensor(self.mask), shard.name)

        call.communicator.run(check)
        return fixed_mask_decision(call, self.mask)

    @classmethod
    def apply(cls, module: nn.Module, name: str, mask: Tensor) -> BasePruningMethod:  # type: ignore[override]
        """Prune ``module.<name>`` by a mask; see :meth:`BasePruningMethod.apply`."""
        return super().apply(module, name, mask=mask)


def hook_for_chosen_mask(module: nn.Module, name: str, *, reuse: bool = False) -> BasePruningMethod:
    """What to register for a mask that a global pruning, or a caller, chose.

    All those masks are the module's buffer, so one object stands for every global pruning of a
    parameter, however often it is in the container: a schedule's history takes no memory.

    Args:
        reuse: return the present hook if it stands for a chosen mask already, so that a mask that
            is replaced at every step leaves one entry in the container.
    """
    hook = find_hook(module, name)
    last = hook[-1] if isinstance(hook, PruningContainer) and len(hook) else hook
    if type(last) is not CustomFromMask or not last._is_in_buffer:
        last = CustomFromMask(None)
        last._tensor_name = name
    elif reuse:
        assert isinstance(hook, BasePruningMethod)
        return hook
    return last if hook is None else joined(hook, last)


# To tell whether a subclass, or an assignment to the class, replaced the mask of a method.
_BUILT_IN: dict[type[BasePruningMethod], Callable[..., Tensor]] = {
    RandomUnstructured: RandomUnstructured.compute_mask,
    _Ranked: _Ranked.compute_mask,
}


def fixed_mask_decision(call: PruningCall, whole: Tensor) -> Decision:
    """Prune one parameter where a mask is 0; values other than 0 and 1 are multiplied in."""
    shard = call.shards[0]

    def digest_of(part: Tensor) -> list[tuple[str, str]]:
        # Every rank slices its own copy of a whole mask: they have to be the same one.
        return [("checksum of the mask", whole_checksum(whole != 0, shard))]

    part = call.communicator.run(lambda: local_part(shard.name, "mask", whole, shard), digest_of)

    def prune(position: int, mask: Tensor) -> None:
        mask.mul_(part.to(mask.dtype))

    return Decision(lambda: call.changed_masks(prune))
