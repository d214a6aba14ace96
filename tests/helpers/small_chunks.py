"""Read and rank files in many small chunks, as large checkpoints are."""

from distprune.files import lowest
from distprune.selection import cpu


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
