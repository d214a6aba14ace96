"""Files and live models are normalised by one rule: their masks are equal, bit for bit."""

import itertools

import pytest
import torch
from test_meets_the_library import masks_of
from torch import nn
from torch.distributed.fsdp import fully_shard

import distprune
from distprune.files import planning, pruning
from distprune.files.errors import CheckpointError
from distprune.files.recipe import FileRecipe
from distprune.recipe import parse_recipe
from distprune.testing import run_ranks
from helpers import tiny_checkpoints
from helpers.small_work_units import small_chunks, small_units

WIDTHS = [7, 12, 16, 9, 24, 5]


def make_model(dtype, *, ties):
    """Layers of different scales."""
    torch.manual_seed(0)
    sizes = itertools.pairwise(WIDTHS)
    model = nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(*size) for size in sizes)})
    for which, layer in enumerate(model["layers"]):
        values = torch.randn_like(layer.weight) * 4
        values = (values.round() if ties else values) * 3.0 ** (2 - which)
        mixed = torch.float32 if which % 2 else torch.bfloat16
        layer.weight = nn.Parameter(values.to(mixed if dtype == "mixed" else dtype))
    return model


def masks_of_model(dtype, ties, calls, is_sharded=False):
    """In the library, plain or under FSDP2: the whole masks of each call, by name."""
    found = []
    for keywords in calls:
        model = make_model(dtype, ties=ties)
        if is_sharded:
            for layer in model["layers"]:
                fully_shard(layer)
        parameters = distprune.select(model)
        distprune.global_unstructured(parameters, distprune.L1Unstructured, **keywords)
        masks = {pair.fqn: pair[0].weight_mask for pair in parameters}
        whole = {n: m.full_tensor() if is_sharded else m for n, m in masks.items()}
        found.append({name: mask.bool() for name, mask in whole.items()})
    return found


CALLS = [
    {"amount": 0.4, "normalize": "rms"},
    {"amount": 0.55, "normalize": "l2"},
    {"amount": 0.7, "normalize": "mean"},
    {"amount": 0.5, "normalize": None},
    {"amount": 0.5, "normalize": "rms", "min_sparsity": 0.45, "max_sparsity": 0.6},
]


@small_units(num_elements=44)
def prune_files(source, folder, calls, chunk):
    """On every rank."""
    with pytest.MonkeyPatch.context() as patch:
        small_chunks(patch, chunk)
        for number, keywords in enumerate(calls):
            others = {name: value for name, value in keywords.items() if name != "amount"}
            recipe = FileRecipe(keywords["amount"], **others)
            plan = pruning.plan_together(source, recipe)
            pruning.prune(plan, folder / str(number))


def check(source, folder, wanted, ranks, chunk):
    folder.mkdir()
    run_ranks(prune_files, ranks, source, folder, CALLS, chunk)
    for number, masks in enumerate(wanted):
        found = masks_of(folder / str(number))
        assert found.keys() == masks.keys()
        assert all(found[name].equal(keep) for name, keep in masks.items()), CALLS[number]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, "mixed"])
@pytest.mark.parametrize("ties", [True, False])
def test_masks_of_the_model_and_of_its_checkpoint(tmp_path, dtype, ties):
    model = make_model(dtype, ties=ties)
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    source = tiny_checkpoints.save(tmp_path / "source", state)
    wanted = masks_of_model(dtype, ties, CALLS)
    check(source, tmp_path / "one", wanted, 1, chunk=1 << 19)
    check(source, tmp_path / "two", wanted, 2, chunk=24)


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("ties", [True, False])
def test_masks_of_a_sharded_model_are_those_of_the_model(dtype, ties):
    """And so those of its checkpoint."""
    wanted = masks_of_model(dtype, ties, CALLS)
    for sharded in run_ranks(masks_of_model, 2, dtype, ties, CALLS, True):
        for masks, whole in zip(sharded, wanted, strict=True):
            assert masks.keys() == whole.keys()
            assert all(masks[name].equal(keep) for name, keep in whole.items())


@pytest.mark.parametrize("version", [1, 2])
def test_one_recipe_for_a_model_and_its_checkpoint(tmp_path, version):
    """Version 1 ranks raw magnitudes, as it did before there was another version."""
    mapping = {"version": version, "sparsity": 0.5, "select": {"include": "layers.[0-3]*"}}
    model = make_model(torch.float32, ties=False)
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    source = tiny_checkpoints.save(tmp_path / "source", state)
    recipe = FileRecipe.parse(mapping)
    assert recipe.normalize == (None if version == 1 else "rms")
    report = pruning.prune(planning.plan(source, recipe), tmp_path / "target")
    parse_recipe(mapping).pruner(model).step()
    wanted = {
        f"{name}.weight": module.weight_mask.bool()
        for name, module in model.named_modules()
        if hasattr(module, "weight_mask")
    }
    found = masks_of(tmp_path / "target")
    assert found.keys() == wanted.keys() and len(found) == 4
    assert all(found[name].equal(keep) for name, keep in wanted.items())
    sparsities = [tensor.sparsity for tensor in report.tensors]
    assert (max(sparsities) > 0.9) == (version == 1)


@pytest.mark.parametrize("normalize", ["rms", "l2", "mean"])
@pytest.mark.parametrize(
    ("dtype", "exponent"),
    [
        (torch.float32, -149),  # 1 / rms is above the largest float32
        (torch.float32, 124),  # 1 / norm is a denormal float32
        (torch.bfloat16, -133),
        (torch.float64, -1000),
    ],
)
def test_multiples_of_one_another_are_pruned_alike(tmp_path, dtype, exponent, normalize):
    torch.manual_seed(0)
    values = (torch.randperm(12) + 1).view(3, 4).double()
    weights = {"a.weight": values.to(dtype), "b.weight": (values * 2.0**exponent).to(dtype)}
    model = nn.ModuleDict({name: nn.Linear(4, 3, dtype=dtype) for name in "ab"})
    for name, layer in model.items():
        layer.weight = nn.Parameter(weights[f"{name}.weight"].clone())
    distprune.global_unstructured(
        distprune.select(model), distprune.L1Unstructured, amount=0.5, normalize=normalize
    )
    source = tiny_checkpoints.save(tmp_path / "source", weights)
    pruning.prune(planning.plan(source, FileRecipe(0.5, normalize=normalize)), tmp_path / "target")
    found = masks_of(tmp_path / "target")
    for name, layer in model.items():
        assert torch.equal(layer.weight_mask.bool(), values > 6)
        assert torch.equal(found[f"{name}.weight"], values > 6)


@pytest.mark.parametrize("value", [2.0**-1060, 1.5e308])
def test_fp64_that_cannot_be_divided_exactly_is_refused_by_name(tmp_path, value):
    weight = torch.full((3, 4), value, dtype=torch.float64)
    model = nn.Sequential(nn.Linear(4, 3, dtype=torch.float64))
    model[0].weight = nn.Parameter(weight.clone())
    text = r"0\.weight: normalize='l2' would divide its scores by (inf|[\d.]+e-3\d\d); expected"
    with pytest.raises(ValueError, match=text):
        distprune.global_unstructured(
            distprune.select(model), distprune.L1Unstructured, amount=0.5, normalize="l2"
        )
    assert not hasattr(model[0], "weight_mask")
    source = tiny_checkpoints.save(tmp_path / "source", {"0.weight": weight})
    with pytest.raises(CheckpointError, match=text):
        pruning.prune(planning.plan(source, FileRecipe(0.5, normalize="l2")), tmp_path / "target")
