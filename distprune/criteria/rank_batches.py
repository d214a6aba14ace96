"""Batches of single ranks: their gradients, seen by hooks before the ranks average them.

What is not linear in the gradient has to see the gradient of each rank: ``E[g^2] = E[g]^2 +
Var(g)``. Criteria and statistics of gradients collect such batches in the same way.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from distprune.ranks.collectives import Communicator
from distprune.wrappers.managed import GradientSource

Power = Literal[1, 2]


def checked_unit(weight: float, loss_scale: float = 1.0) -> tuple[float, float]:
    """The weight of a unit and the factor of its loss, as floats.

    Raises:
        ValueError: a weight that is no finite number >= 0, a factor that is none > 0.
    """
    weight, loss_scale = float(weight), float(loss_scale)
    if not 0 <= weight < math.inf:
        raise ValueError(f"weight={weight!r}; expected a finite number >= 0.")
    if not 0 < loss_scale < math.inf:
        raise ValueError(f"loss_scale={loss_scale!r}; expected a finite number > 0.")
    return weight, loss_scale


class RankBatches(ABC):
    """Batches of this rank, each with one backward; :meth:`_add` gets their gradients.

    What goes wrong inside (no backward in a batch, two of them) may go wrong on one rank alone, so
    it is remembered, and raised on all ranks when the hooks are taken off.

    Args:
        sources: where the gradients come from.
        labels: of the parameters, by position.
        power: of the gradients that are added up.

    Attributes:
        num_batches: of this rank.
        weight: the sum of their weights.
        problem: what went wrong on this rank, if anything did.
    """

    def __init__(
        self, sources: Sequence[GradientSource], labels: Sequence[str], power: Power
    ) -> None:
        self._sources, self._labels, self._power = sources, labels, power
        self._factor: float | None = None  # of the present batch
        self._num_gradients = [0] * len(sources)  # in it
        self.num_batches, self.weight = 0, 0.0
        self.problem: RuntimeError | None = None

    @abstractmethod
    def _add(self, number: int, gradient: Tensor, factor: float) -> None:
        """Add the gradient of a source, which belongs to autograd; 0: one that does not count."""

    def attach(self) -> None:
        """Put the hooks on; after an error :meth:`detach` takes off those that are on."""
        for number, source in enumerate(self._sources):
            source.attach(functools.partial(self._receive, number))

    def detach(self) -> None:
        """Take the hooks off."""
        for source in self._sources:
            source.detach()

    @contextmanager
    def batch(self, weight: float, loss_scale: float) -> Iterator[None]:
        """One backward inside; ``|gradient| ** power`` counts ``weight`` times, unscaled."""
        if self._factor is not None:
            raise RuntimeError("batch() inside of batch(); expected one after the other.")
        self._num_gradients = [0] * len(self._sources)
        self._factor = weight / loss_scale**self._power
        try:
            yield
        except BaseException:
            self._note("a batch ended with an error, after some of its gradients were added up")
            raise
        finally:
            self._factor = None
        if weight and not any(self._num_gradients):
            self._note("a batch had no gradient of any parameter; expected a backward inside")
        self.num_batches += 1
        self.weight += weight

    def _receive(self, number: int, gradient: Tensor) -> None:
        self._num_gradients[number] += 1
        count, factor = self._num_gradients[number], self._factor
        name = self._labels[next(iter(self._sources[number].runs))]
        if factor is None:
            self._note(
                f"{name} got a gradient outside of batch(); expected every backward inside of one"
            )
        elif count > 1:
            factor = None
            self._note(
                f"{name} got {count} gradients in one batch; expected one backward in each "
                "batch(), and checkpointing with use_reentrant=False"
            )
        self._add(number, gradient, factor or 0.0)

    def _note(self, problem: str) -> None:
        self.problem = self.problem or RuntimeError(f"{problem}.")


class CollectsRankBatches:
    """What collects batches of single ranks: hooks are on while a calibration is open."""

    _sums: Any = None  # RankBatches; None outside of a calibration

    @contextmanager
    def _calibrating(
        self, communicator: Communicator, attach: Callable[[], None], finish: Callable[[], None]
    ) -> Iterator[None]:
        """Collect batches inside. Collective when it begins and when it ends.

        Args:
            communicator: all ranks that take part.
            attach: sets ``_sums``, and puts its hooks on.
            finish: adds up what the ranks have seen.
        """
        if self._sums is not None:
            raise RuntimeError("calibrating() inside of calibrating(); expected one at a time.")
        try:
            with torch.inference_mode(False), torch.no_grad(), communicator.exclusively():
                attach()
            with communicator.raising_everywhere():
                yield
            with torch.inference_mode(False), torch.no_grad(), communicator.exclusively():
                finish()
        finally:
            sums, self._sums = self._sums, None
            if sums is not None:  # also if another rank has failed
                sums.detach()

    @contextmanager
    def _rank_batch(self, weight: float, loss_scale: float, num_ranks: int) -> Iterator[None]:
        """One unit: a batch of this rank, with one backward inside."""
        sums = self._sums
        if sums is None:
            raise RuntimeError("batch() outside of calibrating(); expected it inside.")
        with sums.batch(*checked_unit(weight, loss_scale)):
            yield
        if sums.problem is not None and num_ranks == 1:
            raise sums.problem

    def _check_between(self) -> None:
        """Raise RuntimeError inside of a calibration."""
        if self._sums is not None:
            raise RuntimeError(
                "ranks have not added up what they saw yet: only after calibrating()"
            )
