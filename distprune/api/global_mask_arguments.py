"""``global_mask``: its arguments and its result."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from distprune._common.collectives import Communicator
from distprune._common.naming import checked_pair
from distprune.call.importance_scores import part_of_scores
from distprune.call.reading import check_names, check_ranks, describe
from distprune.call.request import Fact
from distprune.selection.bracket import Start
from distprune.shards.factored import FactoredScores
from distprune.shards.parameters import Target
from distprune.shards.reader import ShardReader, local_part, unflattened, whole_checksum
from distprune.shards.shard import LocalShard
from distprune.torch_private.wrapper import is_piece_of_flat

MasksT = TypeVar("MasksT")


@dataclass(frozen=True)
class MaskStart:
    """Where the next call of the same kind looks first: a few numbers per group.

    Attributes:
        groups: the start of each group's search, by its label.
    """

    groups: Mapping[Hashable, Start]


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
        start: pass it to the next call: a few numbers.
        num_collectives: all-reduces of the call.
        bytes_sent: payload of those, per rank.
    """

    masks: MasksT
    thresholds: Mapping[Hashable, float | None]
    num_ties: Mapping[Hashable, int]
    num_ties_selected: Mapping[Hashable, int]
    start: MaskStart
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
        labels: the group of each tensor.
        counts: how many elements of each group are to be selected.
    """

    keys: list[Hashable]
    targets: list[Target]
    labels: list[Hashable]
    counts: dict[Hashable, int]

    @property
    def members(self) -> dict[Hashable, list[int]]:
        """By group, the positions of its tensors."""
        members: dict[Hashable, list[int]] = {label: [] for label in self.counts}
        for position, label in enumerate(self.labels):
            members[label].append(position)
        return members

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
    labels, counts = _groups(keys, k, groups, like)
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
    return Items(keys, targets, labels, counts)


def start_of(start: GlobalMask[Any] | MaskStart | None) -> MaskStart:
    """The argument ``start`` as numbers.

    Raises:
        TypeError: another type.
    """
    if start is None:
        return MaskStart({})
    if isinstance(start, GlobalMask):
        return start.start
    if not isinstance(start, MaskStart):
        raise TypeError(
            f"start is a {type(start).__name__}; expected what an earlier global_mask returned, "
            "or its attribute start."
        )
    return start


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
) -> tuple[list[Hashable], dict[Hashable, int]]:
    """The label of every tensor's group, and the count of each group."""
    if groups is None and isinstance(k, numbers.Integral):
        return [None] * len(keys), {None: _checked_k(k, "k")}
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
    present = dict.fromkeys(labels)
    if set(counts) != set(present):
        different = next(iter(set(counts) ^ set(present)))
        raise ValueError(
            f"k has a count for the groups {list(counts)[:5]}, and the tensors have the groups "
            f"{list(present)[:5]}; expected the same ({different!r} is in one of them only)."
        )
    return labels, {label: _checked_k(counts[label], f"k[{label!r}]") for label in present}


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
