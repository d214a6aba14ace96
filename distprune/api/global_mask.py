"""``global_mask``: the k largest of all elements of some tensors, over all ranks.

    kept = prune.global_mask(dict(model.named_parameters()), k)   # kept.masks[name]: bool, a shard

It is the step that methods share which project weights onto k elements (ADMM, iterative hard
thresholding), or choose what to drop and to grow (SET, RigL).
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, overload

import torch
from torch import Tensor, nn

from distprune._common.collectives import Communicator
from distprune._common.naming import checked_pair
from distprune._common.process_groups import world
from distprune.call.importance_scores import check_signed, part_of_scores
from distprune.call.reading import check_names, check_ranks, describe
from distprune.call.replicas import agree_on_copies, count_live_and_compare
from distprune.call.request import Fact
from distprune.methods.ranking import (
    Keys,
    agree_on_seed,
    random_keys,
    score_keys,
    scores_or_values,
)
from distprune.selection.candidates import PartCut, Ranked, candidates_of
from distprune.selection.keys import RANDOM_KEYS, Order, key_range
from distprune.selection.passes import write_masks
from distprune.selection.radix import Search
from distprune.selection.scores import ScoreSource
from distprune.selection.search import Selection, search_lowest, search_together
from distprune.shards.factored import FactoredScores
from distprune.shards.geometry import memory_order
from distprune.shards.parameters import Target
from distprune.shards.reader import ShardReader, local_part, unflattened, whole_checksum
from distprune.shards.shard import LocalShard
from distprune.torch_private.wrapper import is_piece_of_flat

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

        for step, batch in enumerate(batches):
            ...
            kept = prune.global_mask(weights, k)

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
        group: the ranks that take part; every rank by default.
        pipeline_parallel: the ranks hold different parts of one model, and each passes the tensors
            of its own part (there may be none), and scores and candidates of these. Tensors need
            names: the keys of a mapping, or pairs that ``select`` lists. They are joined by name,
            in the natural order of names ("layers.2" before "layers.10"), and not in that of the
            callers; tensors of the same name are replicas. ``k`` is one count for all.

    Returns:
        Masks and thresholds. ``masks`` are bool tensors laid out like ``tensors``, DTensors for
        DTensors, True where an element is selected.

    Raises:
        TypeError: arguments of a wrong type.
        ValueError: k is larger than the number of candidates; a NaN score of a candidate; a
            tensor that is given twice; other keys; replicas that differ; ranks that differ in their
            arguments. Named, on every rank.
        NotImplementedError: a layout or a dtype that is not supported, or a tensor of FSDP1 without
            its module; several counts or groups under ``pipeline_parallel``. Named, on every rank.

    Cost: one read of the scores (two of tensors with replicas, which are compared), and one write
    of the masks, 1 byte per element and a little more for a moment. About ten all-reduces, 80 KB in
    all whatever the size of the tensors. Tensors that have replicas or candidates need one more, of
    24 bytes per tensor; a pipeline needs it too, and four to join names, about 200 bytes per tensor
    and kind of stage. The searches of several groups share their all-reduces, with as many bytes
    for each group.

    Source: the projection is that of ADMM (Boyd et al., 2011; ELSA, 2025) and of iterative hard
    thresholding (Blumensath and Davies, arXiv 0805.0510).
    """
    communicator = world(group)
    is_random = scores is RANDOM
    order = Order.ASCENDING if signed else Order.MAGNITUDE

    def read() -> tuple[Items, dict[Hashable, _Memory]]:
        check_signed(scores, bool(signed))
        items = read_items(
            tensors, k, scores=scores, candidates=candidates, groups=groups,
            communicator=communicator, pipeline_parallel=pipeline_parallel,
        )  # fmt: skip
        memory = {target.shard.key: _prepare(target, order, is_random) for target in items.targets}
        return items, memory

    options = [
        ("largest", str(bool(largest))),
        ("signed", str(bool(signed))),
        ("pipeline_parallel", str(bool(pipeline_parallel))),
        ("scores", RANDOM if is_random else "of the tensors"),
    ]
    with communicator.exclusively(), torch.inference_mode(False), torch.no_grad():
        items, memory = communicator.run(
            read,
            lambda made: [
                *options,
                *made[0].facts(pipeline_parallel=pipeline_parallel),
            ],
        )
        targets = agree_on_copies(
            items.targets, communicator, "tensors", pipeline_parallel=pipeline_parallel
        )
        # What only other ranks have has no elements here.
        prepared = [
            memory.get(target.shard.key) or _prepare(target, order, is_random) for target in targets
        ]
        members = items.members
        if pipeline_parallel:  # the tensors of all ranks, in one group
            members = {None: list(range(len(targets)))}
        # Each rank of a pipeline may have candidates.
        is_limited = pipeline_parallel or any(target.shard.mask is not None for target in targets)
        parts = _grouped(targets, prepared, members, order, is_random, is_limited, communicator)
        searches = [
            of_group.search(label, items.counts[label], largest)
            for label, of_group in parts.items()
        ]
        found = dict(zip(parts, search_together(searches, communicator), strict=True))

        def finish() -> dict[Hashable, Tensor]:
            for label, selection in found.items():
                parts[label].write(selection, largest)
            return {
                target.shard.key: target.shard.as_parameter_layout(made.mask)
                for target, made in zip(targets, prepared, strict=True)
            }

        written = communicator.run(finish)
    masks = [written[target.shard.key] for target in items.targets]
    thresholds = {
        label: parts[label].ranked.keys.score_of(selection.cut.threshold)
        if selection.num_ties and not is_random
        else None
        for label, selection in found.items()
    }
    return GlobalMask(
        dict(zip(items.keys, masks, strict=True)) if isinstance(tensors, Mapping) else masks,
        thresholds,
        {label: selection.num_ties for label, selection in found.items()},
        {
            label: s.num_ties - s.num_ties_pruned if largest else s.num_ties_pruned
            for label, s in found.items()
        },
        communicator.num_collectives,
        communicator.bytes_sent,
    )


@dataclass(frozen=True)
class _Memory:
    """What is made for one tensor before the ranks agree on anything, because it may fail.

    Attributes:
        scores: the scores of this rank's part; not used if the call ranks at random.
        mask: N-d, uninitialised: the memory of the result.
    """

    scores: ScoreSource
    mask: Tensor


def _prepare(target: Target, order: Order, is_random: bool) -> _Memory:
    shard = target.shard
    if memory_order(shard.values) is None:  # it has gaps, such as a slice: its mask has none
        mask = torch.empty(shard.values.shape, dtype=torch.bool, device=shard.values.device)
    else:
        mask = shard.new_mask(torch.bool)
    (scores,) = scores_or_values([shard], [target.scores], are_signed=order is Order.ASCENDING)
    if scores.dtype.is_complex and not is_random:
        raise NotImplementedError(
            f"{target.label}: scores of dtype {scores.dtype} cannot be ranked; expected real "
            "ones. Pass their absolute values as scores."
        )
    if not is_random:
        key_range(scores.dtype, order)  # raises for other dtypes
    return _Memory(scores, mask)


@dataclass(frozen=True)
class _Group:
    """Tensors that have one order.

    Attributes:
        ranked: the tensors; what competes is live.
        flat: masks as 1-d views: what is written.
    """

    ranked: Ranked
    flat: list[Tensor]

    def search(self, label: Hashable, k: int, largest: bool) -> Search[Selection]:
        """Where the order is cut, as a search that runs beside those of other groups."""
        total = sum(self.ranked.num_live)
        if k > total:
            of_group = "" if label is None else f" of group {label!r}"
            raise ValueError(
                f"k{of_group} is {k:,}, and {total:,} elements compete; expected at most as many."
            )
        number = total - k if largest else k
        return search_lowest(self.ranked, number, drafts=self.flat)

    def write(self, selection: Selection, largest: bool) -> None:
        """Write the masks; a local step."""
        parts = self.ranked.parts
        cuts = [PartCut(position, selection.cut) for position in range(len(parts))]
        write_masks(parts, cuts, self.flat, selection.drafted)
        if largest:
            return
        # Written is what comes after the cut, among the candidates.
        for part, flat in zip(parts, self.flat, strict=True):
            if part.live is None:
                flat.logical_not_()
            else:
                flat.logical_xor_(part.live)


def _grouped(
    targets: Sequence[Target],
    prepared: Sequence[_Memory],
    members: Mapping[Hashable, Sequence[int]],
    order: Order,
    is_random: bool,
    is_limited: bool,
    communicator: Communicator,
) -> dict[Hashable, _Group]:
    """By label, what is ranked together. Collective.

    Args:
        targets, prepared: all tensors, and what was made for each.
        members: the positions of the tensors of each group, by label.
        order: the order of the scores.
        is_random: rank by random keys instead.
        is_limited: whether only candidates compete, of some tensor on some rank.
    """
    shards = [target.shard for target in targets]
    num_live = [shard.numel for shard in shards]
    if is_limited or any(shard.num_replicas > 1 for shard in shards):
        num_live = count_live_and_compare(targets, not is_random, communicator)
    random = random_keys(shards, agree_on_seed(communicator)) if is_random else []
    groups: dict[Hashable, _Group] = {}
    for label, positions in members.items():
        if is_random:
            made: Keys = RANDOM_KEYS, [random[i] for i in positions]
        else:
            made = score_keys([prepared[i].scores for i in positions], order)
        keys, sources = made
        ranked = Ranked(
            candidates_of([shards[i] for i in positions], sources),
            [targets[i].label for i in positions],
            [num_live[i] for i in positions],
            keys,
            communicator,
        )
        groups[label] = _Group(ranked, [shards[i].flat(prepared[i].mask) for i in positions])
    return groups


MasksT = TypeVar("MasksT")


@dataclass(frozen=True)
class GlobalMask(Generic[MasksT]):
    """Masks, and facts about them that are the same on all ranks.

    Attributes:
        masks: a bool tensor for each tensor of the call, laid out like it, True where it was
            selected: a dict if the call was given a mapping, otherwise a list.
        thresholds: the score at which a group's order was cut, by its label (|score| unless
            ``signed``); None where nothing or everything was selected, and for random scores.
            Without groups, the only label is None.
        num_ties: the number of elements whose score is the threshold, by label ...
        num_ties_selected: ... and how many of them were selected.
        num_collectives: all-reduces of the call.
        bytes_sent: payload of those, per rank.
    """

    masks: MasksT
    thresholds: Mapping[Hashable, float | None]
    num_ties: Mapping[Hashable, int]
    num_ties_selected: Mapping[Hashable, int]
    num_collectives: int
    bytes_sent: int

    @property
    def threshold(self) -> float | None:
        """The threshold of a call without groups, or with one.

        Raises:
            ValueError: there are several groups.
        """
        if len(self.thresholds) != 1:
            raise ValueError(
                f"the call had {len(self.thresholds)} groups; expected one. Read `thresholds`."
            )
        return next(iter(self.thresholds.values()))


# What may stand for one tensor: itself, or the parameter of a module.
TensorLike = Tensor | tuple[nn.Module, str]
Scores = Tensor | FactoredScores
RANDOM = "random"


@dataclass(frozen=True)
class Items:
    """The tensors of a call on this rank.

    Attributes:
        keys: the keys of the caller's mapping, or positions in the sequence.
        targets: this rank's parts; the "mask in force" of a shard are its candidates.
        members: by group, the positions of its tensors.
        counts: how many elements of each group are to be selected.
    """

    keys: list[Hashable]
    targets: list[Target]
    members: dict[Hashable, list[int]]
    counts: dict[Hashable, int]

    def facts(self, *, pipeline_parallel: bool) -> list[Fact]:
        """What must be equal on all ranks; of a pipeline, they have different tensors."""
        counts = ("k", str(list(self.counts.values())))
        if pipeline_parallel:
            return [counts]
        groups = ("groups", str(list(self.members.values())))
        return [groups, counts, *describe(self.targets, "tensors")]


def read_items(
    tensors: Any,
    k: Any,
    *,
    scores: Any,
    candidates: Any,
    groups: Any,
    communicator: Communicator,
    pipeline_parallel: bool,
) -> Items:
    """Check the arguments, and read this rank's part of every tensor; see ``global_mask``."""
    named = _items_of(tensors, may_be_empty=pipeline_parallel)
    if pipeline_parallel:
        _check_pipeline(named, k, groups)
    keys = list(named)
    like = partial(_like, keys=keys, is_mapping=isinstance(tensors, Mapping))
    members, counts = _groups(keys, k, groups, like)
    ranked = {} if scores is None or scores is RANDOM else like("scores", scores)
    competing = {} if candidates is None else like("candidates", candidates)
    reader = ShardReader(communicator.index, communicator.size)
    targets: list[Target] = []
    seen: dict[Hashable, str] = {}
    for key, given in named.items():
        label = _label(key, given)
        shard = _read(reader, given, label)
        if shard.key in seen:
            raise ValueError(
                f"{label} is {seen[shard.key]} again: the same tensor; expected each tensor once, "
                "because its elements are selected once."
            )
        seen[shard.key] = label
        part, about = None, "none"
        if ranked.get(key) is not None:
            part, about = part_of_scores(ranked[key], label, shard, "scores")
        if competing.get(key) is not None:
            mask, about_mask = _candidates_of(competing[key], label, shard)
            shard = replace(shard, mask=mask)
            about += f", candidates: {about_mask}"
        targets.append(Target(label, (), False, shard, part, about))
    check_ranks([target.shard for target in targets], set(communicator.ranks))
    return Items(keys, targets, members, counts)


def _items_of(tensors: Any, *, may_be_empty: bool) -> dict[Hashable, Any]:
    if isinstance(tensors, Mapping):
        named = dict(tensors)
    elif isinstance(tensors, Iterable) and not isinstance(tensors, (Tensor, str)):
        named = dict(enumerate(tensors))
    else:
        raise TypeError(
            f"tensors is a {type(tensors).__name__}; expected a mapping or a sequence of tensors, "
            "DTensors, or (module, name) pairs."
        )
    if not named and not may_be_empty:
        raise ValueError("tensors is empty; expected at least one tensor.")
    return named


def _check_pipeline(named: Mapping[Hashable, Any], k: Any, groups: Any) -> None:
    """Raise for what cannot be joined over the parts of a pipeline."""
    if groups is not None or not isinstance(k, numbers.Integral):
        raise NotImplementedError(
            "pipeline_parallel=True takes one count for all tensors of all ranks, and k or groups "
            "has more; expected an integer k, and groups=None. Make a call for each group."
        )
    for key, given in named.items():
        if not isinstance(key, str) and getattr(given, "fqn", None) is None:
            raise TypeError(
                f"tensors[{key!r}] has no name; expected a mapping from full names, or pairs that "
                "select(stage) lists, because pipeline_parallel=True joins the tensors of all "
                "ranks by name."
            )
    check_names([_label(key, given) for key, given in named.items()], "tensors")


def _like(
    what: str, values: Any, keys: Sequence[Hashable], *, is_mapping: bool
) -> dict[Hashable, Any]:
    """Values by the keys of the tensors; those of a mapping may be missing."""
    if isinstance(values, Mapping):
        known = set(keys)
        unknown = [key for key in values if key not in known]
        if unknown:
            raise ValueError(
                f"{what} has the key {unknown[0]!r}, which is none of the tensors; expected keys "
                f"among {', '.join(map(repr, keys[:5]))}{', ...' if len(keys) > 5 else ''}."
            )
        return dict(values)
    is_sequence = isinstance(values, Sequence) and not isinstance(values, str)
    if not is_sequence or is_mapping:
        expected = "a mapping with the keys" if is_mapping else "a sequence"
        raise TypeError(f"{what} is a {type(values).__name__}; expected {expected} of the tensors.")
    if len(values) != len(keys):
        raise ValueError(
            f"{what} has {len(values)} elements, for {len(keys)} tensors; expected one for each."
        )
    return dict(zip(keys, values, strict=True))


def _groups(
    keys: list[Hashable], k: Any, groups: Any, like: Callable[[str, Any], dict[Hashable, Any]]
) -> tuple[dict[Hashable, list[int]], dict[Hashable, int]]:
    """By group, the positions of its tensors, and its count."""
    if groups is None and isinstance(k, numbers.Integral):
        return {None: list(range(len(keys)))}, {None: _checked_k(k, "k")}
    if groups is None:
        counts = like("k", k)
        missing = [key for key in keys if key not in counts]
        labels = list(keys)
    else:
        of_tensor = like("groups", groups)
        missing = [key for key in keys if key not in of_tensor]
        labels = [of_tensor.get(key) for key in keys]
        if not isinstance(k, Mapping):
            raise TypeError(
                f"k is a {type(k).__name__}; expected a mapping from each group to its count, as "
                "there are groups."
            )
        counts = dict(k)
    if missing:
        raise ValueError(
            f"{'k' if groups is None else 'groups'} has nothing for {missing[0]!r}; expected an "
            "entry for every tensor."
        )
    members: dict[Hashable, list[int]] = {label: [] for label in labels}
    for position, label in enumerate(labels):
        members[label].append(position)
    if counts.keys() != members.keys():
        different = next(iter(counts.keys() ^ members.keys()))
        raise ValueError(
            f"k has a count for the groups {list(counts)[:5]}, and the tensors have the groups "
            f"{list(members)[:5]}; expected the same ({different!r} is in one of them only)."
        )
    return members, {label: _checked_k(counts[label], f"k[{label!r}]") for label in members}


def _checked_k(k: Any, what: str) -> int:
    if not isinstance(k, numbers.Integral) or isinstance(k, bool):
        raise TypeError(
            f"{what} is a {type(k).__name__}; expected an integer, the number of elements to "
            "select."
        )
    if k < 0:
        raise ValueError(f"{what} is {k}; expected 0 or more.")
    return int(k)


def _label(key: Hashable, given: Any) -> str:
    if isinstance(key, str):
        return key
    fqn: str | None = getattr(given, "fqn", None)
    return fqn or f"tensors[{key!r}]"


def _read(reader: ShardReader, given: Any, label: str) -> LocalShard:
    if isinstance(given, Tensor):
        if is_piece_of_flat(given):
            raise NotImplementedError(
                f"{label} is a piece of an FSDP1 flat parameter, and does not tell which elements "
                "of the parameter this rank has; expected a (module, name) pair in its place, as "
                "select(model) lists them. Pass other tensors of that layout as `scores`."
            )
        return reader.read_tensor(given, label)
    module, name = checked_pair(given, label, "a tensor, or a (module, name) pair")
    # What competes is said by ``candidates``, not by a mask in force.
    return replace(reader.read(module, name, label), mask=None)


def _candidates_of(given: Any, label: str, shard: LocalShard) -> tuple[Tensor, str]:
    """This rank's part of the candidates, and what must be equal on all ranks."""
    if not isinstance(given, Tensor) or given.dtype is not torch.bool:
        kind = given.dtype if isinstance(given, Tensor) else type(given).__name__
        raise TypeError(f"{label}: candidates is a {kind}; expected a bool tensor.")
    whole = unflattened(label, "candidates", given, shard)
    return local_part(label, "candidates", whole, shard), whole_checksum(given, shard)
