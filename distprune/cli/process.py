"""The processes of a command, how the library's errors end it, and ``distprune selftest``.

The self-test is what a user runs first, so it needs neither click nor rich: torch and numpy only.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from distprune.files.errors import FilesError, RanksError, SelectionError, explained

if TYPE_CHECKING:
    from distprune.files.team import Team

FAILURE, DIFFERENT = 1, 3


@contextlib.contextmanager
def process_group(timeout: float, backend: str = "gloo") -> Iterator[Team]:
    """Join the other ranks of torchrun, if there are any. Yields all of them."""
    import torch.distributed as dist

    from distprune.files.team import Team
    from distprune.ranks.collectives import world

    try:
        if "RANK" in os.environ:
            dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
    except (ValueError, RuntimeError) as error:
        raise RanksError(f"could not initialise the process group: {error}") from error
    yield Team(world())
    if "RANK" in os.environ:  # after an error the process ends
        dist.destroy_process_group()


@contextlib.contextmanager
def translated(kind: type[FilesError], option: str = "") -> Iterator[None]:
    """Give errors of the library, which are Python's, the exit codes of the command line.

    Args:
        kind: of the errors.
        option: that they are about, and a colon.
    """
    try:
        yield
    except FilesError:
        raise
    except (ValueError, NotImplementedError) as error:
        raise kind(f"{option}{error}") from error
    except ImportError as error:
        raise SelectionError(str(error)) from error
    except RuntimeError as error:
        if "RANK" in os.environ and explained(error) is None:
            raise RanksError(
                f"a rank failed, was lost, or did not answer in time ({error})."
            ) from error
        raise


SELFTEST = """\
Check what distprune guarantees on this machine, with this backend and version of torch.

It checks masks against a reference on every wrapper that the ranks allow, traffic, errors on all
ranks or none, a training step, and the private fields of torch that distprune uses. It reports what
holds here, what does not, and what could not be tried.

Start it by `python -m distprune selftest`, or on several ranks by
`torchrun --nproc-per-node 4 -m distprune selftest`. The exit code is 0 if all that was tried holds,
1 if something does not or ranks are lost, and 2 for wrong usage."""


def run_selftest(arguments: Sequence[str]) -> int:
    """Run the self-test on this rank; it needs neither click nor rich."""
    parser = argparse.ArgumentParser(
        prog="distprune selftest",
        description=SELFTEST,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--cpu", action="store_true", help="test gloo on the CPU, not accelerators")
    text = "let several ranks share an accelerator, over gloo"
    parser.add_argument("--share", action="store_true", help=text)
    text = "of torch's process groups, in seconds (default 60)"
    parser.add_argument("--timeout", type=float, default=60.0, help=text)
    options = parser.parse_args(arguments)
    try:
        import torch.distributed as dist

        from distprune import selftest
    except ImportError as error:
        print(f"FAILED: distprune cannot be imported: {error}")
        return FAILURE
    try:
        device, note = selftest.join(options.timeout, cpu=options.cpu, share=options.share)
    except (RuntimeError, ValueError) as error:
        raise RanksError(f"could not initialise the process group: {error}") from error
    is_first = dist.get_rank() == 0
    warnings.simplefilter("ignore")

    def say(text: str) -> None:
        if is_first and not options.json:
            print(text, flush=True)

    report = selftest.run(device, note, options.timeout, say)
    if options.json and is_first:
        print(json.dumps(report, indent=2), flush=True)
    if report["ended"]:
        # The group's other ranks may be gone: nothing may wait for them.
        sys.stderr.flush()
        os._exit(FAILURE)
    dist.destroy_process_group()
    return 0 if report["holds"] else FAILURE
