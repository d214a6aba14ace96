"""Drop root's privilege to ignore the permissions of files."""

import contextlib
import ctypes
import os

_VERSION = 0x20080522
# CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH: root without them is an owner like any other.
_ABOVE_PERMISSIONS = (1 << 1) | (1 << 2)


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Set(ctypes.Structure):
    _fields_ = (
        ("effective", ctypes.c_uint32),
        ("permitted", ctypes.c_uint32),
        ("inheritable", ctypes.c_uint32),
    )


@contextlib.contextmanager
def without_root_privileges():
    """Enforce the permissions of files in this thread, also for root."""
    if os.geteuid() != 0:
        yield
        return
    libc = ctypes.CDLL(None, use_errno=True)
    header, sets = _Header(_VERSION, 0), (_Set * 2)()
    assert libc.capget(ctypes.byref(header), sets) == 0
    before = sets[0].effective
    sets[0].effective = before & ~_ABOVE_PERMISSIONS
    assert libc.capset(ctypes.byref(header), sets) == 0
    try:
        yield
    finally:
        sets[0].effective = before
        assert libc.capset(ctypes.byref(header), sets) == 0
