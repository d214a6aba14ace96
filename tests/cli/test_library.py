"""A checkpoint pruned by the command line, and the transformers model of it: the same masks."""

import pytest
import torch

import distprune as prune

transformers = pytest.importorskip("transformers")

DATA = {"bf16": torch.bfloat16, "fp32": torch.float32}


@pytest.fixture(scope="module", params=DATA)
def source(request, tmp_path_factory):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=11,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).to(DATA[request.param])
    if request.param == "bf16":
        with torch.no_grad():  # ties over layers 2 and 10, whose names sort otherwise
            for parameter in model.parameters():
                parameter.mul_(64).round_().div_(64)
    folder = tmp_path_factory.mktemp(request.param) / "source"
    model.save_pretrained(folder, max_shard_size="100KB")
    return folder


def read(folder):
    return transformers.LlamaForCausalLM.from_pretrained(folder)


def masks_of(model):
    return {n[:-5]: mask.bool() for n, mask in model.named_buffers() if n.endswith("_mask")}


def prune_global(model, normalize="rms"):
    pairs = prune.select(model)
    prune.global_unstructured(
        pairs,
        prune.L1Unstructured,
        amount=0.5,
        normalize=normalize,
        pipeline_parallel=True,  # by name, as a folder has no other order
    )


def prune_raw(model):
    prune_global(model, None)


def prune_layers(model):
    for module, name in prune.select(model):
        prune.l1_unstructured(module, name, amount=0.37)


WAYS = {
    "global": (["-s", "0.5"], prune_global),
    "raw": (["-s", "0.5", "--normalize", "none"], prune_raw),
    "layer": (["-s", "0.37", "--scope", "layer"], prune_layers),
}


@pytest.mark.parametrize("way", WAYS)
def test_masks_of_the_checkpoint_are_those_of_the_model(run, source, tmp_path, way):
    arguments, prune_model = WAYS[way]
    done = run("prune", source, tmp_path / "out", *arguments, "--json")
    assert done.code == 0, done.err
    model = read(source)
    dense = {name: value.clone() for name, value in model.state_dict().items()}
    prune_model(model)
    expected = masks_of(model)
    assert len(expected) == 77 == len(done.json["tensors"])

    loaded = read(source)
    report = prune.load_masks(loaded, tmp_path / "out")
    masks = masks_of(loaded)
    assert masks.keys() == expected.keys()
    assert all(torch.equal(masks[name], expected[name]) for name in expected)
    assert report.num_pruned == done.json["num_pruned"]

    # What transformers reads has exactly these zeros, and nothing else has changed.
    pruned = read(tmp_path / "out").state_dict()
    assert pruned.keys() == dense.keys()
    for name, value in dense.items():
        keep = expected.get(name, torch.ones_like(value, dtype=torch.bool))
        assert torch.equal(pruned[name], torch.where(keep, value, 0)), name
