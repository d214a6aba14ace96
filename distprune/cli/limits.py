"""Memory limits at which libraries abort the process, which cannot be caught."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from distprune.files.errors import MachineError

_TORCH_BYTES = 750_000_000  # of address space, to import torch and start


@contextlib.contextmanager
def checked_before_torch() -> Iterator[None]:
    """Refuse to import torch if its libraries would abort the process for lack of memory.

    Raises:
        MachineError: from an import of torch, if ``ulimit -v`` leaves too little.
    """
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _Finder:
    """Finds no module; it is called before every import."""

    def find_spec(self, name: str, *_: Any) -> None:
        if name != "torch":
            return
        limit = _address_space()
        if limit is not None and limit < _TORCH_BYTES:
            raise MachineError(
                f"the memory of a process is limited to {limit / 1e6:.0f} MB; expected at least "
                f"{_TORCH_BYTES / 1e6:.0f} MB, which torch needs. Raise the limit (`ulimit -v`)."
            )


def _address_space() -> int | None:
    try:
        import resource
    except ImportError:
        return None
    soft = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if soft == resource.RLIM_INFINITY else soft
