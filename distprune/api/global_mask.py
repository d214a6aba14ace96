"""``global_mask``: the k largest of all elements of some parameters, over all ranks.

    kept = prune.global_mask(prune.select(model), k)   # kept.masks[i]: bool, a shard

It is the step that methods share which project weights onto k elements (ADMM, iterative hard
thresholding), or choose what to drop and to grow (SET, RigL).
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from distprune.api.chosen_masks import one_each
from distprune.base.memory import ordinary_tensors
from distprune.base.naming import Pair, label_of
from distprune.call.reading import check_order, count_live_and_compare, read_parameters
from distprune.call.request import Fact, ParameterArguments, PruningCall, Segments
from distprune.methods.ranking import rank
from distprune.ranks.collectives import world
from distprune.shards.factored import FactoredScores
from distprune.shards.reader import Scores, local_part, whole_checksum


@dataclass(frozen=True)
class GlobalMask:
    """Masks, and facts about them that are the same on all ranks.

    Attributes:
        masks: for each parameter a bool tensor laid out like it, True where it was selected.
        threshold: the score at which the order was cut (|score| unless ``signed``); None where
            nothing or everything was selected, for random scores, and for several counts.
        num_ties: the number of elements whose score is the threshold; 0 for several counts ...
        num_ties_selected: ... and how many of them were selected.
        num_collectives: all-reduces of the call.
        bytes_sent: payload of those, per rank.
    """

    masks: list[Tensor]
    threshold: float | None
    num_ties: int
    num_ties_selected: int
    num_collectives: int
    bytes_sent: int


def global_mask(
    parameters: Iterable[Pair],
    k: int | Sequence[int],
    *,
    scores: Scores | Sequence[Tensor | FactoredScores | None] | Literal["random"] | None = None,
    candidates: Sequence[Tensor | None] | None = None,
    largest: bool = True,
    signed: bool = False,
    group: ProcessGroup | None = None,
    pipeline_parallel: bool = False,
) -> GlobalMask:
    """Select exactly k elements of some parameters: one ranking over all of them, and all ranks.

    Nothing is changed: the masks are new tensors. The order is that of
    :func:`global_unstructured`: (score, position of the parameter, row-major index in the whole
    parameter), ascending. The k largest are its last k elements, and the k smallest its first k: so
    among equal scores the *higher* index is large. The masks of the k largest are those that
    ``L1Unstructured`` leaves when it prunes all others, and no sharding changes them.

    Every rank of ``group`` has to call this with the same arguments when a process group is
    initialised. It may be called anywhere where all ranks come by in the same order: in
    ``optimizer.step()``, in its hooks, under ``torch.no_grad()``::

        for step, batch in enumerate(batches):
            ...
            kept = prune.global_mask(parameters, k)

    Args:
        parameters: (module, name) pairs, as ``select`` lists them, each parameter once; pruned or
            not, they stand for the unmasked values.
        k: how many elements to select. Or a count for each parameter, in their order, which is then
            ranked by itself; not under ``pipeline_parallel``.
        scores: rank by these instead of the values: by (module, name), or for each parameter in
            their order, tensors or ``FactoredScores`` as for :func:`global_unstructured`;
            parameters that have none are ranked by their values. To rank other tensors, such as a
            sum of weights and multipliers, pass them here, laid out like the parameters. Or
            "random": scores that are a function of a seed, drawn from torch's default generator on
            the leading rank, and of the place of an element: the same on any sharding.
        candidates: for each parameter a bool tensor laid out like it, or whole and equal on all
            ranks: only elements that are True compete, and no other is selected. None: all
            compete. Not under ``pipeline_parallel``.
        largest: select the k largest. If False, the k smallest.
        signed: rank scores with their sign, and not by |score|.
        group: the ranks that take part; every rank by default.
        pipeline_parallel: the ranks hold different parts of one model, and each passes the
            parameters of its own part (there may be none), with full names, and scores of these;
            see :func:`global_unstructured`.

    Returns:
        Masks and the threshold. ``masks`` are bool tensors laid out like the parameters, DTensors
        for DTensors, and under FSDP1 this rank's run, 1-d; True where an element is selected.

    Raises:
        TypeError: arguments of a wrong type.
        ValueError: k is larger than the number of candidates; a NaN score of a candidate; a
            parameter that is listed twice; replicas that differ; ranks that differ in their
            arguments. Named, on every rank.
        NotImplementedError: a layout or a dtype that is not supported; candidates under
            ``pipeline_parallel``. On every rank.

    Cost: one read of the scores (two of parameters with replicas, which are compared), and one
    write of the masks, 1 byte per element and a little more for a moment. About ten all-reduces,
    80 KB in all whatever the size of the parameters. With replicas or candidates one more, of 24
    bytes per parameter; a pipeline needs it too, and four to join names, about 200 bytes per
    parameter and kind of stage.

    Source: the projection is that of ADMM (Boyd et al., 2011; ELSA, 2025) and of iterative hard
    thresholding (Blumensath and Davies, arXiv 0805.0510).
    """
    communicator = world(group)
    is_random = isinstance(scores, str) and scores == "random"
    each = isinstance(k, Sequence) and not pipeline_parallel
    pairs: list[Pair] = []
    counts: list[int] = []

    def read() -> ParameterArguments:
        check_order(scores, not signed, "signed=True")
        wanted: Any = k if each else [k]
        counts.extend(map(operator.index, wanted))
        pairs.extend(parameters)
        if pipeline_parallel and candidates is not None:
            raise NotImplementedError("candidates under pipeline_parallel; expected none.")
        given: Any = None if is_random else scores
        if given is not None and not isinstance(given, Mapping):
            listed = one_each("scores", given, pairs).items()
            given = {pair: tensor for pair, tensor in listed if tensor is not None}
        options = bool(largest), bool(signed), is_random, candidates is not None, counts
        names = ("largest", "signed", "random scores", "candidates are given", "k")
        return ParameterArguments(
            parameters=pairs,
            importance_scores=given,
            scores_name="scores",
            pipeline_parallel=pipeline_parallel,
            facts=list(zip(names, map(str, options), strict=True)),
        )

    def take_candidates() -> list[Fact]:
        if len(own) < len(pairs):
            raise ValueError("a parameter is listed twice; expected each once, under one name.")
        facts: list[Fact] = []
        given: Any = [None] * len(own)
        if candidates is not None:
            given = one_each("candidates", candidates, pairs).values()
        for i, mask in zip(own, given, strict=True):
            shard = shards[i]
            if mask is not None:
                if not isinstance(mask, Tensor) or mask.dtype is not torch.bool:
                    kind = getattr(mask, "dtype", type(mask).__name__)
                    raise TypeError(f"{shard.name}: candidates is a {kind}; expected bool tensors.")
                facts.append((f"candidates of {shard.name}", whole_checksum(mask, shard)))
                mask = local_part(shard.name, "candidates", mask, shard)
            shards[i] = replace(shard, mask=mask)  # a mask in force does not say what competes
            ranked = shard.scores if isinstance(shard.scores, Tensor) else shard.values
            if ranked.is_complex():
                raise NotImplementedError(
                    f"{shard.name}: scores of dtype {ranked.dtype}; expected real numbers."
                )
        return facts

    def select() -> list[Tensor]:
        masks = decision.finish()[0]
        if not largest:  # selected is what the ranking prunes
            for shard, mask in zip(shards, masks, strict=True):
                mask.logical_not_() if shard.mask is None else mask.logical_xor_(shard.mask)
        return [shards[i].as_parameter_layout(masks[i]) for i in own]

    with communicator.exclusively(), ordinary_tensors(), torch.no_grad():
        _, shards = read_parameters(read, communicator)
        own: Sequence[int] = range(len(shards))
        if pipeline_parallel:  # in the order of names, those of other ranks among them
            position_of = {shard.name: i for i, shard in enumerate(shards)}
            own = [position_of[label_of(pair)] for pair in pairs]
        communicator.run(take_candidates, lambda facts: facts)
        num_live = [shard.numel for shard in shards]
        if any(shard.mask is not None or shard.num_replicas > 1 for shard in shards):
            num_live = count_live_and_compare(shards, not is_random, communicator)
        totals = num_live if each else [sum(num_live)]
        num_pruned = []
        for count, total in zip(counts, totals, strict=True):
            if not 0 <= count <= total:
                raise ValueError(
                    f"k is {count:,}, and {total:,} elements compete; expected 0 <= k <= {total:,}."
                )
            num_pruned.append(total - count if largest else count)
        segments = Segments()
        if each:  # the elements that do not compete count as pruned
            rows = zip(shards, num_pruned, num_live, strict=True)
            segments = Segments(counts=tuple(n + shard.numel - live for shard, n, live in rows))
        bools = [torch.bool] * len(shards)
        call = PruningCall(shards, num_live, bools, communicator, segments=segments)
        decision = rank(call, sum(num_pruned), signed=bool(signed), is_random=is_random)
        selected = communicator.run(select)
    num_ties, num_selected = decision.num_ties, decision.num_ties_pruned
    if largest:
        num_selected = num_ties - num_selected
    cost = communicator.num_collectives, communicator.bytes_sent
    return GlobalMask(selected, decision.threshold, num_ties, num_selected, *cost)
