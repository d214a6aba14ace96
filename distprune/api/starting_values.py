"""The values that parameters have before training, to go back to: lottery tickets."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from distprune._common.hashing import draw_seed, hash_keys
from distprune._common.naming import unwrap
from distprune._common.process_groups import world
from distprune._common.pruned_form import name_of_pruned_orig, orig_key
from distprune.masks.values import keep_nothing, set_values
from distprune.shards.reader import ShardReader, local_part
from distprune.shards.shard import LocalShard
from distprune.torch_private.wrapper import plain_class

_CHUNK = 1 << 18
_INTEGER_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class StartingValues:
    """This rank's part of the values of parameters, as they are now; :meth:`restore` writes them.

    On any sharding, pruned or not. Collective over all ranks.

    Args:
        parameters: (module, name) pairs, as ``select`` lists them.

    Attributes:
        checksum: of the bits of all values, an int64; the same on every rank and on any sharding.

    Raises:
        NotImplementedError: a layout or wrapper that is not supported.

    Cost: memory for the shards of the parameters; a read and a copy of them; one all-reduce of 8
    bytes.
    """

    def __init__(self, parameters: Iterable[tuple[nn.Module, str]]) -> None:
        self._pairs: list[tuple[nn.Module, str]] = []
        self._communicator = world()
        self._copies: list[Tensor] = []

        def copy() -> Tensor:
            self._pairs.extend(parameters)
            with torch.inference_mode(False), torch.no_grad():
                reader = ShardReader(self._communicator.index, self._communicator.size)
                shards = [
                    reader.read(pair[0], pair[1], _label(position, pair))
                    for position, pair in enumerate(self._pairs)
                ]
                self._copies = [shard.values.clone() for shard in shards]
                # Of a parameter with copies on several meshes, the leading rank's mesh counts.
                leader = self._communicator.ranks[0] if self._communicator.ranks else 0
                sums = [
                    _checksum(shard, seed)
                    if shard.ranks is None or leader in shard.ranks
                    else torch.zeros((), dtype=torch.int64)
                    for seed, shard in enumerate(shards)
                ]
            return torch.stack(sums).sum(0, keepdim=True)

        self.checksum = int(self._communicator.sum(self._communicator.run(copy))[0])

    def restore(self) -> None:
        """Write the values back. Masks, gradients and the optimizer's state stay as they are.

        Raises:
            RuntimeError: a backward is still to come that may need the present values.

        Cost: a pass over the values; one all-reduce of 40 bytes.
        """
        self._communicator.run(self._check_shapes)

        def change(number: int, values: Tensor) -> None:
            values.copy_(self._copies[number])

        set_values(self._pairs, change, self._communicator, keep=keep_nothing)

    def resample(self) -> None:
        """Write new random values: those of ``reset_parameters`` of the modules.

        Every rank computes the whole parameters of a module, from a seed that the leading rank
        draws from torch's generator, and takes its part; so the values do not depend on the
        sharding. Parameters of a module without ``reset_parameters`` get their starting values.

        Raises:
            NotImplementedError: FSDP1 with ``use_orig_params=False``, by name; on
                every rank, and nothing has changed then.

        Cost: a copy of the shards; memory for the whole parameters of one module at a time, and
        their initialisation, on every rank.
        """
        self._communicator.run(self._check_names)
        seed = int(self._communicator.leader_of(1, draw_seed)[0])
        made: dict[int, dict[str, Tensor]] = {}

        def change(number: int, values: Tensor) -> None:
            module, name = unwrap(self._pairs[number][0]), self._pairs[number][1]
            if id(module) not in made:
                made.clear()  # of the module before
                made[id(module)] = _initialised(module, seed + number)
            whole = made[id(module)].get(name)
            if whole is None:
                values.copy_(self._copies[number])
                return
            shard = ShardReader().read(module, name, _label(number, self._pairs[number]))
            values.copy_(local_part(shard.name, "the new value", whole, shard))

        set_values(self._pairs, change, self._communicator)

    def _check_names(self) -> None:
        for position, pair in enumerate(self._pairs):
            module, name = unwrap(pair[0]), pair[1]
            if not {name, orig_key(name)} & module._parameters.keys():
                raise NotImplementedError(
                    f"{_label(position, pair)} is none of its module's own parameters under FSDP1 "
                    "with use_orig_params=False, so it cannot be drawn anew; expected FSDP1 with "
                    "use_orig_params=True."
                )

    def _check_shapes(self) -> None:
        reader = ShardReader()
        for position, (pair, copy) in enumerate(zip(self._pairs, self._copies, strict=True)):
            shard = reader.read(pair[0], pair[1], _label(position, pair))
            if shard.values.shape != copy.shape:
                raise RuntimeError(
                    f"{shard.name}: this rank's part has shape {tuple(shard.values.shape)}, and "
                    f"had {tuple(copy.shape)} when its values were kept; expected a model that is "
                    "wrapped before, and not again."
                )


def _initialised(module: nn.Module, seed: int) -> dict[str, Tensor]:
    """The whole parameters of a module after ``reset_parameters``; empty if it has none."""
    base = plain_class(module)
    if not callable(getattr(base, "reset_parameters", None)):
        return {}
    reader = ShardReader()
    parameters: dict[str, nn.Parameter | None] = {}
    for registered, parameter in module._parameters.items():
        name = name_of_pruned_orig(registered, module._buffers) or registered
        if parameter is not None:
            shard = reader.read(module, name, name)
            # On the CPU, so that the values do not depend on the device.
            parameters[name] = nn.Parameter(torch.empty(shard.shape, dtype=shard.values.dtype))
        else:
            parameters[registered] = parameter
    twin: nn.Module = object.__new__(base)
    twin.__dict__.update(module.__dict__)
    hooks = [key for key in twin.__dict__ if key.endswith("_hooks")]
    twin.__dict__.update({key: type(twin.__dict__[key])() for key in hooks})
    for name in parameters:
        twin.__dict__.pop(name, None)  # the product of a plain pruned module
    twin.__dict__["_parameters"] = parameters
    twin.__dict__["_buffers"] = {}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        twin.reset_parameters()  # type: ignore[operator]
    return {name: p.detach() for name, p in parameters.items() if p is not None}


def _checksum(shard: LocalShard, seed: int) -> Tensor:
    """An int64: the sum, modulo 2**64, of the bits of each element times a number of its index."""
    flat = shard.flat(shard.values)
    bits = flat.view(_INTEGER_OF_SIZE[flat.itemsize])
    total = torch.zeros((), dtype=torch.int64)
    for start in range(shard.counted.start, shard.counted.stop, _CHUNK):
        stop = min(start + _CHUNK, shard.counted.stop)
        weights = hash_keys(shard.index(torch.arange(start, stop)), seed + 1) | 1
        total += (weights * (bits[start:stop].cpu().long() + 1)).sum()
    return total


def _label(position: int, pair: tuple[nn.Module, str]) -> str:
    return getattr(pair, "fqn", None) or f"{type(pair[0]).__name__}.{pair[1]} (#{position})"
