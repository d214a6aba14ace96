"""``global_mask``: the k largest of all elements of some tensors, over all ranks.

    kept = prune.global_mask(dict(model.named_parameters()), k)   # kept.masks[name]: bool, a shard

It is the step that methods share which project weights onto k elements (ADMM, iterative hard
thresholding), or choose what to drop and to grow (SET, RigL).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

import torch
from torch import Tensor

from distprune._common.process_groups import world
from distprune.call.importance_scores import check_signed
from distprune.projection.arguments import RANDOM, Scores, TensorLike, read_items, start_of
from distprune.projection.result import GlobalMask, MaskStart
from distprune.projection.searching import Problem, Reading, finish, joined_by_name, select
from distprune.selection.keys import RANDOM_KEYS

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
