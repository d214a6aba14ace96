"""``verify``: the check that anyone can run on a pruned model, at any time; and its report.

A mask acts if the parameter, the mask, the hook and the record of the wrapper exist and fit
together. Each rank looks at what it has: a :class:`Place` is a parameter under one of its names, an
:class:`Inspected` a parameter. Then the ranks share what they have found.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from distprune.base import memory, naming, without_garbage_collection
from distprune.base.amount import listed, share
from distprune.base.naming import checked_pair, full_name, label_of, tied_places
from distprune.base.pruned_form import MASK, ORIG, is_dtensor, name_of_mask
from distprune.call.report import CallReport, column_of_counts, table_of
from distprune.masks.fingerprint import fingerprint_parts
from distprune.masks.hook import PruningHook, holder_of, holds_zeros, hooks_on
from distprune.ranks.collectives import Communicator, world
from distprune.shards.reader import ShardReader
from distprune.shards.shard import Shard, at_position, checksums, replicas_agree
from distprune.wrappers import masked_value
from distprune.wrappers.held import find_held, held_names
from distprune.wrappers.managed import Managed, StoredRun
from distprune.wrappers.wrapper import is_managed, managed_parameters, may_be_managed

# Elements at a time, so that temporaries stay in the second-level cache.
_CPU_CHUNK, _DEVICE_CHUNK = 1 << 18, 1 << 25


@dataclass(frozen=True)
class VerifiedParameter:
    """One parameter, whole, each element counted once.

    Attributes:
        name: fully qualified.
        num_elements: of the whole parameter; 0 if no rank could read it.
        num_pruned: elements under the mask.
        fingerprint: int64, of the mask; no sharding changes it. 0 if nothing is pruned.
        problems: what is wrong with it, and on which ranks.
    """

    name: str
    num_elements: int
    num_pruned: int
    fingerprint: int
    problems: tuple[str, ...] = ()

    @property
    def sparsity(self) -> float:
        """Share of pruned elements, in [0, 1]."""
        return share(self.num_pruned, self.num_elements)


@dataclass(frozen=True)
class VerificationReport(CallReport):
    """What ``verify`` found. The same on every rank except for ``seconds``: print it on one.

    Attributes:
        parameters: all that are pruned or should be, in the order of the model.
        problems: what is wrong with the model as a whole.
        num_ranks, num_collectives, bytes_sent, seconds: what the call cost this rank: the ranks
            that took part, all-reduces, their payload, and wall time.
    """

    parameters: tuple[VerifiedParameter, ...]
    problems: tuple[str, ...]

    _TOTALS = ("ok", *CallReport._TOTALS)

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.all_problems

    @property
    def all_problems(self) -> tuple[str, ...]:
        """The problems of the model, and those of the parameters with their names."""
        return (
            *self.problems,
            *(f"{entry.name}: {text}" for entry in self.parameters for text in entry.problems),
        )

    def __str__(self) -> str:
        entries = self.parameters
        columns = [
            ("parameter", [entry.name for entry in entries], "total"),
            column_of_counts("elements", [entry.num_elements for entry in entries]),
            column_of_counts("pruned", [entry.num_pruned for entry in entries]),
            ("sparsity", [f"{entry.sparsity:.2%}" for entry in entries], f"{self.sparsity:.2%}"),
            ("", [f"{len(e.problems)} wrong" if e.problems else "ok" for e in entries], ""),
        ]
        verdict = "nothing is wrong" if self.ok else _number_of_problems(self)
        last = "; ".join([verdict, *self._cost()])
        problems = [f"- {text}" for text in self.all_problems]
        return "\n".join([*table_of(columns, left_columns=(0, 4)), last, *problems])


def _number_of_problems(report: VerificationReport) -> str:
    count = len(report.all_problems)
    return f"{count} problem{'s' if count > 1 else ''}"


class VerificationError(RuntimeError):
    """Masks do not act, or are not those that the last pruning left; the same on every rank.

    Attributes:
        report: the whole report; the message lists the first 20 problems.
    """

    def __init__(self, report: VerificationReport) -> None:
        self.report = report
        shown = listed(report.all_problems, 20, "\n- ")
        super().__init__(f"{_number_of_problems(report)} with the masks of the model:\n- {shown}")

    def __reduce__(self) -> Any:
        return VerificationError, (self.report,)


Expected = Iterable[str | tuple[nn.Module, str]]


def verify(
    model: nn.Module,
    *,
    expected: Expected | None = None,
    raise_errors: bool = True,
    group: ProcessGroup | None = None,
    pipeline_parallel: bool = False,
    prefix: str = "",
) -> VerificationReport:
    """Check that the masks of a model act, and are those that the last pruning left.

    Call it on every rank. It takes seconds and changes nothing, so call it whenever in doubt:
    after loading, after wrapping, before a long run, every thousand steps::

        report = distprune.verify(model)  # raises on every rank if anything is wrong
        if rank == 0:
            print(report)

    For every parameter that is pruned, it checks that

    - it is pruned on all ranks, and its hook, its mask and what lets the mask act under its wrapper
      exist, so that no part of it runs dense;
    - the mask has the parameter's layout, and is binary;
    - no other module uses the parameter unmasked;
    - pruned elements act as zero;
    - replicas have the same mask and the same weight, bit for bit;
    - the number of pruned elements, and the mask's fingerprint, are those that the last
      pruning left.

    A model in which nothing is pruned does not pass, unless ``expected`` is empty. A module that
    was pruned and then replaced leaves no trace: name it in ``expected``.

    Args:
        model: wrapped or not; the same on every rank, but for pipeline stages.
        expected: what has to be pruned: parameters, as ``select`` lists them, or their full
            names. By default every parameter that has a trace of pruning.
        raise_errors: raise if anything is wrong. If False, the problems are only in the report.
        group: the ranks that take part; every rank by default. Collective.
        pipeline_parallel: ranks have different parameters, with full names, as for
            ``global_unstructured``.
        prefix: the name of ``model`` in a larger model, as for ``select``.

    Returns:
        A report, the same on every rank.

    Raises:
        VerificationError: something is wrong. It is raised on every rank with the same text, which
            names parameters and ranks, and has the report as ``.report``.
        TypeError, ValueError: arguments of a wrong type, or that differ between the ranks.

    Cost: two reads of the masks and one of the weights, or two of weights that have replicas; no
    memory. About 200 bytes of communication per parameter in 4 all-reduces.
    """

    communicator, started = world(group), time.perf_counter()

    def inspect_places() -> dict[str, Inspected]:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model is a {type(model).__name__}; expected a torch.nn.Module.")
        if may_be_managed():
            managed_parameters(model)  # registers FSDP1 modules
        modules = list(naming.named_modules(model))
        places = [
            Place(full_name(prefix, full_name(path, name)), module, name)
            for path, module in modules
            for name in traces(module)
        ]
        entries = inspect(places, communicator)
        find_dense_places(modules, places, entries)
        for name in _missing(() if expected is None else expected, places):
            problems = entries.setdefault(name, Inspected(name)).problems
            problems.append("it is expected to be pruned, and is not")
        return entries

    with (
        communicator.exclusively(),
        memory.ordinary_tensors(),
        torch.no_grad(),
        without_garbage_collection(),
    ):
        facts = [
            ("expected", "None" if expected is None else "given"),
            ("pipeline_parallel", str(pipeline_parallel)),
        ]
        local = communicator.run(inspect_places, lambda _: facts)
        parameters = _share(local, communicator, pipeline_parallel)
    problems: tuple[str, ...] = ()
    if not parameters and expected is None:
        problems = (
            "nothing is pruned; expected masks, which checkpoint.load gives a fresh model, or "
            "expected=(), which lets a dense model pass",
        )
    cost = communicator.size, communicator.num_collectives, communicator.bytes_sent
    seconds = time.perf_counter() - started
    report = VerificationReport(tuple(parameters), *cost, seconds, problems)
    if raise_errors and not report.ok:
        raise VerificationError(report)
    return report


def _missing(expected: Expected, places: Sequence[Place]) -> list[str]:
    """Names of what is expected to be pruned and is not."""
    paths = {place.path for place in places}
    pairs = {(id(place.module), place.name) for place in places}
    missing = []
    for position, entry in enumerate([expected] if isinstance(expected, str) else expected):
        if isinstance(entry, str):
            name, is_pruned = entry, entry in paths
        else:
            kinds = "full names, or (module, name) pairs as select(model) lists them"
            checked_pair(entry, f"expected[{position}]", kinds)
            name = label_of(entry, position)
            is_pruned = any((id(module), key) in pairs for module, key in tied_places(entry))
        if not is_pruned:
            missing.append(name)
    return missing


class Place:
    """A parameter under one of its names, as it is registered now.

    Attributes:
        path: full name of the parameter.
        hooks: its pruning hooks: one, unless something is wrong.
        is_held: whether the mask acts by zeros in shards, and the parameter has its own name.
        original: the attribute that should be the parameter; None if it was deleted.
        mask: the buffer that should be the mask; None if it was deleted.
    """

    def __init__(self, path: str, module: nn.Module, name: str) -> None:
        self.path, self.module, self.name = path, module, name
        self.hooks = [hook for hook in hooks_on(module) if hook._tensor_name == name]
        self.is_held = holds_zeros(module, name)
        self.key = name if self.is_held else name + ORIG
        original: Any = module._parameters.get(self.key)
        self.original: Any = module.__dict__.get(self.key) if original is None else original
        self.mask: Any = module._buffers.get(name + MASK)


@dataclass
class Inspected:
    """One parameter on this rank.

    Attributes:
        name: fully qualified.
        problems: what is wrong with the parameter on this rank.
        hook: of its first place.
        shard: this rank's part; None if it could not be read, and the numbers are 0 then.
        product: the masked weight that its first module keeps, 1-d, in the order of the shard.
        num_pruned: elements of the part that the mask prunes.
        fingerprint: the part's summand of the fingerprint of the whole mask.
        mask_hash, weight_hash: int64 that depend on the contents and on their position in the
            parameter; equal where replicas are. weight_hash is 0 if nobody has a replica.
    """

    name: str
    problems: list[str] = field(default_factory=list)
    hook: PruningHook | None = None
    shard: Shard | None = None
    product: Tensor | None = None
    num_pruned: int = 0
    fingerprint: int = 0
    mask_hash: int = 0
    weight_hash: int = 0


def traces(module: nn.Module) -> list[str]:
    """Names of the parameters that have a hook, a mask or what pruning adds to a module."""
    names = dict.fromkeys(hook._tensor_name for hook in hooks_on(module))
    for key in module._buffers:
        name = name_of_mask(key)
        if name is not None and name not in names and _is_ours(module, name):
            names[name] = None
    return list(names | dict.fromkeys((*masked_value.live_names(module), *held_names(module))))


def _is_ours(module: nn.Module, name: str) -> bool:
    """Whether a buffer with a mask's name is one, and not of torch.nn.utils.prune."""
    for hook in module._forward_pre_hooks.values():
        is_of_torch = type(hook).__module__ == "torch.nn.utils.prune"
        if is_of_torch and getattr(hook, "_tensor_name", None) == name:
            return False
    if name + ORIG in module._parameters or find_held(module, name) is not None:
        return True
    parameter, mask = module._parameters.get(name), module._buffers[name + MASK]
    return is_dtensor(parameter) and is_dtensor(mask) and mask.dtype is torch.bool


def inspect(places: Sequence[Place], communicator: Communicator) -> dict[str, Inspected]:
    """Check everything that the places of parameters show on this rank: by name."""
    reader, records = ShardReader(), managed_parameters() if may_be_managed() else None
    by_key: dict[Hashable, Inspected] = {}
    entries: dict[str, Inspected] = {}
    for place in places:
        problems: list[str] = []
        shard = None
        try:
            reason = _check(place, reader, records, problems)
            if not reason:
                shard = reader.read(place.module, place.name, place.path)
                if shard.mask is None:
                    shard, reason = None, "its mask cannot be found"
        except Exception as error:  # of any type: it is a problem of the parameter
            reason = f"cannot be read: {type(error).__name__}: {error}"
        problems += [reason] if reason else []
        key: Hashable = (id(place.module), place.name) if shard is None else shard.key
        entry = by_key.get(key)
        if entry is None:
            hook = place.hooks[0] if place.hooks else None
            product = None if shard is None else _product(place, shard)
            entry = by_key[key] = Inspected(place.path, [], hook, shard, product)
            entries.setdefault(place.path, entry)
        elif shard is not None and entry.shard is not None and not _same(entry.shard, shard):
            problems.append("it is tied, and has another mask than under its first name")
        prefix = "" if place.path == entry.name else f"as {place.path}, "
        entry.problems += [prefix + text for text in problems]
    _measure([entry for entry in entries.values() if entry.shard], communicator)
    return entries


def find_dense_places(
    modules: Sequence[tuple[str, nn.Module]],
    places: Sequence[Place],
    entries: Mapping[str, Inspected],
) -> None:
    """Add problems of pruned parameters that are also registered without their mask."""
    entry_of: dict[int, Inspected] = {}
    checked: set[tuple[int, str]] = set()  # (id of a module, name) pairs that are checked elsewhere
    for place in places:
        checked |= {(id(place.module), place.key), (id(place.module), place.name)}
        if isinstance(place.original, nn.Parameter) and place.path in entries:
            entry_of.setdefault(id(place.original), entries[place.path])
    for path, module in modules:
        for name, parameter in module._parameters.items():
            entry = entry_of.get(id(parameter))
            if entry is not None and (id(module), name) not in checked:
                fqn = full_name(path, name)
                entry.problems.append(f"it is registered as {fqn} too, and acts there unmasked")


def _check(
    place: Place,
    reader: ShardReader,
    records: Mapping[tuple[int, str], Managed] | None,
    problems: list[str],
) -> str:
    """Find everything that keeps a mask from acting.

    Returns:
        Why the mask and the parameter do not exist or do not fit each other; "" if they do.
    """
    module, name, mask = place.module, place.name, place.mask
    if not place.hooks:
        problems.append("its pruning hook is gone, so that nothing keeps the mask acting")
    elif len(place.hooks) > 1:
        problems.append(f"it has {len(place.hooks)} pruning hooks; expected one")
    if not place.is_held:
        if module._parameters.get(name) is not None:
            problems.append(
                f"another parameter is registered as {name}, in the place of the masked one"
            )
        is_sharded = records is not None and is_managed(module, place.key)
        if is_sharded or is_dtensor(place.original):
            return (
                "it was pruned before it was sharded, and its mask is whole; call "
                "masks_aside(model) around the wrapping"
            )
    record = None
    if records is not None:
        record = records.get((id(module), name)) or reader.managed(module, name)
    if record is None and not isinstance(place.original, Tensor):
        return f"{place.key} is gone"
    if not isinstance(mask, Tensor):
        return f"its mask, the buffer {name + MASK}, is gone"
    if place.is_held:
        return _check_held(place, mask, record, problems)
    if masked_value.must_be_live(module) and not masked_value.is_live(module, name):
        problems.append(f"{name} is not computed when it is read, as it has to be here")
    return _layout_problem(mask, place.original)


def _check_held(place: Place, mask: Tensor, record: Managed | None, problems: list[str]) -> str:
    held, parameter = holder_of(place.module, place.name), place.original
    if getattr(held.record, "key", None) != getattr(record, "key", None):
        return (
            "it was wrapped anew, and its mask acts on what the earlier wrapper had; call "
            "masks_aside(model) around the wrapping"
        )
    if isinstance(record, StoredRun):
        parameter = record.values
    elif record is not None:
        parameter = record.parameter
        if not is_dtensor(parameter):
            return (
                f"{place.name} was replaced by {_described(parameter)}, which its wrapper cannot "
                "gather; load a state dict of DTensors, or without assign=True"
            )
    if record is not None and not record.has_registered(place.module, place.name):
        return f"{place.name} was replaced by a parameter that the wrapper does not have"
    # With CPU offload FSDP1 moves buffers to the accelerator for good, and parameters for use.
    reason = _layout_problem(mask, parameter, may_be_elsewhere=record is not None)
    if reason or mask.dtype is not torch.bool:
        return reason or f"its mask has dtype {mask.dtype}; expected torch.bool on shards"
    for stored, part in held.stored():
        # To index by the mask takes eight times as long.
        exposed = part.to(stored.device).logical_not() & (stored != 0)
        if number := int(exposed.count_nonzero()):
            problems.append(f"{number} pruned elements are not zero in what the rank stores")
    return ""


def _layout_problem(mask: Tensor, parameter: Tensor, *, may_be_elsewhere: bool = False) -> str:
    """How a mask is laid out if not like its parameter; on its device, or on any."""
    fits = mask.shape == parameter.shape and is_dtensor(mask) == is_dtensor(parameter)
    if fits and is_dtensor(mask):
        of_mask, of_parameter = (
            (each.device_mesh, tuple(each.placements), each.to_local().shape)  # type: ignore[attr-defined]
            for each in (mask, parameter)
        )
        fits = of_mask == of_parameter
    if fits and (may_be_elsewhere or mask.device == parameter.device):
        return ""
    kinds = f"{_described(mask)}, and the parameter {_described(parameter)}"
    return f"its mask is {kinds}; expected the same layout"


def _described(tensor: Tensor) -> str:
    kind = f"a tensor of shape {tuple(tensor.shape)} on {tensor.device}"
    if not is_dtensor(tensor):
        return kind
    return (
        f"a DTensor of shape {tuple(tensor.shape)} with {tensor.placements} on a mesh of shape "
        f"{tuple(tensor.device_mesh.shape)}, {tuple(tensor.to_local().shape)} here"
    )


def _product(place: Place, shard: Shard) -> Tensor | None:
    """The masked weight that the module keeps, 1-d, in the order of the shard.

    None if there is none: zeros are held, or it is computed when it is read or at the next forward.
    """
    product: Any = place.module.__dict__.get(place.name)
    values = shard.values
    # After .to() the product keeps the old device and dtype until the next forward.
    # FSDP1 leaves a view there, of memory that it may have freed.
    is_current = (
        isinstance(product, Tensor)
        and not place.is_held
        and (product.shape, product.dtype, product.device)
        == (values.shape, values.dtype, values.device)
        and not is_dtensor(product)
        and not masked_value.is_live(place.module, place.name)
    )
    return shard.flat(product.detach()) if is_current else None


def _same(shard: Shard, other: Shard) -> bool:
    """Whether two places of a tied parameter have the same mask."""
    mask, of_other = shard.mask, other.mask
    assert mask is not None and of_other is not None
    return mask is of_other or (
        mask.shape == of_other.shape and torch.equal(mask != 0, of_other != 0)
    )


def _measure(entries: Sequence[Inspected], communicator: Communicator) -> None:
    """Count and hash masks, and what is under them; the entries have shards.

    Cost: two reads of the mask, and one of the weight, or two if it has replicas. Waits for a
    device three times.
    """
    shards: list[Any] = [entry.shard for entry in entries]
    # Small parameters of a kind are looked at together.
    groups: dict[object, list[int]] = {}
    num_elements = 0
    for i, (shard, entry) in enumerate(zip(shards, entries, strict=True)):
        mask, values, size = shard.mask, shard.values, shard.flat_mask.shape[0]
        part = (num_elements := num_elements + size) >> 20  # temporaries of some megabytes
        kind = (mask.dtype, values.dtype, mask.device, values.device, entry.product is None, part)
        groups.setdefault(kind if size <= memory.SERIAL else i, []).append(i)
    counted = [
        _numbers([(shards[i].flat_mask, shards[i].flat_values, entries[i].product) for i in group])
        for group in groups.values()
    ]
    order = [i for group in groups.values() for i in group]
    rows = [row for array in memory.on_host(counted) for row in array.tolist()]
    copied = [  # other ranks may have the same elements
        i
        for i, s in enumerate(shards if communicator.size > 1 else ())
        if s.num_replicas > 1 or s.ranks is None or len(s.ranks) < communicator.size
    ]
    sums = dict(zip(copied, checksums([shards[i].values for i in copied]), strict=True))
    fingerprints = fingerprint_parts(shards, [shard.mask for shard in shards])
    for i, (num_pruned, num_kept, num_infinite, num_exposed) in zip(order, rows, strict=True):
        entry, shard = entries[i], shards[i]
        num_elements = shard.flat_mask.shape[0]
        num_others = num_elements - num_pruned - num_kept
        if num_others:
            entry.problems.append(
                f"its mask is not binary: {num_others} of {num_elements} values are neither 0 nor 1"
            )
        if num_infinite:
            entry.problems.append(
                "infinite or NaN values are under the mask, whose product with 0 is NaN and not 0"
            )
        elif num_exposed:
            entry.problems.append(
                "the masked weight that is there now is not 0 where the mask is: it, or the mask, "
                "was written to after it had been computed"
            )
        entry.num_pruned, entry.fingerprint = num_pruned, fingerprints[i]
        if communicator.size > 1:
            entry.mask_hash = at_position(shard.position, fingerprints[i], num_pruned, num_kept)
        if i in sums:
            entry.weight_hash = at_position(shard.position, sums[i])


def _numbers(group: Sequence[tuple[Tensor, Tensor, Tensor | None]]) -> Tensor:
    """Of some parameters, how many elements are pruned, are kept, are infinite or NaN where they
    are pruned, and have a product other than 0 there: int64 [m, 4], on the device."""
    mask, values, product = group[0]
    sizes = [each.numel() for each, _, _ in group]
    if len(group) > 1:
        mask = torch.cat([each for each, _, _ in group])
        values = torch.cat([each for _, each, _ in group])
        if product is not None:
            product = torch.cat([each for _, _, each in group if each is not None])
    ends = torch.tensor(sizes).cumsum(0).to(mask.device)
    totals = torch.zeros(len(group), 4, dtype=torch.int64, device=mask.device)
    is_on_host = memory.takes_numpy(mask.device)
    size = _CPU_CHUNK if is_on_host else _DEVICE_CHUNK
    for first in range(0, mask.numel(), size if len(group) == 1 else max(1, mask.numel())):
        span = slice(first, first + size) if len(group) == 1 else slice(None)
        if is_on_host:  # torch's comparisons take several times as long
            pruned, kept = (
                torch.from_numpy(find(mask[span])) for find in (memory.is_zero, memory.is_one)
            )
        else:
            pruned, kept = mask[span] == 0, mask[span] == 1
        flags = {0: pruned, 1: kept}
        # A sum is finite only if all values are, and is faster; a device would wait for it.
        if not (is_on_host and values[span].sum().isfinite()):
            flags[2] = pruned > values[span].isfinite()
        if product is not None:
            flags[3] = pruned & product[span].bool()
        for column, each in flags.items():
            if len(group) == 1:
                totals[0, column] += each.count_nonzero()
            else:
                upto = nn.functional.pad(each.cumsum(0), (1, 0))[ends]
                totals[:, column] = upto.diff(prepend=upto.new_zeros(1))
    return totals


# What one rank tells the others of a parameter, as JSON.
_Told = dict[str, Any]


def _told(entry: Inspected, rank: int) -> _Told:
    """What a rank has found.

    Its "kind" is a digest of shape, dtype and layout, None if the rank could not read it; "copy"
    the first rank of this rank's copy of it, -1 if the rank has no part of any, None if each rank
    has a copy of its own; "record" that of the last pruning.
    """
    shard = entry.shard
    told: _Told = {"kind": None, "copy": None, "numel": 0, "problems": entry.problems}
    if shard is None:
        return told
    if shard.ranks is not None:
        told["copy"] = min(shard.ranks) if rank in shard.ranks else -1
    told["record"] = None if entry.hook is None else entry.hook.record
    told["kind"] = hashlib.blake2b(shard.facts.encode(), digest_size=8).hexdigest()
    return told | {"numel": shard.numel, "num_replicas": shard.num_replicas}


def _share(
    local: Mapping[str, Inspected], communicator: Communicator, pipeline_parallel: bool
) -> list[VerifiedParameter]:
    """All parameters that any rank has, with their problems; the same on every rank.

    Cost: three all-reduces: 16 bytes per rank, about 100 bytes per parameter for each kind of
    rank, and 56 bytes per parameter.
    """
    rank = communicator.rank
    mine = {name: _told(entry, rank) for name, entry in local.items()}
    texts, kinds = communicator.distinct_texts(json.dumps(mine))
    told_by: dict[str, list[tuple[_Told, list[int]]]] = {}
    for kind, text in enumerate(texts):
        ranks = [r for r, k in zip(communicator.ranks, kinds, strict=True) if k == kind]
        for name, row in json.loads(text).items():
            told_by.setdefault(name, []).append((row, ranks))
    copies = {name: _copies(told) for name, told in told_by.items()}
    rows = []
    for name in told_by:
        row, entry = [0] * 7, local.get(name)
        if entry is not None and entry.shard is not None and mine[name]["copy"] != -1:
            row[:2] = entry.mask_hash, entry.weight_hash
            own = mine[name]["copy"]
            if entry.shard.replica == 0 and (rank if own is None else own) == min(copies[name]):
                size = entry.shard.values.numel()
                row[2:] = size, entry.num_pruned, entry.fingerprint, *row[:2]
        rows += row
    if not rows:
        return []
    totals = communicator.sum(torch.tensor(rows, dtype=torch.int64)).view(-1, 7).tolist()
    found = []
    for (name, told), total in zip(told_by.items(), totals, strict=True):
        problems: list[str] = []
        inside = [rank for _, ranks in told for rank in ranks]
        if len(inside) < communicator.size and not pipeline_parallel:
            outside = set(communicator.ranks) - set(inside)
            problems.append(
                f"it is pruned on {_in_words(inside, communicator)} and not on "
                f"{_in_words(outside, communicator)}"
            )
        entries = [each for each, _ in told]
        if all(each["kind"] for each in entries):
            problems += _problems(entries, len(copies[name]), total)
        ranks_with: dict[str, list[int]] = {}
        for each, ranks in told:
            for text in each["problems"]:
                ranks_with.setdefault(text, []).extend(ranks)
        for text, ranks in ranks_with.items():
            where = f"on {_in_words(ranks, communicator)}: " if communicator.size > 1 else ""
            problems.append(where + text)
        numel = max(each["numel"] for each in entries)
        found.append(VerifiedParameter(name, numel, total[3], total[4], tuple(problems)))
    return found


def _copies(told: Sequence[tuple[_Told, list[int]]]) -> set[int]:
    """The first rank of every copy of a parameter."""
    firsts: set[int] = set()
    for entry, ranks in told:
        if entry["kind"] is not None and entry["copy"] != -1:
            firsts |= set(ranks) if entry["copy"] is None else {entry["copy"]}
    return firsts


def _problems(entries: Sequence[_Told], num_copies: int, total: Sequence[int]) -> list[str]:
    """What is wrong with a parameter as a whole, given sums over the ranks."""
    masks, weights, num_elements, num_pruned, fingerprint, first_mask, first_weight = total
    first = entries[0]
    record = first["record"]
    if any((e["kind"], e["record"]) != (first["kind"], record) for e in entries[1:]):
        return [
            "the ranks hold it in different shapes, dtypes or layouts, or know of different last "
            "prunings of it"
        ]
    problems = []
    if num_elements != first["numel"]:
        problems.append(
            f"its shards hold {num_elements} elements; expected {first['numel']} in all"
        )
    num_replicas = num_copies * first["num_replicas"]
    if not replicas_agree(num_replicas, masks, first_mask):
        problems.append("its replicas hold different masks")
    if not replicas_agree(num_replicas, weights, first_weight):
        problems.append("its replicas hold different weights")
    if record is not None and list(record) != [fingerprint, num_pruned]:
        how = "as that left it, but not the same ones"
        if record[1] != num_pruned:
            how = f"where that left {record[1]}"
        problems.append(
            f"its mask was changed since the last pruning: {num_pruned} elements are pruned, {how}"
        )
    return problems


def _in_words(ranks: Iterable[int], communicator: Communicator) -> str:
    """A list of ranks in words: "rank 3", "ranks 0, 1, 5", "all ranks"."""
    ordered = sorted(ranks)
    if len(ordered) == communicator.size:
        return "all ranks"
    return f"rank{'s' if len(ordered) > 1 else ''} {listed(map(str, ordered), 8)}"
