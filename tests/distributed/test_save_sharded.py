"""language_models.save_sharded: a folder that plain transformers loads, with the masks' zeros."""

import json
from functools import cache

import pytest
import torch
from test_load_sharded import WRAPS

import distprune as prune
from distprune.testing import run_ranks
from helpers.tiny_transformers import save_tiny

transformers = pytest.importorskip("transformers")

FAMILIES = ["llama", "qwen3", "gemma3", "mixtral"]
CASES = [("llama", wrap) for wrap in WRAPS if wrap != "fsdp2-4"]
CASES += [(family, wrap) for family in FAMILIES[1:] for wrap in ("fsdp2", "tp")]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    @cache
    def folder(family):
        made = save_tiny(family, tmp_path_factory.mktemp(family) / "model")
        (made / "LICENSE").write_text("free")
        return made

    return folder


def saved(source, target, wrap, mesh, amount, dtype=None):
    """Load, prune and save on the ranks; the numbers of pruned elements, and the outputs."""
    from distprune import language_models

    model = language_models.load_sharded(source, wrap=wrap, mesh=mesh, dtype=dtype)
    expected = {}
    if amount:
        report = prune.global_unstructured(
            prune.select(model), pruning_method=prune.L1Unstructured, amount=amount
        )
        expected = {entry.name: entry.num_pruned for entry in report.parameters}
    folder = language_models.save_sharded(model, target, source=source, max_shard_size="10KB")
    assert folder == target
    tokens = torch.randint(0, 40, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = model(input_ids=tokens).logits
    return expected, logits


@pytest.mark.parametrize(("family", "wrap"), CASES)
def test_loads_in_transformers_with_exactly_the_pruned_zeros(folders, tmp_path, family, wrap):
    kind, mesh, num_ranks = WRAPS[wrap]
    target = tmp_path / "out"
    results = run_ranks(saved, num_ranks, folders(family), target, kind, mesh, 0.5)
    expected, logits = results[0]
    assert all(result[0] == expected for result in results)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(target, dtype="auto")
    original = transformers.AutoModelForCausalLM.from_pretrained(folders(family), dtype="auto")
    theirs = dict(original.named_parameters())
    # The seeds have no zeros, so each zero is a pruned element.
    zeros = {n: int((p == 0).sum()) for n, p in loaded.named_parameters()}
    assert {n: zeros[n] for n in expected} == expected and sum(expected.values()) > 0
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, torch.where(parameter != 0, theirs[name], 0)), name
    if "tp" not in kind:
        tokens = torch.randint(0, 40, (2, 9), generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            assert torch.equal(loaded.eval()(input_ids=tokens).logits, logits)
    assert (target / "LICENSE").read_text() == "free"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("family", FAMILIES)
def test_names_and_bytes_are_those_of_save_pretrained(folders, tmp_path, family):
    from safetensors import safe_open

    run_ranks(saved, 2, folders(family), tmp_path / "ours", "fsdp2", None, 0)
    model = transformers.AutoModelForCausalLM.from_pretrained(folders(family), dtype="auto")
    model.save_pretrained(tmp_path / "theirs")
    index = json.loads((tmp_path / "ours" / "model.safetensors.index.json").read_text())
    with safe_open(tmp_path / "theirs" / "model.safetensors", "pt") as theirs:
        assert set(index["weight_map"]) == set(theirs.keys())
        for name, file in index["weight_map"].items():
            with safe_open(tmp_path / "ours" / file, "pt") as ours:
                assert torch.equal(ours.get_tensor(name), theirs.get_tensor(name)), name


def test_dtype_of_the_config_becomes_that_of_the_weights(folders, tmp_path):
    target = tmp_path / "out"
    run_ranks(saved, 2, folders("llama"), target, "fsdp2", None, 0.5, torch.bfloat16)
    config = json.loads((target / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    loaded = transformers.AutoModelForCausalLM.from_pretrained(target, dtype="auto")
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
