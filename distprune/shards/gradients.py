"""This rank's gradients of its parts of parameters: what ``.grad`` has, and single batches.

What is not linear in the gradient has to see the gradient of each rank before it is averaged:
``E[g^2] = E[g]^2 + Var(g)``. Hooks on the leaves of autograd see it on every wrapper; see
wrappers/managed.py.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from distprune.base.pruned_form import is_dtensor
from distprune.ranks.collectives import Communicator
from distprune.ranks.process_groups import is_distributed, over_groups, world
from distprune.shards.shard import Shard
from distprune.wrappers import deepspeed
from distprune.wrappers.managed import GradientSource, StoredRun

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Power = Literal[1, 2]


def check_trainable(shard: Shard) -> None:
    """Raise ValueError if a parameter is frozen: a backward gives it no gradient."""
    if not shard.optimizer_tensor[0].requires_grad:
        raise ValueError(f"{shard.name} is frozen; expected parameters that are trained.")


def local_gradient(shard: Shard) -> Tensor:
    """This rank's part of ``.grad``, laid out like ``shard.values``; not a copy.

    Raises:
        RuntimeError: there is no gradient, or it is not complete yet; names the parameter.
        NotImplementedError: a gradient of another layout than the parameter's.
    """
    if shard.managed is not None and shard.managed.has_unreduced_gradient:
        raise RuntimeError(
            f"{shard.name}: a backward without gradient synchronisation (no_sync, say) left what "
            "is not reduced yet; expected a call after the last backward of a step."
        )
    gradient = available_gradient(shard)
    if gradient is None:
        raise RuntimeError(
            f"{shard.name} has no gradient; expected a call after a backward that depends on it."
        )
    return gradient


def available_gradient(shard: Shard) -> Tensor | None:
    """This rank's part of what ``.grad`` has, laid out like ``shard.values``, or None.

    Raises:
        NotImplementedError: a gradient of another layout than the parameter's; ZeRO-1 and -2.
    """
    if not shard.values.numel():
        return shard.values
    if shard.managed is None and deepspeed.has_master(shard.parameter):
        raise NotImplementedError(
            f"{shard.name}: ZeRO-1 and ZeRO-2 leave each averaged gradient on the rank that steps "
            'it; expected a criterion of single batches (unit="rank_batch"), or ZeRO-3.'
        )
    gradient = shard.parameter.grad if shard.managed is None else shard.managed.gradient
    if gradient is None:
        return None
    if is_dtensor(gradient):
        if gradient.placements != shard.placements or gradient.device_mesh != shard.mesh:
            raise NotImplementedError(
                f"{shard.name}: its gradient has placements {gradient.placements}, and the "
                f"parameter {shard.placements}; expected the same. Redistribute .grad first."
            )
        with torch.no_grad():
            gradient = gradient.to_local()
    if gradient.layout is not torch.strided:
        raise NotImplementedError(
            f"{shard.name}: its gradient has layout {gradient.layout}; expected a dense one "
            "(an embedding with sparse=False)."
        )
    return gradient.detach()


def drop_gradient(shard: Shard) -> None:
    """Set ``.grad`` to None; of a parameter of FSDP1 those of its whole flat parameter."""
    if shard.managed is None:
        shard.parameter.grad = None
    else:
        shard.managed.drop_gradient()


class LocalGradients(NamedTuple):
    """A leaf of autograd, and the parameters whose gradients come with its own.

    Attributes:
        source: the leaf.
        runs: by position of a parameter, where this rank's part of it is in this rank's piece
            of the leaf, 1-d. Without a ``shard_group`` there is one, and the leaf is the part.
    """

    source: GradientSource
    runs: dict[int, slice]

    @property
    def data_groups(self) -> tuple[ProcessGroup, ...]:
        """The ranks that run other batches on the same parameters: groups like axes of a grid."""
        shards = self.source.shard_group
        return ((shards,) if shards is not None else ()) + self.source.replica_groups


def unaveraged_gradients(
    shards: Sequence[Shard], group: ProcessGroup | None = None
) -> list[LocalGradients]:
    """The leaves through which the gradients of some parameters come.

    Args:
        shards: this rank's part of each parameter.
        group: the data-parallel ranks of parameters that FSDP does not shard; for plain ones every
            rank by default.

    Raises:
        ValueError: a parameter under tensor parallelism on some of the ranks, and no group; a
            group with ranks of its tensor parallelism.
    """
    leaves: dict[Hashable, LocalGradients] = {}
    for position, shard in enumerate(shards):
        record, key, offset = shard.managed, shard.key, 0
        if isinstance(record, StoredRun):
            key, (offset, _) = record.leaf_key, record.span
        if key not in leaves:
            if record is None:
                replicas = _replicas_of(shard, group)
                source = GradientSource(shard.parameter, None, replicas)
            else:
                source = record.gradient_source()
            leaves[key] = LocalGradients(source, {})
        leaves[key].runs[position] = slice(offset, offset + shard.values.numel())
    return list(leaves.values())


def ranks_with_shards(shards: Iterable[Shard], group: ProcessGroup | None) -> Communicator:
    """All ranks of a group, every rank by default, and those that shard parameters with them."""
    if group is None:
        return world()
    groups, known = [group], set(dist.get_process_group_ranks(group))
    for shard in shards:
        for of_axis in () if shard.mesh is None else shard.mesh.get_all_groups():
            if not known.issuperset(dist.get_process_group_ranks(of_axis)):
                groups.append(of_axis)
                known = set(over_groups(groups).ranks)
    return over_groups(groups)


def _replicas_of(shard: Shard, group: ProcessGroup | None) -> tuple[ProcessGroup, ...]:
    """The data-parallel ranks of a parameter that no FSDP manages."""
    if not is_distributed():
        return ()
    every = group if group is not None else dist.group.WORLD
    assert every is not None  # is_distributed
    if shard.ranks is None:
        return (every,)
    mesh, ranks = set(shard.ranks), set(dist.get_process_group_ranks(every))
    if ranks <= mesh and (ranks == mesh or group is None):
        return ()
    if group is None or ranks & mesh != {dist.get_rank()}:
        raise ValueError(
            f"{shard.name} is sharded over {len(mesh)} of {len(ranks)} ranks; expected group=, the "
            "data-parallel ranks: those that have this rank's part, and other batches, or the "
            "ranks of the mesh if there are no others."
        )
    return (every,)


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
        self._gradients, self._labels, self._power = tuple(leaves), labels, power
        self._factor: float | None = None  # of the present batch
        self._num_gradients = [0] * len(leaves)  # in it
        self.num_batches, self.weight = 0, 0.0
        self.problem: RuntimeError | None = None

    @abstractmethod
    def _add(self, number: int, gradient: Tensor, factor: float) -> None:
        """Add the gradient of a leaf, which belongs to autograd; 0: one that does not count."""

    def attach(self) -> None:
        """Put the hooks on; after an error :meth:`detach` takes off those that are on."""
        for number, leaf in enumerate(self._gradients):
            leaf.source.attach(functools.partial(self._receive, number))

    def detach(self) -> None:
        """Take the hooks off."""
        for leaf in self._gradients:
            leaf.source.detach()

    @contextmanager
    def batch(self, weight: float, loss_scale: float) -> Iterator[None]:
        """One backward inside; ``|gradient| ** power`` counts ``weight`` times, unscaled."""
        if self._factor is not None:
            raise RuntimeError("batch() inside of batch(); expected one after the other.")
        self._num_gradients = [0] * len(self._gradients)
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
        count, factor = self._num_gradients[number], 0.0
        name = self._labels[next(iter(self._gradients[number].runs))]
        if self._factor is None:
            self._note(
                f"{name} got a gradient outside of batch(); expected every backward inside of one"
            )
        elif count > 1:
            self._note(
                f"{name} got {count} gradients in one batch; expected one backward in each "
                "batch(), and checkpointing with use_reentrant=False"
            )
        else:
            factor = self._factor
        self._add(number, gradient, factor)

    def _note(self, problem: str) -> None:
        if self.problem is None:
            self.problem = RuntimeError(f"{problem}.")


class CollectsRankBatches:
    """What collects batches of single ranks: hooks are on while a calibration is open."""

    _sums: Any = None  # RankBatches; None outside of a calibration

    @contextmanager
    def _calibrating(
        self,
        communicator: Communicator,
        attach: Callable[[], None],
        finish: Callable[[], None],
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
