"""Refuse shards that torch.distributed.checkpoint of the installed torch would misplace."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from distprune._common.naming import full_name, named_modules
from distprune._common.process_groups import world
from distprune._common.pruned_form import is_dtensor
from distprune.torch_private.wrapper import managed_parameters

if TYPE_CHECKING:  # importing DCP and DTensor costs more than all the rest
    from torch.distributed import ProcessGroup
    from torch.distributed.tensor import DTensor


def check_writable(model: nn.Module, *, group: ProcessGroup | None = None) -> None:
    """Raise if DCP of this torch would write or read a shard of a parameter at a wrong offset.

    That happens with FSDP2 over tensor parallelism if both shard the same dimension and do
    not divide it evenly (7 rows on a 3x2 mesh, 9 on 4x2): DCP of torch 2.13 then fails, or saves
    without an error and loses rows. Collective over ``group``.

    Raises:
        NotImplementedError: names the parameters, on every rank; nothing was written.

    Cost: arithmetic on shapes; one all-reduce of 40 bytes.
    """
    world(group).run(lambda: _check_boxes(model))


def _check_boxes(model: nn.Module) -> None:
    managed = managed_parameters(model)
    wrong = []
    for path, module in named_modules(model):
        for name, parameter in module._parameters.items():
            # What is registered may be the gathered copy; FSDP1's records have no DTensor.
            record = managed.get((id(module), name))
            parameter = getattr(record, "sharded", parameter)
            if is_dtensor(parameter) and is_misplaced(name, parameter):
                fqn = full_name(path, name)
                wrong.append(
                    f"{fqn} (shape {tuple(parameter.shape)}, {parameter.placements} "
                    f"on a mesh of shape {tuple(parameter.device_mesh.shape)})"
                )
    if wrong:
        raise NotImplementedError(
            f"torch {torch.__version__} cannot save or load uneven shards that FSDP2 cut out of "
            f"tensor-parallel ones: {'; '.join(wrong)}. Expected a size that the mesh divides. Pad "
            "the dimension, use another mesh, or save a consolidated state dict."
        )


def is_misplaced(name: str, parameter: DTensor) -> bool:
    """Whether DCP of this torch would write or read this rank's shard at a wrong offset."""
    from distprune.shards import dtensor
    from distprune.torch_private import dcp

    if not dcp.may_be_misplaced(parameter):
        return False
    # Per dimension, the range of global indices that this rank has.
    ranges = dtensor.local_shard(name, parameter, None).coordinates
    sizes, offsets = dcp.written_box(parameter)
    if 0 in sizes or not all(ranges):
        return (0 in sizes) != (not all(ranges))
    starts = tuple(indices.start for indices in ranges)
    return starts != tuple(offsets) or tuple(map(len, ranges)) != tuple(sizes)
