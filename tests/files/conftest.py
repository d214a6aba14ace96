"""Fixtures of the tests of checkpoints."""

import pytest

from helpers.small_chunks import small_chunks


@pytest.fixture
def small_pieces(monkeypatch):
    """Many units, parts of tensors, spans and chunks, as large tensors have them."""
    small_chunks(monkeypatch, 24)
    yield
