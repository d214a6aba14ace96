"""LoRA on a pruned Llama under DDP and FSDP2, with PEFT: as in one process."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

peft = pytest.importorskip("peft")

from test_peft import TOKENS, close, lora, outputs, pruned, same_zeros, train, zeros  # noqa: E402
from test_transformers import tiny_llama  # noqa: E402
from transformers import LlamaForCausalLM  # noqa: E402

import distprune as prune  # noqa: E402
from distprune.integrations.peft import hold_zeros, merge_and_unload, save_adapter  # noqa: E402
from distprune.testing import run_ranks  # noqa: E402


def shard(model, blocks, kind, root_is_base):
    if kind == "none":
        return model
    size = dist.get_world_size()
    match kind:
        case "ddp":
            return DistributedDataParallel(model)
        case "fsdp2":
            mesh = init_device_mesh("cpu", (size,))
        case "hsdp":
            mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
    for block in [*blocks, model.get_base_model() if root_is_base else model]:
        fully_shard(block, mesh=mesh)
    return model


def train_on_ranks(model):
    """Steps on a batch that is divided over the ranks, if it can be."""
    size, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    train(model, steps=3, tokens=TOKENS.chunk(size)[rank] if 4 % size == 0 else TOKENS)


def trained_with_lora(kind, permanent, order, folder):
    """What a run saves and computes: outputs before and after merging, and their files."""
    base = pruned(tiny_llama()) if permanent else tiny_llama()
    blocks, root_is_base = list(base.model.layers), order != "hold_last"
    model = peft.get_peft_model(base, lora())
    if order == "hold_first":
        hold_zeros(model)
    model = shard(model, blocks, kind, root_is_base)
    if not permanent:
        parameters = prune.select(model, include="*proj.base_layer")
        parameters += prune.select(model, include="*proj")
        prune.global_unstructured(parameters, prune.L1Unstructured, amount=0.6)
    if order != "hold_first":
        hold_zeros(model)
    train_on_ranks(model)
    before = outputs(model)
    save_adapter(model, f"{folder}/adapter")
    merged = merge_and_unload(model)
    # Else the root of FSDP2 is gone, and the model can only be saved.
    after = outputs(merged) if root_is_base or kind == "ddp" else None
    prune.checkpoint.save_pretrained(merged, f"{folder}/merged")
    return before, after


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "size", "order"),
    [
        ("ddp", 2, "hold_last"),
        ("ddp", 2, "masks_after_wrapping"),
        ("fsdp2", 2, "hold_first"),
        ("fsdp2", 2, "hold_last"),
        ("fsdp2", 3, "masks_after_wrapping"),  # shards of unequal sizes
        ("hsdp", 4, "hold_last"),
    ],
)
def test_the_same_as_in_one_process(kind, size, order, tmp_path):
    permanent = order != "masks_after_wrapping"
    expected = zeros(pruned(tiny_llama()))
    alone, _ = trained_with_lora("none", permanent, order, tmp_path / "alone")
    folder = tmp_path / kind
    for before, after in run_ranks(trained_with_lora, size, kind, permanent, order, str(folder)):
        if after is not None:
            close(after, before)
        # Adam divides by gradients: rounding of small ones shows.
        torch.testing.assert_close(before, alone, rtol=1e-3, atol=1e-4)
    merged = LlamaForCausalLM.from_pretrained(folder / "merged").eval()
    assert same_zeros(zeros(merged), expected)
    close(outputs(merged), before)
    loaded = peft.PeftModel.from_pretrained(pruned(tiny_llama()), folder / "adapter").eval()
    hold_zeros(loaded)
    close(outputs(loaded), before)


# What is refused, by name, on every rank.


def refusals():
    """Messages for wrappings that cannot hold zeros, or cannot merge as they are."""
    found = {}

    def note(key, fn, model):
        try:
            fn(model)
        except (NotImplementedError, RuntimeError) as error:
            found[key] = f"{type(error).__name__}: {error}"

    def held():
        model = peft.get_peft_model(pruned(tiny_llama()), lora(init_lora_weights=False)).eval()
        hold_zeros(model)
        return model

    def flat(model):
        device = torch.device("cpu")
        return FullyShardedDataParallel(model, use_orig_params=True, device_id=device)

    note("fsdp1", hold_zeros, flat(peft.get_peft_model(pruned(tiny_llama()), lora())))
    model = held()
    found["before"] = outputs(model)
    model = flat(model)
    found["after"] = outputs(model)
    note("fsdp1_merge", lambda model: model.merge_adapter(), model)

    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    plan = {"model.layers.*.mlp.down_proj": RowwiseParallel()}
    base = parallelize_module(pruned(tiny_llama()), mesh, plan)
    note("tp", hold_zeros, peft.get_peft_model(base, lora()))

    model = held()
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    outputs(model)
    note("gathered", lambda model: model.merge_adapter(), model)
    return found


@pytest.mark.slow
def test_wrappings_that_cannot_hold_zeros_are_refused():
    for found in run_ranks(refusals, 2):
        assert "those of FSDP1" in found["fsdp1"]
        assert "a copy that FSDP gathered" in found["fsdp1_merge"]
        close(found["after"], found["before"])
        assert "NotImplementedError" in found["tp"] and "is tensor-parallel" in found["tp"]
        assert "a copy that FSDP gathered" in found["gathered"]
