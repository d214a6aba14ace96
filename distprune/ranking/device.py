"""The functions that touch every element, by torch operations; see cpu.py for what they do.

Nothing here waits for the device, unless a scan collects most elements: counts are copied to the
host together, at the end of a pass (see memory.on_host).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from distprune.base.memory import Array, Scratch

# Keys and flags of a chunk stay in the L2 cache of a large GPU, and launches are few.
CHUNK_BYTES = 1 << 24


def are_live(mask: Tensor, scratch: Scratch) -> Tensor:
    """bool [m]: where a mask is exactly 1."""
    return mask == 1


def count_pieces(flags: Tensor, bounds: Array) -> Tensor:
    """int64: how many flags are set between each bound and the next."""
    if len(bounds) == 2:
        return torch.count_nonzero(flags).view(1)
    upto = torch.cat([flags.new_zeros(1, dtype=torch.int64), flags.cumsum(0)])
    return upto[torch.from_numpy(bounds).to(flags.device)].diff()


def scan(
    keys: Tensor,
    live: Tensor | None,
    edges: Sequence[int | Array],
    above: int | None,
    bounds: Array,
    scratch: Scratch,
    most: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Count the live keys up to some edges, and collect those between the first two."""
    first, second, *others = (_like(keys, edge) for edge in edges)
    stay = keys > first
    inside = (keys <= second).logical_and_(stay)
    if live is not None:
        inside.logical_and_(live)
        stay.logical_or_(live.logical_not())  # what does not compete stays
    sizes = keys.numel() if len(bounds) == 2 else torch.from_numpy(np.diff(bounds)).to(keys.device)
    num_below = sizes - count_pieces(stay, bounds)
    counts = [num_below, num_below + count_pieces(inside, bounds)]
    for row, edge in enumerate([*others, above], 2):
        if edge is None:
            counts.append(torch.zeros_like(num_below))
            continue
        flags = torch.gt(keys, edge) if row == len(edges) else torch.le(keys, edge)
        counts.append(count_pieces(flags if live is None else flags.logical_and_(live), bounds))
    size = keys.numel()
    if most * size + 1024 >= size:
        positions = inside.nonzero().squeeze(1)
    else:
        capacity = int(most * size) + 1024
        positions = torch.nonzero_static(inside, size=capacity, fill_value=0).squeeze(1)
    return torch.stack(counts), positions.int(), keys[positions], stay


def _like(keys: Tensor, values: int | Array) -> int | Tensor:
    return values if isinstance(values, int) else torch.from_numpy(values).to(keys.device)


def kept(keys: Tensor, live: Tensor | None, first: int | Array, scratch: Scratch) -> Tensor:
    """bool, like keys: what is pruned already, and the keys from ``first`` on."""
    stay = keys >= _like(keys, first)
    return stay if live is None else stay.logical_or_(live.logical_not())


def positions_of(keys: Tensor, key: int | Array) -> Tensor:
    """int64 [m]: where keys are equal to a key, or to those of an array."""
    return (keys == _like(keys, key)).nonzero().squeeze(1)


def store(out: Tensor, previous: Tensor | None, stay: Tensor) -> None:
    """Write a chunk of a mask: 0 where not ``stay``; elsewhere the previous value, or 1."""
    if previous is None:
        out.copy_(stay)
    elif previous is out or previous.dtype == out.dtype:
        torch.mul(previous, stay, out=out)
    else:
        out.copy_(previous).mul_(stay)


def zero(out: Tensor, positions: Tensor, flags: Tensor) -> Tensor:
    """Zero some elements of a chunk of a mask, where a flag is set; how many, [1]."""
    out[positions.long()] = flags.logical_not().to(out.dtype)
    return torch.count_nonzero(flags).view(1)
