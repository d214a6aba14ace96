"""Backward passes of this rank's own batches: which gradients count, and how much.

What is not linear in the gradient has to see the gradient of each rank before it is averaged:
``E[g^2] = E[g]^2 + Var(g)``. Hooks on the leaves of autograd see it on every wrapper; see
wrappers/managed.py.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, TypeVar

import torch
from torch import Tensor

from distprune.ranks.collectives import Communicator
from distprune.shards.gradients import LocalGradients

Power = Literal[1, 2]


def factor_of(weight: float, loss_scale: float, power: Power) -> float:
    """What ``|gradient| ** power`` of a unit is multiplied with.

    Args:
        weight: how much the unit counts.
        loss_scale: by which its loss, and so its gradients, were multiplied.
    """
    return weight / loss_scale**power


def checked_weight(weight: float) -> float:
    """The weight of a unit as a float; ValueError if it is no finite number >= 0."""
    value = float(weight)
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"weight={weight!r}; expected a finite number >= 0.")
    return value


def checked_loss_scale(loss_scale: float) -> float:
    """The factor of a loss as a float; ValueError if it is no finite number > 0."""
    value = float(loss_scale)
    if not math.isfinite(value) or value <= 0:
        raise ValueError(f"loss_scale={loss_scale!r}; expected a finite number > 0.")
    return value


class RankBatches(ABC):
    """Batches of this rank, each with one backward; :meth:`_add` gets their gradients.

    What goes wrong inside (no backward in a batch, two of them) may go wrong on one rank alone, so
    it is remembered, and raised on all ranks when the hooks are taken off.

    Args:
        leaves: where the gradients come from.
        labels: of the parameters, by position.
        power: of the gradients that are added up.

    Attributes:
        num_batches: of this rank.
        weight: the sum of their weights.
        problem: what went wrong on this rank, if anything did.
    """

    def __init__(
        self, leaves: Sequence[LocalGradients], labels: Sequence[str], power: Power
    ) -> None:
        self._gradients = tuple(leaves)
        self._labels = labels
        self._power = power
        self._factor: float | None = None  # of the present batch
        self._num_gradients = [0] * len(leaves)  # in it
        self.num_batches = 0
        self.weight = 0.0
        self.problem: RuntimeError | None = None

    @abstractmethod
    def _add(self, number: int, gradient: Tensor, factor: float) -> None:
        """Add the gradient of a leaf, which belongs to autograd; 0: one that does not count."""

    def attach(self) -> None:
        """Put the hooks on; after an error :meth:`detach` takes off those that are on."""
        for number, gradients in enumerate(self._gradients):
            gradients.source.attach(self._receiver(number))

    def detach(self) -> None:
        """Take the hooks off."""
        for gradients in self._gradients:
            gradients.source.detach()

    @contextmanager
    def batch(self, weight: float, loss_scale: float) -> Iterator[None]:
        """One backward inside, whose gradients count as :func:`factor_of` says."""
        if self._factor is not None:
            raise RuntimeError("batch() inside of batch(); expected one after the other.")
        self._num_gradients = [0] * len(self._gradients)
        self._factor = factor_of(weight, loss_scale, self._power)
        try:
            yield
        except BaseException:
            self._note("a batch ended with an error, after some of its gradients were added up")
            raise
        finally:
            self._factor = None
        if weight and not any(self._num_gradients):
            self._note(
                "a batch had no gradient of any parameter; expected a backward inside of batch(), "
                "or weight=0 for a rank without data"
            )
        self.num_batches += 1
        self.weight += weight

    def _receiver(self, number: int) -> Callable[[Tensor], None]:
        def receive(gradient: Tensor) -> None:
            self._num_gradients[number] += 1
            count, factor = self._num_gradients[number], 0.0
            if self._factor is None:
                self._note(
                    f"{self._name(number)} got a gradient outside of batch(); expected every "
                    "backward inside of one, or after calibrating()"
                )
            elif count > 1:
                self._note(
                    f"{self._name(number)} got {count} gradients in one batch, whose "
                    "sum cannot be squared any more; expected one backward in each batch(). "
                    "Checkpointing with use_reentrant=True gives a parameter that several blocks "
                    "share a gradient from each: use use_reentrant=False"
                )
            else:
                factor = self._factor
            self._add(number, gradient, factor)

        return receive

    def _name(self, number: int) -> str:
        """The name of a parameter whose gradient comes with those of a leaf."""
        position = next(iter(self._gradients[number].runs))
        name: str = self._labels[position]
        return name

    def _note(self, problem: str) -> None:
        if self.problem is None:
            self.problem = RuntimeError(f"{problem}.")


B = TypeVar("B", bound=RankBatches)


class CollectsRankBatches:
    """What collects batches of single ranks: hooks are on while a calibration is open."""

    _sums: RankBatches | None = None

    @contextmanager
    def _calibrating(
        self,
        communicator: Communicator,
        attach: Callable[[list[B]], None],
        finish: Callable[[B], None],
    ) -> Iterator[None]:
        """Collect batches inside. Collective when it begins and when it ends.

        Args:
            communicator: all ranks that take part.
            attach: puts hooks on; its list gets what takes them off, also if another rank fails.
            finish: adds up what the ranks have seen.
        """
        if self._sums is not None:
            raise RuntimeError("calibrating() inside of calibrating(); expected one at a time.")
        made: list[B] = []
        try:
            with torch.inference_mode(False), torch.no_grad(), communicator.exclusively():
                attach(made)
            (self._sums,) = made
            with communicator.raising_everywhere():
                yield
            with torch.inference_mode(False), torch.no_grad(), communicator.exclusively():
                finish(made[0])
        finally:
            self._sums = None
            for sums in made:
                sums.detach()

    @contextmanager
    def _rank_batch(self, weight: float, loss_scale: float, num_ranks: int) -> Iterator[None]:
        """One unit: a batch of this rank, with one backward inside."""
        sums = self._sums
        if sums is None:
            raise RuntimeError(
                "batch() outside of calibrating(); expected the loop inside of calibrating()."
            )
        with sums.batch(checked_weight(weight), checked_loss_scale(loss_scale)):
            yield
        if sums.problem is not None and num_ranks == 1:
            raise sums.problem

    def _check_between(self) -> None:
        """Raise RuntimeError inside of a calibration."""
        if self._sums is not None:
            raise RuntimeError(
                "the ranks have not added up what they saw yet; expected a call after "
                "calibrating()."
            )
