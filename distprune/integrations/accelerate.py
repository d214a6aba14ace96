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
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distprune._common.process_groups import world
from distprune._common.pruned_form import is_dtensor
from distprune.checkpoint import Stateful, prepare_for_load
from distprune.criteria.base import Criterion
from distprune.files.checkpoints.header import read_header
from distprune.masks.hook import put_records, records_of
from distprune.schedule.pruner import ScheduledPruner

if TYPE_CHECKING:
    from accelerate import Accelerator


__all__ = ["check_wrapping", "load_state", "register_pruning"]

_UNSUPPORTED = ("MEGATRON_LM", "XLA")
_NAMES = {"fsdp1": "FSDP1", "fsdp2": "FSDP2", "ddp": "DDP", "tp": "tensor parallelism"}
_NAMES |= {f"zero{stage}": f"DeepSpeed's ZeRO-{stage}" for stage in range(4)}


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
        NotImplementedError: Megatron-LM or XLA, which distprune does not prune.
        TypeError: ``accelerator`` is no Accelerator.

    Cost: one walk over the modules; no communication.
    """
    kind = _text(getattr(accelerator, "distributed_type", None))
    if not kind or not hasattr(accelerator, "num_processes"):
        raise TypeError(
            f"accelerator is a {type(accelerator).__name__}; expected the accelerate.Accelerator "
            "that prepared the model."
        )
    if kind in _UNSUPPORTED:
        raise NotImplementedError(
            f"accelerate runs as {kind}, which distprune does not prune; expected DDP, FSDP, "
            "DeepSpeed or tensor parallelism. Choose another distributed_type in accelerate's "
            "config."
        )
    fsdp = _requested_fsdp(accelerator)
    num_requested = num_processes or int(os.environ.get("WORLD_SIZE", 0)) or None
    wrapping = _wrapping(model)
    _check_processes(accelerator, kind, fsdp, num_requested)
    version_is_known = fsdp in ("fsdp1", "fsdp2")
    is_right = wrapping.split("+")[0] == fsdp if version_is_known else "fsdp" in wrapping
    if fsdp is not None and not is_right:
        raise RuntimeError(
            f"accelerate was asked for {_NAMES.get(fsdp, 'FSDP')} and runs as {kind}: the model "
            f"is {_described(wrapping, model)}. {_way_out(accelerator, kind)}"
        )
    if accelerator.num_processes > 1 and wrapping == "plain":
        raise RuntimeError(
            f"the model is a plain {type(model).__name__} on each of "
            f"{accelerator.num_processes} processes, which would train apart; expected what "
            "accelerator.prepare(model, optimizer) returned."
        )
    tp_size = _requested_tp(accelerator)
    if tp_size > 1 and "tp" not in wrapping.split("+"):
        raise RuntimeError(
            f"accelerate was asked for tensor parallelism over {tp_size} ranks, and the model is "
            f"{_described(wrapping, model)}, without tensor parallelism. Accelerate does not add "
            'it: load the model with from_pretrained(..., tp_plan="auto") or call '
            "parallelize_module, both before accelerator.prepare."
        )
    return wrapping


def _requested_fsdp(accelerator: Accelerator) -> str | None:
    """'fsdp1', 'fsdp2', or 'fsdp' if the version is unknown; None if FSDP was not requested."""
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    is_requested = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() in ("1", "true", "yes")
    if plugin is None and not is_requested:
        return None
    # A plugin that accelerate ignores is not kept; it leaves ACCELERATE_USE_FSDP, not the version.
    version = getattr(plugin, "fsdp_version", None) or os.environ.get("FSDP_VERSION", "")
    return f"fsdp{version}"


def _requested_tp(accelerator: Accelerator) -> int:
    config = getattr(accelerator, "parallelism_config", None)
    size = os.environ.get("PARALLELISM_CONFIG_TP_SIZE", 1) if config is None else config.tp_size
    return int(size)


def _check_processes(
    accelerator: Accelerator, kind: str, fsdp: str | None, num_requested: int | None
) -> None:
    if num_requested is None or accelerator.num_processes == num_requested:
        return
    request = f"{num_requested} processes" + (f" with {_NAMES.get(fsdp, 'FSDP')}" if fsdp else "")
    if accelerator.num_processes == 1:
        raise RuntimeError(
            f"accelerate was asked for {request} and runs as {kind} with one process: each process "
            f"trains by itself, on all data. {_way_out(accelerator, kind)} For several processes "
            "on the CPU set ACCELERATE_USE_CPU=true and call `accelerate launch --multi_gpu "
            f"--num_processes {num_requested}` (not --cpu, which starts one process), or torchrun "
            "with Accelerator(cpu=True)."
        )
    raise RuntimeError(
        f"accelerate was asked for {request} and runs with {accelerator.num_processes}; expected "
        "as many. Check --num_processes, --num_machines and what started the run."
    )


def _way_out(accelerator: Accelerator, kind: str) -> str:
    if kind == "FSDP":
        return "Expected what accelerator.prepare(model, optimizer) returned."
    if accelerator.device.type == "cpu":
        return (
            "Accelerate has no FSDP on the CPU: run on GPUs, without cpu=True and "
            "ACCELERATE_USE_CPU; or leave FSDP out, for DDP; or call torch's fully_shard under "
            "torchrun, which runs on the CPU."
        )
    return (
        "Make the Accelerator before anything else initialises torch.distributed or accelerate's "
        "state, and start the script by `accelerate launch` or torchrun."
    )


def _wrapping(model: nn.Module) -> str:
    """How the model is actually distributed."""
    if "deepspeed" in sys.modules:
        from deepspeed import DeepSpeedEngine

        if isinstance(model, DeepSpeedEngine):
            return f"zero{model.zero_optimization_stage()}"
    kinds = []
    # FSDP is loaded if the model uses it; importing it takes more than a second.
    if "torch.distributed.fsdp" in sys.modules:
        from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

        modules = list(model.modules())
        if any(isinstance(module, FSDPModule) for module in modules):
            kinds.append("fsdp2")
        elif any(isinstance(module, FullyShardedDataParallel) for module in modules):
            kinds.append("fsdp1")
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        kinds.append("ddp")
    if _has_tp(model, is_fsdp2="fsdp2" in kinds):
        kinds.append("tp")
    return "+".join(kinds) or "plain"


def _has_tp(model: nn.Module, is_fsdp2: bool) -> bool:
    """FSDP2 makes DTensors of all parameters; tensor parallelism adds a mesh axis, "tp"."""
    meshes = [p.device_mesh for p in model.parameters() if is_dtensor(p)]
    if is_fsdp2:
        return any("tp" in (mesh.mesh_dim_names or ()) for mesh in meshes)
    return bool(meshes)


def _described(wrapping: str, model: nn.Module) -> str:
    if wrapping == "plain":
        return f"a plain {type(model).__name__}"
    return "wrapped in " + " over ".join(_NAMES[part] for part in wrapping.split("+"))


def _text(kind: object) -> str:
    """'FSDP' for DistributedType.FSDP."""
    return str(getattr(kind, "value", "") or "")


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
        for number, criterion in enumerate(criteria):
            save_sharded_state(criterion.state_dict(), _criterion_folder(folder, number))

    def load(models: list[nn.Module], folder: str) -> None:
        for number, criterion in enumerate(criteria):
            state = criterion.state_dict()
            saved = load_sharded_state(state, _criterion_folder(folder, number))
            criterion.load_state_dict(saved)

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


def save_sharded_state(state: dict[str, Any], folder: Path) -> None:
    """Write a state dict, of which each rank has its shards, into a folder. Collective."""
    from torch.distributed.checkpoint import state_dict_saver

    state_dict_saver.save(state, checkpoint_id=folder)


def load_sharded_state(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A state dict with what :func:`save_sharded_state` wrote. Collective."""
    from torch.distributed.checkpoint import state_dict_loader

    state_dict_loader.load(state, checkpoint_id=folder)
    return state


def keys_of_sharded_model(folder: Path) -> list[str]:
    """Names in the state dict of a model, in a checkpoint of torch.distributed.checkpoint."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    entries = FileSystemReader(folder).read_metadata().state_dict_metadata
    prefixes = ("model.", "state_dict.")
    return [k.removeprefix(prefix) for k in entries for prefix in prefixes if k.startswith(prefix)]


def keys_of_model(folder: Path, number: int = 0) -> list[str]:
    """Names in the state dict of a model that accelerate saved, in whichever form."""
    ending = f"_{number}" if number else ""
    sharded = folder / f"pytorch_model_fsdp_{number}"
    if sharded.is_dir():
        return keys_of_sharded_model(sharded)
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
