"""Every change of a result's files is found by verify; a healthy one passes wherever it lies."""

import os
import shutil
import subprocess

import pytest

from distprune.files.checkpoints.header import read_header
from distprune.files.checkpoints.mask_files import MASK_FILE
from distprune.files.reports.report import RUN_FILE
from distprune.files.verifying import verify


def names(folder):
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def test_any_change_of_any_file(found, made):
    for name in names(made[1]):
        raw = (made[1] / name).read_bytes()
        edits = [raw + b"\0", raw + raw, raw[:-1], raw[: len(raw) // 2], b""]
        for place in (0, 5, len(raw) // 2, len(raw) - 1):
            if name != RUN_FILE:
                edits.append(raw[:place] + bytes([raw[place] ^ 0x10]) + raw[place + 1 :])
        for edit in edits:
            problems = found(lambda target, n=name, raw=edit: (target / n).write_bytes(raw))
            assert problems, (name, len(edit))
            assert any(named(name, made, problem) for problem in problems), (name, problems)


def named(name, made, problem):
    """Whether a problem says which file, or which tensor of it."""
    if name.endswith(".safetensors") and not name.startswith("distprune"):
        tensors = read_header(made[0] / name).tensors
        return name in problem or any(tensor.name in problem for tensor in tensors)
    return name in problem or (name == MASK_FILE and "mask" in problem)


def test_a_file_that_is_gone_or_something_else(found, made):
    def replace(target, name, make):
        (target / name).unlink()
        make(target / name)

    for name in names(made[1]):
        for make in (
            lambda path: None,
            lambda path: path.mkdir(),
            os.mkfifo,
            lambda path: path.symlink_to(path),
            lambda path: path.symlink_to("/nowhere"),
        ):
            problems = found(lambda target, n=name, make=make: replace(target, n, make))
            assert problems and any(name in problem for problem in problems), name


@pytest.mark.parametrize(
    "name", ["more.py", ".hidden", "distprune/more.json", "nested/a.py", "new/a.py", "a\x1b[2J\n"]
)
def test_a_file_that_only_the_result_has(found, name):
    def add(target):
        (target / name).parent.mkdir(exist_ok=True)
        (target / name).write_text("import os\n")

    (problem,) = found(add)
    assert problem.startswith(name.partition("/a.py")[0] if name.startswith("new") else "") and (
        "that prune did not write" in problem and problem.isprintable()
    )


def test_a_folder_or_a_link_that_only_the_result_has(found):
    for add in (
        lambda target: (target / "empty").mkdir(),
        lambda target: (target / "distprune" / "work").mkdir(),
        lambda target: (target / "dangling").symlink_to("/nowhere"),
        lambda target: (target / "loop").symlink_to(target / "loop"),
        lambda target: (target / "up").symlink_to(target),
    ):
        (problem,) = found(add)
        assert "that prune did not write" in problem


def test_a_healthy_result_passes_wherever_it_and_its_source_lie(made, tmp_path):
    source, target = made
    subprocess.run(["cp", "-r", source, tmp_path / "copy"], check=True)
    subprocess.run(["cp", "-a", source, tmp_path / "exact copy"], check=True)
    subprocess.run(["cp", "-r", target, tmp_path / "result"], check=True)
    subprocess.run(["cp", "-a", target, tmp_path / "exact result"], check=True)
    assert read_times(tmp_path / "copy") != read_times(source)
    assert read_times(tmp_path / "exact copy") == read_times(source)
    # As the cache of a hub has them: links to files, and the folder itself behind a link.
    for folder in ("copy", "result"):
        linked = tmp_path / f"linked {folder}"
        for path in [p for p in (tmp_path / folder).rglob("*") if p.is_file()]:
            blob = tmp_path / "blobs" / f"{folder}-{path.name}"
            blob.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, blob)
            link = linked / path.relative_to(tmp_path / folder)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(blob)
        (tmp_path / f"way to {folder}").symlink_to(linked)
    for one in (source, "copy", "exact copy", "linked copy", "way to copy"):
        for other in (target, "result", "exact result", "linked result", "way to result"):
            assert verify(tmp_path / other, tmp_path / one).problems == (), (one, other)


def read_times(folder):
    return [path.stat().st_mtime_ns for path in sorted(folder.glob("*.safetensors"))]
