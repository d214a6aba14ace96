"""``verify``: the check that anyone can run on a pruned model, at any time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from distprune._common.collectives import Communicator
from distprune._common.naming import label_of, tied_places
from distprune._common.process_groups import world
from distprune.masks.record import MaskRecord
from distprune.torch_private.wrapper import managed_parameters
from distprune.verification.entries import SharedEntry
from distprune.verification.expectations import (
    Expected,
    compare_with_reports,
    expected_parameters,
)
from distprune.verification.inspecting import LocalFindings, inspect
from distprune.verification.places import Place, is_traced, place_of, places_of
from distprune.verification.reference import Recomputed, recompute
from distprune.verification.report import VerificationError, VerificationReport
from distprune.verification.sharing import share

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
        required = [] if expected is None else expected_parameters(expected)
        managed_parameters(model)  # registers FSDP1 modules
        places = places_of(model, prefix)
        if accept:
            _refresh(places)
        return inspect(
            places,
            required,
            communicator,
            pipeline_parallel=pipeline_parallel,
            model=model,
            forget_missing=accept,
        )

    communicator = world(group)
    return _verified(
        inspect_model,
        communicator,
        is_expected_given=expected is not None,
        accept=accept,
        reference=reference,
        raise_errors=raise_errors,
        pipeline_parallel=pipeline_parallel,
    )


def verify_parameters(
    parameters: Sequence[tuple[nn.Module, str]],
    communicator: Communicator,
    *,
    pruned: Sequence[tuple[nn.Module, str]],
    pipeline_parallel: bool = False,
) -> VerificationReport:
    """:func:`verify` for single parameters.

    Problems that only the whole model shows, such as a replaced module, are not found.
    """

    def inspect_parameters() -> LocalFindings:
        places: dict[tuple[int, str], Place] = {}
        for position, pair in enumerate(parameters):
            path = label_of(pair, position)
            for module, name in tied_places(pair):
                if is_traced(module, name):
                    places.setdefault((id(module), name), place_of(module, name, path))
        return inspect(
            list(places.values()),
            expected_parameters(pruned),
            communicator,
            pipeline_parallel=pipeline_parallel,
        )

    return _verified(
        inspect_parameters,
        communicator,
        is_expected_given=True,
        pipeline_parallel=pipeline_parallel,
    )


def _verified(
    inspect_locally: Callable[[], LocalFindings],
    communicator: Communicator,
    *,
    is_expected_given: bool,
    accept: bool = False,
    reference: bool = False,
    raise_errors: bool = True,
    pipeline_parallel: bool = False,
) -> VerificationReport:
    started = time.perf_counter()
    with communicator.exclusively(), torch.inference_mode(False), torch.no_grad():
        facts = [
            ("accept", str(accept)),
            ("reference", str(reference)),
            ("expected", "given" if is_expected_given else "None"),
            ("pipeline_parallel", str(pipeline_parallel)),
        ]
        local = communicator.run(inspect_locally, lambda _: facts)
        shared, model_problems = share(
            local.entries, local.problems, communicator, pipeline_parallel=pipeline_parallel
        )
        recomputed = Recomputed()
        if reference and not model_problems and not any(entry.problems for entry in shared):
            hooks = {name: [hook for _, hook in pairs] for name, pairs in local.hooks.items()}
            entries = [] if pipeline_parallel else local.entries
            recomputed = recompute(entries, hooks, communicator)
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
    compare_with_reports(shared, local.expected)
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


def _refresh(places: Sequence[Place]) -> None:
    """Recompute the masked weights, as the next forward will do."""
    for place in places:
        product = place.module.__dict__.get(place.name)
        if isinstance(product, Tensor) and place.hook is not None:
            with torch.enable_grad():
                setattr(place.module, place.name, place.hook.apply_mask(place.module))


def _accept(shared: Sequence[SharedEntry], local: LocalFindings) -> None:
    """Record the present masks as those of the last pruning, where nothing else is wrong."""
    for entry in shared:
        if entry.problems:
            continue
        entry.record_problem = None
        for _, hook in local.hooks.get(entry.name, ()):
            hook.record = MaskRecord(entry.fingerprint, entry.num_pruned)


def _remember_names(places: Sequence[Place]) -> None:
    """Record the full names of parameters that were pruned without them, once all are present."""
    hooks = [(place, place.hook) for place in places if place.hook is not None]
    present = {hook.member for _, hook in hooks}
    renamed = set()
    for place, hook in hooks:
        hook.note_again(place.module)
        member = hook.member
        if member is None or member.is_full or member in renamed:
            continue
        renamed.add(member)
        if member.group <= present:
            member.label, member.is_full = place.path, True
