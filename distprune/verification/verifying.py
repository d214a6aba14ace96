"""``verify``: the check that anyone can run on a pruned model, at any time.

With ``reference`` it repeats the last selection in an independent way: it gathers everything, sorts
it, and compares the masks. That shares no code with the selection that it checks, uses no
thresholds, and needs memory and traffic for whole parameters.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from distprune._common.collectives import Communicator
from distprune._common.garbage import without_garbage_collection
from distprune._common.memory import INTEGERS
from distprune._common.naming import Pair, checked_pair, label_of, tied_places
from distprune._common.process_groups import world
from distprune.call.report import PruningReport
from distprune.masks.record import CallRecord, MaskRecord
from distprune.shards.shard import LocalShard
from distprune.torch_private.wrapper import managed_parameters
from distprune.verification.inspecting import (
    LocalEntry,
    LocalFindings,
    find_dense_places,
    inspect,
    missing_members,
)
from distprune.verification.places import Place, places_of, traces
from distprune.verification.report import (
    SharedEntry,
    VerificationError,
    VerificationReport,
    leader_of,
    share_findings,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


Expected = VerificationReport | PruningReport | Iterable[str | tuple[nn.Module, str]]


def verify(
    model: nn.Module,
    *,
    expected: Expected | None = None,
    accept: bool = False,
    reference: bool = False,
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

    For every parameter that is pruned, or has a trace of a deleted mask, it checks that

    - it is pruned on all ranks, and its hook, its mask and what lets the mask act under its wrapper
      exist, so that no part of it runs dense;
    - the mask has the parameter's layout, and is binary;
    - the masked parameter is the one that was pruned, and no other module uses it unmasked;
    - pruned elements act as zero;
    - replicas have the same mask and the same weight, bit for bit;
    - the number of pruned elements, and the mask's fingerprint, are those that the last
      pruning left;
    - whatever was pruned in one call with it is still pruned, unless it was removed.

    A model in which nothing is pruned does not pass, unless ``expected`` is empty. A module that
    was pruned by itself and then replaced leaves no trace: name it in ``expected``.

    Args:
        model: wrapped or not; the same on every rank, but for pipeline stages.
        expected: what has to be pruned: parameters, as ``select`` lists them, or their full
            names; or the report of an earlier pruning or verification of parameters with full
            names, whose counts (and fingerprints) must be the present ones. By default every
            parameter that has a trace of pruning.
        accept: accept the present masks as those of the last pruning if nothing else is
            wrong, and do not miss deleted modules: after an intended change by hand, or
            ``load_state_dict`` of other masks. (``checkpoint.load`` also loads the records of its
            masks.)
        reference: right after a pruning, also repeat its selection in an independent, slow way:
            gather all weights on every rank and sort them. This is possible for masks that
            ``L1Unstructured`` made in one call, without scores and bounds, on parameters that were
            not pruned before and have not changed since; the report lists the others with the
            reason. It takes 17 bytes of memory and 16 bytes of communication per element.
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
    memory. About 200 bytes of communication per parameter in 4 all-reduces; more if something is
    wrong.
    """

    def inspect_model() -> LocalFindings:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model is a {type(model).__name__}; expected a torch.nn.Module.")
        required.extend(() if expected is None else _expected_parameters(expected))
        managed_parameters(model)  # registers FSDP1 modules
        places = places_of(model, prefix)
        if accept:
            _refresh(places)
        findings = inspect(places, communicator, uses_pruned_names=pipeline_parallel)
        find_dense_places(model, findings)
        absent = missing_members(model, places, forget=accept)
        _add_missing(findings, absent, required)
        return findings

    communicator = world(group)
    required: list[_Expected] = []
    return _verified(
        inspect_model,
        communicator,
        required,
        is_expected_given=expected is not None,
        accept=accept,
        reference=reference,
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
    """:func:`verify` for single parameters, of which ``pruned`` have to be pruned.

    Problems that only the whole model shows, such as a replaced module, are not found.
    """

    def inspect_parameters() -> LocalFindings:
        places: dict[tuple[int, str], Place] = {}
        for position, pair in enumerate(parameters):
            for module, name in tied_places(pair):
                if name in traces(module):
                    place = Place(label_of(pair, position), module, name)
                    places.setdefault((id(module), name), place)
        findings = inspect(list(places.values()), communicator, uses_pruned_names=pipeline_parallel)
        _add_missing(findings, [], _expected_parameters(pruned))
        return findings

    return _verified(
        inspect_parameters,
        communicator,
        is_expected_given=True,
        pipeline_parallel=pipeline_parallel,
    )


def _verified(
    inspect_locally: Callable[[], LocalFindings],
    communicator: Communicator,
    required: Sequence[_Expected] = (),
    *,
    is_expected_given: bool,
    accept: bool = False,
    reference: bool = False,
    raise_errors: bool = True,
    pipeline_parallel: bool = False,
) -> VerificationReport:
    """Put what the ranks find together, and raise or report it.

    Args:
        required: what has to be pruned; ``inspect_locally`` may fill this list.
    """
    started = time.perf_counter()
    with (
        communicator.exclusively(),
        torch.inference_mode(False),
        torch.no_grad(),
        without_garbage_collection(),
    ):
        facts = [
            ("accept", str(accept)),
            ("reference", str(reference)),
            ("expected", "given" if is_expected_given else "None"),
            ("pipeline_parallel", str(pipeline_parallel)),
        ]
        local = communicator.run(inspect_locally, lambda _: facts)
        shared, model_problems = share_findings(
            local.entries, local.problems, communicator, pipeline_parallel=pipeline_parallel
        )
        recomputed = Recomputed()
        if reference and not model_problems and not any(entry.problems for entry in shared):
            entries = [] if pipeline_parallel else list(local.entries.values())
            recomputed = recompute(entries, communicator)
            for entry in shared:
                if entry.name in recomputed.problems:
                    entry.problems.append(recomputed.problems[entry.name])
    if not shared and not is_expected_given:
        model_problems.append(
            "nothing is pruned, and nothing has a trace of it. If parameters should be, prune "
            "them, or load a checkpoint with checkpoint.load, which gives a fresh model its masks; "
            "expected=() lets a dense model pass"
        )
    if accept:
        _accept(shared, local)
    _compare_with_reports(shared, required)
    report = VerificationReport(
        tuple(entry.to_report() for entry in shared),
        tuple(model_problems),
        communicator.size,
        communicator.num_collectives,
        communicator.bytes_sent,
        time.perf_counter() - started,
        tuple(recomputed.names),
        tuple(recomputed.not_recomputed),
    )
    if report.ok:
        _remember_names(local.places)
    elif raise_errors:
        raise VerificationError(report)
    return report


@dataclass
class _Expected:
    """A parameter that has to be pruned.

    Attributes:
        name: fully qualified, if it has a full name.
        places: the (module, name) pairs at which it occurs; None if only its name is known.
        num_pruned, fingerprint: of its mask; None if any mask will do.
    """

    name: str
    places: Sequence[Pair] | None = None
    num_pruned: int | None = None
    fingerprint: int | None = None


def _expected_parameters(expected: Expected) -> list[_Expected]:
    """Parameters, names or a report in one form."""
    if isinstance(expected, VerificationReport | PruningReport):
        unnamed = [entry.name for entry in expected.parameters if entry.name.endswith(")")]
        if unnamed:
            raise ValueError(
                f"expected is a report of parameters without full names ({unnamed[0]}); expected "
                "one of parameters that select(model) lists, or the list of them."
            )
        return [
            _Expected(entry.name, None, entry.num_pruned, getattr(entry, "fingerprint", None))
            for entry in expected.parameters
        ]
    if isinstance(expected, str):
        expected = [expected]
    return [_expected_parameter(position, entry) for position, entry in enumerate(expected)]


def _expected_parameter(position: int, entry: Any) -> _Expected:
    if isinstance(entry, str):
        return _Expected(entry)
    kinds = "full names, or (module, name) pairs as select(model) lists them"
    checked_pair(entry, f"expected[{position}]", kinds)
    return _Expected(label_of(entry, position), tied_places(entry))


def _add_missing(
    findings: LocalFindings, absent: Iterable[str], required: Iterable[_Expected]
) -> None:
    """Add problems of parameters that should be pruned, and are not."""
    text = "it was pruned together with others, and is not pruned any more"
    missing = dict.fromkeys(absent, text)
    paths = {place.path for place in findings.places}
    pairs = {(id(place.module), place.name) for place in findings.places}
    for parameter in required:
        if parameter.places is None:
            is_pruned = parameter.name in paths
        else:
            is_pruned = any((id(module), name) in pairs for module, name in parameter.places)
        if not is_pruned:
            missing.setdefault(parameter.name, "it is expected to be pruned, and is not")
    for name, text in missing.items():
        findings.entries.setdefault(name, LocalEntry(name)).problems.append(text)


def _compare_with_reports(shared: Iterable[SharedEntry], required: Iterable[_Expected]) -> None:
    """Add problems where counts or fingerprints are not those of the expected report."""
    by_name = {entry.name: entry for entry in shared}
    for parameter in required:
        entry = by_name.get(parameter.name)
        if entry is None or not entry.num_elements or parameter.num_pruned is None:
            continue
        if entry.num_pruned != parameter.num_pruned:
            entry.problems.append(
                f"{entry.num_pruned} of its elements are pruned; expected {parameter.num_pruned}, "
                "as in the report"
            )
        elif parameter.fingerprint not in (None, entry.fingerprint):
            entry.problems.append("its pruned elements are not those of the expected report")


def _refresh(places: Iterable[Place]) -> None:
    """Recompute the masked weights, as the next forward will do."""
    for place in places:
        if place.hook is not None:
            with torch.enable_grad():
                place.hook.refresh_product(place.module)


def _accept(shared: Iterable[SharedEntry], local: LocalFindings) -> None:
    """Record the present masks as those of the last pruning, where nothing else is wrong."""
    for entry in shared:
        if entry.problems:
            continue
        entry.record_problem = None
        mine = local.entries.get(entry.name)
        for hook in () if mine is None else mine.hooks:
            hook.record = MaskRecord(entry.fingerprint, entry.num_pruned)


def _remember_names(places: Iterable[Place]) -> None:
    """Record the full names of parameters that were pruned without them, once all are present."""
    hooks = [(place, place.hook) for place in places if place.hook is not None]
    present = {hook.member for _, hook in hooks}
    renamed = set()
    for place, hook in hooks:
        hook.refresh_parameter_id(place.module)
        member = hook.member
        if member is None or member.is_full or member in renamed:
            continue
        renamed.add(member)
        if member.group <= present:
            member.label, member.is_full = place.path, True


_UNKNOWN = "what pruned it last is not known (its mask was loaded, or another function made it)"


@dataclass
class Recomputed:
    """The result; the same on every rank.

    Attributes:
        names: parameters whose masks were recomputed.
        problems: what is wrong with these masks, by name of the parameter.
        not_recomputed: "name: reason" for each of the other parameters.
    """

    names: list[str] = field(default_factory=list)
    problems: dict[str, str] = field(default_factory=dict)
    not_recomputed: list[str] = field(default_factory=list)


@dataclass
class _Call:
    """The parameters of one pruning call that are in the model, in the order of the call."""

    members: list[LocalEntry]
    num_pruned: int
    obstacle: str | None
    has_changed: bool


def recompute(entries: Sequence[LocalEntry], communicator: Communicator) -> Recomputed:
    """Repeat the last selection of each parameter, and compare the masks. Collective.

    A selection can be repeated if it was by magnitude alone, of parameters that had no mask
    before, and whose weights have not changed since.

    Cost: for each such call, memory for 17 bytes per element of all its parameters on every
    rank, 16 bytes of communication per element, and a sort.
    """
    calls, unknown = communicator.run(
        lambda: _calls(entries),
        lambda made: [
            (
                "a pruning to recompute",
                f"{[member.name for member in call.members]}, {call.num_pruned}, {call.obstacle}",
            )
            for call in made[0]
        ],
    )
    result = Recomputed(not_recomputed=[f"{name}: {_UNKNOWN}" for name in unknown])
    if not calls:
        return result
    changed = communicator.reduce(
        len(calls), lambda: torch.tensor([int(call.has_changed) for call in calls]), "max"
    ).tolist()
    for call, has_changed in zip(calls, changed, strict=True):
        names = [member.name for member in call.members]
        obstacle = call.obstacle or ("its weights have changed since" if has_changed else None)
        if obstacle is not None:
            result.not_recomputed += [f"{name}: {obstacle}" for name in names]
            continue
        result.names += names
        result.problems |= _compare(call, communicator)
    return result


def _calls(entries: Sequence[LocalEntry]) -> tuple[list[_Call], list[str]]:
    """The calls that pruned these parameters last, and the parameters whose call is unknown."""
    by_token: dict[int, list[tuple[CallRecord, LocalEntry]]] = {}
    unknown = []
    for entry in entries:
        record = entry.hooks[0].call_record if entry.hooks else None
        if record is None or entry.shard is None:
            unknown.append(entry.name)
        else:
            by_token.setdefault(record.token, []).append((record, entry))
    calls = []
    for members in by_token.values():
        members.sort(key=lambda member: member[0].position)
        record, _ = members[0]
        obstacle = record.obstacle
        if obstacle is None and len(members) != record.num_parameters:
            obstacle = (
                f"{record.num_parameters} parameters were ranked together, and "
                f"{len(members)} of them are still pruned by that call in this model"
            )
        has_changed = any(not _is_same(member.sample, entry.shard) for member, entry in members)
        calls.append(
            _Call([entry for _, entry in members], record.num_pruned, obstacle, has_changed)
        )
    return calls, unknown


def _is_same(old_sample: Tensor | None, shard: LocalShard | None) -> bool:
    """Whether a sample of the weights is equal to the sample from the time of the pruning."""
    if old_sample is None or shard is None:
        return False
    sample = shard.sample()
    return sample.shape == old_sample.shape and torch.equal(
        sample, old_sample.to(sample.device, sample.dtype)
    )


def _compare(call: _Call, communicator: Communicator) -> dict[str, str]:
    shards = [member.shard for member in call.members]
    leaders = communicator.reduce(
        len(shards),
        lambda: torch.tensor([leader_of(shard, communicator) for shard in shards]),
        "min",
    ).tolist()
    scores, positions, pruned = [], [], []
    for position, (shard, leader) in enumerate(zip(shards, leaders, strict=True)):
        assert shard is not None and shard.mask is not None
        values = _whole(shard, shard.values, leader, communicator)
        # float64 holds every value of the other floating-point dtypes exactly.
        scores.append(np.abs(values.double().numpy()))
        positions.append(np.full(shard.numel, position))
        pruned.append((_whole(shard, shard.mask, leader, communicator) == 0).numpy())
    # By score, then by position of the parameter, then by index: lexsort's last key comes first.
    indices = np.concatenate([np.arange(part.size) for part in scores])
    order = np.lexsort((indices, np.concatenate(positions), np.concatenate(scores)))
    expected = np.zeros(order.size, dtype=bool)
    expected[order[: call.num_pruned]] = True
    ends = np.cumsum([part.size for part in scores])[:-1]
    problems = {}
    for member, is_pruned, should_be in zip(
        call.members, pruned, np.split(expected, ends), strict=True
    ):
        num_wrong = int(np.count_nonzero(is_pruned != should_be))
        if num_wrong:
            problems[member.name] = (
                f"{num_wrong} of {is_pruned.size} elements of its mask are not those that sorting "
                f"all {order.size} scores of its call gives"
            )
    return problems


def _whole(shard: LocalShard, local: Tensor, leader: int, communicator: Communicator) -> Tensor:
    """A whole tensor, 1-d and row-major, on the CPU, from its parts on all ranks."""
    if shard.ranks is None:  # every rank has all of it
        return local.reshape(-1).cpu()
    integer = INTEGERS[local.itemsize]

    def spread() -> Tensor:
        whole = torch.zeros(shard.numel, dtype=torch.int64)
        if leader_of(shard, communicator) == leader and shard.replica == 0:
            bits = shard.flat(local).contiguous().view(integer)
            whole[shard.index(torch.arange(bits.numel()))] = bits.cpu().long()
        return whole

    return communicator.reduce(shard.numel, spread).to(integer).view(local.dtype)
