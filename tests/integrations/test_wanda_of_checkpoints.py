"""Statistics of a model of transformers prune its checkpoint, however either has its experts."""

import copy
import warnings

import numpy as np
import pytest

import distprune as prune
from distprune.files import planning, pruning
from distprune.files.statistics_file import (
    Origin,
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

transformers = pytest.importorskip("transformers")

FILE = "model.safetensors"

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
        if Origin(parameter, 3, num_parts, part) not in origins_of(name):
            missing.add(family)
    assert missing == NOT_FOUND and len(families) > 40
