"""The pruning methods of torch.nn.utils.prune: for single elements, whole channels, given masks."""

from __future__ import annotations

import math
import numbers
from abc import abstractmethod
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from distprune.base.amount import Amount, checked_count, resolve_count, validate_amount
from distprune.base.pruned_form import local_tensor, mask_key
from distprune.call.request import Decision, Fact, LocalMasks, PruningCall, Segments
from distprune.masks.checks import check_binary
from distprune.masks.hook import find_hook
from distprune.methods import ranking
from distprune.methods.base import BasePruningMethod, PruningContainer, hook_with
from distprune.methods.channels import (
    ChannelSlice,
    Flags,
    Floats,
    channel_sizes,
    joint_norms,
    live_channels,
    prune_lowest,
)
from distprune.ranking.scores import Order
from distprune.ranks.collectives import Communicator, is_distributed
from distprune.shards.reader import local_part, whole_checksum
from distprune.shards.shard import Shard


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


class _Ranked(BasePruningMethod):
    """What methods have in common that prune the elements that come first in an order.

    Attributes:
        RANKING: how elements are ordered, within one parameter and across several.
        amount: a fraction of what is unpruned in [0, 1], or a count.
    """

    PRUNING_TYPE = "unstructured"
    RANKING: ClassVar[ranking.ByScore | ranking.AtRandom]

    def __init__(self, amount: Amount) -> None:
        validate_amount(amount)
        self.amount = amount

    def compute_mask(self, t: Tensor, default_mask: Tensor) -> Tensor:
        """Zero the ``k`` elements of ``t`` that come first; NaN rank last, as in torch."""
        assert isinstance(self.RANKING, ranking.ByScore)
        return ranking.without_lowest(t, default_mask, self.amount, self.RANKING.order)

    def decide(self, call: PruningCall) -> Decision:
        return ranking.rank(call, self.amount, self.RANKING)


class L1Unstructured(_Ranked):
    """Prunes the elements of smallest magnitude; equal ones by ascending index.

    Args:
        amount: a fraction of what is unpruned in [0, 1], or a count.
    """

    IGNORES_SIGN = True
    RANKING = ranking.BY_MAGNITUDE

    @classmethod
    def apply(  # type: ignore[override]
        cls, module: nn.Module, name: str, amount: Amount, importance_scores: Tensor | None = None
    ) -> BasePruningMethod:
        """Prune ``module.<name>`` by magnitude; see :meth:`BasePruningMethod.apply`."""
        return super().apply(module, name, amount=amount, importance_scores=importance_scores)


class LowestScore(_Ranked):
    """Prunes the elements of the lowest scores, signed: -2 before -1 before 1.

    For scores whose sign counts, such as those of movement pruning
    (``L1Unstructured`` ranks |scores|). It ranks ``importance_scores`` only, never values:
    every parameter needs scores. -0.0 equals 0.0; among equal scores the lower index goes first.

    Args:
        amount: a fraction of what is unpruned in [0, 1], or a count.
    """

    RANKING = ranking.BY_SIGNED_SCORE

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


class RandomUnstructured(_Ranked):
    """Prunes elements at random.

    On unsharded parameters of one process the random numbers are torch's, from
    the same seed. On sharded parameters, or with a process group, they are a
    function of a seed, drawn from torch's generator on the leading rank, and of
    the element's global index: the same mask on any sharding.

    Args:
        amount: a fraction of what is unpruned in [0, 1], or a count.
    """

    READS_VALUES = False
    RANKING = ranking.AT_RANDOM

    def compute_mask(self, t: Tensor, default_mask: Tensor) -> Tensor:
        """Zero the elements of ``k`` largest random numbers."""
        return ranking.without_lowest(
            t, default_mask, self.amount, Order.ASCENDING, lambda t: -torch.rand_like(t)
        )

    def decide(self, call: PruningCall) -> Decision:
        # Torch's own numbers go with torch's own arguments.
        if call.segments == Segments() and call.is_local and not is_distributed():
            return BasePruningMethod.decide(self, call)
        return super().decide(call)

    @classmethod
    def apply(cls, module: nn.Module, name: str, amount: Amount) -> BasePruningMethod:  # type: ignore[override]
        """Prune ``module.<name>`` at random; see :meth:`BasePruningMethod.apply`."""
        return super().apply(module, name, amount=amount)


class _Structured(BasePruningMethod):
    """What methods have in common that prune the channels of the lowest scores.

    Attributes:
        amount: a fraction of the channels in [0, 1], or a count.
        dim: the channels' dimension.
    """

    PRUNING_TYPE = "structured"

    def __init__(self, amount: Amount, dim: int) -> None:
        validate_amount(amount)
        self.amount = amount
        self.dim = dim

    def compute_mask(self, t: Tensor, default_mask: Tensor) -> Tensor:
        """Zero the ``k`` channels of the lowest scores; NaN rank last, as in torch."""
        dim = checked_dim(t, self.dim)
        size = t.shape[dim]
        k = checked_count(self.amount, size)
        if not k:
            return default_mask
        scores = self._whole_scores(t, dim)
        keep = torch.ones(size, dtype=torch.bool, device=scores.device)
        ranking.zero_lowest(keep, scores, k, Order.MAGNITUDE)
        shape = [-1 if other == dim else 1 for other in range(t.dim())]
        return (keep.to(t.device).view(shape) * default_mask).to(t.dtype)

    def decide(self, call: PruningCall) -> Decision:
        part = ChannelSlice(call.shards[0], checked_dim(call.shards[0], self.dim))
        sizes = channel_sizes([[part]])
        live = live_channels([part], sizes, call.communicator)
        scores = self._scores(call, part, sizes, live)
        return prune_lowest(call, [part], scores, live, self.amount)[0]

    @abstractmethod
    def _whole_scores(self, t: Tensor, dim: int) -> Tensor:
        """The scores of the channels of a whole tensor."""

    @abstractmethod
    def _scores(self, call: PruningCall, part: ChannelSlice, sizes: Tensor, live: Flags) -> Floats:
        """The scores of all channels, the same on every rank. Collective."""


class RandomStructured(_Structured):
    """Prunes whole channels at random.

    Args:
        amount: a fraction of the channels in [0, 1], or a count.
        dim: the channels' dimension.
    """

    READS_VALUES = False

    def __init__(self, amount: Amount, dim: int = -1) -> None:
        super().__init__(amount, dim)

    def _whole_scores(self, t: Tensor, dim: int) -> Tensor:
        return torch.rand(t.shape[dim])

    def _scores(self, call: PruningCall, part: ChannelSlice, sizes: Tensor, live: Flags) -> Floats:
        scores, num_live = np.zeros(part.num_channels), int(live.sum())
        if resolve_count(self.amount, num_live):
            # All ranks draw from torch's CPU generator, as one process does; the leader's count.
            drawn = call.communicator.leader_of(
                num_live, lambda: torch.rand(num_live).view(torch.int32).long()
            )
            scores[live] = drawn.int().view(torch.float32).numpy()
        return scores

    @classmethod
    def apply(  # type: ignore[override]
        cls, module: nn.Module, name: str, amount: Amount, dim: int = -1
    ) -> BasePruningMethod:
        """Prune channels of ``module.<name>`` at random; see :meth:`BasePruningMethod.apply`."""
        return super().apply(module, name, amount=amount, dim=dim)


class LnStructured(_Structured):
    """Prunes whole channels of smallest L_n norm; equal norms by ascending index.

    Norms are summed exactly, so that no order of summation, and no sharding, can
    change which channels go; they are rounded to the dtype of the scores.

    Args:
        amount: a fraction of the channels in [0, 1], or a count.
        n: order of the norm, as in ``torch.norm``; None is 2.
        dim: the channels' dimension.
    """

    def __init__(self, amount: Amount, n: Any, dim: int = -1) -> None:
        super().__init__(amount, dim)
        self.n = n

    def _whole_scores(self, t: Tensor, dim: int) -> Tensor:
        return compute_norm(t, self.n, dim)

    def _scores(self, call: PruningCall, part: ChannelSlice, sizes: Tensor, live: Flags) -> Floats:
        order, values, label = norm_order(self.n), call.score_or_value(0), part.shard.name
        if order is None or not values.dtype.is_floating_point:
            raise NotImplementedError(
                f"{label}: n={self.n!r} of {values.dtype} is not supported on a sharded "
                "parameter; expected 1, 2 or inf, and scores of floating point."
            )
        mask = part.shard.mask if part.shard.scores is None else None
        rows = partial(part.counted_rows, lambda: values, mask)
        norms = joint_norms([rows], order, sizes, call.communicator).to(values.dtype)
        wrong = norms.isnan().nonzero().view(-1).tolist()
        if wrong:
            raise ValueError(
                f"{label}: the scores of channels {wrong} along dim {self.dim} contain NaN; "
                "expected numbers."
            )
        return norms.double().numpy()

    @classmethod
    def apply(  # type: ignore[override]
        cls,
        module: nn.Module,
        name: str,
        amount: Amount,
        n: Any,
        dim: int,
        importance_scores: Tensor | None = None,
    ) -> BasePruningMethod:
        """Prune channels of ``module.<name>`` by norm; see :meth:`BasePruningMethod.apply`."""
        return super().apply(
            module, name, amount=amount, n=n, dim=dim, importance_scores=importance_scores
        )


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
        # None: a global pruning, or set_masks, chose it, and the module's buffer is the only copy.
        self._mask = mask

    @property
    def mask(self) -> Tensor:
        """The given mask; after a global pruning, the mask that is in force on the module."""
        if self._mask is not None:
            return self._mask
        module = None if self._module_ref is None else self._module_ref()
        if module is None:
            raise RuntimeError("the module that held this mask is gone.")
        mask = module._buffers[mask_key(self._tensor_name)]
        assert mask is not None
        return mask

    @classmethod
    def describe_arguments(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Fact]:
        """Not the mask: a rank may give its part only. ``decide`` compares whole ones."""
        return super().describe_arguments((), {})

    def compute_mask(self, t: Tensor, default_mask: Tensor) -> Tensor:
        """The product of both masks."""
        assert default_mask.shape == self.mask.shape, (
            f"mask has shape {tuple(self.mask.shape)}; expected {tuple(default_mask.shape)}."
        )
        return default_mask * self.mask.to(dtype=default_mask.dtype)

    def decide(self, call: PruningCall) -> Decision:
        (shard,), given = call.shards, self.mask

        def own_part() -> Tensor:
            if shard.is_sharded:
                # Torch multiplies factors in; a mask on shards only says what is kept.
                check_binary(local_tensor(given), shard.name)
            return local_part(shard.name, "mask", given, shard)

        def facts_of(_: Tensor) -> list[Fact]:
            return [(f"checksum of the mask of {shard.name}", whole_checksum(given != 0, shard))]

        part = call.communicator.run(own_part, facts_of)

        def prune(position: int, mask: Tensor) -> None:
            mask.mul_(part.to(mask.dtype))

        return Decision(lambda: call.changed_masks(prune))

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
    if type(last) is not CustomFromMask or last._mask is not None:
        last = CustomFromMask(None)
        last._tensor_name = name
    elif reuse:
        return hook  # type: ignore[return-value]
    return hook_with(module, name, last)


def checked_dim(t: Tensor | Shard, dim: int) -> int:
    """A dimension counted from the front.

    Raises:
        ValueError, TypeError, IndexError: see :func:`validate_channels` and :func:`validate_dim`.
    """
    validate_channels(t)
    validate_dim(t, dim)
    return int(dim) % len(t.shape)


def validate_channels(t: Tensor | Shard) -> None:
    """Raise ValueError if a tensor has fewer than two dimensions: its channels are elements."""
    if len(t.shape) <= 1:
        raise ValueError(
            f"structured pruning needs a tensor of at least two dimensions; got shape "
            f"{tuple(t.shape)}. Use an unstructured method for it."
        )


def validate_dim(t: Tensor | Shard, dim: int) -> None:
    """Check a dimension of a tensor.

    Raises:
        TypeError: not an int.
        IndexError: out of range at either end.
    """
    num_dims = len(t.shape)
    if not isinstance(dim, numbers.Integral):
        raise TypeError(f"dim={dim!r} is a {type(dim).__name__}; expected an int.")
    if not -num_dims <= dim < num_dims:
        raise IndexError(
            f"dim={dim} is out of range for a tensor of shape {tuple(t.shape)}; expected "
            f"{-num_dims} <= dim < {num_dims}."
        )


def norm_order(n: object) -> float | None:
    """The order of a norm that is summed exactly: 1, 2 (also for None) or inf; else None."""
    if n is None:
        return 2.0
    return float(n) if n in (1, 2, math.inf) else None  # type: ignore[arg-type]


def compute_norm(t: Tensor, n: Any, dim: int) -> Tensor:
    """The L_n norm of every channel of a whole tensor, in its dtype, [t.shape[dim]]."""
    dim %= t.ndim
    order = norm_order(n)
    if order is None or not t.is_floating_point():
        by_torch: Tensor = torch.norm(
            t, p=n, dim=[other for other in range(t.ndim) if other != dim]
        )
        return by_torch
    rows = t.detach().movedim(dim, 0), torch.arange(t.shape[dim]), None
    sizes = torch.full((t.shape[dim],), t.numel() // max(t.shape[dim], 1))
    return joint_norms([lambda: rows], order, sizes, Communicator(())).to(t.device, t.dtype)
