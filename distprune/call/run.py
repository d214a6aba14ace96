"""The stages of one pruning call, in order: read, agree, decide, attach, agree.

Everything that prunes a sharded parameter, and every global pruning, goes
through :func:`prune_together`. Modules change only after every mask is ready on
every rank; see collectives.[Note: all or none].
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor, nn

from distprune._common.bounds import SparsityBound
from distprune._common.collectives import Communicator
from distprune._common.memory import on_host
from distprune.call.context import Decision, PruningCall
from distprune.call.reading import read_together
from distprune.call.report import ParameterReport, PruningReport
from distprune.masks.attach import Transaction
from distprune.masks.fingerprint import fingerprint_part
from distprune.masks.hook import PruningHook, find_hook
from distprune.masks.record import MaskRecord, Member, Selection, join, new_token
from distprune.selection.passes import count_each_live
from distprune.shards.checksum import checksums, of_shard, replicas_agree
from distprune.shards.shard import LocalShard
from distprune.shards.target import Scores, Target


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
    error: BaseException | None = None,
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
    with communicator.exclusively(), torch.inference_mode(False):
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
        selection = _selection(decision, targets, num_live, pipeline_parallel)
        num_pruned = _attach_everywhere(
            targets, num_live, decision, selection, make_hook, communicator
        )
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
    error: BaseException | None = None,
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
    with communicator.exclusively(), torch.inference_mode(False), torch.no_grad():
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

    One all-reduce of 24 bytes per parameter; see checksum.[Note: no differences cancel].
    """

    def count() -> Tensor:
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
            of_replica = _for_comparison(shard, communicator.rank, *(next(sums) for _ in tensors))
            rows.append([num_live, *of_replica])
        return torch.tensor(rows, dtype=torch.int64).view(-1)

    shared = communicator.reduce(3 * len(targets), count).view(-1, 3).tolist()
    for target, (_, of_all, of_first) in zip(targets, shared, strict=True):
        if not replicas_agree(target.shard.num_replicas, of_all, of_first):
            raise ValueError(
                f"{target.label}: the ranks hold replicas of this parameter (or of its scores or "
                "mask) that differ; expected equal ones, as under DistributedDataParallel. "
                "Broadcast them from one rank first. If the ranks prune models of their own, pass "
                "a group that holds only the calling rank; if they are meant to differ in a part "
                "(experts), pass pipeline_parallel=True and names that tell these parts apart."
            )
    return [live for live, _, _ in shared]


def _for_comparison(shard: LocalShard, rank: int, *parts: int) -> tuple[int, int]:
    """What a rank adds to the sums over all ranks, and over those that hold replica 0."""
    if shard.num_replicas == 1 or not _is_held(shard, rank):
        return 0, 0
    mixed = of_shard(shard, *parts)
    return mixed, mixed if shard.replica == 0 else 0


def _is_held(shard: LocalShard, rank: int) -> bool:
    """Whether a rank has a part of a parameter: not if it is outside of the parameter's mesh."""
    return shard.ranks is None or rank in shard.ranks


def _compared(target: Target, reads_values: bool) -> list[Tensor]:
    shard = target.shard
    if shard.num_replicas == 1:
        return []
    ranked = [shard.values if target.scores is None else target.scores] if reads_values else []
    return ranked if shard.mask is None else [*ranked, shard.mask]


def _mask_dtype(target: Target) -> torch.dtype:
    """As torch has it, but bool under FSDP, where the mask is not part of the graph."""
    return torch.bool if target.managed is not None else target.shard.values.dtype


def _attach_everywhere(
    targets: Sequence[Target],
    num_live: Sequence[int],
    decision: Decision,
    selection: Selection,
    make_hook: MakeHook,
    communicator: Communicator,
) -> list[int]:
    """Change the modules on every rank, or on none; newly pruned elements per parameter.

    One all-reduce of 32 bytes per parameter: counts, fingerprints, and whether replicas have
    the same masks. If it fails, on whatever rank, every module is as before.
    """
    transaction = Transaction()
    hooks: list[list[PruningHook]] = [[] for _ in targets]
    earlier: list[Member | None] = []
    samples: list[Tensor] = []
    rank = communicator.rank

    def finish_and_attach() -> Tensor:
        local = decision.finish()
        parts = []
        for target, local_mask, of_target in zip(targets, local.masks, hooks, strict=True):
            parts.append(fingerprint_part(target.shard, local_mask))
            samples.append(target.shard.sample())
            mask = target.shard.as_parameter_layout(local_mask)
            for module, name in target.places:
                present = find_hook(module, name)
                earlier.append(None if present is None else present[1].member)
                hook = make_hook(module, name)
                transaction.attach(module, name, hook, mask, target.managed)
                if target.is_tied and target.managed is None:
                    hook.tied_places = target.places
                of_target.append(hook)
        rows = []
        for target, pruned, part in zip(targets, local.num_pruned, on_host(parts), strict=True):
            shard = target.shard
            is_first = shard.replica == 0 and _is_held(shard, rank)
            of_replica = _for_comparison(shard, rank, part)
            rows.append([pruned, part if is_first else 0, *of_replica])
        return torch.tensor(rows, dtype=torch.int64).view(-1)

    try:
        shared = communicator.reduce(4 * len(targets), finish_and_attach).view(-1, 4).tolist()
        for target, (_, _, of_all, of_first) in zip(targets, shared, strict=True):
            if not replicas_agree(target.shard.num_replicas, of_all, of_first):
                raise ValueError(
                    f"{target.label}: replicas of this parameter would get different masks; "
                    "expected the same on each, as their weights are equal. A method of your own "
                    "has to give every rank the same mask for the same scores, and tensors among "
                    "its arguments have to be equal on all ranks."
                )
    except BaseException:  # also of the network: another rank may be gone
        transaction.rollback()
        raise
    selection = replace(selection, num_pruned=sum(pruned for pruned, *_ in shared))
    members = []
    for target, live, of_target, row in zip(targets, num_live, hooks, shared, strict=True):
        pruned, fingerprint, *_ = row
        first = target.places[0][0] if target.places else None
        members.append(Member(target.label, target.is_named, first))
        for hook in of_target:
            hook.record = MaskRecord(fingerprint, target.shard.numel - live + pruned)
            hook.member = members[-1]
            position = len(members) - 1
            hook.selection = replace(selection, position=position, sample=samples[position])
    join(members, earlier)
    return [pruned for pruned, *_ in shared]


def _selection(
    decision: Decision, targets: Sequence[Target], num_live: Sequence[int], is_joined: bool
) -> Selection:
    """How the masks of a call were chosen, for who wants to repeat it."""
    obstacle = None
    if not decision.is_by_magnitude:
        obstacle = "it was not pruned by magnitude alone"
    elif any(live != target.shard.numel for target, live in zip(targets, num_live, strict=True)):
        obstacle = "a parameter of its call was pruned before, and that mask is gone"
    elif is_joined:
        obstacle = "the ranks may have different parameters (pipeline_parallel)"
    return Selection(new_token(), 0, len(targets), 0, None, obstacle)
