"""Repeat the last selection in an independent way: gather everything, sort it, compare the masks.

This shares no code with the selection that it checks, uses no thresholds, and needs memory
and traffic for whole parameters. A selection that it cannot repeat is listed with the reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from distprune._common.collectives import Communicator
from distprune._common.memory import INTEGERS
from distprune.masks.record import CallRecord
from distprune.shards.shard import LocalShard
from distprune.verification.inspecting import LocalEntry
from distprune.verification.report import leader_of

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
    result = Recomputed()

    def plan() -> list[_Call]:
        calls, unknown = _calls(entries)
        result.not_recomputed += [f"{name}: {_UNKNOWN}" for name in unknown]
        return calls

    calls = communicator.run(plan, _describe)
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


def _calls(
    entries: Sequence[LocalEntry],
) -> tuple[list[_Call], list[str]]:
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


def _describe(calls: Sequence[_Call]) -> list[tuple[str, str]]:
    return [
        (
            "a pruning to recompute",
            f"{[member.name for member in call.members]}, {call.num_pruned}, {call.obstacle}",
        )
        for call in calls
    ]


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
