"""The functions that touch every element, by torch operations; see cpu.py for what they do.

Nothing here waits for the device, unless a scan without a capacity does: counts are copied to the
host together, at the end of a pass (see memory.on_host).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from distprune.base.memory import Array, Count, Scratch

# Keys and flags of a chunk stay in the L2 cache of a large GPU, and launches are few.
CHUNK_BYTES = 1 << 24


def are_live(mask: Tensor, scratch: Scratch) -> Tensor:
    return mask == 1


def count_pieces(flags: Tensor, bounds: Sequence[int]) -> list[Count]:
    if len(bounds) == 2:
        return [torch.count_nonzero(flags)]
    upto = torch.cat([flags.new_zeros(1, dtype=torch.int64), flags.cumsum(0)])
    return list(upto[torch.tensor(bounds, device=flags.device)].diff())


def scan(
    keys: Tensor,
    live: Tensor | None,
    interval: tuple[int | Array, int | Array],
    pivots: Sequence[int | Array],
    above: int | None,
    bounds: Sequence[int],
    out: Tensor | None,
    scratch: Scratch,
    capacity: int | None = None,
) -> tuple[list[list[Count]], Tensor, Tensor, Tensor]:
    low, high = (_like(keys, key) for key in interval)
    stay = torch.ge(keys, low, out=out) if out is not None else keys >= low
    inside = (keys <= high).logical_and_(stay)
    if live is not None:
        inside.logical_and_(live)
        stay.logical_or_(live.logical_not())  # what does not compete stays
    sizes = [b - a for a, b in pairwise(bounds)]
    num_below = [n - kept for n, kept in zip(sizes, count_pieces(stay, bounds), strict=True)]
    rows: list[list[Count]] = [[*num_below], count_pieces(inside, bounds)]
    for pivot, is_above in [(above, True), *((pivot, False) for pivot in pivots)]:
        if pivot is None:
            rows.append([0] * len(sizes))
            continue
        limit = _like(keys, pivot)
        flags = torch.gt(keys, limit) if is_above else torch.le(keys, limit)
        rows.append(count_pieces(flags if live is None else flags.logical_and_(live), bounds))
    if capacity is None:
        positions = inside.nonzero().squeeze(1)
    else:
        positions = torch.nonzero_static(inside, size=capacity, fill_value=0).squeeze(1)
    return rows, positions.int(), keys[positions], stay


def _like(keys: Tensor, values: int | Array) -> int | Tensor:
    return values if isinstance(values, int) else torch.from_numpy(values).to(keys.device)


def kept(keys: Tensor, live: Tensor | None, first: int | Array, scratch: Scratch) -> Tensor:
    stay = keys >= _like(keys, first)
    return stay if live is None else stay.logical_or_(live.logical_not())


def positions_of(keys: Tensor, key: int) -> Tensor:
    return (keys == key).nonzero().squeeze(1)


def clear(flags: Tensor, positions: Tensor) -> None:
    flags[positions] = False


def store(out: Tensor, previous: Tensor | None, stay: Tensor) -> None:
    if previous is None:
        out.copy_(stay)
    elif previous is out or previous.dtype == out.dtype:
        torch.mul(previous, stay, out=out)
    else:
        out.copy_(previous).mul_(stay)


def zero(out: Tensor, positions: Tensor, flags: Tensor) -> Tensor:
    out[positions.long()] = flags.logical_not().to(out.dtype)
    return torch.count_nonzero(flags)
