"""A CPU treated as another device: by torch's operations, or by Triton's kernels, interpreted."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

from distprune._common import mask_kernels, memory
from distprune.selection import kernels


@contextlib.contextmanager
def as_on_device(*, triton: bool) -> Iterator[None]:
    """Within it, elements on a CPU are worked on as those on a device are.

    Raises:
        ImportError: Triton is not installed.
    """
    of_scores = of_masks = None
    if triton:
        from distprune._common import triton_masks
        from distprune.selection import triton_kernels

        of_scores, of_masks = triton_kernels, triton_masks
    with (
        mock.patch.object(memory, "takes_numpy", lambda device: False),
        mock.patch.object(kernels, "fused_on", lambda device: of_scores),
        mock.patch.object(mask_kernels, "mask_kernels_on", lambda device: of_masks),
    ):
        yield
