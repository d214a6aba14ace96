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
starts it is loaded once more, with its masks. What a criterion has collected is sharded
there, and Lightning has no place for it in a checkpoint.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl

import distprune.checkpoint as checkpoint
from distprune.integrations import PlannedPruning, add_masks, pruning_state

if TYPE_CHECKING:
    # A type that does not depend on the stubs of Lightning's Callback.
    from lightning.pytorch.callbacks import Callback
    from torch.optim import Optimizer
else:
    Callback = pl.Callback

__all__ = ["PruningCallback"]

_NOT_SAVED = (
    "what a criterion has collected is sharded, and a checkpoint of Lightning has no place for it; "
    "expected Trainer(enable_checkpointing=False), or DDPStrategy."
)
_SUPPORTED = ("SingleDeviceStrategy", "DDPStrategy", "FSDPStrategy", "ModelParallelStrategy")
_AVERAGING = ("WeightAveraging", "StochasticWeightAveraging")


class PruningCallback(PlannedPruning, Callback):
    """Prunes after the optimizer's steps, by a schedule or a recipe.

    Pass it to ``Trainer(callbacks=[callback])``. A step of the schedule is a batch after which an
    optimizer made a step: under gradient accumulation not every batch counts. The present sparsity
    is logged as "sparsity", and the logger "distprune.integrations" reports each pruning (INFO).
    Checkpoints contain the masks, and ``fit``, ``validate`` and ``test`` with a ``ckpt_path`` load
    them, into a model that is not pruned yet. Under FSDP and ModelParallel the checkpoint has to be
    sharded (``FSDPStrategy(state_dict_type="sharded")``), and evaluation loads the zeros alone.

    Args:
        plan: a schedule; a recipe, or the path of one; or, for everything else, a function that
            makes a ``ScheduledPruner`` for the model that the strategy has wrapped.
        criterion: what ranks, instead of the magnitude: a class of ``distprune.criteria``
            (``Movement``, ``SNIP``), or a function of the (module, name) pairs
            (``functools.partial(criteria.Taylor, unit="global_batch")``). It sees the
            gradient of every step, averaged, unscaled and before it is clipped. With a schedule
            and one optimizer only. Checkpoints have what it has collected; under FSDP and
            ModelParallel they cannot, and need ``Trainer(enable_checkpointing=False)``.
        reset_criterion: forget what the criterion has collected after each pruning.
        options: what to prune (include, exclude, types, names), as for ``select``, and other
            arguments of ``ScheduledPruner`` (scope, pattern, ...); with a schedule only.
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

    _saved: dict[str, Any] | None = None
    _is_sharded = False
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
        self._saved = None
        self._is_sharded = strategy.restore_checkpoint_after_setup
        if not self._is_sharded:
            register: Any = pl_module.register_load_state_dict_pre_hook
            self._hook = register(add_masks)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Leave the module without the hook."""
        if self._hook is not None:
            self._hook.remove()

    def state_dict(self) -> dict[str, Any]:
        """The position in the schedule, the records of the masks, and what the criterion has."""
        if self.pruner is None:
            return {}
        state = pruning_state(self._model, self.pruner)
        if self._criterion is None:
            return state
        if self._is_sharded:
            raise NotImplementedError(_NOT_SAVED)
        return {**state, "criterion": self._criterion.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state until training starts and there is a pruner."""
        self._saved = state_dict

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Make the pruner, and load its state from the checkpoint of a resumed run."""
        model, saved, path = trainer.model, self._saved, trainer.ckpt_path
        assert model is not None
        if self._make_criterion is not None and len(trainer.optimizers) != 1:
            raise NotImplementedError(
                f"a criterion beside {len(trainer.optimizers)} optimizers, whose steps see "
                "different gradients; expected one."
            )
        if self._make_criterion is not None and self._is_sharded and trainer.checkpoint_callbacks:
            raise NotImplementedError(_NOT_SAVED)
        if saved and self._is_sharded:
            assert path is not None
            names = [base.__name__ for base in type(trainer.strategy).__mro__]
            key = "model" if "FSDPStrategy" in names else "state_dict"
            checkpoint.load(path, model, model_key=key)
        # By max_steps or max_epochs; or infinite.
        self._start(model, trainer.estimated_stepping_batches)
        if saved:
            problem = (
                "has no masks; expected one that was saved before its zeros were made permanent at "
                "the end of training."
            )
            self._resume(saved, problem)
            if self._criterion is not None:
                self._criterion.load_state_dict(saved["criterion"])
        self._saved = None
        self._num_steps = trainer.global_step

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Let the criterion read the gradients."""
        if self._criterion is not None:
            self._criterion.update()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any
    ) -> None:
        """Prune if an optimizer has made a step, and a pruning is due."""
        assert self.pruner is not None
        if trainer.global_step != self._num_steps:
            self._num_steps = trainer.global_step
            self._prune()
            pl_module.log("sparsity", self.pruner.sparsity, rank_zero_only=False)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Make the zeros permanent if ``permanent``."""
        if self._permanent:
            self.make_permanent()
