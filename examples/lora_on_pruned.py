"""Recover a pruned Llama by LoRA (PEFT) with its zeros held, and merge: the zeros are the same.

python examples/lora_on_pruned.py                   one process
launch/torchrun.sh examples/lora_on_pruned.py       2 processes, FSDP2
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import distprune as prune
from distprune.integrations.peft import hold_zeros, merge_and_unload

OUTPUT = sys.argv[1] if len(sys.argv) > 1 else "runs/lora_on_pruned"
STEPS, BATCH = 100, 32
RANK, WORLD_SIZE = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
# Bytes of Python's own sources, in windows of 64.
WINDOWS = torch.tensor(list(Path(os.__file__).read_bytes())).unfold(0, 64, 16)
TRAIN, HELD_OUT = WINDOWS[:-64], WINDOWS[-64:]


def train(model: torch.nn.Module, learning_rate: float) -> None:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=learning_rate)
    for step in range(STEPS):
        picks = torch.randint(len(TRAIN), (BATCH,), generator=torch.Generator().manual_seed(step))
        batch = TRAIN[picks.chunk(WORLD_SIZE)[RANK]]
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@torch.no_grad()
def loss_of(model: torch.nn.Module) -> float:
    return model(input_ids=HELD_OUT, labels=HELD_OUT).loss.item()


def make_pruned() -> None:
    """Train a small model, prune 80 % of its projections, and save it with plain zeros."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    if WORLD_SIZE > 1:
        model = torch.nn.parallel.DistributedDataParallel(model)
    train(model, 3e-3)
    projections = prune.select(model, include="*_proj")
    loss_dense = loss_of(model)
    prune.global_unstructured(projections, prune.L1Unstructured, amount=0.8)
    if RANK == 0:
        print(f"held-out loss: {loss_dense:.3f} dense, {loss_of(model):.3f} pruned")
    prune.checkpoint.save_pretrained(model, f"{OUTPUT}/pruned")


def main() -> None:
    if WORLD_SIZE > 1:
        dist.init_process_group("gloo")
    make_pruned()

    base = LlamaForCausalLM.from_pretrained(f"{OUTPUT}/pruned")
    model = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"))
    if WORLD_SIZE > 1:
        mesh = init_device_mesh("cpu", (WORLD_SIZE,))
        # The base model as the root, so that it runs after unloading, too.
        for block in [*base.model.layers, base]:
            fully_shard(block, mesh=mesh)
    held = hold_zeros(model)
    train(model, 3e-3)
    loss_trained = loss_of(model)
    merged = merge_and_unload(model)
    loss_merged = loss_of(merged)
    prune.checkpoint.save_pretrained(merged, f"{OUTPUT}/recovered")

    if RANK == 0:
        print(f"{loss_trained:.3f} with LoRA on {len(held)} layers, {loss_merged:.3f} merged")
        # Anybody can load it, without distprune and PEFT.
        before = LlamaForCausalLM.from_pretrained(f"{OUTPUT}/pruned").state_dict()
        after = LlamaForCausalLM.from_pretrained(f"{OUTPUT}/recovered").state_dict()
        zeros = {name: value == 0 for name, value in before.items() if "_proj" in name}
        assert all(torch.equal(after[name] == 0, zeros[name]) for name in zeros)
        print(f"{sum(int(each.sum()) for each in zeros.values()):,} weights are zero, as before")
    if WORLD_SIZE > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
