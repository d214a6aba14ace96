"""Adding up the inputs of layers, by hooks that change nothing.

What a layer is called with counts at once. After a forward that raised it is not known which inputs
of it have counted: new statistics are needed.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from distprune.base.pruned_form import is_dtensor, orig_key
from distprune.statistics.experts import FusedWeight, RunningExperts
from distprune.statistics.input_parts import (
    Part,
    Sums,
    parallel_input,
    read_input,
    sums_of_rows,
    sums_of_windows,
)
from distprune.statistics.totals import OfParameter, Totals
from distprune.wrappers.module_calls import observed_calls


@dataclass
class LocalStatistics(OfParameter):
    """What this rank has seen of the inputs of one parameter, and what all ranks together have.

    Attributes:
        calls: per place, how often its module was called.
        seen: by part of the input, tokens and totals so far.
        loaded: of all ranks, from an earlier run; None if nothing was loaded.
        summed: of all ranks, with what was loaded; None if something on this rank is newer.
    """

    calls: list[int] = field(default_factory=list)
    seen: dict[Part, Sums] = field(default_factory=dict)
    loaded: Totals | None = None
    summed: Totals | None = None

    def count_call(self, place: int) -> None:
        """Count a call of the module of a place."""
        self.calls[place] += 1
        self.summed = None

    def add(self, part: Part, sums: Sums) -> None:
        """Add what one forward saw."""
        earlier = self.seen.get(part)
        if earlier is not None:
            totals = earlier.totals.to(sums.totals.device)
            sums = Sums(earlier.num_tokens + sums.num_tokens, totals + sums.totals)
        self.seen[part] = sums
        self.summed = None


class Collector:
    """Adds up what layers are called with.

    Attributes:
        same_tokens: ranks that run the model on the same tokens as this one, as the inputs tell.
        has_failed: whether a forward, or a context, has raised.
    """

    def __init__(self) -> None:
        self.same_tokens: set[tuple[int, ...]] = set()
        self.has_failed = False
        self._num_open = 0  # calls of modules that have begun and not returned
        # Of the present batch: bool [batch, tokens] without padding, and how many are True.
        self._keep: Tensor | None = None
        self._num_kept = 0
        self._layers: dict[nn.Module, list[_Place]] = {}
        self._experts: dict[nn.Module, list[_Place]] = {}
        self._running: list[RunningExperts] = []
        self._is_on = False

    @contextlib.contextmanager
    def collecting(self, parameters: Sequence[LocalStatistics]) -> Iterator[None]:
        """Collect while the context is open: no gradients, compiled models run uncompiled.

        Raises:
            RuntimeError: it is open already.
        """
        if self._is_on:
            raise RuntimeError(
                "collecting() is open already on these statistics; expected one at a time, or the "
                "inputs would count twice."
            )
        handles = []
        self._is_on = True
        self._num_open = 0
        try:
            for parameter in parameters:
                modules = self._experts if parameter.layout.are_experts else self._layers
                for number, (module, name) in enumerate(parameter.places):
                    modules.setdefault(module, []).append((parameter, number, name))
            for module, places in self._experts.items():
                # Runs after the hooks that are there, such as those of FSDP, which gather weights.
                enter = _OwnHook(partial(self._enter_experts, module, places))
                handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
            with (
                self._whole(),
                observed_calls(self._begin, self._returned, self._end),
                torch.no_grad(),
                _uncompiled(),
            ):
                yield
        finally:
            self.has_failed |= self._num_open > 0
            for handle in handles:
                handle.remove()
            while self._running:  # of a forward that was interrupted
                self._running.pop().stop()
            self._layers, self._experts = {}, {}
            self._is_on = False

    @contextlib.contextmanager
    def batch(self, attention_mask: Tensor | None) -> Iterator[None]:
        """One batch, without its padding; see ActivationStatistics.batch."""
        if attention_mask is None:
            with self._whole():
                yield
            return
        dtype, shape = attention_mask.dtype, tuple(attention_mask.shape)
        if is_dtensor(attention_mask) or dtype.is_floating_point or len(shape) != 2:
            raise ValueError(
                f"attention_mask is {dtype} of shape {shape}; expected a plain tensor [batch, "
                "tokens] of this rank, of booleans or integers, where 0 is padding."
            )
        if self._keep is not None:
            raise RuntimeError(
                "batch() is open already on these statistics; expected one at a time."
            )
        self._keep = attention_mask != 0
        self._num_kept = int(self._keep.sum())
        try:
            with self._whole():
                yield
        finally:
            self._keep = None

    @contextlib.contextmanager
    def _whole(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.has_failed = True
            raise

    def _begin(self, module: nn.Module) -> None:
        self._num_open += 1

    def _returned(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Add what a layer was called with, or check what fused experts did."""
        for parameter, number, name in self._layers.get(module, ()):
            value = _checked_input(parameter.label, args, kwargs)
            with torch.inference_mode(False), torch.no_grad(), _no_autocast(value):
                self._add(parameter, name, module, value)
            parameter.count_call(number)
        if self._running and self._running[-1].module is module:
            self._running[-1].check()
        self._num_open -= 1

    def _end(self, module: nn.Module) -> None:
        """Look no longer at fused experts, before FSDP shards the weights again."""
        if self._running and self._running[-1].module is module:
            self._running.pop().stop()

    def _enter_experts(
        self,
        owner: nn.Module,
        places: Sequence[_Place],
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> None:
        """A forward pre-hook: look at what fused experts do until they return."""
        if module is not owner:  # copy.copy() shares hooks
            return
        label = places[0][0].label
        value = _checked_input(label, args, kwargs)
        is_padding = self._keep is not None and not self._num_kept
        if self._keep is not None and self._num_kept not in (0, self._keep.numel()):
            raise NotImplementedError(
                f"{label}: fused experts see tokens in another order, so that an attention_mask "
                "does not say which of them are padding; expected batches that are all padding or "
                "have none, or this parameter left out."
            )
        if getattr(module, "_is_expert_parallel", False):
            raise NotImplementedError(
                f"{label}: the experts are spread over ranks (expert parallelism); expected whole "
                "experts, as DDP and FSDP have them. Leave the parameter out."
            )
        if is_dtensor(value):
            raise NotImplementedError(
                f"{label}: the fused experts are called with a DTensor ({value.placements}); "
                "expected a plain tensor, as under DDP and FSDP. Leave the parameter out."
            )
        weights = [
            FusedWeight(p.label, module, name, p.layout.input_dim, partial(self._add_expert, p))
            for p, _, name in places
        ]
        if not is_padding:
            running = RunningExperts(weights, value.shape[:-1].numel())
            running.start()
            self._running.append(running)
        for parameter, number, _ in places:
            parameter.count_call(number)

    def _add(self, parameter: LocalStatistics, name: str, module: nn.Module, value: Tensor) -> None:
        label, layout = parameter.label, parameter.layout
        convolution = module if isinstance(module, (nn.Conv1d, nn.Conv2d)) else None
        spatial = 0 if convolution is None else len(convolution.kernel_size)
        registered = module._parameters
        weight = registered.get(name, registered.get(orig_key(name)))
        if convolution is None and is_dtensor(weight) and not is_dtensor(value) and value.ndim:
            value = parallel_input(value, weight, layout.input_dim)
        if value.ndim <= spatial or value.shape[-1 - spatial] != layout.input_shape[0]:
            raise ValueError(
                f"{label}: its layer is called with a tensor of shape {tuple(value.shape)}; "
                f"expected {layout.input_shape[0]} features in dimension {-1 - spatial}."
            )
        if convolution is not None and self._keep is not None:
            raise NotImplementedError(
                f"{label}: an attention_mask says nothing of the windows of a convolution; "
                "expected batches without padding and without attention_mask, or this "
                "parameter left out."
            )
        value = self._prepared(value, -1 - spatial)
        keep = None if self._keep is None else self._keep.to(value.device)
        part, values, keep = read_input(label, value, weight, keep, -1 - spatial)
        if convolution is None:
            num_kept = None if keep is None or is_dtensor(value) else self._num_kept
            self._add_rows(parameter, part, values.reshape(-1, values.shape[-1]), keep, num_kept)
        else:
            is_whole = values.shape[-spatial:] == value.shape[-spatial:]
            if not is_whole or len(part.features) != value.shape[-1 - spatial]:
                raise NotImplementedError(
                    f"{label}: the input of the convolution is sharded by channels or by places; "
                    "expected whole images on every rank."
                )
            images = values if value.ndim == spatial + 2 else values.unsqueeze(0)
            part = replace(part, features=range(layout.num_inputs))
            self._add_images(parameter, part, images, convolution)
        if part.token_ranks is not None:
            self.same_tokens.add(part.token_ranks)

    def _add_expert(self, parameter: LocalStatistics, expert: int, rows: Tensor) -> None:
        """Add the rows [tokens, inputs] that came to one of fused experts."""
        num_inputs = parameter.layout.input_shape[1]
        if rows.shape[1] != num_inputs:
            raise ValueError(
                f"{parameter.label}: expert {expert} is multiplied with a tensor of shape "
                f"{tuple(rows.shape)}; expected {num_inputs} features."
            )
        if rows.shape[0]:
            with torch.inference_mode(False), torch.no_grad(), _no_autocast(rows):
                part = Part(range(expert * num_inputs, (expert + 1) * num_inputs))
                self._add_rows(parameter, part, rows.detach(), None, None)

    def _prepared(self, value: Tensor, feature_dim: int) -> Tensor:
        """The input of a layer, with all features that a sum needs of it on this rank."""
        return value

    def _add_rows(
        self,
        parameter: LocalStatistics,
        part: Part,
        rows: Tensor,
        keep: Tensor | None,
        num_kept: int | None,
    ) -> None:
        """Add the input [tokens, features] of a matrix; see :func:`sums_of_rows`."""
        parameter.add(part, sums_of_rows(rows, keep, num_kept))

    def _add_images(
        self,
        parameter: LocalStatistics,
        part: Part,
        images: Tensor,
        convolution: nn.Conv1d | nn.Conv2d,
    ) -> None:
        """Add the input of a convolution; see :func:`sums_of_windows`."""
        parameter.add(part, sums_of_windows(images, convolution))


# A parameter, which of its places, and its name there.
_Place = tuple[LocalStatistics, int, str]


def _checked_input(label: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """What a layer is called with, in a call that counts."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"{label}: its layer runs with gradients enabled, inside collecting(). Activation "
            "checkpointing would run it twice, and count its input twice; expected a forward "
            "without torch.enable_grad()."
        )
    value = args[0] if args else next(iter(kwargs.values()), None)
    if not isinstance(value, Tensor):
        raise TypeError(
            f"{label}: its layer is called with a {type(value).__name__}; expected a tensor."
        )
    return value


class _OwnHook:
    """A forward pre-hook of one module, which copies and pickles of the module do not run.

    Args:
        hook: with keyword arguments.
    """

    def __init__(self, hook: Callable[..., None]) -> None:
        self._hook = hook

    def __call__(self, *args: Any) -> None:
        self._hook(*args)

    def __reduce__(self) -> tuple[type[_OwnHook], tuple[Callable[..., None]]]:
        return _OwnHook, (_nothing,)


def _nothing(*_: object) -> None:
    """What the hook of a copy does."""


@contextlib.contextmanager
def _uncompiled() -> Iterator[None]:
    """Run compiled modules uncompiled: a graph that was compiled before has no hooks in it."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    set_stance: Callable[..., contextlib.AbstractContextManager[Any]] = torch.compiler.set_stance
    with set_stance("force_eager"), warnings.catch_warnings():
        # They are seen once more at the compiled module around a module, which does no harm.
        warnings.filterwarnings("ignore", "Using `torch.compile.module.` when there are global")
        yield


def _no_autocast(value: Tensor) -> contextlib.AbstractContextManager[Any]:
    return torch.autocast(value.device.type, enabled=False)
