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
    Convolution,
    Part,
    parallel_input,
    read_input,
    sums_of_rows,
    sums_of_windows,
)
from distprune.statistics.parameters import OfParameter
from distprune.wrappers.module_calls import observed_calls


@dataclass(eq=False)
class LayerInputs(OfParameter):
    """What this rank has seen of the inputs of one parameter, and what all ranks together have.

    Attributes:
        seen: by part of the input, the tokens and the sums so far.
    """

    seen: dict[Part, tuple[int, Tensor]] = field(default_factory=dict)

    def add(self, part: Part, num_tokens: int, sums: Tensor) -> None:
        """Add what one forward saw."""
        before, earlier = self.seen.get(part, (0, torch.zeros_like(sums)))
        self.seen[part] = before + num_tokens, earlier.to(sums.device) + sums
        self.is_new = True


@dataclass(eq=False)
class Met:
    """What the weight of a parameter was multiplied with.

    Attributes:
        part: which part of the input it is.
        values: [tokens, features], or images [samples, channels, *sizes] of a convolution.
        keep: bool [tokens], False where a token does not count; None: all count.
        num_tokens: how many of the rows count.
        convolution: the layer, if it is one.
    """

    part: Part
    values: Tensor
    keep: Tensor | None = None
    num_tokens: int = 0
    convolution: Convolution | None = None


class Collector:
    """Adds up what layers are called with; a part of :class:`ActivationStatistics`."""

    def __init__(self) -> None:
        # Ranks that run the model on the same tokens as this one, as the inputs of layers tell.
        self._same_tokens: set[tuple[int, ...]] = set()
        self._has_failed = False  # a forward, or a batch, has raised
        # Of the present batch: bool [batch, tokens] without padding, and how many are True.
        self._keep: Tensor | None = None
        self._num_kept = 0
        self._layers: dict[nn.Module, list[tuple[LayerInputs, str]]] = {}
        self._running: list[RunningExperts] = []
        self._num_open = 0  # calls of modules that have begun and not returned
        self._is_on = False

    @contextlib.contextmanager
    def _collecting(self, parameters: Sequence[LayerInputs]) -> Iterator[None]:
        """Collect while the context is open: no gradients, compiled models run uncompiled.

        Raises:
            RuntimeError: it is open already.
        """
        if self._is_on:
            raise RuntimeError(
                "collecting() is open already on these statistics; expected one at a time, or the "
                "inputs would count twice."
            )
        experts: dict[nn.Module, list[tuple[LayerInputs, str]]] = {}
        handles = []
        self._is_on, self._num_open = True, 0
        try:
            for parameter in parameters:
                modules = experts if parameter.layout.are_experts else self._layers
                for module, name in parameter.places:
                    modules.setdefault(module, []).append((parameter, name))
            for module, places in experts.items():
                # Runs after the hooks that are there, such as those of FSDP, which gather weights.
                enter = self._experts_hook(module, places)
                handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
            calls = observed_calls(self._begin, self._returned, self._end)
            with calls, torch.no_grad(), _uncompiled():
                yield
        finally:
            self._has_failed |= self._num_open > 0
            for handle in handles:
                handle.remove()
            while self._running:  # of a forward that was interrupted
                self._running.pop().stop()
            self._layers = {}
            self._is_on = False

    @contextlib.contextmanager
    def batch(self, attention_mask: Tensor | None = None) -> Iterator[None]:
        """One batch, without its padding: a context around its forward, or its forwards.

        Args:
            attention_mask: bool or integers [batch, tokens] of this rank's batch, 0 = padding.
                Layers may see [batch, tokens, features] or [batch * tokens, features]. None: all
                tokens count.

        Raises:
            ValueError: a DTensor, another dtype or shape; in the forward, a layer whose input does
                not fit.
            NotImplementedError: in the forward, a convolution, or fused experts if only a part of
                the batch is padding.
        """
        before = self._keep
        if attention_mask is not None:
            dtype, shape = attention_mask.dtype, tuple(attention_mask.shape)
            if is_dtensor(attention_mask) or dtype.is_floating_point or len(shape) != 2:
                raise ValueError(
                    f"attention_mask is {dtype} of shape {shape}; expected a plain tensor [batch, "
                    "tokens] of this rank, of booleans or integers, where 0 is padding."
                )
            if before is not None:
                raise RuntimeError(
                    "batch() is open already on these statistics; expected one at a time."
                )
            self._keep = attention_mask != 0
            self._num_kept = int(self._keep.sum())
        try:
            yield
        except BaseException:  # some of its forwards may have counted
            self._has_failed = True
            raise
        finally:
            self._keep = before

    def _add(self, parameter: LayerInputs, met: Met) -> None:
        """Add what the weight of a parameter was multiplied with."""
        if met.convolution is None:
            parameter.add(met.part, met.num_tokens, sums_of_rows(met.values, met.keep))
        else:
            parameter.add(met.part, *sums_of_windows(met.values, met.convolution))

    def _prepared(self, value: Tensor, feature_dim: int) -> Tensor:
        """The input of a layer, with all features that a sum needs of it on this rank."""
        return value

    def _begin(self, module: nn.Module) -> None:
        self._num_open += 1

    def _returned(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Add what a layer was called with, or check what fused experts did."""
        for parameter, name in self._layers.get(module, ()):
            value = _checked_input(parameter.label, args, kwargs)
            with _computing(value):
                self._add_input(parameter, name, module, value)
        if self._running and self._running[-1].module is module:
            self._running[-1].check()
        self._num_open -= 1

    def _end(self, module: nn.Module) -> None:
        """Look no longer at fused experts, before FSDP shards the weights again."""
        if self._running and self._running[-1].module is module:
            self._running.pop().stop()

    def _experts_hook(
        self, owner: nn.Module, places: Sequence[tuple[LayerInputs, str]]
    ) -> Callable[[nn.Module, tuple[Any, ...], Mapping[str, Any]], None]:
        """A forward pre-hook that looks at what fused experts do until they return."""
        label = places[0][0].label

        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            if module is not owner:  # a copy shares hooks
                return
            value = _checked_input(label, args, kwargs)
            if self._keep is not None and self._num_kept not in (0, self._keep.numel()):
                raise NotImplementedError(
                    f"{label}: fused experts see tokens in another order, so that an "
                    "attention_mask does not say which of them are padding; expected batches that "
                    "are all padding or have none, or this parameter left out."
                )
            if getattr(module, "_is_expert_parallel", False):
                raise NotImplementedError(
                    f"{label}: the experts are spread over ranks (expert parallelism); expected "
                    "whole experts, as DDP and FSDP have them. Leave the parameter out."
                )
            if is_dtensor(value):
                raise NotImplementedError(
                    f"{label}: the fused experts are called with a DTensor ({value.placements}); "
                    "expected a plain tensor, as under DDP and FSDP. Leave the parameter out."
                )
            if self._keep is not None and not self._num_kept:
                return
            weights = [
                FusedWeight(p.label, module, name, p.layout.input_dim, partial(self._add_expert, p))
                for p, name in places
            ]
            running = RunningExperts(weights, value.shape[:-1].numel())
            running.start()
            self._running.append(running)

        return enter

    def _add_input(
        self, parameter: LayerInputs, name: str, module: nn.Module, value: Tensor
    ) -> None:
        label, layout = parameter.label, parameter.layout
        convolution = module if isinstance(module, Convolution) else None
        spatial = 0 if convolution is None else len(convolution.kernel_size)
        feature_dim = -1 - spatial
        registered = module._parameters
        weight = registered.get(name, registered.get(orig_key(name)))
        if convolution is None and is_dtensor(weight) and not is_dtensor(value) and value.ndim:
            value = parallel_input(value, weight, layout.input_dim)
        if value.ndim <= spatial or value.shape[feature_dim] != layout.input_shape[0]:
            raise ValueError(
                f"{label}: its layer is called with a tensor of shape {tuple(value.shape)}; "
                f"expected {layout.input_shape[0]} features in dimension {feature_dim}."
            )
        if convolution is not None and self._keep is not None:
            raise NotImplementedError(
                f"{label}: an attention_mask says nothing of the windows of a convolution; "
                "expected batches without padding and without attention_mask, or this "
                "parameter left out."
            )
        value = self._prepared(value, feature_dim)
        keep = None if self._keep is None else self._keep.to(value.device)
        part, values, keep = read_input(label, value, weight, keep, feature_dim)
        if convolution is None:
            rows = values.reshape(-1, values.shape[-1])
            if keep is None:
                num_tokens = len(rows)
            else:  # a DTensor has some of the tokens, and a device would wait for their number
                num_tokens = int(keep.sum()) if is_dtensor(value) else self._num_kept
            self._add(parameter, Met(part, rows, keep, num_tokens))
        else:
            is_whole = values.shape[-spatial:] == value.shape[-spatial:]
            if not is_whole or len(part.features) != value.shape[feature_dim]:
                raise NotImplementedError(
                    f"{label}: the input of the convolution is sharded by channels or by places; "
                    "expected whole images on every rank."
                )
            images = values if value.ndim == spatial + 2 else values.unsqueeze(0)
            part = replace(part, features=range(layout.num_inputs))
            self._add(parameter, Met(part, images, convolution=convolution))
        if part.token_ranks is not None:
            self._same_tokens.add(part.token_ranks)

    def _add_expert(self, parameter: LayerInputs, expert: int, rows: Tensor) -> None:
        """Add the rows [tokens, inputs] that came to one of fused experts."""
        num_inputs = parameter.layout.input_shape[1]
        if rows.shape[1] != num_inputs:
            raise ValueError(
                f"{parameter.label}: expert {expert} is multiplied with a tensor of shape "
                f"{tuple(rows.shape)}; expected {num_inputs} features."
            )
        if len(rows):
            part = Part(range(expert * num_inputs, (expert + 1) * num_inputs))
            with _computing(rows):
                self._add(parameter, Met(part, rows.detach(), num_tokens=len(rows)))


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


@contextlib.contextmanager
def _computing(value: Tensor) -> Iterator[None]:
    """Compute in the dtypes of tensors, and make normal tensors, whatever the model runs in."""
    autocast = torch.autocast(value.device.type, enabled=False)
    with torch.inference_mode(False), torch.no_grad(), autocast:
        yield


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
