"""The parameters that a criterion scores, each once, and its accumulators in state dicts.

Accumulators are laid out like their parameters, so that checkpoints reshard them.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from distprune._common.naming import checked_pair, label_of
from distprune._common.pruned_form import is_dtensor
from distprune.masks.checks import is_misplaced
from distprune.shards.gradients import requires_grad
from distprune.shards.reader import ShardReader, local_part
from distprune.shards.shard import LocalShard
from distprune.torch_private.managed import ManagedRun

if TYPE_CHECKING:
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor
    from typing_extensions import TypeIs


@dataclass(frozen=True)
class TrackedParameter:
    """A parameter that a criterion scores; a tied one is one.

    Attributes:
        pair: (module, name) as the caller gave it.
        module, name: where the parameter is, without wrappers.
        label: its full name, or what stands for it in messages.
        key: the same on any sharding, for state dicts: its full name, or its place in the list.
    """

    pair: tuple[nn.Module, str]
    module: nn.Module
    name: str
    label: str
    key: str

    def read(self, reader: ShardReader) -> LocalShard:
        """This rank's part of the parameter, as it is now."""
        return reader.read(self.module, self.name, self.label)

    def check_trainable(self, reader: ShardReader, shard: LocalShard) -> None:
        """Refuse a frozen parameter.

        Raises:
            ValueError: names it.
        """
        if not requires_grad(shard, reader.managed(self.module, self.name)):
            raise ValueError(
                f"{self.label} is frozen (requires_grad=False), so it has no gradient; expected "
                "parameters that are trained. Leave it out, or call requires_grad_() on it for as "
                "long as gradients are collected (the base weights under LoRA, say)."
            )


def tracked_parameters(
    parameters: Iterable[tuple[nn.Module, str]],
) -> tuple[TrackedParameter, ...]:
    """The parameters of some pairs, each once.

    Raises:
        TypeError: no (module, name) pairs.
        ValueError: no parameters, a frozen one, or two of one name.
        NotImplementedError: a complex parameter; a layout or wrapper that is not supported.
    """
    if isinstance(parameters, nn.Module) or not isinstance(parameters, Iterable):
        raise TypeError(
            f"parameters is a {type(parameters).__name__}; expected (module, name) pairs, as "
            "select(model) lists them."
        )
    reader = ShardReader()
    tracked: dict[Hashable, TrackedParameter] = {}
    for position, pair in enumerate(parameters):
        module, name = checked_pair(pair, f"parameters[{position}]")
        label = label_of(pair, position)
        key = getattr(pair, "fqn", None) or f"parameters[{len(tracked)}]"
        parameter = TrackedParameter(pair, module, name, label, key)
        shard = parameter.read(reader)
        if shard.values.is_complex():
            raise NotImplementedError(
                f"{label}: dtype {shard.values.dtype} is complex; expected a real parameter."
            )
        parameter.check_trainable(reader, shard)
        tracked.setdefault(shard.key, parameter)
    if not tracked:
        raise ValueError("parameters is empty; expected at least one (module, name) pair.")
    keys = [parameter.key for parameter in tracked.values()]
    if len(set(keys)) < len(keys):
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"{twice} is the name of two parameters; expected unique names.")
    return tuple(tracked.values())


def to_save(
    parameter: TrackedParameter, reader: ShardReader, shard: LocalShard, local: Tensor
) -> Tensor:
    """An accumulator in the form of its parameter; of the same memory.

    Raises:
        NotImplementedError: DCP of this torch cannot save it.
    """
    managed = reader.managed(parameter.module, parameter.name)
    if isinstance(managed, ManagedRun):
        from distprune.torch_private import fsdp1

        assert isinstance(managed, fsdp1.FlatPiece)
        return fsdp1.run_as_sharded_tensor(parameter.label, managed, local)
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
        from distprune.torch_private import fsdp1

        managed = reader.managed(parameter.module, parameter.name)
        assert isinstance(managed, fsdp1.FlatPiece)  # check() saw to it
        fsdp1.load_run(parameter.label, managed, value, local)
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
    from distprune.torch_private import fsdp1

    managed = reader.managed(parameter.module, parameter.name)
    if not isinstance(managed, fsdp1.FlatPiece):
        raise ValueError(
            f"{parameter.label}: the state has a ShardedTensor, and FSDP1 does not shard the "
            "parameter; expected a tensor laid out like it. Load the state with "
            "torch.distributed.checkpoint, which reshards."
        )
    fsdp1.check_boxes(parameter.label, managed, value, shard.values)


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
