"""Every parameter that a wrapper manages: the choice of adapter. Fields of DDP and DTensor.

And the table of all private fields and functions of torch that distprune relies on, which
``distprune selftest`` compares with the torch that is installed. A field that a new torch renames
or drops is then named. What the adapters import at their beginning names itself.
"""

from __future__ import annotations

import copy
import importlib
import operator
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor, nn

from distprune.base.pruned_form import is_dtensor
from distprune.wrappers import deepspeed
from distprune.wrappers.managed import Managed, StoredRun

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from torch.nn.parallel import DistributedDataParallel


def managed_parameters(
    root: nn.Module | None = None, *, everywhere: bool = False
) -> dict[tuple[int, str], Managed]:
    """Every parameter that FSDP shards in this process, by (id(module), registered name).

    And those of a model, if one is given, that are stored as runs (``layouts.register``).

    A leaf does not know the module that gathers it, and the parameter registered on it may be a
    gathered copy, so its type says nothing.

    Args:
        root: a model whose FSDP1 modules may not be known yet.
        everywhere: search all Python objects for FSDP1 modules (a fraction of a second).
    """
    records: dict[tuple[int, str], Managed] = {}
    has_fsdp = "torch.distributed.fsdp" in sys.modules
    if has_fsdp:
        from distprune.wrappers import fsdp1, fsdp2

        records.update(fsdp2.managed_parameters())
        records.update(fsdp1.managed_parameters(root, everywhere=everywhere))
    for module in () if root is None else root.modules():
        for name, parameter in module._parameters.items():
            run, place = find_run(module, name), (id(module), name)
            is_seen = not has_fsdp or everywhere or is_flat(parameter)
            if run is not None:
                records[place] = run
            elif not is_seen and place not in records and is_flattened(module, name):
                # The model is inside an FSDP1 module that was not seen yet.
                return managed_parameters(root, everywhere=True)
    return records


def may_be_managed() -> bool:
    """Whether there may be parameters in this process whose type does not tell that they are cut.

    FSDP has none without a process group.
    """
    is_loaded = "deepspeed" in sys.modules or len(finders) > 1
    return is_loaded or ("torch.distributed.fsdp" in sys.modules and dist.is_initialized())


def is_managed(module: nn.Module, name: str) -> bool:
    """Whether a wrapper manages a parameter, pruned or not."""
    if is_flattened(module, name) or find_run(module, name) is not None:
        return True
    if "torch.distributed.fsdp" not in sys.modules:
        return False
    from distprune.wrappers import fsdp2

    return (id(module), name) in fsdp2.managed_parameters()


def is_flattened(module: nn.Module, name: str) -> bool:
    """Whether FSDP1 manages a parameter."""
    found = module._parameters.get(name)
    if found is None:  # without use_orig_params, or inside forward: a view of the flat parameter
        found = module.__dict__.get(name)
    tensors = (found, found._base) if isinstance(found, Tensor) else ()
    return any(each is not None and is_piece_of_flat(each) for each in tensors)


def is_flat(tensor: Tensor | None) -> bool:
    """Whether a tensor is a flat parameter of FSDP1: what a module registers for several."""
    return getattr(tensor, "_is_flat_param", False)


def is_piece_of_flat(tensor: Tensor) -> bool:
    """Whether a tensor is a flat parameter of FSDP1, or one of its pieces."""
    return is_flat(tensor) or getattr(tensor, "_fsdp_flattened", False)


# (module, name that it registers) -> the record of the parameter; None if it is none of its kind
Finder = Callable[[nn.Module, str], StoredRun | None]

finders: list[Finder] = [deepspeed.find]


def find_run(module: nn.Module, name: str) -> StoredRun | None:
    """The record of a parameter; None if no finder knows it."""
    if name in module._parameters:
        for finder in finders:
            record = finder(module, name)
            if record is not None:
                return record
    return None


def active_ddp() -> DistributedDataParallel | None:
    """The DDP wrapper whose forward is running, if any."""
    ddp = sys.modules.get("torch.nn.parallel.distributed")
    return None if ddp is None else ddp.DistributedDataParallel._active_ddp_module


def ignore_buffers(wrapper: DistributedDataParallel, fqns: Iterable[str]) -> None:
    """Stop DDP from broadcasting buffers before every forward.

    Masks are equal on all ranks from the beginning; broadcasting them would double the traffic
    of a step.
    """
    wrapper.parameters_to_ignore.update(fqns)
    # DDP decides by its previous list whether to broadcast, and fails on an empty new one.
    wrapper._assign_modules_buffers()  # type: ignore[no-untyped-call]


# DTensor's descriptions of layouts, to use again for tensors that are laid out alike.
Specs = dict[object, Any]


def laid_out_like(parameter: DTensor, local: Tensor, specs: Specs) -> DTensor:
    """A DTensor of this rank's part, on the mesh and with the placements of another one.

    As ``DTensor.from_local`` without a check, which takes six times as long.

    Args:
        local: detached; shares its memory with the result.
        specs: those of the meshes in use; gets what is made here.
    """
    from torch.distributed.tensor import DTensor

    mesh, meta = parameter.device_mesh, parameter._spec.tensor_meta
    assert meta is not None
    if not local.numel() and mesh.get_coordinate() is None:  # outside of the mesh
        local = local.new_empty(0)
    key = (id(mesh), parameter.placements, meta.shape, meta.stride, local.dtype)
    spec = specs.get(key)
    if spec is None:
        spec = specs[key] = copy.copy(parameter._spec)
        spec.tensor_meta = meta._replace(dtype=local.dtype)
    return DTensor(local.detach(), spec, requires_grad=False)  # type: ignore[no-untyped-call]


def doubtful_box(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """(sizes, offsets) that DCP takes this rank's shard for, if they may be wrong; else None.

    They may be where FSDP2 cuts a shard of tensor parallelism: torch 2.13 walks the cuts from left
    to right.
    """
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
    from torch.distributed.tensor.placement_types import _StridedShard

    if not any(isinstance(placement, _StridedShard) for placement in tensor.placements):
        return None
    return compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )


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
        try:
            operator.attrgetter(name)(value)
        except AttributeError:
            lacking.append(name)
    return lacking
