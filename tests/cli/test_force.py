"""``--force`` replaces finished results only; ``--discard``; a run that goes on after a signal."""

import os
import shutil

import pytest
import torch
from commands import Done, start

from distprune.files import disk, pruning
from distprune.files.errors import OutputError
from helpers.tiny_checkpoints import save, tree_digest

RUN = ("distprune/report.json",)
DESTINATION = 1


@pytest.fixture
def source(tmp_path):
    torch.manual_seed(0)
    tensors = {f"layers.{i}.weight": torch.randn(16, 16) for i in range(2)}
    return save(tmp_path / "source", tensors)


@pytest.fixture
def out(run, source, tmp_path):
    """A finished result."""
    assert run("prune", source, tmp_path / "out", "-s", "0.5").code == 0
    return tmp_path / "out"


@pytest.fixture(params=["prune", "apply"])
def again(request, run, source, tmp_path):
    """A command that makes another result, but for its destination."""
    if request.param == "prune":
        return ["prune", source], ["-s", "0.25"]
    assert run("prune", source, tmp_path / "masks", "-s", "0.25").code == 0
    return ["apply", tmp_path / "masks", source], []


def test_a_result_is_replaced_by_what_a_free_place_would_get(run, again, out, tmp_path):
    begin, end = again
    old = tree_digest(out, RUN)
    done = run(*begin, out, *end)
    assert done.code == DESTINATION and "Add --force to replace it" in done.err
    assert tree_digest(out, RUN) == old
    assert run(*begin, out, *end, "--force").code == 0
    assert run(*begin, tmp_path / "free", *end).code == 0
    assert tree_digest(out, RUN) == tree_digest(tmp_path / "free", RUN) != old
    assert not list(tmp_path.glob("*.partial*"))
    done = run(*begin, out, *end, "--force")
    assert done.code == 0 and "Nothing was changed" in done.err


def test_the_old_result_stays_until_the_new_one_is_complete(run, again, out, monkeypatch):
    begin, end = again
    old = tree_digest(out, RUN)

    def stop(*_):
        raise OutputError("stopped.")

    with monkeypatch.context() as patch:
        patch.setattr(pruning.Result, "_publish", stop)
        assert run(*begin, out, *end, "--force").code == 1
    assert tree_digest(out, RUN) == old
    assert run(*begin, out, *end, "--force").code == 0
    assert tree_digest(out, RUN) != old


def test_a_run_killed_between_the_renames_loses_neither(run, source, out, monkeypatch):
    old, command = tree_digest(out, RUN), ["prune", source, out, "-s", "0.25"]

    def killed(destination):
        os.rename(destination, disk._replaced(destination))
        raise OutputError("as if by SIGKILL.")

    with monkeypatch.context() as patch:
        patch.setattr(disk, "publish", killed)
        assert run(*command, "--force").code == 1
    assert not out.exists()
    assert run(*command).code == DESTINATION  # it puts the old result back
    assert tree_digest(out, RUN) == old
    os.rename(out, disk._replaced(out))
    assert run(*command, "--discard").code == 0
    assert tree_digest(out, RUN) == old
    assert run(*command, "--force").code == 0
    shutil.copytree(out, disk._replaced(out))  # killed before the old one was removed
    assert run(*command).code == 0 and not disk._replaced(out).exists()


def test_nothing_else_is_replaced(run, source, out, tmp_path):
    def refused(destination, *words, masks=()):
        before = tree_digest(tmp_path)
        command = ["apply", *masks, source] if masks else ["prune", source]
        amount = [] if masks else ["-s", "0.25"]
        done = run(*command, destination, *amount, "--force")
        assert done.code == DESTINATION and all(word in done.err for word in words), done.err
        assert tree_digest(tmp_path) == before

    plain = save(tmp_path / "plain", {"layers.0.weight": torch.randn(4, 4)})
    refused(plain, "is no finished result of distprune")
    refused(source, "is inside the source")
    (tmp_path / "link").symlink_to(out)
    refused(tmp_path / "link", "is no finished result")
    refused(out, "which --force would replace", masks=[out])
    inside = save(out / "inside", {"layers.0.weight": torch.randn(4, 4)})
    done = run("prune", inside, out, "-s", "0.25", "--force")
    assert done.code == DESTINATION and "which --force would replace" in done.err


@pytest.fixture
def large_source(tmp_path):
    torch.manual_seed(0)
    tensors = {f"layers.{i}.weight": torch.randn(16, 16) for i in range(6)}
    return save(tmp_path / "large_source", tensors)


@pytest.fixture(params=["prune", "apply"])
def command(request, run, large_source, tmp_path):
    """A command, and its destination."""
    out = tmp_path / "out"
    if request.param == "prune":
        return ["prune", large_source, out, "-s", "0.5"], out
    masks = tmp_path / "masks"
    assert run("prune", large_source, masks, "-s", "0.25").code == 0
    return ["apply", masks, large_source, out], out


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
