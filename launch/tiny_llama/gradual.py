"""Prune while training, by a schedule; a killed run continues from its last checkpoint.

One model is trained three times from the same first weights on the same batches: pruned by
magnitude, pruned at random, and dense, for comparison.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import distprune as prune
from distprune.schedule import Cubic, Linear, Schedule, ScheduledPruner
from jobs.checkpoints import Checkpoints

from .model import build_model, consolidated_state, wrap_model
from .pruning import METHODS, Outcome, PruningStep
from .settings import Settings
from .training import LEARNING_RATE, Trainer, make_optimizer

NUM_PRUNINGS = 6
DENSE = "dense"


def make_schedule(settings: Settings) -> Schedule:
    """Dense for a quarter of --steps, then some prunings until they end."""
    begin, end = settings.steps // 4, settings.steps - 1
    frequency = max(1, -(-(end - begin) // NUM_PRUNINGS))
    kind = {"linear": Linear, "cubic": Cubic}[settings.schedule]
    return kind(begin, end, frequency, final_sparsity=settings.sparsities[-1])


def prune_while_training(settings: Settings, trainer: Trainer, folder: Path) -> Outcome:
    """All three trainings, as far as they are not done yet. Collective.

    Args:
        folder: where rank 0 writes the state before each pruning, and the masks after it.
    """
    runs = {name: _Run(name, settings, trainer, folder) for name in (*METHODS, DENSE)}
    losses = {name: run.finish() for name, run in runs.items()}
    dense = runs[DENSE].events
    return Outcome(
        model=runs["magnitude"].model,
        loss_dense=dense[0]["loss_before"],
        losses_trained_on=[*(event["loss_before"] for event in dense[1:]), losses[DENSE]],
        steps=[step for name in METHODS for step in runs[name].steps(losses[name])],
    )


class _Run:
    """One training, pruned by a method or dense."""

    def __init__(self, name: str, settings: Settings, trainer: Trainer, folder: Path) -> None:
        job = trainer.job
        self.name = name
        self.settings = settings
        self.trainer = trainer
        self.folder = folder
        self.schedule = make_schedule(settings)
        torch.manual_seed(settings.seed)  # the same first weights on every rank, in every run
        self.model = wrap_model(build_model(), settings.wrap, job.device, job.num_ranks)
        self.optimizer = make_optimizer(self.model, LEARNING_RATE)
        self.pruner = None
        if name != DENSE:
            targets = prune.select(self.model, exclude=settings.exclude)
            method = METHODS[name]
            self.pruner = ScheduledPruner(targets, self.schedule, pruning_method=method)
        facts = ("steps", "finetune_steps", "schedule", "sparsities", "seed", "exclude",
                 "held_out_windows")  # fmt: skip
        present = {fact: getattr(settings, fact) for fact in facts}
        present |= {k: list(v) for k, v in present.items() if isinstance(v, tuple)}  # as JSON
        self.checkpoints = Checkpoints(settings.checkpoints / name, present, job)
        # What happened at each due step, as JSON has it.
        self.events: list[dict[str, Any]] = []

    def finish(self) -> float:
        """Train and prune to the end, from the last checkpoint on; the held-out loss then."""
        start, self.events = self.checkpoints.load(self.model, self.optimizer, self.pruner)
        if start:
            self.trainer.job.say(f"{self.name}: continuing after step {start}")
        self.trainer.train(
            self.model,
            self.optimizer,
            steps=self._num_steps,
            seed=self.settings.seed,
            label=self.name,
            first=start,
            after_step=self._after_step,
        )
        return self.trainer.held_out_loss(self.model)

    def steps(self, loss_at_end: float) -> list[PruningStep]:
        """The results, in the form that the rest of the job uses."""
        assert self.pruner is not None
        losses_after = [*(event["loss_before"] for event in self.events[1:]), loss_at_end]
        return [
            PruningStep(
                method=self.name,
                sparsity=event["sparsity"],
                amount=event["amount"],
                seed=event["seed"],
                state_file=event["state_file"],
                masks=self._masks(event),
                report=_report_from(event["report"]),
                loss_pruned=event["loss_pruned"],
                loss_finetuned=loss_after,
            )
            for event, loss_after in zip(self.events, losses_after, strict=True)
        ]

    @property
    def _num_steps(self) -> int:
        return self.settings.steps + self.settings.finetune_steps

    def _after_step(self, step: int) -> None:
        target = self.schedule.sparsity_at(step)
        if self.schedule.is_due(step) and target > 0:
            self._prune(step, target)
        elif self.pruner is not None:
            self.pruner.step()
        done = step + 1
        if done % self.settings.checkpoint_every == 0 or done == self._num_steps:
            self.checkpoints.save(done, self.model, self.optimizer, self.pruner, self.events)

    def _prune(self, step: int, target: float) -> None:
        loss_before = self.trainer.held_out_loss(self.model)
        event = {"step": step, "sparsity": target, "loss_before": loss_before}
        if self.pruner is not None:
            event["seed"] = self.settings.seed + step
            event["state_file"] = f"{self.name}_before_{step}.safetensors"
            event["masks_file"] = f"{self.name}_masks_{step}.safetensors"
            self._save(event["state_file"], consolidated_state(self.model))
            torch.manual_seed(event["seed"])
            report = self.pruner.step()
            if report is None:
                raise RuntimeError(f"{self.name}: nothing was pruned at step {step}; {target=}.")
            state = consolidated_state(self.model)
            suffix = "_mask"
            masks = {k.removesuffix(suffix): v for k, v in state.items() if k.endswith(suffix)}
            self._save(event["masks_file"], {name: mask.bool() for name, mask in masks.items()})
            event["amount"] = report.num_pruned_now
            event["report"] = asdict(report)
            event["loss_pruned"] = self.trainer.held_out_loss(self.model)
            loss = f"loss {loss_before:.3f}, pruned {event['loss_pruned']:.3f}"
            self.trainer.job.say(
                f"{self.name}, step {step}: {report.num_pruned:,} of {report.num_elements:,} "
                f"pruned, {loss}"
            )
        self.events.append(event)
        self.model.train()  # as it was before the losses were measured

    def _save(self, name: str, tensors: dict[str, Tensor]) -> None:
        if self.trainer.job.rank == 0:
            save_file(tensors, self._file(name))

    def _file(self, name: str) -> Path:
        return self.folder / name

    def _masks(self, event: dict[str, Any]) -> dict[str, Tensor]:
        """This rank's part of the last masks; of earlier prunings, what was written, whole."""
        assert self.pruner is not None
        if event is not self.events[-1]:
            return load_file(self._file(event["masks_file"]))
        return {pair.fqn: getattr(pair[0], f"{pair[1]}_mask") for pair in self.pruner.parameters}


def _report_from(values: dict[str, Any]) -> prune.PruningReport:
    entries = tuple(prune.ParameterReport(**entry) for entry in values["parameters"])
    return prune.PruningReport(**{**values, "parameters": entries})
