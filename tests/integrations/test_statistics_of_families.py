"""Activation statistics of transformers' own models: which layers have them, and padding."""

import pytest
import torch
from torch import nn

import distprune as prune
from distprune.statistics import ActivationStatistics
from helpers.sampling import every
from helpers.tiny_transformers import tiny_model

pytest.importorskip("transformers")

PADDED = ["gpt2", "falcon", "llama", "qwen3", "gemma3", "mixtral", "deepseek_v3", "bloom"]
# Linear layers that no forward of the model calls: kernels take their weights.
USED_DIRECTLY = {
    "mamba": ["backbone.layers.0.mixer.conv1d", "backbone.layers.0.mixer.dt_proj"],
    "mamba2": ["backbone.layers.0.mixer.conv1d"],
}


def linear_layers(model: nn.Module) -> list:
    """Every layer but embeddings, routers and the head."""
    from transformers.pytorch_utils import Conv1D

    pairs = prune.select(model, types=(nn.Linear, nn.Conv1d, Conv1D), everything=True)
    is_head = [len(pair.places) > 1 or "lm_head" in pair.fqn for pair in pairs]
    return [pair for pair, is_one in zip(pairs, is_head, strict=True) if not is_one]


@pytest.mark.parametrize("family", every(2, PADDED))
def test_a_padded_batch_has_the_sums_of_its_sequences(family):
    model = tiny_model(family)
    parameters = linear_layers(model)
    sequences = [torch.tensor([[5, 6, 7, 8, 9]]), torch.tensor([[11, 12, 13]])]
    alone = ActivationStatistics(parameters)
    with alone.collecting():
        for ids in sequences:
            with alone.batch(torch.ones_like(ids)):
                model(input_ids=ids, attention_mask=torch.ones_like(ids))
    ids = torch.nn.utils.rnn.pad_sequence([row[0] for row in sequences], batch_first=True)
    mask = (ids != 0).long()
    padded = ActivationStatistics(parameters)
    with padded.collecting(), padded.batch(mask):
        model(input_ids=ids, attention_mask=mask)
    for pair, totals in padded.totals().items():
        expected = alone.totals()[pair]
        assert totals.num_tokens == expected.num_tokens == 8, pair.fqn
        assert torch.allclose(totals.squares, expected.squares, rtol=1e-4), pair.fqn
    counted = ActivationStatistics(parameters)
    with counted.collecting():
        model(input_ids=ids, attention_mask=mask)
    assert set(counted.num_tokens().values()) == {10}


@pytest.mark.parametrize("family", USED_DIRECTLY)
def test_layers_whose_weights_are_taken_by_kernels_are_named(family):
    model = tiny_model(family)
    statistics = ActivationStatistics(linear_layers(model))
    with statistics.collecting():
        model(input_ids=torch.arange(3, 15).view(2, 6))
    with pytest.raises(ValueError, match="was not called") as caught:
        statistics.totals()
    assert all(name in str(caught.value) for name in USED_DIRECTLY[family])


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("llama4", r"experts\.gate_up_proj \(gate_up_proj of Llama4TextExperts\)"),
        ("dbrx", r"experts\.mlp\.w1 \(w1 of DbrxExpertGLU\)"),
    ],
)
def test_fused_experts_of_unknown_layout_are_refused_by_name(family, text):
    model = tiny_model(family)
    fused = prune.select(
        model, names=("gate_up_proj", "down_proj", "w1"), include="*experts*", everything=True
    )
    with pytest.raises(NotImplementedError, match=text):
        ActivationStatistics(fused)


def test_a_head_that_sees_sentences_does_not_fit_a_mask_of_tokens():
    model = tiny_model("bert")
    statistics = ActivationStatistics(prune.select(model, types=nn.Linear, everything=True))
    ids = torch.arange(3, 15).view(2, 6)
    with (
        statistics.collecting(),
        statistics.batch(torch.ones_like(ids)),
        pytest.raises(ValueError, match=r"bert\.pooler\.dense\.weight.*does not fit"),
    ):
        model(input_ids=ids)
