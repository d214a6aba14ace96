"""Shard: one rank's part of one parameter, the value that a pruning call works on.

It has two views of the same elements, here of rows 2 and 3 of a [4, 3] parameter:

    the whole parameter        values, N-d        flat(values), 1-d: what selection counts
     0  1  2
     3  4  5
     6  7  8   coordinates      6  7  8           position   0  1  2  3  4  5
     9 10 11   (2..4, 0..3)     9 10 11           index      6  7  8  9 10 11

The flat view follows memory, so it needs no copy; ``index`` maps its positions to row-major indices
of the whole parameter, in which ties are ordered on every sharding. Of replicas, each rank counts a
part of the positions (``counted``).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from distprune.base.naming import Pair
from distprune.base.pruned_form import is_dtensor
from distprune.shards.geometry import IndexMap
from distprune.wrappers.managed import Managed
from distprune.wrappers.wrapper import Specs, laid_out_like

if TYPE_CHECKING:  # importing DTensor costs more than all the rest
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement

    from distprune.shards.factored import FactoredScores


@dataclass(eq=False, slots=True)
class Shard:
    """One rank's part of one parameter, as it is now; filled while it is read, then only read.

    What is flat is made with it: for other values or another mask, ``dataclasses.replace`` makes
    another one.

    Most parts are boxes: a range of indices in each dimension. FSDP1 gives a rank a *run* instead,
    elements that follow each other in the memory of the parameter: then ``values`` and ``mask``
    are 1-d. Of a box of a folded shape (geometry.[Note: folds]) ``coordinates`` and ``index``
    belong to the opened shape, and ``values`` are contiguous.

    Attributes:
        name: fully qualified when known; for messages and reports.
        parameter: the (sharded) parameter itself.
        values: this rank's part, detached; may be empty.
        mask: this rank's part of the mask in force, same shape; None if unpruned.
        shape: the global shape.
        index: from positions in a flat view to global row-major indices.
        is_run: whether the part is a run.
        replica: which copy of these elements this rank has ...
        num_replicas: ... and how many copies there are.
        ranks: global ranks that have the parameter together; None for a plain tensor.
        layout: how the parameter is spread over them, in words.
        mesh, placements: how a DTensor is laid out; None for any other tensor.
        key: the same for a tied parameter under all its names.
        managed: a wrapper's record of the parameter, if it has one.
        places: the (module, name) pairs of a call that mean this parameter; empty if this rank
            does not have it.
        is_tied: whether it has several places, which are removed together.
        is_named: whether ``name`` is a full name.
        scores: this rank's part of the importance scores, or factors of the whole; None without.
        about_scores: facts about the scores that must be equal on all ranks.
        numel: elements of the whole parameter.
        counted: flat positions that this rank counts: ranks of replicas count equal parts.
        flat_values, flat_mask: :meth:`flat` of the values, and of the mask if there is one.
    """

    name: str
    parameter: Tensor
    values: Tensor
    mask: Tensor | None
    shape: torch.Size
    index: IndexMap
    is_run: bool = False
    replica: int = 0
    num_replicas: int = 1
    ranks: tuple[int, ...] | None = None
    layout: str = "whole"
    mesh: DeviceMesh | None = None
    placements: tuple[Placement, ...] | None = None
    key: Hashable = None
    managed: Managed | None = None
    places: tuple[Pair, ...] = ()
    is_tied: bool = False
    is_named: bool = False
    scores: Tensor | FactoredScores | None = None
    about_scores: str = "none"
    numel: int = field(init=False)
    counted: range = field(init=False)
    flat_values: Tensor = field(init=False)
    flat_mask: Tensor | None = field(init=False)

    def __post_init__(self) -> None:
        is_row_major = self.index.start is not None
        flat = self.values.reshape(-1) if is_row_major else self.flat(self.values)
        self.flat_values, self.flat_mask = flat, None
        if self.mask is not None:
            self.flat_mask = self.flat(self.mask)
        self.counted, self.numel = range(flat.shape[0]), self.shape.numel()
        if self.num_replicas > 1:
            self.be_replica(self.replica, self.num_replicas)

    def be_replica(self, replica: int, num_replicas: int) -> None:
        """Be one of some copies of the same elements: ranks count equal parts of them."""
        size, self.replica, self.num_replicas = self.flat_values.shape[0], replica, num_replicas
        first, last = (size * (replica + i) // num_replicas for i in (0, 1))
        self.counted = range(first, last)

    @property
    def facts(self) -> str:
        """What must be the same on every rank that has the parameter."""
        kind = _kind(self.shape, self.values.dtype, self.layout)
        pruned = "unpruned" if self.mask is None else "pruned"
        return f"{kind}, {pruned}, importance scores: {self.about_scores}"

    @property
    def is_sharded(self) -> bool:
        """Whether the parameter is spread over several ranks, replicated axes included."""
        return self.ranks is not None

    @property
    def optimizer_tensor(self) -> tuple[Tensor, slice | None]:
        """The tensor registered with the optimizer; see :class:`managed.Managed`."""
        return (self.parameter, None) if self.managed is None else self.managed.optimizer_tensor

    @property
    def coordinates(self) -> tuple[range, ...]:
        """A range per dimension of the (opened) shape; of the whole parameter for a run."""
        by_dim = sorted(zip(self.index.dims, self.index.coordinates, strict=True))
        return tuple(rows for _, rows in by_dim)

    @property
    def position(self) -> Hashable:
        """Where the part is in the whole: equal on replicas, and different for different parts."""
        if self.is_run:
            return self.index.start, self.index.offset, self.values.numel()
        return tuple((rows.start, rows.stop) for rows in self.coordinates)

    @property
    def order(self) -> tuple[int, ...]:
        """Dimensions of ``values`` in the order of memory; flat views follow it."""
        has_own_dims = self.is_run or self.index.fold is not None
        return tuple(range(self.values.ndim)) if has_own_dims else self.index.dims

    def flat(self, local: Tensor) -> Tensor:
        """A tensor of the local shape as 1-d, in memory order; a view where it can be one."""
        is_row_major = self.index.start is not None
        return (local if is_row_major else local.permute(self.order)).reshape(-1)

    def slice_of(self, full: Tensor) -> Tensor:
        """This rank's part of a full tensor of the global shape: a view where it can be one."""
        if not self.is_run:
            return self.index.part_of(full, self.shape).reshape(self.values.shape)
        flat, start, size = full.reshape(-1), self.index.start, self.values.numel()
        if start is not None:
            return flat[start : start + size]
        return flat[self.index(torch.arange(size)).to(full.device)]

    def channels(self, local: Tensor, axis: int) -> tuple[Tensor, Tensor]:
        """A local tensor as rows that each belong to one channel, and the channels.

        Args:
            local: of the local shape.
            axis: the channels' dimension in the whole parameter.

        Returns:
            A view [rows, ...] and int64 [rows]; several rows may belong to one channel. Of a run,
            and of parts of groups of rows, every element is a row.
        """
        if self.is_run or self.index.fold is not None:
            indices = self.index(torch.arange(local.numel()))
            channels = indices // math.prod(self.shape[axis + 1 :]) % self.shape[axis]
            return local.view(-1, 1), channels
        own = self.coordinates[axis]
        return local.movedim(axis, 0), torch.arange(own.start, own.stop)

    def new_mask(self, dtype: torch.dtype) -> Tensor:
        """An uninitialised local mask, of which :meth:`flat` is a view.

        It is laid out in memory as the values are, if they have no gaps.
        """
        sizes = self.values.shape
        if self.index.start is not None:
            return self.values.new_empty(sizes, dtype=dtype)
        order = self.order
        in_order = self.values.new_empty([sizes[dim] for dim in order], dtype=dtype)
        return in_order.permute([order.index(dim) for dim in range(len(order))])

    def as_parameter_layout(self, local: Tensor, specs: Specs | None = None) -> Tensor:
        """A local tensor in the form of the parameter: a DTensor if the parameter is one.

        Args:
            specs: the same dictionary for many parameters saves time; see wrappers.wrapper.
        """
        if not is_dtensor(self.parameter):
            return local
        return laid_out_like(self.parameter, local, {} if specs is None else specs)

    def live_values(self) -> Tensor:
        """The values with pruned elements at zero, as they are now (N-d, a copy if pruned)."""
        if self.mask is None:
            return self.values
        # Scores of another dtype may have left a mask of that dtype.
        return self.values * self.mask.to(dtype=self.values.dtype)


@functools.lru_cache(maxsize=1 << 10)
def _kind(shape: torch.Size, dtype: torch.dtype, layout: str) -> str:
    """Many parameters of a model have one kind."""
    return f"shape {tuple(shape)}, dtype {dtype}, {layout}"
