"""A conversion may only move the elements of a mask; any other is refused by name."""

import shutil

import pytest
import renamed_families
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from transformers import core_model_loading as loading

import distprune as prune
from distprune._transformers import MOVING_OPERATIONS
from distprune.files import planning, pruning
from helpers.recipes import raw_recipe

# Of one family each, since transformers 5.24: they compute new values, drop rows, or move what is
# no matrix.
REFUSED = {"Inkling2LoopDequantizeExperts", "Inkling2LoopMergeMessageQueries", "Inkling2UnpadVocab"}


def test_every_operation_of_transformers_is_known():
    """One that is new there is refused until somebody has looked at it."""
    operations = {
        name
        for name, value in vars(loading).items()
        if isinstance(value, type) and issubclass(value, loading.ConversionOps)
    }
    assert operations - MOVING_OPERATIONS - REFUSED == {"ConversionOps", "_IdentityOp"}


class AddOne(loading.ConversionOps):
    """As a checkpoint format has it whose norms lie around zero."""

    def convert(self, input_dict, source_patterns, target_patterns, **kwargs):
        return {target_patterns[0]: next(iter(input_dict.values()))[0] + 1}


@pytest.fixture
def folder(tmp_path):
    source = renamed_families.save("llama", tmp_path / "source")
    recipe = raw_recipe(0.5, include=("*.weight",))
    pruning.prune(planning.plan(source, recipe), tmp_path / "pruned")
    return tmp_path / "pruned"


def test_a_computing_conversion_is_refused_by_name(folder):
    model = hf.LlamaForCausalLM.from_pretrained(folder)
    model._weight_conversions = [
        loading.WeightConverter("mlp.up_proj.weight", "mlp.up_proj.weight", [AddOne()])
    ]
    message = r"model.layers.1.mlp.up_proj.weight \(transformers makes .* of it by AddOne"
    with pytest.raises(ValueError, match=message):
        prune.load_masks(model, folder)
    assert not prune.is_pruned(model)
    report = prune.load_masks(model, folder, strict=False)
    refused = {f"model.layers.{layer}.mlp.up_proj.weight" for layer in (0, 1)}
    assert set(report.unexpected_keys) == refused == set(report.missing_keys)


def renamed(folder, target, old, new):
    """A checkpoint with other names in its files."""
    state = {n.replace(old, new): t for n, t in load_file(folder / "model.safetensors").items()}
    shutil.copytree(folder, target)
    save_file(state, target / "model.safetensors", metadata={"format": "pt"})
    return target


def masks_of(model):
    return {n.removesuffix("_mask"): m.bool() for n, m in model.named_buffers() if "_mask" in n}


def test_a_renaming_of_the_user_and_two_masks_for_one_parameter(tmp_path):
    """transformers loads the first of two such tensors; so the second one's mask is for nobody."""
    source = renamed_families.save("llama", tmp_path / "source")
    state = load_file(source / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    state["model.layers.0.ffn.up_proj.weight"] = state[name].flip(0).contiguous()
    down = "model.layers.1.mlp.down_proj.weight"
    state["model.layers.1.ffn.down_proj.weight"] = state.pop(down)
    save_file(state, source / "model.safetensors", metadata={"format": "pt"})
    pruning.prune(planning.plan(source, raw_recipe(0.5)), tmp_path / "pruned")
    mapping = {r"\.ffn\.": ".mlp."}
    model = hf.LlamaForCausalLM.from_pretrained(tmp_path / "pruned", key_mapping=mapping)
    zeros = {each: model.get_parameter(each).detach() == 0 for each in (name, down)}
    message = f"{name} has the mask model.layers.0.ffn.up_proj.weight"
    with pytest.raises(ValueError, match=message):
        prune.load_masks(model, tmp_path / "pruned")
    report = prune.load_masks(model, tmp_path / "pruned", strict=False)
    assert report.unexpected_keys == (name,)
    assert all(torch.equal(~masks_of(model)[each], zero) for each, zero in zeros.items())


def test_a_renaming_that_depends_on_a_tensor_without_a_mask(tmp_path):
    """Old files have "a" and "gate" for "gate" and "up": "a" tells them, and is not pruned."""
    source = renamed_families.save("llama", tmp_path / "new")
    source = renamed(source, tmp_path / "a", "gate_proj", "a_proj")
    source = renamed(source, tmp_path / "old", "up_proj", "gate_proj")
    recipe = raw_recipe(0.5, exclude=("*.a_proj.*",))
    pruning.prune(planning.plan(source, recipe), tmp_path / "pruned")
    model = renamed_families.make("llama")
    model._weight_conversions = [
        loading.GroupWeightRename(["mlp.a_proj", "mlp.gate_proj"], ["mlp.gate_proj", "mlp.up_proj"])
    ]
    prune.load_masks(model, tmp_path / "pruned")
    stored, masks = load_file(tmp_path / "pruned" / "model.safetensors"), masks_of(model)
    assert not any("gate_proj" in name for name in masks)
    for layer in ("model.layers.0", "model.layers.1"):
        expected = stored[f"{layer}.mlp.gate_proj.weight"] != 0
        assert torch.equal(masks[f"{layer}.mlp.up_proj.weight"], expected)


class ThereAndBack(AddOne):
    reverse_op = property(lambda self: self)


@pytest.mark.parametrize(
    ("operation", "message"),
    [(AddOne(), "has no reverse"), (ThereAndBack(), r"up_proj\.weight: transformers saves it by")],
)
def test_masks_that_cannot_be_saved_as_transformers_would(tmp_path, operation, message):
    model = renamed_families.make("llama")
    model._weight_conversions = [
        loading.WeightConverter("mlp.up_proj.weight", "mlp.up_proj.weight", [operation])
    ]
    prune.global_unstructured(
        prune.select(model, everything=True), prune.L1Unstructured, amount=0.5
    )
    with pytest.raises(NotImplementedError, match=f"{message}.*expected names='model'"):
        prune.save_masks(model, tmp_path)
    assert not list(tmp_path.iterdir())
    prune.save_masks(model, tmp_path, names="model")
    other = renamed_families.make("llama")
    prune.load_masks(other, tmp_path)
    assert all(torch.equal(mask, masks_of(model)[name]) for name, mask in masks_of(other).items())
