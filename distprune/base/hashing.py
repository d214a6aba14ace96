"""Hashes of indices: the same 63 bits on every device, for random scores and checksums."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from distprune.base.memory import Array, Scratch

LARGEST_HASH = 2**63 - 2
# The constants of SplitMix64.
_WEYL = 0x9E3779B97F4A7C15
_MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def draw_seed(generator: torch.Generator | None = None) -> Tensor:
    """Draw the seed of random scores: int64 [1], on the CPU.

    Args:
        generator: of the CPU; None: torch's default one.
    """
    return torch.randint(2**62, (1,), dtype=torch.int64, device="cpu", generator=generator)


def hash_keys(indices: Tensor, seed: int) -> Tensor:
    """63 well-mixed bits per index: the finaliser of SplitMix64 over a Weyl sequence.

    Source: Steele, Lea and Flood, "Fast splittable pseudorandom number
    generators", OOPSLA 2014. int64 arithmetic wraps, so every device agrees.
    """
    x = indices * _signed(_WEYL) + seed
    x ^= _shift(x, 30)
    x *= _signed(_MIX[0])
    x ^= _shift(x, 27)
    x *= _signed(_MIX[1])
    x ^= _shift(x, 31)
    return _shift(x, 1).clamp_(max=LARGEST_HASH)


def hash_in_place(indices: Array, seed: int, scratch: Scratch) -> None:
    """Replace an int64 array by its :func:`hash_keys`, with numpy.

    Makes no copies, and does not wait for other threads.
    """
    x, shifted = indices.view(np.uint64), scratch.array("shifted", indices.size, np.uint64)
    x *= np.uint64(_WEYL)
    x += np.uint64(seed)
    for shift, factor in zip((30, 27), _MIX, strict=True):
        x ^= np.right_shift(x, np.uint64(shift), out=shifted)
        x *= np.uint64(factor)
    x ^= np.right_shift(x, np.uint64(31), out=shifted)
    x >>= np.uint64(1)
    np.minimum(indices, LARGEST_HASH, out=indices)


def _shift(x: Tensor, by: int) -> Tensor:
    """Logical right shift: torch's is arithmetic on int64."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value
