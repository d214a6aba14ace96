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

import os
import sys
from typing import TYPE_CHECKING

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distprune._common.pruned_form import is_dtensor
from distprune.integrations._accelerate_state import load_state, register_pruning

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = ["check_wrapping", "load_state", "register_pruning"]

_UNSUPPORTED = ("DEEPSPEED", "MEGATRON_LM", "XLA")
_NAMES = {"fsdp1": "FSDP1", "fsdp2": "FSDP2", "ddp": "DDP", "tp": "tensor parallelism"}


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
        How the model is distributed: "fsdp2", "fsdp1", "ddp", "tp", "fsdp2+tp", or "plain" for one
        process.

    Raises:
        RuntimeError: names the request, what is running, and what to do. It is raised on every
            rank, because all have the same environment.
        NotImplementedError: DeepSpeed, Megatron-LM or XLA, which distprune does not prune.
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
            f"accelerate runs as {kind}, which distprune does not prune; expected DDP, FSDP or "
            "tensor parallelism. Choose another distributed_type in accelerate's config."
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
