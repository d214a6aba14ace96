"""The matrices of a live model are those that the command line selects in its files."""

import pytest
import torch
from safetensors.torch import load_file

import distprune as prune
from distprune.files.checkpoints.checkpoint import open_checkpoint
from distprune.files.recipe import FileRecipe
from distprune.files.selecting.policy import select_tensors
from distprune.language_models import select_matrices
from helpers.tiny_transformers import FAMILIES, tiny_model

pytest.importorskip("transformers")


@pytest.mark.parametrize("family", FAMILIES)
def test_files_and_models_have_the_same_selection(family, tmp_path):
    """The tensors in files that are zero, when those of the model are, are those of the files."""
    model = tiny_model(family)
    with torch.no_grad():
        for module, name in select_matrices(model):
            getattr(module, name).zero_()
    model.save_pretrained(tmp_path)
    verdicts = select_tensors(open_checkpoint(tmp_path), FileRecipe(sparsity=0.5))
    weights = load_file(tmp_path / "model.safetensors")
    zero = {name for name, weight in weights.items() if weight.ndim > 1 and not weight.any()}
    assert zero == {verdict.entry.name for verdict in verdicts if verdict.is_pruned}


def test_experts_are_selected_and_routers_are_not():
    selected = [parameter.fqn for parameter in select_matrices(tiny_model("mixtral"))]
    names = [f"self_attn.{name}_proj.weight" for name in "qkvo"]
    names += ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    layers = {fqn.removeprefix("model.layers.0.") for fqn in selected if "layers.0." in fqn}
    assert layers == set(names) and len(selected) == 12


def test_patterns_replace_the_default():
    model = tiny_model("mixtral")
    only = select_matrices(model, include="*gate.weight", exclude="model.layers.1.*")
    assert [parameter.fqn for parameter in only] == ["model.layers.0.mlp.gate.weight"]
    with pytest.raises(ValueError, match="'nonsense' match no parameter"):
        select_matrices(model, exclude="nonsense")
    with pytest.raises(ValueError, match="nothing is selected in this MixtralForCausalLM"):
        select_matrices(model, exclude=["*self_attn*", "*experts*"])


def test_pruned_parameters_are_selected_as_before():
    model = tiny_model("mixtral")
    selected = select_matrices(model)
    prune.global_unstructured(selected, prune.L1Unstructured, amount=0.5)
    assert select_matrices(model) == selected
