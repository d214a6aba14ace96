"""Masks and criteria in Lightning's checkpoints, on every strategy.

[Note: resuming] Checkpoints contain ``weight_orig`` and ``weight_mask`` of pruned parameters, and
``Strategy.load_checkpoint`` is where a model that is not pruned yet meets them: it reads the file
(DDP), or loads it into the wrapped model at once (FSDP, ModelParallel). No hook of callbacks lies
between wrapping and loading in all of them. So a callback wraps that one method of the strategy
for the time of a run, and gives the model the masks that the checkpoint has. What a criterion has
accumulated lies in the same file, or in a folder of its own inside of a distributed checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.strategies import FSDPStrategy
from torch import nn

from distprune._common.process_groups import world
from distprune.checkpoint import prepare_for_load
from distprune.integrations._plan import Started

if TYPE_CHECKING:
    from lightning.pytorch.strategies import Strategy

_CRITERION = "distprune_criterion"
_METHODS = ("load_checkpoint", "save_checkpoint")


class MaskedCheckpoints:
    """Wraps a strategy's ``load_checkpoint`` and ``save_checkpoint``; see [Note: resuming].

    Args:
        strategy: of the Trainer.
        before_loading: called with the model just before it gets masks from a checkpoint.

    Attributes:
        started: the pruner of the run, whose criterion is saved; None before training.
    """

    def __init__(self, strategy: Strategy, before_loading: Callable[[nn.Module], None]) -> None:
        self.started: Started | None = None
        self._strategy = strategy
        self._before_loading = before_loading
        self._loaded: dict[str, Any] | Path | None = None
        self._load, self._save = strategy.load_checkpoint, strategy.save_checkpoint
        for name, wrapper in zip(_METHODS, (self._load_masked, self._save_masked), strict=True):
            setattr(strategy, name, wrapper)

    def release(self) -> None:
        """Give the strategy its own methods back."""
        for name in _METHODS:
            vars(self._strategy).pop(name, None)

    def load_criterion(self) -> None:
        """Load what the criterion of ``started`` had accumulated, if a checkpoint was loaded."""
        saved, self._loaded = self._loaded, None
        state = None if self.started is None else self.started.criterion_state()
        if saved is None or state is None:
            return
        assert self.started is not None and self.started.criterion is not None
        if isinstance(saved, Path):
            from torch.distributed.checkpoint import state_dict_loader

            state_dict_loader.load(state, checkpoint_id=saved)
            saved = state
        elif not saved:
            raise ValueError(
                "the checkpoint has no state of the criterion "
                f"{type(self.started.criterion).__name__}; expected one that was saved by a run "
                "with the same criterion."
            )
        self.started.criterion.load_state_dict(saved)

    def _load_masked(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        model = self._strategy.model
        assert model is not None
        if not self._strategy.restore_checkpoint_after_setup:
            checkpoint = self._load(checkpoint_path, *args, **kwargs)
            self._before_loading(model)
            prepare_for_load(model, checkpoint.get("state_dict", {}))
            self._loaded = checkpoint.pop(_CRITERION, {})
            return checkpoint
        path = _path_of_leader(checkpoint_path)
        # FSDPStrategy unpickles the same file next, without restrictions.
        is_restricted = not isinstance(self._strategy, FSDPStrategy)
        keys = world().run(lambda: _keys(path, weights_only=is_restricted))
        self._before_loading(model)
        prepare_for_load(model, keys)
        self._loaded = path / _CRITERION if (path / _CRITERION).is_dir() else {}
        return self._load(path, *args, **kwargs)

    def _save_masked(
        self, checkpoint: dict[str, Any], filepath: Any, *args: Any, **kwargs: Any
    ) -> None:
        state = None
        if self.started is not None and "callbacks" in checkpoint:  # not for save_weights_only
            state = self.started.criterion_state()
        if state is None:
            self._save(checkpoint, filepath, *args, **kwargs)
            return
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
        from torch.distributed.checkpoint import state_dict_saver

        state_dict_saver.save(state, checkpoint_id=path / _CRITERION)


def _path_of_leader(path: Any) -> Path:
    """The leading rank's path, which Lightning uses on all ranks."""
    return Path(world().distinct_texts(os.fspath(path))[0][0])


def _keys(path: Path, *, weights_only: bool) -> list[str]:
    """Keys of the model's state dict in a checkpoint of FSDP or ModelParallel."""
    if path.is_dir():
        from torch.distributed.checkpoint.filesystem import FileSystemReader

        entries = FileSystemReader(os.fspath(path)).read_metadata().state_dict_metadata
        prefixes = ("model.", "state_dict.")
        return [
            key.removeprefix(prefix) for key in entries for prefix in prefixes
            if key.startswith(prefix)
        ]  # fmt: skip
    content = torch.load(path, map_location="meta", mmap=True, weights_only=weights_only)
    return list(content["state_dict"])
