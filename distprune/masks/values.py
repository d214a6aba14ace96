"""Other values in parameters for a while, in place, and back bit for bit.

A model that is evaluated for a measurement keeps its buffers and modes as well.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from distprune._common.attempts import interrupts_wait
from distprune._common.collectives import Communicator
from distprune._common.mask_bits import pack, unpack
from distprune._common.naming import Pair, label_of, tied_places, unwrap
from distprune._common.pruned_form import local_tensor, name_of_mask
from distprune.masks.checks import check_idle, check_state
from distprune.masks.hook import find_hook, refresh_products
from distprune.shards.geometry import memory_order
from distprune.shards.parameters import Target
from distprune.shards.reader import ShardReader
from distprune.shards.shard import LocalShard
from distprune.torch_private import live_graphs

# (number of the parameter in the list, this rank's unmasked values) -> None: writes new values
Change = Callable[[int, Tensor], None]
# this rank's values -> a function that writes them back
Keep = Callable[[Tensor], Callable[[], None]]

# Elements whose signs are packed at a time: the temporaries of a chunk stay in a core's cache.
_CHUNK = 1 << 18
_INTEGER_OF_SIZE = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def keep_copy(values: Tensor) -> Callable[[], None]:
    """Keep a copy of the values. Cost: memory for one shard."""
    copy = values.clone()

    def restore() -> None:
        values.copy_(copy)

    return restore


def keep_signs(values: Tensor) -> Callable[[], None]:
    """Keep the signs of floats, those of zeros and NaNs too: enough to undo ``values.abs_()``.

    Cost: memory for a bit per element.
    """
    integers = values.view(_INTEGER_OF_SIZE[values.itemsize])
    sign = torch.iinfo(integers.dtype).min
    parts = _chunks(integers)
    packed = [pack((part < 0).reshape(-1).cpu().numpy()) for part in parts]

    def restore() -> None:
        for part, bits in zip(parts, packed, strict=True):
            is_negative = torch.from_numpy(unpack(bits, 0, part.numel())).to(part.device)
            part.bitwise_or_(is_negative.view(part.shape).to(part.dtype) * sign)

    return restore


@contextmanager
def changed_values(
    parameters: Iterable[Pair],
    change: Change,
    communicator: Communicator,
    *,
    keep: Keep = keep_copy,
) -> Iterator[None]:
    """Run a block of code with other values in parameters; afterwards they have their own again.

    The values change in place, on every rank or on none, on plain modules, DDP, FSDP1, FSDP2, HSDP
    and under tensor parallelism, pruned or not: a mask acts on the new values as on the old ones.
    Parameters, gradients, masks and optimizers stay the objects that they are, and autograd's
    version counters do not move. Copies that FSDP has gathered are freed at both ends. When the
    block raises, the parameters have their own values again, too.

    Args:
        parameters: (module, name) pairs, the same on every rank; a tied parameter changes once.
        change: writes this rank's new values of a parameter, elementwise; a local step that may
            fail.
        communicator: all ranks that have a part of a parameter. They enter the block together;
            leaving it sends nothing.
        keep: keeps what restores the values.

    Raises:
        RuntimeError: before the block, a backward is still to come that may need the present
            values; after it, one that may need those of the block. Names the parameter.
        NotImplementedError: a layout or a wrapper that is not supported; names the parameter.
        ValueError: the ranks differ in the parameters.
        Exception: what ``change`` raised on a rank, on every rank; all values are as they were.

    Cost: what ``keep`` keeps; two passes over the values; one all-reduce of 40 bytes.
    """
    parts: list[_Part] = []
    open_parts: list[_Part] = []  # those that the block may have gathered
    restores: list[Callable[[], None]] = []

    def enter() -> None:
        with torch.inference_mode(False), torch.no_grad():
            parts.extend(_read(parameters, communicator))
            for part in parts:
                part.refresh_products()  # without the graph that a product may have
                part.check_no_backward("a block that changes its values for a while")
            open_parts.extend(parts)
            for part in parts:
                part.free_gathered()
                restores.append(keep(part.values))
                change(part.number, part.values)
        for part in parts:
            part.refresh_products()

    def leave(*, after_error: bool) -> None:
        try:
            with interrupts_wait(), torch.inference_mode(False), torch.no_grad():
                while restores:
                    restores.pop()()
                for part in open_parts:
                    part.free_gathered()
                    part.refresh_products()
            if not after_error:
                for part in parts:
                    part.check_no_backward("the end of a block that had changed its values")
        finally:
            for part in parts:
                part.refresh_products()

    try:
        with communicator.exclusively():
            communicator.run(enter, lambda _: _facts(parts))
        yield
    except BaseException:
        leave(after_error=True)
        raise
    leave(after_error=False)


@dataclass(frozen=True)
class _Part:
    """This rank's part of one parameter, and the places at which the parameter is registered."""

    number: int
    label: str
    shard: LocalShard
    places: tuple[Pair, ...]

    @property
    def values(self) -> Tensor:
        """The unmasked values, N-d, with a version counter of their own."""
        return self.shard.values.data

    def free_gathered(self) -> None:
        """Free the copy that FSDP has gathered, if there is one."""
        if self.shard.managed is not None:
            self.shard.managed.free_gathered()

    def refresh_products(self) -> None:
        """Compute ``mask * weight_orig`` anew where a module keeps it."""
        if self.shard.managed is None:
            refresh_products(self.places)

    def check_no_backward(self, when: str) -> None:
        """Raise RuntimeError if a backward is still to come that may need the values."""
        is_needed = (
            live_graphs.reaches(self.shard.parameter)
            if self.shard.managed is None
            else self.shard.managed.is_in_graph()
        )
        if is_needed:
            raise RuntimeError(
                f"{self.label} was used by a forward whose backward is still to come at {when}; "
                "expected that each forward and its backward lie on one side of it: "
                "gradients would mix different weights. If no backward is to come, delete "
                "what the forward returned (loss, outputs), or run it under torch.no_grad()."
            )


class ValueChange:
    """New values of parameters that stay, or are undone together: on this rank.

    Args:
        targets: the parameters of a call.

    Cost: a copy of the values of each parameter that changes, as long as this object lives.
    """

    def __init__(self, targets: Iterable[Target]) -> None:
        self._parts = [
            _Part(number, target.label, target.shard, target.places)
            for number, target in enumerate(targets)
        ]
        self._restores: dict[int, Callable[[], None]] = {}

    def begin(self) -> None:
        """Free what FSDP has gathered.

        Raises:
            RuntimeError: a backward is still to come that may need the present values.
        """
        for part in self._parts:
            part.refresh_products()  # without the graph that a product may have
            part.check_no_backward("a change of its values")
        for part in self._parts:
            part.free_gathered()

    def values(self, number: int) -> Tensor:
        """This rank's unmasked values of a parameter, to be written to, N-d."""
        values = self._parts[number].values
        if number not in self._restores:
            self._restores[number] = keep_copy(values)
        return values

    def finish(self) -> None:
        """Let the masks act on the new values, in products that have a graph again."""
        with torch.enable_grad():
            for part in self._parts:
                part.refresh_products()

    def rollback(self) -> None:
        """Write back what was there before."""
        with interrupts_wait():
            for restore in self._restores.values():
                restore()
            self.finish()


def _read(parameters: Iterable[Pair], communicator: Communicator) -> Iterator[_Part]:
    reader = ShardReader(communicator.index, communicator.size)
    seen: set[Hashable] = set()
    for number, pair in enumerate(parameters):
        module, name = unwrap(pair[0]), pair[1]
        label = label_of(pair, number)
        check_state(module, name)
        managed = reader.managed(module, name)
        if managed is not None:
            check_idle(module, label)
        shard = reader.read_managed(module, name, label, managed)
        if shard.key not in seen:
            seen.add(shard.key)
            yield _Part(number, label, shard, tuple(tied_places(pair)))


def _facts(parts: Iterable[_Part]) -> list[tuple[str, str]]:
    return [
        (part.label, f"shape {tuple(shard.shape)}, dtype {shard.values.dtype}, {shard.layout}")
        for part in parts
        for shard in (part.shard,)
    ]


def _chunks(values: Tensor) -> list[Tensor]:
    """Views of all elements: 1-d pieces in the order of memory, if they lie there without gaps."""
    order = memory_order(values)
    return [values] if order is None else list(torch.split(values.permute(order).view(-1), _CHUNK))


class KeptModel:
    """Copies of a model's buffers, but for masks, and the modes of its modules.

    Cost: memory for the buffers.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modes = [(module, module.training) for module in model.modules()]
        self._buffers: list[tuple[nn.Module, str, Tensor, Tensor]] = []
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and not _is_mask(module, name):
                    copy = local_tensor(buffer.detach()).clone()
                    self._buffers.append((module, name, buffer, copy))

    def restore_buffers(self) -> None:
        """Give every buffer the value that it had. The tensors are those that they were."""
        with torch.inference_mode(False), torch.no_grad():
            for module, name, buffer, copy in self._buffers:
                module._buffers[name] = buffer
                local_tensor(buffer.detach()).data.copy_(copy)

    def change_buffers_to_absolute_values(self) -> None:
        """Replace every floating-point buffer by its absolute values, in place."""
        with torch.inference_mode(False), torch.no_grad():
            for _, _, buffer, _ in self._buffers:
                if buffer.is_floating_point():
                    local_tensor(buffer.detach()).data.abs_()

    def restore_modes(self) -> None:
        """Give every module its mode, training or evaluation."""
        for module, is_training in self._modes:
            module.training = is_training


@contextmanager
def kept_model(model: nn.Module) -> Iterator[KeptModel]:
    """Run a block of code after which the model's buffers and modes are as they were."""
    kept = KeptModel(model)
    try:
        yield kept
    finally:
        kept.restore_modes()
        kept.restore_buffers()


def _is_mask(module: nn.Module, key: str) -> bool:
    name = name_of_mask(key)
    return name is not None and find_hook(module, name) is not None
