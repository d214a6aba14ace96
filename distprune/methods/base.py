"""Pruning methods: what one is, the container of several, and those for single elements.

``compute_mask`` is the contract of torch: a whole tensor of scores in, a mask out.
``decide`` is its counterpart for sharded parameters and for global pruning. On
unsharded parameters a method behaves as in torch; on shards the result is this rank's
slice of what one process would have computed.
"""

from __future__ import annotations

import numbers
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor, nn

from distprune.base.amount import Amount, validate_amount
from distprune.base.naming import NamedParameter, label_of, unwrap
from distprune.base.pruned_form import MASK, local_tensor
from distprune.call.request import Decision, Fact, PruningArguments, PruningCall, Segments
from distprune.call.run import prune_parameters
from distprune.masks import hook as masks
from distprune.masks.fingerprint import fingerprint_parts
from distprune.methods import ranking
from distprune.ranks.collectives import is_distributed
from distprune.shards.reader import ShardReader, local_part, whole_checksum
from distprune.shards.shard import checksums


def combined_mask(method: BasePruningMethod, t: Tensor, mask: Tensor) -> Tensor:
    """A method's mask on what an earlier mask leaves, and zeros elsewhere; dtype of ``t``."""
    where: Any = (slice(None),) * t.dim()
    if method.PRUNING_TYPE == "unstructured":
        where = mask == 1
    elif method.PRUNING_TYPE == "structured":
        # An AttributeError, a TypeError or an IndexError of a wrong ``dim``, as in torch.
        dim = range(t.dim())[method.dim]  # type: ignore[attr-defined]
        others = [other for other in range(t.dim()) if other != dim]
        where = (*where[:dim], mask.sum(dim=others) != 0)
    elif method.PRUNING_TYPE != "global":
        raise ValueError(
            f"PRUNING_TYPE {method.PRUNING_TYPE!r} is not recognised; expected 'unstructured', "
            "'structured' or 'global'."
        )
    new_mask = mask.to(dtype=t.dtype, copy=True)
    new_mask[where] = method.compute_mask(t[where], default_mask=mask[where]).to(t.dtype)
    return new_mask


def _check_shape(scores: Tensor, shape: torch.Size) -> None:
    text = f"importance_scores has shape {tuple(scores.shape)}; expected {tuple(shape)}."
    assert scores.shape == shape, text


class BasePruningMethod(masks.PruningHook, ABC):
    """Base of all pruning methods, as in torch.nn.utils.prune.

    Subclasses implement :meth:`compute_mask` and set ``PRUNING_TYPE``. A subclass
    written for torch works on unsharded modules as it is. To work on sharded
    parameters it says, in ``DISTRIBUTED``, how its mask may be computed:

    - ``"elementwise"``: ``compute_mask`` is a function of each element alone (a
      threshold, say). It is called shard by shard, on 1-d chunks of unpruned scores.
    - ``"scores"``: the method ranks by scores of its own. It defines
      ``compute_scores(t)``, elementwise on 1-d chunks, and has an ``amount``; the
      lowest scores, signed, are pruned, exactly and over all ranks.

    Attributes:
        PRUNING_TYPE: "unstructured", "structured" or "global": see
            :class:`PruningContainer`.
        DISTRIBUTED: see above; None if the method cannot tell.
        READS_VALUES: whether the mask depends on the scores, so that replicas
            have to be equal.
        IGNORES_SIGN: whether scores rank by their absolute values, so that signed ones are refused.
    """

    PRUNING_TYPE: Literal["unstructured", "structured", "global"]
    DISTRIBUTED: Literal["elementwise", "scores"] | None = None
    READS_VALUES = True
    IGNORES_SIGN = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        is_abstract = getattr(cls.compute_mask, "__isabstractmethod__", False)
        if cls.DISTRIBUTED == "scores" and is_abstract:
            cls.compute_mask = _mask_from_scores  # type: ignore[method-assign]
        elif "compute_mask" in vars(cls) and "decide" not in vars(cls):
            # The decision of a parent belongs to the mask of that parent.
            cls.decide = BasePruningMethod.decide  # type: ignore[method-assign]

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
        kind = None if self.PRUNING_TYPE == "structured" else self.DISTRIBUTED
        if kind == "elementwise":
            return elementwise_decision(call, self.compute_mask)
        if kind == "scores":
            method: Any = self  # has these two
            score = partial(ranking.computed_scores, score=method.compute_scores)
            return ranking.rank(call, method.amount, score, signed=True)
        if kind is None and call.is_local:
            return Decision(partial(self._prune_whole, call))
        name = next((s.name for s in call.shards if s.is_sharded), call.shards[0].name)
        raise NotImplementedError(
            f"{name}: {type(self).__name__} does not say how its mask may be computed on shards "
            f"(DISTRIBUTED={self.DISTRIBUTED!r}); expected the class attribute DISTRIBUTED to be "
            "'elementwise' (a function of each element) or 'scores' (define compute_scores and "
            "amount; the lowest are pruned), or, of channels, a mask for custom_from_mask."
        )

    def _prune_whole(self, call: PruningCall) -> Any:
        """Compute one mask from all unpruned scores, 1-d, in the caller's order: whole ones."""
        live = [call.start_mask(position) == 1 for position in range(len(call.shards))]
        scores = torch.cat([call.score_or_value(i)[flags] for i, flags in enumerate(live)])
        chosen = self.compute_mask(scores, torch.ones_like(scores))
        parts = torch.split(chosen, [int(flags.sum()) for flags in live])

        def prune(position: int, mask: Tensor) -> None:
            mask[live[position]] = (parts[position] != 0).to(mask.dtype)

        return call.changed_masks(prune)

    @classmethod
    def describe_arguments(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Fact]:
        """What must be equal on all ranks of the method and its arguments: (label, text) pairs."""
        facts = [("pruning method", f"{cls.__module__}.{cls.__qualname__}")]
        for label, value in [*((f"argument {i}", v) for i, v in enumerate(args)), *kwargs.items()]:
            facts.append((label, describe_argument(value)))
        return facts

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
            name: the parameter's name.
            args, kwargs: passed to the method's constructor.
            importance_scores: rank by these instead of the values; the
                parameter's shape (or, sharded, a DTensor laid out like it).

        Returns:
            The hook that is registered now: the method, or a container of all
            methods that were applied so far.

        Raises:
            Exception: as in torch; the module has not changed then.
        """
        module = unwrap(module)
        reader, label = ShardReader(), label_of((module, name))
        ranks = reader.communicator(module, name)
        if ranks is not None:

            def make_arguments() -> PruningArguments:
                method = cls(*args, **kwargs)
                method._tensor_name = name
                scores = None if importance_scores is None else {(module, name): importance_scores}
                return PruningArguments(
                    parameters=[NamedParameter(module, name, label)],
                    method=cls.__name__,  # type: ignore[arg-type]  # a property of instances
                    decide=method.decide,
                    reads_values=cls.READS_VALUES,
                    make_hook=lambda *place: hook_with(masks.find_hook(*place), method),
                    importance_scores=scores,
                    facts=cls.describe_arguments(args, kwargs),
                )

            prune_parameters(make_arguments, ranks)
            return cast(BasePruningMethod, masks.find_hook(module, name))
        present = masks.check_state(module, name)
        method = cls(*args, **kwargs)
        method._tensor_name = name
        shard = reader.read(module, name, label)
        scores = importance_scores
        if scores is None:
            scores = shard.parameter if shard.mask is None else shard.live_values()
        _check_shape(scores, shard.shape)
        if shard.mask is None:
            default_mask = torch.ones_like(shard.parameter, requires_grad=False)
            mask = method.compute_mask(scores, default_mask=default_mask).detach()
        else:
            default_mask = shard.mask.clone(memory_format=torch.contiguous_format)
            mask = combined_mask(method, scores, default_mask).detach()
        hook = hook_with(present, method)
        shard.places = ((module, name),)
        masks.commit(masks.prepare(shard, mask, lambda *_: hook))
        hook.record = fingerprint_parts([shard], [mask])[0], int((mask == 0).sum())
        return hook

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
        _check_shape(scores, t.shape)
        default_mask = default_mask if default_mask is not None else torch.ones_like(t)
        return t * self.compute_mask(scores, default_mask=default_mask)

    def remove(self, module: nn.Module) -> None:
        """Make the pruning final: the parameter holds the masked values under its own name.

        Local on every rank, sharded or not. Pruned elements become +0, unless the method has an
        ``apply_mask`` of its own: then the parameter holds what that makes of it. As in torch,
        the hook itself stays registered for the caller to delete; the function ``remove``
        does both.

        Raises:
            ValueError: the parameter is tied, and pruned differently under another name.
            RuntimeError: the mask is gone; FSDP shards the parameter, and a forward or a
                backward of it is running. Nothing has changed then.
        """
        assert self._tensor_name is not None, f"{module} has to be pruned before it can be removed"
        masks.detach(module, self, is_final=True)


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
        if args:
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
        # As in torch, None is appended too.
        self._pruning_methods += (method,)  # type: ignore[operator]

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
        return combined_mask(self._pruning_methods[-1], t, default_mask)


def hook_with(present: masks.PruningHook | None, method: BasePruningMethod) -> BasePruningMethod:
    """The method alone, or a new container of the methods that are registered and this one."""
    if present is None:
        return method
    container = PruningContainer()
    container._tensor_name = method._tensor_name
    # Not one by one: they have been checked, and may be many.
    past: Any = present if isinstance(present, PruningContainer) else (present,)
    container._pruning_methods = (*past, method)
    return container


def _mask_from_scores(self: Any, t: Tensor, default_mask: Tensor) -> Tensor:
    """``compute_mask`` of a method with ``DISTRIBUTED = "scores"`` that has none of its own."""

    def score(t: Tensor) -> Tensor:
        return self.compute_scores(t.reshape(-1)).view(t.shape)

    return ranking.without_lowest(t, default_mask, self.amount, score, signed=True)


def describe_argument(value: Any) -> str:
    """Text that must be equal on all ranks: the value, or its type if values cannot be compared.

    Whatever else differs shows in the masks: those of replicas are compared.
    """
    if isinstance(value, Tensor):
        kind = f"tensor {tuple(value.shape)} {value.dtype}"
        is_whole = type(value) is Tensor and not value.is_meta  # a DTensor is a part of it
        return f"{kind}, checksum {checksums([value])[0]}" if is_whole else kind
    if isinstance(value, (bool, numbers.Number, str, bytes, type(None))):
        return repr(value)
    parts = list(value.items()) if isinstance(value, Mapping) else value
    parts = parts.tolist() if isinstance(parts, np.ndarray) else parts
    described = map(describe_argument, parts) if isinstance(parts, (list, tuple)) else ()
    return f"{type(value).__name__} of {', '.join(described)}"


ComputeMask = Callable[[Tensor, Tensor], Tensor]

_ELEMENTWISE_CHUNK = 1 << 20


def elementwise_decision(call: PruningCall, compute_mask: ComputeMask) -> Decision:
    """Run a method whose mask is a function of each element alone, shard by shard."""

    def prune(position: int, mask: Tensor) -> None:
        shard = call.shards[position]
        flat_mask, flat_scores = shard.flat(mask), shard.flat(call.score_or_value(position))
        for start in range(0, flat_mask.numel(), _ELEMENTWISE_CHUNK):
            chunk = flat_mask[start : start + _ELEMENTWISE_CHUNK]
            live = chunk == 1
            scores = flat_scores[start : start + _ELEMENTWISE_CHUNK][live]
            chunk[live] = compute_mask(scores, torch.ones_like(scores)).to(chunk.dtype)

    return Decision(lambda: call.changed_masks(prune))


class Identity(BasePruningMethod):
    """Prunes nothing: gives a parameter a mask of ones."""

    PRUNING_TYPE = "unstructured"
    READS_VALUES = False

    def compute_mask(self, t: Tensor, default_mask: Tensor) -> Tensor:
        """The default mask."""
        return default_mask

    def decide(self, call: PruningCall) -> Decision:
        return Decision(lambda: call.changed_masks(lambda position, mask: None))

    @classmethod
    def apply(cls, module: nn.Module, name: str) -> BasePruningMethod:  # type: ignore[override]
        """Give ``module.<name>`` a mask of ones; see :meth:`BasePruningMethod.apply`."""
        return super().apply(module, name)


class _Ranked(BasePruningMethod):
    """What methods have in common that prune the elements that come first: of smallest magnitude.

    Attributes:
        amount: a fraction of what is unpruned in [0, 1], or a count.
    """

    PRUNING_TYPE = "unstructured"

    def __init__(self, amount: Amount) -> None:
        validate_amount(amount)
        self.amount = amount

    def compute_mask(self, t: Tensor, default_mask: Tensor) -> Tensor:
        """Zero the ``k`` elements of ``t`` that come first; NaN rank last, as in torch."""
        return ranking.without_lowest(t, default_mask, self.amount)

    def decide(self, call: PruningCall) -> Decision:
        return ranking.rank(call, self.amount)


class L1Unstructured(_Ranked):
    """Prunes the elements of smallest magnitude; equal ones by ascending index.

    Args:
        amount: a fraction of what is unpruned in [0, 1], or a count.
    """

    IGNORES_SIGN = True

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

    def compute_mask(self, t: Tensor, default_mask: Tensor) -> Tensor:
        """Zero the ``k`` lowest elements of ``t``; NaN rank last."""
        return ranking.without_lowest(t, default_mask, self.amount, signed=True)

    def decide(self, call: PruningCall) -> Decision:
        return ranking.rank(call, self.amount, ranking.given_scores, signed=True)

    @classmethod
    def apply(  # type: ignore[override]
        cls, module: nn.Module, name: str, amount: Amount, importance_scores: Tensor
    ) -> BasePruningMethod:
        """Prune ``module.<name>`` by signed scores; see :meth:`BasePruningMethod.apply`.

        Raises:
            TypeError: scores that are no tensor.
        """
        if not isinstance(importance_scores, Tensor):
            kind = type(importance_scores).__name__
            raise TypeError(f"importance_scores is a {kind}; LowestScore never ranks values.")
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

    def compute_mask(self, t: Tensor, default_mask: Tensor) -> Tensor:
        """Zero the elements of ``k`` largest random numbers."""
        return ranking.without_lowest(
            t, default_mask, self.amount, lambda t: -torch.rand_like(t), signed=True
        )

    def decide(self, call: PruningCall) -> Decision:
        # Torch's own numbers go with torch's own arguments.
        if call.segments == Segments() and call.is_local and not is_distributed():
            return BasePruningMethod.decide(self, call)
        return ranking.rank(call, self.amount, is_random=True)

    @classmethod
    def apply(cls, module: nn.Module, name: str, amount: Amount) -> BasePruningMethod:  # type: ignore[override]
        """Prune ``module.<name>`` at random; see :meth:`BasePruningMethod.apply`."""
        return super().apply(module, name, amount=amount)


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
        return module.get_buffer(self._tensor_name + MASK)

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
                masks.check_binary(local_tensor(given), shard.name)
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
    hook: Any = masks.find_hook(module, name)
    last = hook[-1] if type(hook) is PruningContainer and len(hook) else hook
    if type(last) is not CustomFromMask or last._mask is not None:
        last = CustomFromMask(None)
        last._tensor_name, last._module_ref = name, weakref.ref(module)
    elif reuse:
        return hook
    return last if hook is None else hook_with(hook, last)
