"""Memory: its peak, scratch arrays that are used again, and copies on a CPU without threads."""

from __future__ import annotations

import contextlib
import re
import resource
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

# The integer of each size in bytes: bits of any dtype are moved as one of these.
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# torch does not spread operations on so few elements over threads: for work that has its own.
SERIAL = 1 << 15

Array = np.ndarray
# A number of elements: on the host, or a 0-d tensor on a device that has not been waited for.
Count = int | Tensor


class Scratch:
    """Arrays that one thread uses again for every chunk."""

    def __init__(self) -> None:
        self._arrays: dict[tuple[str, np.dtype], Array] = {}

    def array(self, use: str, size: int, dtype: np.dtype | type) -> Array:
        """An uninitialised array, 1-d; the next call for the same use returns the same memory."""
        key = (use, np.dtype(dtype))
        array = self._arrays.get(key)
        if array is None or array.size < size:
            array = self._arrays[key] = np.empty(size, dtype)
        return array[:size]


def ordinary_tensors() -> contextlib.AbstractContextManager[None]:
    """A context in which new tensors may be part of a backward, also inside inference mode."""
    if torch.is_inference_mode_enabled():
        return torch.inference_mode(False)
    return contextlib.nullcontext()


def takes_numpy(device: torch.device) -> bool:
    """Whether numpy works on the elements, as on a CPU; on other devices torch operations do."""
    return device.type == "cpu"


def select(flat: Tensor, index: Tensor) -> Tensor:
    """``flat[index]`` for int64 positions or bool flags, 1-d, of the first dimension.

    On a CPU by numpy: torch spreads even this over threads, which wait for each other longer than
    it takes where cores are shared.
    """
    if not takes_numpy(flat.device) or flat.itemsize not in INTEGERS:
        return flat[index]
    bits = flat.view(INTEGERS[flat.itemsize]).numpy()
    return torch.from_numpy(bits[index.numpy()]).view(flat.dtype)


def moved(host: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on a device, for whose copy the host does not wait."""
    if device.type in ("cuda", "xpu"):
        host = host.pin_memory()
    return host.to(device, non_blocking=True)


def on_host(counts: Sequence[Count]) -> list[int]:
    """Counts as numbers. Waits for a device once, for all of them."""
    on_device = [count for count in counts if isinstance(count, Tensor)]
    copied = iter(torch.stack(on_device).tolist() if on_device else ())
    return [next(copied) if isinstance(count, Tensor) else count for count in counts]


def arrays_on_host(counts: Sequence[Tensor]) -> list[Array]:
    """Several tensors of integers, as int64. Waits for a device once, for all of them."""
    flat, end = concatenate([each.view(-1).long() for each in counts]).numpy(), 0
    return [flat[end : (end := end + each.numel())].reshape(each.shape) for each in counts]


@dataclass(frozen=True)
class Runs:
    """Some runs of equal length in a flat tensor.

         start                               stop
          |  0  |  1  |  2  |  3  |  4  |  5  | rest      runs of ``length`` elements

    Attributes:
        start, stop: the positions that are cut into runs; a rest shorter than a run is left out.
        length: of a run.
        numbers: int64 [m], of the runs that are meant.
    """

    start: int
    stop: int
    length: int
    numbers: Tensor

    def of(self, flat: Tensor) -> Tensor:
        """Their elements, [m * length]."""
        end = self.start + (self.stop - self.start) // self.length * self.length
        runs = flat[self.start : end].view(-1, self.length)
        return select(runs, moved(self.numbers, flat.device)).view(-1)

    def positions(self, device: torch.device) -> Tensor:
        """Their positions in the tensor, int64 [m * length]."""
        starts = moved(self.numbers, device).unsqueeze(1) * self.length
        return (starts + torch.arange(self.length, device=device)).view(-1) + self.start


def concatenate(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors, 1-d and of one dtype, joined to one on the CPU; int64 if all are empty.

    Waits for a device once, for all of them.
    """
    filled = [tensor for tensor in tensors if tensor.numel()]
    if not filled:
        return torch.empty(0, dtype=torch.int64)
    if all(takes_numpy(tensor.device) for tensor in filled):
        return torch.from_numpy(np.concatenate([tensor.numpy() for tensor in filled]))
    return torch.cat([tensor.to(filled[0].device) for tensor in filled]).cpu()


def peak_rss_bytes() -> int:
    """The most memory of this process so far, or of the largest of its children that has ended."""
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux starts ru_maxrss with the peak of the process that started this one; VmHWM is its own.
    with contextlib.suppress(OSError):
        found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
        own = int(found[1]) if found else own
    peak = max(own, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
    return peak if sys.platform == "darwin" else peak * 1024
