"""Polish: some steps of training towards the dense model, with the zeros of the masks held."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from distprune.base.naming import Pair
from distprune.call.reading import read_parameters
from distprune.call.request import ParameterArguments
from distprune.language_models.calibrating import gradients_for, own_parameters
from distprune.language_models.losses import FINITE, BatchLosses
from distprune.language_models.running import Report, check_same, in_eval_mode, reporter
from distprune.language_models.text import TokenWindows
from distprune.ranks.collectives import Communicator, over_groups, world
from distprune.shards.shard import Shard
from distprune.wrappers.wrapper import is_piece_of_flat

STEPS, RATE, BATCH = 40, 1e-3, 2
_WARM_UP = 5  # steps; the rate falls to a tenth after it
_SMOOTHING = 0.95  # what a step leaves of the mean of squared gradients


def polish(
    model: nn.Module,
    teacher: nn.Module,
    windows: TokenWindows,
    parameters: Iterable[Pair],
    *,
    steps: int = STEPS,
    lr: float = RATE,
    batch_size: int = BATCH,
    progress: Report | None = None,
) -> list[float]:
    """Train the kept weights of a pruned model towards what the dense model says. Collective.

    parameters = language_models.linear_layers(model)
    ...  # prune
    losses = language_models.polish(model, dense, windows, parameters)

    Each step takes ``batch_size`` windows, in turn one of each text, and lowers the mean
    Kullback-Leibler divergence of the predictions of ``model`` from those of ``teacher`` for all
    tokens, by RMSprop, which is Adam without momentum: that goes on past what is best for a window.
    The norm of the gradient is clipped to 1. What masks prune stays zero, on any wrapper. No label
    is needed, so that text which the dense model wrote will do. Parameters of 16 bits have copies
    in float32 meanwhile, in which small steps are not lost.

    The data-parallel ranks share the windows of a step. On any number of them the result is the
    same up to rounding. The model is in evaluation mode meanwhile, and has no gradients afterwards.

    Args:
        model: pruned, plain or wrapped; of float16, the smallest gradients vanish.
        teacher: the dense model, wrapped in the same way.
        windows: the same on every rank.
        parameters: (module, name) pairs that are trained; not the head, unless its logits are made
            whole.
        steps, lr: how many steps, and the learning rate in units of the root mean square of all
            kept weights: families differ in the scale of their weights. It rises for five steps,
            and falls to a tenth afterwards.
        batch_size: windows of a step, on all ranks together.
        progress: called after every step, on every rank.

    Returns:
        The loss of each step, in nats per token; the same on every rank.

    Raises:
        ValueError: steps, rate or sizes out of range; a loss that is not finite, before its step
            changes anything; as ``calibrate``. On every rank.
        RuntimeError: the model has gradients already.
        NotImplementedError: FSDP1 without ``use_orig_params``; as :func:`running.data_ranks`.

    Cost: per window and step a forward of the teacher, a forward and a backward of the model; 8
    bytes for each trained element of 32 bits, and 14 of 16 bits. Logits in slices, where the head
    allows it.

    Source: knowledge distillation, Hinton et al., arXiv 1503.02531.
    """
    dense, pruned, state = BatchLosses(teacher), BatchLosses(model), dict[str, Any]()

    def loss_of(row: int) -> Tensor:
        tokens = windows.tokens[row : row + 1]
        return pruned.divergence(tokens, dense.prediction(tokens))

    polishing = polishing_steps(
        model, loss_of, windows, parameters, steps=steps, lr=lr, batch_size=batch_size, state=state
    )
    finished = reporter("polish", steps, progress, "steps")
    with in_eval_mode(teacher):
        for _ in polishing:
            finished(1)
    losses: list[float] = state["losses"]
    return losses


def polishing_steps(
    model: nn.Module,
    loss_of: Callable[[int], Tensor],
    windows: TokenWindows,
    parameters: Iterable[Pair],
    *,
    steps: int,
    lr: float = RATE,
    batch_size: int = BATCH,
    state: dict[str, Any],
) -> Iterator[None]:
    """As :func:`polish`, one step for each item that is asked for, of a model or a part of it.

    Args:
        loss_of: what a step lowers, of the window of a number.
        state: {}, which after each step has the "losses" so far, and the "weights" and the
            "optimizer" as they are; or a copy of one that had them, to go on from there.
    """
    pairs, communicator = list(parameters), world()
    ranks = check_same(model, windows, 1)
    facts = [("steps, lr, batch_size", f"{steps}, {lr!r}, {batch_size}")]
    trained = communicator.run(
        lambda: _trained(model, pairs, steps, lr, batch_size), lambda _: facts
    )
    _, shards = read_parameters(lambda: ParameterArguments(parameters=pairs), communicator)
    squares, number = communicator.reduce_floats(2, partial(_kept, shards)).tolist()
    lr *= math.sqrt(squares / max(1, number))
    groups = [shard.managed.groups[:1] for shard in shards if shard.managed is not None]
    # The ranks whose parts of plain tensors make up the parameters, as FSDP1 has them.
    parts = over_groups(groups[0]) if any(map(is_piece_of_flat, trained)) else None
    order = _in_turn(windows)
    batch_size = min(batch_size, len(order))
    # Small steps are lost in 16 bits.
    exact = [p if p.dtype.itemsize > 2 else nn.Parameter(p.detach().float()) for p in trained]
    copies = [(p, copy) for p, copy in zip(trained, exact, strict=True) if copy is not p]
    # Its temporaries are those of one parameter at a time.
    optimizer = torch.optim.RMSprop(exact, lr, alpha=_SMOOTHING, foreach=False)

    def write_back() -> None:
        for parameter, copy in copies:
            parameter.data.copy_(copy.data)

    if state:
        optimizer.load_state_dict(state["optimizer"])
        for parameter, value in zip(exact, state["weights"], strict=True):
            parameter.data.copy_(value)
        write_back()
    state["weights"] = [parameter.data for parameter in exact]
    losses: list[float] = state.setdefault("losses", [])
    with (
        communicator.raising_everywhere(),
        in_eval_mode(model),
        torch.inference_mode(False),
        torch.enable_grad(),
        gradients_for(model, pairs),
    ):
        for step in range(len(losses), steps):
            first, total = step * batch_size, torch.zeros((), dtype=torch.float64)
            # As many forwards on every rank, in which FSDP communicates; some may not count.
            for begin in range(first, first + batch_size, ranks.size):
                number = begin + ranks.index
                counts = number < first + batch_size
                row = order[number % len(order)]

                def backward(row: int = row, weight: float = counts / batch_size) -> Tensor:
                    runs = weight > 0 or ranks.averages_gradients  # in a wrapper, all run
                    loss = loss_of(row) if runs else torch.zeros((), requires_grad=True)
                    scale = ranks.size if ranks.averages_gradients else 1
                    torch.autograd.backward(loss * (weight * scale))
                    return loss.detach().double().cpu() * (weight * ranks.is_counted)

                total += communicator.run(backward)
                for parameter, copy in copies:
                    if parameter.grad is not None:
                        given, parameter.grad = parameter.grad.float(), None
                        copy.grad = given if copy.grad is None else copy.grad + given
            loss = float(communicator.reduce_floats(1, partial(total.view, 1)))
            if not math.isfinite(loss):
                raise ValueError(f"the loss of step {step} is {loss}; {FINITE}")
            if not ranks.averages_gradients:
                for parameter in exact:
                    if parameter.grad is None:
                        parameter.grad = torch.zeros_like(parameter)
                    communicator.sum_floats(parameter.grad)
            _clip(exact, parts)
            now = lr * min(1, (step + 1) / _WARM_UP) * (1 - 0.9 * step / steps)
            # The mean of squared gradients begins at zero.
            optimizer.param_groups[0]["lr"] = now * math.sqrt(1 - _SMOOTHING ** (step + 1))
            optimizer.step()
            optimizer.zero_grad()
            write_back()
            torch.clear_autocast_cache()  # of the weights as they were
            losses.append(loss)
            state["optimizer"] = optimizer.state_dict()
            yield


def _trained(
    model: nn.Module, pairs: Sequence[Pair], steps: int, lr: float, batch_size: int
) -> list[nn.Parameter]:
    """The tensors that hold some parameters, pruned or not."""
    if steps < 1 or batch_size < 1 or not 0 < lr < math.inf:
        raise ValueError(
            f"steps={steps}, batch_size={batch_size}, lr={lr!r}; expected at least 1 step of 1 "
            "window, and a finite rate above 0."
        )
    found = own_parameters(model, pairs)
    if not found:
        raise NotImplementedError(
            "none of the parameters to train is one of the model's own; expected pairs of this "
            "model, and use_orig_params=True of FSDP1."
        )
    return found


def _kept(shards: Iterable[Shard]) -> Tensor:
    """What this rank counts of kept elements: the sum of their squares, and their number."""
    sums = torch.zeros(2, dtype=torch.float64)
    for shard in shards:
        mask, mine = shard.flat_mask, slice(shard.counted.start, shard.counted.stop)
        values = shard.flat_values[mine]
        values = values if mask is None else values * mask[mine]
        squares = torch.linalg.vector_norm(values, dtype=torch.float64).square()
        sums += torch.stack([squares, values.count_nonzero().double()]).cpu()
    return sums


def _clip(trained: Sequence[Tensor], parts: Communicator | None) -> None:
    """Make the norm of all gradients at most 1. Collective."""
    norm = torch.nn.utils.get_total_norm([p.grad for p in trained if p.grad is not None])
    if parts is not None:
        squared = parts.reduce_floats(1, lambda: norm.double().square().view(1).cpu())
        norm = squared.sqrt()[0].to(norm)
    torch.nn.utils.clip_grads_with_norm_(trained, 1.0, norm)


def _in_turn(windows: TokenWindows) -> list[int]:
    """The numbers of the windows: the first one of each text, the second ones, ..."""
    of_texts = [(windows.text_of == number).nonzero() for number in range(len(windows.texts))]
    turns = itertools.zip_longest(*(numbers[:, 0].tolist() for numbers in of_texts))
    return [number for turn in turns for number in turn if number is not None]
