"""Merged experts are read one by one, and only those of the rank."""

import pytest
import torch

from helpers.tiny_transformers import save_tiny

transformers = pytest.importorskip("transformers")

EXPERTS = [range(4), range(1, 3), range(3, 4), range(2, 2)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("mixtral") / "model"
    save_tiny("mixtral", made)
    return made


@pytest.mark.parametrize("experts", EXPERTS)
@pytest.mark.parametrize("name", ["gate_up_proj", "down_proj"])
def test_a_rank_reads_its_own_experts_one_by_one(folder, name, experts, monkeypatch):
    from distprune._transformers.building import build_without_weights
    from distprune.files.checkpoints.checkpoint import open_checkpoint
    from distprune.language_models import loading
    from distprune.language_models.loading import PartReader, find_sources

    expected = transformers.AutoModelForCausalLM.from_pretrained(folder)
    key = f"model.layers.1.mlp.experts.{name}"
    whole = expected.get_parameter(key).detach()
    checkpoint = open_checkpoint(folder)
    model = build_without_weights(folder, torch.float32)
    sources = find_sources(model, checkpoint, ignore_unexpected=False)
    (source,) = [source for names, source in sources if key in names]
    stacked, stack = [], torch.stack
    monkeypatch.setattr(torch, "stack", lambda t, **k: stacked.append(len(t)) or stack(t, **k))
    columns = range(5, 12)
    out = torch.empty(len(experts), whole.shape[1], len(columns))
    reader = PartReader(checkpoint)
    loading.read_part(source, [experts, range(whole.shape[1]), columns], out, reader)
    assert torch.equal(out, whole[experts.start : experts.stop, :, 5:12])
    num_tensors = 2 if name == "gate_up_proj" else 1
    assert stacked == [1] * num_tensors * len(experts)
    assert reader.bytes_read == len(experts) * whole[0].nbytes


def operations(*given):
    from transformers.core_model_loading import WeightConverter

    return WeightConverter(["a.*.x", "a.*.y"], "a.xy", operations=list(given))


def test_only_conversions_that_keep_rows_apart_are_read_in_rows():
    from transformers.core_model_loading import Concatenate, MergeModulelist, Transpose

    from distprune._transformers.table import Conversion, Input

    inputs = [Input(f"a.{i}.{n}", f"a.*.{n}", n, (2, 3)) for n in "xy" for i in range(4)]

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
