"""What select takes of a live model is what the command line prunes in its checkpoint."""

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import distprune as prune
from distprune.files.checkpoint import open_checkpoint
from distprune.files.selecting import select_tensors
from distprune.recipes import Recipe
from distprune.schedule import ScheduledPruner
from helpers.architecture_checkpoints import ARCHITECTURES
from helpers.recipes import raw_recipe
from helpers.sampling import every
from helpers.tiny_transformers import FAMILIES, tiny_model

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
        for module, name in prune.select(model):
            getattr(module, name).zero_()
    model.save_pretrained(folder)
    verdicts, _ = select_tensors(open_checkpoint(folder), raw_recipe(sparsity=0.5))
    weights = load_file(folder / "model.safetensors")
    zero = {name for name, weight in weights.items() if weight.ndim > 1 and not weight.any()}
    assert zero == {entry.name for entry, _, reason in verdicts if not reason}


@pytest.mark.parametrize("family", every(2, FAMILIES))
def test_families(family, tmp_path):
    check_like_files(tiny_model(family), tmp_path)


@pytest.mark.parametrize(
    "architecture", every(2, ARCHITECTURES, start=1), ids=lambda each: each.name
)
def test_architectures(architecture, tmp_path):
    check_like_files(architecture.model_of_its_class(), tmp_path)


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
