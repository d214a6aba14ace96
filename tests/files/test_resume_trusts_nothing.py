"""Damage to an unfinished result between two runs is detected, and the work done again."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from distprune.files import planning, pruning
from distprune.files.errors import Interrupted
from distprune.files.partial import Partial
from distprune.files.recipe import FileRecipe
from distprune.testing import run_ranks
from helpers import tiny_checkpoints
from helpers.disk_crashes import Steps
from helpers.small_work_units import small_units
from helpers.tiny_checkpoints import tree_digest

RUN = ("distprune/run.json",)
WEIGHTS = "model-00001-of-00002.safetensors"
LAST_WEIGHTS = "model-00002-of-00002.safetensors"
MASKS = "distprune/masks.safetensors"
WAYS = {"global": FileRecipe(0.5), "pattern": FileRecipe(pattern="2:4")}


@pytest.fixture(autouse=True)
def many_small_units():
    with small_units():
        yield


def prune(source, target, way="global", **kwargs):
    return pruning.prune(planning.plan(source, WAYS[way]), target, **kwargs)


def stop(*_):
    raise Interrupted("here")


class Made(NamedTuple):
    """What all tests of a recipe begin with.

    Attributes:
        way: the recipe.
        source: the checkpoint.
        wanted: the digest of an undisturbed result.
        stopped: the folder of a run that was stopped when all units were done.
    """

    way: str
    source: Path
    wanted: str
    stopped: Path


@pytest.fixture(scope="module", params=WAYS)
def made(request, tmp_path_factory):
    folder, way = tmp_path_factory.mktemp("made"), request.param
    source = tiny_checkpoints.save_two_files(folder / "source")
    with small_units(), pytest.MonkeyPatch.context() as patch:
        prune(source, folder / "undisturbed", way)
        patch.setattr(Partial, "complete", stop)
        with pytest.raises(Interrupted):
            prune(source, folder / "target", way)
    (stopped,) = folder.glob("target.partial-????????????????")
    assert len(done_lines(stopped)) > 8
    return Made(way, source, tree_digest(folder / "undisturbed", RUN), stopped)


@pytest.fixture
def folder(made, tmp_path):
    """The unfinished folder of ``tmp_path / "target"``."""
    return Path(shutil.copytree(made.stopped, tmp_path / made.stopped.name))


def assert_the_next_run_ends_the_same(made, tmp_path):
    prune(made.source, tmp_path / "target", made.way)
    assert tree_digest(tmp_path / "target", RUN) == made.wanted


def done_lines(folder):
    journals = sorted(folder.glob("distprune/work/done-*"))
    return [line for journal in journals for line in journal.read_text().splitlines()]


def delete(path):
    path.unlink()


def empty(path):
    os.truncate(path, 0)


def cut(path):
    os.truncate(path, path.stat().st_size - 1)


def cut_and_extend(path):
    size = path.stat().st_size
    os.truncate(path, size // 3)
    os.truncate(path, size)


def lengthen(path):
    os.truncate(path, path.stat().st_size + 4096)


def flip_a_bit(path):
    raw = bytearray(path.read_bytes())
    raw[-5] ^= 4
    path.write_bytes(raw)


DAMAGE = (delete, empty, cut, cut_and_extend, lengthen, flip_a_bit)


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", [WEIGHTS, LAST_WEIGHTS, MASKS, "tokenizer.json"])
def test_a_damaged_output_is_written_again(made, folder, tmp_path, name, damage):
    damage(folder / name)
    assert_the_next_run_ends_the_same(made, tmp_path)


@small_units()
def outcome(source, target, way):
    return prune(source, target, way).num_pruned


@pytest.mark.parametrize("name", [WEIGHTS, MASKS])
def test_ranks_find_damage_together(made, folder, tmp_path, name):
    cut_and_extend(folder / name)
    assert len(set(run_ranks(outcome, 3, made.source, tmp_path / "target", made.way))) == 1
    assert tree_digest(tmp_path / "target", RUN) == made.wanted


@pytest.mark.usefixtures("folder")
def test_what_is_whole_is_not_done_again(made, tmp_path):
    """Without this, doing everything again would pass the tests above."""
    with Steps(names=("pwrite",)) as writes:
        assert_the_next_run_ends_the_same(made, tmp_path)
    assert writes.count <= 2  # the lock and the header of the masks


def test_only_damaged_units_are_done_again(made, folder, tmp_path):
    before = len(done_lines(folder))
    flip_a_bit(folder / LAST_WEIGHTS)
    seen = []

    def count(self, *_):
        seen.append(len(done_lines(folder)))
        raise Interrupted("here")

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr(Partial, "complete", count)
        prune(made.source, tmp_path / "target", made.way)
    assert seen == [before + 1]
    assert_the_next_run_ends_the_same(made, tmp_path)


def edit_a_count(folder):
    for journal in sorted(folder.glob("distprune/work/done-*")):
        text = journal.read_text()
        edited = re.sub(
            r'("pruned": {"\d+": )(\d+)', lambda m: f"{m[1]}{int(m[2]) + 1}", text, count=1
        )
        if edited != text:
            journal.write_text(edited)
            return
    raise AssertionError("no count to edit")


def lose_a_line(folder):
    journal = sorted(folder.glob("distprune/work/done-*"))[0]
    journal.write_text("\n".join(journal.read_text().splitlines()[1:]) + "\n")


def lose_a_journal(folder):
    sorted(folder.glob("distprune/work/done-*"))[0].unlink()


def fill_a_journal_with_zeros(folder):
    journal = sorted(folder.glob("distprune/work/done-*"))[0]
    journal.write_bytes(bytes(journal.stat().st_size))


def cut_a_journal(folder):
    cut(sorted(folder.glob("distprune/work/done-*"))[-1])


def edit_the_decision(folder):
    path = folder / "distprune/work/decision.json"
    if path.exists():
        text = path.read_text()
        start = text.index('"threshold": ') + len('"threshold": ')
        path.write_text(text[:start] + "1" + text[start:])


def lose_the_decision(folder):
    (folder / "distprune/work/decision.json").unlink(missing_ok=True)


def forge_a_report(folder):
    (folder / "distprune/report.json").write_text('{"schema": 1, "status": "complete"}')
    (folder / "distprune/run.json").write_text('{"schema": 1}')
    (folder / "distprune/recipe.yaml").write_text("sparsity: 0.9\n")
    cut_and_extend(folder / WEIGHTS)


TAMPERING = (
    edit_a_count,
    lose_a_line,
    lose_a_journal,
    fill_a_journal_with_zeros,
    cut_a_journal,
    edit_the_decision,
    lose_the_decision,
    forge_a_report,
)


@pytest.mark.parametrize("tamper", TAMPERING)
def test_a_tampered_record_is_not_believed(made, folder, tmp_path, tamper):
    tamper(folder)
    assert_the_next_run_ends_the_same(made, tmp_path)


def test_an_edited_report_of_a_complete_folder_is_written_anew(made, folder, tmp_path):
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr(Partial, "publish", stop)
        prune(made.source, tmp_path / "target", made.way)
    path = folder / "distprune/report.json"
    report = json.loads(path.read_text())
    report["num_pruned"] -= 1
    report["tensors"][0]["num_pruned"] -= 1
    path.write_text(json.dumps(report))
    assert_the_next_run_ends_the_same(made, tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["target"]


SCRIPT = """
import sys
sys.path.insert(0, sys.argv[3])
assert not __debug__ or sys.exit(77)
from distprune.files import planning, pruning
from distprune.files.partial import Partial
from distprune.files.recipe import FileRecipe
from helpers.small_work_units import small_units
with small_units():
    pruning.prune(planning.plan(sys.argv[1], FileRecipe(0.5)), sys.argv[2])
"""


@pytest.mark.thorough
@pytest.mark.parametrize("made", ["global"], indirect=True)
def test_python_without_assertions_publishes_nothing_tampered(made, folder, tmp_path):
    edit_a_count(folder)
    forge_a_report(folder)
    tests = Path(__file__).resolve().parents[1]
    environment = {**os.environ, "PYTHONPATH": str(tests.parent), "OMP_NUM_THREADS": "1"}
    arguments = [str(each) for each in (made.source, tmp_path / "target", tests)]
    done = subprocess.run(
        [sys.executable, "-O", "-c", SCRIPT, *arguments], env=environment, timeout=300
    )
    assert done.returncode == 0
    assert tree_digest(tmp_path / "target", RUN) == made.wanted
