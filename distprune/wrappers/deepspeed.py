"""DeepSpeed's ZeRO: its records of parameters, in the fields that it adds to them.

Stage 3 cuts every parameter, in row-major order, into equal runs, one for each rank. The last one
ends with a padding. A rank has its run twice, in the dtype of the forward and, in what the
optimizer steps, in fp32:

    parameter          | a a a a a a a |                  ds_shape [7]
    ds_tensor          | a a a |  a a a |  a . . |        ranks 0, 1, 2
    fp32 flat tensor   | ... a a a ... | ... a a a ... | ... a . . ... |

Stages 1 and 2 leave the whole parameter on every rank, and cut what the optimizer steps.

How a mask acts: stored_run.[Note: masks on stored values].
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Hashable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distprune.base.mask_values import write_product
from distprune.base.pruned_form import mask_key, name_without_orig, orig_key
from distprune.wrappers import private_fields
from distprune.wrappers.masked_value import has_dense_gradient
from distprune.wrappers.stored_run import (
    Kept,
    StoredMask,
    StoredRun,
    drop_masters,
    keep_masters,
)

_MASKS = "_distprune_masks"


def find(module: nn.Module, name: str) -> PartitionedParameter | None:
    """The record of a parameter that ZeRO-3 partitions; None for any other."""
    if "deepspeed" not in sys.modules:
        return None
    parameter = module._parameters.get(name)
    if parameter is None or getattr(parameter, "ds_tensor", None) is None:
        return None
    return PartitionedParameter(parameter, module)


class PartitionedParameter(StoredRun):
    """One parameter that ZeRO-3 partitions.

    Args:
        parameter: what modules register; empty, or the gathered copy.
        module: where it was found.
    """

    is_whole_in_backward = True

    def __init__(self, parameter: nn.Parameter, module: nn.Module) -> None:
        self.parameter: Any = parameter
        self.module = module

    @property
    def _optimizer(self) -> Any:
        return getattr(self.parameter, "_z3_optimizer", None)

    @property
    def key(self) -> Hashable:
        return ("zero", id(self.parameter))

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.parameter.ds_shape)

    @property
    def owners(self) -> list[tuple[nn.Module, str]]:
        root = None if self._optimizer is None else self._optimizer.module
        others = () if root is None else _modules_by_parameter(root).get(id(self.parameter), ())
        modules = [self.module, *(other for other in others if other is not self.module)]
        return [
            (module, name)
            for module in modules
            for name, registered in module._parameters.items()
            if registered is self.parameter
        ]

    @property
    def groups(self) -> Sequence[dist.ProcessGroup]:
        return [self.parameter.ds_process_group]

    @property
    def runs(self) -> Sequence[tuple[int, int]]:
        return _equal_runs(
            self.parameter.ds_numel,
            self.parameter.ds_tensor.ds_numel,
            self.parameter.ds_process_group.size(),
        )

    @property
    def values(self) -> Tensor:
        _, size = self.runs[self.groups[0].rank()]
        values: Tensor = self.parameter.ds_tensor.detach().view(-1)[:size]
        return values

    @property
    def masters(self) -> Sequence[Tensor]:
        place = self._place_in_optimizer
        if place is None:
            return ()
        flat, run = place
        return (flat.detach()[run],)

    @property
    def _place_in_optimizer(self) -> tuple[Tensor, slice] | None:
        """What the optimizer steps, and where this rank's run is in it."""
        optimizer = self._optimizer
        if optimizer is None or not self.parameter.requires_grad:
            return None
        number, offset, _ = optimizer.grad_position[optimizer.get_param_id(self.parameter)]
        size = self.runs[self.groups[0].rank()][1]
        return optimizer.fp32_partitioned_groups_flat[number], slice(offset, offset + size)

    @property
    def layout(self) -> str:
        return f"ZeRO-3 over {self.groups[0].size()} ranks"

    @property
    def unsupported(self) -> str | None:
        parameter, optimizer = self.parameter, self._optimizer
        if parameter.requires_grad and optimizer is None:
            return (
                "deepspeed.zero.Init has partitioned it, and no optimizer has a copy of it yet; "
                "prune after deepspeed.initialize (or call requires_grad_(False) on a parameter "
                "that is never trained)"
            )
        is_on_disk = getattr(parameter.ds_tensor, "final_location", None) is not None
        if is_on_disk or (optimizer is not None and optimizer.swap_optimizer):
            return "ZeRO-3 offloads it to NVMe, where no mask can be kept; offload to the CPU"
        if getattr(parameter.ds_tensor, "ds_quant_scale", None) is not None:
            return "ZeRO-3 stores it quantised (zero_quantized_nontrainable_weights)"
        if getattr(parameter, "ds_secondary_tensor", None) is not None:
            return "ZeRO++ keeps a second partition of it (zero_hpz_partition_size); set it to 1"
        if self.groups[0].size() != dist.get_world_size():
            return (
                f"ZeRO-3 partitions it over {self.groups[0].size()} of {dist.get_world_size()} "
                "ranks (MiCS, or tensor or expert parallelism of DeepSpeed), and nothing tells "
                "whether the others have replicas; partition over all ranks"
            )
        return None

    def check_fields(self) -> None:
        private_fields.check(
            "DeepSpeed",
            {"parameter": self.parameter}
            | ({} if self._optimizer is None else {"optimizer": self._optimizer}),
        )

    def free_gathered(self) -> None:
        if self.parameter.ds_status.name == "AVAILABLE":
            self.parameter.partition()

    @property
    def optimizer_tensor(self) -> tuple[Tensor, slice | None]:
        return self._place_in_optimizer or (self.parameter, None)

    @property
    def gradient(self) -> Tensor | None:
        optimizer = self._optimizer
        # DeepSpeed keeps the memory of gradients, whatever it has in it, between steps.
        if optimizer is None or not optimizer._epilogue_ran_this_backward:
            return None
        size = self.runs[self.groups[0].rank()][1]
        gradient: Tensor = optimizer.get_local_fp32_grad_for_param(self.parameter)
        gradient = gradient.view(-1)[:size].to(self.values.device) / self.loss_scale
        name = name_without_orig(self.owners[0][1])
        mask = self.module._buffers.get(mask_key(name))
        if mask is not None and not has_dense_gradient(self.module, name):
            write_product(gradient, mask != 0, out=gradient)
        return gradient

    @property
    def loss_scale(self) -> float:
        return 1.0 if self._optimizer is None else float(self._optimizer.loss_scale)

    def drop_gradient(self) -> None:
        self.parameter.grad = None
        if self._optimizer is not None:
            self._optimizer._epilogue_ran_this_backward = False
            self._optimizer.micro_step_id = 0  # the next gradient is not added to this one

    def mask_gradients_with(self, mask: StoredMask) -> None:
        """The norm by which gradients are clipped is that of the masked ones."""
        optimizer = self._optimizer
        if optimizer is not None:
            optimizer.__dict__.setdefault(_MASKS, {})[id(self.parameter)] = mask
            optimizer.__dict__["step"] = functools.partial(_step, weakref.ref(optimizer))

    def stop_masking_gradients(self, mask: StoredMask) -> None:
        optimizer = self._optimizer
        masks = {} if optimizer is None else optimizer.__dict__.get(_MASKS, {})
        if masks.get(id(self.parameter)) is mask:
            del masks[id(self.parameter)]
            if not masks:
                for name in (_MASKS, "step"):
                    optimizer.__dict__.pop(name)

    def mask_gradient(self, mask: StoredMask) -> None:
        """Mask this rank's part of the reduced gradient, and of its norm, in place."""
        if not self.parameter.requires_grad:
            return
        size = self.runs[self.groups[0].rank()][1]
        gradient: Tensor = self._optimizer.get_local_fp32_grad_for_param(self.parameter).view(-1)
        mask.mask_run(gradient[:size])
        self._optimizer.set_local_grad_for_param(gradient, self.parameter)


def _step(optimizer_ref: weakref.ref[Any], *args: Any, **kwargs: Any) -> Any:
    """ZeRO-3's step, of masked gradients."""
    optimizer = optimizer_ref()
    assert optimizer is not None  # it owns this function
    for mask in optimizer.__dict__[_MASKS].values():
        if not mask.has_dense_gradient:
            mask.managed().mask_gradient(mask)
    return type(optimizer).step(optimizer, *args, **kwargs)


@functools.lru_cache(maxsize=1 << 10)
def _equal_runs(numel: int, chunk: int, num_ranks: int) -> tuple[tuple[int, int], ...]:
    starts = [min(rank * chunk, numel) for rank in range(num_ranks)]
    return tuple((start, min(chunk, numel - start)) for start in starts)


_modules: weakref.WeakKeyDictionary[nn.Module, dict[int, list[nn.Module]]] = (
    weakref.WeakKeyDictionary()
)


def _modules_by_parameter(root: nn.Module) -> dict[int, list[nn.Module]]:
    """The modules that register each parameter of a model, by its id; found once."""
    if root not in _modules:
        found: dict[int, list[nn.Module]] = {}
        for module in root.modules():
            for parameter in module._parameters.values():
                if parameter is not None:
                    found.setdefault(id(parameter), []).append(module)
        _modules[root] = found
    return _modules[root]


# Not attributes of the modules, which are copied and pickled.
_held: weakref.WeakKeyDictionary[nn.Module, dict[str, HeldMaster]] = weakref.WeakKeyDictionary()


class HeldMaster(Kept):
    """The mask of a parameter that every rank has, on the part that its optimizer steps here.

    Args:
        module, name: a place of the pruned parameter.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        self._module, self._name = weakref.ref(module), name

    @property
    def _parameter(self) -> Any:
        module = self._module()
        return None if module is None else module._parameters.get(orig_key(self._name))

    @property
    def masters(self) -> Sequence[Tensor]:
        parameter = self._parameter
        if parameter is None:  # no longer pruned
            drop_masters(self)
            return ()
        return masters_of(parameter)

    @property
    def has_dense_gradient(self) -> bool:
        module = self._module()
        return module is not None and has_dense_gradient(module, self._name)

    def mask_run(self, run: Tensor) -> None:
        module, parameter = self._module(), self._parameter
        mask = None if module is None else module._buffers.get(mask_key(self._name))
        if mask is not None and parameter is not None:
            first, size = _fragment(parameter)
            run.masked_fill_((mask.reshape(-1)[first : first + size] == 0).to(run.device), 0)


def has_master(parameter: Tensor | None) -> bool:
    """Whether an optimizer of ZeRO-1 or ZeRO-2 steps other memory than a parameter's."""
    return hasattr(parameter, "_hp_mapping")


def masters_of(parameter: Any) -> Sequence[Tensor]:
    """This rank's part of what ZeRO-1 or ZeRO-2 steps in the place of a parameter, 1-d."""
    mapping = getattr(parameter, "_hp_mapping", None)
    return () if mapping is None else (mapping.hp_fragment.detach(),)


def update_master(parameter: Any) -> None:
    """Let the optimizer's part of a parameter follow a change of its values."""
    for master in masters_of(parameter):
        first, size = _fragment(parameter)
        master.copy_(parameter.detach().reshape(-1)[first : first + size])


def hold_master(module: nn.Module, name: str) -> None:
    """Set the pruned elements of a parameter to +0 for good, wherever a rank stores them."""
    parameter, mask = module._parameters[orig_key(name)], module._buffers[mask_key(name)]
    assert parameter is not None and mask is not None
    parameter.data.masked_fill_(mask == 0, 0)
    update_master(parameter)
    held = _held.setdefault(module, {})
    held[name] = held.get(name) or HeldMaster(module, name)
    keep_masters(held[name])


def _fragment(parameter: Any) -> tuple[int, int]:
    """(start, size) of the part of a parameter, row-major, that the optimizer of this rank has."""
    address = parameter._hp_mapping.lp_fragment_address
    return address.start, address.numel
