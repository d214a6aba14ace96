"""New masks are put on the modules: on all ranks, or on none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from distprune._common.collectives import Communicator
from distprune._common.memory import on_host
from distprune.call.arguments import PruningArguments
from distprune.call.comparing import for_comparison, is_on_rank
from distprune.call.context import Decision
from distprune.masks.attach import Transaction
from distprune.masks.hook import PruningHook, find_hook
from distprune.masks.record import CallRecord, MaskRecord, Member, fingerprint_part, join, new_token
from distprune.shards.checksum import replicas_agree
from distprune.shards.target import Target


def attach_masks(
    targets: Sequence[Target],
    num_live: Sequence[int],
    decision: Decision,
    arguments: PruningArguments,
    communicator: Communicator,
) -> list[int]:
    """Write the masks and put them on the modules: on every rank, or on none.

    Returns:
        Newly pruned elements of every whole parameter.

    Raises:
        Exception: what any rank raised, on every rank; every module is as before.
        ValueError: replicas would get different masks.

    Cost: one write of the masks; an all-reduce of 32 bytes per parameter, of counts, fingerprints,
    and whether replicas have the same masks.
    """
    call_record = _call_record(decision, targets, num_live, arguments.pipeline_parallel)
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
                hook = arguments.make_hook(module, name)
                transaction.attach(module, name, hook, mask, target.managed)
                if target.is_tied and target.managed is None:
                    hook.tied_places = target.places
                of_target.append(hook)
        rows = []
        for target, pruned, part in zip(targets, local.num_pruned, on_host(parts), strict=True):
            shard = target.shard
            is_first = shard.replica == 0 and is_on_rank(shard, rank)
            of_replica = for_comparison(shard, rank, part)
            rows.append([pruned, part if is_first else 0, *of_replica])
        return torch.tensor(rows, dtype=torch.int64).view(-1)

    try:
        shared = communicator.reduce(4 * len(targets), finish_and_attach).view(-1, 4).tolist()
        _check_replicas(targets, shared)
    except BaseException:  # also of the network: another rank may be gone
        transaction.rollback()
        raise
    call_record = replace(call_record, num_pruned=sum(pruned for pruned, *_ in shared))
    members = []
    for target, live, of_target, row in zip(targets, num_live, hooks, shared, strict=True):
        pruned, fingerprint, *_ = row
        first = target.places[0][0] if target.places else None
        members.append(Member(target.label, target.is_named, first))
        for hook in of_target:
            hook.record = MaskRecord(fingerprint, target.shard.numel - live + pruned)
            hook.member = members[-1]
            position = len(members) - 1
            hook.call_record = replace(call_record, position=position, sample=samples[position])
    join(members, earlier)
    return [pruned for pruned, *_ in shared]


def _check_replicas(targets: Sequence[Target], rows: Sequence[Sequence[int]]) -> None:
    for target, (_, _, of_all, of_first) in zip(targets, rows, strict=True):
        if not replicas_agree(target.shard.num_replicas, of_all, of_first):
            raise ValueError(
                f"{target.label}: replicas of this parameter would get different masks; "
                "expected the same on each, as their weights are equal. A method of your own "
                "has to give every rank the same mask for the same scores, and tensors among "
                "its arguments have to be equal on all ranks."
            )


def _call_record(
    decision: Decision, targets: Sequence[Target], num_live: Sequence[int], is_joined: bool
) -> CallRecord:
    """How the masks of a call were chosen, for ``verify``, which can repeat it."""
    obstacle = None
    if not decision.is_by_magnitude:
        obstacle = "it was not pruned by magnitude alone"
    elif any(live != target.shard.numel for target, live in zip(targets, num_live, strict=True)):
        obstacle = "a parameter of its call was pruned before, and that mask is gone"
    elif is_joined:
        obstacle = "the ranks may have different parameters (pipeline_parallel)"
    return CallRecord(new_token(), 0, len(targets), 0, None, obstacle)
