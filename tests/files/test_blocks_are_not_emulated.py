"""Reserving blocks where the file system cannot: the C library must not write them one by one."""

import ctypes
import errno
import os
from collections import namedtuple

import pytest
import torch

from distprune.files import planning, pruning
from distprune.files.disk import access
from distprune.files.errors import OutputError
from distprune.files.recipe import FileRecipe
from helpers.tiny_checkpoints import save, tree_digest

REFUSALS = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EPERM)


@pytest.fixture
def source(tmp_path):
    torch.manual_seed(0)
    return save(tmp_path / "source", {"layers.0.weight": torch.randn(64, 64)})


def prune(source, target):
    pruning.prune(planning.plan(source, FileRecipe(0.5)), target)
    return tree_digest(target, ("distprune/run.json",))


def answering(number, calls):
    """The system's call, but with this answer."""

    def call(descriptor, mode, offset, size):
        calls.append(size)
        ctypes.set_errno(number)
        return -1

    return call


@pytest.mark.parametrize("number", REFUSALS)
def test_a_refusal_is_not_made_up_for(source, tmp_path, monkeypatch, number):
    wanted = prune(source, tmp_path / "undisturbed")
    calls, emulated = [], []
    monkeypatch.setattr(access, "_fallocate", answering(number, calls))
    monkeypatch.setattr(os, "posix_fallocate", lambda *given: emulated.append(given))
    assert prune(source, tmp_path / "target") == wanted
    assert len(calls) >= 3 and not emulated


def test_a_large_file_takes_no_writes(tmp_path, monkeypatch):
    """A terabyte of blocks, one by one, would take hours."""
    monkeypatch.setattr(access, "_fallocate", answering(errno.EOPNOTSUPP, []))
    access.allocate(str(tmp_path / "file"), 2**40)
    info = (tmp_path / "file").stat()
    assert info.st_size == 2**40 and info.st_blocks == 0


def test_blocks_are_reserved_where_that_is_possible(tmp_path):
    if access._fallocate is None:
        pytest.skip("the system has no such call")
    access.allocate(str(tmp_path / "file"), 1 << 20)
    if (tmp_path / "file").stat().st_blocks == 0:
        pytest.skip("the file system cannot reserve blocks")
    assert (tmp_path / "file").stat().st_blocks * 512 >= 1 << 20


def test_an_interrupted_call_is_made_again(tmp_path, monkeypatch):
    answers = iter([errno.EINTR, errno.EINTR, 0])

    def call(*_):
        number = next(answers)
        ctypes.set_errno(number)
        return -1 if number else 0

    monkeypatch.setattr(access, "_fallocate", call)
    access.allocate(str(tmp_path / "file"), 5)
    assert next(answers, None) is None


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_is_found_before_the_work(source, tmp_path, monkeypatch, number):
    monkeypatch.setattr(access, "_fallocate", answering(number, []))
    with pytest.raises(OutputError, match="Make room"):
        prune(source, tmp_path / "target")
    assert {path.name for path in tmp_path.iterdir()} == {"source"}


def test_without_the_call_too_little_room_is_found_before_the_work(source, tmp_path, monkeypatch):
    monkeypatch.setattr(access, "_fallocate", answering(errno.EOPNOTSUPP, []))
    room = namedtuple("room", "f_bavail f_frsize")
    monkeypatch.setattr(os, "statvfs", lambda path: room(2, 4096))
    with pytest.raises(OutputError, match=r"needs \d\d,\d{3} more bytes, but 8,192 are free"):
        prune(source, tmp_path / "target")
    assert {path.name for path in tmp_path.iterdir()} == {"source"}
