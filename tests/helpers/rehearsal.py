"""A CPU treated as another device: by torch's operations, or by Triton's kernels, interpreted."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

from distprune.base import memory
from distprune.selection import kernels


@contextlib.contextmanager
def as_on_device(*, triton: bool) -> Iterator[None]:
    """Within it, elements on a CPU are worked on as those on a device are.

    Raises:
        ImportError: Triton is not installed.
    """
    fused = None
    if triton:
        from distprune.selection import triton_kernels as fused
    with (
        mock.patch.object(memory, "takes_numpy", lambda device: False),
        mock.patch.object(kernels, "fused_on", lambda device: fused),
    ):
        yield
