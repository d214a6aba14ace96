"""The processes of a command, and how the library's errors end it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TypeVar

from distprune.files.errors import FilesError, RanksError, SelectionError, explained

T = TypeVar("T")

FAILURE, DIFFERENT = 1, 3


@contextlib.contextmanager
def process_group(timeout: float, backend: str = "gloo") -> Iterator[None]:
    """Join the other ranks of torchrun, if there are any."""
    if "RANK" not in os.environ:
        yield
        return
    import torch.distributed as dist

    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
    except (ValueError, RuntimeError) as error:
        raise RanksError(f"could not initialise the process group: {error}") from error
    yield
    dist.destroy_process_group()  # after an error the process ends


def on_every_rank(find: Callable[[], T]) -> T:
    """Find something on every rank; an error of one is raised on all of them. Collective."""
    from distprune.files.team import Team
    from distprune.ranks.collectives import world

    return Team(world()).run(find)


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
        if "RANK" in os.environ and explained(error) is None:
            raise RanksError(
                f"a rank failed, was lost, or did not answer in time ({error})."
            ) from error
        raise
