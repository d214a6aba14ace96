"""The parameters that a criterion scores, each once, and what it adds up for them.

Totals are laid out like their parameters, so that checkpoints reshard them.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from distprune.base.naming import checked_pair, label_of, unwrap
from distprune.base.pruned_form import is_dtensor
from distprune.masks.checks import is_misplaced, misplaced
from distprune.shards.gradients import check_trainable
from distprune.shards.reader import ShardReader, local_part
from distprune.shards.shard import Shard
from distprune.wrappers.managed import StoredRun

if TYPE_CHECKING:
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor
    from typing_extensions import TypeIs


@dataclass(eq=False)
class Part:
    """This rank's part of a parameter that a criterion scores, and what was added up for it.

    Attributes:
        pair: (module, name) as the caller gave it.
        label: its full name, or what stands for it in messages.
        key: the same on any sharding, for state dicts: its full name, or its place in the list.
        shard: this rank's part of the parameter, as it was when it was read last.
        weight: the sum of the weights of its units.
    """

    pair: tuple[nn.Module, str]
    label: str
    key: str
    shard: Shard
    weight: float = 0.0
    _total: Tensor | None = None

    def read(self, reader: ShardReader) -> Part:
        """Read this rank's part of the parameter anew."""
        self.shard = reader.read(unwrap(self.pair[0]), self.pair[1], self.label)
        return self

    def reset(self) -> None:
        """Forget all units."""
        self.weight, self._total = 0.0, None

    def check(self) -> None:
        """Raise if the parameter is frozen or lies in another way; else there is a total then."""
        check_trainable(self.shard)
        self._total = self.total

    @property
    def total(self) -> Tensor:
        """What was added up: fp32, like this rank's values, zeros at first."""
        values = self.shard.values
        if self._total is None:
            self._total = torch.zeros_like(values, dtype=torch.float32)
        if self._total.shape != values.shape:
            raise RuntimeError(
                f"{self.label}: this rank's part has shape {tuple(values.shape)}, and had "
                f"{tuple(self._total.shape)} before; expected a model that is wrapped before the "
                "criterion is made, and not again."
            )
        return self._total

    def to_save(self) -> Tensor:
        """The total in the form of its parameter; of the same memory.

        Raises:
            NotImplementedError: DCP of this torch cannot save it.
        """
        run = self._run
        if run is not None:
            from distprune.wrappers import run_tensors

            return run_tensors.run_as_sharded_tensor(self.label, run, self.total)
        tensor = self.shard.as_parameter_layout(self.total)
        if is_dtensor(tensor) and is_misplaced(self.label, tensor):
            raise misplaced(self.label)
        return tensor

    def loader(self, value: Any) -> Callable[[], object]:
        """What copies a saved total, in the form of :meth:`to_save` or whole, into this one.

        Raises:
            ValueError: another shape or layout.
        """
        label, shard, run, total = self.label, self.shard, self._run, self.total
        if not isinstance(value, Tensor):
            raise ValueError(f"{label}: the state has a {type(value).__name__}; expected a tensor.")
        if not _is_sharded_tensor(value):
            local_part(label, "the state", value, shard)
            return lambda: total.copy_(local_part(label, "the state", value, shard))
        if run is None:
            raise ValueError(
                f"{label}: the state has a ShardedTensor, and the parameter is not sharded into "
                "runs, as FSDP1 does; expected a tensor laid out like it. Load the state with "
                "torch.distributed.checkpoint, which reshards."
            )
        from distprune.wrappers import run_tensors

        pairs = run_tensors.matching_boxes(label, run, value, total)
        return lambda: [own.copy_(saved) for own, saved in pairs]

    @property
    def _run(self) -> StoredRun | None:
        return self.shard.managed if isinstance(self.shard.managed, StoredRun) else None


def scored_parameters(parameters: Iterable[tuple[nn.Module, str]]) -> tuple[Part, ...]:
    """The parameters of some pairs, each once.

    Raises:
        TypeError: no (module, name) pairs.
        ValueError: no parameters, a frozen one, or two of one name.
        NotImplementedError: a complex parameter; a layout or wrapper that is not supported.
    """
    reader = ShardReader()
    scored: dict[Hashable, Part] = {}
    for position, pair in enumerate(parameters):
        module, name = checked_pair(pair, f"parameters[{position}]")
        label = label_of(pair, position)
        key = getattr(pair, "fqn", None) or f"parameters[{len(scored)}]"
        shard = reader.read(module, name, label)
        if shard.values.is_complex():
            raise NotImplementedError(
                f"{label}: dtype {shard.values.dtype} is complex; expected a real parameter."
            )
        check_trainable(shard)
        scored.setdefault(shard.key, Part(pair, label, key, shard))
    if not scored:
        raise ValueError("parameters is empty; expected at least one (module, name) pair.")
    counts = Counter(part.key for part in scored.values())
    (key, count), *_ = counts.most_common(1)
    if count > 1:
        raise ValueError(f"{key} is the name of two parameters; expected unique names.")
    return tuple(scored.values())


def _is_sharded_tensor(value: object) -> TypeIs[ShardedTensor]:
    module = sys.modules.get("torch.distributed._shard.sharded_tensor.api")
    return module is not None and isinstance(value, module.ShardedTensor)
