"""Give a parameter other memory; it stays the same object."""

from __future__ import annotations

from torch import Tensor

from distprune._common.pruned_form import is_dtensor


def rebind(parameter: Tensor, values: Tensor) -> None:
    """Do ``parameter.data = values``, which has no effect on a DTensor, there too.

    Args:
        parameter: plain or a DTensor.
        values: of this rank, detached; not copied.
    """
    (parameter._local_tensor if is_dtensor(parameter) else parameter).data = values
