"""A pickled model of transformers, converted and loaded again: each tensor, heads and tied ones."""

import json

import pytest
import torch

transformers = pytest.importorskip("transformers")

from distprune.files.converting import Conversion  # noqa: E402


def bert_with_a_head():
    config = transformers.BertConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        vocab_size=50, num_labels=5,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config)


def gpt2_with_tied_weights():
    config = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=50, n_positions=32)
    return transformers.GPT2LMHeadModel(config)


def t5_with_tied_weights():
    config = transformers.T5Config(
        d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, vocab_size=50,
        tie_word_embeddings=True,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def llama_without_tied_weights():
    config = transformers.LlamaConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        vocab_size=50, tie_word_embeddings=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


@pytest.fixture(
    params=[
        bert_with_a_head,
        gpt2_with_tied_weights,
        t5_with_tied_weights,
        llama_without_tied_weights,
    ]
)
def model(request):
    torch.manual_seed(0)
    model = request.param()
    with torch.no_grad():
        for parameter in model.parameters():  # none is as a fresh model would have it
            parameter.copy_(torch.randn_like(parameter))
    return model.to(torch.bfloat16)


@pytest.mark.parametrize("num_shards", [1, 2])
def test_every_tensor_is_that_of_the_model(model, num_shards, tmp_path):
    source = tmp_path / "source"
    model.config.save_pretrained(source)
    config = json.loads((source / "config.json").read_text())
    config["architectures"] = [type(model).__name__]
    (source / "config.json").write_text(json.dumps(config))
    state = model.state_dict()
    names = list(state)
    weight_map = {}
    for shard in range(num_shards):
        name = f"pytorch_model-{shard + 1:05d}-of-{num_shards:05d}.bin"
        part = {key: state[key] for key in names[shard::num_shards]}
        torch.save(part, source / (name if num_shards > 1 else "pytorch_model.bin"))
        weight_map |= dict.fromkeys(part, name)
    if num_shards > 1:
        index = {"metadata": {}, "weight_map": weight_map}
        (source / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    Conversion(source).write(tmp_path / "target")

    loaded, info = type(model).from_pretrained(
        tmp_path / "target", dtype="auto", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"], info
    found = loaded.state_dict()
    assert list(found) == names
    for name, tensor in state.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name].view(torch.int16), tensor.view(torch.int16)), name
    tied = {name: tensor.data_ptr() for name, tensor in state.items()}
    for name, place in tied.items():
        for other in names[: names.index(name)]:
            is_tied = place == tied[other]
            assert is_tied == (found[name].data_ptr() == found[other].data_ptr()), (name, other)
