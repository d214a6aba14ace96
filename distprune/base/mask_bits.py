"""A mask as bits: one per element, the first element in the lowest bit of the first byte.

    elements   0 1 2 3 4 5 6 7 | 8 9 ...
    values     1 0 0 1 1 1 0 1 | 1 0 ...
    bytes        0b10111001    | 0b...01

This is the only bit order of the package, in files and on the wire. Importing this module does not
import numpy: ``distprune plan`` needs :func:`num_bytes_of` alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np


def num_bytes_of(num_elements: int) -> int:
    """How many bytes the bits of so many elements fill."""
    return -(-num_elements // 8)


def pack(flags: np.ndarray) -> np.ndarray:
    """Flags as bits, along the last dimension.

    Args:
        flags: bool [..., n]; not 0 is 1.

    Returns:
        uint8 [..., ceil(n / 8)]; the bits after the last element are 0.
    """
    import numpy as np

    return np.packbits(flags, axis=-1, bitorder="little")


def unpack(packed: np.ndarray, start: int, stop: int) -> np.ndarray:
    """The flags [start, stop) of a mask.

    Args:
        packed: uint8, 1-d, as :func:`pack` returns it.
        start, stop: indices of elements.

    Returns:
        bool [stop - start].
    """
    import numpy as np

    return np.unpackbits(packed, count=stop, bitorder="little")[start:].view(bool)


def pack_words(flags: np.ndarray) -> np.ndarray:
    """Flags, 1-d, as int64 [ceil(n / 64)]: the first in the lowest bit of the first word.

    Words of ranks that set different bits can be summed: no bit carries into the next one.
    """
    import numpy as np

    words = np.zeros(-(-flags.size // 64), dtype="<i8")
    packed = pack(flags)
    words.view(np.uint8)[: packed.size] = packed
    return words


def unpack_words(words: np.ndarray, num_elements: int) -> np.ndarray:
    """bool [num_elements] from what :func:`pack_words` returned."""
    return unpack(words.astype("<i8", copy=False).view("u1"), 0, num_elements)
