"""The entries and problems of all ranks, put together; the same on every rank.

All ranks take part in the same collectives, which only values that all ranks share decide.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from distprune._common.collectives import Communicator
from distprune.masks.record import MaskRecord
from distprune.shards.shard import LocalShard
from distprune.verification.entries import LocalEntry, Numbers, SharedEntry, region_hash

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
    """The minima of every parameter. Collective."""
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


# For at most this many parameters the ranks that differ are named.
_MAX_COMPARED = 64


def name_ranks_that_differ(
    different: Sequence[SharedEntry], local: dict[str, LocalEntry], communicator: Communicator
) -> None:
    """Add to the entries of parameters whose replicas differ which ranks do. Collective.

    Cost: one all-reduce of 24 bytes per rank and parameter; none if no replicas differ.
    """
    compared = different[:_MAX_COMPARED]
    for entry in different[_MAX_COMPARED:]:
        entry.problems.append("its replicas hold different masks or weights")
    if not compared:
        return
    hashes = torch.zeros(len(compared), communicator.size, 3, dtype=torch.int64)
    for row, entry in enumerate(compared):
        mine = local.get(entry.name)
        if mine is not None and mine.numbers is not None and mine.shard is not None:
            hashes[row, communicator.index] = torch.tensor(
                [
                    region_hash(mine.shard),
                    mine.numbers.mask_hash,
                    mine.numbers.weight_hash or 0,
                ]
            )
    for entry, by_rank in zip(compared, communicator.sum(hashes).tolist(), strict=True):
        for what, column in (("masks", 1), ("weights", 2)):
            text = _difference(by_rank, column, communicator)
            if text is not None:
                entry.problems.append(f"its replicas hold different {what}: {text}")


def _difference(by_rank: list[list[int]], column: int, communicator: Communicator) -> str | None:
    """Which ranks differ from the others that have the same elements; None if none does."""
    by_region: dict[int, list[tuple[int, int]]] = {}
    for rank, hashes in zip(communicator.ranks, by_rank, strict=True):
        if hashes[0]:
            by_region.setdefault(hashes[0], []).append((rank, hashes[column]))
    odd, others = [], []
    for replicas in by_region.values():
        # The most common value; among equally common ones that of the first rank.
        expected, _ = Counter(value for _, value in replicas).most_common(1)[0]
        differing = [rank for rank, value in replicas if value != expected]
        odd += differing
        if differing:
            others += [rank for rank, value in replicas if value == expected]
    if not odd:
        return None
    return f"{ranks_in_words(odd, communicator)} from {ranks_in_words(others, communicator)}"


def ranks_in_words(ranks: Iterable[int], communicator: Communicator) -> str:
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


# Longer lists of problems on one rank, and longer texts, are cut.
_MAX_PROBLEMS, _MAX_TEXT = 200, 600


def share(
    entries: Sequence[LocalEntry],
    model_problems: Sequence[str],
    communicator: Communicator,
    *,
    pipeline_parallel: bool,
) -> tuple[list[SharedEntry], list[str]]:
    """All parameters that any rank has, and the problems of the model; the same on every rank.

    Cost: three all-reduces, of 16 bytes, and of 80 bytes per parameter twice, if nothing is wrong.
    """
    local = {entry.name: entry for entry in entries}
    names, holders = _all_names(list(local), communicator)
    lowest = minima(names, local, communicator)
    sums, num_problems = totals(names, local, len(model_problems), lowest, communicator)
    shared = [_judged(*facts) for facts in zip(names, lowest, sums, strict=True)]
    if holders is not None and not pipeline_parallel:
        for entry, ranks in zip(shared, holders, strict=True):
            others = set(communicator.ranks) - ranks
            if others:
                entry.problems.append(
                    f"it is pruned on {ranks_in_words(ranks, communicator)} and not on "
                    f"{ranks_in_words(others, communicator)}"
                )
    different = [entry for entry, total in zip(shared, sums, strict=True) if total.differs]
    name_ranks_that_differ(different, local, communicator)
    if not num_problems:
        return shared, []
    return shared, _share_texts(local, model_problems, shared, communicator)


def _all_names(
    local: list[str], communicator: Communicator
) -> tuple[list[str], list[set[int]] | None]:
    """The names on all ranks, and the ranks that have each; None if all ranks have all."""
    text = json.dumps(local)
    digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
    low, high = communicator.max(torch.tensor([-digest, digest], dtype=torch.int64)).tolist()
    if -low == high:
        return local, None
    texts, kinds = communicator.distinct_texts(text)
    lists = [json.loads(text) for text in texts]
    holders: dict[str, set[int]] = {name: set() for names in lists for name in names}
    for rank, kind in zip(communicator.ranks, kinds, strict=True):
        for name in lists[kind]:
            holders[name].add(rank)
    return list(holders), list(holders.values())


def _judged(name: str, minimum: Minima, total: Totals) -> SharedEntry:
    """The entry of a parameter, with what is wrong with it as a whole."""
    entry = SharedEntry(name, minimum.numel or 0, total.num_pruned, total.fingerprint)
    if total.num_unread or minimum.numel is None:
        return entry  # the ranks that could not read it report why
    if not minimum.has_one_kind:
        entry.problems.append("the ranks hold it in different shapes, dtypes or layouts")
        return entry
    if total.num_elements != minimum.numel:
        entry.problems.append(
            f"its shards hold {total.num_elements} elements; expected {minimum.numel} in all"
        )
    if minimum.records is None:
        return entry
    low, high = minimum.records
    if low != high:
        entry.problems.append("the ranks know of different last prunings of it")
    elif total.num_pruned != low.num_pruned:
        entry.record_problem = (
            f"its mask was changed since the last pruning: {total.num_pruned} elements are "
            f"pruned, where that left {low.num_pruned}"
        )
    elif total.fingerprint != low.fingerprint:
        entry.record_problem = (
            f"its mask was changed since the last pruning: {total.num_pruned} elements are "
            "pruned, as that left it, but not the same ones"
        )
    return entry


def _share_texts(
    local: dict[str, LocalEntry],
    model_problems: Sequence[str],
    shared: Sequence[SharedEntry],
    communicator: Communicator,
) -> list[str]:
    """Add every rank's problems to the shared entries; returns the problems of the model."""
    texts = [("", text) for text in model_problems]
    texts += [(name, text) for name, entry in local.items() for text in entry.problems]
    if len(texts) > _MAX_PROBLEMS:
        more = len(texts) - _MAX_PROBLEMS
        texts = [*texts[:_MAX_PROBLEMS], ("", f"there are {more} more problems")]
    cut = [(name, text[:_MAX_TEXT]) for name, text in texts]
    lists, kinds = communicator.distinct_texts(json.dumps(cut))
    ranks_with: dict[tuple[str, str], list[int]] = {}
    for rank, kind in zip(communicator.ranks, kinds, strict=True):
        for name, text in json.loads(lists[kind]):
            ranks_with.setdefault((name, text), []).append(rank)
    by_name = {entry.name: entry for entry in shared}
    of_model = []
    for (name, text), ranks in ranks_with.items():
        if communicator.size > 1:
            text = f"on {ranks_in_words(sorted(set(ranks)), communicator)}: {text}"
        if name:
            by_name[name].problems.append(text)
        else:
            of_model.append(text)
    return of_model
