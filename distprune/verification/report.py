"""The findings of all ranks, put together, and the report of them; the same on every rank.

All ranks take part in the same collectives, which only values that all ranks share decide.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch

from distprune._common.collectives import Communicator
from distprune._common.report_text import CallReport, share, table
from distprune.shards.checksum import of_shard, replicas_agree
from distprune.shards.shard import LocalShard
from distprune.verification.inspecting import LocalEntry


@dataclass(frozen=True)
class VerifiedParameter:
    """One parameter, whole, each element counted once.

    Attributes:
        name: fully qualified.
        num_elements: of the whole parameter; 0 if no rank could read it.
        num_pruned: elements under the mask.
        fingerprint: int64, of the mask; no sharding changes it. 0 if nothing is pruned.
        problems: what is wrong with it, and on which ranks.
    """

    name: str
    num_elements: int
    num_pruned: int
    fingerprint: int
    problems: tuple[str, ...] = ()

    @property
    def sparsity(self) -> float:
        """Share of pruned elements, in [0, 1]."""
        return share(self.num_pruned, self.num_elements)


@dataclass(frozen=True)
class VerificationReport(CallReport):
    """What ``verify`` found. The same on every rank except for ``seconds``: print it on one.

    Attributes:
        parameters: all that are pruned or should be, in the order of the model.
        problems: what is wrong with the model as a whole.
        num_ranks: ranks that took part.
        num_collectives: all-reduces that this rank took part in.
        bytes_sent: their payload, per rank.
        seconds: wall time on this rank.
        recomputed: with ``reference``, names of the parameters whose selection was repeated.
        not_recomputed: with ``reference``, "name: reason" for each of the others.
    """

    parameters: tuple[VerifiedParameter, ...]
    problems: tuple[str, ...]
    num_ranks: int
    num_collectives: int
    bytes_sent: int
    seconds: float
    recomputed: tuple[str, ...] = ()
    not_recomputed: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.all_problems

    @property
    def all_problems(self) -> tuple[str, ...]:
        """The problems of the model, and those of the parameters with their names."""
        return (
            *self.problems,
            *(f"{entry.name}: {text}" for entry in self.parameters for text in entry.problems),
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data, with the totals and sparsities written out."""
        data = asdict(self)
        data["parameters"] = [
            {**asdict(entry), "sparsity": entry.sparsity} for entry in self.parameters
        ]
        for name in ("ok", "num_elements", "num_pruned", "sparsity"):
            data[name] = getattr(self, name)
        return data

    def to_json(self, **options: Any) -> str:
        """:meth:`to_dict` as JSON; ``options`` go to ``json.dumps``."""
        return json.dumps(self.to_dict(), allow_nan=False, **options)

    def __str__(self) -> str:
        heading = ("parameter", "elements", "pruned", "sparsity", "")
        rows = [
            (
                entry.name,
                f"{entry.num_elements:,}",
                f"{entry.num_pruned:,}",
                f"{entry.sparsity:.2%}",
                f"{len(entry.problems)} wrong" if entry.problems else "ok",
            )
            for entry in self.parameters
        ]
        total = (
            "total", f"{self.num_elements:,}", f"{self.num_pruned:,}", f"{self.sparsity:.2%}", "",
        )  # fmt: skip
        count = len(self.all_problems)
        verdict = "nothing is wrong" if self.ok else f"{count} problem{'s' if count > 1 else ''}"
        return "\n".join(
            [
                *table(heading, rows, total, left_columns=(0, len(heading) - 1)),
                "; ".join([verdict, *self._cost()]),
                *(f"- {text}" for text in self.all_problems),
                *self._recomputation(),
            ]
        )

    def _recomputation(self) -> list[str]:
        lines = []
        if self.recomputed:
            lines.append(f"selected anew, by sorting: {len(self.recomputed)} parameters")
        return lines + [f"not selected anew: {text}" for text in self.not_recomputed]


class VerificationError(RuntimeError):
    """Masks do not act, or are not those that the last pruning left; the same on every rank.

    Attributes:
        report: the whole report; the message lists the first 20 problems.
    """

    _MAX_SHOWN = 20

    def __init__(self, report: VerificationReport) -> None:
        self.report = report
        problems = report.all_problems
        shown = list(problems[: self._MAX_SHOWN])
        if len(problems) > len(shown):
            shown.append(f"and {len(problems) - len(shown)} more: see the error's report")
        super().__init__(
            f"{len(problems)} problem{'s' if len(problems) > 1 else ''} with the masks of the "
            "model:\n" + "\n".join(f"- {text}" for text in shown)
        )

    def __reduce__(self) -> Any:
        return VerificationError, (self.report,)


_UNKNOWN = 2**63 - 1
# Of at most this many parameters, the ranks that differ are named.
_MAX_COMPARED = 64
# Longer lists of problems on one rank, and longer texts, are cut.
_MAX_PROBLEMS, _MAX_TEXT = 200, 600


@dataclass
class SharedEntry:
    """One parameter over all ranks; the same on every rank.

    Attributes:
        problems: all but ``record_problem``.
        record_problem: says that the mask is not the one that the last pruning left.
    """

    name: str
    num_elements: int = 0
    num_pruned: int = 0
    fingerprint: int = 0
    problems: list[str] = field(default_factory=list)
    record_problem: str | None = None

    def to_report(self) -> VerifiedParameter:
        """The entry of the report."""
        problems = [*self.problems, *([self.record_problem] if self.record_problem else [])]
        return VerifiedParameter(
            self.name, self.num_elements, self.num_pruned, self.fingerprint, tuple(problems)
        )


def share_findings(
    local: Mapping[str, LocalEntry],
    model_problems: Sequence[str],
    communicator: Communicator,
    *,
    pipeline_parallel: bool,
) -> tuple[list[SharedEntry], list[str]]:
    """All parameters that any rank has, and the problems of the model; the same on every rank.

    Cost: three all-reduces, of 16 bytes, and of 80 bytes per parameter twice, if nothing is wrong.
    """
    names, holders = _all_names(list(local), communicator)
    entries = [local.get(name) for name in names]
    rows = torch.tensor([_minima(entry, communicator) for entry in entries], dtype=torch.int64)
    minima = [Minima(*row) for row in communicator.min(rows).tolist()] if names else []
    num_problems = len(model_problems) + sum(len(entry.problems) for entry in local.values())
    parts = [
        _sums(entry, minimum, communicator) for entry, minimum in zip(entries, minima, strict=True)
    ]
    parts.append(Sums(num_problems))
    sums = communicator.sum(torch.tensor(parts, dtype=torch.int64)).tolist()
    *totals, (num_problems, *_) = [Sums(*row) for row in sums]
    shared = [_judged(*facts) for facts in zip(names, minima, totals, strict=True)]
    facts = zip(shared, minima, totals, strict=True)
    different = [entry for entry, minimum, total in facts if _differs(minimum, total)]
    if holders is not None and not pipeline_parallel:
        for entry, ranks in zip(shared, holders, strict=True):
            others = set(communicator.ranks) - ranks
            if others:
                entry.problems.append(
                    f"it is pruned on {ranks_in_words(ranks, communicator)} and not on "
                    f"{ranks_in_words(others, communicator)}"
                )
    _name_ranks_that_differ(different, local, communicator)
    if not num_problems:
        return shared, []
    return shared, _share_texts(local, model_problems, shared, communicator)


def _all_names(
    local: list[str], communicator: Communicator
) -> tuple[list[str], list[set[int]] | None]:
    """The names on all ranks, and the ranks that have each; None if all ranks have all."""
    text = json.dumps(local)
    digest = _digest(text)
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


class Minima(NamedTuple):
    """Minima over the ranks for one parameter; _UNKNOWN where no rank has a value.

    A minimum of negative numbers, or of inverted bits, is the negative or inverted maximum.

    Attributes:
        leader: first rank of the copy whose numbers are counted.
        kind, negative_kind: of shape, dtype, layout and number of replicas.
        num_replicas, numel: of the parameter.
        pruned, negative_pruned, bits, inverted_bits: of the record of the last pruning.
    """

    leader: int = _UNKNOWN
    kind: int = _UNKNOWN
    negative_kind: int = _UNKNOWN
    num_replicas: int = _UNKNOWN
    numel: int = _UNKNOWN
    pruned: int = _UNKNOWN
    negative_pruned: int = _UNKNOWN
    bits: int = _UNKNOWN
    inverted_bits: int = _UNKNOWN


def _minima(entry: LocalEntry | None, communicator: Communicator) -> Minima:
    if entry is None or entry.shard is None:
        return Minima()
    shard, record = entry.shard, entry.record
    kind = _digest(f"{tuple(shard.shape)} {shard.values.dtype} {shard.layout} {shard.num_replicas}")
    of_shard = (leader_of(shard, communicator), kind, -kind, shard.num_replicas, shard.numel)
    if record is None:
        return Minima(*of_shard)
    number, bits = record.num_pruned, record.fingerprint
    return Minima(*of_shard, number, -number, bits, ~bits)


def leader_of(shard: LocalShard | None, communicator: Communicator) -> int:
    """The first rank of this copy of the parameter, which tells it from other copies."""
    if shard is None:
        return _UNKNOWN
    if shard.ranks is None:
        return communicator.rank
    return min(shard.ranks) if communicator.rank in shard.ranks else _UNKNOWN


class Sums(NamedTuple):
    """Sums over the ranks for one parameter, modulo 2**64.

    Attributes:
        num_problems: on all ranks.
        num_unread: ranks that could not read the parameter.
        num_leaders: copies of the parameter.
        num_elements, num_pruned, fingerprint: of the copy of the leader, its first replica.
        mask_everywhere, mask_first: hashes of the masks, of all replicas and of the first ones.
        weight_everywhere, weight_first: the same for the weights.
    """

    num_problems: int = 0
    num_unread: int = 0
    num_leaders: int = 0
    num_elements: int = 0
    num_pruned: int = 0
    fingerprint: int = 0
    mask_everywhere: int = 0
    mask_first: int = 0
    weight_everywhere: int = 0
    weight_first: int = 0


def _sums(entry: LocalEntry | None, minimum: Minima, communicator: Communicator) -> Sums:
    """This rank's summands for one parameter."""
    if entry is None:
        return Sums()
    shard = entry.shard
    if shard is None:
        return Sums(num_unread=1)
    leader = leader_of(shard, communicator)
    if leader == _UNKNOWN:  # outside of the parameter's mesh
        return Sums()
    sums = Sums(
        num_leaders=int(communicator.rank == leader),
        mask_everywhere=entry.mask_hash,
        weight_everywhere=entry.weight_hash,
    )
    if leader != minimum.leader or shard.replica:
        return sums
    return sums._replace(
        num_elements=shard.values.numel(),
        num_pruned=entry.num_pruned,
        fingerprint=entry.fingerprint,
        mask_first=entry.mask_hash,
        weight_first=entry.weight_hash,
    )


def _differs(minimum: Minima, total: Sums) -> bool:
    """Whether replicas of a parameter have different masks or weights."""
    num_replicas = total.num_leaders * minimum.num_replicas
    return not total.num_unread and not (
        replicas_agree(num_replicas, total.mask_everywhere, total.mask_first)
        and replicas_agree(num_replicas, total.weight_everywhere, total.weight_first)
    )


def _judged(name: str, minimum: Minima, total: Sums) -> SharedEntry:
    """The entry of a parameter, with what is wrong with it as a whole."""
    is_read = minimum.numel != _UNKNOWN
    numel = minimum.numel if is_read else 0
    entry = SharedEntry(name, numel, total.num_pruned, total.fingerprint)
    if total.num_unread or not is_read:
        return entry  # the ranks that could not read it report why
    if minimum.kind != -minimum.negative_kind:
        entry.problems.append("the ranks hold it in different shapes, dtypes or layouts")
        return entry
    if total.num_elements != numel:
        entry.problems.append(
            f"its shards hold {total.num_elements} elements; expected {numel} in all"
        )
    if minimum.pruned == _UNKNOWN:
        return entry
    if minimum.pruned != -minimum.negative_pruned or minimum.bits != ~minimum.inverted_bits:
        entry.problems.append("the ranks know of different last prunings of it")
    elif total.num_pruned != minimum.pruned:
        entry.record_problem = (
            f"its mask was changed since the last pruning: {total.num_pruned} elements are "
            f"pruned, where that left {minimum.pruned}"
        )
    elif total.fingerprint != minimum.bits:
        entry.record_problem = (
            f"its mask was changed since the last pruning: {total.num_pruned} elements are "
            "pruned, as that left it, but not the same ones"
        )
    return entry


def _name_ranks_that_differ(
    different: Sequence[SharedEntry], local: Mapping[str, LocalEntry], communicator: Communicator
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
        if mine is not None and mine.shard is not None:
            region = of_shard(mine.shard) | 1  # not 0, and equal where the same elements are
            hashes[row, communicator.index] = torch.tensor(
                [region, mine.mask_hash, mine.weight_hash]
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


def _share_texts(
    local: Mapping[str, LocalEntry],
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
            text = f"on {ranks_in_words(set(ranks), communicator)}: {text}"
        if name:
            by_name[name].problems.append(text)
        else:
            of_model.append(text)
    return of_model


def _digest(text: str) -> int:
    """A positive int64, the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")
