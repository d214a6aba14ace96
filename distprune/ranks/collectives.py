"""All communication of the library: sums, minima and maxima of a few integers, and sums of floats.

A :class:`Communicator` is the set of ranks that take part in one call: those of a process group, of
a device mesh, or one process. What decides a mask goes through all-reduces of int64 tensors, so it
runs on any backend, and the order in which ranks are added can not change a result. Sums of floats
are for statistics: :meth:`Communicator.reduce_floats` of a few numbers, in float64;
:meth:`Communicator.sum_floats`, :meth:`Communicator.scatter_sum` and :func:`sum_of_pieces` of
tensors as large as parameters.

[Note: all or none] A rank that raises while the others wait in a collective would hang them, and
its next call would meet their present one. So all work that may fail on one rank alone is a *local
step* of the collective that follows it: :meth:`Communicator.local_step` is its context, and sends a
word that says whether it failed along with its result. The size of the message is known before the
step runs, so that a rank whose step failed still takes part. Then every rank raises, or none does.
Between a collective and the next local step there is only code that does the same on every rank:
it works on values that all ranks share, and if it raises, it raises everywhere.

[Note: code of the caller] A context or a function that runs code of the caller between two
collectives (a loader, a backward) can make no local step of it, because that code may communicate.
It runs inside :meth:`Communicator.raising_everywhere`: a rank on which the code raises takes part
in the next collective of the others, with its error. All entry points of the library begin with the
same collective, :meth:`Communicator.agree` (:meth:`Communicator.run` is one), so that it does not
matter which one comes next; one that begins with a :meth:`Communicator.reduce` could not be joined.
Each context notes the errors that all ranks have raised since it began: such an error passes
through it without being told again.

[Note: the last reference to a group] A thread of gloo that lives when Python ends may abort the
process, and threads end with the last reference to their group. The destructor of a group waits for
its threads, and a thread that frees the tensors of a collective needs Python's lock. Python's own
reference to a group gives the lock back before it runs the destructor; other references, such as
that of DDP's reducer, do not, and the rank would hang (pytorch/pytorch#56297). So
:func:`end_groups` keeps references of its own, and drops them last. DTensor's caches would keep
meshes, and return them to another group.

[Note: one call at a time] Two threads that talk over one process group at a time would mix their
messages, and gloo ends the process then: :meth:`Communicator.exclusively` refuses the second call.
"""

from __future__ import annotations

import builtins
import contextlib
import gc
import hashlib
import importlib
import logging
import operator
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement

T = TypeVar("T")

_logger = logging.getLogger(__name__)

Op = Literal["sum", "max", "min"]
Step = Callable[[], Tensor]  # local work that may fail
# Process groups (by id) that a call of this process is using, and the thread of that call.
_in_use: dict[int, int] = {}
_lock = threading.Lock()
# Errors, and the ranks that raise them.
_Told = list[tuple[BaseException, frozenset[int]]]
# Of each thread, what its contexts have noted: see [Note: code of the caller].
_threads = threading.local()
# Raised under their own type on every rank; any other becomes a RuntimeError.
_SHARED_ERRORS = {
    "AssertionError", "AttributeError", "IndexError", "KeyError", "MemoryError",
    "NotImplementedError", "RuntimeError", "TypeError", "ValueError",
}  # fmt: skip
_MOST_CHARACTERS = 2048  # of an error or a fact that ranks tell each other


class Communicator:
    """The ranks of one call; counts what it sends.

    Args:
        groups: process groups to reduce over, one after the other: one group,
            or one per axis of a mesh. Empty for a single process.
        ranks: global ranks of all that take part; the first one leads.
        rank: this rank, one of them.
        device: where the backend wants the integers.

    Attributes:
        index: this rank's place among ``ranks``.
        size: how many ranks take part.
        num_collectives: the collectives so far.
        bytes_sent: the payload of those, per rank.
    """

    def __init__(
        self,
        groups: Sequence[dist.ProcessGroup],
        ranks: Sequence[int] = (0,),
        rank: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        self._groups = tuple(groups)
        self.ranks = tuple(ranks)
        self.rank = rank
        self.index = self.ranks.index(rank)
        self.size = len(self.ranks)
        self._device = torch.device(device)
        self.num_collectives = 0
        self.bytes_sent = 0

    def reduce(
        self, size: int, step: Step, op: Op = "sum", dtype: torch.dtype = torch.int64
    ) -> Tensor:
        """Run a local step on every rank and reduce what it returns; see [Note: all or none].

        Args:
            size: number of elements of the result; a value that all ranks share.
            step: local work that may fail; returns [size] of the dtype.
            op: "sum" (modulo 2**64), "max" or "min", elementwise.
            dtype: int64, or float64 for :meth:`reduce_floats`.

        Raises:
            BaseException: what the step raised on this rank, if it failed on all; otherwise what it
                raised on the first rank where it failed, on every rank.

        Cost: one all-reduce of ``size`` + 1 words.
        """
        if self.size == 1:
            return step()
        with self.local_step(size, op, dtype) as shared:
            values = step()
            if values.shape != (size,) or values.is_floating_point() != dtype.is_floating_point:
                text = f"a step returned {values.dtype} {tuple(values.shape)}, not ({size},)."
                raise AssertionError(text)
            shared.copy_(values)
        return shared

    @contextlib.contextmanager
    def local_step(
        self, size: int, op: Op = "sum", dtype: torch.dtype = torch.int64
    ) -> Iterator[Tensor]:
        """Run a block as the local step of :meth:`reduce`, whose result is reduced at its end.

        Args:
            size, op, dtype: as for :meth:`reduce`.

        Yields:
            Zeros [size], into which the block copies the values of this rank. After it they are
            those of all ranks.

        Raises:
            BaseException: as :meth:`reduce`.
        """
        shared = torch.zeros(size + 1, dtype=dtype)
        error: BaseException | None = None
        try:
            yield shared[:size]
        except BaseException as caught:
            if self.size == 1:
                raise
            error = caught
            shared[size] = -1 if op == "min" else 1
        shared.copy_(self._reduce(shared, op))
        if shared[size] != 0:
            self._raise_everywhere(error)

    def reduce_floats(self, size: int, step: Step) -> Tensor:
        """The sums in float64 of what a local step returns on every rank; see :meth:`reduce`.

        They are bit-equal on all ranks. Sums of integers are exact while they are below 2**53;
        others are rounded, in an order that depends on the ranks.
        """
        return self.reduce(size, step, "sum", torch.float64)

    def leader_of(self, size: int, step: Step) -> Tensor:
        """What a local step returns on the leader; see :meth:`reduce`. All ranks run it."""
        with self.local_step(size) as shared:
            values = step()
            if self.index == 0:
                shared.copy_(values)
        return shared

    def run(
        self,
        step: Callable[[], T],
        facts_of: Callable[[T], Sequence[tuple[str, str]]] | None = None,
    ) -> T:
        """Run a local step whose result stays on this rank; see :meth:`reduce`.

        Args:
            step: local work that may fail.
            facts_of: from its result to (label, text) pairs that must be equal on all ranks.

        Raises:
            BaseException: as :meth:`reduce`, and as :meth:`agree`.

        Cost: one all-reduce of 40 bytes when all is well.
        """
        facts: Sequence[tuple[str, str]] = ()
        error: BaseException | None = None
        try:
            result = step()
            if facts_of is not None and self.size > 1:
                facts = facts_of(result)
        except BaseException as caught:
            error = caught
        self.agree(facts, error)
        return result

    @contextlib.contextmanager
    def raising_everywhere(self) -> Iterator[None]:
        """Run code of the caller that may raise on one rank; see [Note: code of the caller].

        Local if nothing is raised. What follows on the other ranks has to begin with :meth:`agree`
        or :meth:`run`; until they come to it, this rank waits. Interrupts and exits wait for
        nobody.

        Raises:
            Exception: what the code raised on this rank, as it is. The other ranks raise it in
                their next collective.

        Cost: nothing if all is well.
        """
        told: _Told = []
        contexts = _contexts_of_thread()
        contexts.append(told)
        try:
            yield
        except Exception as error:
            is_told = any(each is error and ranks.issuperset(self.ranks) for each, ranks in told)
            if self.size > 1 and not is_told:
                _logger.warning(_WAITS, self.rank, type(error).__name__, exc_info=error)
                # That of another rank, that of this one, or the group is lost: this rank's counts.
                with contextlib.suppress(Exception), self.exclusively():
                    try:
                        self.agree(error=error)
                    finally:
                        self._note_told(error)
            raise
        finally:
            contexts[:] = [each for each in contexts if each is not told]
            told.clear()

    def sum(self, values: Tensor) -> Tensor:
        """Sum an int64 tensor over all ranks (modulo 2**64).

        For values that exist already: what may fail belongs in :meth:`reduce`.
        """
        return self._reduce(values, "sum")

    def max(self, values: Tensor) -> Tensor:
        """Elementwise maximum of an int64 tensor over all ranks."""
        return self._reduce(values, "max")

    def sum_floats(self, values: Tensor) -> None:
        """Sum a float tensor over all ranks, in place; every rank gets the same bits.

        Cost: one all-reduce of the tensor per process group; no copy, unless the backend takes no
        tensor of its device.
        """
        if self.size == 1:
            return
        reduced = values.to(self._device_for(values))
        for group in self._groups:
            dist.all_reduce(reduced, group=group)
            self._count(reduced)
        if reduced is not values:
            values.copy_(reduced)

    def scatter_sum(self, pieces: Tensor) -> Tensor:
        """Sum a float tensor [size, n] over the ranks of one group; each rank gets its own row.

        Cost: one reduce-scatter of the tensor; no copy, unless the backend takes no tensor of its
        device.
        """
        if self.size == 1:
            return pieces[0]
        (group,) = self._groups
        self._count(pieces)
        return sum_of_pieces(pieces.to(self._device_for(pieces)), group).to(pieces.device)

    def gather(self, piece: Tensor) -> Tensor:
        """The tensors [n] of all ranks of one group, as [size, n]; n is equal on all of them.

        Cost: one all-gather.
        """
        if self.size == 1:
            return piece.unsqueeze(0)
        (group,) = self._groups
        self._count(piece)
        own = piece.to(self._device_for(piece)).contiguous()
        every = own.new_empty(self.size * own.numel())
        _all_gather(every, own, group=group)
        return every.view(self.size, -1).to(piece.device)

    def distinct_texts(self, text: str) -> tuple[list[str], list[int]]:
        """The different texts among those of all ranks, and the text of every rank.

        Args:
            text: this rank's, of any length.

        Returns:
            The texts, in the order of the first ranks that have them; and per rank, in
            the order of ``ranks``, a position in that list.

        Cost: two all-reduces: 16 bytes per rank, and all different texts once.
        """
        raw = _encoded(text)
        table = torch.zeros(2, self.size, dtype=torch.int64)
        table[:, self.index] = torch.tensor([_digest(text), len(raw)])
        digests, lengths = self.sum(table).tolist()
        kinds = list(dict.fromkeys(digests))
        firsts = [digests.index(digest) for digest in kinds]
        # Eight bytes to an integer; every text begins at an integer of its own.
        sizes = [-(-lengths[first] // 8) for first in firsts]
        parts = list(torch.split(torch.zeros(sum(sizes), dtype=torch.int64), sizes))
        if raw and self.index in firsts:
            padded = bytearray(raw.ljust(-(-len(raw) // 8) * 8, b"\0"))
            parts[firsts.index(self.index)] = torch.frombuffer(padded, dtype=torch.int64)
        joined = torch.split(self.sum(torch.cat(parts)), sizes)
        texts = [
            part.numpy().tobytes()[: lengths[first]].decode()
            for part, first in zip(joined, firsts, strict=True)
        ]
        return texts, [kinds.index(digest) for digest in digests]

    def agree(
        self, facts: Sequence[tuple[str, str]] = (), error: BaseException | None = None
    ) -> None:
        """Raise on every rank if any rank failed, or if the ranks differ in a fact.

        Args:
            facts: (label, text) pairs that must be equal on all ranks.
            error: what went wrong on this rank, if anything did.

        Raises:
            BaseException: ``error`` itself when every rank failed; otherwise, on
                every rank, the first failing rank's error. An interrupted rank raises
                KeyboardInterrupt, the others a RuntimeError.
            ValueError: the ranks differ in a fact; names it and shows two values.

        Cost: one all-reduce of 40 bytes when all is well.
        """
        if self.size == 1:
            if error is not None:
                raise error
            return
        digest = _digest("\n".join(f"{label}={text}" for label, text in facts))
        mine = [int(error is not None), len(facts), -len(facts), digest, -digest]
        shared = self.max(torch.tensor(mine)).tolist()
        if shared[0]:
            self._raise_everywhere(error)
        if shared[1] != -shared[2] or shared[3] != -shared[4]:
            self._raise_difference(facts, num_common=-shared[2])

    @contextlib.contextmanager
    def exclusively(self) -> Iterator[None]:
        """Keep other calls off these process groups: see [Note: one call at a time].

        Raises:
            RuntimeError: another call is under way on one of these groups; nothing was sent.
        """
        keys = [id(group) for group in self._groups] if self.size > 1 else []
        thread = threading.get_ident()
        with _lock:
            holders = [_in_use[key] for key in keys if key in _in_use]
            if not holders:
                _in_use.update(dict.fromkeys(keys, thread))
        if holders:
            where = "this" if holders[0] == thread else "another"
            raise RuntimeError(
                f"a distprune call is under way on this process group, in {where} thread; expected "
                "one call at a time. Do not call distprune from a function that it calls; wait for "
                "other threads, or give each a group of its own (torch.distributed.new_group)."
            )
        try:
            yield
        finally:
            with _lock:
                for key in keys:
                    del _in_use[key]

    def _reduce(self, values: Tensor, op: Op) -> Tensor:
        if self.size == 1:
            return values
        reduced = values.to(self._device, copy=True)
        for group in self._groups:
            try:
                dist.all_reduce(reduced, op=getattr(dist.ReduceOp, op.upper()), group=group)
            except Exception as error:  # of a lost rank: there is nobody to tell
                self._note_told(error)
                raise
            self._count(reduced)
        return reduced.to(values.device)

    def _note_told(self, error: BaseException) -> None:
        """Note that all of these ranks raise an error, or have lost each other."""
        for told in _contexts_of_thread():
            told.append((error, frozenset(self.ranks)))

    def _count(self, sent: Tensor) -> None:
        self.num_collectives += 1
        self.bytes_sent += sent.numel() * sent.element_size()

    def _device_for(self, values: Tensor) -> torch.device:
        """Where the backends of all groups take a tensor: its own device, if they can."""
        backends = [str(dist.get_backend_config(group)) for group in self._groups]
        takes_it = all(f"{values.device.type}:" in backend for backend in backends)
        return values.device if takes_it else self._device

    def _raise_everywhere(self, error: BaseException | None) -> NoReturn:
        told = "" if error is None else f"{type(error).__name__}\n{_text_of(error)}"
        texts, number_of = self.distinct_texts(told[:_MOST_CHARACTERS])
        failed = [self.ranks[i] for i, number in enumerate(number_of) if texts[number]]
        is_interrupt = error is not None and not isinstance(error, Exception)
        if error is not None and (len(failed) == self.size or is_interrupt):
            self._note_told(error)
            raise error
        kind, _, message = texts[number_of[self.ranks.index(failed[0])]].partition("\n")
        where = f"on rank {failed[0]}: "
        if kind in _SHARED_ERRORS:
            shared: Exception = getattr(builtins, kind)(where + message)
        else:
            shared = RuntimeError(f"{where}{kind}: {message}")
        self._note_told(shared)
        raise shared from error

    def _raise_difference(self, facts: Sequence[tuple[str, str]], num_common: int) -> NoReturn:
        texts = [f"{label}: {text}" for label, text in facts[:num_common]]
        # Last, because one rank's facts may be the beginning of another's.
        texts.append(f"{len(facts)} facts in all")
        digests = torch.tensor(list(map(_digest, texts)))
        number = int((self._reduce(digests, "min") != self.max(digests)).nonzero()[0])
        values, number_of = self.distinct_texts(texts[number][:_MOST_CHARACTERS])
        examples = [(self.ranks[number_of.index(n)], value) for n, value in enumerate(values[:2])]
        shown = "; ".join(f"rank {rank} has {value}" for rank, value in examples)
        difference = ValueError(
            f"the ranks were called with different arguments: {shown}. Expected the same "
            "parameters, in the same order, and the same arguments on every rank. If this "
            "call is meant for one rank alone, pass a group that holds only that rank."
        )
        self._note_told(difference)
        raise difference


def world(group: dist.ProcessGroup | None = None) -> Communicator:
    """The ranks of ``group``, every rank by default; a single process without one.

    Raises:
        ValueError: this rank is not a member of ``group``.
    """
    if not is_distributed():
        return Communicator(())
    group = group if group is not None else dist.group.WORLD
    assert group is not None  # is_initialized
    if dist.get_rank(group) < 0:
        raise ValueError(
            f"rank {dist.get_rank()} is not a member of group={group}; "
            "expected the call only on the ranks of the group."
        )
    return over_groups([group], dist.get_process_group_ranks(group))


# Private functions of torch that clear a cache; a torch that lacks one has no such cache.
_CACHES_OF_MESHES = (
    ("debug", "_clear_sharding_prop_cache"),
    ("_redistribute", "clear_redistribute_planner_cache"),
    ("_redistribute", "_gen_transform_infos.cache_clear"),
    ("_collective_utils", "MeshTopoInfo.build_from_mesh.cache_clear"),
)


def clear_caches_of_meshes() -> None:
    """Forget every mesh that DTensor has cached."""
    for module, path in _CACHES_OF_MESHES if "torch.distributed.tensor" in sys.modules else ():
        with contextlib.suppress(ImportError, AttributeError):
            found = importlib.import_module(f"torch.distributed.tensor.{module}")
            operator.attrgetter(path)(found)()


def end_groups() -> None:
    """Destroy all process groups, with their threads: see [Note: the last reference to a group]."""
    groups: list[dist.ProcessGroup] = []
    if is_distributed():
        groups += dist.distributed_c10d._world.pg_map
        dist.destroy_process_group()
    clear_caches_of_meshes()
    gc.collect()  # wrapped models are reference cycles that keep groups
    groups.clear()


def over_mesh(mesh: DeviceMesh) -> Communicator:
    """The ranks of a device mesh: reductions go over one axis after the other.

    Raises:
        ValueError: this rank is outside the mesh.
    """
    ranks = mesh.mesh.flatten().tolist()
    if dist.get_rank() not in ranks:
        raise ValueError(
            f"rank {dist.get_rank()} is outside the mesh of the parameter ({mesh}); expected "
            "the call only on the ranks of the mesh."
        )
    return over_groups([mesh.get_group(axis) for axis in range(mesh.ndim)], ranks)


def over_groups(groups: Sequence[dist.ProcessGroup], ranks: Sequence[int] = ()) -> Communicator:
    """Ranks that several process groups join like the axes of a grid; see :func:`over_mesh`.

    Args:
        groups: this rank's group along every axis.
        ranks: all global ranks of the grid; by default they are found here.
    """
    ranks = ranks or grid(groups)
    groups = [group for group in groups if group.size() > 1]
    device = _reduction_device(groups[0]) if groups else "cpu"
    return Communicator(groups, ranks, dist.get_rank(), device)


def grid(groups: Sequence[dist.ProcessGroup]) -> list[int]:
    """The global ranks that this rank's groups join, if they are the axes of a regular grid."""
    me, offsets = dist.get_rank(), {0}
    for group in groups:
        members = dist.get_process_group_ranks(group)
        offsets = {offset + member - me for offset in offsets for member in members}
    return sorted(me + offset for offset in offsets)


def is_distributed() -> bool:
    """Whether a process group is initialised: plain modules may then be replicas."""
    return dist.is_available() and dist.is_initialized()


def _reduction_device(group: dist.ProcessGroup) -> torch.device:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or "cpu:" in str(dist.get_backend_config(group)):
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def _contexts_of_thread() -> list[_Told]:
    return _threads.__dict__.setdefault("contexts", [])


_WAITS = (
    "rank %d has raised %s, and waits for the other ranks to come to their next distprune call, "
    "which raises it there, too. Where they wait for this rank in a collective of their own code, "
    "or of a wrapper such as FSDP, all end with the timeout of the process group."
)


# torch 2.13 gave them other names, and warns of the old ones.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def sum_of_pieces(pieces: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over the ranks of a group of this rank's row: each rank needs its own only.

    Args:
        pieces: float [ranks, n], contiguous; the same n on every rank.

    Cost: one reduce-scatter of ``pieces``.
    """
    own = pieces.new_empty(pieces.shape[1])
    _reduce_scatter(own, pieces.view(-1), group=group)
    return own


def resolved(tensor: DTensor, placements: Sequence[Placement]) -> Tensor:
    """This rank's part of a DTensor under other placements: sums that are pending are made.

    Cost: nothing if the placements are these already; else what ``redistribute`` sends.
    """
    if tuple(tensor.placements) != tuple(placements):
        tensor = tensor.redistribute(placements=placements)
    return tensor.to_local()


def with_whole_dim(tensor: DTensor, dim: int) -> DTensor:
    """A DTensor whose ranks have all of one dimension, and of the others what they had.

    Cost: an all-gather over each axis of the mesh that shards the dimension.
    """
    from torch.distributed.tensor import Replicate

    placements = [
        Replicate() if getattr(placement, "dim", None) in (dim, dim - tensor.ndim) else placement
        for placement in tensor.placements
    ]
    return tensor.redistribute(placements=placements)


def whole(tensor: DTensor) -> Tensor:
    """A DTensor on every rank as a whole, by :func:`resolved`."""
    from torch.distributed.tensor import Replicate

    return resolved(tensor, [Replicate()] * tensor.device_mesh.ndim)


def _text_of(error: BaseException) -> str:
    """What an error says, even if that fails."""
    try:
        return str(error)
    except Exception as other:
        return f"(its text raised {type(other).__name__})"


def _encoded(text: str) -> bytes:
    """UTF-8; lone surrogates, as file names have them, are escaped."""
    return text.encode(errors="backslashreplace")


def _digest(text: str) -> int:
    """62 bits of SHA-256, so that the value and its negative fit in an int64."""
    return int.from_bytes(hashlib.sha256(_encoded(text)).digest()[:8], "big") >> 2
