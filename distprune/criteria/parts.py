"""The parameters that a criterion scores, each once, and its accumulators in state dicts.

Accumulators are laid out like their parameters, so that checkpoints reshard them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from distprune.base.naming import checked_pair, label_of, unwrap
from distprune.base.pruned_form import is_dtensor
from distprune.masks.checks import is_misplaced
from distprune.shards.gradients import check_trainable
from distprune.shards.reader import ShardReader, local_part
from distprune.shards.shard import Shard
from distprune.wrappers.managed import ManagedRun

if TYPE_CHECKING:
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor
    from typing_extensions import TypeIs


@dataclass(frozen=True)
class ScoredParameter:
    """A parameter that a criterion scores; a tied one is one.

    Attributes:
        pair: (module, name) as the caller gave it.
        label: its full name, or what stands for it in messages.
        key: the same on any sharding, for state dicts: its full name, or its place in the list.
    """

    pair: tuple[nn.Module, str]
    label: str
    key: str

    def read(self, reader: ShardReader) -> Part:
        """This rank's part of the parameter, as it is now."""
        module, name = unwrap(self.pair[0]), self.pair[1]
        shard = reader.read(module, name, self.label)
        return Part(self.pair, self.label, self.key, shard)


@dataclass(frozen=True)
class Part(ScoredParameter):
    """A parameter with this rank's part of it, as it was when it was read.

    Attributes:
        shard: this rank's part.
    """

    shard: Shard

    def to_save(self, accumulator: Tensor) -> Tensor:
        """An accumulator in the form of its parameter; of the same memory.

        Raises:
            NotImplementedError: DCP of this torch cannot save it.
        """
        run = self._run
        if run is not None:
            from distprune.wrappers import run_tensors

            return run_tensors.run_as_sharded_tensor(self.label, run, accumulator)
        tensor = self.shard.as_parameter_layout(accumulator)
        if is_dtensor(tensor) and is_misplaced(self.label, tensor):
            raise NotImplementedError(
                f"{self.label}: torch {torch.__version__} cannot save or load uneven shards that "
                "FSDP2 cut out of tensor-parallel ones, nor parts of groups of rows. Expected a "
                "size that the mesh divides, and whole dimensions."
            )
        return tensor

    def loader(self, value: Any) -> Callable[[Tensor], object]:
        """What copies a saved accumulator, in the form of :meth:`to_save` or whole, into another.

        Raises:
            ValueError: another shape or layout.
        """
        label, shard, run = self.label, self.shard, self._run
        if not isinstance(value, Tensor):
            raise ValueError(f"{label}: the state has a {type(value).__name__}; expected a tensor.")
        if not _is_sharded_tensor(value):
            local_part(label, "the state", value, shard)
            return lambda own: own.copy_(local_part(label, "the state", value, shard))
        if run is None:
            raise ValueError(
                f"{label}: the state has a ShardedTensor, and the parameter is not sharded into "
                "runs, as FSDP1 does; expected a tensor laid out like it. Load the state with "
                "torch.distributed.checkpoint, which reshards."
            )
        from distprune.wrappers import run_tensors

        run_tensors.check_boxes(label, run, value, shard.values)
        return lambda own: run_tensors.load_run(label, run, value, own)

    @property
    def _run(self) -> ManagedRun | None:
        return self.shard.managed if isinstance(self.shard.managed, ManagedRun) else None


def scored_parameters(parameters: Iterable[tuple[nn.Module, str]]) -> tuple[ScoredParameter, ...]:
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
    scored: dict[Hashable, ScoredParameter] = {}
    for position, pair in enumerate(parameters):
        checked_pair(pair, f"parameters[{position}]")
        label = label_of(pair, position)
        key = getattr(pair, "fqn", None) or f"parameters[{len(scored)}]"
        parameter = ScoredParameter(pair, label, key)
        part = parameter.read(reader)
        if part.shard.values.is_complex():
            raise NotImplementedError(
                f"{label}: dtype {part.shard.values.dtype} is complex; expected a real parameter."
            )
        check_trainable(part.shard)
        scored.setdefault(part.shard.key, parameter)
    if not scored:
        raise ValueError("parameters is empty; expected at least one (module, name) pair.")
    keys = [parameter.key for parameter in scored.values()]
    twice = [key for key in keys if keys.count(key) > 1] if len(set(keys)) < len(keys) else []
    if twice:
        raise ValueError(f"{twice[0]} is the name of two parameters; expected unique names.")
    return tuple(scored.values())


def _is_sharded_tensor(value: object) -> TypeIs[ShardedTensor]:
    module = sys.modules.get("torch.distributed._shard.sharded_tensor.api")
    return module is not None and isinstance(value, module.ShardedTensor)
