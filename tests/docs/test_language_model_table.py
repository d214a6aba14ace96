"""The tables of the documentation are what was measured on a real language model."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import make_language_model_table as maker


@pytest.mark.parametrize("page", maker.PAGES, ids=lambda page: page.name)
def test_tables_are_made_from_the_results(page):
    assert maker.START in page.read_text(encoding="utf-8")
    assert maker.with_tables(page) == page.read_text(encoding="utf-8")
