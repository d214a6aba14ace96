"""Prune while Lightning's Trainer trains: under its DDP, FSDP and ModelParallel strategies.

    callback = PruningCallback(
        schedule.Cubic(begin=100, end=1000, frequency=100, final_sparsity=0.8), exclude="head"
    )
    trainer = Trainer(strategy="fsdp", callbacks=[callback])
    trainer.fit(model)  # ckpt_path=... goes on where an earlier run stopped

[Note: resuming] Checkpoints contain the masks of pruned parameters, which a model that is not
pruned yet has no place for. Strategies that load before they wrap (a single device, DDP) call
``load_state_dict`` of the module, which a hook precedes. Under FSDP and ModelParallel a sharded
checkpoint has the names of the dense model, so Lightning loads it, with its zeros; when training
starts it is loaded once more, with its masks. The tensors of a criterion lie beside those of the
model there.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from distprune import checkpoint
from distprune.criteria.base import Criterion
from distprune.integrations._plan import PlannedPruning, add_masks
from distprune.integrations.accelerate import load_sharded_state

try:
    import lightning.pytorch as pl
except ImportError as error:
    raise ImportError(
        "distprune.integrations.lightning needs Lightning: pip install 'distprune[lightning]'."
    ) from error

if TYPE_CHECKING:
    # A type that does not depend on the stubs of Lightning's Callback.
    from lightning.pytorch.callbacks import Callback
    from torch.optim import Optimizer
else:
    Callback = pl.Callback

__all__ = ["PruningCallback"]

logger = logging.getLogger(__name__)

_SUPPORTED = ("SingleDeviceStrategy", "DDPStrategy", "FSDPStrategy", "ModelParallelStrategy")
_AVERAGING = ("WeightAveraging", "StochasticWeightAveraging")
_CRITERION = "distprune_criterion"


class PruningCallback(PlannedPruning, Callback):
    """Prunes after the optimizer's steps, by a schedule or a recipe.

    Pass it to ``Trainer(callbacks=[callback])``. A step of the schedule is a batch after which an
    optimizer made a step: under gradient accumulation not every batch counts. The present sparsity
    is logged as "sparsity", and this module's logger reports each pruning (INFO). Checkpoints
    contain the masks, and ``fit``, ``validate`` and ``test`` with a ``ckpt_path`` load them, into a
    model that is not pruned yet. Under FSDP and ModelParallel the checkpoint has to be sharded
    (``FSDPStrategy(state_dict_type="sharded")``), and evaluation loads the zeros alone.

    Args:
        plan: a schedule; a recipe, or the path of one; or, for everything else, a function that
            makes a ``ScheduledPruner`` for the model that the strategy has wrapped.
        include, exclude, types, names: what to prune, as for ``select``; with a schedule only.
        criterion: what ranks, instead of the magnitude: a class of ``distprune.criteria``
            (``Movement``, ``SNIP``), or a function of the (module, name) pairs
            (``functools.partial(criteria.Taylor, unit="global_batch")``). It sees the
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

    _saved: Mapping[str, Any] | None = None
    _saved_criterion: dict[str, Any] | None = None
    _num_steps = 0
    _hook: Any = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse other strategies, and let state dicts bring their masks with them.

        Raises:
            NotImplementedError: another strategy; a callback that averages weights, which copies
                the average, made without masks, over the pruned model. (Lightning refuses two
                callbacks of one class.)
        """
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if any(base.__name__ in _AVERAGING for base in type(callback).__mro__):
                raise NotImplementedError(
                    f"{type(callback).__name__} beside PruningCallback would leave a dense model: "
                    "its average knows no masks. Expected one of both; train and prune first, "
                    "then average, and put the masks on the average (docs/training.md, EMA)."
                )
        strategy = trainer.strategy
        if not any(base.__name__ in _SUPPORTED for base in type(strategy).__mro__):
            raise NotImplementedError(
                f"{type(strategy).__name__} is not supported by distprune; expected a single "
                "device, DDPStrategy, FSDPStrategy or ModelParallelStrategy."
            )
        self._saved = self._saved_criterion = None
        if not strategy.restore_checkpoint_after_setup:
            register: Any = pl_module.register_load_state_dict_pre_hook
            self._hook = register(add_masks)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Leave the module without the hook."""
        if self._hook is not None:
            self._hook.remove()

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Save what the criterion has collected."""
        if self._criterion is None:
            return
        state = checkpoint[_CRITERION] = self._criterion.state_dict()
        if not trainer.strategy.restore_checkpoint_after_setup:
            return
        of_model = checkpoint["state_dict"]
        if all(type(value) is Tensor for value in of_model.values()):
            raise NotImplementedError(
                "the checkpoint is a single file, and what the criterion has collected is sharded; "
                "expected FSDPStrategy(state_dict_type='sharded') or "
                "ModelParallelStrategy(save_distributed_checkpoint=True)."
            )
        of_model |= _named(state.pop("accumulators"))

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Keep what the criterion had collected until there is one."""
        self._saved_criterion = checkpoint.get(_CRITERION, {})

    def state_dict(self) -> dict[str, Any]:
        """The position in the schedule and the records of the masks, in plain values."""
        return {} if self.pruner is None else self._state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved = state_dict

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Make the pruner, and load its state from the checkpoint of a resumed run."""
        model = trainer.model
        assert model is not None
        if self._make_criterion is not None and len(trainer.optimizers) != 1:
            raise NotImplementedError(
                f"a criterion beside {len(trainer.optimizers)} optimizers, whose steps see "
                "different gradients; expected one."
            )
        saved, self._saved = self._saved, None
        if saved and trainer.strategy.restore_checkpoint_after_setup:
            assert trainer.ckpt_path is not None
            checkpoint.load(trainer.ckpt_path, model, model_key=_model_key(trainer))
        self._start(model)
        if saved:
            problem = (
                "has no masks; expected one that was saved before its zeros were made permanent at "
                "the end of training."
            )
            self._resume(dict(saved), problem)
        self._num_steps = trainer.global_step
        if self._criterion is not None and self._saved_criterion is not None:
            self._load_criterion(self._criterion, self._saved_criterion, trainer)
        num_steps = trainer.estimated_stepping_batches  # by max_steps or max_epochs; or inf
        if trainer.is_global_zero and num_steps < float("inf"):
            self._warn_of_end(int(num_steps), logger)

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Let the criterion read the gradients."""
        self._before_step()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any
    ) -> None:
        """Prune if an optimizer has made a step, and a pruning is due."""
        pruner = self.pruner
        assert pruner is not None
        if trainer.global_step == self._num_steps:
            return
        self._num_steps = trainer.global_step
        report = self._prune(pruner.num_steps + 1)
        pl_module.log("sparsity", pruner.sparsity, rank_zero_only=False)
        if report is not None and trainer.is_global_zero:
            logger.info("step %d: pruned to %.4f\n%s", pruner.num_steps, report.sparsity, report)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Make the zeros permanent if ``permanent``."""
        if self._permanent:
            self.make_permanent()

    def _load_criterion(
        self, criterion: Criterion, saved: dict[str, Any], trainer: pl.Trainer
    ) -> None:
        if not saved:
            raise ValueError(
                "the checkpoint has no state of the criterion "
                f"{type(criterion).__name__}; expected one that was saved by a run "
                "with the same criterion."
            )
        if "accumulators" not in saved:  # they are beside the model, each rank's shards
            tensors = criterion.state_dict()["accumulators"]
            assert trainer.ckpt_path is not None
            load_sharded_state({_model_key(trainer): _named(tensors)}, Path(trainer.ckpt_path))
            saved = saved | {"accumulators": tensors}
        criterion.load_state_dict(saved)


def _named(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{_CRITERION}.{key}": value for key, value in tensors.items()}


def _model_key(trainer: pl.Trainer) -> str:
    """Under which key a strategy saves the model in a sharded checkpoint."""
    names = [base.__name__ for base in type(trainer.strategy).__mro__]
    return "model" if "FSDPStrategy" in names else "state_dict"
