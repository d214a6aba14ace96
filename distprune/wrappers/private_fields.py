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

# By class: of a record, of a model, or of a tensor.
FIELDS = {
    "FSDP2Parameter": """
        fsdp_param.sharded_param fsdp_param.sharded_state fsdp_param.mesh_info
        fsdp_param.padded_sharded_param_size fsdp_param.init_unsharded_param
        fsdp_param._get_grad_inner_tensor fsdp_param.fsdp_placement fsdp_param.reset_sharded_param
        fsdp_param.unsharded_accumulated_grad fsdp_param._module_info.module
        fsdp_param._module_info.param_name fsdp_param._module_info.shared_modules
        fsdp_param._module_info.shared_param_names group._to_sharded group.wait_for_unshard
        group._partial_reduce_output group._reset_sharded_params group.unshard group.is_unsharded
        group.mesh_info group.device_handle group.comm_ctx group._training_state""",
    "FlatPiece": """
        wrapper._state_dict_type wrapper._state_dict_config wrapper._device_handle wrapper.rank
        wrapper.world_size wrapper.sharding_strategy handle.process_group
        handle.uses_sharded_strategy handle._training_state handle.pre_unshard
        handle._use_orig_params handle._writeback_orig_params handle._skip_writeback_check
        handle._skipped_use_sharded_views handle.prepare_gradient_for_optim handle.needs_unshard
        handle.reshard handle.post_reshard flat._param_infos flat._shared_param_infos flat._shapes
        flat._strides flat._contiguities flat._shard_param_infos flat._param_extensions
        flat._params flat._shared_params flat._is_padding_mask flat._numels_with_padding""",
    "PartitionedParameter": """
        parameter.ds_tensor parameter.ds_shape parameter.ds_numel parameter.ds_status
        parameter.ds_process_group parameter.partition optimizer.grad_position
        optimizer.get_param_id optimizer.fp32_partitioned_groups_flat
        optimizer.get_local_fp32_grad_for_param optimizer.set_local_grad_for_param
        optimizer.loss_scale optimizer._epilogue_ran_this_backward optimizer.swap_optimizer
        optimizer.micro_step_id""",
    "DistributedDataParallel": """
        _active_ddp_module parameters_to_ignore _assign_modules_buffers""",
    "Module": """
        _parameters _buffers _forward_pre_hooks _forward_hooks _non_persistent_buffers_set
        _call_impl _load_state_dict_post_hooks""",
    "DTensor": "_local_tensor _spec",
}

# Names that are imported when they are needed, or looked up, by module.
NAMES = {
    "distprune.wrappers.fsdp1": "HandleTrainingState.SUMMON_FULL_PARAMS",
    "distprune.wrappers.fsdp2": "ShardedState.SHARDED TrainingState.PRE_BACKWARD",
    "torch": "Tensor._use_count",
    "torch._C": "_current_graph_task_id DisableTorchFunctionSubclass _autograd._get_sequence_nr",
    "torch.nn.modules.module": "_global_forward_hooks_with_kwargs",
    "torch.distributed.tensor._utils": "compute_local_shape_and_global_offset",
    "torch.distributed.tensor.placement_types": "_StridedShard",
}


def missing(model: nn.Module) -> list[str]:
    """What the installed torch lacks of the table, as far as a wrapped model shows it."""
    objects: list[Any] = [model, *managed_parameters(model).values()]
    objects += filter(is_dtensor, model.parameters())
    found = {"Module." + name: None for name in _lacks(model, FIELDS["Module"])}
    for value in objects:
        kind = type(value).__name__
        found |= {f"{kind}.{name}": None for name in _lacks(value, FIELDS.get(kind, ""))}
    for path, names in NAMES.items():
        try:
            found |= {f"{path}.{n}": None for n in _lacks(importlib.import_module(path), names)}
        except ImportError as error:
            found[str(error)] = None
    return list(found)


def _lacks(value: Any, names: str) -> list[str]:
    """Those of some dotted names that an object does not have."""
    lacking = []
    for name in names.split():
        owner, *fields = value, *name.split(".")
        while fields and hasattr(owner, fields[0]):
            owner = getattr(owner, fields.pop(0))
        if fields:
            lacking.append(name)
    return lacking
