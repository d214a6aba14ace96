"""The pattern of a pruning is one value: read once, and written as it was read."""

import copy
import json
import pickle

import pytest

from distprune._common.blocks import Pattern


@pytest.mark.parametrize(
    ("text", "kept_of", "tile"),
    [
        ("2:4", (2, 4), None),
        ("02:0004", (2, 4), None),
        ("4x8", None, (4, 8)),
        ("1x02", None, (1, 2)),
    ],
)
def test_a_pattern_is_its_text_without_leading_zeros(text, kept_of, tile):
    pattern = Pattern.parse(text)
    assert (pattern.kept_of, pattern.tile) == (kept_of, tile)
    assert str(pattern) == ":".join(map(str, kept_of)) if kept_of else "x".join(map(str, tile))
    assert Pattern.parse(pattern) == pattern == json.loads(json.dumps(pattern))
    for same in (copy.deepcopy(pattern), pickle.loads(pickle.dumps(pattern))):
        assert (type(same), same, same.kept_of, same.tile) == (Pattern, pattern, kept_of, tile)


@pytest.mark.parametrize(
    "value", ["4:2", "2:2", "0:4", "1x1", "0x4", "2:4 ", "2-4", "12345:9", 124, None]
)
def test_what_is_no_pattern_is_refused(value):
    with pytest.raises(ValueError, match=r'such as "2:4", in quotes, or tiles of .* "4x4"'):
        Pattern.parse(value)


def test_only_n_of_m_is_taken_where_tiles_have_no_meaning():
    assert Pattern.parse("2:4", tiles=False).kept_of == (2, 4)
    with pytest.raises(ValueError, match=r'such as "2:4", in quotes$'):
        Pattern.parse("4x4", tiles=False)
