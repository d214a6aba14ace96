"""Hugging Face Accelerate: check that a run is distributed as requested; save and load masks.

    accelerator = Accelerator()
    model, optimizer = accelerator.prepare(model, optimizer)
    check_wrapping(accelerator, model)
    pruner = schedule.ScheduledPruner(prune.select(model), plan)  # after prepare
    register_pruning(accelerator, model, pruner)
    ...
    accelerator.save_state(folder)
    load_state(accelerator, folder, model)  # in a later run, whose model is not pruned yet

[Note: silent fallbacks] Accelerate (1.15) does not say when it runs something other than
requested. It has no FSDP on the CPU: a plugin is ignored there, and the model becomes
DDP. On a machine without an accelerator, ``accelerate launch --use_fsdp --num_processes 2``
starts two runs of one process each, and ``accelerate launch --cpu --num_processes 2`` starts one.
All of them train and prune without an error. This module does not import accelerate: the
environment tells what was requested, and the accelerator and the model what is running.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from distprune.base.pruned_form import is_dtensor
from distprune.checkpoint import prepare_for_load
from distprune.criteria.base import Criterion
from distprune.files.checkpoint import read_header
from distprune.integrations import load_pruning_state, pruning_state
from distprune.ranks.collectives import world
from distprune.schedule import ScheduledPruner

if TYPE_CHECKING:
    from accelerate import Accelerator


__all__ = ["check_wrapping", "load_state", "register_pruning"]

# By the class of a module: what it says of the model.
_KINDS = {
    "FSDPModule": "fsdp2", "FullyShardedDataParallel": "fsdp1", "DistributedDataParallel": "ddp",
}  # fmt: skip


def check_wrapping(
    accelerator: Accelerator, model: nn.Module, *, num_processes: int | None = None
) -> str:
    """Raise if accelerate silently did something other than requested.

    The request is read from the environment that ``accelerate launch``, torchrun and
    ``Accelerator(fsdp_plugin=...)`` set. See [Note: silent fallbacks].

    Args:
        accelerator: the one that prepared the model.
        model: the model that ``accelerator.prepare`` returned.
        num_processes: the requested number of processes, if the environment does not contain it
            (as with ``accelerate launch --cpu``); by default WORLD_SIZE, if set.

    Returns:
        How the model is distributed: "fsdp2", "fsdp1", "ddp", "tp", "fsdp2+tp", "zero1" to "zero3"
        under DeepSpeed, or "plain" for one process.

    Raises:
        RuntimeError: names the request, what is running, and what to do. It is raised on every
            rank, because all have the same environment.

    Cost: one walk over the modules; no communication.
    """
    config = getattr(accelerator, "parallelism_config", None)
    of_environment = os.environ.get("PARALLELISM_CONFIG_TP_SIZE", 1)
    tp_size = int(of_environment if config is None else config.tp_size)
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    # A plugin that accelerate ignores is not kept; it leaves ACCELERATE_USE_FSDP, not the version.
    version = getattr(plugin, "fsdp_version", None) or os.environ.get("FSDP_VERSION", "")
    flag = os.environ.get("ACCELERATE_USE_FSDP", "false").lower()
    is_fsdp = plugin is not None or flag in ("1", "true", "yes")
    size = accelerator.num_processes
    num_requested = num_processes or int(os.environ.get("WORLD_SIZE", size))
    wrapping = _wrapping(model)
    if size != num_requested:
        asked = f"{num_requested} processes"
    elif is_fsdp and f"fsdp{version}" not in wrapping:
        asked = f"fsdp{version}"
    elif tp_size > 1 and "tp" not in wrapping.split("+"):
        asked = f"tensor parallelism over {tp_size} ranks"
    elif size > 1 and wrapping == "plain":
        asked = f"one model on {size} processes"
    else:
        return wrapping
    raise RuntimeError(
        f"{asked} is what accelerate was asked for, and the model is {wrapping}, on {size} "
        "processes; expected what accelerator.prepare(model, optimizer) returned. On the CPU "
        "accelerate has no FSDP, and starts several processes only with ACCELERATE_USE_CPU=true "
        "and `accelerate launch --multi_gpu`; it adds no tensor parallelism: load the model with "
        "from_pretrained(tp_plan='auto'), or call parallelize_module, before prepare."
    )


def _wrapping(model: nn.Module) -> str:
    """How the model is actually distributed."""
    classes = {base.__name__ for module in model.modules() for base in type(module).__mro__}
    if "DeepSpeedEngine" in classes:
        engine: Any = model
        return f"zero{engine.zero_optimization_stage()}"
    kinds = [kind for name, kind in _KINDS.items() if name in classes]
    # FSDP2 makes DTensors of all parameters; tensor parallelism adds a mesh axis, "tp".
    meshes = [p.device_mesh for p in model.parameters() if is_dtensor(p)]
    if any("fsdp2" not in kinds or "tp" in (mesh.mesh_dim_names or ()) for mesh in meshes):
        kinds.append("tp")
    return "+".join(kinds) or "plain"


def register_pruning(
    accelerator: Accelerator,
    model: nn.Module,
    pruner: ScheduledPruner | None = None,
    *,
    criteria: Sequence[Criterion] = (),
) -> None:
    """Let ``accelerator.save_state`` and :func:`load_state` carry everything that pruning needs.

    Masks are saved with the model anyway. Besides, the folder gets the position in the schedule and
    the records of the masks, for ``verify``; and what criteria have accumulated, sharded as the
    model is. Call it once, in every run, in the same order with other objects that are
    registered, and after ``accelerator.prepare``.

    Args:
        accelerator: the one that prepared the model.
        model: what ``accelerator.prepare`` returned.
        pruner: of the model.
        criteria: of ``distprune.criteria``.

    Cost: nothing now. In ``save_state`` the criteria write 4 bytes per element of this rank's
    shards; in a load they read as many.
    """
    accelerator.register_for_checkpointing(
        SimpleNamespace(
            state_dict=functools.partial(pruning_state, model, pruner),
            load_state_dict=functools.partial(load_pruning_state, model, pruner),
        )
    )

    def save(models: list[nn.Module], weights: list[Any], folder: str) -> None:
        for number, criterion in enumerate(criteria):
            save_criterion(criterion, Path(folder) / f"distprune_criterion_{number}")

    def load(models: list[nn.Module], folder: str) -> None:
        for number, criterion in enumerate(criteria):
            load_criterion(criterion, Path(folder) / f"distprune_criterion_{number}")

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


def save_criterion(criterion: Criterion, folder: Path) -> None:
    """Write what a criterion has collected, of which each rank has its shards. Collective."""
    from torch.distributed.checkpoint import state_dict_saver

    state_dict_saver.save(criterion.state_dict(), checkpoint_id=folder)


def load_criterion(criterion: Criterion, folder: Path) -> None:
    """Load what :func:`save_criterion` wrote. Collective."""
    from torch.distributed.checkpoint import state_dict_loader

    state = criterion.state_dict()
    state_dict_loader.load(state, checkpoint_id=folder)
    criterion.load_state_dict(state)


def keys_of_model(folder: Path, number: int = 0) -> list[str]:
    """Names in the state dict of a model that accelerate saved, in whichever form."""
    ending = f"_{number}" if number else ""
    sharded = folder / f"pytorch_model_fsdp_{number}"
    if sharded.is_dir():
        from torch.distributed.checkpoint.filesystem import FileSystemReader

        entries = FileSystemReader(sharded).read_metadata().state_dict_metadata
        return [key.removeprefix("model.") for key in entries if key.startswith("model.")]
    of_deepspeed = sorted((folder / f"pytorch_model{ending}").glob("*model_states.pt"))
    if of_deepspeed:
        return list(torch.load(of_deepspeed[0], map_location="meta", mmap=True)["module"])
    safe = folder / f"model{ending}.safetensors"
    if safe.is_file():
        return [tensor.name for tensor in read_header(safe).tensors]
    for name in (f"pytorch_model_fsdp{ending}.bin", f"pytorch_model{ending}.bin"):
        if (folder / name).is_file():
            return list(torch.load(folder / name, map_location="meta", mmap=True))
    raise FileNotFoundError(
        f"{folder} has no model {number} that accelerate saved; expected a folder that "
        "accelerator.save_state(folder) wrote, with a file or folder such as model.safetensors or "
        f"pytorch_model_fsdp_{number}."
    )
