"""``prune`` and ``apply`` after an interruption: messages, --discard."""

import pytest
import torch
from commands import Done, start

from helpers.tiny_checkpoints import save

RUN = ("distprune/report.json",)


@pytest.fixture
def source(tmp_path):
    torch.manual_seed(0)
    tensors = {f"layers.{i}.weight": torch.randn(16, 16) for i in range(6)}
    return save(tmp_path / "source", tensors)


@pytest.fixture(params=["prune", "apply"])
def command(request, run, source, tmp_path):
    """A command, and its destination."""
    out = tmp_path / "out"
    if request.param == "prune":
        return ["prune", source, out, "-s", "0.5"], out
    masks = tmp_path / "masks"
    assert run("prune", source, masks, "-s", "0.25").code == 0
    return ["apply", masks, source, out], out


# As if a signal came when nearly all is done.
INTERRUPTED = """
import os, signal
from distprune.cli import main
from distprune.files import pruning
pruning.Result._publish = lambda *_: os.kill(os.getpid(), signal.{})
main()
"""


def interrupted(command, name="SIGTERM"):
    process = start("-c", INTERRUPTED.format(name), *command)
    out, err = process.communicate(timeout=100)
    return Done(process.returncode, out, err)


def test_the_same_command_goes_on_after_a_signal(run, command):
    command, _out = command
    for name, code in (("SIGINT", 1), ("SIGTERM", -15)):
        assert interrupted(command, name).code == code
    done = run(*command)
    assert done.code == 0 and "Resuming: " in done.err


def test_discard_gives_up(run, command, tmp_path):
    command, _out = command
    before = {path.name for path in tmp_path.iterdir()}
    interrupted(command)
    done = run(*command, "--discard")
    assert done.code == 0 and "Removed " in done.out and "of the disk" in done.out
    assert {path.name for path in tmp_path.iterdir()} == before
    done = run(*command, "--discard")
    assert done.code == 0 and "There is no unfinished result" in done.out
    interrupted(command)
    found = run(*command, "--discard", "--json").json["discarded"]
    assert len(found) == 1 and found[0]["num_bytes"] > 5000
