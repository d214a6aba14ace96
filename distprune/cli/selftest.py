"""``distprune selftest``: whether what distprune promises holds on this machine.

It is what a user runs first, so it needs neither click nor rich: torch and numpy only.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections.abc import Sequence

from distprune.cli import process
from distprune.files.errors import RanksError, SelectionError

ABOUT = """Check what distprune guarantees on this machine, with this backend and version of torch.

It checks masks against a reference on every wrapper that the ranks allow, traffic, errors on all
ranks or none, a training step, and the private fields of torch that distprune uses. It reports what
holds here, what does not, and what could not be tried."""
_EPILOG = """examples:
  python -m distprune selftest
  torchrun --nproc-per-node 4 -m distprune selftest
  torchrun --nproc-per-node 4 -m distprune selftest --share     # with one GPU

exit codes:
  0 all that was tried holds, 1 something does not hold, or ranks are lost, 2 wrong usage"""


def main(arguments: Sequence[str]) -> int:
    """Run the self-test on this rank."""
    options = _parser().parse_args(arguments)
    try:
        import numpy  # noqa: F401
        import torch
    except ModuleNotFoundError as error:
        raise SelectionError(f"the self-test needs torch and numpy: {error}") from error
    try:
        from distprune import selftest
    except ImportError as error:
        print(f"FAILED: distprune does not import with torch {torch.__version__}: {error}")
        return process.FAILURE
    try:
        device, note = selftest.join(options.timeout, cpu=options.cpu, share=options.share)
    except (RuntimeError, ValueError) as error:
        raise RanksError(f"could not initialise the process group: {error}") from error
    is_first = torch.distributed.get_rank() == 0
    warnings.simplefilter("ignore")

    def say(text: str) -> None:
        if is_first and not options.as_json:
            print(text, flush=True)

    report = selftest.run(device, note, options.timeout, say)
    if options.as_json and is_first:
        print(json.dumps(report, indent=2))
    if report["ended"]:
        # The group's other ranks may be gone: nothing may wait for them.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(process.FAILURE)
    torch.distributed.destroy_process_group()
    return 0 if report["holds"] else process.FAILURE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="distprune selftest",
        description=ABOUT,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--json", action="store_true", dest="as_json", help="print one JSON document"
    )
    parser.add_argument("--cpu", action="store_true", help="test gloo on the CPU, not accelerators")
    parser.add_argument(
        "--share", action="store_true", help="let several ranks share an accelerator, over gloo"
    )
    parser.add_argument(
        "--timeout",
        type=_seconds,
        default=60.0,
        help="of torch's process groups, in seconds (default 60)",
    )
    return parser


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < 1e6:
        raise ValueError(text)
    return value
