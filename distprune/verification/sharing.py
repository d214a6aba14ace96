"""What the ranks found, put together: numbers of every parameter, and the problems of all ranks.

All ranks take part in the same collectives, which the numbers shared before decide: a rank on
which a parameter is gone, or cannot be read, takes part with a row that changes nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from distprune._common.collectives import Communicator
from distprune.masks.record import MaskRecord
from distprune.shards.shard import LocalShard
from distprune.verification.measuring import Numbers, place_hash
from distprune.verification.report import VerifiedParameter

_MAX = 2**63 - 1
# Of so many parameters the ranks that differ are looked for.
_MAX_COMPARED = 64
# Longer lists of problems on one rank, and longer texts, are cut.
_MAX_PROBLEMS, _MAX_TEXT = 200, 600


@dataclass
class Found:
    """One parameter on this rank.

    Attributes:
        name: fully qualified.
        shard, numbers: None if it could not be read here.
        record: of the last pruning; None if there is none.
        problems: what is wrong with it on this rank.
    """

    name: str
    shard: LocalShard | None = None
    numbers: Numbers | None = None
    record: MaskRecord | None = None
    problems: list[str] = field(default_factory=list)


@dataclass
class Shared:
    """One parameter on all ranks.

    Attributes:
        problems: without those that only say that the record is another.
        record_problem: that the mask is another than the last pruning left.
    """

    name: str
    num_elements: int = 0
    num_pruned: int = 0
    fingerprint: int = 0
    problems: list[str] = field(default_factory=list)
    record_problem: str | None = None

    def entry(self) -> VerifiedParameter:
        """For the report."""
        problems = [*self.problems, *([self.record_problem] if self.record_problem else [])]
        return VerifiedParameter(
            self.name, self.num_elements, self.num_pruned, self.fingerprint, tuple(problems)
        )


def share(
    found: Sequence[Found],
    model_problems: Sequence[str],
    communicator: Communicator,
    *,
    pipeline_parallel: bool,
) -> tuple[list[Shared], list[str]]:
    """All parameters that any rank has, and the problems of the model; the same on every rank.

    Cost: three all-reduces, of 16 bytes, and of 80 bytes per parameter twice, if nothing is wrong.
    """
    mine = {each.name: each for each in found}
    names, holders = _all_names(list(mine), communicator)
    least = _least(names, mine, communicator)
    totals = _totals(names, mine, model_problems, least, communicator)
    shared = []
    different: list[int] = []
    all_ranks = set(communicator.ranks)
    for which, name in enumerate(names):
        entry = _judged(name, least[which], totals[which])
        shared.append(entry)
        if totals[which].differs:
            different.append(which)
        without = set() if holders is None or pipeline_parallel else all_ranks - holders[which]
        if holders is not None and without:
            entry.problems.append(
                f"it is pruned on {_ranks(holders[which], communicator)} and not on "
                f"{_ranks(without, communicator)}"
            )
    _name_the_ranks_that_differ(different, names, mine, shared, communicator)
    of_model: list[str] = []
    if totals[-1].num_problems:
        of_model = _share_texts(mine, model_problems, shared, communicator)
    return shared, of_model


def _all_names(
    mine: list[str], communicator: Communicator
) -> tuple[list[str], list[set[int]] | None]:
    """Names on any rank, and who has which; None if all ranks have all."""
    text = json.dumps(mine)
    digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
    low, high = communicator.max(torch.tensor([-digest, digest], dtype=torch.int64)).tolist()
    if -low == high:
        return mine, None
    texts, kinds = communicator.distinct_texts(text)
    lists = [json.loads(each) for each in texts]
    holders: dict[str, set[int]] = {name: set() for names in lists for name in names}
    for rank, kind in zip(communicator.ranks, kinds, strict=True):
        for name in lists[kind]:
            holders[name].add(rank)
    return list(holders), list(holders.values())


@dataclass
class _Least:
    """The least of what the ranks know of a parameter; what no rank knows is None."""

    leader: int | None
    has_one_kind: bool
    num_replicas: int | None
    numel: int | None
    records: tuple[MaskRecord, MaskRecord] | None


def _least(
    names: Sequence[str], mine: dict[str, Found], communicator: Communicator
) -> list[_Least]:
    rows = []
    for name in names:
        row = [_MAX] * 10
        found = mine.get(name)
        if found is not None and found.shard is not None:
            shard = found.shard
            facts = f"{tuple(shard.shape)} {shard.values.dtype} {shard.layout}"
            kind = int.from_bytes(hashlib.blake2b(facts.encode(), digest_size=7).digest(), "big")
            row[:5] = [leader_of(shard, communicator), kind, -kind, shard.num_replicas, shard.numel]
            row[5] = -shard.num_replicas
            if found.record is not None:
                number, bits = found.record.num_pruned, found.record.fingerprint
                row[6:] = [number, -number, bits, ~bits]
        rows.append(row)
    if not rows:
        return []
    found_rows = communicator.min(torch.tensor(rows, dtype=torch.int64)).tolist()
    result = []
    for leader, kind, minus_kind, replicas, numel, minus_replicas, *record in found_rows:
        records = None
        if record[0] != _MAX:
            records = (MaskRecord(record[2], record[0]), MaskRecord(~record[3], -record[1]))
        result.append(
            _Least(
                None if leader == _MAX else leader,
                kind == -minus_kind and replicas == -minus_replicas,
                None if replicas == _MAX else replicas,
                None if numel == _MAX else numel,
                records,
            )
        )
    return result


def leader_of(shard: LocalShard | None, communicator: Communicator) -> int:
    """Which of all copies of the parameter this is: by a rank of it."""
    if shard is None:
        return _MAX
    if shard.ranks is None:
        return communicator.rank
    return min(shard.ranks) if communicator.rank in shard.ranks else _MAX


@dataclass
class _Totals:
    num_problems: int
    num_unread: int
    num_leaders: int
    num_held: int
    num_pruned: int
    fingerprint: int
    mask_everywhere: int
    mask_first: int
    weight_everywhere: int
    weight_first: int
    num_replicas: int = 1

    @property
    def differs(self) -> bool:
        """Whether replicas do."""
        return not self.num_unread and any(
            (first * self.num_replicas - everywhere) % 2**64
            for everywhere, first in (
                (self.mask_everywhere, self.mask_first),
                (self.weight_everywhere, self.weight_first),
            )
        )


def _totals(
    names: Sequence[str],
    mine: dict[str, Found],
    model_problems: Sequence[str],
    least: Sequence[_Least],
    communicator: Communicator,
) -> list[_Totals]:
    """Sums over all ranks, per parameter; one more at the end for the number of all problems."""
    rows, num_problems = [], len(model_problems)
    for name, lowest in zip(names, least, strict=True):
        row, found = [0] * 10, mine.get(name)
        if found is not None:
            row[0] = len(found.problems)
            num_problems += len(found.problems)
            if found.shard is None or found.numbers is None:
                row[1] = 1
            else:
                row[2:] = _row(found.shard, found.numbers, lowest, communicator)
        rows.append([_wrapped(each) for each in row])
    rows.append([num_problems, *[0] * 9])
    totals = [
        _Totals(*row) for row in communicator.sum(torch.tensor(rows, dtype=torch.int64)).tolist()
    ]
    for total, lowest in zip(totals, least, strict=False):
        total.num_replicas = total.num_leaders * (lowest.num_replicas or 1)
    return totals


def _row(
    shard: LocalShard, numbers: Numbers, lowest: _Least, communicator: Communicator
) -> list[int]:
    leader = leader_of(shard, communicator)
    if leader == _MAX:  # outside of the parameter's mesh
        return [0] * 8
    weight_hash = numbers.weight_hash or 0
    row = [int(communicator.rank == leader), 0, 0, 0, numbers.mask_hash, 0, weight_hash, 0]
    if leader == lowest.leader and shard.replica == 0:
        row[1:4] = [numbers.num_held, numbers.num_pruned, numbers.fingerprint]
        row[5], row[7] = numbers.mask_hash, weight_hash
    return row


def _judged(name: str, least: _Least, totals: _Totals) -> Shared:
    """What is wrong with a parameter as a whole."""
    entry = Shared(name, least.numel or 0, totals.num_pruned, totals.fingerprint)
    if totals.num_unread or least.numel is None:
        return entry  # which the ranks that could not read it tell
    if not least.has_one_kind:
        entry.problems.append("the ranks hold it in different shapes, dtypes or layouts")
        return entry
    if totals.num_held != least.numel:
        entry.problems.append(
            f"its shards hold {totals.num_held} elements; expected {least.numel} in all"
        )
    if least.records is None:
        return entry
    low, high = least.records
    if low != high:
        entry.problems.append("the ranks know of different last prunings of it")
    elif totals.num_pruned != low.num_pruned:
        entry.record_problem = (
            f"its mask was changed since the last pruning: {totals.num_pruned} elements are "
            f"pruned, where that left {low.num_pruned}"
        )
    elif totals.fingerprint != low.fingerprint:
        entry.record_problem = (
            f"its mask was changed since the last pruning: {totals.num_pruned} elements are "
            "pruned, as that left it, but not the same ones"
        )
    return entry


def _name_the_ranks_that_differ(
    different: Sequence[int],
    names: Sequence[str],
    mine: dict[str, Found],
    shared: Sequence[Shared],
    communicator: Communicator,
) -> None:
    looked_at = different[:_MAX_COMPARED]
    for which in different[_MAX_COMPARED:]:
        shared[which].problems.append("its replicas hold different masks or weights")
    if not looked_at:
        return
    table = torch.zeros(len(looked_at), communicator.size, 3, dtype=torch.int64)
    for row, which in enumerate(looked_at):
        found = mine.get(names[which])
        if found is not None and found.numbers is not None and found.shard is not None:
            numbers = found.numbers
            table[row, communicator.index] = torch.tensor(
                [place_hash(found.shard), numbers.mask_hash, numbers.weight_hash or 0]
            )
    for which, row in zip(looked_at, communicator.sum(table).tolist(), strict=True):
        for what, column in (("masks", 1), ("weights", 2)):
            text = _difference(row, column, communicator)
            if text is not None:
                shared[which].problems.append(f"its replicas hold different {what}: {text}")


def _difference(row: list[list[int]], column: int, communicator: Communicator) -> str | None:
    """Which ranks differ from the others that hold the same elements; None if none does."""
    places: dict[int, list[tuple[int, int]]] = {}
    for rank, hashes in zip(communicator.ranks, row, strict=True):
        if hashes[0]:
            places.setdefault(hashes[0], []).append((rank, hashes[column]))
    odd, rest = [], []
    for held in places.values():
        # Most common, and of these what the first rank has.
        expected, _ = Counter(value for _, value in held).most_common(1)[0]
        differing = [rank for rank, value in held if value != expected]
        odd += differing
        if differing:
            rest += [rank for rank, value in held if value == expected]
    if not odd:
        return None
    return f"{_ranks(odd, communicator)} from {_ranks(rest, communicator)}"


def _share_texts(
    mine: dict[str, Found],
    model_problems: Sequence[str],
    shared: Sequence[Shared],
    communicator: Communicator,
) -> list[str]:
    """Tell every rank of every rank's problems; returns those of the model."""
    texts = [("", text) for text in model_problems]
    texts += [(name, text) for name, found in mine.items() for text in found.problems]
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
        told = text
        if communicator.size > 1:
            told = f"on {_ranks(sorted(set(ranks)), communicator)}: {text}"
        if name:
            by_name[name].problems.append(told)
        else:
            of_model.append(told)
    return of_model


def _ranks(ranks: Iterable[int], communicator: Communicator) -> str:
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


def _wrapped(value: int) -> int:
    """As int64 arithmetic wraps."""
    return (value + 2**63) % 2**64 - 2**63
