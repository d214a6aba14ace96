"""Training and evaluation: ordinary loops that know nothing of pruning."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from jobs.processes import Job
from jobs.training import adamw, mean_over_ranks, relative_rate

from .data import Corpus, batches

LEARNING_RATE = 1.5e-3
FINETUNE_LEARNING_RATE = 1e-3
EVALUATED_AT_ONCE = 10  # windows in one forward pass


def make_optimizer(model: nn.Module, learning_rate: float) -> torch.optim.Optimizer:
    """The optimizer of all trainings of this job."""
    return adamw(model, learning_rate, beta2=0.98, weight_decay=0.1)


@dataclass(frozen=True, slots=True)
class Trainer:
    """What training and evaluation need beside a model."""

    corpus: Corpus
    job: Job
    shard: int  # which part of every batch this rank reads ...
    num_shards: int  # ... of how many

    @classmethod
    def for_wrap(cls, wrap: str, corpus: Corpus, job: Job) -> Trainer:
        # Ranks of tensor parallelism compute one model together: each reads the whole batch.
        part = (0, 1) if wrap == "tp" else (job.rank, job.num_ranks)
        if len(corpus.held_out) % (EVALUATED_AT_ONCE * part[1]):
            raise ValueError(
                f"--held-out-windows {len(corpus.held_out)} cannot be split over {part[1]} ranks; "
                f"expected a multiple of {EVALUATED_AT_ONCE * part[1]}."
            )
        return cls(corpus, job, *part)

    def train(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        steps: int,
        seed: int,
        label: str | None,
        first: int = 0,
        before_step: Callable[[int], None] | None = None,
        after_step: Callable[[int], None] | None = None,
    ) -> None:
        """Train in place, on batches that only the seed decides.

        The rate warms up over a tenth of the steps, then falls to its tenth along a cosine.

        Args:
            steps: of the whole training.
            label: what the progress is printed with; None prints nothing.
            first: the step to begin with, counted from 0, if the others are done already.
            before_step: called with the step's number, counted from 0, when the gradients are
                there and the optimizer has not used them yet.
            after_step: called with the same number after each step.
        """
        model.train()
        parts = batches(
            self.corpus.train, steps, seed, shard=self.shard, num_shards=self.num_shards
        )
        for step, tokens in enumerate(parts[first:], start=first + 1):
            for group in optimizer.param_groups:
                group["lr"] = optimizer.defaults["lr"] * relative_rate(step, steps)
            loss = language_loss(model, tokens.to(self.job.device))
            loss.backward()
            if before_step is not None:
                before_step(step - 1)
            optimizer.step()
            optimizer.zero_grad()
            if label is not None and (step % 50 == 0 or step == steps):
                text = f"{label}: step {step}/{steps}, training loss"
                self.job.say(f"{text} {mean_over_ranks(loss.detach()):.3f}")
            if after_step is not None:
                after_step(step - 1)

    def held_out_loss(self, model: nn.Module) -> float:
        """Mean nats per byte over the held-out windows of all ranks; the same on every rank."""
        windows = self.corpus.held_out.chunk(self.num_shards)[self.shard]
        return mean_over_ranks(mean_loss(model, windows.to(self.job.device)))


@torch.no_grad()
def mean_loss(model: nn.Module, windows: Tensor) -> Tensor:
    """Mean nats per byte of a wrapped or plain model, a float64 scalar.

    Args:
        windows: int64 [a multiple of EVALUATED_AT_ONCE, WINDOW], as many on each rank: the
            forward pass of a sharded model is collective.
    """
    model.eval()
    losses = [language_loss(model, part) for part in windows.split(EVALUATED_AT_ONCE)]
    return torch.stack(losses).double().mean()


def language_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Mean nats per byte of predicting each byte from those before it."""
    return model(input_ids=tokens, labels=tokens, use_cache=False).loss
