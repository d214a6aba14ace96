"""The entries and problems of all ranks, put together; the same on every rank.

All ranks take part in the same collectives, which only values that all ranks share decide.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

import torch

from distprune._common.collectives import Communicator
from distprune.verification.entries import LocalEntry, SharedEntry
from distprune.verification.replicas import name_ranks_that_differ, ranks_in_words
from distprune.verification.totals import Minima, Totals, minima, totals

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
