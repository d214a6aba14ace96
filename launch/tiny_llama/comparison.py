"""Prune one trained model by each criterion, over each scope, to each sparsity, in one shot."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

import distprune as prune
from jobs.ranking import Ranking
from jobs.scopes import is_meaningful, keywords_of

from .model import build_model, consolidated_state, wrap_model
from .score_files import ComparisonFiles
from .scoring import CRITERIA, Calibration, TrainingScores
from .settings import Settings
from .training import FINETUNE_LEARNING_RATE, LEARNING_RATE, Trainer, make_optimizer


@dataclass(frozen=True, slots=True)
class Cell:
    """One entry of the table: a pruning of the trained model, and what came of it."""

    criterion: str
    scope: str
    sparsity: float
    masks: dict[str, Tensor]  # this rank's, by parameter name
    report: prune.PruningReport
    loss_pruned: float  # held-out nats/byte
    loss_finetuned: float  # held-out nats/byte

    @property
    def key(self) -> str:
        return f"{self.criterion}/{self.scope}/{100 * self.sparsity:g}"


@dataclass(frozen=True, slots=True)
class Comparison:
    """The whole table."""

    loss_dense: float  # held-out nats/byte before any pruning
    loss_trained_on: float  # of the dense model after as many steps as pruned ones have
    cells: list[Cell]

    def cell(self, criterion: str, scope: str, sparsity: float) -> Cell | None:
        """None where a scope has no meaning for a criterion."""
        wanted = criterion, scope, sparsity
        found = [c for c in self.cells if (c.criterion, c.scope, c.sparsity) == wanted]
        return found[0] if found else None


def compare_criteria(settings: Settings, trainer: Trainer, folder: Path) -> Comparison:
    """Train one dense model, score its weights by every criterion, and fill the table.

    Args:
        folder: where rank 0 writes what a single process needs to prune in the same way.
    """
    job = trainer.job
    torch.manual_seed(settings.seed)  # the same first weights on every rank
    model = wrap_model(build_model(), settings.wrap, job.device, job.num_ranks)
    optimizer = make_optimizer(model, LEARNING_RATE)
    parameters = prune.select(model, exclude=settings.exclude)
    scores = TrainingScores.of(parameters)

    def before_step(step: int) -> None:
        if step >= settings.steps * 3 // 4:  # weights move far at first, in any direction
            scores.movement.update()

    trainer.train(
        model,
        optimizer,
        steps=settings.steps,
        seed=settings.seed,
        label="training",
        before_step=before_step,
    )
    loss_dense = trainer.held_out_loss(model)
    job.say(f"dense: held-out loss {loss_dense:.3f}")

    calibration = Calibration(model, scores, trainer, settings.calibration_batches, settings.seed)
    rankings: dict[str, Ranking] = {}
    for name in settings.criteria:
        rankings[name] = CRITERIA[name](calibration)
        job.say(f"{name}: scores are ready")
    ratios: dict[str, float] = {}
    if "owl" in settings.scopes:
        found = calibration.statistics.outlier_ratios()
        ratios = {pair.fqn: ratio for pair, ratio in found.items()}
    files = ComparisonFiles(folder)
    files.save(consolidated_state(model), rankings, ratios, parameters, job)

    table = _Table(settings, trainer, model, parameters, ratios)
    cells = [
        table.fill(criterion, scope, sparsity, rankings[criterion])
        for sparsity in settings.sparsities
        for criterion in settings.criteria
        for scope in settings.scopes
        if is_meaningful(scope, rankings[criterion].method, sparsity)
    ]
    loss_trained_on = table.finetune() if settings.finetune_steps else loss_dense
    return Comparison(loss_dense, loss_trained_on, cells)


class _Table:
    """What all cells have in common."""

    def __init__(
        self,
        settings: Settings,
        trainer: Trainer,
        model: nn.Module,
        parameters: list[prune.NamedParameter],
        ratios: dict[str, float],
    ) -> None:
        self.settings = settings
        self.trainer = trainer
        self.model = model
        self.parameters = parameters
        self.ratios = ratios
        # This rank's part.
        self.trained = {key: part.clone() for key, part in get_model_state_dict(model).items()}
        # Of all shards.
        self.num_elements = sum(getattr(module, name).numel() for module, name in parameters)

    def fill(self, criterion: str, scope: str, sparsity: float, ranking: Ranking) -> Cell:
        """Prune the trained model, measure it, and make it the trained model again."""
        amount = round(sparsity * self.num_elements)
        torch.manual_seed(self.settings.seed)
        with warnings.catch_warnings():
            # Of emptied layers: the table shows how sparse the sparsest one is.
            warnings.simplefilter("ignore", UserWarning)
            report = prune.global_unstructured(
                self.parameters,
                ranking.method,
                ranking.scores,
                amount=amount,
                **keywords_of(scope, self.ratios),
            )
        if report.num_pruned != amount:
            raise RuntimeError(
                f"{criterion}, {scope}: {report.num_pruned=}, expected exactly {amount}."
            )
        masks = {pair.fqn: getattr(pair[0], f"{pair[1]}_mask").clone() for pair in self.parameters}
        loss_pruned = self.trainer.held_out_loss(self.model)
        loss_finetuned = self.finetune() if self.settings.finetune_steps else loss_pruned
        for module, name in self.parameters:
            prune.remove(module, name)
        set_model_state_dict(self.model, dict(self.trained))  # it renames keys in what it is given
        losses = f"loss {loss_pruned:.3f}"
        if self.settings.finetune_steps:
            losses += f", fine-tuned {loss_finetuned:.3f}"
        self.trainer.job.say(
            f"{criterion}, {scope}, {100 * sparsity:g} %: {amount:,} of {self.num_elements:,} "
            f"pruned, {losses}"
        )
        return Cell(criterion, scope, sparsity, masks, report, loss_pruned, loss_finetuned)

    def finetune(self) -> float:
        """Train the model as it is now, on batches that are the same for every cell."""
        self.trainer.train(
            self.model,
            make_optimizer(self.model, FINETUNE_LEARNING_RATE),
            steps=self.settings.finetune_steps,
            seed=self.settings.seed + 1,  # other batches than the dense training had
            label=None,
        )
        return self.trainer.held_out_loss(self.model)
