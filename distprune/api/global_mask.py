"""``global_mask``: the k largest of all elements of some tensors, over all ranks.

    kept = prune.global_mask(dict(model.named_parameters()), k)   # kept.masks[name]: bool, a shard

It is the step that methods share which project weights onto k elements (ADMM, iterative hard
thresholding), or choose what to drop and to grow (SET, RigL).
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

import torch
from torch import Tensor

from distprune._common.collectives import Communicator
from distprune._common.hashing import draw_seed
from distprune._common.process_groups import world
from distprune.api.global_mask_arguments import (
    RANDOM,
    GlobalMask,
    Items,
    MaskStart,
    Scores,
    TensorLike,
    read_items,
    start_of,
)
from distprune.call import pipeline_parallel as stages
from distprune.call.importance_scores import check_signed
from distprune.call.replicas import count_copies_on_other_meshes, count_live_and_compare
from distprune.call.request import Fact
from distprune.methods.ranking import candidates_of, scores_or_values
from distprune.selection.candidates import Candidates, PartCut
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
from distprune.selection.search import Selection, search_lowest, search_together
from distprune.shards.geometry import memory_order
from distprune.shards.parameters import Target
from distprune.shards.shard import LocalShard

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


K = TypeVar("K", bound=Hashable)
Counts = int | Mapping[Any, int] | Sequence[int]


@overload
def global_mask(  # type: ignore[overload-overlap]  # a mapping from tensors is a mapping
    tensors: Mapping[K, TensorLike],
    k: Counts,
    *,
    scores: Mapping[K, Scores] | Literal["random"] | None = None,
    candidates: Mapping[K, Tensor] | None = None,
    groups: Mapping[K, Hashable] | None = None,
    largest: bool = True,
    signed: bool = False,
    start: GlobalMask[Any] | MaskStart | None = None,
    group: ProcessGroup | None = None,
    pipeline_parallel: bool = False,
) -> GlobalMask[dict[K, Tensor]]: ...


@overload
def global_mask(
    tensors: Iterable[TensorLike],
    k: Counts,
    *,
    scores: Sequence[Scores | None] | Literal["random"] | None = None,
    candidates: Sequence[Tensor | None] | None = None,
    groups: Sequence[Hashable] | None = None,
    largest: bool = True,
    signed: bool = False,
    start: GlobalMask[Any] | MaskStart | None = None,
    group: ProcessGroup | None = None,
    pipeline_parallel: bool = False,
) -> GlobalMask[list[Tensor]]: ...


def global_mask(
    tensors: Any,
    k: Counts,
    *,
    scores: Any = None,
    candidates: Any = None,
    groups: Any = None,
    largest: bool = True,
    signed: bool = False,
    start: GlobalMask[Any] | MaskStart | None = None,
    group: ProcessGroup | None = None,
    pipeline_parallel: bool = False,
) -> GlobalMask[Any]:
    """Select exactly k elements of some tensors: one ranking over all of them, and over all ranks.

    Nothing is changed: the masks are new tensors. The order is that of
    :func:`global_unstructured`: (score, position of the tensor, row-major index in the whole
    tensor), ascending. The k largest are its last k elements, and the k smallest its first k: so
    among equal scores the *higher* index is large. The masks of the k largest are those that
    ``L1Unstructured`` leaves when it prunes all others, and no sharding changes them.

    Every rank of ``group`` has to call this with the same arguments when a process group is
    initialised. It may be called anywhere where all ranks come by in the same order: in
    ``optimizer.step()``, in its hooks, under ``torch.no_grad()``::

        kept = None
        for step, batch in enumerate(batches):
            ...
            kept = prune.global_mask(weights, k, start=kept)  # one read; a few small messages

    Args:
        tensors: a mapping or a sequence of tensors, each of them once: DTensors, which are sharded
            or replicated over the ranks of their mesh, and plain tensors, which are whole and equal
            on all ranks. Or (module, name) pairs in their place, pruned or not, which stand for the
            unmasked values of the parameter. Under FSDP1 a pair is the only way, because a run of
            its flat parameter does not know its place: its mask is this rank's run, 1-d.
        k: how many elements to select. Or a count for each tensor, as a mapping or a sequence like
            ``tensors``; or, with ``groups``, a mapping from each group to its count. Each group has
            an order of its own.
        scores: rank by these instead of the values: like ``tensors``, each a tensor laid out like
            its tensor, or whole and equal on all ranks, or :class:`FactoredScores`; tensors that
            have none are ranked by their values. Or "random": scores that are a function of a seed,
            drawn from torch's default generator on the leading rank, and of the place of an
            element, so that they are the same on any sharding.
        candidates: bool tensors, like ``scores``: only elements that are True compete, and no other
            is selected. All elements of tensors that have none compete.
        groups: the group of each tensor, like ``tensors``; any hashable labels.
        largest: select the k largest. If False, the k smallest.
        signed: rank scores with their sign, and not by |score|.
        start: what an earlier call of the same kind returned, or its attribute ``start`` (a few
            numbers, for who does not want to keep the masks). The search begins around its
            thresholds. It makes the call faster if they moved little, and never changes the
            result.
        group: the ranks that take part; every rank by default.
        pipeline_parallel: the ranks hold different parts of one model, and each passes the tensors
            of its own part (there may be none), and scores and candidates of these. Tensors need
            names: the keys of a mapping, or pairs that ``select`` lists. They are joined by name,
            in the natural order of names ("layers.2" before "layers.10"), and not in that of the
            callers; tensors of the same name are replicas. ``k`` is one count for all.

    Returns:
        Masks, thresholds, and the ``start`` of the next call. ``masks`` are bool tensors laid out
        like ``tensors``, DTensors for DTensors, True where an element is selected.

    Raises:
        TypeError: arguments of a wrong type.
        ValueError: k is larger than the number of candidates; a NaN score of a candidate; a
            tensor that is given twice; other keys; replicas that differ; ranks that differ in their
            arguments. Named, on every rank.
        NotImplementedError: a layout or a dtype that is not supported, or a tensor of FSDP1 without
            its module; several counts or groups under ``pipeline_parallel``. Named, on every rank.

    Cost: one read of the scores (two of tensors with replicas, which are compared), and one write
    of the masks, 1 byte per element and a little more for a moment. About ten all-reduces, 80 KB in
    all whatever the size of the tensors; with a good ``start`` 4 to 6, 12 to 33 KB. Tensors that
    have replicas or candidates need one more, of 24 bytes per tensor; a pipeline needs it too, and
    four to join names, about 200 bytes per tensor and kind of stage. The searches of several
    groups share their all-reduces, with as many bytes for each group.

    Source: the projection is that of ADMM (Boyd et al., 2011; ELSA, 2025) and of iterative hard
    thresholding (Blumensath and Davies, arXiv 0805.0510).
    """
    communicator = world(group)

    def read() -> Reading:
        check_signed(scores, bool(signed))
        items = read_items(
            tensors, k, scores=scores, candidates=candidates, groups=groups,
            communicator=communicator, pipeline_parallel=pipeline_parallel,
        )  # fmt: skip
        return Reading.of(items, start_of(start), bool(signed), is_random=scores is RANDOM)

    options = [
        ("largest", str(bool(largest))),
        ("signed", str(bool(signed))),
        ("pipeline_parallel", str(bool(pipeline_parallel))),
    ]
    with communicator.exclusively(), torch.inference_mode(False), torch.no_grad():
        reading = communicator.run(
            read, lambda made: [*options, *made.facts(pipeline_parallel=pipeline_parallel)]
        )
        keys = reading.items.keys
        if pipeline_parallel:
            reading = joined_by_name(reading, communicator)
        problem = Problem.of(reading, communicator, is_joined=pipeline_parallel)
        found = select(problem, reading.start, bool(largest), communicator)
        written = communicator.run(lambda: finish(problem, found, bool(largest)))
    masks = [written[place] for place in reading.items.places]
    thresholds: dict[Hashable, float | None] = {}
    for label, selection in found.items():
        of_group = problem.keys[label]
        is_cut = selection.num_ties > 0 and of_group is not RANDOM_KEYS
        thresholds[label] = of_group.score_of(selection.cut.threshold) if is_cut else None
    return GlobalMask(
        dict(zip(keys, masks, strict=True)) if isinstance(tensors, Mapping) else masks,
        thresholds,
        {label: selection.num_ties for label, selection in found.items()},
        {
            label: s.num_ties - s.num_ties_pruned if largest else s.num_ties_pruned
            for label, s in found.items()
        },
        MaskStart({label: s.start for label, s in found.items() if s.start is not None}),
        communicator.num_collectives,
        communicator.bytes_sent,
    )


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
