"""Fixtures of the tests of checkpoints."""

import pytest

from helpers.small_work_units import small_chunks, small_units


@pytest.fixture
def small_pieces(monkeypatch):
    """Many units, parts of tensors, spans and chunks, as large tensors have them."""
    small_chunks(monkeypatch, 24, 12)
    with small_units(num_elements=44, copy_bytes=100):  # no multiple of 8
        yield
