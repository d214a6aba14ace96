"""The losses of batches, without all of their logits in memory.

[Note: slices] The logits of a batch take batch size * length * vocabulary elements, and a backward
takes that several times. So the head computes one position only. A hook before it computes the
loss from what the head is called with: the logits of some positions, their loss and its gradients,
and then those of the next. To wrappers this is one call of the head.

A hook after it gives the model logits without memory, from which the loss is read when the model
has returned them. A model that does anything else with logits (it scales or caps them), or whose
head has hooks that change its output, runs again with its own head, from then on. That is so on
every rank, because the ranks have the same model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from distprune.api.select import head_of
from distprune.base.pruned_form import is_dtensor
from distprune.language_models.running import inputs_of, output_of
from distprune.language_models.text import TokenWindows
from distprune.ranks.collectives import whole

SLICE = 1 << 24  # logits that there are at a time: 64 MiB in fp32


class Head(NamedTuple):
    """A linear head, with the weight that it has in this forward."""

    weight: Tensor
    bias: Tensor | None

    def logits(self, states: Tensor) -> Tensor:
        """The logits of some positions."""
        return functional.linear(states, self.weight, self.bias)


class BatchLosses:
    """The losses of a model on batches of tokens, in slices where that is possible.

    Args:
        model: plain or wrapped: called with ``input_ids``, it returns logits [windows, length,
            vocabulary], or an object that has them as ``logits``.

    Cost: 64 MiB of logits in fp32 at a time, some times; those of a whole batch if the model has no
    linear head, changes logits, or has tensor parallelism.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        head = head_of(model)
        is_linear = getattr(type(head), "forward", None) is nn.Linear.forward
        self._head = head if is_linear and "forward" not in vars(head) else None

    def of_batch(self, windows: TokenWindows, rows: slice) -> Tensor:
        """The mean loss of all tokens of some windows but the first ones, with gradients.

        Raises:
            TypeError: the model returns no logits.
            ValueError: the loss is not finite; names the first window.
        """
        loss = self.mean(inputs_of(self._model, windows, rows))
        if not bool(loss.detach().isfinite()):
            text = windows.texts[int(windows.text_of[rows.start])]
            raise ValueError(
                f"the loss of window {rows.start} ({text}) is {float(loss.detach())}; expected a "
                "finite one. Weights that are not finite, or a dtype that overflows (float16), "
                "cause this."
            )
        return loss

    def mean(self, ids: Tensor) -> Tensor:
        """The mean of the negative log-likelihoods of the tokens of each row but its first."""
        targets = ids[:, 1:].flatten()

        def of_states(states: Tensor, head: Head) -> Tensor:
            loss: Tensor = _MeanLoss.apply(states[:, :-1].flatten(0, 1), *head, targets)  # type: ignore[no-untyped-call]
            return loss

        logits, loss = self._run(ids, of_states)
        if loss is None:
            return functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), targets)
        return loss

    def of_windows(self, ids: Tensor) -> Tensor:
        """The negative log-likelihood of each window, float64 [windows] on the CPU; in nats.

        Raises:
            TypeError: the model returns no logits.
        """
        with torch.no_grad():
            logits, losses = self._run(ids, lambda states, head: nll_of_windows(states, ids, head))
            return nll_of_windows(logits, ids) if losses is None else losses

    def _run(
        self, ids: Tensor, reduce: Callable[[Tensor, Head], Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        """The logits of a batch; and the result of ``reduce``, None if the logits are whole."""
        if self._head is None:
            return logits_of(output_of(self._model, input_ids=ids)), None
        # Of each call of the head in slices: the result, and the logits of one position.
        calls: list[tuple[Tensor, Tensor]] = []
        given: list[Tensor] = []

        def before(module: Any, args: tuple[Tensor, ...]) -> Any:
            (states, *others), head = args, Head(module.weight, module.bias)
            if is_dtensor(head.weight) or states.shape[:-1] != ids.shape:
                return None
            probe, result = states[:, :1], reduce(states, head)
            with torch.no_grad():
                calls.append((result, head.logits(probe)))
            return (probe, *others)

        def after(module: Any, args: object, output: Tensor) -> Tensor | None:
            if len(calls) != 1 or not torch.equal(output, calls[0][1]):
                return None
            shape = (*ids.shape, output.shape[-1])
            given.append(_AsLogits.apply(calls[0][0], shape))  # type: ignore[no-untyped-call]
            return given[0]

        hooks = [
            self._head.register_forward_pre_hook(before),
            self._head.register_forward_hook(after),
        ]
        try:
            output = output_of(self._model, input_ids=ids)
        finally:
            for hook in hooks:
                hook.remove()
        logits = getattr(output, "logits", output)
        if len(calls) == 1 and given and logits is given[0]:
            return logits, _FromLogits.apply(logits, calls[0][0])  # type: ignore[no-untyped-call]
        self._head = None
        return logits_of(output_of(self._model, input_ids=ids) if calls else output), None


class _MeanLoss(torch.autograd.Function):
    """The mean loss of positions, whose gradients are made while the logits of a slice exist.

    Args:
        states: [positions, features], what the head is called with.
        weight, bias: of the head.
        targets: int64 [positions].
    """

    @staticmethod
    def forward(
        ctx: Any, states: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor
    ) -> Tensor:
        needs = ctx.needs_input_grad[:3]
        fixed = [None if t is None else t.detach() for t in (weight, bias)]
        gradients = [torch.empty_like(states) if needs[0] else None]
        gradients += [
            torch.zeros_like(t) if t is not None and need else None
            for t, need in zip(fixed, needs[1:], strict=True)
        ]
        losses, num_rows = [], max(1, SLICE // weight.shape[0])
        for start in range(0, len(states), num_rows):
            rows = slice(start, start + num_rows)
            given = [states[rows].detach(), *fixed]
            inputs = [
                t.detach().requires_grad_(n)
                for t, n in zip(given, needs, strict=True)
                if t is not None
            ]
            with torch.enable_grad():
                logits = functional.linear(*inputs)
                loss = functional.cross_entropy(logits.float(), targets[rows], reduction="sum")
            losses.append(loss.detach())
            if not any(needs):
                continue
            made = iter(
                torch.autograd.grad(
                    loss, [t for t in inputs if t.requires_grad], loss.new_tensor(1 / len(states))
                )
            )
            if gradients[0] is not None:
                gradients[0][rows] = next(made)
            for total, gradient in zip(
                [g for g in gradients[1:] if g is not None], made, strict=True
            ):
                total += gradient
        ctx.save_for_backward(*gradients)
        return torch.stack(losses).sum() / len(states)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        made = [None if g is None else g * upstream.to(g.dtype) for g in ctx.saved_tensors]
        return (*made, None)


class _AsLogits(torch.autograd.Function):
    """Logits without memory, whose gradient is that of a loss: wrappers see it pass."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, shape: tuple[int, ...]) -> Tensor:
        return loss.new_zeros(()).expand(shape)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        return upstream[0, 0, 0], None


class _FromLogits(torch.autograd.Function):
    """The loss that such logits stand for."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, loss: Tensor) -> Tensor:
        ctx.shape = logits.shape
        return loss.detach().clone()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        return upstream.expand(ctx.shape), None


def nll_of_windows(states: Tensor, ids: Tensor, head: Head | None = None) -> Tensor:
    """The negative log-likelihood of each window: of all its tokens but the first, in nats.

    Args:
        states: [windows, length, features], what the head is called with; without a head, the
            logits. They are converted to fp32, slice by slice.
        ids: int64 [windows, length].

    Returns:
        float64 [windows], on the CPU.
    """
    num_rows = max(1, SLICE // (states.shape[2] if head is None else head.weight.shape[0]))
    losses = torch.zeros(len(ids), dtype=torch.float64, device=states.device)
    for window, (given, targets) in enumerate(zip(states, ids[:, 1:], strict=True)):
        for start in range(0, len(targets), num_rows):
            expected = targets[start : start + num_rows]
            # The last position predicts what is not in the window.
            logits = given[start : start + len(expected)]
            logits = logits if head is None else head.logits(logits)
            with torch.autocast(logits.device.type, enabled=False):
                of_tokens = functional.cross_entropy(logits.float(), expected, reduction="none")
            losses[window] += of_tokens.double().sum()
    return losses.cpu()


def logits_of(output: Any) -> Tensor:
    """The whole logits in what a model returns; sharded ones are gathered."""
    logits = getattr(output, "logits", output)
    if not isinstance(logits, Tensor) or logits.ndim != 3:
        raise TypeError(
            f"the model returns a {type(output).__name__}; expected logits, or an object with "
            "logits [windows, length, vocabulary], as causal language models of transformers do."
        )
    return whole(logits) if is_dtensor(logits) else logits
