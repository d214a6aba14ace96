"""Numbers of every parameter over all ranks: minima that name a leader, then sums.

Both are one row per parameter in an all-reduce. A rank on which a parameter does not exist, or
cannot be read, takes part with a row that changes nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from distprune._common.collectives import Communicator
from distprune.masks.record import MaskRecord
from distprune.shards.shard import LocalShard
from distprune.verification.entries import LocalEntry
from distprune.verification.measuring import Numbers

_MAX = 2**63 - 1


@dataclass
class Minima:
    """Minima over the ranks for one parameter; None where no rank has a value.

    Attributes:
        leader: first rank of the copy whose numbers are counted.
        has_one_kind: whether shape, dtype, layout and number of replicas are equal on all ranks.
        num_replicas, numel: of the parameter.
        records: the lowest and the highest record of the last pruning.
    """

    leader: int | None
    has_one_kind: bool
    num_replicas: int | None
    numel: int | None
    records: tuple[MaskRecord, MaskRecord] | None


def minima(
    names: Sequence[str], local: dict[str, LocalEntry], communicator: Communicator
) -> list[Minima]:
    """The minima of every parameter. Collective.

    Args:
        names: the same on every rank.
        local: this rank's entries by name.
    """
    rows = []
    for name in names:
        row = [_MAX] * 10
        entry = local.get(name)
        if entry is not None and entry.shard is not None:
            shard = entry.shard
            facts = f"{tuple(shard.shape)} {shard.values.dtype} {shard.layout}"
            kind = int.from_bytes(hashlib.blake2b(facts.encode(), digest_size=7).digest(), "big")
            row[:5] = [leader_of(shard, communicator), kind, -kind, shard.num_replicas, shard.numel]
            row[5] = -shard.num_replicas
            if entry.record is not None:
                number, bits = entry.record.num_pruned, entry.record.fingerprint
                row[6:] = [number, -number, bits, ~bits]
        rows.append(row)
    if not rows:
        return []
    shared_rows = communicator.min(torch.tensor(rows, dtype=torch.int64)).tolist()
    result = []
    for leader, kind, minus_kind, replicas, numel, minus_replicas, *record in shared_rows:
        records = None
        if record[0] != _MAX:
            records = (MaskRecord(record[2], record[0]), MaskRecord(~record[3], -record[1]))
        result.append(
            Minima(
                None if leader == _MAX else leader,
                kind == -minus_kind and replicas == -minus_replicas,
                None if replicas == _MAX else replicas,
                None if numel == _MAX else numel,
                records,
            )
        )
    return result


def leader_of(shard: LocalShard | None, communicator: Communicator) -> int:
    """The first rank of this copy of the parameter, which tells it from other copies."""
    if shard is None:
        return _MAX
    if shard.ranks is None:
        return communicator.rank
    return min(shard.ranks) if communicator.rank in shard.ranks else _MAX


@dataclass
class Totals:
    """Sums over the ranks for one parameter.

    Attributes:
        num_problems: on all ranks.
        num_unread: ranks that could not read the parameter.
        num_leaders: copies of the parameter.
        num_elements, num_pruned, fingerprint: of the copy of the leader, its first replica.
        mask_everywhere, mask_first: hashes of the masks, of all replicas and of the first ones.
        weight_everywhere, weight_first: the same for the weights.
        num_replicas: of the parameter, in all copies together.
    """

    num_problems: int
    num_unread: int
    num_leaders: int
    num_elements: int
    num_pruned: int
    fingerprint: int
    mask_everywhere: int
    mask_first: int
    weight_everywhere: int
    weight_first: int
    num_replicas: int = 1

    @property
    def differs(self) -> bool:
        """Whether replicas have different masks or weights."""
        return not self.num_unread and any(
            (first * self.num_replicas - everywhere) % 2**64
            for everywhere, first in (
                (self.mask_everywhere, self.mask_first),
                (self.weight_everywhere, self.weight_first),
            )
        )


def totals(
    names: Sequence[str],
    local: dict[str, LocalEntry],
    num_model_problems: int,
    lowest: Sequence[Minima],
    communicator: Communicator,
) -> tuple[list[Totals], int]:
    """The sums of every parameter, and the number of all problems. Collective."""
    rows, num_problems = [], num_model_problems
    for name, minimum in zip(names, lowest, strict=True):
        row, entry = [0] * 10, local.get(name)
        if entry is not None:
            row[0] = len(entry.problems)
            num_problems += len(entry.problems)
            if entry.shard is None or entry.numbers is None:
                row[1] = 1
            else:
                row[2:] = _row(entry.shard, entry.numbers, minimum, communicator)
        rows.append([_wrapped(value) for value in row])
    rows.append([num_problems, *[0] * 9])
    *shared_rows, last_row = communicator.sum(torch.tensor(rows, dtype=torch.int64)).tolist()
    sums = [Totals(*row) for row in shared_rows]
    for total, minimum in zip(sums, lowest, strict=True):
        total.num_replicas = total.num_leaders * (minimum.num_replicas or 1)
    return sums, last_row[0]


def _row(
    shard: LocalShard, numbers: Numbers, minimum: Minima, communicator: Communicator
) -> list[int]:
    leader = leader_of(shard, communicator)
    if leader == _MAX:  # outside of the parameter's mesh
        return [0] * 8
    weight_hash = numbers.weight_hash or 0
    row = [int(communicator.rank == leader), 0, 0, 0, numbers.mask_hash, 0, weight_hash, 0]
    if leader == minimum.leader and shard.replica == 0:
        row[1:4] = [numbers.num_elements, numbers.num_pruned, numbers.fingerprint]
        row[5], row[7] = numbers.mask_hash, weight_hash
    return row


def _wrapped(value: int) -> int:
    """As int64 arithmetic wraps."""
    return (value + 2**63) % 2**64 - 2**63
