"""The ranks whose replicas of a parameter differ from the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch

from distprune._common.collectives import Communicator
from distprune.verification.entries import LocalEntry, SharedEntry
from distprune.verification.measuring import region_hash

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
