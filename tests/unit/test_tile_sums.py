"""Sums of tiles are the exact sums, rounded once, for any exponents."""

import itertools
import math

import numpy as np
import pytest
import torch

from distprune.selection import tile_sums
from distprune.selection.tiles import Tiling, tiles_of
from distprune.shards.geometry import dim_coordinates, index_map, run_index_map

RNG = np.random.default_rng(0)
SPREADS = {"none": 0, "narrow": 8, "wide": 60, "all": 500}


def expected(scores, sizes):
    rows, columns = (n // size for n, size in zip(scores.shape, sizes, strict=True))
    tiles = scores.reshape(rows, sizes[0], columns, sizes[1]).swapaxes(1, 2)
    return [[math.fsum(tiles[i, j].ravel()) for j in range(columns)] for i in range(rows)]


def random_scores(shape, spread, is_signed):
    exponents = RNG.integers(-SPREADS[spread], SPREADS[spread] + 1, shape)
    scores = RNG.standard_normal(shape) * np.exp2(exponents)
    return scores if is_signed else np.abs(scores)


@pytest.mark.parametrize("is_signed", [False, True])
@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("sizes", [(1, 4), (3, 5), (2, 33)])
def test_equal_to_fsum(sizes, spread, is_signed):
    scores = random_scores((6, 4 * sizes[1]), spread, is_signed)
    assert tile_sums.sums_of_tiles(scores, sizes, 53).tolist() == expected(scores, sizes)
    with np.errstate(over="ignore"):
        single = scores.astype(np.float32).astype(np.float64)
    if np.isfinite(single).all():
        assert tile_sums.sums_of_tiles(single, sizes, 24).tolist() == expected(single, sizes)


def test_what_cancels_and_what_is_close_to_the_middle_of_two_numbers():
    half = 2.0**-53
    for row in ([1, half, 0, 0], [1, half, 2.0**-300, 0], [1, half, -(2.0**-300), 0],
                [1e300, 1, -1e300, 2.0**-1074], [2.0**-1074] * 4, [-1, 1, 0.0, -half],
                [1 + 2 * half, half, 0, 0]):  # fmt: skip
        scores = np.array([row], dtype=np.float64)
        assert tile_sums.sums_of_tiles(scores, (1, 4), 53).item() == math.fsum(row), row


def test_infinite_scores():
    scores = np.array([[np.inf, 1, 2, 3, -np.inf, 1, np.inf, -np.inf]])
    sums = tile_sums.sums_of_tiles(scores, (1, 2), 53)
    assert sums[0, :3].tolist() == [np.inf, 5, -np.inf] and np.isnan(sums[0, 3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_limbs_that_are_added_in_parts(dtype):
    """As ranks do it: each has some of the elements."""
    spread = "wide" if dtype is torch.float32 else "all"
    scores = random_scores((5, 40), spread, is_signed=True)
    scores = torch.from_numpy(scores).to(dtype).double().numpy()
    exponent, count = tile_sums.limbs_for(dtype)
    parts = [
        tile_sums.limbs_of_tiles(part, (1, part.shape[1]), exponent, count)
        for part in (scores[:, :13], scores[:, 13:])
    ]
    limbs = [first + second for first, second in zip(*parts, strict=True)]
    whole = [[math.fsum(row)] for row in scores]
    assert tile_sums.rounded(limbs, exponent).tolist() == whole


SHAPES = [(6, 8), (2, 4, 6), (4, 2, 3, 2)]


@pytest.mark.parametrize("shape", SHAPES)
def test_every_element_is_in_one_place(shape):
    """Boxes in any order of memory, and runs of it: the tile of every element is known."""
    elements = torch.arange(math.prod(shape)).view(shape)
    for sizes in itertools.product(*([s for s in (1, 2, 3) if n % s == 0] for n in shape)):
        tiling = Tiling(shape, sizes)
        number = np.ravel_multi_index(
            [c // s for c, s in zip(np.indices(shape), sizes, strict=True)], tiling.grid
        ).ravel()
        order = list(RNG.permutation(len(shape)))
        order = [int(dim) for dim in order]
        coordinates = tuple(
            range(low, int(RNG.integers(low + 1, n + 1)))
            for n in shape
            for low in [int(RNG.integers(0, n))]
        )
        box = elements[tuple(slice(r.start, r.stop) for r in coordinates)]
        maps = [(index_map(shape, coordinates, order), box.numel())]
        in_order = [elements.stride()[dim] for dim in range(len(shape))]
        first = int(RNG.integers(0, elements.numel()))
        maps.append((run_index_map(shape, in_order, first), elements.numel() - first))
        turned = torch.empty([shape[dim] for dim in order]).permute(
            [order.index(dim) for dim in range(len(shape))]
        )
        maps.append((run_index_map(shape, turned.stride(), first), elements.numel() - first))
        maps.append((index_map(shape, dim_coordinates(shape, ()), order), elements.numel()))
        for index, count in maps:
            tiles = tiles_of(index, count, tiling)
            own = number[index(torch.arange(count)).numpy()]
            seen: list[int] = []
            for chunk in tiles.chunks:
                assert chunk.positions.start == len(seen)
                seen += chunk.spread(tiles.numbers[chunk.places], tiles.sizes).tolist()
            assert seen == own.tolist(), (shape, sizes, index)
            # Whole are the tiles that have all of their elements in one chunk.
            whole = tiles.numbers[tiles.is_whole].tolist()
            assert len(set(whole)) == len(whole)
            assert (np.bincount(own)[whole] == math.prod(sizes)).all()
            # A tile is ranked where its first element is.
            firsts = {int(np.flatnonzero(number == each)[0]) for each in np.unique(number)}
            here = [int(i) for i in index(torch.arange(count)) if int(i) in firsts]
            assert sorted(number[here]) == tiles.ranked(tiles.numbers).tolist()
