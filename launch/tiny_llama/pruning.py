"""Prune in steps with fine-tuning between, and keep what is needed to check every mask later."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import distprune as prune

from .model import build_model, consolidated_state, wrap_model, wrapped_copy
from .settings import Settings
from .training import FINETUNE_LEARNING_RATE, LEARNING_RATE, Trainer, make_optimizer

METHODS = {"magnitude": prune.L1Unstructured, "random": prune.RandomUnstructured}


@dataclass(frozen=True, slots=True)
class PruningStep:
    """One call of `global_unstructured`, what it was given, and what came of it."""

    method: str
    sparsity: float
    amount: int  # elements newly pruned by this step
    seed: int  # of torch's default generator just before the call
    state_file: str  # consolidated state before the call, written by rank 0
    masks: dict[str, Tensor]  # this rank's masks after the call, by parameter name
    report: prune.PruningReport
    loss_pruned: float  # held-out nats/byte
    loss_finetuned: float  # held-out nats/byte

    @property
    def percent(self) -> str:
        return f"{100 * self.sparsity:g}"

    @property
    def key(self) -> str:
        return f"{self.method}_{self.percent}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The results of a job's trainings and prunings."""

    model: nn.Module  # pruned by magnitude, wrapped, with its masks
    loss_dense: float  # held-out nats/byte before any pruning
    losses_trained_on: list[float]  # of the dense model when the pruned ones were fine-tuned
    steps: list[PruningStep]  # of all methods, in order


def prune_in_rounds(settings: Settings, trainer: Trainer, folder: Path) -> Outcome:
    """Train one dense model, then prune copies of it to each sparsity, by each method."""
    job = trainer.job
    torch.manual_seed(settings.seed)  # the same first weights on every rank
    model = wrap_model(build_model(), settings.wrap, job.device, job.num_ranks)
    optimizer = make_optimizer(model, LEARNING_RATE)
    trainer.train(model, optimizer, steps=settings.steps, seed=settings.seed, label="training")
    loss_dense = trainer.held_out_loss(model)
    job.say(f"dense: held-out loss {loss_dense:.3f}")
    trained = consolidated_state(model)
    # The dense model trains on, for comparison.
    pruned_model, by_magnitude = prune_in_steps(trained, "magnitude", settings, trainer, folder)
    _, at_random = prune_in_steps(trained, "random", settings, trainer, folder)
    losses_trained_on = train_on(trained, settings, trainer)
    return Outcome(pruned_model, loss_dense, losses_trained_on, by_magnitude + at_random)


def prune_in_steps(
    trained: dict[str, Tensor], method: str, settings: Settings, trainer: Trainer, folder: Path
) -> tuple[nn.Module, list[PruningStep]]:
    """Prune a copy of the trained model to each sparsity in turn, fine-tuning after each.

    Both methods see the same number of steps on the same batches, so their losses differ
    by the choice of the pruned elements only.

    Args:
        trained: the dense model's state on rank 0, see `consolidated_state`.
        method: a key of `METHODS`.
        folder: where rank 0 writes the state before each pruning.

    Returns:
        The pruned, wrapped model with its masks still attached, and one record per sparsity.
    """
    job = trainer.job
    model = wrapped_copy(trained, settings.wrap, job.device, job.num_ranks)
    # Made before the first pruning on purpose: an optimizer outlives prunings in real training.
    optimizer = make_optimizer(model, FINETUNE_LEARNING_RATE)
    targets = prune.select(model, exclude=settings.exclude)
    num_elements = sum(getattr(module, name).numel() for module, name in targets)  # of all shards

    steps: list[PruningStep] = []
    num_pruned = 0
    for round_index, sparsity in enumerate(settings.sparsities):
        label = f"{method} {100 * sparsity:g} %"
        amount = round(sparsity * num_elements) - num_pruned
        num_pruned += amount
        state = consolidated_state(model)
        state_file = f"{method}_before_{100 * sparsity:g}.safetensors"
        if job.rank == 0:
            save_file(state, folder / state_file)

        seed = settings.seed + round_index
        torch.manual_seed(seed)
        report = prune.global_unstructured(targets, METHODS[method], amount=amount)
        if report.num_pruned != num_pruned:
            raise RuntimeError(f"{label}: {report.num_pruned=}, expected exactly {num_pruned}.")
        masks = {pair.fqn: getattr(pair[0], f"{pair[1]}_mask").clone() for pair in targets}
        loss_pruned = trainer.held_out_loss(model)
        job.say(f"{label}: {num_pruned:,} of {num_elements:,} pruned, loss {loss_pruned:.3f}")

        loss_finetuned = _finetune(model, optimizer, settings, trainer, round_index, label)
        facts = (method, sparsity, amount, seed, state_file, masks, report)
        steps.append(PruningStep(*facts, loss_pruned, loss_finetuned))
    return model, steps


def train_on(trained: dict[str, Tensor], settings: Settings, trainer: Trainer) -> list[float]:
    """What as many further steps do for the dense model: its held-out loss after each round.

    A short training is far from its end, so fine-tuning lowers the loss of any model. This
    tells how much of what a pruned model regains is merely more training.
    """
    job = trainer.job
    model = wrapped_copy(trained, settings.wrap, job.device, job.num_ranks)
    optimizer = make_optimizer(model, FINETUNE_LEARNING_RATE)
    rounds = range(len(settings.sparsities))
    return [_finetune(model, optimizer, settings, trainer, i, f"dense {i + 1}") for i in rounds]


def remove_masks(model: nn.Module, settings: Settings) -> None:
    """Make every zero permanent; the modules are ordinary again."""
    for module, name in prune.select(model, exclude=settings.exclude):
        prune.remove(module, name)


def _finetune(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    settings: Settings,
    trainer: Trainer,
    round_index: int,
    label: str,
) -> float:
    """Train on the batches of this round; returns the held-out loss afterwards."""
    seed = settings.seed + 1 + round_index  # other batches than the dense training had
    steps = settings.finetune_steps
    trainer.train(model, optimizer, steps=steps, seed=seed, label=f"{label}, fine-tuning")
    loss = trainer.held_out_loss(model)
    trainer.job.say(f"{label}, fine-tuned: loss {loss:.3f}")
    return loss
