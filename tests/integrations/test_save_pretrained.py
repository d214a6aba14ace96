"""A model that is still pruned is saved as what ``from_pretrained`` loads, and stays pruned."""

import json

import pytest
import torch
from safetensors.torch import load_file
from test_transformers import SCHEDULE, make_trainer, tiny_llama
from torch import nn
from transformers import LlamaForCausalLM

import distprune as prune
from distprune import checkpoint
from distprune.integrations.transformers import PruningCallback
from distprune.testing import run_ranks
from helpers import wrappings
from helpers.comparisons import assert_nothing_wrong, changes, snapshot

TOKENS = torch.arange(8).view(1, 8)


def problems(path: str, wrapping: str, tied: bool, dtype: torch.dtype) -> list[str]:
    dense = tiny_llama(tied).to(dtype)
    before = {name: p.detach().clone() for name, p in dense.named_parameters()}
    model = wrappings.wrap(dense, wrapping)
    pairs = prune.select(model, names=["weight"], everything=True)
    prune.global_unstructured(pairs, prune.L1Unstructured, amount=0.6)
    state = snapshot(model) if dtype is torch.float32 else {}
    wrong = []
    for arguments, kind in [({"state_dict": {}}, TypeError), ({"max_shard_size": "x"}, Exception)]:
        try:
            checkpoint.save_pretrained(model, path, **arguments)
            wrong.append(f"{arguments}: nothing was raised")
        except kind:
            pass
    checkpoint.save_pretrained(model, path, max_shard_size="1GB")
    after = snapshot(model) if state else {}
    # FSDP1 sets itself up in the first state dict.
    wrong += [each for each in changes(state, after) if "attributes" not in each]
    with torch.no_grad():
        logits = model(TOKENS).logits
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    saved = load_file(f"{path}/model.safetensors")
    wrong += [key for key in saved if key.endswith(("_orig", "_mask"))]
    wrong += ["both names were written"] * (tied and "lm_head.weight" in saved)
    loaded, info = LlamaForCausalLM.from_pretrained(path, output_loading_info=True, dtype="auto")
    wrong += [f"{k}: {v}" for k, v in info.items() if v]
    wrong += [f"dtype {loaded.dtype}"] * (loaded.dtype != dtype)
    for name, value in loaded.named_parameters():
        kept = value != 0
        if not torch.equal(value[kept], before[name][kept]):
            wrong.append(f"{name}: other values")
    zeros = sum(int((p == 0).sum()) for p in loaded.parameters())
    total = sum(p.numel() for name, p in loaded.named_parameters() if "norm" not in name)
    wrong += [f"{zeros} of {total} are zero"] * (zeros != round(0.6 * total))
    tolerance = 1e-5 if dtype is torch.float32 else 1e-2
    if not torch.allclose(loaded(TOKENS).logits, logits, atol=tolerance):
        wrong.append("other outputs")
    return wrong


@pytest.mark.parametrize(
    ("wrapping", "tied", "dtype"),
    [
        ("plain-2", False, torch.float32), ("ddp-2", True, torch.float32),
        ("fsdp2_root-2", False, torch.float32), ("fsdp2_root-2", True, torch.bfloat16),
        ("fsdp1_root-2", True, torch.float32), ("fsdp1_root-2", False, torch.float32),
    ],
)  # fmt: skip
def test_from_pretrained(tmp_path, wrapping, tied, dtype):
    assert_nothing_wrong(run_ranks(problems, 2, str(tmp_path), wrapping, tied, dtype))


def test_without_a_process_group(tmp_path):
    assert problems(str(tmp_path / "saved"), "plain-1", True, torch.float32) == []
    model = tiny_llama()
    model.config.distributed_config = config = object()
    checkpoint.save_pretrained(model, tmp_path)
    assert model.config.distributed_config is config
    assert "distributed_config" not in json.loads((tmp_path / "config.json").read_text())
    with pytest.raises(TypeError, match="a Linear, which has no save_pretrained"):
        checkpoint.save_pretrained(nn.Linear(2, 2), tmp_path)
    tied = tiny_llama(tied=True)
    prune.l1_unstructured(tied.lm_head, "weight", 0.5)
    with pytest.raises(ValueError, match=r"embed_tokens\.weight is tied to lm_head\.weight"):
        checkpoint.save_pretrained(tied, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_the_trainer_tells(tmp_path, caplog):
    trainer = make_trainer(tmp_path, [PruningCallback(SCHEDULE, permanent=False)])
    trainer.train()
    assert "checkpoint.save_pretrained" in caplog.text
    checkpoint.save_pretrained(trainer.model, tmp_path / "model")
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "model")
    assert torch.equal(loaded(TOKENS).logits, trainer.model(TOKENS).logits)
