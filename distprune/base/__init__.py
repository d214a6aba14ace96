"""Numbers, names and communication: used by all other rooms, and using none of them."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Run code that makes many objects which stay, and hardly any garbage in cycles.

    Python looks through all objects of the process whenever their number has grown by a quarter:
    beside thousands of parameters that takes as long as all else. Also a decorator.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
