"""Which parameters a ranking has emptied."""

import pytest

from distprune._common.collapse import collapsed


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ([(1000, 500), (1000, 500)], []),
        ([(10_000, 5_000), (100, 95)], []),  # 5 % of it is kept, and nearly 50 % of all
        ([(10_000, 5_000), (100, 96)], [1]),
        ([(10_000, 9_000), (1000, 990)], []),
        ([(10_000, 9_000), (1000, 992)], [1]),
        ([(8, 8), (1_000_000, 300_000), (4, 4)], [0, 2]),
        ([(100, 100), (100, 100)], []),
        ([(0, 0), (10, 5)], []),
        ([], []),
    ],
)
def test_a_parameter_collapses_that_keeps_less_than_a_tenth_of_the_share_of_all(counts, expected):
    assert collapsed(counts) == expected
