"""Moments of un-averaged gradients: E[g^2] or E[|g|] over the batches of all ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from distprune._common.collectives import Communicator, sum_of_pieces
from distprune._common.process_groups import over_groups
from distprune.shards.gradients import LocalGradients
from distprune.shards.rank_batches import Power, RankBatches

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def add_moment(total: Tensor, gradient: Tensor, power: Power, factor: float) -> None:
    """``total += factor * |gradient| ** power``, computed in fp32."""
    if power == 2:
        total.addcmul_(gradient, gradient, value=factor)
    else:
        total.add_(gradient.abs(), alpha=factor)


class RankBatchSums(RankBatches):
    """Sums of moments while hooks are on: between two collectives, on entry and on leaving.

    What went wrong inside is raised on all ranks by :meth:`finish`.

    [Note: sums over replicas] Ranks that have the same elements each keep sums of their own
    batches. They are added up at the end, in :meth:`finish`. On a second calibration every replica
    starts with the earlier total: all but the first replica reset theirs to zero, or it would be
    counted once per replica.

    Args:
        leaves: where the gradients come from.
        totals: by position, the sums so far, fp32, like this rank's part of the parameter.
        labels: by position.
        power: of the moment.
    """

    def __init__(
        self,
        leaves: Sequence[LocalGradients],
        totals: Sequence[Tensor],
        labels: Sequence[str],
        power: Power,
    ) -> None:
        super().__init__(leaves, labels, power)
        self._order = hashlib.sha256()
        self._leaves = [
            _Leaf(leaf, {position: totals[position] for position in leaf.runs}) for leaf in leaves
        ]

    def begin(self) -> None:
        """Reset the earlier total that another replica keeps: see [Note: sums over replicas]."""
        for leaf in self._leaves:
            if any(group.rank() for group in leaf.gradients.source.replica_groups):
                for total in leaf.totals.values():
                    total.zero_()

    def finish(self, communicator: Communicator, facts: Sequence[tuple[str, str]]) -> list[float]:
        """Add up the sums over the ranks that have the same elements.

        Collective over ``communicator``, and over the groups of the leaves.

        Args:
            communicator: the ranks of the call.
            facts: what must be equal on all of them.

        Returns:
            By position, the weight of the batches of all ranks that have the parameter.

        Raises:
            RuntimeError: what went wrong in a batch, on any rank.
            ValueError: a sum that is not finite, with the parameter's name.
        """
        communicator.run(self._check, lambda _: facts)
        self._check_order(communicator)
        weights: dict[tuple[ProcessGroup, ...], float] = {}
        by_position: dict[int, float] = {}
        for leaf in self._leaves:
            groups = leaf.gradients.data_groups
            if groups not in weights:
                weights[groups] = self._summed_weight(groups)
            replicas = leaf.gradients.source.replica_groups
            if any(group.size() > 1 for group in replicas):
                summing = over_groups(replicas)
                for total in leaf.totals.values():
                    summing.sum_floats(total)
            by_position.update(dict.fromkeys(leaf.totals, weights[groups]))
        return [by_position[position] for position in range(len(self._labels))]

    def _add(self, number: int, gradient: Tensor, factor: float) -> None:
        leaf = self._leaves[number]
        if leaf.shard_group is not None:
            self._order.update(number.to_bytes(4, "big"))
        leaf.add(gradient, self._power, factor)

    def _check(self) -> None:
        if self.problem is not None:
            raise self.problem
        for leaf in self._leaves:
            for position, total in leaf.totals.items():
                if not bool(total.isfinite().all()):
                    raise ValueError(
                        f"{self._labels[position]}: the sum of |gradient|^{self._power} is not "
                        "finite; expected finite gradients. Under fp16 a smaller loss scale avoids "
                        "an overflow; nothing is updated, so a fixed scale will do."
                    )

    def _check_order(self, communicator: Communicator) -> None:
        """Raise unless the ranks of each shard group got gradients of the same leaves in turn."""
        digest = int.from_bytes(self._order.digest()[:7], "big")
        is_same_order = True
        for group in dict.fromkeys(leaf.shard_group for leaf in self._leaves):
            if group is not None:
                high = over_groups([group]).max(torch.tensor([digest, -digest])).tolist()
                is_same_order &= high[0] == -high[1]

        def check() -> None:
            if not is_same_order:
                raise RuntimeError(
                    "the gradients of sharded parameters came in different orders on the ranks; "
                    "expected the same model, and the same path through it, on every rank."
                )

        communicator.run(check)

    def _summed_weight(self, groups: tuple[ProcessGroup, ...]) -> float:
        weight = torch.tensor([self.weight], dtype=torch.float64)
        return (
            float(over_groups(groups).reduce_floats(1, lambda: weight)) if groups else self.weight
        )


class _Leaf:
    """The sums of the parameters that one leaf brings gradients of."""

    def __init__(self, gradients: LocalGradients, totals: dict[int, Tensor]) -> None:
        self.gradients = gradients
        self.totals = totals
        self.shard_group = gradients.source.shard_group

    def add(self, gradient: Tensor, power: Power, factor: float) -> None:
        """Add a gradient of this rank, and under FSDP those of the ranks that share the leaf.

        All of them have to call this, also a rank whose factor is 0.
        """
        if self.shard_group is None:
            (total,) = self.totals.values()
            if factor:
                add_moment(total, gradient, power, factor)
            return
        pieces = self.gradients.source.pieces(gradient)
        if factor:
            pieces = pieces.square_() if power == 2 else pieces.abs_()
            pieces.mul_(factor)
        else:
            pieces.zero_()  # not by a product: inf * 0 is NaN
        own = sum_of_pieces(pieces, self.shard_group)
        for position, total in self.totals.items():
            run = own[self.gradients.runs[position]]
            total.view(-1).add_(run.to(total.device))
