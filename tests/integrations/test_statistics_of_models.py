"""Statistics of transformers' models: layers, experts, padding; and masks of their checkpoints."""

import copy
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import distprune as prune
from distprune.files import planning, pruning
from distprune.files.statistics_file import (
    StoredStatistics,
    WeightLayout,
    origins_of,
    write_statistics,
)
from distprune.files.verifying import verify
from distprune.language_models import linear_layers
from distprune.statistics import ActivationStatistics
from helpers.recipes import raw_recipe
from helpers.sampling import every
from helpers.tiny_transformers import save_tiny, tiny_model

pytest.importorskip("transformers")

PADDED = ["gpt2", "falcon", "llama", "qwen3", "gemma3", "mixtral", "deepseek_v3", "bloom"]
IDS = torch.arange(3, 27).view(3, 8)


def all_layers(model: nn.Module) -> list:
    """Every layer but embeddings, routers and the head."""
    from transformers.pytorch_utils import Conv1D

    pairs = prune.select(model, types=(nn.Linear, nn.Conv1d, Conv1D), everything=True)
    return [pair for pair in pairs if len(pair.places) == 1 and "lm_head" not in pair.fqn]


@pytest.mark.parametrize("family", every(2, PADDED))
def test_a_padded_batch_has_the_sums_of_its_sequences(family):
    model = tiny_model(family)
    parameters = all_layers(model)
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


EXPERTS = ["mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "deepseek_v3", "granitemoe", "jetmoe"]


def fused(model: nn.Module) -> list:
    return [pair for pair in linear_layers(model) if model.get_parameter(pair.fqn).ndim == 3]


@pytest.mark.parametrize("family", EXPERTS)
def test_fused_experts_have_the_tokens_that_came_to_each(family):
    model, totals = tiny_model(family), []
    for implementation in ("eager", "grouped_mm") if family != "jetmoe" else ("eager",):
        if family != "jetmoe":
            model.set_experts_implementation(implementation)
        statistics = ActivationStatistics(fused(model))
        with statistics.collecting():
            model(input_ids=IDS)
        totals.append(statistics.totals())
    eager, grouped = totals[0], totals[-1]
    assert len(eager) >= 2
    for pair, of_pair in eager.items():
        assert of_pair.num_tokens == grouped[pair].num_tokens
        assert sum(of_pair.num_tokens) == IDS.numel() * model.config.num_experts_per_tok
        # The kernels round differently.
        torch.testing.assert_close(of_pair.squares, grouped[pair].squares, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_an_implementation_that_gathers_weights_is_refused_by_name(family):
    model = tiny_model(family)
    model.set_experts_implementation("batched_mm")
    statistics = ActivationStatistics(fused(model))
    text = r"layers\.0\.mlp\.experts\.gate_up_proj: .*set_experts_implementation\(\"eager\"\)"
    with statistics.collecting(), pytest.raises(NotImplementedError, match=text):
        model(input_ids=IDS)


# Those whose experts are one tensor on disk, too; the others have a tensor of each matrix.
FUSED = ["gpt_oss", "granitemoe"]
SEPARATE = ["mixtral", "qwen3_moe", "deepseek_v3"]


def random_statistics(family):
    """One expert of each layer saw no token."""
    draws = np.random.default_rng(0)
    made = {}
    for pair in linear_layers(tiny_model(family)):
        shape, layout = tuple(getattr(*pair).shape), "linear"
        if len(shape) == 3:
            layout = "transposed_experts" if family == "gpt_oss" else "experts"
        num_tokens = 50 if layout == "linear" else (*range(7, 6 + shape[0]), 0)
        weight = WeightLayout(layout, shape)
        sums, squares = draws.random((2, *weight.input_shape)) * 50
        squares += sums**2 / 7  # the variance is positive: no scores are equal without a reason
        if layout != "linear":
            sums[-1] = squares[-1] = 0
        made[pair.fqn] = StoredStatistics(weight, num_tokens, sums, squares)
    return made


def pruned_live(source, family, path, call):
    """The state of the model after pruning it in memory, and the number of pruned elements."""
    model = type(tiny_model(family)).from_pretrained(source)
    parameters = linear_layers(model)
    statistics = ActivationStatistics.load(path, parameters)
    keywords = {key: value for key, value in call.items() if key != "score"}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "no token|the ranking over all parameters")
        report = prune.global_unstructured(
            parameters,
            prune.L1Unstructured,
            importance_scores=getattr(statistics, call["score"])(),
            **keywords,
        )
    for module, name in parameters:
        prune.remove(module, name)
    return model.state_dict(), report.num_pruned


def pruned_on_disk(source, folder, path, call):
    """The folder, pruned without the model."""
    recipe = {key: value for key, value in call.items() if key != "amount"}
    recipe["statistics"] = str(path)
    plan = planning.plan(source, raw_recipe(call.get("amount"), **recipe))
    return plan, pruning.prune(plan, folder)


def make(family, tmp_path):
    path = tmp_path / "statistics.safetensors"
    statistics = random_statistics(family)
    write_statistics(path, "one_pass", statistics)
    return save_tiny(family, tmp_path / "source"), path, statistics


# Where one tensor on disk is one parameter, too, the others are the same as well.
CALLS = [
    {"score": "wanda", "amount": 0.5, "normalize": None},
    {"score": "stade", "amount": 0.6, "normalize": None},
    {"score": "wanda", "amount": 0.4, "scope": "row"},
    {"score": "stade", "amount": 0.7, "scope": "row"},
    {"score": "wanda", "pattern": "2:4"},
]
CALLS_BY_TENSOR = [
    {"score": "wanda", "amount": 0.5, "normalize": "rms"},
    {"score": "wanda", "amount": 0.45, "scope": "layer"},
]


@pytest.mark.parametrize("family", [*FUSED, *SEPARATE])
def test_masks_of_the_checkpoint_are_those_of_the_model(family, tmp_path):
    source, path, _ = make(family, tmp_path)
    calls = CALLS + (CALLS_BY_TENSOR if family in FUSED else [])
    for number, call in enumerate(every(3, calls, start=[*FUSED, *SEPARATE].index(family))):
        plan, report = pruned_on_disk(source, tmp_path / str(number), path, call)
        expected, num_pruned = pruned_live(source, family, path, call)
        assert report.num_pruned == num_pruned > 0, call
        pruned = type(tiny_model(family)).from_pretrained(tmp_path / str(number)).state_dict()
        assert pruned.keys() == expected.keys()
        assert [name for name, value in pruned.items() if not value.equal(expected[name])] == []
        (warning,) = plan.warnings
        assert warning.startswith("no token came to") and "experts" in warning, warning
    assert verify(tmp_path / "0", source).is_good


def merges_of_transformers():
    """(family, name on disk, parameter, number of parts) of each expert that is merged on loading.

    transformers has patterns of names; for each of them, a name is made that it matches.
    """
    mapping = pytest.importorskip("transformers.conversion_mapping")
    for family, transforms in mapping._build_checkpoint_conversion_mapping().items():
        renamings = [step for step in transforms if not hasattr(step, "operations")]
        is_sparse = any("block_sparse_moe" in str(step.source_patterns) for step in renamings)
        for converter in transforms:
            if not hasattr(converter, "operations"):
                continue
            for part, pattern in enumerate(converter.source_patterns):
                if "experts.*." not in pattern:
                    continue
                own = pattern.replace("\\", "").removeprefix(".").replace("*", "3")
                if own.startswith("experts."):
                    own = f"{'block_sparse_moe' if is_sparse else 'mlp'}.{own}"
                name = renamed = f"model.layers.0.{own}"
                for renaming in renamings:
                    renamed, _ = copy.deepcopy(renaming).rename_source_key(renamed)
                target, matched = copy.deepcopy(converter).rename_source_key(renamed)
                assert matched is not None, (family, name)
                yield family, name, target, len(converter.source_patterns), part


# Families whose names on disk lead to no statistics: their tensors are refused, by name.
NOT_FOUND = {
    "deepseek_ocr2", "dots3_note_vision_encoder", "ernie4_5_vl_moe", "mistral_large4_text",
}  # fmt: skip


def test_the_experts_of_nearly_every_family_are_found():
    families, missing = set(), set()
    for family, name, parameter, num_parts, part in merges_of_transformers():
        families.add(family)
        if (parameter, 3, num_parts, part) not in origins_of(name):
            missing.add(family)
    assert missing == NOT_FOUND and len(families) > 40
