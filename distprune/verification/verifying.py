"""``verify``: the check that anyone can run on a pruned model, at any time; and its report."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from distprune.base import without_garbage_collection
from distprune.base.amount import CallReport, share, table
from distprune.base.memory import ordinary_tensors
from distprune.base.naming import Pair, checked_pair, label_of, named_modules, tied_places
from distprune.call.report import PruningReport
from distprune.ranks.collectives import Communicator, world
from distprune.shards.checksum import replicas_agree
from distprune.verification.inspecting import (
    Inspected,
    Place,
    find_dense_places,
    inspect,
    places_of,
    traces,
)
from distprune.wrappers.wrapper import managed_parameters, may_be_managed

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


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
        num_ranks: ranks that took part.
        num_collectives: all-reduces that this rank took part in.
        bytes_sent: their payload, per rank.
        seconds: wall time on this rank.
    """

    parameters: tuple[VerifiedParameter, ...]
    problems: tuple[str, ...]
    num_ranks: int
    num_collectives: int
    bytes_sent: int
    seconds: float

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

    def to_dict(self) -> dict[str, Any]:
        """Plain data, with the totals and sparsities written out."""
        totals = ("ok", "num_elements", "num_pruned", "sparsity")
        return {
            **asdict(self),
            "parameters": [{**asdict(each), "sparsity": each.sparsity} for each in self.parameters],
            **{name: getattr(self, name) for name in totals},
        }

    def to_json(self, **options: Any) -> str:
        """:meth:`to_dict` as JSON; ``options`` go to ``json.dumps``."""
        return json.dumps(self.to_dict(), allow_nan=False, **options)

    def __str__(self) -> str:
        rows = [
            (
                entry.name,
                f"{entry.num_elements:,}",
                f"{entry.num_pruned:,}",
                f"{entry.sparsity:.2%}",
                f"{len(entry.problems)} wrong" if entry.problems else "ok",
            )
            for entry in self.parameters
        ]
        totals = f"{self.num_elements:,}", f"{self.num_pruned:,}", f"{self.sparsity:.2%}"
        heading = "parameter", "elements", "pruned", "sparsity", ""
        verdict = "nothing is wrong" if self.ok else _number_of_problems(self)
        return "\n".join(
            [
                *table(heading, rows, ("total", *totals, ""), left_columns=(0, 4)),
                "; ".join([verdict, *self._cost()]),
                *(f"- {text}" for text in self.all_problems),
            ]
        )


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
        shown = list(report.all_problems[:20])
        if len(report.all_problems) > len(shown):
            more = len(report.all_problems) - len(shown)
            shown.append(f"and {more} more: see the error's report")
        super().__init__(
            f"{_number_of_problems(report)} with the masks of the model:\n"
            + "\n".join(f"- {text}" for text in shown)
        )

    def __reduce__(self) -> Any:
        return VerificationError, (self.report,)


Expected = VerificationReport | PruningReport | Iterable[str | tuple[nn.Module, str]]
# By name, the number of pruned elements and the fingerprint that a report has of a parameter.
_Reported = dict[str, tuple[int, int | None]]
# Modules that may use a parameter without its mask, places, names that are expected and not
# pruned, and what a report says of the others.
_Found = tuple[Sequence[tuple[str, nn.Module]], list[Place], list[str], _Reported]


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
    memory. About 200 bytes of communication per parameter in 4 all-reduces.
    """

    def find_places() -> _Found:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model is a {type(model).__name__}; expected a torch.nn.Module.")
        if may_be_managed():
            managed_parameters(model)  # registers FSDP1 modules
        modules = list(named_modules(model))
        places = places_of(modules, prefix)
        return modules, places, *_required(() if expected is None else expected, places)

    is_given = expected is not None
    report = _verified(find_places, world(group), is_given, pipeline_parallel)
    if raise_errors and not report.ok:
        raise VerificationError(report)
    return report


def verify_parameters(
    parameters: Sequence[Pair],
    communicator: Communicator,
    *,
    pruned: Sequence[Pair],
    pipeline_parallel: bool = False,
) -> VerificationReport:
    """:func:`verify` for single parameters, of which ``pruned`` have to be pruned."""

    def find_places() -> _Found:
        places: dict[tuple[int, str], Place] = {}
        for position, pair in enumerate(parameters):
            for module, name in tied_places(pair):
                if name in traces(module):
                    place = Place(label_of(pair, position), module, name)
                    places.setdefault((id(module), name), place)
        return (), list(places.values()), *_required(pruned, list(places.values()))

    report = _verified(find_places, communicator, True, pipeline_parallel)
    if not report.ok:
        raise VerificationError(report)
    return report


def _verified(
    find_places: Callable[[], _Found],
    communicator: Communicator,
    is_expected_given: bool,
    pipeline_parallel: bool,
) -> VerificationReport:
    """Put together what the ranks find."""
    started = time.perf_counter()

    def inspect_places() -> tuple[dict[str, Inspected], _Reported]:
        modules, places, missing, reported = find_places()
        entries = inspect(places, communicator)
        find_dense_places(modules, places, entries)
        for name in missing:
            problems = entries.setdefault(name, Inspected(name)).problems
            problems.append("it is expected to be pruned, and is not")
        return entries, reported

    with (
        communicator.exclusively(),
        ordinary_tensors(),
        torch.no_grad(),
        without_garbage_collection(),
    ):
        facts = [
            ("expected", "given" if is_expected_given else "None"),
            ("pipeline_parallel", str(pipeline_parallel)),
        ]
        local, reported = communicator.run(inspect_places, lambda _: facts)
        parameters = _share(local, reported, communicator, pipeline_parallel=pipeline_parallel)
    problems: tuple[str, ...] = ()
    if not parameters and not is_expected_given:
        problems = (
            "nothing is pruned, and nothing has a trace of it. If parameters should be, prune "
            "them, or load a checkpoint with checkpoint.load, which gives a fresh model its masks; "
            "expected=() lets a dense model pass",
        )
    return VerificationReport(
        tuple(parameters),
        problems,
        communicator.size,
        communicator.num_collectives,
        communicator.bytes_sent,
        time.perf_counter() - started,
    )


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


class _Told(NamedTuple):
    """What one rank tells the others of a parameter, as JSON.

    Attributes:
        kind: a digest of its shape, dtype and layout; None if the rank could not read it.
        record: of the last pruning.
        copy: the first rank of this rank's copy of it; -1 if the rank has no part of any, None if
            each rank has a copy of its own.
        problems: what this rank has found.
    """

    kind: str | None = None
    record: Sequence[int] | None = None
    copy: int | None = None
    num_replicas: int = 1
    numel: int = 0
    problems: Sequence[str] = ()


def _told(entry: Inspected, rank: int) -> _Told:
    shard = entry.shard
    if shard is None:
        return _Told(problems=entry.problems)
    record, copy = None if entry.hook is None else entry.hook.record, None
    if shard.ranks is not None:
        copy = min(shard.ranks) if rank in shard.ranks else -1
    kind = _digest(shard.facts)
    return _Told(kind, record, copy, shard.num_replicas, shard.numel, entry.problems)


@lru_cache(maxsize=1 << 10)
def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _share(
    local: Mapping[str, Inspected],
    reported: _Reported,
    communicator: Communicator,
    *,
    pipeline_parallel: bool,
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
            told_by.setdefault(name, []).append((_Told(*row), ranks))
    copies = {name: _copies(told) for name, told in told_by.items()}
    rows = []
    for name in told_by:
        row, entry = [0] * 7, local.get(name)
        if entry is not None and entry.shard is not None and mine[name].copy != -1:
            row[:2] = entry.mask_hash, entry.weight_hash
            own = mine[name].copy
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
        if None not in [each.kind for each in entries]:
            problems += _problems(entries, len(copies[name]), total, reported.get(name))
        ranks_with: dict[str, list[int]] = {}
        for each, ranks in told:
            for text in each.problems:
                ranks_with.setdefault(text, []).extend(ranks)
        for text, ranks in ranks_with.items():
            where = f"on {_in_words(ranks, communicator)}: " if communicator.size > 1 else ""
            problems.append(where + text)
        numel = max([each.numel for each in entries])
        found.append(VerifiedParameter(name, numel, total[3], total[4], tuple(problems)))
    return found


def _copies(told: Sequence[tuple[_Told, list[int]]]) -> set[int]:
    """The first rank of every copy of a parameter."""
    firsts: set[int] = set()
    for entry, ranks in told:
        if entry.kind is not None and entry.copy != -1:
            firsts |= set(ranks) if entry.copy is None else {entry.copy}
    return firsts


def _problems(
    entries: Sequence[_Told],
    num_copies: int,
    total: Sequence[int],
    reported: tuple[int, int | None] | None,
) -> list[str]:
    """What is wrong with a parameter as a whole, given sums over the ranks."""
    masks, weights, num_elements, num_pruned, fingerprint, first_mask, first_weight = total
    first = entries[0]
    if any(entry[:2] != first[:2] for entry in entries[1:]):
        return [
            "the ranks hold it in different shapes, dtypes or layouts, or know of different last "
            "prunings of it"
        ]
    problems = []
    if num_elements != first.numel:
        problems.append(f"its shards hold {num_elements} elements; expected {first.numel} in all")
    num_replicas = num_copies * first.num_replicas
    if not replicas_agree(num_replicas, masks, first_mask):
        problems.append("its replicas hold different masks")
    if not replicas_agree(num_replicas, weights, first_weight):
        problems.append("its replicas hold different weights")
    if first.record is not None and list(first.record) != [fingerprint, num_pruned]:
        how = "as that left it, but not the same ones"
        if first.record[1] != num_pruned:
            how = f"where that left {first.record[1]}"
        problems.append(
            f"its mask was changed since the last pruning: {num_pruned} elements are pruned, {how}"
        )
    if reported is not None and reported[0] != num_pruned:
        problems.append(
            f"{num_pruned} of its elements are pruned; expected {reported[0]}, as in the report"
        )
    elif reported is not None and reported[1] not in (None, fingerprint):
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
