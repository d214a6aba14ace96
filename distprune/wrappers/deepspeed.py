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

import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distprune.base.memory import zero_pruned
from distprune.wrappers import managed


def find(module: nn.Module, name: str) -> PartitionedParameter | None:
    """The record of a parameter that ZeRO-3 partitions; None for any other."""
    parameter = module._parameters.get(name) if "deepspeed" in sys.modules else None
    if getattr(parameter, "ds_tensor", None) is None:
        return None
    return PartitionedParameter(parameter, module)


class PartitionedParameter(managed.StoredRun):
    """One parameter that ZeRO-3 partitions.

    Args:
        parameter: what modules register; empty, or the gathered copy.
        module: where it was found.
    """

    is_whole_in_backward = True

    def __init__(self, parameter: Any, module: nn.Module) -> None:
        self.parameter: Any = parameter
        self.module = module
        self.optimizer: Any = getattr(parameter, "_z3_optimizer", None)

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.parameter.ds_shape)

    @property
    def owners(self) -> list[tuple[nn.Module, str]]:
        names = self.module._parameters.items()
        return [(self.module, name) for name, own in names if own is self.parameter]

    @property
    def groups(self) -> Sequence[dist.ProcessGroup]:
        return [self.parameter.ds_process_group]

    @property
    def runs(self) -> Sequence[tuple[int, int]]:
        return [self._run_of(rank) for rank in range(self.groups[0].size())]

    def _run_of(self, rank: int) -> tuple[int, int]:
        size, chunk = self.parameter.ds_numel, self.parameter.ds_tensor.ds_numel
        start = min(rank * chunk, size)
        return start, min(chunk, size - start)

    def _unpadded(self, run: Any) -> Tensor:
        """This rank's run, of a tensor that may end with a padding."""
        return run.view(-1)[: self._run_of(self.groups[0].rank())[1]]

    @property
    def values(self) -> Tensor:
        return self._unpadded(self.parameter.ds_tensor.detach())

    @property
    def masters(self) -> Sequence[Tensor]:
        tensor, run = self.optimizer_tensor
        return () if run is None else (tensor.detach()[run],)

    @property
    def optimizer_tensor(self) -> tuple[Tensor, slice | None]:
        optimizer = self.optimizer
        if optimizer is None or not self.parameter.requires_grad:
            return self.parameter, None
        number, offset, _ = optimizer.grad_position[optimizer.get_param_id(self.parameter)]
        size = self._run_of(self.groups[0].rank())[1]
        return optimizer.fp32_partitioned_groups_flat[number], slice(offset, offset + size)

    @property
    def layout(self) -> str:
        return f"ZeRO-3 over {self.groups[0].size()} ranks"

    @property
    def unsupported(self) -> str | None:
        parameter, optimizer = self.parameter, self.optimizer
        if parameter.requires_grad and optimizer is None:
            return "no optimizer of ZeRO-3 has a copy of it yet; prune after deepspeed.initialize"
        if (
            getattr(parameter.ds_tensor, "final_location", None) is not None
            or (optimizer is not None and optimizer.swap_optimizer)
            or getattr(parameter.ds_tensor, "ds_quant_scale", None) is not None
            or getattr(parameter, "ds_secondary_tensor", None) is not None
            or self.groups[0].size() != dist.get_world_size()
        ):
            return "ZeRO-3 keeps it on NVMe, quantised, twice, or not over all ranks; expected none"
        return None

    def free_gathered(self) -> None:
        if self.parameter.ds_status.name == "AVAILABLE":
            self.parameter.partition()

    @property
    def gradient(self) -> Tensor | None:
        # DeepSpeed keeps the memory of gradients, whatever it has in it, between steps.
        if self.optimizer is None or not self.optimizer._epilogue_ran_this_backward:
            return None
        gradient = self._unpadded(self.optimizer.get_local_fp32_grad_for_param(self.parameter))
        gradient = self._unscaled(gradient.to(self.values.device, copy=True))
        held = managed.users_of(self.optimizer).get(id(self.parameter))
        if held is not None and not held.has_dense_gradient:
            zero_pruned(gradient, held.mask)
        return gradient

    def _unscaled(self, gradient: Tensor) -> Tensor:
        scale = 1.0 if self.optimizer is None else float(self.optimizer.loss_scale)
        return gradient if scale == 1 else gradient / scale

    def drop_gradient(self) -> None:
        self.parameter.grad = None
        if self.optimizer is not None:
            self.optimizer._epilogue_ran_this_backward = False
            self.optimizer.micro_step_id = 0  # the next gradient is not added to this one

    def hold(self, held: Any) -> None:
        if self.optimizer is not None:
            managed.replace_methods(self.optimizer, id(self.parameter), held, step=_step)

    def release(self, held: Any) -> None:
        if self.optimizer is not None:
            managed.restore_methods(self.optimizer, id(self.parameter), held, "step")


def _step(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    """ZeRO-3's step, of masked gradients: the norm by which they are clipped is theirs."""
    for held in managed.users_of(optimizer).values():
        parameter = held.record.parameter
        if parameter.requires_grad and not held.has_dense_gradient:
            gradient = optimizer.get_local_fp32_grad_for_param(parameter).view(-1)
            zero_pruned(held.record._unpadded(gradient), held.mask)
            optimizer.set_local_grad_for_param(gradient, parameter)
    return type(optimizer).step(optimizer, *args, **kwargs)


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
