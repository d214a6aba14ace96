"""What is no fault of distprune is an error of its own kind, on one rank and on all."""

import errno

import pytest

from distprune.files.errors import (
    CheckpointError,
    MachineError,
    OutputError,
    SelectionError,
    explained,
)
from distprune.files.team import _packed, _unpacked


def caused(outer, inner):
    try:
        try:
            raise inner
        except BaseException as error:
            raise outer from error
    except Exception as error:
        return error


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (MemoryError(), MachineError, "MemoryError"),
        (caused(ValueError("x"), MemoryError("Unable to allocate 1 GiB")), MachineError, "1 GiB"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), MachineError, "Cannot allocate memory"),
        (ImportError("libx.so: failed to map segment from shared object"), MachineError, "libx"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), MachineError, "memory"),
        (OSError(errno.EMFILE, "Too many open files", "a"), MachineError, "a: Too many"),
        (OSError(errno.ENOSPC, "No space left on device", "b"), OutputError, "b: No space"),
        (RecursionError("maximum"), CheckpointError, "nested too deeply"),
        (SelectionError("as it is"), SelectionError, "as it is"),
    ],
)
def test_kinds(error, kind, text):
    found = explained(error)
    assert type(found) is kind and text in str(found)
    # The other ranks get the same kind.
    shared = _unpacked(_packed(error, 3))
    assert type(shared) is kind and text in str(shared) and "on rank 3" in str(shared)


@pytest.mark.parametrize(
    "error", [ValueError("x"), KeyError("memory"), RuntimeError("shape mismatch"), AssertionError()]
)
def test_defects_stay_defects(error):
    assert explained(error) is None
    assert _unpacked(_packed(error, 0)).exit_code == 1
