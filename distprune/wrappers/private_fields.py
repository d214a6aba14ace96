"""The private fields and functions of torch that distprune relies on: one table.

``distprune selftest`` compares the table with the torch that is installed. A field that a new torch
renames or drops is then named. What the adapters import at their beginning names itself.
"""

from __future__ import annotations

import importlib
from typing import Any

from torch import nn

from distprune.base.pruned_form import is_dtensor
from distprune.wrappers.wrapper import managed_parameters

# The oldest and the newest torch that distprune is tested with; docs/support.md says what was run.
TESTED = ("2.11", "2.15")

# Attributes of objects. "new or old": one of them will do.
FIELDS: dict[str, tuple[str, ...]] = {
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
    "FullyShardedDataParallel": (
        "_handle", "_state_dict_type", "_state_dict_config", "rank", "sharding_strategy",
    ),
    "FlatParamHandle": (
        "flat_param", "process_group", "uses_sharded_strategy", "_training_state",
        "pre_unshard", "_use_orig_params", "_writeback_orig_params", "_skip_writeback_check",
        "_skipped_use_sharded_views", "prepare_gradient_for_optim",
        "needs_unshard", "reshard", "post_reshard",
    ),
    "FlatParameter": (
        "_param_infos", "_shared_param_infos", "_shapes", "_strides", "_contiguities",
        "_shard_param_infos", "_param_extensions", "_params", "_shared_params",
        "_is_padding_mask", "_numels_with_padding", "_is_flat_param",
    ),
    "ZeRO-3's parameter": (
        "ds_tensor", "ds_shape", "ds_numel", "ds_status", "ds_process_group", "partition",
    ),
    "ZeRO-3's optimizer": (
        "grad_position", "get_param_id", "fp32_partitioned_groups_flat",
        "get_local_fp32_grad_for_param", "set_local_grad_for_param", "loss_scale",
        "_epilogue_ran_this_backward", "swap_optimizer", "micro_step_id",
    ),
    "DistributedDataParallel": (
        "_active_ddp_module", "parameters_to_ignore", "_assign_modules_buffers",
    ),
    "DTensor": ("_local_tensor", "_spec"),
    "Module": (
        "_parameters", "_buffers", "_forward_pre_hooks", "_forward_hooks",
        "_non_persistent_buffers_set", "_call_impl", "_load_state_dict_post_hooks",
    ),
}  # fmt: skip

# Names that are imported when they are needed, or looked up.
NAMES: dict[str, tuple[str, ...]] = {
    "distprune.wrappers.fsdp1": ("HandleTrainingState.SUMMON_FULL_PARAMS",),
    "distprune.wrappers.fsdp2": ("ShardedState.SHARDED", "TrainingState.PRE_BACKWARD"),
    "torch._C": ("_current_graph_task_id", "DisableTorchFunctionSubclass"),
    "torch._C._autograd": ("_get_sequence_nr",),
    "torch": ("Tensor._use_count",),
    "torch.nn.modules.module": ("_global_forward_hooks_with_kwargs",),
    "torch.distributed.tensor._utils": ("compute_local_shape_and_global_offset",),
    "torch.distributed.tensor.placement_types": ("_StridedShard",),
}  # fmt: skip


def missing(model: nn.Module) -> list[str]:
    """What the installed torch lacks of the table, as far as a wrapped model shows it."""
    objects: list[tuple[str, Any]] = [("Module", model)]
    objects += [("DTensor", tensor) for tensor in model.parameters() if is_dtensor(tensor)]
    state = getattr(model, "_get_fsdp_state", None)
    if state is not None:
        objects.append(("FSDPState", state()))
    if isinstance(model, nn.parallel.DistributedDataParallel):
        objects.append(("DistributedDataParallel", model))
    for record in managed_parameters(model).values():
        objects += record.private_objects.items()
    found = dict.fromkeys(missing_names())
    for kind, instance in objects if not found else ():
        for name in FIELDS[kind]:
            if not any(hasattr(instance, part) for part in name.split(" or ")):
                found[f"{kind}.{name}"] = None
    return list(found)


def missing_names() -> list[str]:
    """The names of the table that the installed torch lacks."""
    missing = []
    for path, names in NAMES.items():
        try:
            module: Any = importlib.import_module(path)
        except ImportError as error:
            missing.append(str(error))
            continue
        for name in names:
            value = module
            for part in name.split("."):
                value = getattr(value, part, None)
            if value is None:
                missing.append(f"{path}.{name}")
    return missing
