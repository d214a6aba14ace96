"""Loading and saving language models that fail: on every rank, with names, and nothing left."""

import json
import os
import shutil
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from distprune.testing import run_ranks
from helpers.comparisons import raised
from helpers.tiny_transformers import save_tiny

transformers = pytest.importorskip("transformers")
safetensors_torch = pytest.importorskip("safetensors.torch")


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return save_tiny("llama", tmp_path_factory.mktemp("llama") / "model")


def changed(source, target, change):
    """A copy of a folder of one file, with other tensors."""
    shutil.copytree(source, target)
    file = target / "model.safetensors"
    tensors = safetensors_torch.load_file(file)
    change(tensors)
    safetensors_torch.save_file(tensors, file, metadata={"format": "pt"})
    return target


def error_of(folders, **options):
    """What loading raises on this rank, from a folder of its own."""
    from distprune import language_models

    return raised(lambda: language_models.load_sharded(folders[dist.get_rank()], **options))


def on_two_ranks(*folders, **options):
    folders = folders if len(folders) == 2 else folders * 2
    return run_ranks(error_of, 2, folders, **options)


def test_missing_tensors_are_named_on_every_rank(llama, tmp_path):
    name = "model.layers.1.mlp.up_proj.weight"
    folder = changed(llama, tmp_path / "less", lambda tensors: tensors.pop(name))
    for text in on_two_ranks(folder, wrap="fsdp2"):
        assert text.startswith("ValueError") and f"lacks ['{name}']" in text


def test_file_that_is_missing_on_one_rank_raises_on_all(llama, tmp_path):
    shutil.copytree(llama, tmp_path / "other")
    os.unlink(tmp_path / "other" / "model.safetensors")
    for text in on_two_ranks(llama, tmp_path / "other", wrap="fsdp2"):
        assert "expected safetensors files" in text


def test_ranks_with_different_checkpoints_are_refused(llama, tmp_path):
    other = changed(llama, tmp_path / "other", lambda t: t.update({"extra": torch.zeros(2)}))
    for text in on_two_ranks(llama, other, wrap="fsdp2"):
        assert "ValueError" in text and "files" in text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"wrap": "zero"}, "wrap='zero', mesh=None on 2 ranks; expected one of none, ddp"),
        ({"wrap": "fsdp2_tp"}, "whose product is the number of ranks"),
        ({"wrap": "fsdp2", "mesh": (3,)}, "number of ranks"),
        ({"wrap": "ddp", "mesh": (2,)}, "whose product is the number of ranks"),
    ],
)
def test_wrap_and_mesh_are_checked(llama, options, words):
    assert words in on_two_ranks(llama, **options)[0]


def test_wraps_need_a_process_group(llama):
    from distprune import language_models

    with pytest.raises(ValueError, match="torchrun"):
        language_models.load_sharded(llama, wrap="fsdp2")


def test_quantised_weights_are_refused(llama, tmp_path):
    shutil.copytree(llama, tmp_path / "quantised")
    path = tmp_path / "quantised" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "quantization_config": {"quant_method": "fp8"}}))
    assert "quantization_config" in on_two_ranks(tmp_path / "quantised", wrap="fsdp2")[1]


def tied_with_head(folder):
    from distprune import language_models

    model = language_models.load_sharded(folder, wrap="fsdp2")
    head, embedding = model.lm_head.weight, model.model.embed_tokens.weight
    return head is embedding, head.full_tensor()


@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_tied_weights_that_are_both_stored_are_tied_if_they_are_equal(tmp_path, factor):
    save_tiny("gemma3", tmp_path / "tied")
    name = "model.embed_tokens.weight"
    folder = changed(
        tmp_path / "tied",
        tmp_path / "both",
        lambda t: t.update({"lm_head.weight": factor * t[name]}),
    )
    expected = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    is_tied = expected.lm_head.weight is expected.model.embed_tokens.weight
    assert is_tied == (factor == 1.0)
    for are_same, head in run_ranks(tied_with_head, 2, folder):
        assert are_same == is_tied and torch.equal(head, expected.lm_head.weight)


def saving_raises(source, target, fails):
    """What saving raises on this rank; if ``fails``, the disk is full after the weights."""
    from distprune import language_models

    model = language_models.load_sharded(source, wrap="fsdp2")
    with pytest.MonkeyPatch.context() as patch:
        if fails:
            error = OSError(28, "No space left on device")
            patch.setattr(os, "fsync", Mock(side_effect=error))
        return raised(lambda: language_models.save_sharded(model, target, source=source))


def test_full_disk_raises_on_all_ranks_and_leaves_nothing(llama, tmp_path):
    for text in run_ranks(saving_raises, 2, llama, tmp_path / "out", True):
        assert "OutputError" in text and "No space left" in text
    assert list(tmp_path.iterdir()) == []


def test_remains_of_a_killed_run_are_replaced_and_finished_folders_are_not(llama, tmp_path):
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "model.safetensors").write_text("half")
    assert run_ranks(saving_raises, 2, llama, tmp_path / "out", False) == ["nothing was raised"] * 2
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    for text in run_ranks(saving_raises, 2, llama, tmp_path / "out", False):
        assert "OutputError" in text and "exists" in text
