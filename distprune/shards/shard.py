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

Whether replicas are equal is told by checksums of their bits.

[Note: folded words] A word times an odd weight shows every word that differs. But the highest bit
of a word times any odd weight is the same, so that two words could exchange their signs, or two
elements of a bool mask their values, without a trace. So the upper half of a word is first
added, without carry, to the lower one: then 33 random bits of a weight meet every bit of a word.

[Note: no differences cancel] A sum over ranks of their checksums does not show whether
replicas are equal: w + d and w - d cancel, and so do two shards that a replica has exchanged. So
the checksum of a shard is hashed together with the position of the shard in the parameter, and
the hashes are summed: the replicas of each shard add the same number, or the sum is wrong.
"""

from __future__ import annotations

import functools
import hashlib
import math
import struct
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from distprune.base import memory
from distprune.base.memory import hash_keys
from distprune.base.naming import Pair
from distprune.base.pruned_form import is_dtensor
from distprune.shards.geometry import IndexMap
from distprune.wrappers.managed import Managed
from distprune.wrappers.wrapper import Specs, laid_out_like

if TYPE_CHECKING:  # importing DTensor costs more than all the rest
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement


# 64-bit words in a block: they, their weights and the products stay in the second-level cache.
_WORDS = 1 << 14
# Blocks per operation of a device: 32 MiB.
_DEVICE_BLOCKS = 256


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
        is_held: whether a mask acts by zeros in what ranks store; see ``wrappers.held``.
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
    is_held: bool = False
    scores: Any = None  # Tensor | FactoredScores | None
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


def checksums(locals_: Sequence[Tensor]) -> list[int]:
    """An int64 per tensor, almost surely different for different tensors of a shape and dtype.

    The sum, modulo 2**64, of all 64-bit words, folded, times odd numbers that depend on their
    positions: a single word that differs always changes it. The strides and the device of a tensor
    make no difference. See [Note: folded words].

    Args:
        locals_: any shapes, dtypes and devices.

    Cost: one read, about as fast as memory; a copy of a tensor that is not contiguous. Waits for
    a device once.
    """
    found = memory.on_host([_sums(local.detach()) for local in locals_])
    totals = (sum(int(n) * _block_weight(i) for i, n in enumerate(of_one)) for of_one in found)
    return [(total + 2**63) % 2**64 - 2**63 for total in totals]


def at_position(position: Hashable, *parts: int) -> int:
    """Checksums of a rank's part of a parameter, hashed with the position of the part; an int64.

    See [Note: no differences cancel].

    Args:
        position: of the part; see :attr:`Shard.position`.
        parts: checksums, or other int64, that are equal on replicas of the shard.
    """
    data = repr(position).encode() + struct.pack(f"<{len(parts)}q", *parts)
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little", signed=True)


def replicas_agree(num_replicas: int, of_all: int, of_first: int) -> bool:
    """Whether the replicas of every shard are equal.

    Args:
        num_replicas: of each shard.
        of_all: the sum, modulo 2**64, of :func:`at_position` over all ranks.
        of_first: the same over the ranks of replica 0.
    """
    return (num_replicas * of_first - of_all) % 2**64 == 0


def _sums(local: Tensor) -> list[int] | Tensor:
    """The weighted sum of each block: on a CPU numbers, else int64 [blocks]."""
    flat = (torch.view_as_real(local) if local.is_complex() else local).contiguous().view(-1)
    if memory.takes_numpy(flat.device):
        factors, numbers = _weights().numpy().view(np.uint64), []
        for words in _words(flat, _WORDS):
            word = words.numpy().view(np.uint64)
            folded = word >> np.uint64(32)
            folded ^= word
            folded *= factors[: folded.size]
            numbers.append(int(np.add.reduce(folded.view(np.int64))))
        return numbers
    weights, sums = _weights().to(flat.device), []
    for words in _words(flat, _WORDS * _DEVICE_BLOCKS):
        on_device = words ^ ((words >> 32) & 0xFFFFFFFF)
        padded = nn.functional.pad(on_device, (0, -on_device.numel() % _WORDS))
        sums.append((padded.view(-1, _WORDS) * weights).sum(1))
    return torch.cat(sums) if sums else weights[:0]


def _words(flat: Tensor, size: int) -> Iterator[Tensor]:
    """A contiguous tensor as int64 [<= size]; its end is filled up with zeros."""
    step = size * 8 // flat.itemsize
    for start in range(0, flat.numel(), step):
        raw = flat[start : start + step].view(torch.uint8)
        if raw.numel() % 8 or raw.data_ptr() % 8:
            filled = raw.new_zeros(-(-raw.numel() // 8) * 8)
            filled[: raw.numel()].copy_(raw)
            raw = filled
        yield raw.view(torch.int64)


@functools.cache
def _weights() -> Tensor:
    """Odd int64 [_WORDS] that look random."""
    return hash_keys(torch.arange(_WORDS), seed=1) | 1


@functools.lru_cache(maxsize=1 << 12)
def _block_weight(block: int) -> int:
    return int(hash_keys(torch.tensor([block]), seed=2)) | 1
