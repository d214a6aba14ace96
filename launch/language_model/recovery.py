"""Fine-tune a pruned model with its zeros held; a killed run goes on from its last checkpoint."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distprune.language_models import BatchLosses, DataRanks, TokenWindows, data_ranks
from distprune.schedule import ScheduledPruner
from jobs.checkpoints import Checkpoints
from jobs.processes import Job
from jobs.training import adamw, mean_over_ranks, relative_rate


@dataclass(frozen=True, slots=True)
class Recovery:
    """How to fine-tune."""

    steps: int
    batch: int  # sequences per step, over all ranks
    learning_rate: float
    batch_size: int  # sequences that a rank runs at a time
    seed: int
    autocast: torch.dtype | None = None  # of matrix products, as torch.autocast casts; None: none


def recover(
    model: nn.Module,
    windows: TokenWindows,
    recovery: Recovery,
    job: Job,
    *,
    checkpoints: Checkpoints | None = None,
    checkpoint_every: int = 50,
    pruner: ScheduledPruner | None = None,
    label: str | None = "recovering",
) -> list[dict[str, Any]]:
    """Train all parameters that ask for gradients; masks hold the zeros. Collective.

    Which windows a step has depends on the seed only, so any number of ranks trains on the
    same text. The rate warms up over a tenth of the steps, then falls to its tenth along a cosine.

    Args:
        windows: to train on; some may come twice, some never.
        checkpoints: where to go on from, and what to write; None: neither.
        pruner: prunes further after the optimizer's steps.
        label: what the progress is printed with; None prints nothing.

    Returns:
        What the pruner did, for each of its prunings: "step" and "parameters", as JSON has it.
    """
    has_adapters = hasattr(model, "peft_config")
    ranks = data_ranks(model)
    if not (has_adapters or ranks.averages_gradients):
        raise ValueError(
            f"--wrap none has no means to train on {job.num_ranks} ranks: nothing averages their "
            "gradients. Expected --wrap ddp."
        )
    if recovery.batch % ranks.size:
        raise ValueError(
            f"--recovery-batch {recovery.batch} cannot be split over {ranks.size} "
            f"data-parallel ranks; expected a multiple of {ranks.size}."
        )
    optimizer = adamw(model, recovery.learning_rate, beta2=0.95, weight_decay=0.0)
    first, events = 0, []
    if checkpoints is not None:
        first, events = checkpoints.load(model, optimizer, pruner)
        if first and label is not None:
            job.say(f"{label}: goes on after step {first}")
    began, losses = time.monotonic(), BatchLosses(model)
    model.train()
    steps = recovery.steps
    for step, rows in enumerate(_rows_of_steps(recovery, len(windows), ranks)[first:], first + 1):
        for group in optimizer.param_groups:
            group["lr"] = recovery.learning_rate * relative_rate(step, steps)
        loss = _backward(losses, windows.tokens[rows].to(job.device), recovery)
        if has_adapters:
            _average_gradients(model, ranks)
        optimizer.step()
        optimizer.zero_grad()
        report = None if pruner is None else pruner.step()
        if report is not None:
            events.append({"step": step, "parameters": report.to_dict()["parameters"]})
        if label is not None and (step % max(1, steps // 20) == 0 or step == steps):
            left = (time.monotonic() - began) / (step - first) * (steps - step)
            text = f"{label}: step {step}/{steps}, training loss {mean_over_ranks(loss):.3f}"
            job.say(f"{text}, {left:.0f} s left")
        if checkpoints is not None and (step % checkpoint_every == 0 or step == steps):
            checkpoints.save(step, model, optimizer, pruner, events)
    model.eval()
    return events


def _average_gradients(model: nn.Module, ranks: DataRanks) -> None:
    """Average the gradients of adapters, which no wrapper knows of, in one all-reduce."""
    gradients = [p.grad for p in model.parameters() if p.requires_grad and p.grad is not None]
    flat = torch.cat([gradient.view(-1) for gradient in gradients]) / ranks.size
    dist.all_reduce(flat)
    for gradient, mean in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(mean.view_as(gradient))


def _backward(of_model: BatchLosses, tokens: Tensor, recovery: Recovery) -> Tensor:
    """Gradients of the mean loss of this rank's sequences, some at a time; that loss."""
    losses = []
    dtype = recovery.autocast
    for part in tokens.split(recovery.batch_size):
        with torch.autocast(tokens.device.type, dtype, enabled=dtype is not None):
            loss = of_model.mean(part)
        loss = loss * (len(part) / len(tokens))
        loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses).sum()


def _rows_of_steps(recovery: Recovery, num_windows: int, ranks: DataRanks) -> list[Tensor]:
    """This rank's windows of each step, int64 [recovery_batch / ranks]."""
    generator = torch.Generator().manual_seed(recovery.seed)
    shape = recovery.steps, recovery.batch
    rows = torch.randint(num_windows, shape, generator=generator)
    return [of_step.chunk(ranks.size)[ranks.index] for of_step in rows]
