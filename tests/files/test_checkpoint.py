"""Checkpoint folders: which are accepted, and that all problems are reported at once."""

import json

import pytest
import torch

from distprune.files.checkpoints.checkpoint import open_checkpoint
from distprune.files.errors import CheckpointError
from helpers import tiny_checkpoints
from helpers.tiny_checkpoints import file_bytes

INDEX = "model.safetensors.index.json"
FIRST, SECOND = (f"model-0000{n}-of-00002.safetensors" for n in (1, 2))
ONE = {"a.weight": torch.ones(2, 2), "b.weight": torch.ones(3)}
TWO = {"c.weight": torch.ones(2, 2).half()}


@pytest.fixture
def sharded(tmp_path):
    return tiny_checkpoints.save(tmp_path / "source", ONE, TWO)


def problems(folder):
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(folder)
    return error.value.problems or (error.value.headline,)


def edit_index(folder, **changes):
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"] |= changes
    index["weight_map"] = {k: v for k, v in index["weight_map"].items() if v is not None}
    (folder / INDEX).write_text(json.dumps(index))


def test_sharded_and_single(sharded, tmp_path):
    found = open_checkpoint(sharded)
    assert [t.name for t in found.tensors] == ["a.weight", "b.weight", "c.weight"]
    assert [f.name for f in found.files] == [FIRST, SECOND] and found.index == INDEX
    assert {o.name for o in found.others} == {"config.json", "tokenizer.json", INDEX}
    single = open_checkpoint(tiny_checkpoints.save(tmp_path / "single", ONE))
    assert single.index is None and [f.name for f in single.files] == ["model.safetensors"]
    assert found.num_bytes == sum((sharded / name).stat().st_size for name in (FIRST, SECOND))


def test_a_snapshot_of_links_in_a_folder_without_write_permission(sharded, tmp_path):
    snapshot = tmp_path / "models--tiny" / "snapshots" / "0123"
    blobs = tmp_path / "models--tiny" / "blobs"
    snapshot.mkdir(parents=True)
    sharded.rename(blobs)
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
        path.chmod(0o444)
    blobs.chmod(0o555)
    found = open_checkpoint(snapshot)
    assert found.files[0].path == str((blobs / FIRST).resolve())
    assert len(found.tensors) == 3


def test_all_problems_at_once(sharded):
    edit_index(sharded, **{
        "a.weight": SECOND, "b.weight": None, "d.weight": FIRST,
        "e.weight": "../outside.safetensors", "f.weight": "/etc/passwd", "g.weight": 7,
        "h.weight": "model-00003-of-00002.safetensors",
    })  # fmt: skip
    (sharded / SECOND).write_bytes(file_bytes(TWO)[:-1])
    (sharded / "config.json").write_text('{"quantization_config": {"quant_method": "gptq"}}')
    (sharded / "generation_config.json").symlink_to(sharded / "nowhere")
    text = "\n".join(problems(sharded))
    for expected in (
        "'../outside.safetensors' is not a plain name", "'/etc/passwd' is not a plain name",
        "7 is not a plain name", "model-00003-of-00002.safetensors is missing",
        "not in their file: d.weight", "does not list: b.weight",
        f"{SECOND}: tensor 'c.weight' claims the bytes", "quant_method 'gptq'",
        "generation_config.json is a link to",
    ):  # fmt: skip
        assert expected in text, (expected, text)


def test_a_tensor_in_two_files(sharded):
    (sharded / SECOND).write_bytes(file_bytes(TWO | {"b.weight": torch.ones(3)}))
    assert problems(sharded) == (f"tensor b.weight is in {FIRST} and in {SECOND}.",)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("[]", "no weight_map"),
        ('{"weight_map": {}}', "no weight_map"),
        ('{"weight_map": {"a": "x", "a": "y"}}', "occurs twice"),
        ("{", "not valid JSON"),
    ],
)
def test_broken_indices(sharded, content, text):
    (sharded / INDEX).write_text(content)
    assert any(text in problem for problem in problems(sharded))


def test_folders_that_say_too_little_or_too_much(tmp_path, sharded):
    assert "does not exist" in problems(tmp_path / "none")[0]
    assert "is one of the 2 files" in problems(sharded / FIRST)[0]
    assert "is a file" in problems(sharded / "config.json")[0]
    (sharded / INDEX).unlink()
    assert "has 2 safetensors files" in problems(sharded)[0]
    (sharded / "model.safetensors").write_bytes(file_bytes(ONE))
    found = open_checkpoint(sharded)
    assert [f.name for f in found.files] == ["model.safetensors"]
    assert {name for name, _ in found.skipped} == {FIRST, SECOND}
    (sharded / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(ONE, FIRST)}))
    assert "programs differ" in problems(sharded)[0]
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "holds no safetensors" in problems(empty)[0]
    (empty / "pytorch_model.bin").write_bytes(b"")
    assert "holds pickled weights" in problems(empty)[0]


def test_what_is_copied_and_what_is_not(sharded):
    for name in (
        "pytorch_model.bin",
        "x.gguf",
        "consolidated.00.safetensors",
        "README.md",
        ".hidden",
    ):
        (sharded / name).write_text("x")
    (sharded / ".git").mkdir()
    (sharded / "deep" / "er").mkdir(parents=True)
    (sharded / "deep" / "er" / "vocab.txt").write_text("x")
    found = open_checkpoint(sharded)
    copied = {o.name for o in found.others} - {"config.json", "tokenizer.json", INDEX}
    assert copied == {"README.md", ".hidden", "deep/er/vocab.txt"}
    assert {name for name, _ in found.skipped} == {
        "pytorch_model.bin", "x.gguf", "consolidated.00.safetensors", ".git"
    }  # fmt: skip
