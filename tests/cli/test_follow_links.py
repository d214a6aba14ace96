"""Links out of a source on the command line: refused where something is copied, read elsewhere."""

import pytest
import torch

from helpers.permissions import without_root_privileges
from helpers.tiny_checkpoints import save


@pytest.fixture
def source(tmp_path):
    source = save(tmp_path / "source", {"layers.0.weight": torch.randn(8, 8)})
    (tmp_path / "secret").write_text("root:x")
    (source / "merges.txt").symlink_to(tmp_path / "secret")
    return source


def test_what_copies_refuses_them_by_name_unless_told(run, source, tmp_path):
    target, link = tmp_path / "target", f"merges.txt (to {tmp_path / 'secret'})"
    for command in (("plan", source), ("prune", source, target)):
        done = run(*command, "-s", "0.5")
        assert done.code == 3 and link in done.err and "--follow-links" in done.err
        assert not target.exists()
        assert run(*command, "-s", "0.5", "--follow-links").code == 0
    assert (target / "merges.txt").read_text() == "root:x"
    done = run("apply", target, source, tmp_path / "applied")
    assert done.code == 3 and link in done.err
    assert run("apply", target, source, tmp_path / "applied", "--follow-links").code == 0


@pytest.mark.slow
@pytest.mark.thorough
def test_ranks_that_it_starts_are_told_too(run, source, tmp_path):
    arguments = ("prune", source, tmp_path / "target", "-s", "0.5", "--nproc", "2")
    assert run(*arguments).code == 3
    assert run(*arguments, "--follow-links").code == 0
    assert (tmp_path / "target" / "merges.txt").read_text() == "root:x"


def test_what_only_reads_follows_them(run, source, tmp_path):
    run("prune", source, tmp_path / "target", "-s", "0.5", "--follow-links")
    assert run("inspect", source).code == 0
    assert run("diff", source, tmp_path / "target").code == 0
    assert run("verify", tmp_path / "target", "--against", source).code == 0


def test_a_file_that_may_not_be_read_is_no_fault_of_the_destination(run, source, tmp_path):
    (source / "tokenizer.json").chmod(0)
    with without_root_privileges():
        done = run("prune", source, tmp_path / "target", "-s", "0.5", "--follow-links")
    assert done.code == 3 and "tokenizer.json cannot be read: Permission denied." in done.err
    assert not list(tmp_path.glob("target*"))
