"""load_sharded and save_sharded: on every wrap the model, and then the folder, of transformers."""

import json
import os
import shutil
from functools import cache
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

import distprune as prune
from distprune import language_models
from distprune.testing import run_ranks
from helpers.comparisons import raised
from helpers.tiny_transformers import save_tiny
from helpers.wrappings import whole

transformers = pytest.importorskip("transformers")

WRAPS = {
    "none": ("none", None, 1),
    "ddp": ("ddp", None, 2),
    "fsdp2": ("fsdp2", None, 2),
    "fsdp2-4": ("fsdp2", None, 4),
    "hsdp-2x2": ("fsdp2", (2, 2), 4),
    "tp": ("tp", None, 2),
    "fsdp2_tp-2x2": ("fsdp2_tp", (2, 2), 4),
}
# Tied and untied, biases, norms of heads, scaled embeddings, merged experts, transposed weights.
FAMILIES = ["qwen2", "qwen3", "gemma3", "mixtral", "gpt2"]
CASES = [("llama", wrap) for wrap in WRAPS]
CASES += [(family, wrap) for family in FAMILIES for wrap in ("none", "fsdp2", "tp")]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Checkpoints of several files, by family; each is made once."""

    @cache
    def folder(family):
        made = tmp_path_factory.mktemp(family) / "model"
        save_tiny(family, made, max_shard_size="10KB")
        (made / "LICENSE").write_text("free")
        return made

    return folder


def logits_of(model):
    tokens = torch.randint(0, 40, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model(input_ids=tokens).logits


def different_from_transformers(folder, wrap, mesh, dtype):
    """Names of the tensors that from_pretrained has otherwise, and the largest error of logits."""
    model = language_models.load_sharded(folder, wrap=wrap, mesh=mesh, dtype=dtype)
    expected = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype or "auto")
    inner = model.module if wrap == "ddp" else model
    assert not model.training and not inner.training
    assert inner.generation_config.to_dict() == expected.generation_config.to_dict()
    assert inner.all_tied_weights_keys == expected.all_tied_weights_keys
    differences = []
    for kind in ("named_parameters", "named_buffers"):
        ours, theirs = (
            dict(getattr(each, kind)(remove_duplicate=False)) for each in (inner, expected)
        )
        assert list(ours) == list(theirs)
        differences += [
            name
            for name, tensor in ours.items()
            if tensor.dtype != theirs[name].dtype or not torch.equal(whole(tensor), theirs[name])
        ]
        assert len({id(t) for t in ours.values()}) == len({id(t) for t in theirs.values()})  # ties
    return differences, float((logits_of(model) - logits_of(expected)).abs().max())


def saved(source, target, wrap, mesh, dtype=None):
    """Load, prune and save on the ranks; the numbers of pruned elements, and the outputs."""
    model = language_models.load_sharded(source, wrap=wrap, mesh=mesh, dtype=dtype)
    report = prune.global_unstructured(prune.select(model), prune.L1Unstructured, amount=0.5)
    folder = language_models.save_sharded(model, target, source=source, max_shard_size="10KB")
    assert folder == target
    return {entry.name: entry.num_pruned for entry in report.parameters}, logits_of(model)


def compared(source, target, wrap, mesh):
    # Tensor parallelism sums products in another order; in float64 that is rounding. But torch
    # multiplies no experts in float64.
    dtype = torch.float64 if "tp" in wrap and "mixtral" not in str(source) else None
    found = different_from_transformers(source, wrap, mesh, dtype)
    return (*found, *saved(source, target, wrap, mesh))


@pytest.mark.parametrize(("family", "wrap"), CASES)
def test_loads_and_saves_as_transformers_does_with_exactly_the_pruned_zeros(
    folders, tmp_path, family, wrap
):
    (kind, mesh, num_ranks), target = WRAPS[wrap], tmp_path / "out"
    source = folders(family)
    if family == "gpt2" and kind == "tp":
        with pytest.raises(AssertionError, match="has no `tp_plan`"):
            run_ranks(compared, num_ranks, source, target, kind, mesh)
        return
    per_rank = run_ranks(compared, num_ranks, source, target, kind, mesh)
    for differences, error, counts, _ in per_rank:
        assert not differences and counts == per_rank[0][2]
        is_rounded = kind == "tp" and family == "mixtral"
        assert error < (1e-4 if is_rounded else 1e-10) if "tp" in kind else error == 0
    loaded, original = (
        transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
        for folder in (target, source)
    )
    theirs, (_, _, counts, logits) = dict(original.named_parameters()), per_rank[0]
    # The seeds have no zeros, so each zero is a pruned element.
    zeros = {name: int((p == 0).sum()) for name, p in loaded.named_parameters()}
    assert {name: zeros[name] for name in counts} == counts and sum(counts.values()) > 0
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, torch.where(parameter != 0, theirs[name], 0)), name
    if "tp" not in kind:
        assert torch.equal(logits_of(loaded.eval()), logits)
    maps = [
        json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
        for folder in (target, source)
    ]
    assert set(maps[0]) == set(maps[1])  # the names that save_pretrained gives
    assert (target / "LICENSE").read_text() == "free"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_dtype_of_the_config_becomes_that_of_the_weights(folders, tmp_path):
    target = tmp_path / "out"
    run_ranks(saved, 2, folders("llama"), target, "fsdp2", None, torch.bfloat16)
    assert json.loads((target / "config.json").read_text())["dtype"] == "bfloat16"
    loaded = transformers.AutoModelForCausalLM.from_pretrained(target, dtype="auto")
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}


# Loading and saving language models that fail: on every rank, with names, and nothing left.


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
    with pytest.raises(ValueError, match="torchrun"):
        language_models.load_sharded(llama, wrap="fsdp2")


def test_quantised_weights_are_refused(llama, tmp_path):
    shutil.copytree(llama, tmp_path / "quantised")
    path = tmp_path / "quantised" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "quantization_config": {"quant_method": "fp8"}}))
    assert "quantization_config" in on_two_ranks(tmp_path / "quantised", wrap="fsdp2")[1]


def tied_with_head(folder):
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
