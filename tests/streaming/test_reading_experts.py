"""Merged experts are read one by one."""

import pytest
import torch

from helpers.tiny_transformers import save_tiny

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("mixtral") / "model"
    save_tiny("mixtral", made)
    return made


@pytest.mark.parametrize("name", ["gate_up_proj", "down_proj"])
def test_experts_are_read_one_by_one(folder, name, monkeypatch):
    from distprune.streaming.layers import StreamedModel

    expected = transformers.AutoModelForCausalLM.from_pretrained(folder)
    key = f"model.layers.1.mlp.experts.{name}"
    whole = expected.get_parameter(key).detach()
    streamed = StreamedModel(folder, torch.float32, torch.device("cpu"))
    sources = [source for of_layer in streamed.sources for source in of_layer]
    (source,) = [source for names, source in sources if key in names]
    stacked, stack = [], torch.stack
    monkeypatch.setattr(torch, "stack", lambda t, **k: stacked.append(len(t)) or stack(t, **k))
    assert torch.equal(streamed.values_of(source, whole), whole)
    assert stacked == [1] * (2 if name == "gate_up_proj" else 1) * len(whole)


def operations(*given):
    from transformers.core_model_loading import WeightConverter

    return WeightConverter(["a.*.x", "a.*.y"], "a.xy", operations=list(given))


def test_only_conversions_that_keep_rows_apart_are_read_in_rows():
    from transformers.core_model_loading import Concatenate, MergeModulelist, Transpose

    from distprune._transformers import Conversion

    inputs = [(f"a.{i}.{n}", f"a.*.{n}", n, (2, 3)) for n in "xy" for i in range(4)]

    def is_stack(*given, inputs=inputs):
        return Conversion("a.xy", operations(*given), inputs, None, None).is_stack

    stack = MergeModulelist(dim=0)
    assert is_stack(stack, Concatenate(dim=1))
    assert is_stack(stack, Concatenate(dim=2), Transpose(1, 2))
    assert not is_stack(stack, Concatenate(dim=0))
    assert not is_stack(stack, Concatenate(dim=-3))
    assert not is_stack(stack, Concatenate(dim=1), Transpose(0, 2))
    assert not is_stack(stack, Concatenate(dim=1), Transpose(1, 2, check_dims=True))
    assert not is_stack(MergeModulelist(dim=1), Concatenate(dim=1))
    assert not is_stack(Concatenate(dim=1))
    assert not is_stack(stack, Concatenate(dim=1), inputs=inputs[:-1])
