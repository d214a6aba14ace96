"""Weights beside the model's own are copied; only duplicates are left out, and by name."""

import json

import pytest
import torch

from distprune.files.checkpoints.checkpoint import open_checkpoint
from distprune.files.planning import plan
from distprune.files.pruning import prune
from distprune.files.recipe import FileRecipe
from helpers import tiny_checkpoints
from helpers.tiny_checkpoints import file_bytes

WEIGHTS = {
    "layers.0.weight": torch.randn(8, 8).bfloat16(),
    "layers.1.weight": torch.randn(8, 8).bfloat16(),
}
PART_OF_THE_CHECKPOINT = (
    "2_Dense/config.json", "2_Dense/model.safetensors", "3_Dense/pytorch_model.bin",
    "adapter_model.bin", "adapter_config.json", "checkpoint-5/optimizer.pt", "training_args.bin",
    "vocoder.pt", "custom.ckpt", "code/modeling.py", "sentencepiece.bpe.model",
)  # fmt: skip
DUPLICATES = (
    "pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "pytorch_model.bin.index.json",
    "pytorch_model.fp16.bin", "tf_model.h5", "flax_model.msgpack", "rust_model.ot", "x.gguf",
    "onnx/model.onnx", "onnx/model.onnx_data", "onnx/config.json", "decoder.onnx",
    "original/consolidated.00.pth", "original/model.safetensors", "metal/model.bin",
    "consolidated.safetensors", "openvino/openvino_model.bin", "openvino_model.xml",
    "model-00001-of-00009.safetensors",
)  # fmt: skip


def write(folder, name, content=b"opaque"):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


@pytest.fixture
def source(tmp_path):
    return tiny_checkpoints.save(tmp_path / "source", WEIGHTS)


def test_all_is_copied_that_is_not_known_to_be_a_duplicate(source, tmp_path):
    for name in (*PART_OF_THE_CHECKPOINT, *DUPLICATES):
        write(source, name)
    write(source, "adapter_model.safetensors", file_bytes({"lora_A.weight": torch.ones(2, 2)}))
    write(source, "half.safetensors", file_bytes(WEIGHTS))
    report = prune(plan(source, FileRecipe(0.5)), tmp_path / "target")
    copied = {*PART_OF_THE_CHECKPOINT, "adapter_model.safetensors", "config.json", "tokenizer.json"}
    assert set(report.copied) == copied
    for name in copied:
        assert (tmp_path / "target" / name).read_bytes() == (source / name).read_bytes()
    left_out = {*DUPLICATES, "half.safetensors"}
    assert {name for name, _ in report.skipped} == left_out
    found = {str(p.relative_to(tmp_path / "target")) for p in (tmp_path / "target").rglob("*")}
    assert not found & left_out


@pytest.mark.parametrize("name", DUPLICATES)
def test_each_duplicate_alone(source, name):
    write(source, name)
    assert [each for each, _ in open_checkpoint(source).skipped] == [name]


def test_weights_that_are_copied_are_told_from_other_files(source):
    for name in PART_OF_THE_CHECKPOINT:
        write(source, name)
    assert open_checkpoint(source).unpruned_weights == (
        "2_Dense/model.safetensors", "3_Dense/pytorch_model.bin", "adapter_model.bin",
        "custom.ckpt", "vocoder.pt",
    )  # fmt: skip


def test_a_sentence_transformer_keeps_its_modules(source, tmp_path):
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(
            [
                ("", "Transformer"),
                ("1_Pooling", "Pooling"),
                ("2_Dense", "Dense"),
                ("3_Dense", "Dense"),
            ]
        )
    ]
    write(source, "modules.json", json.dumps(modules).encode())
    for module in ("1_Pooling", "2_Dense", "3_Dense"):
        write(source, f"{module}/config.json", b"{}")
    dense = file_bytes({"linear.weight": torch.randn(4, 8)})
    write(source, "2_Dense/model.safetensors", dense)
    torch.save({"linear.weight": torch.randn(4, 8)}, source / "3_Dense" / "pytorch_model.bin")
    prune(plan(source, FileRecipe(0.5)), tmp_path / "target")
    # What sentence-transformers does to load a module: its config, then one of these two files.
    for module in json.loads((tmp_path / "target" / "modules.json").read_text())[1:]:
        folder = tmp_path / "target" / module["path"]
        assert json.loads((folder / "config.json").read_text()) == {}
        if module["type"].endswith("Dense"):
            names = ("model.safetensors", "pytorch_model.bin")
            (name,) = [name for name in names if (folder / name).exists()]
            assert (folder / name).read_bytes() == (source / module["path"] / name).read_bytes()


def test_links_to_folders_are_followed(source, tmp_path):
    write(source, "dense/model.safetensors", b"shared")
    (source / "2_Dense").symlink_to("dense", target_is_directory=True)
    prune(plan(source, FileRecipe(0.5)), tmp_path / "target")
    assert (tmp_path / "target" / "2_Dense" / "model.safetensors").read_bytes() == b"shared"
    assert not (tmp_path / "target" / "2_Dense").is_symlink()
