"""The hidden states between the decoder layers of a model, window by window.

[Note: a chain] In most decoders a layer is called with what the layer before it returned, and with
arguments that depend on the shape of a batch alone, such as masks and position embeddings. One
forward of the model shows these, and whether it is so; then a layer runs on its own, and a pass
over all layers costs one forward of each, and not one of the model for each:

    model       runs once: what layer 0 is called with, and the arguments of each layer
    layer 0     runs on it: statistics;  is pruned;  runs again: what layer 1 is called with
    layer 1     ...

It is not so where layers share state, or FSDP is around several layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from distprune.base.pruned_form import is_dtensor
from distprune.wrappers.wrapper import managed_parameters

# What a layer is called with beside the hidden states.
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class HiddenStates:
    """What the decoder layers of a model are called with, for each batch of this rank.

    Args:
        blocks: the decoder layers, in the order in which they run.

    Attributes:
        is_chain: whether layers can run on their own; see [Note: a chain]. Of this rank.
        shares_objects: whether layers are called with objects that they may change, such as a
            dictionary of keys and values.
    """

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self._blocks = list(blocks)
        self._states: list[Tensor] = []
        # What layers are called with beside the hidden states, by batch.
        self._arguments: list[list[Arguments]] = []
        self._last: Tensor | None = None  # what a layer of the present forward returned
        self.is_chain = all(map(_runs_alone, self._blocks))
        self.shares_objects = False

    def catch(self, run: Callable[[], object]) -> None:
        """Run the model on the next batch; keeps what its layers are called with, if it can."""
        calls: list[Arguments] = []
        firsts: list[Tensor] = []
        self._last = None
        enter = partial(self._enter, calls, firsts)
        with ExitStack() as hooks:
            hooks.callback(setattr, self, "_last", None)
            for block in self._blocks:
                hooks.enter_context(block.register_forward_pre_hook(enter, with_kwargs=True))
                hooks.enter_context(block.register_forward_hook(self._leave))
            run()
        self.is_chain &= len(calls) == len(self._blocks)
        self._arguments.append(self._shared(calls))
        if self.is_chain:
            self.keep(0, len(self._arguments) - 1, firsts[0])

    def call(self, number: int, batch: int, state: Tensor) -> Tensor:
        """Run a layer on the hidden states of a batch; returns those of the next layer."""
        rest, keywords = self._arguments[batch][number]
        device = next((p.device for p in self._blocks[number].parameters()), state.device)
        found = _state_of(self._blocks[number](state.to(device), *rest, **keywords))
        assert found is not None
        return found

    def run(self, number: int, batch: int) -> None:
        """Run a layer on a batch."""
        self.call(number, batch, self.state(number, batch))

    def advance(self, number: int) -> None:
        """Run a layer on all batches: what it returns are the hidden states of the next."""
        with torch.no_grad():
            for batch in range(len(self._arguments)):
                state = self.call(number, batch, self.state(number, batch))
                self.keep(number + 1, batch, state)

    def keep(self, stage: int, batch: int, state: Tensor) -> None:
        """Keep the hidden states of a batch before a layer, in place of those before the last."""
        self._states[batch : batch + 1] = [state.detach().clone()]

    def state(self, stage: int, batch: int) -> Tensor:
        """What was kept of a batch."""
        return self._states[batch]

    def _enter(
        self,
        calls: list[Arguments],
        firsts: list[Tensor],
        block: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        state = args[0] if args else None
        if not isinstance(state, Tensor) or is_dtensor(state):
            self.is_chain = False
            return
        if not calls:
            firsts.append(state)
        elif self._last is None or not torch.equal(self._last, state):
            self.is_chain = False
        if block is not self._blocks[len(calls) % len(self._blocks)]:
            self.is_chain = False
        self.shares_objects |= not _is_plain((args[1:], *kwargs.values()))
        calls.append((args[1:], kwargs))

    def _leave(self, block: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._last = _state_of(output)

    def _shared(self, calls: list[Arguments]) -> list[Arguments]:
        """Arguments, without tensors that are equal to those of the batch before."""
        earlier = self._arguments[-1] if self._arguments else []
        if len(earlier) != len(calls):
            return calls
        return [_same(new, old) for new, old in zip(calls, earlier, strict=True)]


def _runs_alone(block: nn.Module) -> bool:
    """Whether a layer gathers all of its parameters when it is called itself."""
    owned = {id(module) for module in block.modules()}
    is_managed = any(owner in owned for owner, _ in managed_parameters(block))
    return not is_managed or hasattr(block, "set_reshard_after_forward")  # FSDP2 around the layer


def _state_of(output: Any) -> Tensor | None:
    """The hidden states that a layer returns, alone or first of a tuple."""
    first = output[0] if isinstance(output, tuple) and output else output
    return first if isinstance(first, Tensor) else None


def _is_plain(value: Any) -> bool:
    """Whether a value is one that no layer changes."""
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (Tensor, bool, int, float, str))


def _same(new: Any, old: Any) -> Any:
    """``old`` where it equals ``new``: one object in place of many equal ones."""
    if isinstance(new, Tensor):
        is_equal = (
            isinstance(old, Tensor)
            and not is_dtensor(new)
            and (new.dtype, new.shape, new.device) == (old.dtype, old.shape, old.device)
            and torch.equal(new, old)
        )
        return old if is_equal else new
    if isinstance(new, tuple) and isinstance(old, tuple) and len(new) == len(old):
        return tuple(_same(one, other) for one, other in zip(new, old, strict=True))
    if isinstance(new, dict) and isinstance(old, dict):
        return {key: _same(value, old.get(key)) for key, value in new.items()}
    return new
