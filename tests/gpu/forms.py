"""The forms of the functions that touch every element, each forced in turn.

On a GPU: torch's operations (DISTPRUNE_NO_TRITON=1), and Triton's kernels. On a CPU, as a
rehearsal: torch's operations as on another device, and Triton's kernels by its interpreter.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from unittest import mock

import torch
from stage import NotTried, Stage

from distprune.selection import kernels
from helpers.rehearsal import as_on_device

OPERATIONS, TRITON = "torch operations", "Triton kernels"
FORMS = (OPERATIONS, TRITON)


def interpret_without_gpu() -> None:
    """Before Triton is imported."""
    if "cpu" in sys.argv:
        os.environ["TRITON_INTERPRET"] = "1"


def each_form(stage: Stage, names: Sequence[str] = FORMS) -> Iterator[str]:
    """The names of the forms, each in use until the next one; one that cannot be tried is said."""
    for name in names:
        try:
            with form(name, stage.device):
                yield name
        except NotTried as reason:
            stage.say(f"{name}: not tried: {reason}")


@contextlib.contextmanager
def form(name: str, device: torch.device) -> Iterator[None]:
    """Use one form on a device.

    Raises:
        NotTried: Triton is not installed, in a rehearsal.
        RuntimeError: Triton's kernels do not run on this GPU.
    """
    if device.type == "cpu":
        with _rehearsed(name):
            yield
        return
    value = "1" if name == OPERATIONS else "0"
    with mock.patch.dict(os.environ, {kernels.NO_TRITON: value}):
        if name == TRITON and not kernels.fused_on(device):
            raise RuntimeError(f"Triton's kernels do not run on {device}: see the log")
        yield


@contextlib.contextmanager
def _rehearsed(name: str) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(as_on_device(triton=name == TRITON))
        except ImportError as error:
            raise NotTried("Triton is not installed, which would interpret its kernels") from error
        yield
