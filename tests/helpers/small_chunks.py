"""Read and rank files in many small chunks, as large checkpoints are."""

from distprune.files import disk as access
from distprune.ranking import cpu


def small_chunks(monkeypatch, elements):
    """Read and rank a few elements at a time, as of large tensors."""
    monkeypatch.setattr(cpu, "CHUNK_BYTES", 4 * elements)
    monkeypatch.setattr(access, "SLAB_BYTES", 4 * elements)
