"""MaskRecord: what the last pruning of a parameter left, for comparison with what is there now."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MaskRecord:
    """The mask of one whole parameter, in a few words; the same on every rank and any sharding.

    Attributes:
        fingerprint: int64, as fingerprint.fingerprint_part adds it up over all shards.
        num_pruned: elements under the mask.
    """

    fingerprint: int
    num_pruned: int
