"""Prune while Lightning's Trainer trains: under its DDP, FSDP and ModelParallel strategies.

    callback = PruningCallback(
        schedule.Cubic(begin=100, end=1000, frequency=100, final_sparsity=0.8), exclude="head"
    )
    trainer = Trainer(strategy="fsdp", callbacks=[callback])
    trainer.fit(model)  # ckpt_path=... goes on where an earlier run stopped

[Note: resuming] Checkpoints contain ``weight_orig`` and ``weight_mask`` of pruned parameters, and
``Strategy.load_checkpoint`` is where a model that is not pruned yet meets them: it reads the file
(DDP), or loads it into the wrapped model at once (FSDP, ModelParallel). No hook of callbacks lies
between wrapping and loading in all of them. So a callback wraps that one method of the strategy
for the time of a run, and gives the model the masks that the checkpoint has. What a criterion has
accumulated lies in the same file, or in a folder of its own inside of a distributed checkpoint.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from distprune.checkpoint import prepare_for_load
from distprune.integrations._plan import PlannedPruning
from distprune.integrations.accelerate import (
    keys_of_sharded_model,
    load_sharded_state,
    save_sharded_state,
)
from distprune.ranks.process_groups import world

try:
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import FSDPStrategy
except ImportError as error:
    raise ImportError(
        "distprune.integrations.lightning needs Lightning: pip install 'distprune[lightning]'."
    ) from error

if TYPE_CHECKING:
    # A type that does not depend on the stubs of Lightning's Callback.
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.strategies import Strategy
    from torch.optim import Optimizer
else:
    Callback = pl.Callback

__all__ = ["PruningCallback"]

logger = logging.getLogger(__name__)

_SUPPORTED = ("SingleDeviceStrategy", "DDPStrategy", "FSDPStrategy", "ModelParallelStrategy")
_CRITERION = "distprune_criterion"
_METHODS = ("load_checkpoint", "save_checkpoint")


class PruningCallback(PlannedPruning, Callback):
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
    _num_steps = 0
    _checkpoints: _MaskedCheckpoints | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse other strategies, and let checkpoints bring their masks with them.

        Raises:
            NotImplementedError: another strategy. (Lightning refuses two callbacks of one class.)
        """
        strategy = trainer.strategy
        if not any(base.__name__ in _SUPPORTED for base in type(strategy).__mro__):
            raise NotImplementedError(
                f"{type(strategy).__name__} is not supported by distprune; expected a single "
                "device, DDPStrategy, FSDPStrategy or ModelParallelStrategy."
            )
        self.teardown(trainer, pl_module, stage)
        self._checkpoints = _MaskedCheckpoints(strategy, self)
        self._saved = None

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Leave the strategy as it was."""
        if self._checkpoints is not None:
            self._checkpoints.release()

    def state_dict(self) -> dict[str, Any]:
        """The position in the schedule and the records of the masks, in plain values."""
        return {} if self.pruner is None else self._state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved = state_dict

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Make the pruner, and load its state from the checkpoint of a resumed run."""
        model = trainer.model
        assert model is not None and self._checkpoints is not None
        if self._make_criterion is not None and len(trainer.optimizers) != 1:
            raise NotImplementedError(
                f"a criterion beside {len(trainer.optimizers)} optimizers, whose steps see "
                "different gradients; expected one."
            )
        self._start(model)
        saved, self._saved = self._saved, None
        if saved:
            problem = (
                "has no masks; expected one that was saved before its zeros were made permanent at "
                "the end of training."
            )
            self._resume(dict(saved), problem)
        self._num_steps = trainer.global_step
        self._checkpoints.load_criterion()
        if trainer.max_steps > 0 and trainer.is_global_zero:
            self._warn_of_end(trainer.max_steps, logger)

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


class _MaskedCheckpoints:
    """Wraps a strategy's ``load_checkpoint`` and ``save_checkpoint``; see [Note: resuming].

    Args:
        strategy: of the Trainer.
        pruning: has the criterion that is saved and loaded.
    """

    def __init__(self, strategy: Strategy, pruning: PlannedPruning) -> None:
        self._strategy, self._pruning = strategy, pruning
        self._loaded: dict[str, Any] | Path | None = None
        self._load, self._save = strategy.load_checkpoint, strategy.save_checkpoint
        for name, wrapper in zip(_METHODS, (self._load_masked, self._save_masked), strict=True):
            setattr(strategy, name, wrapper)

    def release(self) -> None:
        """Give the strategy its own methods back."""
        for name in _METHODS:
            vars(self._strategy).pop(name, None)

    def load_criterion(self) -> None:
        """Load what the criterion had accumulated, if a checkpoint was loaded."""
        saved, self._loaded = self._loaded, None
        criterion = self._pruning._criterion
        if saved is None or criterion is None:
            return
        if isinstance(saved, Path):
            saved = load_sharded_state(criterion.state_dict(), saved)
        elif not saved:
            raise ValueError(
                "the checkpoint has no state of the criterion "
                f"{type(criterion).__name__}; expected one that was saved by a run "
                "with the same criterion."
            )
        criterion.load_state_dict(saved)

    def _load_masked(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        model = self._strategy.model
        assert model is not None
        if not self._strategy.restore_checkpoint_after_setup:
            checkpoint = self._load(checkpoint_path, *args, **kwargs)
            prepare_for_load(model, checkpoint.get("state_dict", {}))
            self._loaded = checkpoint.pop(_CRITERION, {})
            return checkpoint
        path = _path_of_leader(checkpoint_path)
        # FSDPStrategy unpickles the same file next, without restrictions.
        is_restricted = not isinstance(self._strategy, FSDPStrategy)
        keys = world().run(lambda: _keys(path, weights_only=is_restricted))
        prepare_for_load(model, keys)
        self._loaded = path / _CRITERION if (path / _CRITERION).is_dir() else {}
        return self._load(path, *args, **kwargs)

    def _save_masked(
        self, checkpoint: dict[str, Any], filepath: Any, *args: Any, **kwargs: Any
    ) -> None:
        criterion = self._pruning._criterion
        if criterion is None or "callbacks" not in checkpoint:  # save_weights_only
            self._save(checkpoint, filepath, *args, **kwargs)
            return
        state = criterion.state_dict()
        if not self._strategy.restore_checkpoint_after_setup:
            checkpoint[_CRITERION] = state
            self._save(checkpoint, filepath, *args, **kwargs)
            return
        path = _path_of_leader(filepath)
        self._save(checkpoint, path, *args, **kwargs)
        if not world().run(path.is_dir):
            raise NotImplementedError(
                f"{path} is a single file, and what the criterion has accumulated is sharded; "
                "expected FSDPStrategy(state_dict_type='sharded') or "
                "ModelParallelStrategy(save_distributed_checkpoint=True)."
            )
        save_sharded_state(state, path / _CRITERION)


def _path_of_leader(path: Any) -> Path:
    """The leading rank's path, which Lightning uses on all ranks."""
    return Path(world().distinct_texts(os.fspath(path))[0][0])


def _keys(path: Path, *, weights_only: bool) -> list[str]:
    """Keys of the model's state dict in a checkpoint of FSDP or ModelParallel."""
    if path.is_dir():
        return keys_of_sharded_model(path)
    content = torch.load(path, map_location="meta", mmap=True, weights_only=weights_only)
    return list(content["state_dict"])
