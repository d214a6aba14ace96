"""Accumulators in state dicts: laid out like their parameters, so that checkpoints reshard them."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from distprune._common.pruned_form import is_dtensor
from distprune.criteria.tracking import TrackedParameter
from distprune.masks.writable import is_misplaced
from distprune.shards.reader import ShardReader, local_part
from distprune.shards.shard import LocalShard
from distprune.torch_private.managed import ManagedRun

if TYPE_CHECKING:
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor
    from typing_extensions import TypeIs


def to_save(
    parameter: TrackedParameter, reader: ShardReader, shard: LocalShard, local: Tensor
) -> Tensor:
    """An accumulator in the form of its parameter; of the same memory.

    Raises:
        NotImplementedError: DCP of this torch cannot save it.
    """
    managed = reader.managed(parameter.module, parameter.name)
    if isinstance(managed, ManagedRun):
        from distprune.torch_private import fsdp1, fsdp1_tensors

        assert isinstance(managed, fsdp1.FlatPiece)
        return fsdp1_tensors.run_as_sharded_tensor(parameter.label, managed, local)
    tensor = shard.as_parameter_layout(local)
    if is_dtensor(tensor) and is_misplaced(parameter.label, tensor):
        raise NotImplementedError(
            f"{parameter.label}: torch {torch.__version__} cannot save or load uneven shards that "
            "FSDP2 cut out of tensor-parallel ones. Expected a size that the mesh divides."
        )
    return tensor


def load(
    parameter: TrackedParameter, reader: ShardReader, shard: LocalShard, value: Any, local: Tensor
) -> None:
    """Copy a saved accumulator, as :func:`to_save` made it, or whole, into this rank's part."""
    if _is_sharded_tensor(value):
        from distprune.torch_private import fsdp1, fsdp1_tensors

        managed = reader.managed(parameter.module, parameter.name)
        assert isinstance(managed, fsdp1.FlatPiece)  # check() saw to it
        fsdp1_tensors.load_run(parameter.label, managed, value, local)
        return
    local.copy_(local_part(parameter.label, "the state", value, shard))


def check(parameter: TrackedParameter, reader: ShardReader, shard: LocalShard, value: Any) -> None:
    """Refuse a saved accumulator that :func:`load` could not copy.

    Raises:
        ValueError: another shape or layout.
    """
    if not isinstance(value, Tensor):
        raise ValueError(
            f"{parameter.label}: the state has a {type(value).__name__}; expected a tensor."
        )
    if not _is_sharded_tensor(value):
        local_part(parameter.label, "the state", value, shard)
        return
    from distprune.torch_private import fsdp1, fsdp1_tensors

    managed = reader.managed(parameter.module, parameter.name)
    if not isinstance(managed, fsdp1.FlatPiece):
        raise ValueError(
            f"{parameter.label}: the state has a ShardedTensor, and FSDP1 does not shard the "
            "parameter; expected a tensor laid out like it. Load the state with "
            "torch.distributed.checkpoint, which reshards."
        )
    fsdp1_tensors.check_boxes(parameter.label, managed, value, shard.values)


def check_names(
    state: Mapping[str, Any],
    criterion: str,
    accumulators: Sequence[str],
    parameters: Sequence[TrackedParameter],
) -> None:
    """Refuse a state of another criterion, or of other parameters.

    Raises:
        ValueError: says which.
    """
    if state.get("criterion") != criterion:
        raise ValueError(
            f"the state is of the criterion {state.get('criterion')!r}; expected {criterion!r}."
        )
    keys = {parameter.key for parameter in parameters}
    for name in accumulators:
        found = set(state["accumulators"].get(name, {}))
        if found != keys:
            missing, unknown = sorted(keys - found), sorted(found - keys)
            raise ValueError(
                f"the state has no {name!r} of {missing}, and has {unknown}, which are none of "
                "the criterion's parameters; expected the same parameters. Those that select() "
                "lists have names, which do not depend on their order."
            )


def _is_sharded_tensor(value: object) -> TypeIs[ShardedTensor]:
    module = sys.modules.get("torch.distributed._shard.sharded_tensor.api")
    return module is not None and isinstance(value, module.ShardedTensor)
