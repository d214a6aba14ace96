"""The pruning methods of torch.nn.utils.prune: for single elements, whole channels, given masks."""

from __future__ import annotations

import math
import numbers
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from distprune.base.amount import Amount, checked_count, resolve_count, validate_amount
from distprune.base.pruned_form import local_tensor, mask_key
from distprune.call.request import Decision, LocalMasks, PruningCall
from distprune.masks.checks import check_binary
from distprune.masks.hook import find_hook
from distprune.methods import ranking
from distprune.methods.base import BasePruningMethod, PruningContainer, joined
from distprune.methods.channels import (
    ChannelRows,
    ChannelSlice,
    count_live_of_channels,
    cut_channels,
    joint_norms,
    masks_without,
)
from distprune.ranks.collectives import Communicator
from distprune.ranks.process_groups import is_distributed
from distprune.selection.keys import Order
from distprune.shards.reader import local_part, whole_checksum
from distprune.shards.shard import Shard

# Since 2.14 torch's pruning computes norms with torch.linalg: no n=None, and "fro" for any shape.
USES_VECTOR_NORM = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 14)


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
        if type(self).compute_mask is not RandomUnstructured.compute_mask or is_torch:
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
        if type(self).compute_mask is not _Ranked.compute_mask:
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

    For scores whose sign counts, such as those of movement pruning
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


class RandomStructured(BasePruningMethod):
    """Prunes whole channels at random.

    Args:
        amount: a fraction of the channels in [0, 1], or a count.
        dim: the channels' dimension.
    """

    PRUNING_TYPE = "structured"
    READS_VALUES = False

    def __init__(self, amount: Amount, dim: int = -1) -> None:
        validate_amount(amount)
        self.amount = amount
        self.dim = dim

    def compute_mask(self, t: Tensor, default_mask: Tensor) -> Tensor:
        """Zero the channels of ``k`` smallest random numbers."""
        channel_dim = checked_dim(t, self.dim)
        k = checked_count(self.amount, t.shape[channel_dim])
        if not k:
            return default_mask
        return _without_lowest(t, channel_dim, torch.rand(t.shape[channel_dim]), k, default_mask)

    def decide(self, call: PruningCall) -> Decision:
        if type(self).compute_mask is not RandomStructured.compute_mask:
            return super().decide(call)
        part = ChannelSlice(0, call.shards[0], checked_dim(call.shards[0], self.dim))
        num_live = count_live_of_channels([part], _sizes(part), call.communicator)
        live = num_live > 0
        num_live_channels = int(live.sum())
        scores = torch.zeros(part.num_channels, dtype=torch.float32)
        if resolve_count(self.amount, num_live_channels):
            # Every rank draws from torch's CPU generator as one process does; the leader's are
            # taken.
            drawn = call.communicator.leader_of(
                num_live_channels, lambda: torch.rand(num_live_channels).view(torch.int32).long()
            )
            scores[live] = drawn.int().view(torch.float32)
        return _without_lowest_of(call, part, scores, num_live, self.amount)

    @classmethod
    def apply(  # type: ignore[override]
        cls, module: nn.Module, name: str, amount: Amount, dim: int = -1
    ) -> BasePruningMethod:
        """Prune channels of ``module.<name>`` at random; see :meth:`BasePruningMethod.apply`."""
        return super().apply(module, name, amount=amount, dim=dim)


class LnStructured(BasePruningMethod):
    """Prunes whole channels of smallest L_n norm; equal norms by ascending index.

    Norms are summed exactly, so that no order of summation, and no sharding, can
    change which channels go; they are rounded to the dtype of the scores.

    Args:
        amount: a fraction of the channels in [0, 1], or a count.
        n: order of the norm, as in ``torch.norm``. None is 2 before torch 2.14, and a TypeError
            since, as in torch's own pruning.
        dim: the channels' dimension.
    """

    PRUNING_TYPE = "structured"

    def __init__(self, amount: Amount, n: Any, dim: int = -1) -> None:
        validate_amount(amount)
        self.amount = amount
        self.n = n
        self.dim = dim

    def compute_mask(self, t: Tensor, default_mask: Tensor) -> Tensor:
        """Zero the ``k`` channels of smallest norm."""
        channel_dim = checked_dim(t, self.dim)
        k = checked_count(self.amount, t.shape[channel_dim])
        norms = compute_norm(t, self.n, channel_dim)
        if not k:
            return default_mask
        return _without_lowest(t, channel_dim, norms, k, default_mask)

    def decide(self, call: PruningCall) -> Decision:
        if type(self).compute_mask is not LnStructured.compute_mask:
            return super().decide(call)
        shard = call.shards[0]
        part = ChannelSlice(0, shard, checked_dim(shard, self.dim))
        order = norm_order(self.n)
        if order is None:
            raise NotImplementedError(
                f"{shard.name}: n={self.n!r} is not supported on a sharded parameter; expected a "
                "number, +-inf included."
            )
        dtype = call.score_or_value(0).dtype
        if not dtype.is_floating_point:
            raise NotImplementedError(
                f"{shard.name}: scores of dtype {dtype}; expected floating point."
            )

        def read() -> ChannelRows:
            given = call.scores[0] is not None
            scores = call.score_or_value(0) if given else shard.live_values()
            return part.counted_rows(scores.detach())

        rows = call.communicator.run(read)
        sizes = _sizes(part)
        norms = joint_norms([lambda: rows], order, sizes, call.communicator).to(dtype)
        if norms.isnan().any():
            raise ValueError(
                f"{shard.name}: the scores of channels "
                f"{norms.isnan().nonzero().squeeze(1).tolist()} along dim {self.dim} contain NaN; "
                "expected numbers."
            )
        num_live = count_live_of_channels([part], sizes, call.communicator)
        return _without_lowest_of(call, part, norms, num_live, self.amount)

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


def _sizes(part: ChannelSlice) -> Tensor:
    return torch.full((part.num_channels,), part.channel_size)


def _without_lowest_of(
    call: PruningCall, part: ChannelSlice, scores: Tensor, num_live: Tensor, amount: Amount
) -> Decision:
    """Prune the channels of the lowest scores among those of which something is left."""
    cut = cut_channels(
        scores.double().numpy(), num_live.numpy(), [part.num_channels], amount, "channels", None
    )
    return Decision(lambda: masks_without(call, [part], torch.from_numpy(cut.dropped)))


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
    """The order of a norm that is a sum over elements; None if ``n`` names a norm of matrices.

    Raises:
        TypeError: ``n`` is None where torch's own pruning refuses it; before, None meant 2.
    """
    if n is None:
        if USES_VECTOR_NORM:
            raise TypeError(
                f"n=None: torch {torch.__version__} takes no None for the order of a norm; "
                "expected a number. Pass n=2, which None meant before torch 2.14."
            )
        return 2.0
    return float(n) if isinstance(n, numbers.Real) and not math.isnan(n) else None


def compute_norm(t: Tensor, n: Any, dim: int) -> Tensor:
    """The L_n norm of every channel of a whole tensor, in its dtype, [t.shape[dim]].

    Orders that are not a number mean what they mean in the installed torch's pruning.

    Raises:
        TypeError: ``n`` is None and torch is 2.14 or later, or ``n`` is of no known kind.
    """
    channel_dim = dim % t.ndim
    order = norm_order(n)
    if order is not None and t.is_floating_point():
        num_channels = t.shape[channel_dim]
        rows = ChannelRows(t.detach().movedim(channel_dim, 0), torch.arange(num_channels))
        sizes = torch.full((num_channels,), t.numel() // max(num_channels, 1))
        exact_norms = joint_norms([lambda: rows], order, sizes, Communicator(()))
        return exact_norms.to(device=t.device, dtype=t.dtype)
    dims = [other for other in range(t.ndim) if other != channel_dim]
    norms: Tensor
    if not USES_VECTOR_NORM:
        norms = torch.norm(t, p=n, dim=dims)
    elif n == "nuc" or (n == "fro" and len(dims) == 2):
        matrix_dims = dims if len(dims) == 2 else (-2, -1)
        norms = torch.linalg.matrix_norm(t, ord=n, dim=matrix_dims)
    else:
        norms = torch.linalg.vector_norm(t, ord=2 if n == "fro" else n, dim=dims)
    return norms


def _without_lowest(
    t: Tensor, channel_dim: int, scores: Tensor, k: int, default_mask: Tensor
) -> Tensor:
    """A mask without the ``k`` channels of the lowest scores; NaN rank last, as in torch."""
    keep = torch.ones(scores.shape, dtype=torch.bool, device=scores.device)
    ranking.zero_lowest(keep, scores, k, Order.MAGNITUDE)
    mask = torch.zeros_like(t)
    where: list[Any] = [slice(None)] * t.dim()
    where[channel_dim] = keep.to(t.device)
    mask[tuple(where)] = 1
    return mask.mul_(default_mask.to(dtype=mask.dtype))
