"""A copy that fails in the kernel: the error names the file at fault, source or destination."""

import errno
import os

import pytest
import torch

from distprune.files import planning, pruning
from distprune.files.errors import CheckpointError, OutputError
from distprune.files.recipe import FileRecipe
from helpers.tiny_checkpoints import save, tree_digest

RUN = ("distprune/run.json",)


@pytest.fixture
def source(tmp_path):
    torch.manual_seed(0)
    return save(tmp_path / "source", {"layers.0.weight": torch.randn(16, 16), "b": torch.ones(4)})


def prune(source, target):
    pruning.prune(planning.plan(source, FileRecipe(0.5)), target)
    return tree_digest(target, RUN)


def failing(number):
    def fail(*_):
        raise OSError(number, os.strerror(number))

    return fail


def test_a_source_that_cannot_be_opened(source, tmp_path, monkeypatch):
    really_open = os.open

    def refusing(path, *args, **kwargs):
        if str(path) == str(source / "tokenizer.json"):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))
        return really_open(path, *args, **kwargs)

    plan = planning.plan(source, FileRecipe(0.5))
    monkeypatch.setattr(os, "open", refusing)
    with pytest.raises(CheckpointError, match=r"source/tokenizer\.json cannot be read: Permission"):
        pruning.prune(plan, tmp_path / "target")


def test_a_source_that_cannot_be_read(source, tmp_path, monkeypatch):
    plan = planning.plan(source, FileRecipe(0.5, include=("layers.*",)))
    really_read = os.preadv

    def refusing(descriptor, *args):
        if os.readlink(f"/proc/self/fd/{descriptor}") == str(source / "tokenizer.json"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return really_read(descriptor, *args)

    monkeypatch.setattr(os, "copy_file_range", failing(errno.EIO))
    monkeypatch.setattr(os, "preadv", refusing)
    with pytest.raises(CheckpointError, match=r"source/tokenizer\.json cannot be read: Input"):
        pruning.prune(plan, tmp_path / "target")


@pytest.mark.parametrize("number", [errno.EXDEV, errno.EIO, errno.EPERM, errno.ETXTBSY])
def test_a_kernel_that_cannot_copy(source, tmp_path, monkeypatch, number):
    wanted = prune(source, tmp_path / "undisturbed")
    monkeypatch.setattr(os, "copy_file_range", failing(number))
    assert prune(source, tmp_path / "target") == wanted


def test_a_destination_that_is_full(source, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "copy_file_range", failing(errno.EDQUOT))
    with pytest.raises(OutputError, match="cannot be written: Disk quota exceeded"):
        prune(source, tmp_path / "target")
