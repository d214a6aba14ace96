"""Split the work on files into many small units, as for large checkpoints."""

import contextlib
from unittest import mock

from distprune.files.disk import journal
from distprune.files.ranking import units
from distprune.files.results import masking


@contextlib.contextmanager
def small_units(num_elements=200, copy_bytes=300, flush_bytes=900):
    """A context manager, and a decorator for functions that run on ranks."""
    with (
        mock.patch.object(units, "_MIN_ELEMENTS", num_elements),
        mock.patch.object(masking, "_UNIT_ELEMENTS", num_elements),
        mock.patch.object(units, "_COPY_BYTES", copy_bytes),
        mock.patch.object(journal, "_FLUSH_BYTES", flush_bytes),
    ):
        yield
