"""Make distprune importable from a checkout; run a sample of each matrix of tests."""

import faulthandler
import gc
import os
import signal
import sys
import zlib
from pathlib import Path

import pytest

# A shell starts what runs in the background with SIGINT ignored, and every process below inherits
# that; tests of interrupts would see none.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Each worker of pytest-xdist has a core of its own at best: threads of torch would only compete. Of
# a process alone, they would add up in another order than ranks do, which have one thread each.
if not any(argument.startswith("--device") for argument in sys.argv):
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Folders and files whose tests take long; of their matrices, a sample runs by default.
SAMPLED = (
    "distributed", "files", "golden", "integrations", "cli", "launch", "language_models",
    "selftest", "streaming", "test_blocks", "test_fingerprint", "test_geometry", "test_ranking",
)  # fmt: skip
# Of wrappings, tests of the contract run on every kind, or with every number of processes; others
# on one that holds tensors and on one that holds DTensors, which are others in each test.
EVERY_KIND = ("test_training",)
EVERY_SIZE = ("test_communication", "test_state_dict", "test_verify")
ROOT = str(Path(__file__).resolve().parent.parent)
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)  # the processes of the ranks copy this sys.path

import torch  # noqa: E402

from distprune.testing import preload  # noqa: E402
from helpers.sampling import THOROUGH, axes, covering, num_processes  # noqa: E402

# Imported once, in the process that the ranks are forked from.
preload(
    "pytest",
    "torch.nn.utils.prune",
    "distprune._public",
    "helpers.comparisons",
    "helpers.reference",
    "helpers.wrappings",
)


def pytest_addoption(parser):
    parser.addoption(
        "--device", metavar="NAME", help="run only tests that take a device, on this one: cuda"
    )


@pytest.fixture(scope="session")
def device(request):
    """The device of a test that runs on any: a CPU, or the one of --device."""
    chosen = torch.device(request.config.getoption("--device") or "cpu")
    if chosen.type != "cpu":
        torch.accelerator.set_device_index(chosen.index or 0)
        chosen = torch.device(chosen.type, chosen.index or 0)
        # Tests compare two runs of the same operations, bit for bit.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
    return chosen


def pytest_collection_modifyitems(config, items):
    """With --device, leave out what takes none; without DISTPRUNE_THOROUGH, most of each matrix.

    What the command line names itself (``test_file.py::test_name``) is not left out.
    """
    others = set()
    if config.getoption("--device") is not None:
        others = {item for item in items if "device" not in getattr(item, "fixturenames", ())}
    elif not THOROUGH and not any("::" in argument for argument in config.args):
        others = {item for item in items if item.get_closest_marker("thorough")}
        others |= {item for item in items if item.get_closest_marker("gpu")}
        matrices = {}
        for item in items:
            params = getattr(getattr(item, "callspec", None), "params", {})
            sampled = item.path.relative_to(ROOT).parts[1] in SAMPLED or item.path.stem in SAMPLED
            is_matrix = len(params) > 1 or "wrapping" in params
            if sampled and is_matrix and not item.get_closest_marker("whole"):
                matrices.setdefault(item.nodeid.partition("[")[0], []).append(item)
        for name, cases in matrices.items():
            first = zlib.crc32(name.encode()) % len(cases)  # another one in each test
            cases = [*cases[first:], *cases[:first]]
            # Four processes cost twice as much as two, and one shards nothing: only where no other
            # case has their values.
            cases.sort(key=lambda case: num_processes(case.callspec.params) not in (2, 3))
            kinds = cases[0].path.stem in EVERY_KIND
            sizes = kinds or cases[0].path.stem in EVERY_SIZE
            kept = covering([axes(case.callspec.params, kinds, sizes) for case in cases])
            others |= set(cases) - {cases[i] for i in kept}
    if others:
        config.hook.pytest_deselected(items=list(others))
        items[:] = [item for item in items if item not in others]


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


@pytest.hookimpl(wrapper=True)
def pytest_collection(session):
    """Collect no garbage meanwhile: the objects that are made stay, and would be visited often."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish(session):
    """Exclude imported objects from garbage collections: tests collect often."""
    if "transformers" in sys.modules:
        preload("transformers.models.llama.modeling_llama")
    gc.collect()
    gc.freeze()
