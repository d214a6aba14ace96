"""Totals and tables of reports."""

from dataclasses import dataclass

from distprune._common.report_text import CallReport, share, table


@dataclass(frozen=True)
class Entry:
    num_elements: int
    num_pruned: int


@dataclass(frozen=True)
class Report(CallReport):
    parameters: tuple[Entry, ...]
    num_ranks: int = 1
    num_collectives: int = 3
    bytes_sent: int = 12345
    seconds: float = 0.01234


def test_totals():
    report = Report((Entry(6, 3), Entry(2, 1)))
    assert (report.num_elements, report.num_pruned, report.sparsity) == (8, 4, 0.5)


def test_a_report_without_parameters_is_not_sparse():
    assert Report(()).sparsity == 0.0 == share(0, 0)


def test_numbers_are_aligned_on_the_right_and_names_on_the_left():
    rows = [("a", "1,000", "ok"), ("long", "2", "3 wrong")]
    assert table(("name", "n", ""), rows, ("total", "1,002", ""), left_columns=(0, 2)) == [
        "name       n",
        "---------------------",
        "a      1,000  ok",
        "long       2  3 wrong",
        "---------------------",
        "total  1,002",
    ]


def test_cost():
    assert Report(())._cost() == [
        "1 rank",
        "3 collectives, 12,345 bytes per rank",
        "0.0123 s",
    ]
    assert Report((), num_ranks=2)._cost()[0] == "2 ranks"
