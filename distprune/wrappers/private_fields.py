"""The private fields and functions of torch that distprune relies on: one table.

``distprune selftest`` compares the table with the torch that is installed. A field that a new torch
renames or drops is then named.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import nn

from distprune.base.pruned_form import is_dtensor

# The oldest and the newest torch that distprune is tested with; docs/support.md says what was run.
TESTED = ("2.11", "2.15")

# By wrapper, the attributes of its objects. "new or old": one of them will do.
FIELDS: dict[str, dict[str, tuple[str, ...]]] = {
    "FSDP2": {
        "FSDPParam": (
            "_module_info", "sharded_param", "sharded_state", "mesh_info",
            "padded_sharded_param_size", "init_unsharded_param", "_get_grad_inner_tensor",
            "fsdp_placement", "reset_sharded_param", "unsharded_accumulated_grad",
        ),
        "ParamModuleInfo": ("module", "param_name", "shared_modules", "shared_param_names"),
        "FSDPParamGroup": (
            "fsdp_params", "_to_sharded", "wait_for_unshard", "_partial_reduce_output",
            "_reset_sharded_params", "unshard", "is_unsharded", "mesh_info", "device_handle",
            "comm_ctx", "_training_state",
        ),
        "FSDPState": ("_fsdp_param_groups or _fsdp_param_group",),
    },
    "FSDP1": {
        "FullyShardedDataParallel": (
            "_handle", "_state_dict_type", "_state_dict_config", "_device_handle", "rank",
            "world_size", "process_group", "sharding_strategy",
        ),
        "FlatParamHandle": (
            "flat_param", "process_group", "uses_sharded_strategy", "_training_state",
            "pre_unshard", "_use_orig_params", "_writeback_orig_params", "_skip_writeback_check",
            "_skipped_use_sharded_views", "prepare_gradient_for_optim",
            "needs_unshard", "reshard", "post_reshard",
        ),
        "FlatParameter": (
            "_param_infos", "_shared_param_infos", "_shapes", "_strides",
            "_contiguities", "_shard_param_infos", "_param_extensions", "_params",
            "_shared_params",
            "_is_padding_mask", "_numels_with_padding",
        ),
    },
    "DeepSpeed": {
        "parameter": (
            "ds_tensor", "ds_shape", "ds_numel", "ds_status", "ds_process_group", "partition",
        ),
        "optimizer": (
            "module", "grad_position", "get_param_id", "fp32_partitioned_groups_flat",
            "get_local_fp32_grad_for_param", "set_local_grad_for_param", "loss_scale",
            "_epilogue_ran_this_backward", "swap_optimizer", "micro_step_id",
        ),
    },
    "DDP": {
        "DistributedDataParallel": (
            "_active_ddp_module", "parameters_to_ignore", "_assign_modules_buffers",
        ),
    },
    "DTensor": {"DTensor": ("_local_tensor", "_spec")},
    "Module": {
        "Module": (
            "_parameters", "_buffers", "_forward_pre_hooks", "_forward_hooks",
            "_non_persistent_buffers_set", "_call_impl",
        ),
    },
}  # fmt: skip

# By wrapper, the names that are taken from private modules, or that are private themselves.
NAMES: dict[str, dict[str, tuple[str, ...]]] = {
    "FSDP2": {
        "torch.distributed._composable_state": ("_module_state_mapping",),
        "torch.distributed.fsdp._fully_shard._fsdp_common": ("DDPMeshInfo", "FSDPMeshInfo"),
        "torch.distributed.fsdp._fully_shard._fsdp_param": ("ShardedState.SHARDED",),
        "torch.distributed.fsdp._fully_shard._fsdp_state": ("FSDPState",),
        "torch.distributed.fsdp": ("FSDPModule",),
    },
    "FSDP1": {
        "torch.distributed.fsdp": ("FlatParameter",),
        "torch.distributed.fsdp._common_utils": ("HandleTrainingState.SUMMON_FULL_PARAMS",),
        "torch.distributed.fsdp._shard_utils": (
            "_create_chunk_dtensor", "_create_chunk_sharded_tensor",
        ),
        "torch.distributed._shard.metadata": ("ShardMetadata",),
        "torch.distributed._shard.sharded_tensor.api": (
            "ShardedTensor._init_from_local_shards_and_global_metadata",
        ),
        "torch.distributed._shard.sharded_tensor.metadata": (
            "ShardedTensorMetadata", "TensorProperties",
        ),
        "torch.distributed._shard.sharded_tensor.shard": ("Shard",),
    },
    "Module": {
        "torch._C": ("_current_graph_task_id", "DisableTorchFunctionSubclass"),
        "torch._C._autograd": ("_get_sequence_nr",),
        "torch": ("Tensor._use_count",),
        "torch.nn.modules.module": ("_global_forward_hooks_with_kwargs",),
    },
    "DTensor": {
        "torch.distributed.tensor._utils": ("compute_local_shape_and_global_offset",),
        "torch.distributed.tensor.placement_types": ("_StridedShard",),
    },
}  # fmt: skip

# Classes whose objects have the fields: one look is enough for a thousand parameters.
_complete: set[tuple[type, tuple[str, ...]]] = set()


def check(wrapper: str, objects: Mapping[str, Any]) -> None:
    """Raise if one of a wrapper's objects lacks a field that its adapter uses.

    Args:
        wrapper: a key of ``FIELDS``.
        objects: by the keys of ``FIELDS[wrapper]``, all or some.

    Raises:
        NotImplementedError: names the fields, this torch, and those that are supported.

    Cost: a microsecond; some for the first object of each class.
    """
    missing = missing_fields(wrapper, objects)
    if missing:
        refuse(wrapper, missing)


def missing_fields(wrapper: str, objects: Mapping[str, Any]) -> list[str]:
    """The fields of the table that a wrapper's objects lack: ["FSDPParam.mesh_info"]."""
    missing = []
    for kind, instance in objects.items():
        names = FIELDS[wrapper][kind]
        if (type(instance), names) in _complete:
            continue
        gone = [n for n in names if not any(hasattr(instance, part) for part in n.split(" or "))]
        missing += [f"{kind}.{name}" for name in gone]
        if not gone:
            _complete.add((type(instance), names))
    return missing


def missing(wrapper: str, model: nn.Module) -> list[str]:
    """What the installed torch lacks for a wrapper, as far as a model in it shows."""
    found = missing_names(wrapper)
    if wrapper == "Module":
        found += missing_fields(wrapper, {"Module": model})
    elif wrapper == "DDP":
        found += missing_fields(wrapper, {"DistributedDataParallel": model})
    elif wrapper == "DTensor":
        tensors = filter(is_dtensor, model.parameters())
        found += missing_fields(wrapper, {"DTensor": next(tensors)})
    elif wrapper == "FSDP2":
        read = getattr(model, "_get_fsdp_state", None)
        if read is None:
            return [*found, "FSDPModule._get_fsdp_state"]
        found += missing_fields(wrapper, {"FSDPState": read()})
    return found


def missing_names(wrapper: str) -> list[str]:
    """The names of the table that cannot be imported from the installed torch."""
    missing = []
    for path, names in NAMES.get(wrapper, {}).items():
        try:
            module: Any = importlib.import_module(path)
        except ImportError:
            missing.append(path)
            continue
        for name in names:
            value = module
            for part in name.split("."):
                value = getattr(value, part, None)
            if value is None:
                missing.append(f"{path}.{name}")
    return missing


def refuse(wrapper: str, missing: list[str]) -> NoReturn:
    """Raise NotImplementedError that names what a torch changed."""
    raise NotImplementedError(
        f"torch {torch.__version__} changed {wrapper}'s {', '.join(missing)}; distprune supports "
        f"torch {TESTED[0]} to {TESTED[1]}. Install one of these, or a newer distprune."
    )
