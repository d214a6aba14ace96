"""Make distprune importable from a checkout; write what test_matrix.py measured."""

import faulthandler
import gc
import json
import os
import signal
import sys
from pathlib import Path

import pytest

# A shell starts what runs in the background with SIGINT ignored, and every process below inherits
# that; tests of interrupts would see none.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Each worker of pytest-xdist has a core of its own at best: threads of torch would only compete.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

ROOT = str(Path(__file__).resolve().parent.parent)
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)  # the processes of the ranks copy this sys.path

from distprune.testing import preload  # noqa: E402

# Imported once, in the process that the ranks are forked from.
preload(
    "pytest",
    "torch.nn.utils.prune",
    "distprune._public",
    "helpers.comparisons",
    "helpers.reference",
    "helpers.wrappings",
)

MATRIX = pytest.StashKey[list]()


def pytest_addoption(parser):
    parser.addoption("--write-matrix", metavar="PATH", help="write what test_matrix.py measured")


class DeadlineExceededError(BaseException):
    """A test ran for longer than its timeout.

    pytest-timeout raises an exception that hypothesis takes for a failing example: it would run
    the example again, and nothing would stop it then. This exception ends the test.
    """


@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_timeout_set_timer(item, settings):
    """After pytest-timeout has set its timer: raise another exception when it expires."""
    is_set = yield
    if settings.method == "signal":

        def stop(*_):
            faulthandler.dump_traceback(file=sys.__stderr__, all_threads=True)
            raise DeadlineExceededError(f"{item.name} took more than {settings.timeout:g} s")

        signal.signal(signal.SIGALRM, stop)
    return is_set


def pytest_collection_finish(session):
    """Exclude imported objects from garbage collections: tests collect often."""
    gc.collect()
    gc.freeze()


def pytest_configure(config):
    config.stash[MATRIX] = []
    config.pluginmanager.register(_Collector(config), "matrix collector")


class _Collector:
    """Collects results from test reports, which also come from workers of pytest-xdist."""

    def __init__(self, config):
        self.config = config

    def pytest_runtest_logreport(self, report):
        if report.when == "call" and report.passed:
            self.config.stash[MATRIX] += [v for k, v in report.user_properties if k == "matrix"]

    def pytest_sessionfinish(self, exitstatus):
        path = self.config.getoption("--write-matrix")
        if path is None or hasattr(self.config, "workerinput"):
            return
        if exitstatus != 0:
            raise pytest.UsageError("not written: a test failed, and the matrix would have holes")
        import torch

        from helpers import training_pair

        rows = ",\n".join(map(json.dumps, sorted(self.config.stash[MATRIX], key=_place)))
        head = {"torch": torch.__version__, "backend": "gloo", "num_steps": training_pair.NUM_STEPS}
        Path(path).write_text(f'{json.dumps(head)[:-1]}, "results": [\n{rows}\n]}}\n')


def _place(result):
    from helpers import wrappings

    return (
        wrappings.TRAINED.index(result["wrapping"]),
        result["optimizer"],
        result["optimizer_made"],
    )
