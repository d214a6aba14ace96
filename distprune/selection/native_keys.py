"""Cuts of normalised scores, as cuts of the scores before they are multiplied.

[Note: native keys] Multiplication by a positive number and rounding keep the order. So the elements
of a parameter whose normalised scores are up to a threshold are those whose own magnitudes are up
to some other one. Magnitudes of 16 bits are so few that all of them are multiplied to find it, and
the pass that writes masks multiplies nothing::

    magnitude bits of a parameter   0 .................. t | t + 1 .......... inf
    score                           up to the threshold    |  above it

Where only some of the elements at the threshold go, their scores are compared as they are.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from distprune._common import memory
from distprune.selection.candidates import Candidates, Cut, PartCut
from distprune.selection.keys import Order, ScoreKeys, key_range, to_keys
from distprune.selection.scores import ScaledScores, TensorScores

# Smaller parameters are multiplied sooner than all magnitudes.
_FEW = 1 << 17


def natively(part: Candidates, own: PartCut) -> tuple[Candidates, PartCut]:
    """The same cut of the same elements, by keys that cost less where there are some.

    Cost: about 0.1 ms where the scores are multiplied numbers of 16 bits; else nothing.
    """
    keys, cut = part.keys, own.cut
    if not isinstance(keys, ScoreKeys) or not isinstance(keys.scores, ScaledScores):
        return part, own
    raw, common = keys.scores.unscaled, keys.common
    is_partial = own.position == cut.parameter and cut.index > 0
    if (
        is_partial
        or part.num_local < _FEW
        or raw.dtype.itemsize != 2
        or not raw.dtype.is_floating_point
        or common.order is not Order.MAGNITUDE
        or not memory.takes_numpy(part.device)
    ):
        return part, own
    native = key_range(raw.dtype, common.order)
    bits = torch.arange(native.largest_number + 1, dtype=native.dtype)
    magnitudes = TensorScores(bits.view(raw.dtype))
    scaled = to_keys(keys.scores.of(magnitudes).load(0, bits.numel()), common).numpy()
    last = cut.threshold if own.position < cut.parameter else cut.threshold - 1
    threshold = int(np.searchsorted(scaled, last, side="right")) - 1
    return (
        replace(part, keys=ScoreKeys(raw, native)),
        PartCut(own.position, Cut(threshold, own.position + 1, 0), own.bound),
    )
