"""The losses of batches, without all of their logits in memory.

[Note: slices] The logits of a batch take batch size * length * vocabulary elements, and a backward
takes that several times. So the head does not run when the model calls it: its place is taken by
one that makes the logits of some positions, adds up their losses, and makes those of the next. To
the wrappers this is one call of the head, and its weight has one gradient. With gradients, and a
head whose own weight has none, a slice is differentiated at once, while its logits are there; else
it is checkpointed, and the backward makes its logits again.

The model is given logits without memory instead. If it returns them as they are, and the loss as it
was given, then the losses are right. If it scales or caps them, adds to the loss, or has another
loss, then the model runs again with its own head, from then on. That is so on every rank, because
the ranks have the same model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from distprune.api.select import head_of
from distprune.base.pruned_form import is_dtensor
from distprune.language_models.running import data_ranks, inputs_of, output_of
from distprune.language_models.text import TokenWindows
from distprune.ranks.collectives import whole
from distprune.ranks.process_groups import world
from distprune.wrappers.wrapper import plain_class

SLICE = 1 << 24  # logits that there are at a time: 64 MiB in fp32


@dataclass(frozen=True)
class Head:
    """A linear head, with the weight that it has in this forward."""

    weight: Tensor
    bias: Tensor | None

    def logits(self, states: Tensor) -> Tensor:
        """The logits of some positions."""
        return functional.linear(states, self.weight, self.bias)


Reduce = Callable[[Tensor, Head], Tensor]


class BatchLosses:
    """The losses of a model on batches of tokens, in slices where that is possible.

    Args:
        model: plain or wrapped; it is called with ``input_ids``, and by :meth:`mean` also with
            ``labels``.

    Cost: 64 MiB of logits in fp32 at a time, some times; those of a whole batch if the model has no
    linear head, does more with logits than to compare them with labels, or has tensor parallelism.
    With gradients of its own weight, the head runs twice.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._head = _linear_head(model)
        self._owner = next(
            (m for m in model.modules() if any(child is self._head for child in m.children())), None
        )

    @property
    def has_slices(self) -> bool:
        """Whether logits come in slices, as far as the batches until now have shown."""
        if self._head is None or not is_dtensor(self._head.weight):
            return self._head is not None
        return data_ranks(self._model).size == world().size  # without tensor parallelism

    def mean(self, ids: Tensor) -> Tensor:
        """The model's own loss, with gradients: the mean over all tokens but the first ones.

        Raises:
            TypeError: the model returns none.
        """

        def mean_loss(hidden: Tensor, head: Head) -> Tensor:
            states, targets = hidden[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
            return _mean_of_slices(states, targets, head)

        output, loss = self._run(ids, mean_loss, labels=ids)
        if loss is None:
            loss = getattr(output, "loss", None)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise TypeError(
                "the model returns no loss for labels=; expected an object with one, as causal "
                "language models of transformers return."
            )
        return loss

    def of_batch(self, windows: TokenWindows, rows: slice) -> Tensor:
        """:meth:`mean` of some windows.

        Raises:
            ValueError: it is not finite; names the first window.
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

    def of_windows(self, ids: Tensor) -> Tensor:
        """The negative log-likelihood of each window, float64 [windows] on the CPU; in nats.

        Raises:
            TypeError: the model returns no logits.
        """
        output, losses = self._run(ids, lambda hidden, head: nll_of_windows(hidden, ids, head))
        return nll_of_windows(logits_of(output), ids) if losses is None else losses

    def _run(self, ids: Tensor, reduce: Reduce, **arguments: Any) -> tuple[Any, Tensor | None]:
        """What the model returns; and what ``reduce`` does, None if the former has the logits."""
        has_loss = "labels" in arguments
        if self._head is None or (has_loss and not _has_usual_loss(self._owner)):
            return output_of(self._model, input_ids=ids, **arguments), None
        head = _SlicedHead(self._head, ids, reduce)
        with head.in_place(self._owner if has_loss else None):
            output = output_of(self._model, input_ids=ids, **arguments)
        if head.is_right(output, has_loss=has_loss):
            return output, head.result
        self._head = None
        if head.num_calls:
            output = output_of(self._model, input_ids=ids, **arguments)
        return output, None


class _SlicedHead:
    """Takes the place of a linear head during one forward; see [Note: slices]."""

    def __init__(self, head: nn.Linear, ids: Tensor, reduce: Reduce) -> None:
        self._head, self._ids, self._reduce = head, ids, reduce
        self._logits: Tensor | None = None
        self.result: Tensor | None = None
        self.num_calls = 0

    @contextlib.contextmanager
    def in_place(self, owner: Any) -> Iterator[None]:
        """Inside, the model calls this head; what owns the head, if given, has the loss from it."""
        if owner is not None:
            own, had = owner.loss_function, "_loss_function" in vars(owner)

            def loss_function(*args: Any, **kwargs: Any) -> Any:
                logits = args[0] if args else kwargs.get("logits")
                return own(*args, **kwargs) if logits is not self._logits else self.result

            owner.loss_function = loss_function
        vars(self._head)["forward"] = self._forward
        try:
            yield
        finally:
            del vars(self._head)["forward"]
            if owner is not None:
                owner.loss_function = own
                if not had:
                    vars(owner).pop("_loss_function", None)

    def is_right(self, output: Any, *, has_loss: bool) -> bool:
        """Whether the model did nothing else with logits than what this head did."""
        return (
            self.num_calls == 1
            and getattr(output, "logits", output) is self._logits
            and (not has_loss or getattr(output, "loss", None) is self.result)
        )

    def _forward(self, hidden: Tensor) -> Tensor:
        # A slice is made again in the backward, when masks and wrappers may have put another tensor
        # in the weight's place: so it is this one that is used.
        head = Head(self._head.weight, self._head.bias)
        if is_dtensor(head.weight) or hidden.shape[:-1] != self._ids.shape:
            return head.logits(hidden)
        self.num_calls += 1
        self.result = self._reduce(hidden, head)
        shape = (*hidden.shape[:-1], head.weight.shape[0])
        self._logits = torch.zeros((), dtype=hidden.dtype, device=hidden.device).expand(shape)
        return self._logits


def _linear_head(model: nn.Module) -> nn.Linear | None:
    """The head, if all that it does is known: it is linear, and nothing reads what it returns."""
    head: Any = head_of(model)
    if head is None or plain_class(head) is not nn.Linear or "forward" in vars(head):
        return None
    hooks = (head._forward_hooks, head._backward_hooks, head._backward_pre_hooks)
    return None if any(hooks) else head


def _has_usual_loss(module: nn.Module | None) -> bool:
    """Whether the loss of a model of transformers is the mean cross-entropy of the next token."""
    return getattr(getattr(module, "loss_function", None), "__name__", "") == "ForCausalLMLoss"


def _mean_of_slices(states: Tensor, targets: Tensor, head: Head) -> Tensor:
    """The mean of the negative log-likelihoods of positions, fp32, with gradients.

    Args:
        states: [positions, features], what the head is called with.
        targets: int64 [positions].
    """

    def loss(part: Tensor, expected: Tensor) -> Tensor:
        return functional.cross_entropy(head.logits(part).float(), expected, reduction="sum")

    num_rows = max(1, SLICE // head.weight.shape[0])
    if num_rows >= len(states):
        return loss(states, targets) / len(targets)
    slices = zip(torch.split(states, num_rows), torch.split(targets, num_rows), strict=True)
    is_fixed = not any(p is not None and p.requires_grad for p in (head.weight, head.bias))
    if is_fixed and states.requires_grad and torch.is_grad_enabled():
        return _MeanLoss.apply(states, list(slices), loss)  # type: ignore[no-untyped-call, no-any-return]
    losses = [
        checkpoint(loss, part, expected, use_reentrant=False, preserve_rng_state=False)
        for part, expected in slices
    ]
    return torch.stack(losses).sum() / len(targets)


class _MeanLoss(torch.autograd.Function):
    """The mean loss of positions, whose gradients by the states are made in the forward."""

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        slices: list[tuple[Tensor, Tensor]],
        loss: Callable[[Tensor, Tensor], Tensor],
    ) -> Tensor:
        gradient, losses = torch.empty_like(states), []
        for part, into in zip(slices, torch.split(gradient, len(slices[0][0])), strict=True):
            with torch.enable_grad():
                given = part[0].detach().requires_grad_()
                of_slice = loss(given, part[1])
            share = torch.ones_like(of_slice) / len(states)
            (found,) = torch.autograd.grad(of_slice, given, share)
            into.copy_(found)
            losses.append(of_slice.detach())
        ctx.save_for_backward(gradient)
        return torch.stack(losses).sum() / len(states)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * upstream.to(gradient.dtype), None, None


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
