"""A model that is still pruned is saved as what ``from_pretrained`` loads, and stays pruned."""

import json
import logging

import pytest
import torch
from safetensors.torch import load_file
from test_transformers import SCHEDULE, make_trainer, tiny_llama
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaForCausalLM

import distprune as prune
from distprune import checkpoint
from distprune.integrations.transformers import PruningCallback
from distprune.testing import run_ranks
from helpers.comparisons import assert_nothing_wrong, changes, snapshot

TOKENS = torch.arange(8).view(1, 8)


def wrapped(model: nn.Module, wrapping: str) -> nn.Module:
    match wrapping:
        case "ddp":
            return DistributedDataParallel(model)
        case "fsdp2":
            mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
            for layer in model.model.layers:
                fully_shard(layer, mesh=mesh)
            return fully_shard(model, mesh=mesh)
        case "fsdp1":
            return FullyShardedDataParallel(
                model, use_orig_params=True, device_id=torch.device("cpu")
            )
    return model


def problems(path: str, wrapping: str, tied: bool, dtype: str) -> list[str]:
    dense = tiny_llama(tied).to(getattr(torch, dtype))
    before = {name: p.detach().clone() for name, p in dense.named_parameters()}
    model = wrapped(dense, wrapping)
    pairs = prune.select(model, names=["weight"], everything=True)
    prune.global_unstructured(pairs, prune.L1Unstructured, amount=0.6)
    state = snapshot(model) if dtype == "float32" else {}
    checkpoint.save_pretrained(model, path, max_shard_size="1GB")
    after = snapshot(model) if state else {}
    # FSDP1 sets itself up in the first state dict.
    wrong = [each for each in changes(state, after) if "attributes" not in each]
    with torch.no_grad():
        logits = model(TOKENS).logits
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    saved = load_file(f"{path}/model.safetensors")
    wrong += [key for key in saved if key.endswith(("_orig", "_mask"))]
    wrong += ["both names were written"] * (tied and "lm_head.weight" in saved)
    loaded, info = LlamaForCausalLM.from_pretrained(path, output_loading_info=True, dtype="auto")
    wrong += [f"{k}: {v}" for k, v in info.items() if v]
    wrong += [f"dtype {loaded.dtype}"] * (loaded.dtype != getattr(torch, dtype))
    for name, value in loaded.named_parameters():
        kept = value != 0
        if not torch.equal(value[kept], before[name][kept]):
            wrong.append(f"{name}: other values")
    zeros = sum(int((p == 0).sum()) for p in loaded.parameters())
    total = sum(p.numel() for name, p in loaded.named_parameters() if "norm" not in name)
    if zeros != round(0.6 * total):
        wrong.append(f"{zeros} of {total} are zero")
    if not torch.allclose(loaded(TOKENS).logits, logits, atol=1e-2 if dtype != "float32" else 1e-5):
        wrong.append("other outputs")
    return wrong


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("wrapping", "size"), [("plain", 1), ("plain", 2), ("ddp", 2), ("fsdp2", 2), ("fsdp1", 2)]
)
def test_from_pretrained(tmp_path, wrapping, size, tied):
    assert_nothing_wrong(run_ranks(problems, size, str(tmp_path), wrapping, tied, "float32"))


def test_dtype_is_kept(tmp_path):
    assert_nothing_wrong(run_ranks(problems, 2, str(tmp_path), "fsdp2", True, "bfloat16"))


def test_without_a_process_group(tmp_path):
    assert problems(str(tmp_path), "plain", True, "float32") == []


def test_the_config_is_left_alone(tmp_path):
    model = tiny_llama()
    model.config.distributed_config = config = object()
    checkpoint.save_pretrained(model, tmp_path)
    assert model.config.distributed_config is config
    assert "distributed_config" not in json.loads((tmp_path / "config.json").read_text())


def failing(path: str) -> list[str]:
    model = wrapped(tiny_llama(), "fsdp2")
    prune.global_unstructured(
        prune.select(model, everything=True), prune.L1Unstructured, amount=0.6
    )
    wrong = []
    for arguments, kind in [({"state_dict": {}}, TypeError), ({"max_shard_size": "x"}, Exception)]:
        try:
            checkpoint.save_pretrained(model, path, **arguments)
            wrong.append(f"{arguments}: nothing was raised")
        except kind:
            pass
    try:
        checkpoint.save_pretrained(nn.Linear(2, 2), path)
        wrong.append("nothing was raised")
    except TypeError as error:
        wrong += [] if "save_pretrained" in str(error) else [str(error)]
    return wrong


def test_all_ranks_raise(tmp_path):
    assert_nothing_wrong(run_ranks(failing, 2, str(tmp_path)))


def test_ties_that_are_pruned_differently(tmp_path):
    model = tiny_llama(tied=True)
    prune.l1_unstructured(model.lm_head, "weight", 0.5)
    with pytest.raises(ValueError, match=r"embed_tokens\.weight is tied to lm_head\.weight"):
        checkpoint.save_pretrained(model, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_the_trainer_tells(tmp_path, caplog):
    callback = PruningCallback(SCHEDULE, permanent=False)
    trainer = make_trainer(tmp_path, [callback])
    with caplog.at_level(logging.WARNING, "distprune.integrations.transformers"):
        trainer.train()
    assert "checkpoint.save_pretrained" in caplog.text
    checkpoint.save_pretrained(trainer.model, tmp_path / "model")
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "model")
    assert torch.equal(loaded(TOKENS).logits, trainer.model(TOKENS).logits)
