"""Pruning methods: the classes of torch.nn.utils.prune, and what they do on shards.

``compute_mask`` is the contract of torch: a whole tensor of scores in, a mask out.
``decide`` is its counterpart for sharded parameters and for global pruning. On
unsharded parameters a method behaves as in torch; on shards the result is this rank's
slice of what one process would have computed.
"""

from __future__ import annotations

import numbers
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn

from distprune import channels, ranking
from distprune.amount import Amount, resolve_count, validate_amount, validate_count
from distprune.call import Decision, PruningCall
from distprune.collectives import Communicator, is_distributed, over_mesh
from distprune.keys import Order
from distprune.masking.attach import Transaction
from distprune.masking.hook import PruningHook, find_hook
from distprune.naming import NamedParameter
from distprune.pipeline import prune_together
from distprune.sharding import ShardReader, is_sharded


class BasePruningMethod(PruningHook, ABC):
    """Base of all pruning methods, as in torch.nn.utils.prune.

    Subclasses implement :meth:`compute_mask` and set ``PRUNING_TYPE``. A subclass
    written for torch works on unsharded modules as it is. To work on sharded
    parameters it says, in ``DISTRIBUTED``, how its mask may be computed:

    - ``"elementwise"``: ``compute_mask`` is a function of each element alone (a
      threshold, say). It is called shard by shard, on 1-d chunks of unpruned scores.
    - ``"scores"``: the method ranks by scores of its own. It defines
      ``compute_scores(t)``, elementwise on 1-d chunks, and has an ``amount``; the
      lowest scores, signed, are pruned, exactly and over all ranks.
    - ``"gather"``: ``compute_mask`` has to see everything. All scores are brought
      to every rank first: 8 bytes of communication per element, and memory for
      all of them on every rank.

    Attributes:
        PRUNING_TYPE: "unstructured", "structured" or "global": see
            :class:`PruningContainer`.
        DISTRIBUTED: see above; None if the method cannot tell.
        READS_VALUES: whether the mask depends on the scores, so that replicas
            have to be equal.
    """

    PRUNING_TYPE: Literal["unstructured", "structured", "global"]
    DISTRIBUTED: Literal["elementwise", "scores", "gather"] | None = None
    READS_VALUES = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        inherits_mask = getattr(cls.compute_mask, "__isabstractmethod__", False)
        if cls.DISTRIBUTED == "scores" and inherits_mask:
            cls.compute_mask = _mask_from_scores  # type: ignore[method-assign]

    @abstractmethod
    def compute_mask(self, t: Tensor, default_mask: Tensor) -> Tensor:
        """Compute a mask for a whole tensor.

        Args:
            t: importance scores.
            default_mask: mask in force, same shape; the result keeps its zeros.

        Returns:
            A new mask, same shape, 1 = keep.
        """

    def decide(self, call: PruningCall) -> Decision:
        """Compute the masks of a call on all its ranks: see ``DISTRIBUTED``.

        Raises:
            NotImplementedError: a parameter is sharded, and the method does not say
                how its mask may be computed on shards.
        """
        if self.PRUNING_TYPE == "structured":
            raise NotImplementedError(
                f"{call.shards[0].name}: {type(self).__name__} is a structured method of your "
                "own, and the parameter is sharded. Compute the mask yourself and pass it to "
                "custom_from_mask."
            )
        if self.DISTRIBUTED == "elementwise":
            return ranking.elementwise_decision(call, self.compute_mask)
        if self.DISTRIBUTED == "scores":
            return ranking.scored_decision(call, self.amount, self.compute_scores)
        if self.DISTRIBUTED == "gather":
            return ranking.whole_decision(call, self.compute_mask, gather=not call.is_local)
        if self.DISTRIBUTED is not None:
            raise ValueError(
                f"{type(self).__name__}.DISTRIBUTED={self.DISTRIBUTED!r}; expected "
                "'elementwise', 'scores', 'gather' or None."
            )
        if call.is_local:
            return ranking.whole_decision(call, self.compute_mask, gather=False)
        raise NotImplementedError(
            f"{_first_sharded(call)} is sharded, and {type(self).__name__} does not say how its "
            "mask may be computed on shards. Set the class attribute DISTRIBUTED to one of: "
            "'elementwise' (the mask is a function of each element alone), 'scores' (define "
            "compute_scores and amount; the lowest are pruned), or 'gather' (bring all scores to "
            "every rank: memory and traffic for the whole model)."
        )

    @classmethod
    def apply(
        cls,
        module: nn.Module,
        name: str,
        *args: Any,
        importance_scores: Tensor | None = None,
        **kwargs: Any,
    ) -> BasePruningMethod:
        """Prune ``module.<name>`` and register what keeps it pruned.

        On a sharded parameter this is collective over the ranks of its mesh.

        Args:
            module: owns the parameter.
            name: of the parameter.
            args, kwargs: passed to the method's constructor.
            importance_scores: rank by these instead of the values; the
                parameter's shape (or, sharded, a DTensor laid out like it).

        Returns:
            The hook that is registered now: the method, or a container of all
            methods that were applied so far.

        Raises:
            Exception: as in torch; the module has not changed then.
        """
        if is_sharded(module, name):
            return cls._apply_sharded(module, name, args, kwargs, importance_scores)
        method = cls(*args, **kwargs)
        method._tensor_name = name
        shard = ShardReader().read(module, name, f"{type(module).__name__}.{name}")
        present = find_hook(module, name)
        scores = importance_scores
        if scores is None:
            scores = shard.parameter if present is None else shard.live_values()
        assert scores.shape == shard.shape, (
            f"importance_scores has shape {tuple(scores.shape)}; expected the parameter's shape "
            f"{tuple(shard.shape)}."
        )
        if present is None:
            default_mask = torch.ones_like(shard.parameter, requires_grad=False)
            mask = method.compute_mask(scores, default_mask=default_mask)
        else:
            default_mask = shard.mask.clone(memory_format=torch.contiguous_format)
            mask = _combined_mask(method, scores, default_mask)
        hook = _hook_with(module, name, method)
        transaction = Transaction()
        try:
            transaction.attach(module, name, hook, mask.detach(), None)
        except Exception:
            transaction.rollback()
            raise
        return hook

    @classmethod
    def _apply_sharded(
        cls,
        module: nn.Module,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        importance_scores: Tensor | None,
    ) -> BasePruningMethod:
        method = cls(*args, **kwargs)
        method._tensor_name = name
        reader = ShardReader()
        managed = reader.managed(module, name)
        parameters = module._parameters
        parameter = parameters.get(name, parameters.get(name + "_orig"))
        mesh = (managed.sharded if managed is not None else parameter).device_mesh
        scores = None if importance_scores is None else {(module, name): importance_scores}
        prune_together(
            [NamedParameter(module, name, f"{type(module).__name__}.{name}")],
            method,
            lambda owner, tensor_name: _hook_with(owner, tensor_name, method),
            over_mesh(mesh),
            scores=scores,
            facts=describe_method(cls, args, kwargs),
        )
        found = find_hook(module, name)
        assert found is not None
        return found[1]

    def prune(
        self, t: Tensor, default_mask: Tensor | None = None, importance_scores: Tensor | None = None
    ) -> Tensor:
        """A pruned copy of a tensor; no module is involved.

        Args:
            t: what to prune.
            default_mask: mask in force, same shape; ones by default.
            importance_scores: rank by these instead of ``t``.
        """
        scores = t if importance_scores is None else importance_scores
        assert scores.shape == t.shape, (
            f"importance_scores has shape {tuple(scores.shape)}; expected that of t, "
            f"{tuple(t.shape)}."
        )
        default_mask = default_mask if default_mask is not None else torch.ones_like(t)
        return t * self.compute_mask(scores, default_mask=default_mask)

    def remove(self, module: nn.Module) -> None:
        """Make the pruning final: the parameter holds the masked values under its own name.

        Local on every rank, sharded or not. Pruned elements become +0.
        """
        name = self._tensor_name
        assert name is not None, f"Module {module} has to be pruned before pruning can be removed"
        reader = ShardReader()
        with torch.no_grad():
            shard = reader.read(module, name, f"{type(module).__name__}.{name}")
            assert shard.mask is not None
            product = shard.live_values() if shard.is_sharded else self.apply_mask(module)
            # +0 wherever the mask is 0, also where -0.0, inf or NaN stood.
            final = product.masked_fill(shard.mask == 0, 0)
            Transaction().detach(module, name, final, reader.managed(module, name))


class PruningContainer(BasePruningMethod):
    """The methods that were applied to one parameter, oldest first.

    Only the last one computes a mask, on what the earlier ones left: single
    elements for an "unstructured" method, channels that are not entirely pruned for a
    "structured" one, everything for a "global" one.

    Args:
        args: pruning methods, of the same parameter.
    """

    def __init__(self, *args: BasePruningMethod) -> None:
        self._pruning_methods: tuple[BasePruningMethod, ...] = ()
        if not isinstance(args, Iterable) or not args:
            return
        self._tensor_name = args[0]._tensor_name
        for method in args:
            self.add_pruning_method(method)

    def add_pruning_method(self, method: BasePruningMethod | None) -> None:
        """Append a method.

        Raises:
            TypeError: not a pruning method.
            ValueError: a method of another parameter.
        """
        if not isinstance(method, BasePruningMethod) and method is not None:
            raise TypeError(f"{type(method)} is not a BasePruningMethod subclass")
        if method is not None and self._tensor_name != method._tensor_name:
            raise ValueError(
                "Can only add pruning methods acting on the parameter named "
                f"'{self._tensor_name}' to PruningContainer {self}. Found '{method._tensor_name}'"
            )
        self._pruning_methods += (method,)

    def bind(self, module: nn.Module) -> None:
        super().bind(module)
        for method in self._pruning_methods:
            method.bind(module)

    def __len__(self) -> int:
        return len(self._pruning_methods)

    def __iter__(self) -> Iterator[BasePruningMethod]:
        return iter(self._pruning_methods)

    def __getitem__(self, idx: Any) -> Any:
        return self._pruning_methods[idx]

    def compute_mask(self, t: Tensor, default_mask: Tensor) -> Tensor:
        """The last method's mask, on what the default mask leaves.

        Raises:
            AttributeError: a structured method without ``dim``.
            IndexError: its ``dim`` is out of range.
            ValueError: its ``PRUNING_TYPE`` is unknown.
        """
        return _combined_mask(self._pruning_methods[-1], t, default_mask)


class Identity(BasePruningMethod):
    """Prunes nothing: gives a parameter a mask of ones."""

    PRUNING_TYPE = "unstructured"
    READS_VALUES = False

    def compute_mask(self, t: Tensor, default_mask: Tensor) -> Tensor:
        """The default mask."""
        return default_mask

    def decide(self, call: PruningCall) -> Decision:
        masks = []
        for which in range(len(call.shards)):
            mask, fresh = call.start_mask(which)
            masks.append(mask.fill_(1) if fresh else mask)
        return Decision(masks, [0] * len(masks))


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
        k = _checked_count(self.amount, t.nelement())
        mask = default_mask.clone(memory_format=torch.contiguous_format)
        if k:
            ranking.zero_lowest(mask, torch.rand_like(t), k, Order.DESCENDING)
        return mask

    def decide(self, call: PruningCall) -> Decision:
        if _overrides(self, RandomUnstructured) or (call.is_local and not is_distributed()):
            return super().decide(call)
        return ranking.random_decision(call, self.amount)

    @classmethod
    def apply(cls, module: nn.Module, name: str, amount: Amount) -> BasePruningMethod:  # type: ignore[override]
        """Prune ``module.<name>`` at random; see :meth:`BasePruningMethod.apply`."""
        return super().apply(module, name, amount=amount)


class L1Unstructured(BasePruningMethod):
    """Prunes the elements of smallest magnitude; equal ones by ascending index.

    Args:
        amount: a fraction of what is unpruned in [0, 1], or a count.
    """

    PRUNING_TYPE = "unstructured"

    def __init__(self, amount: Amount) -> None:
        validate_amount(amount)
        self.amount = amount

    def compute_mask(self, t: Tensor, default_mask: Tensor) -> Tensor:
        """Zero the ``k`` elements of smallest |t|; NaN rank last, as in torch."""
        k = _checked_count(self.amount, t.nelement())
        mask = default_mask.clone(memory_format=torch.contiguous_format)
        if k:
            ranking.zero_lowest(mask, t, k, Order.MAGNITUDE)
        return mask

    def decide(self, call: PruningCall) -> Decision:
        if _overrides(self, L1Unstructured):
            return super().decide(call)
        return ranking.magnitude_decision(call, self.amount)

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
        axis = channels.checked_dim(t.shape, self.dim)
        k = _checked_count(self.amount, t.shape[axis])
        if not k:
            return default_mask
        keep = channels.drop_lowest_channels(torch.rand(t.shape[axis]), k)
        return _channel_mask(t, axis, keep, default_mask)

    def decide(self, call: PruningCall) -> Decision:
        if _overrides(self, RandomStructured):
            return super().decide(call)
        return channels.random_decision(call, self.amount, self.dim)

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
        n: order of the norm, as in ``torch.norm``.
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
        axis = channels.checked_dim(t.shape, self.dim)
        k = _checked_count(self.amount, t.shape[axis])
        norms = compute_norm(t, self.n, axis)
        if not k:
            return default_mask
        keep = channels.drop_lowest_channels(norms, k)
        return _channel_mask(t, axis, keep, default_mask)

    def decide(self, call: PruningCall) -> Decision:
        if _overrides(self, LnStructured):
            return super().decide(call)
        return channels.norm_decision(call, self.amount, self.n, self.dim)

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
            like it. A whole mask must be equal on all ranks.
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
        return module._buffers[self._tensor_name + "_mask"]

    def bind(self, module: nn.Module) -> None:
        super().bind(module)
        if self._is_in_buffer:
            self._mask = None

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        if self._mask is None and self._module_ref is not None:
            state["_mask"] = self.mask  # stored once, with the buffer
        return state

    def compute_mask(self, t: Tensor, default_mask: Tensor) -> Tensor:
        """The product of both masks."""
        assert default_mask.shape == self.mask.shape, (
            f"mask has shape {tuple(self.mask.shape)}; expected {tuple(default_mask.shape)}."
        )
        return default_mask * self.mask.to(dtype=default_mask.dtype)

    def decide(self, call: PruningCall) -> Decision:
        return ranking.given_decision(call, self.mask)

    @classmethod
    def apply(cls, module: nn.Module, name: str, mask: Tensor) -> BasePruningMethod:  # type: ignore[override]
        """Prune ``module.<name>`` by a mask; see :meth:`BasePruningMethod.apply`."""
        return super().apply(module, name, mask=mask)


def describe_method(
    cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[tuple[str, str]]:
    """What must be equal on all ranks of a method and its arguments."""
    facts = [("pruning method", f"{cls.__module__}.{cls.__qualname__}")]
    for label, value in [*((f"argument {i}", v) for i, v in enumerate(args)), *kwargs.items()]:
        facts.append((label, _describe_argument(value)))
    return facts


def chosen_hook(module: nn.Module, name: str) -> BasePruningMethod:
    """What to register for a mask that a global pruning chose."""
    method = CustomFromMask(None)
    method._tensor_name = name
    return _hook_with(module, name, method)


def compute_norm(t: Tensor, n: Any, dim: int) -> Tensor:
    """The L_n norm of every channel of a whole tensor, in its dtype, [t.shape[dim]]."""
    axis = dim % t.ndim
    if channels.is_norm_order(n) and t.is_floating_point():
        norms = channels.channel_norms(
            t,
            axis,
            2.0 if n is None else float(n),
            torch.arange(t.shape[axis]),
            t.shape[axis],
            t.numel() // max(t.shape[axis], 1),
            Communicator(()),
        )
        return norms.to(device=t.device, dtype=t.dtype)
    return torch.norm(t, p=n, dim=[other for other in range(t.ndim) if other != axis])


def _mask_from_scores(self: BasePruningMethod, t: Tensor, default_mask: Tensor) -> Tensor:
    """``compute_mask`` of a method with ``DISTRIBUTED = "scores"`` that has none of its own."""
    k = _checked_count(self.amount, t.nelement())
    mask = default_mask.clone(memory_format=torch.contiguous_format)
    if k:
        scores = self.compute_scores(t.reshape(-1)).view(t.shape)
        ranking.zero_lowest(mask, scores, k, Order.ASCENDING)
    return mask


def _combined_mask(method: BasePruningMethod, t: Tensor, mask: Tensor) -> Tensor:
    """A method's mask on what an earlier mask leaves, and zeros elsewhere; dtype of ``t``."""
    new_mask = mask.to(dtype=t.dtype, copy=True)
    kind = method.PRUNING_TYPE
    if kind == "unstructured":
        where: Any = mask == 1
    elif kind == "structured":
        if not hasattr(method, "dim"):
            raise AttributeError(
                "Pruning methods of PRUNING_TYPE 'structured' need a 'dim' attribute; "
                f"{type(method).__name__} has none."
            )
        dim = method.dim + t.dim() if method.dim < 0 else method.dim
        if not 0 <= dim < t.dim():
            raise IndexError(
                f"dim={method.dim} is out of range for a tensor of shape {tuple(t.shape)}."
            )
        where = [slice(None)] * t.dim()
        where[dim] = mask.sum(dim=[other for other in range(t.dim()) if other != dim]) != 0
        where = tuple(where)
    elif kind == "global":
        where = (slice(None),) * t.dim()
    else:
        raise ValueError(
            f"PRUNING_TYPE {kind!r} is not recognised; expected 'unstructured', 'structured' or "
            "'global'."
        )
    partial = method.compute_mask(t[where], default_mask=mask[where])
    new_mask[where] = partial.to(dtype=new_mask.dtype)
    return new_mask


def _hook_with(module: nn.Module, name: str, method: BasePruningMethod) -> BasePruningMethod:
    """The method alone, or a container of what is registered already and the method.

    A new container, so that nothing has changed if the pruning fails after all.
    """
    present = find_hook(module, name)
    if present is None:
        return method
    earlier = present[1]
    assert isinstance(earlier, BasePruningMethod)
    return PruningContainer(
        *(earlier if isinstance(earlier, PruningContainer) else (earlier,)), method
    )


def _channel_mask(t: Tensor, axis: int, keep: Tensor, default_mask: Tensor) -> Tensor:
    mask = torch.zeros_like(t)
    where: list[Any] = [slice(None)] * t.dim()
    where[axis] = keep.to(t.device)
    mask[tuple(where)] = 1
    return mask.mul_(default_mask.to(dtype=mask.dtype))


def _checked_count(amount: Amount, num_elements: int) -> int:
    k = resolve_count(amount, num_elements)
    validate_count(k, num_elements)
    return k


def _overrides(method: BasePruningMethod, cls: type[BasePruningMethod]) -> bool:
    """Whether a user's subclass replaced the mask of a built-in method."""
    return type(method).compute_mask is not cls.compute_mask


def _first_sharded(call: PruningCall) -> str:
    return next(shard.name for shard in call.shards if shard.is_sharded)


def _describe_argument(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"tensor {tuple(value.shape)} {value.dtype}"
    if isinstance(value, (bool, numbers.Number, str, type(None))):
        return repr(value)
    return type(value).__name__
