"""One pruning call: read, agree, decide, attach.

Everything that prunes a sharded parameter, and every global pruning, is
:func:`prune_parameters`. Modules change only after every mask is ready on
every rank; see collectives.[Note: all or none].
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from distprune.base import without_garbage_collection
from distprune.base.memory import ordinary_tensors
from distprune.call import request
from distprune.call.reading import count_live_and_compare, for_comparison, read_parameters
from distprune.call.report import ParameterReport, PruningReport, find_collapsed
from distprune.masks.fingerprint import fingerprint_parts
from distprune.masks.hook import Place, commit, prepare
from distprune.ranks.collectives import Communicator
from distprune.shards.shard import Shard, replicas_agree

# The parameters of a call, and how many elements each whole one has left.
Counted = tuple[list[Shard], list[int]]


def prune_parameters(
    make_arguments: Callable[[], request.PruningArguments],
    communicator: Communicator,
    counted: Counted | None = None,
) -> PruningReport:
    """Decide all masks of a call over all its ranks, then put them on the modules. Collective.

    Args:
        make_arguments: a local step that may fail: makes and checks the arguments.
        communicator: the ranks that take part.
        counted: the parameters, if :func:`count_live` has read them with ``reads_values``, and no
            code of a caller has run since; without importance scores.

    Raises:
        NotImplementedError: there are bounds or segments, and the method does not rank.
        Exception: whatever any rank raised, on every rank; no module has changed then.
    """
    started = time.perf_counter()
    # Masks made in inference mode could never be part of a backward.
    with communicator.exclusively(), ordinary_tensors(), without_garbage_collection():
        with torch.no_grad():
            if counted is None:
                arguments, shards = read_parameters(make_arguments, communicator)
            else:
                arguments = communicator.run(make_arguments, request.PruningArguments.all_facts)
                shards, num_live = counted
            segments = request.agree_on_segments(arguments, shards, communicator)
            if counted is None:
                num_live = count_live_and_compare(shards, arguments.reads_values, communicator)
            dtypes = [torch.bool if shard.is_held else shard.parameter.dtype for shard in shards]
            call = request.PruningCall(
                shards, num_live, dtypes, communicator, arguments.normalize, segments
            )
            decision = arguments.decide(call)
        is_ranked = decision.bound_of is not None
        if not is_ranked and (arguments.divided_by or arguments.normalize):
            option = arguments.divided_by or f"normalize={arguments.normalize!r}"
            raise NotImplementedError(
                f"{arguments.method} does not rank elements by a score, so {option} has no meaning "
                "for it; expected a method that does, such as L1Unstructured, or your own with "
                "DISTRIBUTED = 'scores'."
            )
        changes = attach_masks(shards, num_live, decision, arguments, communicator)
    held_at, wanted = (
        [None] * len(shards) if each is None else each
        for each in (decision.bound_of, segments.wanted)
    )
    sizes = [shard.numel for shard in shards]
    lowest, highest = segments.bounds or ([0] * len(sizes), sizes)
    entries = tuple([
        ParameterReport(
            shard.name, size, size - live, pruned, held, own,
            min_sparsity=low / size if low > 0 else None,
            max_sparsity=high / size if high < size else None,
            num_grown=grown,
        )
        for shard, size, live, (pruned, grown), held, own, low, high in zip(
            shards, sizes, num_live, changes, held_at, wanted, lowest, highest, strict=True
        )
    ])  # fmt: skip
    return PruningReport(
        method=arguments.method,
        amount=None if isinstance(arguments.amount, Mapping) else arguments.amount,
        parameters=entries,
        threshold=decision.threshold,
        num_ties=decision.num_ties,
        num_ties_pruned=decision.num_ties_pruned,
        num_ranks=communicator.size,
        num_collectives=communicator.num_collectives,
        bytes_sent=communicator.bytes_sent,
        seconds=time.perf_counter() - started,
        collapsed=find_collapsed(entries, [s.shape for s in shards]) if is_ranked else (),
    )


def count_live(
    make_arguments: Callable[[], request.ParameterArguments],
    communicator: Communicator,
    *,
    reads_values: bool = False,
) -> Counted:
    """Count what is left of every parameter, over all ranks. Collective; changes nothing.

    Args:
        make_arguments, communicator: as in :func:`prune_parameters`.
        reads_values: compare the values of replicas too, not only their masks.

    Returns:
        The same parameters and counts on every rank.

    Raises:
        Exception: whatever any rank raised, on every rank.

    Cost: one read of the masks; an all-reduce of 24 bytes per parameter, and a small one.
    """
    with communicator.exclusively(), ordinary_tensors(), torch.no_grad():
        _, targets = read_parameters(make_arguments, communicator)
        return targets, count_live_and_compare(targets, reads_values, communicator)


def attach_masks(
    shards: Sequence[Shard],
    num_live: Sequence[int],
    decision: request.Decision,
    arguments: request.PruningArguments,
    communicator: Communicator,
) -> list[tuple[int, int]]:
    """Write the masks and put them on the modules: on every rank, or on none.

    Returns:
        Newly pruned elements of every whole parameter, and grown ones.

    Raises:
        Exception: what any rank raised, on every rank; every module is as before.
        ValueError: replicas would get different masks.

    Cost: one write of the masks; an all-reduce of 40 bytes per parameter, of counts, fingerprints,
    and whether replicas have the same masks.
    """
    prepared: list[list[Place]] = []
    specs: dict[object, Any] = {}

    def finish_and_prepare() -> Tensor:
        masks, num_pruned, num_grown = decision.finish()
        parts = fingerprint_parts(shards, masks)
        rows: list[int] = []
        for shard, mask, pruned, grown, part in zip(
            shards, masks, num_pruned, num_grown or [0] * len(shards), parts, strict=True
        ):
            if shard.mesh is not None:
                mask = shard.as_parameter_layout(mask, specs)
            prepared.append(prepare(shard, mask, arguments.make_hook))
            compared = (0, 0)
            if shard.num_replicas > 1:
                compared = for_comparison(shard, communicator.rank, part)
            rows += (pruned, grown, part if shard.replica == 0 else 0, *compared)
        return torch.tensor(rows, dtype=torch.int64)

    rows = communicator.reduce(5 * len(shards), finish_and_prepare).view(-1, 5).tolist()
    for shard, (*_, of_all, of_first) in zip(shards, rows, strict=True):
        if shard.num_replicas > 1 and not replicas_agree(shard.num_replicas, of_all, of_first):
            raise ValueError(
                f"{shard.name}: replicas of this parameter would get different masks; "
                "expected the same on each, as their weights are equal. A method of your own "
                "has to give every rank the same mask for the same scores, and tensors among "
                "its arguments have to be equal on all ranks."
            )
    commit([place for places in prepared for place in places])
    for shard, live, places, (pruned, grown, fingerprint, *_) in zip(
        shards, num_live, prepared, rows, strict=True
    ):
        for _, _, hook, *_ in places:
            hook.record = fingerprint, shard.numel - live + pruned - grown
    return [(pruned, grown) for pruned, grown, *_ in rows]
