"""``--force``: a finished result of distprune gives its place to a new one; nothing else does."""

import os
import shutil

import pytest
import torch

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
