"""LoRA on a pruned Llama with the real PEFT, sharded too: zeros stay zeros, also after merging."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

peft = pytest.importorskip("peft")

import transformers  # noqa: E402
from test_transformers import tiny_llama  # noqa: E402
from transformers import LlamaForCausalLM  # noqa: E402

import distprune as prune  # noqa: E402
from distprune.integrations.peft import hold_zeros, merge_and_unload, save_adapter  # noqa: E402
from distprune.testing import run_ranks  # noqa: E402
from helpers.causal_language_models import small_model  # noqa: E402
from helpers.comparisons import raised  # noqa: E402

TOKENS = torch.randint(32, (4, 8), generator=torch.Generator().manual_seed(1))
TARGETS = ["q_proj", "v_proj", "down_proj"]


def gpt2():
    return small_model("GPT2LMHeadModel")


def pruned(model, permanent=True, name="*proj"):
    parameters = prune.select(model, include=name)
    prune.global_unstructured(parameters, prune.L1Unstructured, amount=0.6)
    if permanent:
        for module, key in parameters:
            prune.remove(module, key)
    return model


def lora(**options):
    return peft.LoraConfig(**{"target_modules": TARGETS, "r": 4, "lora_alpha": 8, **options})


def zeros(model):
    """Where the effective weights are zero, by the names of the model without adapters."""
    found = {}
    for path, module in model.named_modules():
        is_layer = isinstance(module, nn.Linear | transformers.pytorch_utils.Conv1D)
        if is_layer and ".lora_" not in path:
            name = path.removeprefix("base_model.model.").removesuffix(".base_layer")
            found[name] = module.weight.detach() == 0
    return found


def same_zeros(found, expected):
    assert found.keys() == expected.keys()
    return all(torch.equal(found[name], expected[name]) for name in expected)


def train(model, steps=4, tokens=TOKENS):
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.1)
    for _ in range(steps):
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()


@torch.no_grad()
def outputs(model):
    return model(input_ids=TOKENS).logits


def close(found, expected):
    """Equal but for the rounding of sums in another order, of numbers near 1."""
    assert expected.abs().max() > 1e-2
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("permanent", [True, False], ids=["values", "masks"])
@pytest.mark.parametrize(
    ("make", "options"),
    [
        (tiny_llama, {}),
        (tiny_llama, {"use_rslora": True, "lora_dropout": 0.2}),
        (gpt2, {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True,
                "lora_bias": True}),
    ],
    ids=["llama", "rslora_dropout", "gpt2_bias"],
)  # fmt: skip
def test_zeros_stay_and_outputs_are_those_before_merging(make, options, permanent, tmp_path):
    base = pruned(make(), permanent, "*proj" if make is tiny_llama else "*c_*")
    expected, dense = zeros(base), outputs(base)
    model = peft.get_peft_model(base, lora(**options))
    held = hold_zeros(model)
    assert len(held) == 6
    train(model)
    before = outputs(model)
    assert (before - dense).abs().max() > 1e-2  # it has learned something
    merged = merge_and_unload(model)
    for module in merged.modules():  # without a forward
        if hasattr(module, "weight_mask"):
            assert torch.equal(module.weight, module.weight_mask * module.weight_orig)
    assert same_zeros(zeros(merged), expected)
    close(outputs(merged), before)
    prune.checkpoint.save_pretrained(merged, tmp_path)
    loaded = type(merged).from_pretrained(tmp_path).eval()
    assert same_zeros(zeros(loaded), expected)
    assert torch.equal(outputs(loaded), outputs(merged))


def test_the_gradients_are_those_of_the_masked_delta():
    base = pruned(tiny_llama())
    model = peft.get_peft_model(copy.deepcopy(base), lora(init_lora_weights=False))
    hold_zeros(model)
    arguments = {"input_ids": TOKENS, "labels": TOKENS}
    model(**arguments).loss.backward()
    lora_parameters = {n: p for n, p in model.named_parameters() if "lora_" in n}
    factors = {n: p.detach().clone().requires_grad_() for n, p in lora_parameters.items()}
    weights = {}
    for name, layer in model.named_modules():
        if hasattr(layer, "lora_variant"):
            a, b = (factors[f"{name}.lora_{each}.default.weight"] for each in "AB")
            weight = layer.base_layer.weight.detach()
            masked = weight + (weight != 0) * (2.0 * b @ a)
            weights[f"{name.removeprefix('base_model.model.')}.weight"] = masked
    torch.func.functional_call(base, weights, (), arguments).loss.backward()
    for name, parameter in lora_parameters.items():
        torch.testing.assert_close(parameter.grad, factors[name].grad, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(("permanent", "safe"), [(True, False), (False, True)])
def test_several_adapters_merge_and_unmerge(permanent, safe):
    base = pruned(tiny_llama(), permanent)
    expected = zeros(base)
    dense = outputs(base)
    model = peft.get_peft_model(base, lora(init_lora_weights=False))
    hold_zeros(model)
    model.add_adapter("other", lora(r=2, init_lora_weights=False))
    model.eval()
    alone = {}
    for name in ("default", "other"):
        model.set_adapter(name)
        alone[name] = outputs(model)
    mixed = model(input_ids=TOKENS, adapter_names=["default", "other", "__base__", "other"]).logits
    for row, expected_row in enumerate([alone["default"], alone["other"], dense, alone["other"]]):
        close(mixed[row].detach(), expected_row[row])
    model.base_model.set_adapter(["default", "other"])
    both = outputs(model)
    with model.disable_adapter():
        assert torch.equal(outputs(model), dense)

    model.merge_adapter(safe_merge=safe)
    assert same_zeros(zeros(model), expected)
    close(outputs(model), both)
    model.unmerge_adapter()
    assert same_zeros(zeros(model), expected)
    close(outputs(model), both)
    with model.disable_adapter():
        close(outputs(model), dense)
    model.merge_adapter(["other"], safe_merge=safe)
    with model.disable_adapter():  # PEFT unmerges
        close(outputs(model), dense)
    assert same_zeros(zeros(model), expected)


def one_layer(weight):
    base = nn.Sequential(nn.Linear(*weight.shape, bias=False))
    base[0].weight = nn.Parameter(weight)
    base.config = {"model_type": "none"}
    model = peft.get_peft_model(base, lora(target_modules=["0"], r=1, lora_alpha=1))
    hold_zeros(model)
    return model, model.base_model.model[0]


def test_a_sum_that_is_zero_is_restored_by_unmerging():
    """The zeros are those of the base, not those of a merged weight."""
    model, layer = one_layer(torch.tensor([[1.0, 0.0], [2.0, 3.0]]))
    with torch.no_grad():
        layer.lora_A["default"].weight.copy_(torch.tensor([[1.0, 1.0]]))
        layer.lora_B["default"].weight.copy_(torch.tensor([[-1.0], [1.0]]))
    model.merge_adapter()
    assert layer.base_layer.weight.tolist() == [[0, 0], [3, 4]]
    model.unmerge_adapter()
    assert layer.base_layer.weight.tolist() == [[1, 0], [2, 3]]


def test_autograd_keeps_no_dense_delta():
    """What a layer keeps for backward: its input, and the weights, which exist anyway."""
    weight = torch.ones(64, 64)
    weight[:, ::2] = 0
    model, _ = one_layer(weight)
    known = {p.data_ptr() for p in model.parameters()}
    kept = []

    def pack(tensor):
        if tensor.data_ptr() not in known:
            kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.base_model(torch.ones(3, 64)).sum()
    assert max(kept, default=0) <= 3 * 64


# What is refused, by name.


@pytest.mark.parametrize(
    ("permanent", "config", "message"),
    [
        (True, lora(use_dora=True), r"q_proj has adapters of other forms: .*DoraLinearVariant"),
        (True, lora(modules_to_save=["o_proj"]), r"o_proj is a .*ModulesToSaveWrapper"),
        (True, lora(init_lora_weights="pissa"), "pissa"),
        (False, lora(init_lora_weights="pissa"), r"other forms: \{'default': 'pissa'\}"),
        (True, peft.IA3Config(target_modules=TARGETS, feedforward_modules=["down_proj"]),
         r"q_proj is a peft\.tuners\.ia3\.layer\.Linear"),
    ],
)  # fmt: skip
def test_adapters_of_other_forms_are_refused(permanent, config, message):
    model = peft.get_peft_model(pruned(tiny_llama(), permanent), config)
    # An initialisation that changes the base may have filled all its zeros.
    with pytest.raises((NotImplementedError, ValueError), match=message) as caught:
        hold_zeros(model)
    assert caught.type is NotImplementedError or message == "pissa"
    assert not [module for module in model.modules() if "resolve_lora_variant" in vars(module)]


def test_bases_that_cannot_hold_zeros_are_refused():
    model = peft.get_peft_model(pruned(tiny_llama()), lora())
    model.requires_grad_(True)
    with pytest.raises(NotImplementedError, match="base weight that is trained, without a mask"):
        hold_zeros(model)
    prune.masks_from_zeros(prune.select(model, include="*base_layer"))
    assert len(hold_zeros(model)) == 6
    layer = model.get_base_model().model.layers[0].mlp.down_proj.base_layer
    prune.remove(layer, "weight")
    layer.weight = nn.Parameter(layer.weight.to(torch.int8), requires_grad=False)
    with pytest.raises(NotImplementedError, match=r"down_proj: .*unquantised"):
        hold_zeros(model)


def test_what_is_not_held_is_refused():
    model = peft.get_peft_model(pruned(tiny_llama()), lora())
    hold_zeros(model)
    with pytest.raises(NotImplementedError, match="DoraLinearVariant' is added to a layer"):
        model.add_adapter("other", lora(use_dora=True))
    unheld = peft.get_peft_model(pruned(tiny_llama()), lora())
    with pytest.raises(ValueError, match=r"q_proj.*zeros, which merging would fill.*hold_zer"):
        merge_and_unload(unheld)
    with pytest.raises(ValueError, match="no layer with an adapter has zeros"):
        hold_zeros(peft.get_peft_model(tiny_llama(), lora()))
    with pytest.raises(TypeError, match="LlamaForCausalLM; expected what peft"):
        hold_zeros(pruned(tiny_llama()))


def test_safe_merge_refuses_what_is_not_finite():
    model = peft.get_peft_model(pruned(tiny_llama()), lora(init_lora_weights=False))
    hold_zeros(model)
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    with torch.no_grad():
        layer.lora_B["default"].weight[0, 0] = float("inf")
    stored = layer.base_layer.weight.clone()
    with pytest.raises(ValueError, match="'default' has, or makes, values that are not finite"):
        model.merge_adapter(safe_merge=True)
    assert torch.equal(layer.base_layer.weight, stored)


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
    # The batch is divided over the ranks, if it can be.
    size, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    train(model, steps=3, tokens=TOKENS.chunk(size)[rank] if 4 % size == 0 else TOKENS)
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
        found[key] = raised(lambda: fn(model))

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
