"""``verify``: the check that anyone can run on a pruned model, at any time."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from distprune._common.attempts import Failed, attempt, error_of
from distprune._common.collectives import Communicator
from distprune._common.naming import unwrap
from distprune._common.process_groups import world
from distprune._common.pruned_form import is_dtensor, orig_key
from distprune.masks.hook import PruningHook
from distprune.masks.record import MaskRecord
from distprune.shards.reader import ShardReader
from distprune.shards.shard import LocalShard
from distprune.torch_private import live_property
from distprune.torch_private.wrapper import managed_parameters
from distprune.verification import structure
from distprune.verification.expectations import Expected, Wanted, compare_with_reports, wanted_of
from distprune.verification.measuring import measure
from distprune.verification.reference import Recomputed, recompute
from distprune.verification.report import VerificationError, VerificationReport
from distprune.verification.sharing import Found, Shared, share
from distprune.verification.structure import Place

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


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

    On every rank, in seconds. It changes nothing, so call it whenever there is doubt: after
    loading, after wrapping, before a long run, every thousand steps::

        report = distprune.verify(model)  # raises on every rank if anything is wrong
        if rank == 0:
            print(report)

    Of every parameter that is pruned, or has a trace of a mask that is gone, it checks:

    - that it is pruned on all ranks, and that its hook, its mask and what lets the mask act under
      its wrapper are there: that nothing of it runs dense;
    - that the mask has the parameter's layout, and is binary;
    - that what it masks is the parameter that was pruned, with no other in its place, and that
      no other module uses this parameter unmasked;
    - that pruned elements act as zero;
    - that replicas hold the same mask and the same weight, bit for bit;
    - that the number of pruned elements, and the mask's fingerprint, are those that the last
      pruning left;
    - that whatever was pruned in one call with it is still there, unless it was removed.

    A model in which nothing is pruned does not pass, unless ``expected`` is empty. A module that
    was pruned by itself and then replaced leaves no trace: ``expected`` tells of it.

    Args:
        model: wrapped or not; the same on every rank, but for pipeline stages.
        expected: what has to be pruned: parameters, as ``select`` lists them, or their full
            names; or a report of an earlier pruning or verification, of parameters with full names,
            whose counts (and fingerprints) have to be those of now. By default what has a trace
            of pruning.
        accept: take the masks as they are for those of the last pruning, if nothing else is
            wrong, and do not miss modules that are gone: after ``load_state_dict`` of other masks,
            or a change by hand, that was meant. (``checkpoint.load`` loads what was known of the
            masks that it loads.)
        reference: right after a pruning, also repeat its selection by an independent, slow way:
            gather all weights on every rank and sort them. That is possible for masks that
            ``L1Unstructured`` made in one call, without scores and bounds, on parameters that were
            not pruned before and have not changed since; the report names all others, with the
            reason. It takes 17 bytes of memory and 16 of communication per element.
        raise_errors: raise if anything is wrong. If False, only the report tells.
        group: the ranks that take part; every rank by default. Collective.
        pipeline_parallel: ranks have different parameters, with full names, as for
            ``global_unstructured``.
        prefix: where ``model`` is in a larger one, as for ``select``.

    Returns:
        A report, the same on every rank.

    Raises:
        VerificationError: something is wrong; on every rank, with the same text, which names
            parameters and ranks, and the report as ``.report``.
        TypeError, ValueError: arguments of a wrong type, or that differ between the ranks.

    Cost: two reads of the masks and one of the weights, or two of weights that have replicas; no
    memory. About 200 bytes of communication per parameter in 4 all-reduces; more if something is
    wrong.
    """

    def find() -> Local:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model is a {type(model).__name__}; expected a torch.nn.Module.")
        wanted = None if expected is None else wanted_of(expected)
        managed_parameters(model)  # FSDP1 modules become known
        places = structure.places_of(model, prefix)
        if accept:
            _refresh(places)
        return _inspected(places, wanted, communicator, pipeline_parallel, model, accept)

    communicator = world(group)
    return _verified(
        find,
        communicator,
        is_expected_given=expected is not None,
        accept=accept,
        reference=reference,
        raise_errors=raise_errors,
        pipeline_parallel=pipeline_parallel,
        prefix=prefix,
    )


def verify_parameters(
    parameters: Sequence[tuple[nn.Module, str]],
    communicator: Communicator,
    *,
    pruned: Sequence[tuple[nn.Module, str]],
    pipeline_parallel: bool = False,
) -> VerificationReport:
    """:func:`verify` for single parameters, by ranks that talk to each other already.

    What only the whole model shows, such as a module that was replaced in it, is not looked for.

    Args:
        parameters: (module, name) pairs.
        pruned: those of them that have to be.
    """

    def find() -> Local:
        places: dict[tuple[int, str], Place] = {}
        for position, pair in enumerate(parameters):
            path = getattr(pair, "fqn", f"{type(pair[0]).__name__}.{pair[1]} (#{position})")
            for module, name in getattr(pair, "places", (tuple(pair),)):
                module = unwrap(module)
                if structure.is_traced(module, name):
                    found = structure.place(module, name, path)
                    places.setdefault((id(module), name), found)
        wanted = wanted_of(pruned)
        return _inspected(list(places.values()), wanted, communicator, pipeline_parallel, None)

    return _verified(
        find, communicator, is_expected_given=True, pipeline_parallel=pipeline_parallel
    )


@dataclass
class Local:
    """What one rank found.

    Attributes:
        hooks: of each parameter, under all its names.
        wanted: what has to be pruned, with what it has to be.
    """

    found: list[Found]
    hooks: dict[str, list[tuple[nn.Module, PruningHook]]]
    problems: list[str] = field(default_factory=list)
    wanted: list[Wanted] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)


def _verified(
    find: Callable[[], Local],
    communicator: Communicator,
    *,
    is_expected_given: bool,
    accept: bool = False,
    reference: bool = False,
    raise_errors: bool = True,
    pipeline_parallel: bool = False,
    prefix: str = "",
) -> VerificationReport:
    started = time.perf_counter()
    with communicator.exclusively(), torch.inference_mode(False), torch.no_grad():
        facts = [
            ("accept", str(accept)),
            ("reference", str(reference)),
            ("expected", "given" if is_expected_given else "None"),
            ("pipeline_parallel", str(pipeline_parallel)),
        ]
        local = communicator.run(find, lambda _: facts)
        shared, of_model = share(
            local.found, local.problems, communicator, pipeline_parallel=pipeline_parallel
        )
        recomputed = Recomputed()
        if reference and not of_model and not any(entry.problems for entry in shared):
            hooks = {name: [hook for _, hook in each] for name, each in local.hooks.items()}
            found = [] if pipeline_parallel else local.found
            recomputed = recompute(found, hooks, communicator)
            for entry in shared:
                if entry.name in recomputed.problems:
                    entry.problems.append(recomputed.problems[entry.name])
    if not shared and not is_expected_given:
        of_model.append(
            "nothing is pruned, and nothing has a trace of it. If parameters should be, prune "
            "them, or load a checkpoint with checkpoint.load, which gives a fresh model its masks; "
            "expected=() lets a dense model pass"
        )
    if accept:
        _accept(shared, local)
    compare_with_reports(shared, local.wanted)
    report = VerificationReport(
        tuple(entry.entry() for entry in shared),
        tuple(of_model),
        communicator.size,
        communicator.num_collectives,
        communicator.bytes_sent,
        time.perf_counter() - started,
        tuple(recomputed.names),
        tuple(recomputed.not_recomputed),
    )
    if report.ok:
        _remember_names(local.places, prefix)
    elif raise_errors:
        raise VerificationError(report)
    return report


def _inspected(
    places: list[Place],
    wanted: list[Wanted] | None,
    communicator: Communicator,
    pipeline_parallel: bool,
    model: nn.Module | None,
    accept: bool = False,
) -> Local:
    """Everything that this rank can tell alone."""
    reader, managed = ShardReader(), managed_parameters(model)
    found: dict[Hashable, Found] = {}
    local = Local([], {}, wanted=wanted or [], places=places)
    taken: set[str] = set()
    for place in places:
        checked = attempt(structure.check, place, reader, managed)
        outcome: LocalShard | Failed | None = checked
        if not isinstance(checked, Failed) and place.is_readable:
            outcome = attempt(reader.read, place.module, place.name, place.path)
        shard = None if isinstance(outcome, Failed) else outcome
        problem = error_of(outcome)
        if problem is not None:
            place.problems.append(f"cannot be read: {type(problem).__name__}: {problem}")
        key: Hashable = (id(place.module), place.name) if shard is None else shard.key
        entry = found.get(key)
        if entry is None:
            name = _unique(_name_of(place, pipeline_parallel), taken)
            entry = found[key] = Found(name)
            if shard is not None:
                _measure(entry, place, shard, communicator, managed)
        elif shard is not None:
            _compare_tied(entry, place, shard)
        hook = place.hook
        if hook is not None:
            hooks = local.hooks.setdefault(entry.name, [])
            if hooks and hook.record != entry.record:
                entry.problems.append("its hooks know of different last prunings of it")
            entry.record = hook.record
            hooks.append((place.module, hook))
        also = "" if place.path == entry.name or pipeline_parallel else f"as {place.path}, "
        entry.problems += [also + text for text in place.problems]
    if model is not None:
        for text in structure.dense_places(model, places):
            name, _, what = text.partition(": ")
            by_path = [each for each in found.values() if each.name == name]
            (by_path[0].problems if by_path else local.problems).append(what)
    local.found = list(found.values())
    absent = [] if model is None else structure.missing_members(model, places, forget=accept)
    _add_missing(local, places, wanted, absent)
    return local


def _name_of(place: Place, pipeline_parallel: bool) -> str:
    """Stages are joined by the names that they had when they were pruned together."""
    member = None if place.hook is None else place.hook.member
    return member.label if pipeline_parallel and member and member.is_full else place.path


def _unique(name: str, taken: set[str]) -> str:
    unique, number = name, 1
    while unique in taken:
        number += 1
        unique = f"{name} ({number})"
    taken.add(unique)
    return unique


def _measure(
    entry: Found, place: Place, shard: LocalShard, communicator: Communicator, managed: Any
) -> None:
    if shard.mask is None:
        entry.problems.append("its mask cannot be found")
        return
    is_on_part = shard.ranks is None or len(shard.ranks) < communicator.size
    has_replicas = shard.num_replicas > 1 or (communicator.size > 1 and is_on_part)
    product = _product(place, shard)
    numbers = attempt(lambda: measure(shard, product, compares_weight=has_replicas))
    if isinstance(numbers, Failed):
        error = numbers.error
        entry.problems.append(f"cannot be read: {type(error).__name__}: {error}")
        return
    entry.shard, entry.numbers = shard, numbers
    entry.problems += numbers.problems


def _product(place: Place, shard: LocalShard) -> Tensor | None:
    """The masked weight that is there now, like the shard; None if it is made when it is read."""
    module, name = place.module, place.name
    if live_property.is_live(module, name):
        gathered = module._parameters.get(orig_key(name))
        is_gathered = type(gathered) is nn.Parameter and shard.mesh is not None
        if not is_gathered or gathered is None or gathered.shape != shard.shape:
            return None
        return shard.slice_of(gathered.detach())
    product = module.__dict__.get(name)
    # After .to() the product is on the old device, in the old dtype, until the next forward.
    is_of_now = (
        isinstance(product, Tensor)
        and product.shape == shard.values.shape
        and product.dtype == shard.values.dtype
        and product.device == shard.values.device
        and not is_dtensor(product)
    )
    return product if is_of_now else None


def _compare_tied(entry: Found, place: Place, shard: LocalShard) -> None:
    first = None if entry.shard is None else entry.shard.mask
    if first is None or shard.mask is None or first is shard.mask:
        return
    if first.shape != shard.mask.shape or not torch.equal(first != 0, shard.mask != 0):
        place.problems.append("it is tied, and has another mask than under its first name")


def _add_missing(
    local: Local, places: list[Place], wanted: list[Wanted] | None, absent: list[str]
) -> None:
    """Enter what should be pruned, and is not."""
    gone = "it was pruned together with others, and is not pruned any more"
    missing = dict.fromkeys(absent, gone)
    paths = {place.path for place in places}
    held = {(id(place.module), place.name) for place in places}
    for each in wanted or ():
        if each.places is None:
            is_there = each.name in paths
        else:
            is_there = any((id(module), name) in held for module, name in each.places)
        if not is_there:
            missing.setdefault(each.name, "it is expected to be pruned, and is not")
    known = {found.name: found for found in local.found}
    for name, text in missing.items():
        if name in known:
            known[name].problems.append(text)
        else:
            local.found.append(Found(name, problems=[text]))


def _refresh(places: Sequence[Place]) -> None:
    """Compute masked weights anew, as the next forward will do."""
    for place in places:
        product = place.module.__dict__.get(place.name)
        if isinstance(product, Tensor) and place.hook is not None:
            with torch.enable_grad():
                setattr(place.module, place.name, place.hook.apply_mask(place.module))


def _accept(shared: list[Shared], local: Local) -> None:
    """Take what is there for what the last pruning left, where nothing else is wrong."""
    for entry in shared:
        if entry.problems:
            continue
        entry.record_problem = None
        for _, hook in local.hooks.get(entry.name, ()):
            hook.record = MaskRecord(entry.fingerprint, entry.num_pruned)


def _remember_names(places: Sequence[Place], prefix: str) -> None:
    """Now that all are there: where parameters are that were pruned without full names."""
    seen = set()
    for place in places:
        if place.hook is None:
            continue
        place.hook.note_again(place.module)
        member = place.hook.member
        if member is None or member.is_full or member in seen:
            continue
        seen.add(member)
        if member.group <= {p.hook.member for p in places if p.hook is not None}:
            member.label, member.is_full = place.path, True
