"""Losses without all of their logits in memory; perplexity, the same number on any sharding.

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

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from distprune.api.select import head_of
from distprune.base.pruned_form import is_dtensor
from distprune.language_models.running import (
    Report,
    check_same,
    in_eval_mode,
    on_device_of,
    output_of,
    reporter,
    steps_of,
)
from distprune.language_models.text import TokenWindows
from distprune.ranks.collectives import whole, world

# What a model says about the next token at each position of some windows: what its head is called
# with, [windows, length, features], or logits; and whether it is logits.
Prediction = tuple[Tensor, bool]

SLICE = 1 << 24  # logits that there are at a time: 64 MiB in fp32


FINITE = (
    "expected finite losses. Weights that are not finite, or a dtype that overflows, cause this."
)
# The weight of a linear head in this forward, and its bias.
Head = tuple[Tensor, Tensor | None]


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
        ids = on_device_of(self._model, windows.tokens[rows])
        loss = self._mean(ids, ids[:, 1:].flatten())
        if not bool(loss.detach().isfinite()):
            text = windows.texts[int(windows.text_of[rows.start])]
            raise ValueError(
                f"the loss of window {rows.start} ({text}) is {float(loss.detach())}; {FINITE}"
            )
        return loss

    def prediction(self, tokens: Tensor) -> Prediction:
        """What the model says about the next tokens, without gradients."""
        with torch.no_grad():
            ids = on_device_of(self._model, tokens)
            logits, states = self._run(ids, lambda states, head: states)
        return (logits, True) if states is None else (states, False)

    def divergence(self, tokens: Tensor, target: Prediction) -> Tensor:
        """The mean divergence of the model's predictions from others, in nats per token.

        Args:
            tokens: int64 [windows, length].
            target: of a model with the same head.

        Raises:
            TypeError: the other model runs its head in slices, and this one cannot.
        """
        ids, (values, are_logits) = on_device_of(self._model, tokens), target
        if are_logits:
            self._head = None
        wanted = values[:, :-1].flatten(0, 1).to(ids.device)
        return self._mean(ids, wanted, needs_head=not are_logits)

    def _mean(self, ids: Tensor, wanted: Tensor, needs_head: bool = False) -> Tensor:
        """The mean of :class:`_MeanLoss` over all positions of a batch but the last ones."""

        def mean(states: Tensor, head: Head | None) -> Tensor:
            return _mean_loss(states[:, :-1].flatten(0, 1), head, wanted)

        logits, loss = self._run(ids, mean)
        if loss is None and needs_head:
            raise TypeError("expected a teacher of the same class and wrapper as the model.")
        return mean(logits, None) if loss is None else loss

    def of_windows(self, tokens: Tensor) -> Tensor:
        """The negative log-likelihood of each window, float64 [windows] on the CPU; in nats.

        Raises:
            TypeError: the model returns no logits.
        """
        ids = on_device_of(self._model, tokens)

        def means(states: Tensor, head: Head | None) -> Tensor:
            pairs = zip(states[:, :-1], ids[:, 1:], strict=True)
            return torch.stack([_mean_loss(window, head, targets) for window, targets in pairs])

        with torch.no_grad():
            logits, found = self._run(ids, means)
            found = means(logits, None) if found is None else found
        return found.double().cpu() * (ids.shape[1] - 1)

    def _run(
        self, ids: Tensor, reduce: Callable[[Tensor, Head], Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        """The logits of a batch; and the result of ``reduce``, None if the logits are whole."""
        if self._head is None:
            return logits_of(output_of(self._model, ids)), None
        # Of each call of the head in slices: the result, and the logits of one position.
        calls: list[tuple[Tensor, Tensor]] = []
        given: list[Tensor] = []

        def before(module: Any, args: tuple[Tensor, ...]) -> Any:
            (states, *others), head = args, (module.weight, module.bias)
            if is_dtensor(module.weight) or states.shape[:-1] != ids.shape:
                return None
            # With the strides of `states`, the product would copy the weight.
            probe = states[:, :1].clone(memory_format=torch.contiguous_format)
            result = reduce(states, head)
            with torch.no_grad():
                calls.append((result, functional.linear(probe, *head)))
            return (probe, *others)

        def after(module: Any, args: object, output: Tensor) -> Tensor | None:
            if len(calls) != 1 or not torch.equal(output, calls[0][1]):
                return None
            nothing = calls[0][0].new_zeros(())
            given.append(_stand_in(calls[0][0], nothing, (*ids.shape, output.shape[-1])))
            return given[0]

        hooks = [
            self._head.register_forward_pre_hook(before),
            self._head.register_forward_hook(after),
        ]
        try:
            output = output_of(self._model, ids)
        finally:
            for hook in hooks:
                hook.remove()
        logits = getattr(output, "logits", output)
        if len(calls) == 1 and given and logits is given[0]:
            return logits, _stand_in(logits, calls[0][0], calls[0][0].shape)
        self._head = None
        return logits_of(output_of(self._model, ids) if calls else output), None


class _MeanLoss(torch.autograd.Function):
    """The mean loss of positions, whose gradients are made while the logits of a slice exist.

    Args:
        states: [positions, features], what the head is called with; without a head, logits.
        weight, bias: of the head.
        targets: int64 [positions], the tokens; or what ``states`` are of another model, whose
            predictions are those that are wanted.
    """

    @staticmethod
    def forward(
        ctx: Any, states: Tensor, weight: Tensor | None, bias: Tensor | None, targets: Tensor
    ) -> Tensor:
        def predict(states: Tensor) -> Tensor:
            logits = states if weight is None else functional.linear(states, weight, bias)
            return logits.float().log_softmax(-1)

        made = [
            torch.zeros_like(t) if t is not None and need else None
            for t, need in zip((states, weight, bias), ctx.needs_input_grad, strict=False)
        ]
        losses = []
        num_rows = max(1, SLICE // (states.shape[1] if weight is None else weight.shape[0]))
        for start in range(0, len(states), num_rows):
            rows = slice(start, start + num_rows)
            chances, wanted = predict(states[rows]), targets[rows]
            if targets.is_floating_point():
                wanted = predict(wanted)
                losses.append(functional.kl_div(chances, wanted, reduction="sum", log_target=True))
            else:
                losses.append(functional.nll_loss(chances, wanted, reduction="sum"))
            if any(gradient is not None for gradient in made):
                error = chances.exp_()  # of the mean loss, by the logits
                if targets.is_floating_point():
                    error -= wanted.exp_()
                else:
                    error[range(len(error)), wanted] -= 1
                error = error.div_(len(states)).to(states.dtype)
                of_states, of_weight, of_bias = made
                if of_states is not None:
                    of_states[rows] = error if weight is None else error @ weight
                if of_weight is not None:
                    of_weight += error.T @ states[rows]
                if of_bias is not None:
                    of_bias += error.sum(0)
        ctx.save_for_backward(*made)
        return torch.stack(losses).sum() / len(states)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        made = [None if g is None else g * upstream.to(g.dtype) for g in ctx.saved_tensors]
        return (*made, None)


def _mean_loss(states: Tensor, head: Head | None, targets: Tensor) -> Tensor:
    """:class:`_MeanLoss` of the weight and the bias of a head."""
    weight, bias = head or (None, None)
    if weight is not None and not torch.is_grad_enabled():  # else it makes gradients all the same
        weight, bias = weight.detach(), bias if bias is None else bias.detach()
    loss: Tensor = _MeanLoss.apply(states, weight, bias, targets)  # type: ignore[no-untyped-call]
    return loss


class _StandIn(torch.autograd.Function):
    """A number, as a tensor of any shape without memory, that stands for another such number.

    The gradient passes as it is: so wrappers see that of a loss pass through logits.
    """

    @staticmethod
    def forward(ctx: Any, value: Tensor, number: Tensor, shape: tuple[int, ...]) -> Tensor:
        ctx.shape = value.shape
        return number.detach().clone().expand(shape)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None]:
        return upstream[(0,) * upstream.ndim].expand(ctx.shape), None, None


def _stand_in(value: Tensor, number: Tensor, shape: tuple[int, ...]) -> Tensor:
    result: Tensor = _StandIn.apply(value, number, shape)  # type: ignore[no-untyped-call]
    return result


def logits_of(output: Any) -> Tensor:
    """The whole logits in what a model returns; sharded ones are gathered."""
    logits = getattr(output, "logits", output)
    if not isinstance(logits, Tensor) or logits.ndim != 3:
        raise TypeError(
            f"the model returns a {type(output).__name__}; expected logits, or an object with "
            "logits [windows, length, vocabulary], as causal language models of transformers do."
        )
    return whole(logits) if is_dtensor(logits) else logits


@dataclass(frozen=True)
class TextPerplexity:
    """How well a model predicts a text.

    Attributes:
        text: its name.
        num_windows: of it.
        num_tokens: that were predicted.
        nll: the sum of their negative log-likelihoods, in nats.
    """

    text: str
    num_windows: int
    num_tokens: int
    nll: float

    @property
    def perplexity(self) -> float:
        """exp(nll / num_tokens); infinity where that is no finite number."""
        try:
            return math.exp(self.nll / self.num_tokens)
        except OverflowError:
            return math.inf

    def as_values(self) -> dict[str, Any]:
        """For JSON."""
        return {**vars(self), "perplexity": self.perplexity}


@dataclass(frozen=True)
class PerplexityReport:
    """How well a model predicts texts; the same on every rank.

    Attributes:
        texts: each text.
        total: all of them together; it is called "all".
        window_nll: float64 [windows], the sum of the negative log-likelihoods of each window.
        length: tokens of a window.
        has_bos: whether windows begin with a bos token.
    """

    texts: tuple[TextPerplexity, ...]
    total: TextPerplexity
    window_nll: Tensor
    length: int
    has_bos: bool

    @property
    def perplexity(self) -> float:
        """Of all texts together."""
        return self.total.perplexity

    def as_values(self) -> dict[str, Any]:
        """For JSON, without the windows."""
        return {
            "length": self.length,
            "has_bos": self.has_bos,
            "texts": [text.as_values() for text in self.texts],
            "all": self.total.as_values(),
        }


def perplexity(
    model: nn.Module, windows: TokenWindows, *, batch_size: int = 1, progress: Report | None = None
) -> PerplexityReport:
    """The perplexity of texts under a model. Collective over all ranks.

    The data-parallel ranks share the windows (see running.[Note: steps]); the ranks of a
    tensor-parallel group compute together. The mean loss of each window is computed from its logits
    in fp32. Windows are added without rounding (``math.fsum``), so the result depends on the ranks
    only as far as the logits do. With DDP, or without a wrapper, it is bit-equal on any number of
    ranks whose kernels are the same; tensor parallelism adds in another order and is equal up to
    rounding.

    The model is in evaluation mode meanwhile, without gradients and without a cache.

    Args:
        model: plain or wrapped: called with ``input_ids``, it returns logits [windows, length,
            vocabulary], or an object that has them as ``logits``.
        windows: the same on every rank.
        batch_size: windows that a rank runs at a time. Another one may change the rounding of the
            logits.
        progress: called after every step, on every rank.

    Raises:
        ValueError: a window with a loss that is not finite, by the name of its text; tokens or
            positions that the model does not have; ranks with different windows. On every rank.
        TypeError: a model that returns no logits.
        NotImplementedError: as :func:`running.data_ranks`.
        Exception: of the model. Where its forward communicates (FSDP, TP), an error on one rank
            alone leaves the others waiting until the timeout of the process group.

    Cost: a forward of each window; 192 MiB of memory, and for models whose head does not run in
    slices (losses.[Note: slices]) the logits of a batch. On the wire what the forwards send, 40
    bytes per step, and 16 bytes per window at the end.
    """
    ranks = check_same(model, windows, batch_size)
    communicator = world()
    found = torch.zeros(len(windows), dtype=torch.float64)
    batches = BatchLosses(model)
    finished = reporter("evaluate", len(windows), progress)
    with communicator.raising_everywhere(), in_eval_mode(model), torch.inference_mode(False):
        for step in steps_of(len(windows), batch_size, ranks):
            tokens = windows.tokens[step.rows]
            losses = communicator.run(partial(batches.of_windows, tokens))
            if ranks.is_counted and step.num_windows:
                found[step.rows] = losses
            finished(step.num_in_step)
    communicator.agree()
    return report_of(windows, found)


def report_of(windows: TokenWindows, losses: Tensor) -> PerplexityReport:
    """The perplexity of each text. Collective.

    Args:
        losses: float64 [windows], of windows that this rank counts; else 0. One rank counts each.

    Raises:
        ValueError: a loss that is not finite, by its window; on every rank.
    """
    losses = world().reduce_floats(len(windows), lambda: losses)
    wrong: list[int] = (~losses.isfinite()).nonzero().view(-1).tolist()
    if wrong:
        text = int(windows.text_of[wrong[0]])
        number = wrong[0] - int((windows.text_of == text).nonzero()[0])
        raise ValueError(
            f"window {number} of {windows.texts[text]} has a loss of {float(losses[wrong[0]])}, "
            f"and {len(wrong)} of {len(windows)} windows have one that is not finite; {FINITE}"
        )

    def of_text(name: str, found: Tensor) -> TextPerplexity:
        num_tokens = len(found) * (windows.length - 1)
        return TextPerplexity(name, len(found), num_tokens, math.fsum(found.tolist()))

    of_texts = [losses[windows.text_of == number] for number in range(len(windows.texts))]
    pairs = zip(windows.texts, of_texts, strict=True)
    with_windows = tuple(of_text(name, found) for name, found in pairs if len(found))
    total = of_text("all", losses)
    return PerplexityReport(with_windows, total, losses, windows.length, windows.has_bos)
