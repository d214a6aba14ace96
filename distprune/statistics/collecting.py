"""Adding up the inputs of layers, by hooks that change nothing."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from distprune._common.pruned_form import is_dtensor, orig_key
from distprune.statistics.experts import FusedWeight, RunningExperts
from distprune.statistics.input_parts import Part, read_input, same_data_group
from distprune.statistics.layers import WeightLayout
from distprune.statistics.sums import Sums, sums_of_rows, sums_of_windows


@dataclass
class LocalStatistics:
    """What this rank has seen of the inputs of one parameter.

    Attributes:
        label: the parameter's name, for messages.
        places: its (module, name) pairs on this rank; empty if only other ranks have it.
        layout: how it meets its inputs.
        calls: per place, how often its module was called.
        seen: by part of the input, tokens and totals so far.
        is_changed: whether something was added since the ranks last summed up.
    """

    label: str
    places: tuple[tuple[nn.Module, str], ...]
    layout: WeightLayout
    calls: list[int] = field(default_factory=list)
    seen: dict[Part, Sums] = field(default_factory=dict)
    is_changed: bool = False

    def forget(self) -> None:
        """Start anew."""
        self.calls, self.seen, self.is_changed = [0] * len(self.calls), {}, False

    def add(self, part: Part, sums: Sums) -> None:
        """Add what one forward saw."""
        earlier = self.seen.get(part)
        if earlier is not None:
            totals = earlier.totals.to(sums.totals.device)
            sums = Sums(earlier.num_tokens + sums.num_tokens, totals + sums.totals)
        self.seen[part] = sums
        self.is_changed = True


@dataclass
class Masked:
    """The attention mask of the present batch.

    Attributes:
        keep: bool [batch, tokens].
        num_kept: how many are True.
    """

    keep: Tensor
    num_kept: int


class Collector:
    """Hooks on layers that add up what the layers are called with.

    Attributes:
        groups: ranks that run the model on the same tokens as this one, as the inputs tell.
    """

    def __init__(self) -> None:
        self.groups: set[tuple[int, ...]] = set()
        self._masked: Masked | None = None
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
        experts: dict[nn.Module, list[_Place]] = {}
        try:
            for parameter in parameters:
                for number, (module, name) in enumerate(parameter.places):
                    if parameter.layout.are_experts:
                        experts.setdefault(module, []).append((parameter, number, name))
                        continue
                    hook = partial(self._see, parameter, number, module, name)
                    # Runs after the hooks that are there, such as those of parallelize_module.
                    handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
            for module, places in experts.items():
                enter = partial(self._enter_experts, module, places)
                handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
                # Afterwards, first of all hooks: before FSDP shards the weights again.
                leave = partial(self._leave_experts, module)
                handles.append(module.register_forward_hook(leave, prepend=True, always_call=True))
                check = partial(self._check_experts, module)
                handles.append(module.register_forward_hook(check, prepend=True))
            with torch.no_grad(), _uncompiled():
                yield
        finally:
            for handle in handles:
                handle.remove()
            while self._running:  # of a forward that was interrupted
                self._running.pop().stop()
            self._is_on = False

    @contextlib.contextmanager
    def batch(self, attention_mask: Tensor) -> Iterator[None]:
        """Leave out padding while the context is open; see ActivationStatistics.batch."""
        if is_dtensor(attention_mask) or not isinstance(attention_mask, Tensor):
            kind = type(attention_mask).__name__
            raise TypeError(f"attention_mask is a {kind}; expected a tensor of this rank's batch.")
        dtype = attention_mask.dtype
        if dtype.is_floating_point or dtype.is_complex or attention_mask.ndim != 2:
            raise ValueError(
                f"attention_mask is {dtype} of shape {tuple(attention_mask.shape)}; expected "
                "[batch, tokens] of booleans or integers, where 0 is padding, as tokenizers make."
            )
        if self._masked is not None:
            raise RuntimeError(
                "batch() is open already on these statistics; expected one at a time."
            )
        keep = attention_mask != 0
        self._masked = Masked(keep, int(keep.sum()))
        try:
            yield
        finally:
            self._masked = None

    def _see(
        self,
        parameter: LocalStatistics,
        number: int,
        owner: nn.Module,
        name: str,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> None:
        """A forward pre-hook. What it returned would replace the input: it returns None."""
        value = _checked_input(parameter.label, module is owner, args, kwargs)
        with torch.inference_mode(False), torch.no_grad(), _no_autocast(value):
            self._add(parameter, name, module, value)
        parameter.calls[number] += 1
        parameter.is_changed = True

    def _enter_experts(
        self,
        owner: nn.Module,
        places: Sequence[_Place],
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> None:
        """A forward pre-hook: look at what fused experts do until they return."""
        label = places[0][0].label
        value = _checked_input(label, module is owner, args, kwargs)
        num_kept = None if self._masked is None else self._masked.num_kept
        if self._masked is not None and num_kept not in (0, self._masked.keep.numel()):
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
            FusedWeight(p.label, module, name, p.layout.input_dim, partial(_add_expert, p))
            for p, _, name in places
        ]
        if num_kept != 0:
            running = RunningExperts(weights, value.shape[:-1].numel())
            running.start()
            self._running.append(running)
        for parameter, number, _ in places:
            parameter.calls[number] += 1
            parameter.is_changed = True

    def _check_experts(self, owner: nn.Module, *_: object) -> None:
        """A forward hook, which does not run after an error."""
        if self._running and self._running[-1].module is owner:
            self._running[-1].check()

    def _leave_experts(self, owner: nn.Module, *_: object) -> None:
        """A forward hook, which runs after an error too, also of hooks before the first one."""
        if self._running and self._running[-1].module is owner:
            self._running.pop().stop()

    def _add(self, parameter: LocalStatistics, name: str, module: nn.Module, value: Tensor) -> None:
        label, layout = parameter.label, parameter.layout
        feature_dim = -1
        if layout.kind == "convolution":
            assert isinstance(module, (nn.Conv1d, nn.Conv2d))
            feature_dim = -1 - len(module.kernel_size)
        if value.ndim < -feature_dim or value.shape[feature_dim] != layout.input_shape[0]:
            raise ValueError(
                f"{label}: its layer is called with a tensor of shape {tuple(value.shape)}; "
                f"expected {layout.input_shape[0]} features in dimension {feature_dim}."
            )
        registered = module._parameters
        weight = registered.get(name, registered.get(orig_key(name)))
        if layout.kind == "convolution":
            assert isinstance(module, (nn.Conv1d, nn.Conv2d))
            if self._masked is not None:
                raise NotImplementedError(
                    f"{label}: an attention_mask says nothing of the windows of a convolution; "
                    "expected batches without padding and without attention_mask, or this "
                    "parameter left out."
                )
            spatial = len(module.kernel_size)
            images = read_input(label, value, weight, None, -1 - spatial)
            if len(images.part.features) != value.shape[-1 - spatial] or (
                images.values.shape[-spatial:] != value.shape[-spatial:]
            ):
                raise NotImplementedError(
                    f"{label}: the input of the convolution is sharded by channels or by places; "
                    "expected whole images on every rank."
                )
            batched = images.values if value.ndim == spatial + 2 else images.values.unsqueeze(0)
            sums = sums_of_windows(batched, module)
            part = Part(**vars(images.part) | {"features": range(layout.num_inputs)})
        else:
            mask = None if self._masked is None else self._masked.keep.to(value.device)
            rows = read_input(label, value, weight, mask, -1)
            num_kept = None
            if rows.keep is not None and self._masked is not None and not is_dtensor(value):
                num_kept = self._masked.num_kept
            flat = rows.values.reshape(-1, rows.values.shape[-1])
            sums = sums_of_rows(flat, rows.keep, num_kept)
            part = rows.part
        if is_dtensor(value):
            self.groups.add(same_data_group(value))
        parameter.add(part, sums)


# A parameter, which of its places, and its name there.
_Place = tuple[LocalStatistics, int, str]


def _checked_input(
    label: str, is_owner: bool, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Tensor:
    """What a layer is called with, in a call that counts."""
    if not is_owner:
        raise NotImplementedError(
            f"{label}: a copy of its layer is running, as in nn.DataParallel; expected the layer "
            "itself. Use DistributedDataParallel."
        )
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


def _add_expert(parameter: LocalStatistics, expert: int, rows: Tensor) -> None:
    """Add the rows [tokens, inputs] that came to one of fused experts."""
    num_inputs = parameter.layout.input_shape[1]
    if rows.shape[1] != num_inputs:
        raise ValueError(
            f"{parameter.label}: expert {expert} is multiplied with a tensor of shape "
            f"{tuple(rows.shape)}; expected {num_inputs} features."
        )
    if rows.shape[0]:
        with torch.inference_mode(False), torch.no_grad(), _no_autocast(rows):
            features = range(expert * num_inputs, (expert + 1) * num_inputs)
            parameter.add(Part(features), sums_of_rows(rows.detach()))


@contextlib.contextmanager
def _uncompiled() -> Iterator[None]:
    """Run compiled modules uncompiled: a graph that was compiled before has no hooks in it."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    set_stance: Callable[[str], contextlib.AbstractContextManager[None]] = torch.compiler.set_stance
    with set_stance("force_eager"):
        yield


def _no_autocast(value: Tensor) -> contextlib.AbstractContextManager[Any]:
    return torch.autocast(value.device.type, enabled=False)
