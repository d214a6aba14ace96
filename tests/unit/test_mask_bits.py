"""The bits of masks: their order in bytes and words, and parts of them."""

import numpy as np
import pytest

from distprune._common import mask_bits

SIZES = (0, 1, 7, 8, 9, 63, 64, 65, 200)


def flags_of(size):
    return np.random.default_rng(size).random(size) < 0.5


@pytest.mark.parametrize("size", SIZES)
def test_element_i_is_bit_i_modulo_8_of_byte_i_div_8(size):
    flags = flags_of(size)
    packed = mask_bits.pack(flags)
    assert packed.dtype == np.uint8 and packed.size == mask_bits.num_bytes_of(size)
    assert [packed[i // 8] >> i % 8 & 1 for i in range(size)] == flags.tolist()
    assert sum(int(byte).bit_count() for byte in packed) == flags.sum()


@pytest.mark.parametrize("size", SIZES)
def test_any_range_is_unpacked(size):
    flags = flags_of(size)
    packed = mask_bits.pack(flags)
    for start in range(0, size + 1, 5):
        for stop in range(start, size + 1, 3):
            part = mask_bits.unpack(packed, start, stop)
            assert part.dtype == bool and np.array_equal(part, flags[start:stop])


@pytest.mark.parametrize("size", SIZES)
def test_element_i_is_bit_i_modulo_64_of_word_i_div_64(size):
    flags = flags_of(size)
    words = mask_bits.pack_words(flags)
    assert [int(words[i // 64]) >> i % 64 & 1 for i in range(size)] == flags.tolist()
    assert np.array_equal(mask_bits.unpack_words(words, size), flags)


def test_words_of_ranks_add_up_to_the_union():
    flags = flags_of(1000)
    owner = np.random.default_rng(1).integers(0, 3, size=1000)
    total = sum(mask_bits.pack_words(flags & (owner == rank)) for rank in range(3))
    assert np.array_equal(mask_bits.unpack_words(total, 1000), flags)


def test_rows_are_packed_one_by_one():
    flags = flags_of(200).reshape(5, 40)
    rows = mask_bits.pack(flags)
    assert rows.shape == (5, 5)
    assert all(np.array_equal(row, mask_bits.pack(flags[i])) for i, row in enumerate(rows))
