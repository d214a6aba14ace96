"""A CPU treated as another device: by torch's operations."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

from distprune.base import memory


@contextlib.contextmanager
def as_on_device() -> Iterator[None]:
    """Within it, elements on a CPU are worked on as those on a device are."""
    with mock.patch.object(memory, "takes_numpy", lambda device: False):
        yield
