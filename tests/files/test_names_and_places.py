"""Names that are too long or no UTF-8, links that go round, folders that may not be listed, /."""

import os
import sys

import pytest
import torch

from distprune.files.applying import Application
from distprune.files.checkpoints.checkpoint import open_checkpoint
from distprune.files.errors import CheckpointError, OutputError
from distprune.files.planning import plan
from distprune.files.pruning import prune
from distprune.files.recipe import FileRecipe
from helpers import tiny_checkpoints
from helpers.permissions import without_root_privileges

WEIGHTS = {"layers.0.weight": torch.randn(8, 8).bfloat16()}


@pytest.fixture
def source(tmp_path):
    return tiny_checkpoints.save(tmp_path / "source", WEIGHTS)


def refuse(source):
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(source)
    return str(error.value)


@pytest.fixture(params=["prune", "apply"])
def write(request, source, tmp_path):
    """Write a result to a place; it raises OutputError, and leaves nothing."""
    made = plan(source, FileRecipe(0.5))
    prune(made, tmp_path / "masks")
    application = Application(tmp_path / "masks", source)

    def call(place):
        before = sorted(os.listdir(tmp_path))
        try:
            application.write(place) if request.param == "apply" else prune(made, place)
        except OutputError as error:
            assert sorted(os.listdir(tmp_path)) == before
            assert "\n" not in str(error)
            return str(error)
        return ""

    return call


def test_the_root_is_no_destination(write):
    assert "has no name" in write("/")


@pytest.mark.parametrize("letter", ["x", "é"])
def test_a_name_that_leaves_no_room_for_the_partial_folder(write, tmp_path, letter):
    width = len(letter.encode())
    text = write(tmp_path / (letter * (230 // width)))
    assert "has 230 bytes; expected at most 225" in text
    assert "has 300 bytes" in write(tmp_path / ("x" * 300))
    assert write(tmp_path / (letter * (224 // width))) == ""


def test_a_destination_that_is_a_link_in_a_circle(write, tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    assert "exists" in write(tmp_path / "loop")
    assert "Too many levels of symbolic links" in write(tmp_path / "loop" / "new")


def test_a_destination_in_a_folder_that_may_not_be_written_or_entered(write, tmp_path):
    (tmp_path / "closed").mkdir()
    for mode in (0o555, 0o444):
        (tmp_path / "closed").chmod(mode)
        with without_root_privileges():
            text = write(tmp_path / "closed" / "new")
        assert "Permission denied" in text
    (tmp_path / "closed").chmod(0o777)


def test_a_destination_whose_name_is_no_utf_8(write, tmp_path):
    assert write(tmp_path / os.fsdecode(b"caf\xe9")) == ""


def test_a_source_that_is_a_link_in_a_circle(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    assert "it is a circular link" in refuse(tmp_path / "loop")
    (tmp_path / "gone").symlink_to("nowhere")
    assert "is a link to nowhere, which does not exist" in refuse(tmp_path / "gone")


def test_links_in_the_source_that_go_round(source):
    (source / "self").symlink_to("self")
    (source / "deep").mkdir()
    (source / "deep" / "up").symlink_to("..", target_is_directory=True)
    text = refuse(source)
    assert "self (a link to self) cannot be read: Too many levels of symbolic links" in text
    assert "deep/up is a link to a folder that contains it" in text


def test_names_in_the_source_that_are_no_utf_8(source, tmp_path):
    name = os.fsdecode(b"caf\xe9")
    (source / name).mkdir()
    (source / name / name).write_text("x")
    report = prune(plan(source, FileRecipe(0.5)), tmp_path / "target")
    assert f"{name}/{name}" in report.copied
    assert (tmp_path / "target" / name / name).read_text() == "x"
    (source / name).chmod(0)
    with without_root_privileges():
        text = refuse(source)
    (source / name).chmod(0o755)
    assert "cannot be listed" in text


def test_a_name_with_a_nul(tmp_path, write):
    assert "cannot be read" in refuse("so\0urce")
    assert "cannot be created" in write(tmp_path / "tar\0get")


@pytest.mark.skipif(sys.platform != "linux", reason="names of bytes")
def test_a_whole_source_whose_name_is_no_utf_8(source, tmp_path):
    odd = tmp_path / os.fsdecode(b"mod\xe9le")
    source.rename(odd)
    assert plan(odd, FileRecipe(0.5)).num_to_prune == 32
    (odd / "config.json").write_text("[]")
    assert refuse(odd).isascii()
