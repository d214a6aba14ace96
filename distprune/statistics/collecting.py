"""Adding up the inputs of layers, by hooks that change nothing.

What a layer is called with counts at once. After a forward that raised it is not known which inputs
of it have counted: new statistics are needed.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from distprune.base.pruned_form import is_dtensor, orig_key
from distprune.statistics.experts import RunningExperts
from distprune.statistics.inputs import (
    Convolution,
    Inputs,
    Part,
    as_dtensor,
    read_input,
    sums_of_rows,
    sums_of_windows,
)
from distprune.statistics.parameters import ParameterStatistics
from distprune.wrappers.module_calls import observed_calls


class Collector:
    """Adds up what layers are called with; a part of :class:`ActivationStatistics`."""

    def __init__(self) -> None:
        # Ranks that run the model on the same tokens as this one, as the inputs of layers tell.
        self._same_tokens: set[tuple[int, ...]] = set()
        self._has_failed = False  # a forward, or a batch, has raised
        self._keep: Tensor | None = None  # of the present batch: bool [batch, tokens], no padding
        # By module, the parameters that it has, and their names there; None: nothing is collected.
        self._layers: dict[nn.Module, list[tuple[ParameterStatistics, str]]] | None = None
        self._running: list[RunningExperts] = []
        self._num_open = 0  # calls of modules that have begun and not returned

    @contextlib.contextmanager
    def _collecting(self, parameters: Sequence[ParameterStatistics]) -> Iterator[None]:
        """Collect while the context is open: no gradients, compiled models run uncompiled.

        Raises:
            RuntimeError: it is open already.
        """
        if self._layers is not None:
            raise RuntimeError(
                "collecting() is open already on these statistics; expected one at a time, or the "
                "inputs would count twice."
            )

        def begin_experts(module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
            self._begin_experts(module, args, kwargs)

        self._layers, self._num_open = {}, 0
        experts: dict[nn.Module, None] = {}
        handles = []
        try:
            for parameter in parameters:
                for module, name in parameter.places:
                    self._layers.setdefault(module, []).append((parameter, name))
                    if parameter.layout.are_experts:
                        experts[module] = None
            for module in experts:
                # Runs after the hooks that are there, such as those of FSDP, which gather weights.
                # A function, as copies of the module would copy a method together with its object.
                handles.append(module.register_forward_pre_hook(begin_experts, with_kwargs=True))
            calls = observed_calls(self._begin, self._returned, self._end)
            with calls, torch.no_grad(), _uncompiled():
                yield
        finally:
            self._has_failed |= self._num_open > 0
            for handle in handles:
                handle.remove()
            while self._running:  # of a forward that was interrupted
                self._running.pop().stop()
            self._layers = None

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
        try:
            yield
        except BaseException:  # some of its forwards may have counted
            self._has_failed = True
            raise
        finally:
            self._keep = before

    def _add(self, parameter: ParameterStatistics, inputs: Inputs) -> None:
        """Add what the weight of a parameter was multiplied with."""
        count: int | Tensor
        if inputs.convolution is not None:
            count, sums = sums_of_windows(inputs.values, inputs.convolution)
        else:
            # Not as an integer: a device would wait for it.
            count = len(inputs.values) if inputs.keep is None else inputs.keep.sum()
            sums = sums_of_rows(inputs.values, inputs.keep)
        if inputs.part in parameter.seen:
            before, earlier = parameter.seen[inputs.part]
            count, sums = count + before, sums + earlier.to(sums.device)
        parameter.seen[inputs.part] = count, sums

    def _prepared(self, value: Tensor, feature_dim: int) -> Tensor:
        """The input of a layer, with all features that a sum needs of it on this rank."""
        return value

    def _begin(self, module: nn.Module) -> None:
        self._num_open += 1

    def _returned(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Add what a layer was called with, or check what fused experts did."""
        assert self._layers is not None
        for parameter, name in self._layers.get(module, ()):
            if not parameter.layout.are_experts:
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

    def _begin_experts(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Look at what fused experts do until they return: a forward pre-hook."""
        places = (self._layers or {}).get(module)
        if places is None:  # a copy shares hooks
            return
        label = places[0][0].label
        value = _checked_input(label, args, kwargs)
        num_kept = -1 if self._keep is None else int(self._keep.sum())
        if self._keep is not None and num_kept not in (0, self._keep.numel()):
            raise NotImplementedError(
                f"{label}: fused experts see tokens in another order, so that an attention_mask "
                "does not say which of them are padding; expected batches that are all padding or "
                "have none, or this parameter left out."
            )
        if getattr(module, "_is_expert_parallel", False) or is_dtensor(value):
            raise NotImplementedError(
                f"{label}: the experts are spread over ranks (expert parallelism), or called with "
                "a DTensor; expected whole experts and plain tensors, as under DDP and FSDP. Leave "
                "the parameter out."
            )
        if num_kept:
            running = RunningExperts(module, places, value.shape[:-1].numel(), self._add_expert)
            running.start()
            self._running.append(running)

    def _add_input(
        self, parameter: ParameterStatistics, name: str, module: nn.Module, value: Tensor
    ) -> None:
        label, layout = parameter.label, parameter.layout
        convolution = module if isinstance(module, Convolution) else None
        if convolution is not None and self._keep is not None:
            raise NotImplementedError(
                f"{label}: an attention_mask says nothing of the windows of a convolution; "
                "expected batches without padding and without attention_mask, or this "
                "parameter left out."
            )
        weight = module._parameters.get(name, module._parameters.get(orig_key(name)))
        if is_dtensor(weight) and not is_dtensor(value):
            value = as_dtensor(label, value, weight, layout.input_dim, convolution is not None)
        value = self._prepared(value, -1 if convolution is None else -1 - len(layout.shape[2:]))
        keep = None if self._keep is None else self._keep.to(value.device)
        inputs = read_input(label, value, keep, convolution)
        self._add(parameter, inputs)
        if inputs.part.token_ranks is not None:
            self._same_tokens.add(inputs.part.token_ranks)

    def _add_expert(self, parameter: ParameterStatistics, expert: int, rows: Tensor) -> None:
        """Add the rows [tokens, inputs] that came to one of fused experts."""
        num_inputs = parameter.layout.input_shape[1]
        if len(rows):
            part = Part(range(expert * num_inputs, (expert + 1) * num_inputs))
            with _computing(rows):
                self._add(parameter, Inputs(part, rows.detach()))


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
