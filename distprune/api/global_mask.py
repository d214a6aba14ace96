"""``global_mask``: the k largest of all elements of some tensors, over all ranks.

    kept = prune.global_mask(dict(model.named_parameters()), k)   # kept.masks[name]: bool, a shard

It is the step that methods share which project weights onto k elements (ADMM, iterative hard
thresholding), or choose what to drop and to grow (SET, RigL).
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from distprune.base.memory import ordinary_tensors
from distprune.base.naming import checked_pair
from distprune.call.reading import check_names, check_ranks, check_signed, describe, part_of_scores
from distprune.call.replicas import agree_on_copies, count_live_and_compare
from distprune.methods.ranking import Keys, agree_on_seed, score_keys, scores_or_values
from distprune.ranking.keys import Order, key_range
from distprune.ranking.ranking import Ranking
from distprune.ranking.scores import random_keys
from distprune.ranks.process_groups import world
from distprune.shards.factored import FactoredScores
from distprune.shards.reader import ShardReader, local_part, whole_checksum
from distprune.shards.shard import Shard
from distprune.wrappers.wrapper import is_piece_of_flat

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# What may stand for one tensor: itself, or the parameter of a module.
TensorLike = Tensor | tuple[nn.Module, str]
Scores = Tensor | FactoredScores


@dataclass(frozen=True)
class GlobalMask:
    """Masks, and facts about them that are the same on all ranks.

    Attributes:
        masks: a bool tensor for each tensor of the call, laid out like it, True where it was
            selected: a dict if the call was given a mapping, otherwise a list.
        threshold: the score at which the order was cut (|score| unless ``signed``); None where
            nothing or everything was selected, for random scores, and for several counts.
        num_ties: the number of elements whose score is the threshold; 0 for several counts ...
        num_ties_selected: ... and how many of them were selected.
        num_collectives: all-reduces of the call.
        bytes_sent: payload of those, per rank.
    """

    masks: Any
    threshold: float | None
    num_ties: int
    num_ties_selected: int
    num_collectives: int
    bytes_sent: int


def global_mask(
    tensors: Mapping[Any, TensorLike] | Iterable[TensorLike],
    k: int | Sequence[int],
    *,
    scores: Mapping[Any, Scores] | Sequence[Scores | None] | Literal["random"] | None = None,
    candidates: Mapping[Any, Tensor] | Sequence[Tensor | None] | None = None,
    largest: bool = True,
    signed: bool = False,
    group: ProcessGroup | None = None,
    pipeline_parallel: bool = False,
) -> GlobalMask:
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
        k: how many elements to select. Or a count for each tensor, in their order, which is then
            ranked by itself; not under ``pipeline_parallel``.
        scores: rank by these instead of the values: like ``tensors``, each a tensor laid out like
            its tensor, or whole and equal on all ranks, or :class:`FactoredScores`; tensors that
            have none are ranked by their values. Or "random": scores that are a function of a seed,
            drawn from torch's default generator on the leading rank, and of the place of an
            element, so that they are the same on any sharding.
        candidates: bool tensors, like ``scores``: only elements that are True compete, and no other
            is selected. All elements of tensors that have none compete.
        largest: select the k largest. If False, the k smallest.
        signed: rank scores with their sign, and not by |score|.
        group: the ranks that take part; every rank by default.
        pipeline_parallel: the ranks hold different parts of one model, and each passes the tensors
            of its own part (there may be none), and scores and candidates of these. Tensors need
            names: the keys of a mapping, or pairs that ``select`` lists. They are joined by name,
            in the natural order of names ("layers.2" before "layers.10"), and not in that of the
            callers; tensors of the same name are replicas.

    Returns:
        Masks and the threshold. ``masks`` are bool tensors laid out like ``tensors``, DTensors for
        DTensors, True where an element is selected.

    Raises:
        TypeError: arguments of a wrong type.
        ValueError: k is larger than the number of candidates; a NaN score of a candidate; a
            tensor that is given twice; other keys; replicas that differ; ranks that differ in their
            arguments. Named, on every rank.
        NotImplementedError: a layout or a dtype that is not supported, or a tensor of FSDP1 without
            its module. Named, on every rank.

    Cost: one read of the scores (two of tensors with replicas, which are compared), and one write
    of the masks, 1 byte per element and a little more for a moment. About ten all-reduces, 80 KB in
    all whatever the size of the tensors. Tensors that have replicas or candidates need one more, of
    24 bytes per tensor; a pipeline needs it too, and four to join names, about 200 bytes per tensor
    and kind of stage.

    Source: the projection is that of ADMM (Boyd et al., 2011; ELSA, 2025) and of iterative hard
    thresholding (Blumensath and Davies, arXiv 0805.0510).
    """
    communicator = world(group)
    is_random = isinstance(scores, str) and scores == "random"
    order = Order.ASCENDING if signed else Order.MAGNITUDE
    each = isinstance(k, Sequence) and not pipeline_parallel

    def read() -> tuple[list[int], dict[Hashable, Shard]]:
        check_signed(scores, bool(signed))
        wanted: Any = k if each else [k]
        counts = [operator.index(count) for count in wanted]
        reader = ShardReader(communicator.index, communicator.size)
        given = None if is_random else scores
        own = _read(tensors, given, candidates, order, reader, pipeline_parallel)
        check_ranks(own.values(), set(communicator.ranks))
        return counts, own

    def facts_of(result: tuple[list[int], dict[Hashable, Shard]]) -> list[tuple[str, str]]:
        counts, own = result
        return [
            ("largest", str(bool(largest))),
            ("signed", str(bool(signed))),
            ("pipeline_parallel", str(bool(pipeline_parallel))),
            ("scores", "random" if is_random else "of the tensors"),
            ("k", str(counts)),
            # The ranks of a pipeline have different tensors.
            *([] if pipeline_parallel else describe(list(own.values()), "tensors")),
        ]

    with communicator.exclusively(), ordinary_tensors(), torch.no_grad():
        counts, own = communicator.run(read, facts_of)
        shards = agree_on_copies(
            list(own.values()), communicator, "tensors", pipeline_parallel=pipeline_parallel
        )
        num_live = [shard.numel for shard in shards]
        # Each rank of a pipeline may have candidates.
        if pipeline_parallel or any(s.mask is not None or s.num_replicas > 1 for s in shards):
            num_live = count_live_and_compare(shards, not is_random, communicator)
        totals = num_live if each else [sum(num_live)]
        for count, total in zip(counts, totals, strict=True):
            if not 0 <= count <= total:
                raise ValueError(
                    f"k is {count:,}, and {total:,} elements compete; expected 0 <= k <= {total:,}."
                )
        seed = agree_on_seed(communicator) if is_random else 0

        def prepare() -> tuple[Keys, list[Tensor]]:
            if is_random:
                keys: Keys = random_keys(shards, seed)
            else:
                keys = score_keys(scores_or_values(shards, are_signed=bool(signed)), order)
            return keys, [shard.new_mask(torch.bool) for shard in shards]

        keys, masks = communicator.run(prepare)
        flat = [shard.flat(mask) for shard, mask in zip(shards, masks, strict=True)]
        ranking = Ranking(shards, keys, num_live, communicator, flat)
        pairs = zip(counts, totals, strict=True)
        num_before = [total - count if largest else count for count, total in pairs]
        cuts = ranking.cut(range(len(shards)) if each else [0] * len(shards), num_before)

        def finish() -> dict[Hashable, Tensor]:
            ranking.write(cuts)
            if not largest:  # written is what comes after the cut, among the candidates
                for shard, mask in zip(shards, flat, strict=True):
                    live = shard.flat_mask
                    mask.logical_not_() if live is None else mask.logical_xor_(live)
            pairs = zip(shards, masks, strict=True)
            return {shard.key: shard.as_parameter_layout(mask) for shard, mask in pairs}

        written = communicator.run(finish)
    selected = {key: written[shard.key] for key, shard in own.items()}
    threshold: float | None = None
    num_ties = num_selected = 0
    if not each:
        key, num_ties, num_pruned = cuts.common()
        num_selected = num_ties - num_pruned if largest else num_pruned
        if num_ties and not is_random:
            threshold = ranking.keys.score_of(key)
    return GlobalMask(
        selected if isinstance(tensors, Mapping) else list(selected.values()),
        threshold,
        num_ties,
        num_selected,
        communicator.num_collectives,
        communicator.bytes_sent,
    )


def _read(
    tensors: Any,
    scores: Any,
    candidates: Any,
    order: Order,
    reader: ShardReader,
    pipeline_parallel: bool,
) -> dict[Hashable, Shard]:
    """This rank's part of every tensor, by its key or position.

    The "mask in force" of a shard are its candidates.
    """
    if isinstance(tensors, Tensor):
        raise TypeError("tensors is a Tensor; expected a mapping or a sequence of tensors.")
    is_mapping = isinstance(tensors, Mapping)
    named: dict[Hashable, Any] = dict(tensors if is_mapping else enumerate(tensors))
    if not named and not pipeline_parallel:
        raise ValueError("tensors is empty; expected at least one tensor.")
    scores = _like("scores", scores, named, is_mapping)
    candidates = _like("candidates", candidates, named, is_mapping)
    shards: dict[Hashable, Shard] = {}
    seen: dict[Hashable, str] = {}
    for key, given in named.items():
        name = key if isinstance(key, str) else getattr(given, "fqn", None)
        if name is None and pipeline_parallel:
            raise TypeError(
                f"tensors[{key!r}] has no name; expected a mapping from full names, or pairs that "
                "select(stage) lists, because pipeline_parallel=True joins the tensors of all "
                "ranks by name."
            )
        label = name or f"tensors[{key!r}]"
        # What competes is said by ``candidates``, not by a mask in force.
        shard = replace(_shard_of(reader, given, label), mask=None)
        if shard.key in seen:
            raise ValueError(
                f"{label} is {seen[shard.key]} again: the same tensor; expected each tensor once, "
                "because its elements are selected once."
            )
        seen[shard.key] = label
        about = "none"
        if scores.get(key) is not None:
            shard.scores, about = part_of_scores(scores[key], label, shard, "scores")
        if candidates.get(key) is not None:
            mask, about_mask = _candidates_of(candidates[key], label, shard)
            shard = replace(shard, mask=mask)
            about += f", candidates: {about_mask}"
        shard.about_scores = about
        (source,) = scores_or_values([shard], are_signed=order is Order.ASCENDING)
        try:
            key_range(source.dtype, order)
        except NotImplementedError as error:
            raise NotImplementedError(f"{label}: {error}") from None
        shards[key] = shard
    if pipeline_parallel:
        check_names([shard.name for shard in shards.values()], "tensors")
    return shards


def _like(
    what: str, values: Any, named: Mapping[Hashable, Any], is_mapping: bool
) -> dict[Hashable, Any]:
    """Values by the keys of the tensors; those of a mapping may be missing."""
    if values is None:
        return {}
    if not isinstance(values, Mapping) and (is_mapping or isinstance(values, str)):
        expected = "a mapping with the keys" if is_mapping else "a sequence"
        raise TypeError(f"{what} is a {type(values).__name__}; expected {expected} of the tensors.")
    own = dict(values if isinstance(values, Mapping) else enumerate(values))
    is_short = len(own) < len(named) and not isinstance(values, Mapping)
    if is_short or not own.keys() <= named.keys():
        raise ValueError(
            f"{what} has {len(own)} entries ({', '.join(map(repr, list(own)[:5]))}), for "
            f"{len(named)} tensors ({', '.join(map(repr, list(named)[:5]))}); expected the same."
        )
    return own


def _shard_of(reader: ShardReader, given: Any, label: str) -> Shard:
    if isinstance(given, Tensor):
        if is_piece_of_flat(given):
            raise NotImplementedError(
                f"{label} is a piece of an FSDP1 flat parameter, and does not tell which elements "
                "of the parameter this rank has; expected a (module, name) pair in its place, as "
                "select(model) lists them. Pass other tensors of that layout as `scores`."
            )
        return reader.read_tensor(given, label)
    module, name = checked_pair(given, label, "a tensor, or a (module, name) pair")
    return reader.read(module, name, label)


def _candidates_of(given: Any, label: str, shard: Shard) -> tuple[Tensor, str]:
    """This rank's part of the candidates, and what must be equal on all ranks."""
    if not isinstance(given, Tensor) or given.dtype is not torch.bool:
        kind = given.dtype if isinstance(given, Tensor) else type(given).__name__
        raise TypeError(f"{label}: candidates is a {kind}; expected a bool tensor.")
    return local_part(label, "candidates", given, shard), whole_checksum(given, shard)
