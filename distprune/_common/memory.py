"""Memory on the CPU: scratch that is used again, and moves that need no threads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

# The integer of each size, as which bits are moved.
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# So few elements no torch operation spreads over threads: for work that has its own.
SERIAL = 1 << 15

Array = np.ndarray
# A count, on the host or still on its way there from a device.
Count = int | Tensor


class Scratch:
    """Arrays that one thread uses again for every chunk."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, np.dtype], Array] = {}

    def array(self, use: str, size: int, dtype: np.dtype | type) -> Array:
        """An uninitialised array, 1-d; the next call for the same use returns the same memory."""
        key = (use, np.dtype(dtype))
        held = self._held.get(key)
        if held is None or held.size < size:
            held = self._held[key] = np.empty(size, dtype)
        return held[:size]


def takes_numpy(device: torch.device) -> bool:
    """Whether elements are worked on by numpy: on a CPU; by torch operations on other devices."""
    return device.type == "cpu"


def select(flat: Tensor, which: Tensor) -> Tensor:
    """``flat[which]`` for int64 positions or bool flags, 1-d.

    On a CPU by numpy: torch spreads even this over threads, which wait for each other longer than
    it takes where cores are shared.
    """
    if not takes_numpy(flat.device) or flat.itemsize not in INTEGERS:
        return flat[which]
    bits = flat.view(INTEGERS[flat.itemsize]).numpy()
    return torch.from_numpy(bits[which.numpy()]).view(flat.dtype)


def copy(source: Tensor, out: Tensor) -> None:
    """``out.copy_(source)``, which torch would spread over threads."""
    if takes_numpy(source.device) and takes_numpy(out.device):
        np.copyto(out.numpy(), source.numpy())
    else:
        out.copy_(source)


def on_host(counts: Sequence[Count]) -> list[int]:
    """Counts as numbers. Waits for a device once, for all of them."""
    waiting = [count for count in counts if isinstance(count, Tensor)]
    if not waiting:
        return list(counts)  # type: ignore[arg-type]
    arrived = iter(torch.stack(waiting).tolist())
    return [next(arrived) if isinstance(count, Tensor) else count for count in counts]


@dataclass(frozen=True)
class Places:
    """Some runs of equal length in a flat tensor.

    Attributes:
        start, stop: the positions that are cut into runs; what is left over belongs to none.
        length: of a run.
        runs: int64 [m]: which ones.
    """

    start: int
    stop: int
    length: int
    runs: Tensor

    def of(self, flat: Tensor) -> Tensor:
        """Their elements, [m * length]."""
        whole = self.start + (self.stop - self.start) // self.length * self.length
        runs = flat[self.start : whole].view(-1, self.length)
        if not takes_numpy(flat.device) or flat.itemsize not in INTEGERS:
            return runs[self.runs.to(flat.device)].view(-1)
        bits = runs.view(INTEGERS[flat.itemsize]).numpy()
        return torch.from_numpy(bits[self.runs.numpy()]).view(flat.dtype).view(-1)

    def positions(self, device: torch.device) -> Tensor:
        """Where they are, int64 [m * length]."""
        runs = self.runs.to(device).unsqueeze(1) * self.length
        return (runs + torch.arange(self.length, device=device)).view(-1) + self.start


def concatenate(tensors: Sequence[Tensor]) -> Tensor:
    """Of one dtype, which empty tensors do not decide; on the CPU."""
    filled = [tensor.numpy() for tensor in tensors if tensor.numel()]
    return torch.from_numpy(np.concatenate(filled)) if filled else torch.empty(0, dtype=torch.int64)
