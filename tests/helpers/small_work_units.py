"""Split the work on files into many small units and chunks, as for large checkpoints."""

import contextlib
from unittest import mock

from distprune.files import applying, journals, lowest, units
from distprune.selection import cpu


@contextlib.contextmanager
def small_units(num_elements=200, copy_bytes=300, flush_bytes=900):
    """A context manager, and a decorator for functions that run on ranks."""
    with (
        mock.patch.object(units, "_MIN_ELEMENTS", num_elements),
        mock.patch.object(applying, "_UNIT_ELEMENTS", num_elements),
        mock.patch.object(units, "_COPY_BYTES", copy_bytes),
        mock.patch.object(journals, "_FLUSH_BYTES", flush_bytes),
    ):
        yield


def small_chunks(monkeypatch, elements, in_memory=None):
    """Read and rank a few elements at a time, as of large tensors.

    Args:
        elements: of a chunk.
        in_memory: of the largest group that is ranked in memory.
    """
    monkeypatch.setattr(cpu, "CHUNK_BYTES", 4 * elements)
    monkeypatch.setattr(lowest, "CHUNK", elements)
    if in_memory is not None:
        monkeypatch.setattr(lowest, "MAX_IN_MEMORY", in_memory)
