"""DeepSpeed's ZeRO: its records of parameters, in the fields that it adds to them.

Stage 3 cuts every parameter, in row-major order, into equal runs, one for each rank. The last one
ends with a padding. A rank has its run twice, in the dtype of the forward and, in what the
optimizer steps, in fp32:

    parameter          | a a a a a a a |                  ds_shape [7]
    ds_tensor          | a a a |  a a a |  a . . |        ranks 0, 1, 2
    fp32 flat tensor   | ... a a a ... | ... a a a ... | ... a . . ... |

Stages 1 and 2 leave the whole parameter on every rank, and cut what the optimizer steps.

Zeros are held in each copy of this rank: see ``held``.
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

from distprune.base.mask_values import zero_pruned
from distprune.base.pruned_form import mask_key
from distprune.wrappers import private_fields
from distprune.wrappers.managed import HoldsZeros
from distprune.wrappers.masked_value import has_dense_gradient
from distprune.wrappers.stored_run import StoredRun

_HELD = "_distprune_held"


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
        name = self.owners[0][1]
        mask = self.module._buffers.get(mask_key(name))
        if mask is not None and not has_dense_gradient(self.module, name):
            zero_pruned(gradient, mask.to(gradient.device))
        return gradient

    @property
    def loss_scale(self) -> float:
        return 1.0 if self._optimizer is None else float(self._optimizer.loss_scale)

    def drop_gradient(self) -> None:
        self.parameter.grad = None
        if self._optimizer is not None:
            self._optimizer._epilogue_ran_this_backward = False
            self._optimizer.micro_step_id = 0  # the next gradient is not added to this one

    def hold(self, held: HoldsZeros) -> None:
        """The norm by which gradients are clipped is that of the masked ones."""
        optimizer = self._optimizer
        if optimizer is not None:
            optimizer.__dict__.setdefault(_HELD, {})[id(self.parameter)] = held
            optimizer.__dict__["step"] = functools.partial(_step, weakref.ref(optimizer))

    def release(self, held: HoldsZeros) -> None:
        optimizer = self._optimizer
        of_optimizer = {} if optimizer is None else optimizer.__dict__.get(_HELD, {})
        if of_optimizer.get(id(self.parameter)) is held:
            del of_optimizer[id(self.parameter)]
            if not of_optimizer:
                for name in (_HELD, "step"):
                    optimizer.__dict__.pop(name)

    def mask_gradient(self, mask: Tensor) -> None:
        """Mask this rank's part of the reduced gradient, and of its norm, in place."""
        if not self.parameter.requires_grad:
            return
        size = self.runs[self.groups[0].rank()][1]
        gradient: Tensor = self._optimizer.get_local_fp32_grad_for_param(self.parameter).view(-1)
        zero_pruned(gradient[:size], mask.to(gradient.device))
        self._optimizer.set_local_grad_for_param(gradient, self.parameter)


def _step(optimizer_ref: weakref.ref[Any], *args: Any, **kwargs: Any) -> Any:
    """ZeRO-3's step, of masked gradients."""
    optimizer = optimizer_ref()
    assert optimizer is not None  # it owns this function
    for held in optimizer.__dict__[_HELD].values():
        if not held.has_dense_gradient:
            held.record.mask_gradient(held.mask)
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


def has_master(parameter: Tensor | None) -> bool:
    """Whether an optimizer of ZeRO-1 or ZeRO-2 steps other memory than a parameter's."""
    return hasattr(parameter, "_hp_mapping")


def masters_of(parameter: Any) -> list[tuple[Tensor, slice]]:
    """What ZeRO-1 or ZeRO-2 steps on this rank in the place of a part of a parameter, 1-d.

    And where that part is in the parameter, row-major.
    """
    mapping = getattr(parameter, "_hp_mapping", None)
    if mapping is None:
        return []
    address = mapping.lp_fragment_address
    part = slice(address.start, address.start + address.numel)
    return [(mapping.hp_fragment.detach(), part)]
