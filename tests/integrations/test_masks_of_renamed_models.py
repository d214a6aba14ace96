"""Masks of a checkpoint reach the model that transformers makes of it, whatever it renames."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from transformers import core_model_loading as loading
from transformers.modeling_layers import GradientCheckpointingLayer

import distprune as prune
from distprune._transformers import MOVING_OPERATIONS
from distprune.files import planning, pruning
from distprune.files.checkpoint import open_checkpoint
from distprune.files.mask_files import open_masks
from distprune.testing import run_ranks
from helpers.recipes import raw_recipe
from helpers.sampling import every

# Of one family each, since transformers 5.24: they compute new values, drop rows, or move what is
# no matrix.
REFUSED = {"Inkling2LoopDequantizeExperts", "Inkling2LoopMergeMessageQueries", "Inkling2UnpadVocab"}


SETTINGS = json.loads(Path(__file__).with_name("renamed_families.json").read_text())
# By family: the classes of the model and of its config, and the arguments of the latter.
FAMILIES = {
    family: (getattr(hf, model), getattr(hf, config), settings)
    for family, (model, config, settings) in SETTINGS.items()
}


def make(family: str, **changes) -> nn.Module:
    """A model of a family without any zero among its weights."""
    cls, config, settings = FAMILIES[family]
    model = cls(config(**{**settings, **changes}))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
            parameter[parameter == 0] = 1
    return model


def save(family: str, folder, **changes):
    """Write a checkpoint as transformers does."""
    make(family, **changes).save_pretrained(folder)
    return folder


# Everything that has a dimension, so that nothing is spared by the default selection.
EVERYTHING = raw_recipe(0.5, include=("*",), min_ndim=1)
# Matrices alone, and not all of them: some tensors that are merged have no mask.
SOME = raw_recipe(0.5, include=("*",), exclude=("re:.*(experts.1.|.q_|query|layers.0.|h.0.).*",))


@pytest.fixture
def pruned(tmp_path):
    """Save a family's model, prune the files, and give the folder."""

    def make(family, recipe=EVERYTHING, **changes):
        source = save(family, tmp_path / "source", **changes)
        pruning.prune(planning.plan(source, recipe), tmp_path / "pruned")
        return tmp_path / "pruned"

    return make


def masks_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n.removesuffix("_mask"): m.bool() for n, m in model.named_buffers() if "_mask" in n}


def is_masked_where_zero(model: nn.Module, zeros: dict[str, torch.Tensor]) -> list[str]:
    """What differs between the masks of a model and the zeros of weights, by name."""
    masks, wrong = masks_of(model), []
    for name, zero in zeros.items():
        keep = masks.pop(name, None)
        if keep is None:
            wrong += [f"{name} has no mask"] * bool(zero.any())
        elif not torch.equal(~keep, zero):
            wrong.append(f"{name} is masked elsewhere")
    return wrong + [f"{name}: a mask that nobody expects" for name in masks]


def zeros_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach() == 0 for name, value in model.named_parameters()}


@pytest.mark.parametrize("recipe", [EVERYTHING, SOME], ids=["everything", "some"])
@pytest.mark.parametrize("family", every(2, FAMILIES))
def test_masks_are_the_zeros_that_transformers_loads(pruned, family, recipe):
    folder = pruned(family, recipe)
    cls = FAMILIES[family][0]
    model, dense = cls.from_pretrained(folder), make(family)
    zeros = zeros_of(model)
    weights = {name: value.clone() for name, value in model.named_parameters()}
    report = prune.load_masks(model, folder)
    assert not is_masked_where_zero(model, zeros)
    # On other weights than those in the folder the product is theirs, and zero in these places.
    prune.load_masks(dense, folder)
    for name in masks_of(dense):
        path, _, parameter = name.rpartition(".")
        module = dense.get_submodule(path)
        module._forward_pre_hooks and [h(module, ()) for h in module._forward_pre_hooks.values()]
        assert torch.equal(getattr(module, parameter).detach(), weights[name]), name
    assert report.num_pruned == sum(int(zero.sum()) for zero in zeros.values())
    assert not report.unexpected_keys and not report.mismatched_keys


BASES = {
    "bert": (hf.BertModel, {"classifier.weight", "classifier.bias"}),
    "llama": (hf.LlamaModel, {"lm_head.weight"}),
    "mixtral": (hf.MixtralModel, {"lm_head.weight"}),
    "gpt2": (hf.GPT2Model, set()),
}


@pytest.mark.parametrize("family", BASES)
def test_a_base_model_has_a_prefix_less_and_one_with_a_head_a_prefix_more(pruned, tmp_path, family):
    folder, (base, rest) = pruned(family), BASES[family]
    model = base.from_pretrained(folder)
    zeros = zeros_of(model)
    if rest:
        with pytest.raises(ValueError, match="strict=False, which loads the others") as raised:
            prune.load_masks(model, folder)
        assert all(name in str(raised.value) for name in rest)
        assert not prune.is_pruned(model)
    report = prune.load_masks(model, folder, strict=False)
    assert set(report.unexpected_keys) == rest
    assert not is_masked_where_zero(model, zeros)

    make(family).base_model.save_pretrained(tmp_path / "base")
    pruning.prune(planning.plan(tmp_path / "base", EVERYTHING), tmp_path / "pruned_base")
    model = FAMILIES[family][0].from_pretrained(tmp_path / "pruned_base")
    zeros = {f"{model.base_model_prefix}.{n}": z for n, z in zeros_of(model.base_model).items()}
    assert not prune.load_masks(model, tmp_path / "pruned_base").unexpected_keys
    assert not is_masked_where_zero(model, zeros)


def test_experts_that_are_transposed_on_loading(tmp_path):
    """The same checkpoint as it was written before: experts as [experts, inputs, outputs]."""
    source = save("qwen3_vl_moe", tmp_path / "source")
    state = load_file(source / "model.safetensors")
    names = [name for name in state if ".experts." in name]
    state |= {name: state[name].transpose(1, 2).contiguous() for name in names}
    save_file(state, source / "model.safetensors", metadata={"format": "pt"})
    pruning.prune(planning.plan(source, EVERYTHING), tmp_path / "pruned")
    model = hf.Qwen3VLMoeForConditionalGeneration.from_pretrained(tmp_path / "pruned")
    zeros = zeros_of(model)
    prune.load_masks(model, tmp_path / "pruned")
    assert names and not is_masked_where_zero(model, zeros)


def test_a_head_of_another_size_is_reported(pruned):
    folder = pruned("bert", num_labels=5)
    model = hf.BertForSequenceClassification.from_pretrained(
        folder, num_labels=3, ignore_mismatched_sizes=True
    )
    text = r"classifier.weight has shape \(3, 8\); its mask has \(5, 8\)"
    with pytest.raises(ValueError, match=text):
        prune.load_masks(model, folder)
    report = prune.load_masks(model, folder, strict=False)
    assert set(report.mismatched_keys) == {"classifier.weight", "classifier.bias"}
    assert "classifier.weight" in report.missing_keys


def wrap(model: nn.Module, kind: str) -> nn.Module:
    if kind == "fsdp1":
        return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    for module in list(model.modules()):
        if isinstance(module, GradientCheckpointingLayer):
            fully_shard(module)
    return fully_shard(model)


def sharded_masks(family: str, wrapping: str, folder: str) -> dict[str, np.ndarray]:
    """All masks, whole."""
    model = wrap(FAMILIES[family][0].from_pretrained(folder), wrapping)
    prune.load_masks(model, folder)
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    return {n.removesuffix("_mask"): m.bool().numpy() for n, m in state.items() if "_mask" in n}


@pytest.mark.parametrize("wrapping", ["fsdp2", "fsdp1"])
@pytest.mark.parametrize("family", ["mixtral", "nomic_bert"])
def test_sharded_models_get_the_same(pruned, family, wrapping):
    folder = pruned(family, SOME)
    zeros = zeros_of(FAMILIES[family][0].from_pretrained(folder))
    zeros = {name: zero.numpy() for name, zero in zeros.items() if zero.any()}
    for masks in run_ranks(sharded_masks, 2, family, wrapping, str(folder)):
        assert masks.keys() == zeros.keys()
        assert all(np.array_equal(~masks[name], zero) for name, zero in zeros.items())


def everything_of(model: nn.Module) -> list:
    names = {name.rpartition(".")[2] for name, _ in model.named_parameters()}
    return prune.select(model, include="*", names=sorted(names), everything=True)


def save_live(family: str, source: str, folder: str, wrapping: str = "plain") -> None:
    """Prune a loaded model, and save its masks."""
    model = FAMILIES[family][0].from_pretrained(source)
    model = wrap(model, wrapping) if wrapping != "plain" else model
    pairs = everything_of(model)
    # Some parameters of those that are saved together have no mask.
    pairs = [pair for which, pair in enumerate(pairs) if which % 5]
    prune.global_unstructured(pairs, prune.L1Unstructured, amount=0.5)
    prune.save_masks(model, folder)


@pytest.mark.parametrize("family", every(2, FAMILIES, 1))
def test_masks_of_a_live_model_are_for_its_checkpoint(tmp_path, family):
    """``distprune apply`` takes them; and the pruned files are what the live model was."""
    source, cls = tmp_path / "source", FAMILIES[family][0]
    save(family, source)
    save_live(family, source, tmp_path / "masks")
    pruning.apply(tmp_path / "masks", open_checkpoint(source), tmp_path / "pruned")
    model, other = cls.from_pretrained(tmp_path / "pruned"), cls.from_pretrained(source)
    zeros = zeros_of(model)
    assert any(zero.any() for zero in zeros.values())
    for folder in ("masks", "pruned"):
        prune.load_masks(other, tmp_path / folder)
        assert not is_masked_where_zero(other, zeros)


@pytest.mark.parametrize("family", ["mixtral", "nomic_bert"])
def test_a_sharded_model_saves_the_same_bytes(tmp_path, family):
    save(family, tmp_path / "source")
    save_live(family, tmp_path / "source", tmp_path / "masks")
    folder = tmp_path / "sharded"
    run_ranks(save_live, 2, family, str(tmp_path / "source"), str(folder), "fsdp2")
    file = "distprune/masks.safetensors"
    assert (tmp_path / "masks" / file).read_bytes() == (folder / file).read_bytes()


# A conversion may only move the elements of a mask; any other is refused by name.


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


def test_a_computing_conversion_is_refused_by_name(pruned):
    folder = pruned("llama", raw_recipe(0.5, include=("*.weight",)))
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


def test_a_renaming_of_the_user_and_two_masks_for_one_parameter(tmp_path):
    """transformers loads the first of two such tensors; so the second one's mask is for nobody."""
    source = save("llama", tmp_path / "source")
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


class ThereAndBack(AddOne):
    reverse_op = property(lambda self: self)


@pytest.mark.parametrize(
    ("operation", "message"),
    [(AddOne(), "has no reverse"), (ThereAndBack(), r"up_proj\.weight: transformers saves it by")],
)
def test_masks_that_cannot_be_saved_as_transformers_would(tmp_path, operation, message):
    model = make("llama")
    model._weight_conversions = [
        loading.WeightConverter("mlp.up_proj.weight", "mlp.up_proj.weight", [operation])
    ]
    prune.global_unstructured(
        prune.select(model, everything=True), prune.L1Unstructured, amount=0.5
    )
    with pytest.raises(NotImplementedError, match=f"{message}.*expected names='model'"):
        prune.save_masks(model, tmp_path)
    with pytest.raises(ValueError, match="names='files'; expected 'checkpoint' or 'model'"):
        prune.save_masks(model, tmp_path, names="files")
    assert not list(tmp_path.iterdir())
    prune.save_masks(model, tmp_path, names="model")
    assert set(open_masks(tmp_path).shapes) == set(masks_of(model))
    other = make("llama")
    prune.load_masks(other, tmp_path)
    assert all(torch.equal(mask, masks_of(model)[name]) for name, mask in masks_of(other).items())
