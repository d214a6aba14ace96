"""Whatever is not copied is named on stderr each time."""

import pytest
import torch

from helpers.tiny_checkpoints import file_bytes, save

NOT_COPIED = "Not copied: pytorch_model.bin (weights that are not pruned"


@pytest.fixture
def source(tmp_path):
    source = save(tmp_path / "source", {"layers.0.weight": torch.randn(8, 8).bfloat16()})
    (source / "pytorch_model.bin").write_bytes(b"dense")
    (source / "2_Dense").mkdir()
    dense = file_bytes({"linear.weight": torch.randn(4, 8)})
    (source / "2_Dense" / "model.safetensors").write_bytes(dense)
    return source


@pytest.fixture
def commands(run, source, tmp_path):
    assert run("prune", source, tmp_path / "masks", "-s", "0.5", "-q").err == ""
    return [
        ("plan", source, "-s", "0.5"),
        ("prune", source, tmp_path / "pruned", "-s", "0.5"),
        ("apply", tmp_path / "masks", source, tmp_path / "applied"),
    ]


def test_they_are_named_on_stderr(run, commands):
    for command in commands:
        done = run(*command)
        assert done.code == 0
        assert NOT_COPIED in done.err, command
        assert "pytorch_model" not in done.out


def test_json_has_them_and_quiet_leaves_them_to_it(run, commands):
    for command in commands:
        done = run(*command, "--json", "-q")
        assert done.code == 0 and done.err == ""
        assert list(done.json["not_copied"]) == ["pytorch_model.bin"]
        assert set(done.json["copied"]) == {
            "2_Dense/model.safetensors", "config.json", "tokenizer.json"
        }  # fmt: skip
