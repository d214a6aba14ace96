"""Index maps against brute force, on random shapes and splits."""

import math

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distprune.shards.geometry import dim_coordinates, index_map, memory_order, run_index_map
from helpers.sampling import num_examples

shapes = st.lists(st.integers(1, 7), min_size=0, max_size=4).map(tuple)


@st.composite
def cuts(draw):
    """A shape and a list of (dim, number of chunks): how a mesh cuts it."""
    shape = draw(shapes)
    if not shape:
        return shape, []
    dims = st.integers(0, len(shape) - 1)
    return shape, draw(st.lists(st.tuples(dims, st.integers(1, 4)), max_size=3))


def all_ranks(cut):
    """Every combination of chunks: one list of splits per rank."""
    ranks = [[]]
    for dim, num_chunks in cut:
        ranks = [[*r, (dim, num_chunks, which)] for r in ranks for which in range(num_chunks)]
    return ranks


def cut_by_torch(whole, splits):
    for split in splits:
        dim, num_chunks, chunk = split
        chunks = whole.chunk(num_chunks, dim)
        whole = chunks[chunk] if chunk < len(chunks) else whole.narrow(dim, 0, 0)
    return whole


@settings(max_examples=num_examples(400), deadline=None, derandomize=True)
@given(cuts(), st.randoms(use_true_random=False))
def test_every_rank_knows_where_its_elements_are(case, random):
    shape, cut = case
    whole = torch.arange(math.prod(shape)).view(shape)
    seen = []
    for splits in all_ranks(cut):
        local = cut_by_torch(whole, splits)
        coordinates = dim_coordinates(shape, splits)
        assert tuple(map(len, coordinates)) == tuple(local.shape)
        order = list(range(len(shape)))
        random.shuffle(order)
        for dims in (list(range(len(shape))), order):
            index = index_map(shape, coordinates, dims)
            flat = local.permute(dims).reshape(-1)
            assert torch.equal(index(torch.arange(flat.numel())), flat)
        seen.append(local.reshape(-1))
    assert torch.equal(torch.cat(seen).sort().values, whole.reshape(-1))


@settings(max_examples=num_examples(100), deadline=None, derandomize=True)
@given(cuts(), st.randoms(use_true_random=False))
def test_in_ascending_order_an_index_has_a_position(case, random):
    """Row-major parts, and runs of row-major memory, are ascending; ``positions_of`` counts."""
    shape, cut = case
    numel = math.prod(shape)
    for splits in all_ranks(cut):
        coordinates = dim_coordinates(shape, splits)
        size = math.prod(len(rows) for rows in coordinates)
        in_order = index_map(shape, coordinates, range(len(shape)))
        assert in_order.is_ascending
        shuffled = index_map(shape, coordinates, random.sample(range(len(shape)), len(shape)))
        first = random.randrange(numel)
        stride = torch.empty(shape).stride()
        run = run_index_map(shape, stride, first)
        for index, length in ((in_order, size), (shuffled, size), (run, numel - first)):
            indices = index(torch.arange(length)).tolist()
            if not index.is_ascending:
                continue
            assert indices == sorted(indices)
            for bound in random.choices(range(numel + 1), k=5):
                expected = sum(i < bound for i in indices)
                assert (
                    min(max(int(index.positions_of(np.array([bound]))[0]), 0), length) == expected
                )


def test_memory_that_is_not_row_major_is_not_ascending():
    assert not index_map((2, 3), dim_coordinates((2, 3), []), (1, 0)).is_ascending
    last = run_index_map(
        (2, 3, 2, 2), torch.empty(2, 3, 2, 2).to(memory_format=torch.channels_last).stride(), 3
    )
    assert not last.is_ascending


@given(shapes, st.randoms(use_true_random=False))
def test_dense_tensors_are_read_without_a_copy(shape, random):
    dims = list(range(len(shape)))
    random.shuffle(dims)
    tensor = torch.arange(math.prod(shape)).view(shape).permute(dims)
    order = memory_order(tensor)
    assert order is not None
    assert tensor.permute(order).reshape(-1).data_ptr() == tensor.data_ptr()


def test_tensors_with_gaps_or_overlaps_have_no_order():
    assert memory_order(torch.zeros(4, 6)[:, ::2]) is None
    assert memory_order(torch.zeros(3, 1).expand(3, 5)) is None
    assert memory_order(torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last)) is not None


def test_more_than_two_to_the_31_elements():
    shape = (2**17, 2**16)
    index = index_map(shape, dim_coordinates(shape, [(1, 2, 1)]), [0, 1])
    assert index(torch.tensor([2**32 - 1])).tolist() == [2**33 - 1]
