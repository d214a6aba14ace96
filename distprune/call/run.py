"""One pruning call: read, agree, decide, attach.

Everything that prunes a sharded parameter, and every global pruning, is
:func:`prune_parameters`. Modules change only after every mask is ready on
every rank; see collectives.[Note: all or none].
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from distprune._common.collectives import Communicator
from distprune._common.report_text import share as share_of
from distprune.call.arguments import ParameterArguments, PruningArguments
from distprune.call.attaching import attach_masks
from distprune.call.collapse import find_collapsed
from distprune.call.comparing import count_live_and_compare
from distprune.call.context import Decision, Divided, PruningCall, Together
from distprune.call.grouping import Grouping
from distprune.call.reading import agree_on_share, read_parameters
from distprune.call.report import ParameterReport, PruningReport
from distprune.call.semi_structured import layout_problem
from distprune.masks.attach import mask_dtype
from distprune.shards.target import Target


def prune_parameters(
    make_arguments: Callable[[], PruningArguments], communicator: Communicator
) -> PruningReport:
    """Decide all masks of a call over all its ranks, then put them on the modules. Collective.

    Args:
        make_arguments: a local step that may fail: makes and checks the arguments.
        communicator: the ranks that take part.

    Raises:
        NotImplementedError: there are bounds or a budget, and the method does not rank.
        Exception: whatever any rank raised, on every rank; no module has changed then.
    """
    started = time.perf_counter()
    # Masks made in inference mode could never be part of a backward.
    with communicator.exclusively(), torch.inference_mode(False):
        arguments, targets = read_parameters(make_arguments, communicator)
        share = agree_on_share(arguments, targets, communicator)
        method = arguments.method
        with torch.no_grad():
            num_live = count_live_and_compare(targets, method.READS_VALUES, communicator)
            decision = method.decide(
                PruningCall(
                    shards=[target.shard for target in targets],
                    scores=[target.scores for target in targets],
                    num_live=num_live,
                    mask_dtypes=[mask_dtype(t.shard.parameter, t.managed) for t in targets],
                    communicator=communicator,
                    normalize=arguments.normalize,
                    share=share,
                )
            )
        if decision.bound_of is None:
            _refuse_options_of_rankings(arguments, share)
        num_pruned = attach_masks(targets, num_live, decision, arguments, communicator)
    entries = _report_each(targets, num_live, num_pruned, decision, share)
    shapes = [target.shard.shape for target in targets]
    is_ranked = decision.bound_of is not None
    return PruningReport(
        method=type(method).__name__,
        amount=arguments.amount,
        parameters=entries,
        threshold=decision.threshold,
        num_ties=decision.num_ties,
        num_ties_pruned=decision.num_ties_pruned,
        num_ranks=communicator.size,
        num_collectives=communicator.num_collectives,
        bytes_sent=communicator.bytes_sent,
        seconds=time.perf_counter() - started,
        collapsed=find_collapsed(entries, shapes) if is_ranked else (),
        no_sparse_layout=_no_sparse_layout(arguments, targets, share),
    )


def count_pruned(
    make_arguments: Callable[[], ParameterArguments], communicator: Communicator
) -> tuple[ParameterReport, ...]:
    """Count what is pruned of every parameter, over all ranks. Collective; changes nothing.

    Args:
        make_arguments, communicator: as in :func:`prune_parameters`.

    Returns:
        A report per parameter, the same on every rank; tied ones are one.

    Raises:
        Exception: whatever any rank raised, on every rank.

    Cost: one read of the masks; an all-reduce of 24 bytes per parameter, and a small one.
    """
    with communicator.exclusively(), torch.inference_mode(False), torch.no_grad():
        _, targets = read_parameters(make_arguments, communicator)
        num_live = count_live_and_compare(targets, False, communicator)
    return tuple(
        ParameterReport(target.label, target.shard.numel, target.shard.numel - live, 0)
        for target, live in zip(targets, num_live, strict=True)
    )


def _refuse_options_of_rankings(arguments: PruningArguments, share: Together | Grouping) -> None:
    """Raise NotImplementedError if a method that does not rank was given what needs a ranking."""
    examples = "L1Unstructured, RandomUnstructured"
    if isinstance(share, Divided):
        what = "budget has"
    elif isinstance(share, Together) and share.bounds is not None:
        what = "min_sparsity and max_sparsity have"
    elif isinstance(share, Grouping):
        what = "scope and pattern have"
    elif arguments.normalize is not None:
        what, examples = f"normalize={arguments.normalize!r} has", "L1Unstructured"
    else:
        return
    raise NotImplementedError(
        f"{type(arguments.method).__name__} does not rank elements by a score, so {what} no "
        f"meaning for it; expected a method that does, such as {examples}, or your own with "
        "DISTRIBUTED = 'scores'."
    )


def _no_sparse_layout(
    arguments: PruningArguments, targets: Sequence[Target], share: Together | Grouping
) -> tuple[tuple[str, str], ...] | None:
    """After 2:4, the parameters that ``to_sparse_semi_structured`` does not take, and why."""
    # Ranks of a pipeline do not know the parameters of others.
    if not isinstance(share, Grouping) or arguments.pipeline_parallel:
        return None
    if share.rule.kept_of != (2, 4):
        return None
    problems = [
        (target.label, layout_problem(target.shard.shape, target.shard.values.dtype, own.dims))
        for target, own in zip(targets, share.parameters, strict=True)
        if own is not None
    ]
    return tuple((label, problem) for label, problem in problems if problem)


def _report_each(
    targets: Sequence[Target],
    num_live: Sequence[int],
    num_pruned: Sequence[int],
    decision: Decision,
    share: Together | Grouping,
) -> tuple[ParameterReport, ...]:
    """What was asked of every parameter, and what was done."""
    bounds = share.bounds if isinstance(share, Together) else None
    entries = []
    for i, target in enumerate(targets):
        size = target.shard.numel
        low, high = (0, size) if bounds is None else (bounds.lowest[i], bounds.highest[i])
        entries.append(
            ParameterReport(
                target.label,
                size,
                size - num_live[i],
                num_pruned[i],
                None if decision.bound_of is None else decision.bound_of[i],
                None if decision.wanted is None else decision.wanted[i],
                share_of(low, size) if low > 0 else None,
                share_of(high, size) if high < size else None,
            )
        )
    return tuple(entries)
