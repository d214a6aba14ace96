"""A pattern N:M is read from its text, and anything else is refused."""

import pytest

from distprune.base.blocks import parse_pattern


@pytest.mark.parametrize("text", ["2:4", "02:0004"])
def test_a_pattern_is_two_numbers(text):
    assert parse_pattern(text) == (2, 4)


@pytest.mark.parametrize(
    "value", ["4:2", "2:2", "0:4", "4x4", "2*4", "2:4 ", "2-4", "12345:9", 124, None]
)
def test_what_is_no_pattern_is_refused(value):
    with pytest.raises(ValueError) as error:
        parse_pattern(value)
    assert str(error.value) == f"expected a pattern N:M such as '2:4', got {value!r}"
