"""Statistics of a model of transformers prune its checkpoint, however either has its experts."""

import copy
import re
import warnings

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import distprune as prune
from distprune.base.selecting import natural_key
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
HAVE_RUN = ["gpt_oss", "mixtral", "llama", "gpt2", "gemma3", "qwen3"]


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


def factor_of(stored, score):
    """What each element of a weight is multiplied by: in fp64, rounded once."""
    counts = np.maximum(1, np.array(stored.num_tokens, dtype=np.float64))
    counts = counts if counts.ndim == 0 else counts[:, None]
    squares = stored.squares / counts
    if score == "stade":
        squares = np.maximum(squares - (stored.sums / counts) ** 2, 0)
    if stored.layout.are_experts:  # the one without a token has the mean of the others
        squares[-1] = squares[:-1].mean()
    factor = torch.from_numpy(np.sqrt(squares)).float()
    outputs = {"linear": 0, "experts": 1, "transposed_experts": 2}[stored.layout.kind]
    return factor.unsqueeze(outputs).expand(stored.layout.shape)


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


@pytest.mark.parametrize("family", ["gpt_oss", "mixtral"])
def test_equal_scores(family, tmp_path):
    """In a row, the order is the same. Between tensors, the number is; which ones may differ."""
    model = tiny_model(family)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4).round_().div_(4)
    model.save_pretrained(tmp_path / "source")
    statistics = random_statistics(family)
    for stored in statistics.values():  # one factor for all inputs: many scores are equal
        stored.squares[...] = np.max(stored.num_tokens)
    path = tmp_path / "statistics.safetensors"
    write_statistics(path, "one_pass", statistics)
    for call in (CALLS[2], CALLS[0]):
        folder = tmp_path / call.get("scope", "global")
        _, report = pruned_on_disk(tmp_path / "source", folder, path, call)
        expected, num_pruned = pruned_live(tmp_path / "source", family, path, call)
        pruned = type(model).from_pretrained(folder).state_dict()
        assert report.num_pruned == num_pruned
        if "scope" in call:
            assert all(value.equal(expected[name]) for name, value in pruned.items())
        else:
            kept = [
                torch.cat([
                    (state[name] * factor_of(stored, "wanda")).abs().flatten()
                    for name, stored in statistics.items()
                ]).sort()[0]
                for state in (pruned, expected)
            ]  # fmt: skip
            assert (
                kept[0].equal(kept[1])
                and report.groups[0].num_ties > report.groups[0].num_ties_pruned > 0
            )


def _natural(item):
    return natural_key(item[0])


@pytest.mark.parametrize("family", HAVE_RUN)
def test_statistics_of_a_model_that_has_run(family, tmp_path):
    source = save_tiny(family, tmp_path / "source")
    model = type(tiny_model(family)).from_pretrained(source)
    statistics = ActivationStatistics(linear_layers(model))
    with statistics.collecting():
        model(input_ids=torch.arange(40).reshape(4, 10) % 13)
    path = tmp_path / "statistics.safetensors"
    statistics.save(path)
    for number, call in enumerate(every(3, CALLS, start=HAVE_RUN.index(family))):
        pruned_on_disk(source, tmp_path / str(number), path, call)
        expected, num_pruned = pruned_live(source, family, path, call)
        assert num_pruned > 0
        pruned = type(model).from_pretrained(tmp_path / str(number)).state_dict()
        assert [name for name, value in pruned.items() if not value.equal(expected[name])] == []


def stored_matrices(source, statistics, score):
    """A module of the tensors on disk, and their scores: each expert's matrix is a parameter."""
    matrices, scores = nn.Module(), {}
    for number, (name, value) in enumerate(sorted(load_file(source / FILE).items(), key=_natural)):
        expert = re.fullmatch(r"(.+)\.experts\.(\d)\.(\w+)\.weight", name)
        label = name
        if expert is not None:
            stem, row, own = expert.groups()
            merged = "down_proj" if own in ("w2", "down_proj") else "gate_up_proj"
            label = f"{stem.replace('block_sparse_moe', 'mlp')}.experts.{merged}"
        if label in statistics:
            factor = factor_of(statistics[label], score)
            factor = factor if expert is None else factor[int(row), : len(value)]
            matrices.register_parameter(f"m{number}", nn.Parameter(value))
            scores[prune.NamedParameter(matrices, f"m{number}", name)] = value * factor
    return scores


@pytest.mark.filterwarnings("ignore:the ranking over all parameters")
@pytest.mark.parametrize("family", SEPARATE)
@pytest.mark.parametrize("call", CALLS_BY_TENSOR)
def test_a_tensor_on_disk_is_a_layer(family, call, tmp_path):
    """As for magnitudes: scope "layer", and what scores are divided by, are of stored tensors."""
    source, path, statistics = make(family, tmp_path)
    pruned_on_disk(source, tmp_path / "pruned", path, call)
    scores = stored_matrices(source, statistics, call["score"])
    keywords = {key: value for key, value in call.items() if key != "score"}
    prune.global_unstructured(
        list(scores), prune.L1Unstructured, importance_scores=scores, **keywords
    )
    pruned = load_file(tmp_path / "pruned" / FILE)
    wrong = [p.fqn for p in scores if not pruned[p.fqn].equal(getattr(p[0], p[1]))]
    assert not wrong and len(scores) > len(statistics)


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
