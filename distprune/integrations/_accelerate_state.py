"""Masks, schedules, criteria and statistics in what accelerate saves and loads.

[Note: loading masks] ``Accelerator.load_state`` loads a model as it is. One that is not pruned yet
has no place for the masks in the folder: DDP raises, and FSDP2 loads nothing under names that it
does not have. Its hooks come before the loading for DDP, and after it for FSDP. So
:func:`load_state` gives the model its masks first.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from distprune._common.process_groups import world
from distprune.checkpoint import prepare_for_load
from distprune.criteria.base import Criterion
from distprune.masks.hook import put_records, records_of
from distprune.schedule.pruner import ScheduledPruner

if TYPE_CHECKING:
    from accelerate import Accelerator


class Stateful(Protocol):
    """An object with a state dict that is the same on every rank."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Any, /) -> Any: ...


def register_pruning(
    accelerator: Accelerator,
    model: nn.Module,
    pruner: ScheduledPruner | None = None,
    *,
    criteria: Sequence[Criterion] = (),
    statistics: Sequence[Stateful] = (),
) -> None:
    """Let ``accelerator.save_state`` and :func:`load_state` carry everything that pruning needs.

    Masks are saved with the model anyway. Besides, the folder gets the position in the schedule and
    the records of the masks, for ``verify``; what criteria have accumulated, sharded as the model
    is; and statistics. Call it once, in every run, in the same order with other objects that are
    registered, and after ``accelerator.prepare``.

    Args:
        accelerator: the one that prepared the model.
        model: what ``accelerator.prepare`` returned.
        pruner: of the model.
        criteria: of ``distprune.criteria``.
        statistics: ``ActivationStatistics``, or other objects whose state is whole on every rank.

    Raises:
        TypeError: a criterion that is none, or among the statistics.

    Cost: nothing now. In ``save_state`` the criteria write 4 bytes per element of this rank's
    shards; in a load they read as many.
    """
    for criterion in criteria:
        if not isinstance(criterion, Criterion):
            raise TypeError(
                f"criteria has a {type(criterion).__name__} in it; expected criteria of "
                "distprune.criteria. Activation statistics go into `statistics`."
            )
    if any(isinstance(each, Criterion) for each in statistics):
        raise TypeError(
            "statistics has a criterion in it, whose state is sharded; expected it in `criteria`."
        )
    accelerator.register_for_checkpointing(_PruningState(model, pruner), *statistics)
    if not criteria:
        return

    def save(models: list[nn.Module], weights: list[Any], folder: str) -> None:
        from torch.distributed.checkpoint import state_dict_saver

        for number, criterion in enumerate(criteria):
            state = criterion.state_dict()
            state_dict_saver.save(state, checkpoint_id=_criterion_folder(folder, number))

    def load(models: list[nn.Module], folder: str) -> None:
        from torch.distributed.checkpoint import state_dict_loader

        for number, criterion in enumerate(criteria):
            state = criterion.state_dict()
            state_dict_loader.load(state, checkpoint_id=_criterion_folder(folder, number))
            criterion.load_state_dict(state)

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)


def load_state(
    accelerator: Accelerator, folder: str | os.PathLike[str], *models: nn.Module, **kwargs: Any
) -> None:
    """``accelerator.load_state`` for models that may not be pruned yet. Collective.

    A parameter that is pruned in the folder gets a mask; then accelerate loads everything, and the
    masks are those that were saved, bit for bit. See [Note: loading masks].

    Args:
        accelerator: the one that prepared the models; :func:`register_pruning` was called on it if
            it was when the folder was saved.
        folder: what ``accelerator.save_state(folder)`` wrote.
        models: all models that ``accelerator.prepare`` returned, in the order of preparing.
        kwargs: for ``accelerator.load_state``.

    Raises:
        FileNotFoundError: no model of accelerate in the folder; on every rank.
        Exception: as ``accelerator.load_state``.

    Cost: memory for the masks; a few small all-reduces; each rank reads the names of the tensors.
    """
    for number, model in enumerate(models):
        keys = world().run(functools.partial(keys_of_model, Path(folder), number))
        # DDP's own state dict, which accelerate saves, has a prefix.
        prepare_for_load(model, [key.removeprefix("module.") for key in keys])
    accelerator.load_state(os.fspath(folder), **kwargs)


class _PruningState:
    """The pruner's state, and the records of the masks, in plain values."""

    def __init__(self, model: nn.Module, pruner: ScheduledPruner | None) -> None:
        self._model = model
        self._pruner = pruner

    def state_dict(self) -> dict[str, Any]:
        pruning = None if self._pruner is None else self._pruner.state_dict()
        return {"pruning": pruning, "masks": records_of(self._model)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._pruner is not None:
            if state["pruning"] is None:
                raise ValueError(
                    "the folder was saved without a pruner, and register_pruning has one now; "
                    "expected the same objects as in the run that saved it."
                )
            self._pruner.load_state_dict(state["pruning"])
        put_records(self._model, state["masks"])


def _criterion_folder(folder: str, number: int) -> Path:
    return Path(folder) / f"distprune_criterion_{number}"


def keys_of_model(folder: Path, number: int = 0) -> list[str]:
    """Names in the state dict of a model that accelerate saved, in whichever form."""
    ending = f"_{number}" if number else ""
    sharded = folder / f"pytorch_model_fsdp_{number}"
    if sharded.is_dir():
        from torch.distributed.checkpoint.filesystem import FileSystemReader

        entries = FileSystemReader(sharded).read_metadata().state_dict_metadata
        return [key.removeprefix("model.") for key in entries]
    safe = folder / f"model{ending}.safetensors"
    if safe.is_file():
        with safe.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        return [key for key in header if key != "__metadata__"]
    for name in (f"pytorch_model_fsdp{ending}.bin", f"pytorch_model{ending}.bin"):
        if (folder / name).is_file():
            return list(torch.load(folder / name, map_location="meta", mmap=True))
    raise FileNotFoundError(
        f"{folder} has no model {number} that accelerate saved; expected a folder that "
        "accelerator.save_state(folder) wrote, with a file or folder such as model.safetensors or "
        f"pytorch_model_fsdp_{number}."
    )
