"""Which folders, files, names and links are checkpoints, what is copied of them, and to whom."""

import json
import os
import shutil

import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import save as safetensors_save

from distprune.files.checkpoint import open_checkpoint, read_header
from distprune.files.errors import CheckpointError
from distprune.files.mask_files import MASK_FILE, open_masks
from distprune.files.planning import plan
from distprune.files.pruning import apply, prune
from helpers import tiny_checkpoints
from helpers.architecture_checkpoints import in_the_cache
from helpers.recipes import raw_recipe
from helpers.tiny_checkpoints import encode, file_bytes, save

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


def test_a_snapshot_of_links_in_a_folder_without_write_permission(sharded):
    snapshot = in_the_cache(sharded)
    blobs = snapshot.parents[1] / "blobs"
    for path in blobs.iterdir():
        path.chmod(0o444)
    blobs.chmod(0o555)
    found = open_checkpoint(snapshot)
    assert found.files[0].path == str((snapshot / FIRST).resolve())
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
    made = plan(tmp_path / "lora.safetensors", raw_recipe(0.5))
    assert "is the whole checkpoint" in made.checkpoint.note
    prune(made, tmp_path / "target")  # beside it, but not inside of what it is
    folder = tmp_path / "target"
    assert {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} == {
        "lora.safetensors", "README.md", "distprune/recipe.yaml", "distprune/report.json",
        "distprune/masks.safetensors",
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
    (tmp_path / "hub").mkdir()
    snapshot = in_the_cache(single.rename(tmp_path / "hub" / "na.me-1"))
    shutil.copytree(snapshot, snapshot.with_name("another"), symlinks=True)
    found = open_checkpoint("org/na.me-1")
    assert found.folder == str(snapshot)
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


# Headers, and metadata of masks, are read or refused by name.


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def read(tmp_path, raw):
    path = tmp_path / "model.safetensors"
    path.write_bytes(raw)
    return read_header(path)


def test_reads_what_safetensors_writes(tmp_path):
    tensors = {
        "b": torch.ones(2, 3, dtype=torch.bfloat16),
        "a": torch.zeros(()),
        "e": torch.ones(0),
    }
    raw = safetensors_save(tensors, metadata={"format": "pt"})
    found = read(tmp_path, raw)
    assert found.metadata == {"format": "pt"}
    assert {t.name: (t.dtype, t.shape) for t in found.tensors} == {
        "a": ("F32", ()), "b": ("BF16", (2, 3)), "e": ("F32", (0,)),
    }  # fmt: skip
    assert found.size == len(raw) and found.tensors[-1].stop == len(raw)
    b = next(t for t in found.tensors if t.name == "b")
    assert raw[b.start : b.stop] == b"\x80\x3f" * 6 and b.numel == 6


def test_odd_header_length_and_unknown_dtypes_are_read(tmp_path):
    header = {"x": {"dtype": "F3_NEW", "shape": [5], "data_offsets": [0, 3]}}
    raw = encode(header, b"abc", padding=1)
    found = read(tmp_path, raw)
    assert (found.tensors[0].dtype, found.tensors[0].nbytes) == ("F3_NEW", 3)
    assert found.tensors[0].start == len(raw) - 3


BROKEN = {
    "empty": (b"", "truncated, or not a safetensors file: it has 0 bytes"),
    "short": (b"abc", "it has 3 bytes"),
    "huge": ((2**63).to_bytes(8, "little") + b"{}", "should have 9223372036854775808"),
    "cut header": (file_bytes({"x": torch.ones(4)})[:30], "truncated"),
    "cut data": (file_bytes({"x": torch.ones(4)})[:-1], "truncated"),
    "more data": (file_bytes({"x": torch.ones(4)}) + b"x", "where its tensors end"),
    "array": (encode(b"[]"), "malformed"),
    "no JSON": (encode(b"{'x': 1}"), "not valid JSON"),
    "latin": (encode(b'{"\xe9": 1}'), "not valid JSON"),
    "deep": (encode(b'{"x":' + b"[" * 200_000 + b"]" * 200_000 + b"}"), "not valid JSON"),
    "overlap": (encode({"x": ENTRY, "y": ENTRY | {"data_offsets": [4, 12]}}, bytes(12)), "'y' is"),
    "hole": (encode({"x": ENTRY | {"data_offsets": [4, 12]}}, bytes(12)), "tensor 'x' is F32"),
    "wrong shape": (encode({"x": ENTRY | {"shape": [3]}}, bytes(8)), "that it needs"),
    "overflow": (encode({"x": ENTRY | {"shape": [2**62, 2**62]}}, bytes(8)), "that it needs"),
    "beyond": (
        encode({"x": ENTRY | {"dtype": "X", "data_offsets": [0, 9]}}, bytes(8)),
        "truncated",
    ),
    "backwards": (encode({"x": ENTRY | {"data_offsets": [8, 0]}}, bytes(8)), "'x' is F32"),
    "negative": (encode({"x": ENTRY | {"data_offsets": [0, -88]}}, bytes(8)), "has the sizes"),
    "float": (encode({"x": ENTRY | {"shape": [2.0]}}, bytes(8)), "has the sizes"),
    "bool": (encode({"x": ENTRY | {"shape": [True]}}, bytes(8)), "has the sizes"),
    "no shape": (encode({"x": {"dtype": "F32"}}, bytes(8)), "malformed: 'shape'"),
    "metadata": (encode({"__metadata__": [1], "x": ENTRY}, bytes(8)), "malformed"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_files_are_refused_by_name(tmp_path, case):
    raw, text = BROKEN[case]
    with pytest.raises(CheckpointError, match=r"model\.safetensors") as error:
        read(tmp_path, raw)
    assert text in str(error.value)


def test_folders_and_missing_files_are_refused(tmp_path):
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(CheckpointError, match="cannot be read"):
            read_header(path)


BAD = [None, -1, "x", [[]], [-4, -4, 3], ["4", 4], [[4], 4], {"a": "x"}, 2**70]


@pytest.fixture(scope="module")
def pruned(tmp_path_factory):
    folder = tmp_path_factory.mktemp("masks")
    source = save(folder / "source", {"a.weight": torch.randn(4, 4)})
    prune(plan(source, raw_recipe(0.5)), folder / "pruned")
    return folder / "pruned"


@pytest.mark.parametrize("bad", BAD)
def test_bad_metadata(pruned, tmp_path, bad):
    raw = (pruned / MASK_FILE).read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    path = tmp_path / MASK_FILE
    path.parent.mkdir()
    texts = [json.dumps({"a.weight": bad}), json.dumps({"b.weight": [4, 4]}), "{", "[" * 99999]
    for text in [json.dumps(bad), *texts]:
        header["__metadata__"]["shapes"] = text
        path.write_bytes(encode(header, raw[8 + length :]))
        with pytest.raises(CheckpointError, match="malformed"):
            open_masks(tmp_path)
