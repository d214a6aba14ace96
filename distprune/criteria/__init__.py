"""What to rank, where it depends on gradients: accumulators of scores on any sharding.

criterion = criteria.SNIP(prune.select(model))
for batch in loader:
    loss(model, batch).backward()
    criterion.update()
    optimizer.zero_grad()
prune.global_unstructured(
    criterion.parameters, criterion.pruning_method, criterion.scores(), amount=0.9
)
"""

from __future__ import annotations

from distprune.criteria.base import Criterion
from distprune.criteria.elementwise import (
    SNIP,
    Custom,
    Fisher,
    GradientMagnitude,
    GradientMoment,
    Movement,
    Taylor,
)

__all__ = [
    "SNIP",
    "Criterion",
    "Custom",
    "Fisher",
    "GradientMagnitude",
    "GradientMoment",
    "Movement",
    "Taylor",
]
