"""A sample of the keys of this rank's parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from distprune._common.memory import Runs, copy
from distprune.selection.candidates import Candidates
from distprune.selection.kernels import kernels_on

# Neighbours that are sampled together, as a cache line brings them anyway; one by one from
# parameters of fewer elements than the second number.
_RUN, _SMALL = 16, 4096


def sample(
    parts: Sequence[Candidates], rate: float, dead: int, generator: np.random.Generator
) -> Tensor:
    """Keys of a part of the counted elements of all parameters, 1-d, on the CPU.

    Args:
        rate: which part, about.
        dead: the key that stands for an element that does not compete.
        generator: of the positions.
    """
    runs_of_parts = [_runs(part.counted, rate, generator) for part in parts]
    sizes = [runs.numbers.numel() * runs.length for runs in runs_of_parts]
    if not sum(sizes):
        return torch.empty(0, dtype=torch.int64)
    keys = torch.empty(sum(sizes), dtype=parts[0].keys.dtype, device=parts[0].device)
    outs = torch.split(keys, sizes)
    for part, runs, out in zip(parts, runs_of_parts, outs, strict=True):
        if out.numel():
            copy(kernels_on(part.device).gather(part, runs, dead), out)
    return keys.cpu()


def _runs(counted: range, rate: float, generator: np.random.Generator) -> Runs:
    length = _RUN if len(counted) >= _SMALL else 1
    num_runs = len(counted) // length
    exact = math.ceil(len(counted) * rate) / length
    num_drawn = min(num_runs, int(exact) + int(generator.random() < exact % 1))
    # One run per stratum, jittered: regular data cannot hide between them.
    numbers = (np.arange(num_drawn) + generator.random(num_drawn)) * (num_runs / max(1, num_drawn))
    numbers = np.minimum(numbers.astype(np.int64), num_runs - 1)
    return Runs(counted.start, counted.stop, length, torch.from_numpy(numbers))
