"""The parameters that a criterion scores, each once, and what it adds up for them.

Totals are laid out like their parameters, so that checkpoints reshard them; not those of runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from distprune.base.naming import checked_pair, label_of, unwrap
from distprune.base.pruned_form import is_dtensor
from distprune.masks.checks import is_misplaced, misplaced
from distprune.shards.gradients import check_trainable
from distprune.shards.reader import ShardReader, local_part
from distprune.shards.shard import Shard
from distprune.wrappers.managed import StoredRun


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

    def to_save(self) -> Tensor | dict[str, Tensor]:
        """The total in the form of its parameter, of the same memory; a run by its place.

        Raises:
            NotImplementedError: DCP of this torch cannot save it.
        """
        if self._place is not None:
            return {self._place: self.total} if self.total.numel() else {}
        tensor = self.shard.as_parameter_layout(self.total)
        if is_dtensor(tensor) and is_misplaced(self.label, tensor):
            raise misplaced(self.label)
        return tensor

    def loader(self, value: Any) -> Callable[[], object]:
        """What copies a saved total, in the form of :meth:`to_save` or whole, into this one.

        Raises:
            ValueError: another shape or layout.
        """
        label, shard, total = self.label, self.shard, self.total
        if isinstance(value, Mapping):
            if total.numel() and self._place not in value:
                raise ValueError(
                    f"{label}: the state has the runs {list(value)} on this rank, and not "
                    f"{self._place}; expected the state of a model that is sharded in the same way."
                )
            value = value.get(self._place, total)
        if not isinstance(value, Tensor):
            raise ValueError(f"{label}: the state has a {type(value).__name__}; expected a tensor.")
        local_part(label, "the state", value, shard)
        return lambda: total.copy_(local_part(label, "the state", value, shard))

    @property
    def _place(self) -> str | None:
        """Where this rank's run is in the parameter's memory; None if it has no run."""
        managed = self.shard.managed
        if not isinstance(managed, StoredRun):
            return None
        return f"{managed.start}:{managed.start + self.total.numel()}"


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
