"""Moments of un-averaged gradients: E[g^2] or E[|g|] over the batches of all ranks.

What is not linear in the gradient has to see the gradient of each rank before it is averaged:
``E[g^2] = E[g]^2 + Var(g)``. Hooks on the leaves of autograd see it on every wrapper; see
torch_private/managed.py.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from distprune._common.collectives import Communicator, sum_of_pieces
from distprune._common.process_groups import over_groups
from distprune.shards.gradients import LocalGradients

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Power = Literal[1, 2]


def add_moment(total: Tensor, gradient: Tensor, power: Power, factor: float) -> None:
    """``total += factor * |gradient| ** power``, computed in fp32."""
    if power == 2:
        total.addcmul_(gradient, gradient, value=factor)
    else:
        total.add_(gradient.abs(), alpha=factor)


def factor_of(weight: float, loss_scale: float, power: Power) -> float:
    """What ``|gradient| ** power`` of a unit is multiplied with.

    Args:
        weight: how much the unit counts.
        loss_scale: by which its loss, and so its gradients, were multiplied.
    """
    return weight / loss_scale**power


class RankBatchSums:
    """Sums of moments while hooks are on: between two collectives, on entry and on leaving.

    What goes wrong inside (no backward in a batch, two of them) may go wrong on one rank alone, so
    it is remembered, and raised on all ranks by :meth:`finish`.

    [Note: sums over replicas] Ranks that have the same elements each keep sums of their own
    batches. They are added up at the end, in :meth:`finish`. On a second calibration every replica
    starts with the earlier total: all but the first replica reset theirs to zero, or it would be
    counted once per replica.

    Args:
        leaves: where the gradients come from.
        totals: by position, the sums so far, fp32, like this rank's part of the parameter.
        labels: by position.
        power: of the moment.

    Attributes:
        num_batches: of this rank.
        weight: the sum of their weights.
        problem: what went wrong on this rank, if anything did.
    """

    def __init__(
        self,
        leaves: Sequence[LocalGradients],
        totals: Sequence[Tensor],
        labels: Sequence[str],
        power: Power,
    ) -> None:
        self._power = power
        self._labels = labels
        self._factor: float | None = None  # of the present batch
        self._order = hashlib.sha256()
        self._leaves = [
            _Leaf(leaf, {position: totals[position] for position in leaf.runs}) for leaf in leaves
        ]
        self.num_batches = 0
        self.weight = 0.0
        self.problem: RuntimeError | None = None

    def attach(self) -> None:
        """Put the hooks on; after an error :meth:`detach` takes off those that are on."""
        for number, leaf in enumerate(self._leaves):
            leaf.gradients.source.attach(self._receiver(number, leaf))

    def begin(self) -> None:
        """Reset the earlier total that another replica keeps: see [Note: sums over replicas]."""
        for leaf in self._leaves:
            if any(group.rank() for group in leaf.gradients.source.replica_groups):
                for total in leaf.totals.values():
                    total.zero_()

    def detach(self) -> None:
        """Take the hooks off."""
        for leaf in self._leaves:
            leaf.gradients.source.detach()

    @contextmanager
    def batch(self, weight: float, loss_scale: float) -> Iterator[None]:
        """One backward inside, whose gradients count as :func:`factor_of` says."""
        if self._factor is not None:
            raise RuntimeError("batch() inside of batch(); expected one after the other.")
        for leaf in self._leaves:
            leaf.num_gradients = 0
        self._factor = factor_of(weight, loss_scale, self._power)
        try:
            yield
        except BaseException:
            self._note("a batch ended with an error, after some of its gradients were added up")
            raise
        finally:
            self._factor = None
        if weight and not any(leaf.num_gradients for leaf in self._leaves):
            self._note(
                "a batch had no gradient of any parameter; expected a backward inside of batch(), "
                "or weight=0 for a rank without data"
            )
        self.num_batches += 1
        self.weight += weight

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

    def _receiver(self, number: int, leaf: _Leaf) -> Callable[[Tensor], None]:
        def receive(gradient: Tensor) -> None:
            leaf.num_gradients += 1
            if leaf.shard_group is not None:
                self._order.update(number.to_bytes(4, "big"))
            factor = 0.0
            if self._factor is None:
                self._note(
                    f"{self._name(leaf)} got a gradient outside of batch(); expected every "
                    "backward inside of one, or after calibrating()"
                )
            elif leaf.num_gradients > 1:
                self._note(
                    f"{self._name(leaf)} got {leaf.num_gradients} gradients in one batch, whose "
                    "sum cannot be squared any more; expected one backward in each batch(). "
                    "Checkpointing with use_reentrant=True gives a parameter that several blocks "
                    "share a gradient from each: use use_reentrant=False"
                )
            else:
                factor = self._factor
            leaf.add(gradient, self._power, factor)

        return receive

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

    def _name(self, leaf: _Leaf) -> str:
        return self._labels[next(iter(leaf.totals))]

    def _note(self, problem: str) -> None:
        if self.problem is None:
            self.problem = RuntimeError(f"{problem}.")


class _Leaf:
    """The sums of the parameters that one leaf brings gradients of."""

    def __init__(self, gradients: LocalGradients, totals: dict[int, Tensor]) -> None:
        self.gradients = gradients
        self.totals = totals
        self.num_gradients = 0
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
