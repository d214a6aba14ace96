"""The stages of one pruning call, in order: read, agree, decide, attach, agree.

Everything that prunes a sharded parameter, and every global pruning, goes
through :func:`prune_together`. Modules change only after every mask is ready on
every rank; see collectives.[Note: all or none].
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from distprune.bounds import SparsityBound
from distprune.call import Decision, PruningCall
from distprune.checksum import checksums
from distprune.collectives import Communicator, attempt
from distprune.fingerprint import fingerprint_part
from distprune.masking.attach import Transaction
from distprune.masking.hook import PruningHook, find_hook
from distprune.masking.record import MaskRecord, Member, join
from distprune.passes import count_each_live
from distprune.reading import read_together
from distprune.report import ParameterReport, PruningReport
from distprune.target import Scores, Target


class DecidesMasks(Protocol):
    """What the pipeline asks of a pruning method."""

    READS_VALUES: bool

    def decide(self, call: PruningCall) -> Decision:
        """Masks for all parameters of a call. Collective: the same steps on every rank."""
        ...


# (module, name) -> what to register on the module
MakeHook = Callable[[nn.Module, str], PruningHook]


def prune_together(
    parameters: Iterable[tuple[nn.Module, str]],
    method: DecidesMasks,
    make_hook: MakeHook,
    communicator: Communicator,
    *,
    scores: Scores | None = None,
    facts: Sequence[tuple[str, str]] = (),
    error: Exception | None = None,
    amount: float | int | None = None,
    min_sparsity: SparsityBound | None = None,
    max_sparsity: SparsityBound | None = None,
    pipeline_parallel: bool = False,
) -> PruningReport:
    """Decide all masks of a call over all its ranks, then put them on the modules.

    Args:
        parameters: (module, name) pairs, the same on every rank unless ``pipeline_parallel``.
        method: decides; None on a rank where it could not be made (then ``error``).
        make_hook: makes what is registered on a module.
        communicator: the ranks that take part.
        scores: importance scores by (module, name): like the parameter, or whole.
        facts: arguments that must be equal on all ranks.
        error: what went wrong on this rank before the call.
        amount: for the report.
        min_sparsity, max_sparsity: bounds of single parameters, as given by the caller.
        pipeline_parallel: ranks have lists of their own, which are joined by name.

    Raises:
        NotImplementedError: there are bounds, and the method knows none.
        Exception: whatever any rank raised, on every rank; no module has changed then.
    """
    started = time.perf_counter()
    # Masks made in inference mode could never be part of a backward.
    with torch.inference_mode(False):
        targets, bounds = read_together(
            parameters,
            scores,
            communicator,
            facts,
            error,
            min_sparsity,
            max_sparsity,
            pipeline_parallel=pipeline_parallel,
        )
        with torch.no_grad():
            num_live = _count_and_compare(targets, method.READS_VALUES, communicator)
            call = PruningCall(
                shards=[target.shard for target in targets],
                scores=[target.scores for target in targets],
                num_live=num_live,
                mask_dtypes=[_mask_dtype(target) for target in targets],
                communicator=communicator,
                bounds=bounds,
            )
            decision = method.decide(call)
        held_at = decision.held_at
        if held_at is None:
            held_at = [None] * len(targets)
            if bounds is not None:
                raise NotImplementedError(
                    f"{type(method).__name__} does not rank elements by a score, so min_sparsity "
                    "and max_sparsity have no meaning for it; expected a method that does, such as "
                    "L1Unstructured, RandomUnstructured, or your own with DISTRIBUTED = 'scores'."
                )
        num_pruned = _attach_everywhere(targets, num_live, decision, make_hook, communicator)
    return PruningReport(
        method=type(method).__name__,
        amount=amount,
        parameters=tuple(
            ParameterReport(t.label, t.shard.numel, t.shard.numel - live, pruned, held)
            for t, live, pruned, held in zip(targets, num_live, num_pruned, held_at, strict=True)
        ),
        threshold=decision.threshold,
        num_ties=decision.num_ties,
        num_ties_pruned=decision.num_ties_pruned,
        num_ranks=communicator.size,
        num_collectives=communicator.num_collectives,
        bytes_sent=communicator.bytes_sent,
        seconds=time.perf_counter() - started,
    )


def count_pruned(
    parameters: Iterable[tuple[nn.Module, str]],
    communicator: Communicator,
    *,
    facts: Sequence[tuple[str, str]] = (),
    error: Exception | None = None,
    pipeline_parallel: bool = False,
) -> tuple[ParameterReport, ...]:
    """How much of every parameter is pruned, over all ranks; changes nothing.

    Args:
        parameters, communicator, facts, error, pipeline_parallel: as in :func:`prune_together`.

    Returns:
        A report per parameter, the same on every rank; tied ones are one.

    Raises:
        Exception: whatever any rank raised, on every rank.

    Cost: one read of the masks; an all-reduce of 24 bytes per parameter, and a small one.
    """
    with torch.inference_mode(False), torch.no_grad():
        targets, _ = read_together(
            parameters, None, communicator, facts, error, pipeline_parallel=pipeline_parallel
        )
        num_live = _count_and_compare(targets, False, communicator)
    return tuple(
        ParameterReport(target.label, target.shard.numel, target.shard.numel - live, 0)
        for target, live in zip(targets, num_live, strict=True)
    )


def _count_and_compare(
    targets: Sequence[Target], reads_values: bool, communicator: Communicator
) -> list[int]:
    """Unpruned elements of every parameter; raises if replicas of one differ.

    One all-reduce of 24 bytes per parameter. Replicas are compared by checksums:
    their sum over all ranks is the number of replicas times that of the first.
    """

    def count() -> list[list[int]]:
        shards = [target.shard for target in targets]
        live = count_each_live(
            [None if shard.mask is None else shard.flat(shard.mask) for shard in shards],
            [shard.counted for shard in shards],
        )
        # What is compared: values and mask of every replicated parameter.
        compared = [_compared(target, reads_values) for target in targets]
        sums = iter(checksums([tensor for tensors in compared for tensor in tensors]))
        rows = []
        for shard, num_live, tensors in zip(shards, live, compared, strict=True):
            both = sum((1 + 2 * i) * next(sums) for i in range(len(tensors)))
            first = both if shard.replica == 0 else 0
            rows.append([num_live, _wrap(both), _wrap(first)])
        return rows

    rows, error = attempt(count)
    failed = [int(error is not None), 0, 0]
    rows = [failed, *(rows or [[0, 0, 0]] * len(targets))]
    (num_failed, _, _), *shared = communicator.sum(torch.tensor(rows, dtype=torch.int64)).tolist()
    if num_failed:
        communicator.agree(error=error)
    for target, (_, everywhere, first) in zip(targets, shared, strict=True):
        if _wrap(first * target.shard.num_replicas) != everywhere:
            raise ValueError(
                f"{target.label}: the ranks hold replicas of this parameter (or of its scores or "
                "mask) that differ; expected equal ones, as under DistributedDataParallel. "
                "Broadcast them from one rank first. If the ranks prune models of their own, pass "
                "a group that holds only the calling rank; if they are meant to differ in a part "
                "(experts), pass pipeline_parallel=True and names that tell these parts apart."
            )
    return [live for live, _, _ in shared]


def _compared(target: Target, reads_values: bool) -> list[Tensor]:
    shard = target.shard
    if shard.num_replicas == 1:
        return []
    ranked = [shard.values if target.scores is None else target.scores] if reads_values else []
    return ranked if shard.mask is None else [*ranked, shard.mask]


def _wrap(value: int) -> int:
    """As int64 arithmetic wraps."""
    return (value + 2**63) % 2**64 - 2**63


def _mask_dtype(target: Target) -> torch.dtype:
    """As torch has it, but bool under FSDP, where the mask is not part of the graph."""
    return torch.bool if target.managed is not None else target.shard.values.dtype


def _attach_everywhere(
    targets: Sequence[Target],
    num_live: Sequence[int],
    decision: Decision,
    make_hook: MakeHook,
    communicator: Communicator,
) -> list[int]:
    """Change the modules on every rank, or on none; newly pruned elements per parameter."""
    transaction = Transaction()
    attached: list[list[PruningHook]] = [[] for _ in targets]

    def attach() -> None:
        for target, local_mask, hooks in zip(targets, decision.masks, attached, strict=True):
            mask = target.shard.as_parameter_layout(local_mask)
            for module, name in target.places:
                present = find_hook(module, name)
                earlier.append(None if present is None else present[1].member)
                hook = make_hook(module, name)
                hooks.append(hook)
                transaction.attach(module, name, hook, mask, target.managed)
                if target.is_tied and target.managed is None:
                    hook.tied_places = target.places

    earlier: list[Member | None] = []
    _, error = attempt(attach)
    parts = [
        int(fingerprint_part(t.shard, mask)) if t.shard.replica == 0 else 0
        for t, mask in zip(targets, decision.masks, strict=True)
    ]
    counts = [int(error is not None), *decision.num_pruned, *parts]
    shared = communicator.sum(torch.tensor(counts, dtype=torch.int64)).tolist()
    if shared[0]:
        transaction.rollback()
        communicator.agree(error=error)
    num_pruned, fingerprints = shared[1 : len(targets) + 1], shared[len(targets) + 1 :]
    members = []
    for target, live, pruned, fingerprint, hooks in zip(
        targets, num_live, num_pruned, fingerprints, attached, strict=True
    ):
        record = MaskRecord(fingerprint, target.shard.numel - live + pruned)
        first = target.places[0][0] if target.places else None
        members.append(Member(target.label, target.is_named, first))
        for hook in hooks:
            hook.record, hook.member = record, members[-1]
    join(members, earlier)
    return num_pruned
