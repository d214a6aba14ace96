"""The parameters that a criterion scores, each once, and reading this rank's part of them."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from torch import nn

from distprune._common.naming import checked_pair, label_of
from distprune.shards.gradients import requires_grad
from distprune.shards.reader import ShardReader
from distprune.shards.shard import LocalShard


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
