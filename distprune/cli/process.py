"""The process group of a command, and how errors end it: 1 failure, 2 usage, 3 a difference."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TypeVar

from distprune.files.errors import FilesError, RanksError, SelectionError, explained

T = TypeVar("T")

FAILURE, DIFFERENT = 1, 3


def is_rank() -> bool:
    """Whether torchrun started this process as one of several."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


@contextlib.contextmanager
def process_group(timeout: float, backend: str = "gloo") -> Iterator[None]:
    """Join the other ranks, if there are any, in a process group."""
    if not is_rank():
        yield
        return
    import torch.distributed as dist

    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
    except (ValueError, RuntimeError) as error:
        raise RanksError(f"could not initialise the process group: {error}") from error
    yield
    dist.destroy_process_group()  # after an error the process ends


@contextlib.contextmanager
def on_ranks(timeout: float, find: Callable[[], T]) -> Iterator[T]:
    """Join the other ranks; yields what all of them find."""
    with process_group(timeout):
        from distprune.files.team import Team
        from distprune.ranks.process_groups import world

        yield Team(world()).attempt(find)


@contextlib.contextmanager
def translated(kind: type[FilesError]) -> Iterator[None]:
    """Give errors of the library, which are Python's, the exit codes of the command line."""
    try:
        yield
    except FilesError:
        raise
    except (ValueError, NotImplementedError) as error:
        raise kind(str(error)) from error
    except ImportError as error:
        raise SelectionError(str(error)) from error
    except RuntimeError as error:
        if is_rank() and explained(error) is None:
            raise RanksError(
                f"a rank failed, was lost, or did not answer in time ({error})."
            ) from error
        raise
