"""Histograms of keys: each pass over the keys of a ranking counts sixteen of their bits."""

from __future__ import annotations

import numpy as np
import torch

from distprune._common.float_formats import magnitude_mask
from distprune._common.radix import Descent, RankOutsideError
from distprune.files.errors import CheckpointError
from distprune.files.ranking.keys import Array

# Bits of a key that one pass over the keys decides.
_DIGIT = 16


def descent_to(width: int, k: int) -> Descent:
    """The descent to the k-th lowest key of ``width`` bits, sixteen of them in every pass.

    The highest bit of a key is 0: the first histogram has 2**15 bins, the others 2**16.
    """
    return Descent(0, magnitude_mask(width), k - 1, _DIGIT, width - _DIGIT)


def key_histogram(keys: Array, descent: Descent, counts: Array | None = None) -> Array:
    """int64 [descent.num_bins]: the histogram of the keys in the interval of a descent."""
    return digit_histogram(keys, descent.low >> (descent.shift + _DIGIT), descent.shift, counts)


def digit_histogram(keys: Array, prefix: int, shift: int, counts: Array | None = None) -> Array:
    """Count the keys with a prefix by their next sixteen bits::

        key    | prefix | sixteen bits | shift bits |

    Args:
        keys: 1-d.
        prefix: the bits above; keys with another prefix are not counted. 0 if there are none.
        shift: the number of bits below.
        counts: integers, how often each key occurs, below 2**53 in all; None: once.

    Returns:
        int64 [2**16]; [2**15] without bits above, as the highest bit of a key is 0.
    """
    above = shift + _DIGIT
    is_first = above == 8 * keys.itemsize
    if not is_first:
        is_inside = (keys >> keys.dtype.type(above)) == keys.dtype.type(prefix)
        keys = keys[is_inside]
        counts = None if counts is None else counts[is_inside]
    if shift:
        keys = keys >> keys.dtype.type(shift)
    digits = keys.astype(np.uint16, copy=False)
    digits = digits.view(np.int16) if is_first else digits.astype(np.int32)
    num_bins = 1 << (_DIGIT - is_first)
    if counts is not None:
        weighted: Array = np.bincount(digits, counts, num_bins).astype(np.int64)
        return weighted
    histogram: Array = torch.bincount(torch.from_numpy(digits), minlength=num_bins).numpy()
    return histogram


def narrowed(descent: Descent, histogram: Array) -> tuple[Descent, int]:
    """The descent in the bin that holds its key, and the number of that bin.

    Raises:
        CheckpointError: the keys are not those of the pass before.
    """
    try:
        return descent.narrowed(histogram)
    except RankOutsideError:
        raise CheckpointError(
            "The weights changed while they were read: the counts of two passes differ. Expected "
            "files that nothing writes to; run the command again when they are complete."
        ) from None
