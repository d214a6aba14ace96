"""Which parameters a ranking has emptied: one rule for live models and files."""

import pytest

from distprune._common.amount import collapsed


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ([(1000, 500), (1000, 500)], []),
        ([(10_000, 5_000), (1000, 989)], []),
        ([(10_000, 5_000), (1000, 990)], [1]),
        ([(9000, 8010), (1000, 990)], [1]),  # 90 % of all
        ([(9000, 8011), (1000, 990)], []),
        ([(8, 8), (1_000_000, 300_000), (4, 4)], [0, 2]),
        ([(100, 100), (100, 100)], []),
        ([(0, 0), (10, 5)], []),
        ([], []),
    ],
)
def test_a_parameter_collapses_that_keeps_nothing_of_what_others_keep(counts, expected):
    assert collapsed(counts) == expected
