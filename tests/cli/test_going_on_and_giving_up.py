"""``prune`` and ``apply`` after an interruption: messages, --discard."""

import pytest
import torch

from distprune.files.output import Output
from helpers.tiny_checkpoints import save, tree_digest

RUN = ("distprune/run.json",)


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


def interrupted(run, command, monkeypatch):
    """As if SIGTERM came when nearly all is done."""

    def publish(self):
        from distprune.files.errors import Interrupted

        raise Interrupted("stopped as asked.")

    with monkeypatch.context() as patch:
        patch.setattr(Output, "publish", publish)
        return run(*command)


def test_a_stop_says_what_is_left_and_the_same_command_goes_on(run, command, tmp_path, monkeypatch):
    command, _out = command
    done = interrupted(run, command, monkeypatch)
    assert done.code == 143 and "Traceback" not in done.err
    (folder,) = tmp_path.glob("out.partial")
    assert str(folder) in done.err and "run the same command again to resume" in done.err
    assert "--discard" in done.err
    done = run(*command)
    assert done.code == 0 and "Resuming: 6.7 kB of 6.7 kB are finished." in done.err


def test_discard_gives_up(run, command, tmp_path, monkeypatch):
    command, _out = command
    before = {path.name for path in tmp_path.iterdir()}
    interrupted(run, command, monkeypatch)
    done = run(*command, "--discard")
    assert done.code == 0 and "Removed " in done.out and "of the disk" in done.out
    assert {path.name for path in tmp_path.iterdir()} == before
    done = run(*command, "--discard")
    assert done.code == 0 and "There is no unfinished result" in done.out
    interrupted(run, command, monkeypatch)
    found = run(*command, "--discard", "--json").json["discarded"]
    assert len(found) == 1 and found[0]["num_bytes"] > 5000


def test_a_finished_result_is_success_for_the_command_that_made_it(run, command, tmp_path):
    command, out = command
    assert run(*command).code == 0
    before = tree_digest(out)
    done = run(*command)
    assert done.code == 0 and "is finished: this command made it before" in done.err
    assert tree_digest(out) == before
    assert run(*command, "--discard").code == 0 and tree_digest(out) == before
    command = [each if each != "0.5" else "0.4" for each in command]
    if command[0] == "prune":
        done = run(*command)
        assert done.code == 4 and "finished result" in done.err and tree_digest(out) == before
