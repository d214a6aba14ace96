"""Which folders, files, names and links are checkpoints, what is copied of them, and to whom."""

import json
import os

import huggingface_hub.constants
import pytest
import torch

from distprune.files.checkpoint import open_checkpoint
from distprune.files.errors import CheckpointError
from distprune.files.planning import plan
from distprune.files.pruning import apply, prune
from helpers import tiny_checkpoints
from helpers.recipes import raw_recipe
from helpers.tiny_checkpoints import file_bytes

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
FIRST, SECOND = (f"model-0000{n}-of-00002.safetensors" for n in (1, 2))
ONE = {"a.weight": torch.ones(2, 2), "b.weight": torch.ones(3)}
TWO = {"c.weight": torch.ones(2, 2).half()}


@pytest.fixture
def sharded(tmp_path):
    return tiny_checkpoints.save(tmp_path / "source", ONE, TWO)


@pytest.fixture
def single(tmp_path):
    return tiny_checkpoints.save(tmp_path / "single", ONE)


def refused(source):
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(source)
    assert "\n" not in str(error.value)
    return str(error.value)


def edit_index(folder, **changes):
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"] |= changes
    index["weight_map"] = {k: v for k, v in index["weight_map"].items() if v is not None}
    (folder / INDEX).write_text(json.dumps(index))


def test_sharded_and_single(sharded, single):
    found = open_checkpoint(sharded)
    assert [t.name for t in found.tensors] == ["a.weight", "b.weight", "c.weight"]
    assert [f.name for f in found.files] == [FIRST, SECOND]
    assert {o.name for o in found.others} == {"config.json", "tokenizer.json", INDEX}
    assert found == open_checkpoint(sharded / INDEX)
    assert found.num_bytes == sum((sharded / name).stat().st_size for name in (FIRST, SECOND))
    found = open_checkpoint(single)
    assert [f.name for f in found.files] == [SINGLE]
    assert found.files == open_checkpoint(single / SINGLE).files


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


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"e.weight": "../outside.safetensors"}, "lists '../outside.safetensors'"),
        ({"e.weight": "/etc/passwd"}, "lists '/etc/passwd'"),
        ({"e.weight": 7}, "lists 7"),
        ({"e.weight": "model-3.safetensors"}, "model-3.safetensors cannot be read: No such file"),
        ({"a.weight": SECOND}, f"tensor a.weight is in {FIRST}; expected {SECOND}"),
        ({"b.weight": None}, f"tensor b.weight is in {FIRST}; expected no such tensor"),
        ({"d.weight": FIRST}, f"tensor d.weight is in no file; expected {FIRST}"),
    ],
)
def test_an_index_that_does_not_fit(sharded, changes, text):
    edit_index(sharded, **changes)
    assert text in refused(sharded)


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        (INDEX, b"[]", "not a JSON object"),
        (INDEX, b'{"weight_map": {}}', "no weight_map"),
        (INDEX, b"{", "not valid JSON"),
        (SECOND, file_bytes(TWO)[:-1], f"{SECOND} has "),
        (SECOND, file_bytes(TWO | ONE), f"tensor a.weight is in {FIRST} and in {SECOND}"),
        ("config.json", b"[]", "not a JSON object"),
        ("config.json", b'{"quantization_config": {"quant_method": "gptq"}}', "'gptq'"),
        (SINGLE, file_bytes(ONE), "programs differ"),
    ],
)
def test_a_folder_that_does_not_fit_together(sharded, name, content, text):
    (sharded / name).write_bytes(content)
    assert text in refused(sharded)


def test_what_is_no_checkpoint(tmp_path, sharded, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    assert "neither as a path nor as a model" in refused(tmp_path / "none")
    assert "is not a safetensors file" in refused(sharded / "config.json")
    (sharded / INDEX).unlink()
    assert "or several with an index" in refused(sharded)
    assert [f.name for f in open_checkpoint(sharded / FIRST).files] == [FIRST]
    (tmp_path / "empty").mkdir()
    assert "it has no files." in refused(tmp_path / "empty")
    (tmp_path / "empty" / "pytorch_model.bin").write_bytes(b"")
    assert "it has pytorch_model.bin." in refused(tmp_path / "empty")


def test_a_file_without_a_config_is_the_whole_checkpoint(tmp_path):
    (tmp_path / "diary.txt").write_text("private")
    for name in ("other.safetensors", "lora.safetensors"):
        (tmp_path / name).write_bytes(file_bytes(ONE))
    made = plan(tmp_path / "lora.safetensors", raw_recipe(0.5, masks=False))
    assert "is the whole checkpoint" in made.checkpoint.note
    prune(made, tmp_path / "target")  # beside it, but not inside of what it is
    folder = tmp_path / "target"
    assert {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} == {
        "lora.safetensors", "README.md", "distprune/recipe.yaml", "distprune/report.json",
    }  # fmt: skip


COPIED = (
    "2_Dense/config.json", "adapter_config.json", "code/modeling.py", "sentencepiece.bpe.model",
    "vocab.bin", ".hidden", "adapter_model.safetensors", "2_Dense/model.safetensors",
    "3_Dense/pytorch_model.bin",
)  # fmt: skip
LEFT_OUT = (
    "pytorch_model.bin", "pytorch_model.bin.index.json", "tf_model.h5", "flax_model.msgpack",
    "rust_model.ot", "x.gguf", "onnx/model.onnx", "onnx/model.onnx_data", "decoder.onnx",
    "original/consolidated.00.pth", "consolidated.safetensors", "openvino_model.xml",
    "checkpoint-500/model.safetensors", "training_args.bin", "half.safetensors",
)  # fmt: skip


def test_what_is_copied(single, tmp_path):
    for name in (*COPIED, *LEFT_OUT, ".git/config", "distprune/report.json"):
        (single / name).parent.mkdir(exist_ok=True)
        (single / name).write_text(name)
    os.mkfifo(single / "pipe")
    report = prune(plan(single, raw_recipe(0.5)), tmp_path / "target")
    assert set(report.copied) == {*COPIED, "config.json", "tokenizer.json"}
    assert {name for name, _ in report.skipped} == {*LEFT_OUT, ".git", "distprune", "pipe"}
    for name in COPIED:
        assert (tmp_path / "target" / name).read_text() == name
    assert not any((tmp_path / "target" / name).exists() for name in LEFT_OUT)


# The hub's cache


def test_a_name_is_what_huggingface_hub_has_of_its_main_branch(single, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    model = tmp_path / "hub" / "models--org--na.me-1"
    for name in ("refs", "snapshots"):
        (model / name).mkdir(parents=True)
    single.rename(model / "blobs")
    for commit in ("a1", "b2"):
        (model / "snapshots" / commit).mkdir()
        for path in (model / "blobs").iterdir():
            (model / "snapshots" / commit / path.name).symlink_to(f"../../blobs/{path.name}")
    (model / "refs" / "main").write_text("a1")
    found = open_checkpoint("org/na.me-1")
    assert found.folder == str(model / "snapshots" / "a1")
    assert found.note == f"org/na.me-1 is {found.folder}."
    prune(plan("org/na.me-1", raw_recipe(0.5)), tmp_path / "target")
    assert not any(path.is_symlink() for path in (tmp_path / "target").rglob("*"))
    # A path comes before a name.
    tiny_checkpoints.save(tmp_path / "org" / "na.me-1", {"other.weight": torch.ones(8, 8)})
    assert [entry.name for entry in open_checkpoint("org/na.me-1").tensors] == ["other.weight"]


WEIGHTS = {"layers.0.weight": torch.randn(8, 8).bfloat16()}


@pytest.fixture
def private_source(tmp_path):
    return tiny_checkpoints.save(tmp_path / "private_source", WEIGHTS)


@pytest.fixture
def umask():
    before = os.umask(0o022)
    yield
    os.umask(before)


def modes(folder):
    found = {str(p.relative_to(folder)): p.stat().st_mode & 0o7777 for p in folder.rglob("*")}
    return found | {"": folder.stat().st_mode & 0o7777}


@pytest.mark.parametrize("how", ["prune", "apply"])
def test_copies_take_the_permissions_of_the_source(private_source, tmp_path, umask, how):
    (private_source / "code").mkdir(mode=0o700)
    (private_source / "code" / "run.sh").write_text("#!/bin/sh\n")
    (private_source / "code" / "run.sh").chmod(0o4777)
    (private_source / "config.json").chmod(0o600)
    (private_source / "model.safetensors").chmod(0o640)
    (private_source / "tokenizer.json").chmod(0o444)
    private_source.chmod(0o750)
    target = tmp_path / "target"
    if how == "prune":
        prune(plan(private_source, raw_recipe(0.5)), target)
    else:
        prune(plan(private_source, raw_recipe(0.5)), tmp_path / "masks")
        apply(tmp_path / "masks", open_checkpoint(private_source), target)
    found = modes(target)
    assert {name: found[name] for name in modes(private_source)} == {
        "": 0o755, "code": 0o755, "code/run.sh": 0o755, "config.json": 0o600,
        "model.safetensors": 0o640, "tokenizer.json": 0o644,
    }  # fmt: skip
    assert found["distprune/masks.safetensors"] == 0o640


@pytest.mark.parametrize("goal", ["self", "..", "nowhere"])
def test_a_link_that_leads_nowhere_or_round(private_source, goal):
    (private_source / "self").symlink_to(goal)
    with pytest.raises(CheckpointError, match="self cannot be read: "):
        open_checkpoint(private_source)
