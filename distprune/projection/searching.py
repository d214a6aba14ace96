"""From the tensors of a call to their masks: what is searched, the searches, and the masks."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from distprune._common.collectives import Communicator
from distprune._common.hashing import draw_seed
from distprune.call import pipeline_parallel as stages
from distprune.call.arguments import Fact
from distprune.call.comparing import count_live_and_compare
from distprune.call.copies import count_copies_on_other_meshes
from distprune.methods.ranking import candidates_of
from distprune.methods.rankings import scores_or_values
from distprune.projection.arguments import Items
from distprune.projection.result import MaskStart
from distprune.selection.candidates import Candidates, PartCut
from distprune.selection.cut import Selection, search_lowest, search_together
from distprune.selection.keys import (
    RANDOM_KEYS,
    KeyRange,
    Order,
    RandomKeys,
    ScoreKeys,
    key_range,
)
from distprune.selection.passes import write_masks
from distprune.selection.scores import ScoreSource
from distprune.shards.geometry import memory_order
from distprune.shards.shard import LocalShard
from distprune.shards.target import Target


@dataclass(frozen=True)
class Reading:
    """What a rank has read, before the ranks have agreed on it.

    Attributes:
        items: the tensors.
        sources: of their scores; None for random ones.
        masks: N-d, uninitialised: the memory of the result.
        start: of the search.
        order: of the scores.
    """

    items: Items
    sources: Sequence[ScoreSource] | None
    masks: list[Tensor]
    start: MaskStart
    order: Order

    @classmethod
    def of(cls, items: Items, start: MaskStart, signed: bool, *, is_random: bool) -> Reading:
        shards = [target.shard for target in items.targets]
        sources = None
        if not is_random:
            given = [target.scores for target in items.targets]
            sources = scores_or_values(shards, given, are_signed=signed)
            for target, source in zip(items.targets, sources, strict=True):
                _check_real(target.label, source.dtype)
        order = Order.ASCENDING if signed else Order.MAGNITUDE
        return cls(items, sources, [_new_mask(shard) for shard in shards], start, order)

    def facts(self, *, pipeline_parallel: bool) -> list[Fact]:
        """What must be equal on all ranks."""
        dtypes = "random" if self.sources is None else str([s.dtype for s in self.sources])
        if pipeline_parallel and self.sources is not None:
            dtypes = "those of each part"
        start = [str(self.start.groups.get(label)) for label in self.items.counts]
        return [
            *self.items.facts(pipeline_parallel=pipeline_parallel),
            ("dtypes of the scores", dtypes),
            ("start", str(start)),
        ]


def joined_by_name(reading: Reading, communicator: Communicator) -> Reading:
    """What all parts of a pipeline have read, in the order of names; the same on all ranks.

    Args:
        reading: of this part, with one group.
        communicator: all ranks that take part.

    Raises:
        ValueError: no rank has a tensor; ranks with different tensors of one name. On every rank.

    Cost: see call.pipeline_parallel.join.
    """
    own = {target.label: place for place, target in enumerate(reading.items.targets)}
    targets = stages.join(reading.items.targets, communicator)
    if not targets:
        raise ValueError("tensors is empty on every rank; expected at least one tensor.")
    are_signed = reading.order is Order.ASCENDING
    sources, masks = [], []
    for target in targets:
        place = own.get(target.label)
        if place is None:  # no element of it is here
            sources += scores_or_values([target.shard], [None], are_signed=are_signed)
            masks.append(_new_mask(target.shard))
        else:
            sources += [] if reading.sources is None else [reading.sources[place]]
            masks.append(reading.masks[place])
    place_of = {target.label: place for place, target in enumerate(targets)}
    items = replace(
        reading.items,
        targets=targets,
        labels=[None] * len(targets),
        members={None: list(range(len(targets)))},
        has_candidates=True,  # of some rank, perhaps
        places=[place_of[label] for label in own],
    )
    is_random = reading.sources is None
    return replace(reading, items=items, sources=None if is_random else sources, masks=masks)


@dataclass(frozen=True)
class Problem:
    """What is searched, the same on all ranks but for the parts.

    Attributes:
        items: the tensors.
        targets: the tensors, with the number of their replicas on all meshes.
        parts: what this rank's elements compete with.
        num_live: competing elements of every whole tensor.
        keys: by group, the range of its keys.
        masks, flat: N-d and as 1-d views: what is written.
    """

    items: Items
    targets: list[Target]
    parts: list[Candidates]
    num_live: list[int]
    keys: dict[Hashable, KeyRange]
    masks: list[Tensor]
    flat: list[Tensor]

    @classmethod
    def of(cls, reading: Reading, communicator: Communicator, *, is_joined: bool) -> Problem:
        items, sources = reading.items, reading.sources
        targets = items.targets
        if not is_joined:  # joining has counted the copies
            targets = count_copies_on_other_meshes(targets, communicator)
        shards = [target.shard for target in targets]
        num_live = [shard.numel for shard in shards]
        if items.has_candidates or any(shard.num_replicas > 1 for shard in shards):
            num_live = count_live_and_compare(targets, sources is not None, communicator)
        keys = dict.fromkeys(items.counts, RANDOM_KEYS)
        if sources is None:
            parts = _random_parts(shards, communicator)
        else:
            for label, members in items.members.items():
                dtypes = [sources[i].dtype for i in members]
                dtype = functools.reduce(torch.promote_types, dtypes)
                keys[label] = key_range(dtype, reading.order)
            ranked = [
                ScoreKeys(source, keys[label])
                for source, label in zip(sources, items.labels, strict=True)
            ]
            parts = candidates_of(shards, ranked)
        flat = [shard.flat(mask) for shard, mask in zip(shards, reading.masks, strict=True)]
        return cls(items, targets, parts, num_live, keys, reading.masks, flat)


def _random_parts(shards: Sequence[LocalShard], communicator: Communicator) -> list[Candidates]:
    seed = int(communicator.leader_of(1, draw_seed)[0])
    sources, offset = [], 0
    for shard in shards:
        sources.append(RandomKeys(seed, offset, shard.index, shard.values.device))
        offset += shard.numel
    return candidates_of(shards, sources)


def select(
    problem: Problem, start: MaskStart, largest: bool, communicator: Communicator
) -> dict[Hashable, Selection]:
    """Cut the order of each group; all groups side by side."""
    searches = []
    for label, k in problem.items.counts.items():
        members = problem.items.members[label]
        num_live = [problem.num_live[i] for i in members]
        if k > sum(num_live):
            of_group = "" if label is None else f" of group {label!r}"
            raise ValueError(
                f"k{of_group} is {k:,}, and {sum(num_live):,} elements compete; expected at most "
                "as many."
            )
        searches.append(
            search_lowest(
                [problem.parts[i] for i in members],
                [problem.targets[i].label for i in members],
                num_live,
                sum(num_live) - k if largest else k,
                problem.keys[label],
                refuse_nan=True,
                drafts=[problem.flat[i] for i in members],
                start=start.groups.get(label),
            )
        )
    found = search_together(searches, communicator)
    return dict(zip(problem.items.counts, found, strict=True))


def finish(problem: Problem, found: Mapping[Hashable, Selection], largest: bool) -> list[Tensor]:
    """Local: write the masks, and give them the form of the tensors."""
    for label, selection in found.items():
        members = problem.items.members[label]
        parts = [problem.parts[i] for i in members]
        cuts = [PartCut(position, selection.cut) for position in range(len(members))]
        write_masks(parts, cuts, [problem.flat[i] for i in members], selection.drafted)
    if not largest:
        # Written is what comes after the cut, among the candidates.
        for part, flat in zip(problem.parts, problem.flat, strict=True):
            if part.live is None:
                flat.logical_not_()
            else:
                flat.logical_xor_(part.live)
    return [
        target.shard.as_parameter_layout(mask)
        for target, mask in zip(problem.targets, problem.masks, strict=True)
    ]


def _new_mask(shard: LocalShard) -> Tensor:
    """Memory for a mask; of a tensor with gaps, such as a slice, without them."""
    if memory_order(shard.values) is None:
        return torch.empty(shard.values.shape, dtype=torch.bool, device=shard.values.device)
    return shard.new_mask(torch.bool)


def _check_real(label: str, dtype: torch.dtype) -> None:
    if dtype.is_complex:
        raise NotImplementedError(
            f"{label}: scores of dtype {dtype} cannot be ranked; expected real ones. Pass their "
            "absolute values as scores."
        )
    key_range(dtype, Order.MAGNITUDE)
