"""The default selection and the layouts of some forty families, as transformers saves them."""

from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import distprune
from distprune.files.checkpoint import open_checkpoint
from distprune.files.planning import plan
from distprune.files.pruning import prune
from distprune.files.selecting import Layouts, select_tensors
from distprune.files.verifying import verify
from distprune.recipes import Recipe
from distprune.schedule import ScheduledPruner
from helpers import file_oracle
from helpers.recipes import raw_recipe
from helpers.sampling import every
from helpers.tiny_checkpoints import load
from helpers.tiny_transformers import FAMILIES, save_tiny, tiny_model

TABLE = Path(__file__).with_name("selection_by_family.txt").read_text().splitlines()
KINDS = {row.partition(":")[0]: row.partition(":")[2].split() for row in TABLE if row[0] != "#"}
# Families whose experts are one tensor on disk, and whether it is [experts, inputs, outputs].
FUSED = {"gpt_oss": True, "llama4": True, "granitemoe": False}


def kind(name):
    parts = [part for part in name.removesuffix(".weight").split(".")[-2:] if not part.isdigit()]
    return ".".join(parts)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Checkpoints by family, made once."""
    folder = tmp_path_factory.mktemp("families")
    return cache(lambda family: save_tiny(family, folder / family))


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_pruned_by_default(saved, family):
    verdicts, _ = select_tensors(open_checkpoint(saved(family)), raw_recipe(0.5))
    matrices = [(entry.name, reason) for entry, _, reason in verdicts if len(entry.shape) > 1]
    pruned = {kind(name) for name, reason in matrices if not reason}
    kept = {kind(name) for name, reason in matrices if reason}
    assert pruned == {kind.rstrip("+") for kind in KINDS[family]}
    assert pruned & kept == {kind[:-1] for kind in KINDS[family] if kind.endswith("+")}
    assert all(reason for entry, _, reason in verdicts if len(entry.shape) < 2)


@pytest.mark.parametrize("family", FAMILIES)
def test_layouts_are_those_of_the_modules(saved, family):
    """Of all modules that are stored under their own names."""
    from transformers.pytorch_utils import Conv1D

    checkpoint = open_checkpoint(saved(family))
    layouts, entries = Layouts(checkpoint), {entry.name: entry for entry in checkpoint.tensors}
    num_seen = 0
    for path, module in tiny_model(family).named_modules():
        entry = entries.get(f"{path}.weight")
        if entry is None or entry.shape != tuple(module.weight.shape):
            continue
        out, *rest = entry.shape
        if isinstance(module, torch.nn.Linear):
            expected = (out, module.in_features, 1, 1)
        elif isinstance(module, Conv1D):
            expected = (1, module.nx, module.nf, 1)
        elif isinstance(module, (torch.nn.Conv1d, torch.nn.Conv2d)):
            expected = (out, rest[0], 1, module.weight[0, 0].numel())
        else:
            continue
        found = layouts.of(entry)
        assert (found.outer, found.inputs, found.columns, found.kernel) == expected, path
        num_seen += 1
    assert num_seen or family in ("vit", "clip", "siglip")  # these are renamed


@pytest.mark.parametrize("family", FUSED)
def test_layouts_of_fused_experts(saved, family):
    checkpoint = open_checkpoint(saved(family))
    fused = [each for each in checkpoint.tensors if len(each.shape) == 3]
    for entry in fused:
        experts, rows, columns = entry.shape
        expected = (experts, rows, columns, 1) if FUSED[family] else (experts * rows, columns, 1, 1)
        found = Layouts(checkpoint).of(entry)
        assert (found.outer, found.inputs, found.columns, found.kernel) == expected, entry.name
    assert len(fused) == 4, [each.name for each in fused]


@pytest.mark.parametrize("family", every(4, FAMILIES))
def test_a_ranking_of_all_is_that_of_the_oracle(saved, tmp_path, family):
    """Byte by byte, whatever the names, shapes and ties of a checkpoint."""
    source = saved(family)
    made = plan(source, raw_recipe(0.5))
    prune(made, tmp_path / "out")
    masks = file_oracle.masks(
        load(source), [each.entry.name for each in made.tensors], sparsity=0.5
    )
    file_oracle.check(source, tmp_path / "out", masks, load)
    assert verify(tmp_path / "out", source).problems == ()


# What select takes of a live model is what the command line prunes in its checkpoint.


pytest.importorskip("transformers")


def names(selected):
    return [parameter.fqn for parameter in selected]


def check_like_files(model, folder):
    """The tensors in files that are zero, when those of the model are, are those of the files."""
    with torch.no_grad():
        for parameter in model.parameters():
            nn.init.normal_(parameter)
        for buffer in model.buffers():
            buffer.fill_(1)
        for module, name in distprune.select(model):
            getattr(module, name).zero_()
    model.save_pretrained(folder)
    verdicts, _ = select_tensors(open_checkpoint(folder), raw_recipe(sparsity=0.5))
    weights = load_file(folder / "model.safetensors")
    zero = {name for name, weight in weights.items() if weight.ndim > 1 and not weight.any()}
    assert zero == {entry.name for entry, _, reason in verdicts if not reason}


@pytest.mark.parametrize("family", every(2, FAMILIES))
def test_families(family, tmp_path):
    check_like_files(tiny_model(family), tmp_path)


SELECTS = {
    "default": {},
    "also": {"also": "lm_head", "exclude": "*.layers.1.*"},
    "include": {"include": ["*.self_attn.*", "*norm"]},
    "vectors": {"include": ["*.mlp.*", "*norm"], "min_ndim": 1},
    "vectors by default": {"min_ndim": 1},
}


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("select", SELECTS)
def test_a_recipe_selects_the_same_of_a_model_and_its_files(family, select, tmp_path):
    mapping = {"sparsity": 0.5, **SELECTS[select]}
    recipe = Recipe(**mapping)
    model = tiny_model(family)
    model.save_pretrained(tmp_path)
    found, _ = select_tensors(open_checkpoint(tmp_path), Recipe(**mapping))
    entries = {entry.name for entry, _, reason in found if not reason}
    assert entries and set(names(ScheduledPruner.from_recipe(model, recipe).parameters)) == entries
