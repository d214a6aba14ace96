"""``verify``: the check that anyone can run on a pruned model, at any time."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from distprune.base.garbage import without_garbage_collection
from distprune.base.naming import Pair, checked_pair, label_of, tied_places
from distprune.call.report import PruningReport
from distprune.ranks.collectives import Communicator
from distprune.ranks.process_groups import world
from distprune.shards.checksum import replicas_agree
from distprune.shards.shard import Shard
from distprune.verification.inspecting import LocalEntry, find_dense_places, inspect
from distprune.verification.places import Place, places_of, traces
from distprune.verification.report import (
    VerificationError,
    VerificationReport,
    VerifiedParameter,
)
from distprune.wrappers.wrapper import managed_parameters

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


Expected = VerificationReport | PruningReport | Iterable[str | tuple[nn.Module, str]]
# By name, the number of pruned elements and the fingerprint that a report has of a parameter.
_Reported = dict[str, tuple[int, int | None]]


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
            names; or the report of an earlier pruning or verification of parameters with full
            names, whose counts (and fingerprints) must be the present ones. By default every
            parameter that has a trace of pruning.
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
    memory. About 200 bytes of communication per parameter in 5 all-reduces; more if something is
    wrong.
    """

    def inspect_model() -> tuple[dict[str, LocalEntry], _Reported]:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model is a {type(model).__name__}; expected a torch.nn.Module.")
        managed_parameters(model)  # registers FSDP1 modules
        places = places_of(model, prefix)
        missing, reported = _required(() if expected is None else expected, places)
        entries = inspect(places, communicator)
        find_dense_places(model, places, entries)
        _add_missing(entries, missing)
        return entries, reported

    communicator = world(group)
    return _verified(
        inspect_model,
        communicator,
        is_expected_given=expected is not None,
        raise_errors=raise_errors,
        pipeline_parallel=pipeline_parallel,
    )


def verify_parameters(
    parameters: Sequence[Pair],
    communicator: Communicator,
    *,
    pruned: Sequence[Pair],
    pipeline_parallel: bool = False,
) -> VerificationReport:
    """:func:`verify` for single parameters, of which ``pruned`` have to be pruned."""

    def inspect_parameters() -> tuple[dict[str, LocalEntry], _Reported]:
        places: dict[tuple[int, str], Place] = {}
        for position, pair in enumerate(parameters):
            for module, name in tied_places(pair):
                if name in traces(module):
                    place = Place(label_of(pair, position), module, name)
                    places.setdefault((id(module), name), place)
        found = list(places.values())
        missing, reported = _required(pruned, found)
        entries = inspect(found, communicator)
        _add_missing(entries, missing)
        return entries, reported

    return _verified(
        inspect_parameters,
        communicator,
        is_expected_given=True,
        raise_errors=True,
        pipeline_parallel=pipeline_parallel,
    )


def _verified(
    inspect_locally: Callable[[], tuple[dict[str, LocalEntry], _Reported]],
    communicator: Communicator,
    *,
    is_expected_given: bool,
    raise_errors: bool,
    pipeline_parallel: bool,
) -> VerificationReport:
    """Put what the ranks find together, and raise or report it."""
    started = time.perf_counter()
    with (
        communicator.exclusively(),
        torch.inference_mode(False),
        torch.no_grad(),
        without_garbage_collection(),
    ):
        facts = [
            ("expected", "given" if is_expected_given else "None"),
            ("pipeline_parallel", str(pipeline_parallel)),
        ]
        local, reported = communicator.run(inspect_locally, lambda _: facts)
        shared = _share(local, reported, communicator, pipeline_parallel=pipeline_parallel)
    problems: tuple[str, ...] = ()
    if not shared and not is_expected_given:
        problems = (
            "nothing is pruned, and nothing has a trace of it. If parameters should be, prune "
            "them, or load a checkpoint with checkpoint.load, which gives a fresh model its masks; "
            "expected=() lets a dense model pass",
        )
    report = VerificationReport(
        tuple(shared),
        problems,
        communicator.size,
        communicator.num_collectives,
        communicator.bytes_sent,
        time.perf_counter() - started,
    )
    if raise_errors and not report.ok:
        raise VerificationError(report)
    return report


def _required(expected: Expected, places: Sequence[Place]) -> tuple[list[str], _Reported]:
    """Names of what is expected to be pruned and is not, and what a report says of the others."""
    paths = {place.path for place in places}
    if isinstance(expected, VerificationReport | PruningReport):
        unnamed = [entry.name for entry in expected.parameters if entry.name.endswith(")")]
        if unnamed:
            raise ValueError(
                f"expected is a report of parameters without full names ({unnamed[0]}); expected "
                "one of parameters that select(model) lists, or the list of them."
            )
        reported = {
            entry.name: (entry.num_pruned, getattr(entry, "fingerprint", None))
            for entry in expected.parameters
        }
        return [name for name in reported if name not in paths], reported
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
    return missing, {}


def _add_missing(entries: dict[str, LocalEntry], missing: Iterable[str]) -> None:
    for name in missing:
        problems = entries.setdefault(name, LocalEntry(name)).problems
        problems.append("it is expected to be pruned, and is not")


_UNKNOWN = 2**63 - 1


class _Minima(NamedTuple):
    """Minima over the ranks for one parameter; _UNKNOWN where no rank has a value.

    Attributes:
        leader: first rank of the copy whose numbers are counted.
        kind, negative_kind: a digest of shape, dtype, layout, number of replicas and record, and
            its negative, whose minimum is the negative maximum.
        num_replicas, numel: of the parameter.
        num_pruned, fingerprint: of the record of the last pruning.
    """

    leader: int = _UNKNOWN
    kind: int = _UNKNOWN
    negative_kind: int = _UNKNOWN
    num_replicas: int = _UNKNOWN
    numel: int = _UNKNOWN
    num_pruned: int = _UNKNOWN
    fingerprint: int = _UNKNOWN


class _Sums(NamedTuple):
    """Sums over the ranks for one parameter, modulo 2**64.

    Attributes:
        num_problems: on all ranks.
        num_unread: ranks that could not read the parameter.
        num_leaders: copies of the parameter.
        num_elements, num_pruned, fingerprint: of the copy of the leader, its first replica.
        masks, first_mask: hashes of the masks, of all replicas and of the first ones.
        weights, first_weight: the same for the weights.
    """

    num_problems: int = 0
    num_unread: int = 0
    num_leaders: int = 0
    num_elements: int = 0
    num_pruned: int = 0
    fingerprint: int = 0
    masks: int = 0
    first_mask: int = 0
    weights: int = 0
    first_weight: int = 0


def _share(
    local: Mapping[str, LocalEntry],
    reported: _Reported,
    communicator: Communicator,
    *,
    pipeline_parallel: bool,
) -> list[VerifiedParameter]:
    """All parameters that any rank has, with their problems; the same on every rank.

    Cost: four all-reduces if nothing is wrong: 16 bytes per rank, the names, and 56 and 80 bytes
    per parameter.
    """
    texts, kinds = communicator.distinct_texts(json.dumps(list(local)))
    lists = [dict.fromkeys(json.loads(text)) for text in texts]
    names: list[str] = list(dict.fromkeys(name for own in lists for name in own))
    if not names:
        return []
    problems: dict[str, list[str]] = {name: [] for name in names}
    if len(lists) > 1 and not pipeline_parallel:
        for name in names:
            by_rank = zip(communicator.ranks, kinds, strict=True)
            ranks = {rank for rank, kind in by_rank if name in lists[kind]}
            others = set(communicator.ranks) - ranks
            if others:
                problems[name].append(
                    f"it is pruned on {_in_words(ranks, communicator)} and not on "
                    f"{_in_words(others, communicator)}"
                )
    entries = [local.get(name) for name in names]
    rows = torch.tensor([_minima(entry, communicator) for entry in entries], dtype=torch.int64)
    minima = [_Minima(*row) for row in communicator.min(rows).tolist()]
    parts = [_sums(*each, communicator) for each in zip(entries, minima, strict=True)]
    rows = communicator.sum(torch.tensor(parts, dtype=torch.int64))
    totals = [_Sums(*row) for row in rows.tolist()]
    found = []
    for name, minimum, total in zip(names, minima, totals, strict=True):
        problems[name] += _problems(minimum, total, reported.get(name))
    if any(total.num_problems for total in totals):
        _share_texts(local, problems, communicator)
    for name, minimum, total in zip(names, minima, totals, strict=True):
        numel = 0 if minimum.numel == _UNKNOWN else minimum.numel
        found.append(
            VerifiedParameter(
                name, numel, total.num_pruned, total.fingerprint, tuple(problems[name])
            )
        )
    return found


def _minima(entry: LocalEntry | None, communicator: Communicator) -> _Minima:
    if entry is None or entry.shard is None:
        return _Minima()
    shard, record = entry.shard, entry.record
    text = f"{[*shard.shape]} {shard.values.dtype} {shard.layout} {shard.num_replicas} {record}"
    kind = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
    return _Minima(
        _leader_of(shard, communicator),
        kind,
        -kind,
        shard.num_replicas,
        shard.numel,
        _UNKNOWN if record is None else record.num_pruned,
        _UNKNOWN if record is None else record.fingerprint,
    )


def _leader_of(shard: Shard, communicator: Communicator) -> int:
    """The first rank of this copy of the parameter, which tells it from other copies."""
    if shard.ranks is None:
        return communicator.rank
    return min(shard.ranks) if communicator.rank in shard.ranks else _UNKNOWN


def _sums(entry: LocalEntry | None, minimum: _Minima, communicator: Communicator) -> _Sums:
    """This rank's summands for one parameter."""
    if entry is None:
        return _Sums()
    shard, num_problems = entry.shard, len(entry.problems)
    if shard is None:
        return _Sums(num_problems, num_unread=1)
    leader = _leader_of(shard, communicator)
    if leader == _UNKNOWN:  # outside of the parameter's mesh
        return _Sums(num_problems)
    is_counted = leader == minimum.leader and shard.replica == 0
    return _Sums(
        num_problems,
        num_leaders=int(communicator.rank == leader),
        num_elements=is_counted * shard.values.numel(),
        num_pruned=is_counted * entry.num_pruned,
        fingerprint=is_counted * entry.fingerprint,
        masks=entry.mask_hash,
        first_mask=is_counted * entry.mask_hash,
        weights=entry.weight_hash,
        first_weight=is_counted * entry.weight_hash,
    )


def _problems(minimum: _Minima, total: _Sums, reported: tuple[int, int | None] | None) -> list[str]:
    """What is wrong with a parameter as a whole."""
    if total.num_unread or minimum.numel == _UNKNOWN:
        return []  # the ranks that could not read it report why
    if minimum.kind != -minimum.negative_kind:
        return [
            "the ranks hold it in different shapes, dtypes or layouts, or know of different last "
            "prunings of it"
        ]
    problems = []
    if total.num_elements != minimum.numel:
        problems.append(
            f"its shards hold {total.num_elements} elements; expected {minimum.numel} in all"
        )
    num_replicas = total.num_leaders * minimum.num_replicas
    if not replicas_agree(num_replicas, total.masks, total.first_mask):
        problems.append("its replicas hold different masks")
    if not replicas_agree(num_replicas, total.weights, total.first_weight):
        problems.append("its replicas hold different weights")
    if minimum.num_pruned not in (total.num_pruned, _UNKNOWN):
        problems.append(
            f"its mask was changed since the last pruning: {total.num_pruned} elements are "
            f"pruned, where that left {minimum.num_pruned}"
        )
    elif minimum.num_pruned != _UNKNOWN and minimum.fingerprint != total.fingerprint:
        problems.append(
            f"its mask was changed since the last pruning: {total.num_pruned} elements are "
            "pruned, as that left it, but not the same ones"
        )
    if reported is not None and reported[0] != total.num_pruned:
        problems.append(
            f"{total.num_pruned} of its elements are pruned; expected {reported[0]}, as in the "
            "report"
        )
    elif reported is not None and reported[1] not in (None, total.fingerprint):
        problems.append("its pruned elements are not those of the expected report")
    return problems


def _in_words(ranks: Iterable[int], communicator: Communicator) -> str:
    """A list of ranks in words: "rank 3", "ranks 0-2, 5", "all ranks"."""
    ordered = sorted(ranks)
    if len(ordered) == communicator.size:
        return "all ranks"
    runs: list[list[int]] = []
    for rank in ordered:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return f"rank{'s' if len(ordered) > 1 else ''} {text}"


def _share_texts(
    local: Mapping[str, LocalEntry], problems: dict[str, list[str]], communicator: Communicator
) -> None:
    """Add the problems that each rank has found to those of all."""
    texts = [(name, text) for name, entry in local.items() for text in entry.problems]
    lists, kinds = communicator.distinct_texts(json.dumps(texts))
    ranks_with: dict[tuple[str, str], set[int]] = {}
    for rank, kind in zip(communicator.ranks, kinds, strict=True):
        for name, text in json.loads(lists[kind]):
            ranks_with.setdefault((name, text), set()).add(rank)
    for (name, text), ranks in ranks_with.items():
        where = f"on {_in_words(ranks, communicator)}: " if communicator.size > 1 else ""
        problems[name].append(where + text)
