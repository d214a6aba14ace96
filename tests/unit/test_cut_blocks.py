"""Blocks that any sharding cuts lose what a sort of each block says, over virtual ranks."""

from unittest import mock

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distprune.base.blocks import BlockRule, Layout, layout_along
from distprune.ranking import in_blocks
from distprune.ranking.in_blocks import BlockedParameter, prune_in_blocks
from distprune.ranking.ranking import Ranking
from distprune.ranking.scores import key_range
from distprune.ranks.collectives import Communicator
from helpers import reference
from helpers.models import HARD, values
from helpers.sampling import num_examples
from helpers.virtual_ranks import LAYOUTS, part_of, run_virtual_ranks


def blocked(rule: BlockRule, shape: tuple[int, ...], dims: tuple[int, ...]) -> BlockedParameter:
    layout: Layout = layout_along("the tensor", shape, dims)
    numel = torch.Size(shape).numel()
    return BlockedParameter(rule.blocks(numel, layout), rule, shape, dims)


def groups_of(parameter: BlockedParameter) -> list[list[int]]:
    if parameter.rule.kept_of is None:
        return reference.rows_of(parameter.shape, parameter.dims)
    return reference.groups_along(parameter.shape, parameter.dims[0], parameter.rule.kept_of[1])


def check(tensors, masks, parameters, layouts, size) -> None:
    """Compare the masks of every rank."""
    common = key_range(tensors[0].dtype)
    expected = [
        reference.prune_in_blocks(tensor, groups_of(own), own.blocks.num_pruned, mask)
        for tensor, mask, own in zip(tensors, masks, parameters, strict=True)
    ]
    num_live = [
        t.numel() if mask is None else int(mask.sum())
        for t, mask in zip(tensors, masks, strict=True)
    ]

    def on_rank(communicator: Communicator):
        several = [
            part_of(tensor, mask, layout, common, size, communicator.index)
            for tensor, mask, layout in zip(tensors, masks, layouts, strict=True)
        ]
        parts, sources, cutters = zip(*several, strict=True)
        outs = [torch.full((source.size,), 7.0) for source in sources]
        ranking = Ranking(parts, (common, sources), num_live, communicator, outs)
        numbers = prune_in_blocks(ranking, parameters)
        for i, cutter in enumerate(cutters):
            assert torch.equal(outs[i], cutter(expected[i]).float()), (i, layouts[i])
        return numbers

    found = run_virtual_ranks(on_rank, size)
    pruned = [sum(of_rank) for of_rank in zip(*found, strict=True)]
    assert pruned == [n - int(keep.sum()) for n, keep in zip(num_live, expected, strict=True)]


RULES = [
    BlockRule("row", 0.4), BlockRule("row", 0.0), BlockRule("row", 1.0),
    BlockRule("global", None, (1, 2)),
    BlockRule("global", None, (2, 4)),
]  # fmt: skip


@settings(max_examples=num_examples(150), deadline=None)
@given(st.data())
def test_equal_to_a_sort_of_each_block(data):
    draw = data.draw
    rule = draw(st.sampled_from(RULES))
    size = draw(st.integers(1, 5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    tensors, masks, parameters, layouts = [], [], [], []
    for _ in range(draw(st.integers(1, 3))):
        ndim = draw(st.integers(2, 4))
        shape = [draw(st.integers(1, 7)) for _ in range(ndim)]
        inputs = draw(st.integers(0, ndim - 1))
        shape[inputs] = 4 * draw(st.integers(1, 3))
        has_kernel = inputs < ndim - 1 and draw(st.booleans())
        first = draw(st.integers(inputs + 1, ndim - 1)) if has_kernel else ndim
        dims = (inputs, *range(first, ndim))
        tensors.append(values(draw(st.sampled_from(HARD)), tuple(shape), torch.float32, generator))
        mask = torch.rand(shape, generator=generator) > 0.3
        masks.append(mask if draw(st.booleans()) else None)
        parameters.append(blocked(rule, tuple(shape), dims))
        layouts.append(draw(st.sampled_from(LAYOUTS)))
    with (
        mock.patch.object(in_blocks, "_MOST", draw(st.sampled_from([1, 16, 1 << 20]))),
        mock.patch.object(in_blocks, "_CHUNK", draw(st.sampled_from([5, 1 << 18]))),
        mock.patch.object(in_blocks, "_MAX_BAND", draw(st.sampled_from([1, 1 << 22]))),
    ):
        check(tensors, masks, parameters, layouts, size)
