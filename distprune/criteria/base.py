"""Criterion: what every accumulator of scores has in common.

A criterion reads this rank's part of each parameter and of its gradient, and keeps what it sums up
in accumulators of the same layout. So what it costs in memory is sharded as the model is.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from distprune._common.process_groups import world
from distprune.call.importance_scores import SignedScores
from distprune.criteria import tracking
from distprune.criteria.tracking import tracked_parameters
from distprune.methods.base import BasePruningMethod
from distprune.methods.builtin import L1Unstructured
from distprune.shards.gradients import available_gradient, drop_gradient, local_gradient
from distprune.shards.reader import ShardReader
from distprune.shards.shard import LocalShard

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Unit = Literal["global_batch", "rank_batch"]
_UNITS = ("global_batch", "rank_batch")


class Criterion(ABC):
    """Base of all criteria: accumulates scores of single elements, one unit after the other.

    A *unit* is what one gradient is of. ``"global_batch"``: the averaged gradient that a step of
    the optimizer sees. ``"rank_batch"``: the gradient of one rank's own batch, before it is
    averaged.

    Subclasses name their accumulators in ``ACCUMULATORS`` and define :meth:`_accumulate` and
    :meth:`_score`.

    Args:
        parameters: (module, name) pairs, as ``select`` lists them; a tied parameter counts once.
            Wrap the model first.
        group: the ranks that take part; every rank by default.

    Attributes:
        pruning_method: the class that prunes by these scores: ``L1Unstructured``, or
            ``LowestScore`` where they are signed.
        num_updates: units so far.
        total_weight: the sum of their weights.

    Raises:
        TypeError: no (module, name) pairs.
        ValueError: no parameters, or a frozen one.
        NotImplementedError: a complex parameter; a layout or wrapper that is not supported.
    """

    pruning_method: ClassVar[type[BasePruningMethod]] = L1Unstructured
    ACCUMULATORS: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        parameters: Iterable[tuple[nn.Module, str]],
        *,
        group: ProcessGroup | None = None,
    ) -> None:
        self._group = group
        self._is_calibrating = False
        self._tracked = tracked_parameters(parameters)
        self._accumulators: dict[str, list[Tensor]] = {}
        self.reset()

    @property
    def parameters(self) -> list[tuple[nn.Module, str]]:
        """The (module, name) pairs that have scores, each parameter once."""
        return [parameter.pair for parameter in self._tracked]

    def update(self, weight: float = 1.0) -> None:
        """Add one unit: call it after its backward, before zero_grad and the optimizer's step.

        Local: it communicates nothing, and an error is raised on the rank where it occurs.

        Args:
            weight: of the unit, >= 0: its gradient counts ``weight`` times.

        Raises:
            ValueError: a weight that is no finite number >= 0; a parameter that was frozen.
            RuntimeError: a parameter without a gradient, or with one that is not reduced yet.
                Nothing has changed then.

        If it is interrupted while it adds, ``scores()`` raises until :meth:`reset`.
        """
        weight = checked_weight(weight)
        self._check_complete()
        with torch.inference_mode(False), torch.no_grad():
            reader = ShardReader()
            shards = self._read(reader)
            units = self._prepared(shards, self._gradients(reader, shards), weight)
            self._is_incomplete = True
            for position, (shard, unit) in enumerate(zip(shards, units, strict=True)):
                self._accumulate(position, shard, unit, weight)
        self.num_updates += 1
        self.total_weight += weight
        self._is_incomplete = False

    @contextmanager
    def calibrating(self) -> Iterator[None]:
        """Collect units of a calibration: inside, each :meth:`batch` drops its gradients.

        So a loop needs no ``zero_grad``, and no batch counts twice. Collective over ``group`` when
        it begins. Gradients of parameters that the criterion does not score stay; FSDP1 drops
        those of a whole flat parameter. ::

            with criterion.calibrating():
                for batch in loader:
                    with criterion.batch():
                        loss(model, batch).backward()

        Raises:
            RuntimeError: a parameter has a gradient already, or this is inside of itself; on every
                rank.
            Exception: of the code inside. The other ranks raise it in their next call of this
                library, for which the rank that failed waits.

        Cost: one all-reduce of 40 bytes.
        """
        communicator = world(self._group)
        communicator.run(self._check_before_calibrating)
        self._is_calibrating = True
        try:
            with communicator.raising_everywhere():
                yield
        finally:
            self._is_calibrating = False

    @contextmanager
    def batch(self, weight: float = 1.0) -> Iterator[None]:
        """One unit: the backward passes inside, then :meth:`update`; nothing after an error.

        Outside of :meth:`calibrating` the gradients stay, for the optimizer's step.
        """
        try:
            yield
            self.update(weight)
        finally:
            if self._is_calibrating:
                reader = ShardReader()
                for parameter, shard in zip(self._tracked, self._read(reader), strict=True):
                    drop_gradient(shard, reader.managed(parameter.module, parameter.name))

    def scores(self) -> dict[tuple[nn.Module, str], Tensor]:
        """The scores as ``importance_scores`` takes them, fp32, laid out like the parameters.

        Collective over ``group``.

        Returns:
            By (module, name): a DTensor like the parameter; under FSDP1 this rank's run of it,
            1-d; else a plain tensor. New tensors.

        Raises:
            ValueError: no unit yet; ranks with different numbers of units; a score that is not
                finite. On every rank.
            RuntimeError: an error ended what added units up, on any rank; on every rank.

        Cost: 4 bytes of memory per element of this rank's shards; one all-reduce of 40 bytes.
        """
        with torch.inference_mode(False), torch.no_grad():
            return world(self._group).run(
                self._checked_scores,
                lambda _: [
                    ("criterion", type(self).__name__),
                    ("number of updates", str(self.num_updates)),
                    ("weight of all updates", repr(self.total_weight)),
                ],
            )

    def reset(self) -> None:
        """Forget all units."""
        self._accumulators = {}
        self.num_updates = 0
        self.total_weight = 0.0
        self._is_incomplete = False  # a part of a unit, or of a calibration, was added

    def state_dict(self) -> dict[str, Any]:
        """What was accumulated, for torch.distributed.checkpoint (DCP) or ``torch.save``.

        Collective over ``group``. Tensors are references, sharded as the parameters are: DTensors,
        ShardedTensors under FSDP1, else plain ones. DCP saves them and, in place, loads them on
        any other sharding; :meth:`load_state_dict` takes what it loaded.

        Raises:
            NotImplementedError: a shard that DCP of this torch would misplace (``check_writable``),
                or under FSDP1 a parameter that is not row-major in memory; by name, on every rank.
            RuntimeError: as :meth:`scores`.

        Cost: memory for accumulators if there was no unit yet; one all-reduce of 40 bytes.
        """
        with torch.inference_mode(False), torch.no_grad():
            tensors = world(self._group).run(self._tensors_to_save)
        return {
            "criterion": type(self).__name__,
            **self._plain_state(),
            "accumulators": tensors,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state that :meth:`state_dict` returned. Collective over ``group``.

        Raises:
            ValueError: a state of another criterion, of other parameters, or of another layout; on
                every rank, and nothing has changed then.

        Cost: no memory but that of the accumulators; one all-reduce of 40 bytes.
        """
        with torch.inference_mode(False), torch.no_grad():
            world(self._group).run(lambda: self._check_state(state))
            reader = ShardReader()
            for name in self.ACCUMULATORS:
                for position, (parameter, shard) in enumerate(
                    zip(self._tracked, self._read(reader), strict=True)
                ):
                    tracking.load(
                        parameter,
                        reader,
                        shard,
                        state["accumulators"][name][parameter.key],
                        self._accumulator(name, position, shard),
                    )
        self._load_plain_state(state)
        self._is_incomplete = False

    def _plain_state(self) -> dict[str, Any]:
        """What is saved besides the accumulators: plain values; subclasses add theirs."""
        return {"num_updates": self.num_updates, "total_weight": self.total_weight}

    def _load_plain_state(self, state: Mapping[str, Any]) -> None:
        """Take up what :meth:`_plain_state` saved."""
        self.num_updates = int(state["num_updates"])
        self.total_weight = float(state["total_weight"])

    def _tensors_to_save(self) -> dict[str, dict[str, Any]]:
        self._check_complete()
        reader = ShardReader()
        shards = self._read(reader)
        return {
            name: {
                parameter.key: tracking.to_save(
                    parameter, reader, shard, self._accumulator(name, position, shard)
                )
                for position, (parameter, shard) in enumerate(
                    zip(self._tracked, shards, strict=True)
                )
            }
            for name in self.ACCUMULATORS
        }

    def _check_state(self, state: Mapping[str, Any]) -> None:
        tracking.check_names(state, type(self).__name__, self.ACCUMULATORS, self._tracked)
        reader = ShardReader()
        for name in self.ACCUMULATORS:
            for parameter, shard in zip(self._tracked, self._read(reader), strict=True):
                tracking.check(parameter, reader, shard, state["accumulators"][name][parameter.key])

    def _prepared(
        self, shards: list[LocalShard], gradients: list[Tensor], weight: float
    ) -> list[Tensor]:
        """What :meth:`_accumulate` adds of each parameter, before anything has changed.

        What may fail belongs here. By default the gradients, once all accumulators are there.
        """
        for name in self.ACCUMULATORS:
            for position, shard in enumerate(shards):
                self._accumulator(name, position, shard)
        return gradients

    @abstractmethod
    def _accumulate(
        self, position: int, shard: LocalShard, gradient: Tensor, weight: float
    ) -> None:
        """Add a unit of one parameter, in place.

        Args:
            position: of the parameter, for :meth:`_accumulator`.
            shard: this rank's part of it.
            gradient: of the shape of ``shard.values``, of any dtype; not to be changed. Or what
                :meth:`_prepared` made of it.
            weight: of the unit.
        """

    @abstractmethod
    def _score(self, position: int, shard: LocalShard) -> Tensor:
        """The scores of this rank's part of a parameter: a new fp32 tensor like its values."""

    def _accumulator(self, name: str, position: int, shard: LocalShard) -> Tensor:
        """An accumulator of a parameter: fp32, like ``shard.values``, zeros at first."""
        tensors = self._accumulators.setdefault(name, [])
        for other in range(len(tensors), len(self._tracked)):
            parameter = self._tracked[other]
            values = (shard if other == position else parameter.read(ShardReader())).values
            tensors.append(torch.zeros_like(values, dtype=torch.float32))
        tensor = tensors[position]
        if tensor.shape != shard.values.shape:
            raise RuntimeError(
                f"{shard.name}: this rank's part has shape {tuple(shard.values.shape)}, and had "
                f"{tuple(tensor.shape)} before; expected a model that is wrapped before the "
                "criterion is made, and not again."
            )
        return tensor

    def _read(self, reader: ShardReader) -> list[LocalShard]:
        """This rank's part of every parameter, as it is now."""
        return [parameter.read(reader) for parameter in self._tracked]

    def _gradients(self, reader: ShardReader, shards: list[LocalShard]) -> list[Tensor]:
        """This rank's part of every gradient; all are checked before any is used."""
        self._check_all_trainable(reader, shards)
        return [
            local_gradient(shard, reader.managed(parameter.module, parameter.name))
            for parameter, shard in zip(self._tracked, shards, strict=True)
        ]

    def _check_all_trainable(self, reader: ShardReader, shards: list[LocalShard]) -> None:
        for parameter, shard in zip(self._tracked, shards, strict=True):
            parameter.check_trainable(reader, shard)

    def _check_before_calibrating(self) -> None:
        if self._is_calibrating:
            raise RuntimeError("calibrating() inside of calibrating(); expected one at a time.")
        reader = ShardReader()
        for parameter, shard in zip(self._tracked, self._read(reader), strict=True):
            managed = reader.managed(parameter.module, parameter.name)
            gradient = available_gradient(shard, managed)
            if gradient is not None and gradient is not shard.values:
                raise RuntimeError(
                    f"{shard.name} has a gradient already, which would count with the first "
                    "batch; expected none. Call model.zero_grad() before calibrating()."
                )

    def _check_complete(self) -> None:
        """Refuse accumulators that have a part of a unit, or not all units of a calibration."""
        if self._is_incomplete:
            raise RuntimeError(
                f"a calibration or an update of this {type(self).__name__} ended with an error "
                "after a part of it had been added up; expected reset(), and all units again."
            )

    def _checked_scores(self) -> dict[tuple[nn.Module, str], Tensor]:
        self._check_complete()
        if not self.num_updates:
            raise ValueError(
                f"{type(self).__name__} has seen no unit; expected at least one update() before "
                "scores()."
            )
        is_signed = not self.pruning_method.IGNORES_SIGN
        scores: dict[tuple[nn.Module, str], Tensor] = SignedScores[Tensor]() if is_signed else {}
        shards = self._read(ShardReader())
        for position, (parameter, shard) in enumerate(zip(self._tracked, shards, strict=True)):
            score = self._score(position, shard)
            if not is_finite(score):
                raise ValueError(
                    f"{shard.name} has a score that is not finite, after {self.num_updates} "
                    "updates; expected finite gradients. With a gradient scaler, leave out the "
                    "steps that it skips, as non_finite='skip' does."
                )
            scores[parameter.pair] = shard.as_parameter_layout(score)
        return scores


def is_finite(tensor: Tensor) -> bool:
    """Whether no element is infinite or NaN. One read, without temporaries."""
    if not tensor.numel():
        return True
    lowest, highest = tensor.aminmax()  # NaN if an element is
    return bool(lowest.isfinite() & highest.isfinite())


def checked_unit(unit: str, allowed: Iterable[str] = _UNITS) -> Unit:
    """A value of the argument ``unit``.

    Raises:
        ValueError: none of those that are allowed.
    """
    if unit not in allowed:
        raise ValueError(f"unit={unit!r}; expected {' or '.join(map(repr, allowed))}.")
    return "global_batch" if unit == "global_batch" else "rank_batch"


def checked_weight(weight: float) -> float:
    """The weight of a unit as a float.

    Raises:
        ValueError: no finite number >= 0.
    """
    value = float(weight)
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"weight={weight!r}; expected a finite number >= 0.")
    return value
