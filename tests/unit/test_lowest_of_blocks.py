"""Blocks in memory lose their lowest elements, whatever their form; equal ones go by index."""

import numpy as np
import pytest

from distprune._common.blocks import Blocks
from distprune._common.memory import Scratch
from distprune.selection.cpu import lowest_of

FORMS = {
    "pairs": (2, 1, 1),
    "fours": (4, 1, 1),
    "fives": (5, 1, 1),
    "sixteens": (16, 1, 1),
    "seventeens": (17, 1, 1),
    "rows": (300, 1, 1),
    "rows of a convolution": (12, 1, 9),
    "fours, a few interleaved": (4, 9, 1),
    "fours, many interleaved": (4, 130, 1),
    "rows, interleaved": (40, 33, 1),
    "rows of a transposed convolution": (12, 5, 4),
}
NUM_BLOCKS = 3
DATA = {
    "equal": lambda generator, size: np.zeros(size),
    "two values": lambda generator, size: generator.integers(0, 2, size),
    "few values": lambda generator, size: generator.integers(-8, 8, size),
    "distinct": lambda generator, size: generator.permutation(size) - size // 2,
}


def oracle(keys, blocks):
    """Each block sorted on its own."""
    index = np.arange(keys.size).reshape(-1, blocks.length, blocks.columns, blocks.kernel)
    lowest = np.zeros(keys.size, dtype=bool)
    for members in index.swapaxes(1, 2).reshape(-1, blocks.size):
        lowest[members[np.argsort(keys[members], kind="stable")[: blocks.num_pruned]]] = True
    return lowest


@pytest.mark.parametrize("dtype", [np.int16, np.int32, np.int64])
@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("form", FORMS)
def test_equal_to_a_stable_sort_of_each_block(form, data, dtype):
    generator = np.random.default_rng(0)
    scratch = Scratch()
    size = FORMS[form][0] * FORMS[form][2]
    for count in sorted({0, 1, size // 2, size - 1, size}):
        blocks = Blocks(*FORMS[form], count)
        keys = DATA[data](generator, NUM_BLOCKS * blocks.band).astype(dtype)
        before = keys.copy()
        expected = oracle(keys, blocks)
        assert np.array_equal(lowest_of(blocks, keys, scratch), expected)
        assert np.array_equal(lowest_of(blocks, keys), expected)
        assert np.array_equal(keys, before)


@pytest.mark.parametrize("columns", [1, 3])
def test_short_blocks_of_more_elements_than_a_pattern_has(columns):
    blocks = Blocks(4, columns, 1, 2)
    size = 3 * (1 << 14) // blocks.band * blocks.band + blocks.band
    keys = np.random.default_rng(0).integers(0, 6, size).astype(np.int32)
    turned = keys.reshape(-1, 4, columns).swapaxes(1, 2)
    ranks = turned.argsort(axis=2, kind="stable").argsort(axis=2)
    expected = (ranks < 2).swapaxes(1, 2).reshape(-1)
    assert np.array_equal(lowest_of(blocks, keys), expected)
