"""Prune while Lightning's Trainer trains: under its DDP, FSDP and ModelParallel strategies.

    callback = PruningCallback(
        schedule.Cubic(begin=100, end=1000, frequency=100, final_sparsity=0.8), exclude="head"
    )
    trainer = Trainer(strategy="fsdp", callbacks=[callback])
    trainer.fit(model)  # ckpt_path=... goes on where an earlier run stopped

:class:`ModelPruning` has the arguments of Lightning's own callback of that name, and prunes at the
ends of epochs. Masks in checkpoints: see _lightning_checkpoints.[Note: resuming].
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from distprune._common.element_groups import Scope
from distprune._common.exact_sums import Normalization
from distprune.api.local import is_pruned
from distprune.budgets.given import BudgetLike
from distprune.call.report import PruningReport
from distprune.integrations._lightning_base import LightningPruning
from distprune.integrations._lightning_model_pruning import ModelPruning
from distprune.integrations._plan import MakeCriterion, Plan, Ranking, Selection, Started
from distprune.recipe import Recipe
from distprune.schedule.functions import Schedule
from distprune.schedule.pruner import ScheduledPruner
from distprune.verification.records import put_records, records_of
from distprune.verification.verifying import verify

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from torch.optim import Optimizer

__all__ = ["ModelPruning", "PruningCallback"]

logger = logging.getLogger(__name__)


class PruningCallback(LightningPruning):
    """Prunes after the optimizer's steps, by a schedule or a recipe.

    Pass it to ``Trainer(callbacks=[callback])``. A step of the schedule is a batch after which an
    optimizer made a step: under gradient accumulation not every batch counts. The present sparsity
    is logged as "sparsity", and this module's logger reports each pruning (INFO). Checkpoints
    contain the masks, and ``fit``, ``validate`` and ``test`` with a ``ckpt_path`` load them, into a
    model that is not pruned yet.

    Args:
        plan: a schedule; a recipe, or the path of one; or, for everything else, a function that
            makes a ``ScheduledPruner`` for the model that the strategy has wrapped.
        include, exclude, types, names: what to prune, as for ``select``; with a schedule only.
        criterion: what ranks, instead of the magnitude: a class of ``distprune.criteria``
            (``Movement``, ``SNIP``, ``AdamSecondMoment``), or a function of the (module, name)
            pairs (``functools.partial(criteria.Taylor, unit="global_batch")``). It sees the
            gradient of every step, averaged, unscaled and before it is clipped. With a schedule
            and one optimizer only.
        reset_criterion: forget what the criterion has collected after each pruning.
        scope, pattern, normalize, budget: as for ``ScheduledPruner``; with a schedule only.
        permanent: make the zeros permanent when training ends: a checkpoint saved afterwards is
            that of an ordinary model. Checkpoints of the training keep their masks.
            ``distprune.checkpoint.fold(checkpoint["state_dict"])`` makes an ordinary state dict
            of one.
        verify_every: number of steps after which to check that the masks act, and are those that
            the last pruning left; the training stops with an error if not. None: never.

    Attributes:
        pruner: the ScheduledPruner; None before training.
        last_report: of the last pruning on this process, the same on all; None before it.

    Raises:
        TypeError: a plan of another type, or what goes with a schedule only.
        NotImplementedError: when training starts: another strategy, a criterion that a training
            loop cannot feed, several optimizers with a criterion.

    Cost: that of ``ScheduledPruner.step`` and of the criterion; nothing at other steps.
    """

    def __init__(
        self,
        plan: Schedule | Recipe | str | Path | Callable[[nn.Module], ScheduledPruner],
        *,
        include: str | Sequence[str] | None = None,
        exclude: str | Sequence[str] = (),
        types: type | tuple[type, ...] | None = None,
        names: str | Sequence[str] = ("weight",),
        criterion: MakeCriterion | None = None,
        reset_criterion: bool = False,
        scope: Scope = "global",
        pattern: str | None = None,
        normalize: Normalization | None = None,
        budget: BudgetLike | None = None,
        permanent: bool = True,
        verify_every: int | None = None,
    ) -> None:
        self._plan = Plan(
            plan,
            Selection(include, exclude, types, names),
            Ranking(scope, pattern, normalize, budget),
            criterion,
            reset_criterion,
        )
        if verify_every is not None and verify_every < 1:
            raise ValueError(
                f"verify_every={verify_every!r}; expected a number of steps >= 1, or None."
            )
        self._verify_every = verify_every
        self._permanent = permanent
        self._started: Started | None = None
        self._saved: Mapping[str, Any] | None = None
        self._model: nn.Module | None = None
        self._num_steps = 0
        self.last_report: PruningReport | None = None

    @property
    def pruner(self) -> ScheduledPruner | None:
        return None if self._started is None else self._started.pruner

    def make_permanent(self) -> None:
        """Make the zeros permanent: ordinary parameters. Call it on every process."""
        if self._started is not None:
            self._started.pruner.remove()

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self._saved = None

    def state_dict(self) -> dict[str, Any]:
        """The position in the schedule and the records of the masks, in plain values."""
        if self._started is None or self._model is None:
            return {}
        return {
            "pruning": self._started.pruner.state_dict(),
            "masks": records_of(self._model),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved = state_dict

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Make the pruner, and load its state from the checkpoint of a resumed run."""
        model = trainer.model
        assert model is not None and self.checkpoints is not None
        started = self._plan.start(model, trainer.optimizers)
        pruner = started.pruner
        saved, self._saved = self._saved, None
        if saved:
            pruner.load_state_dict(saved["pruning"])
            put_records(model, saved["masks"])
            if pruner.sparsity > 0 and not any(is_pruned(m) for m, _ in pruner.parameters):
                raise RuntimeError(
                    f"the checkpoint of step {pruner.num_steps} is pruned to "
                    f"{pruner.sparsity:.2%}, and has no masks; expected one that was saved before "
                    "its zeros were made permanent at the end of training."
                )
        self._started, self._model = started, model
        self._num_steps = trainer.global_step
        self.checkpoints.started = started
        self.checkpoints.load_criterion()
        if trainer.max_steps > 0 and trainer.is_global_zero:
            warning = self._plan.end_warning(trainer.max_steps)
            if warning is not None:
                logger.warning("%s", warning)

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Let the criterion read the gradients."""
        assert self._started is not None
        self._started.before_step()

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Prune if an optimizer has made a step, and a pruning is due."""
        assert self._started is not None and self._model is not None
        if trainer.global_step == self._num_steps:
            return
        self._num_steps = trainer.global_step
        pruner = self._started.pruner
        report = pruner.step()
        if self._verify_every is not None and pruner.num_steps % self._verify_every == 0:
            verify(self._model, expected=pruner.pruned_parameters)
        pl_module.log("sparsity", pruner.sparsity, rank_zero_only=False)
        if report is None:
            return
        self._started.after_pruning()
        self.last_report = report
        if trainer.is_global_zero:
            logger.info("step %d: pruned to %.4f\n%s", pruner.num_steps, report.sparsity, report)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Make the zeros permanent if ``permanent``."""
        if self._permanent:
            self.make_permanent()
