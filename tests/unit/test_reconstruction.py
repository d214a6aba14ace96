"""Least squares for kept weights in one process: against elimination, and exact cases."""

import random
import re
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import distprune as prune
from distprune.base.blocks import WeightLayout
from distprune.reconstruction import positions_of
from distprune.statistics import GramMatrices
from helpers.collecting import collected
from helpers.least_squares import gram_of, reconstructed
from helpers.virtual_ranks import shards_of


class Experts(nn.Module):
    """Three experts, each called with tokens of its own."""

    def __init__(self, is_transposed: bool) -> None:
        super().__init__()
        self.is_transposed = is_transposed
        self.weight = nn.Parameter(torch.randn((3, 4, 5) if is_transposed else (3, 5, 4)))

    def forward(self, x):
        matrices = self.weight if self.is_transposed else self.weight.mT
        return [x[number] @ matrices[number] for number in range(3)]


def pruned_layer(layer: nn.Module, x: torch.Tensor, amount: float = 0.5) -> tuple:
    """The layer, pruned at random; its Gram matrices, and its weight before."""
    grams = collected(GramMatrices([prune.NamedParameter(layer, "weight", "weight")]), layer, x)
    weight = layer.weight.detach().clone()
    torch.manual_seed(0)
    prune.random_unstructured(layer, "weight", amount)
    return grams, weight


@pytest.mark.parametrize("damping", [0, 1e-2, 10])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_rows_are_those_of_elimination(damping, dtype):
    torch.manual_seed(1)
    layer = nn.Linear(12, 5).to(dtype)
    x = torch.randn(200, 12).to(dtype)
    grams, weight = pruned_layer(layer, x)
    prune.reconstruct([(layer, "weight")], grams, damping=damping, steps=100)
    right = reconstructed(weight, layer.weight_mask, gram_of(x), damping)
    tolerance = {torch.bfloat16: 2**-8}.get(dtype, 1e-5)
    assert (layer.weight_orig - right).abs().max() <= tolerance * right.abs().max()


def test_a_rational_solution_is_exact():
    layer = nn.Linear(2, 2, bias=False)
    layer.weight.data = torch.tensor([[2.0, 4.0], [-1.0, 3.0]])
    x = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 1.0]])  # x^T x = [[2, 1], [1, 2]]
    grams = collected(GramMatrices([(layer, "weight")]), layer, x)
    prune.custom_from_mask(layer, "weight", torch.tensor([[1, 0], [0, 1]]))
    report = prune.reconstruct([(layer, "weight")], grams, damping=0)
    assert layer.weight_orig.tolist() == [[4.0, 0.0], [0.0, 2.5]]
    # |w0 X|^2 is 56 and 14; the errors of the mask alone are 32 and 2, and 24 and 1.5 remain.
    (entry,) = report.parameters
    assert entry.error_before == pytest.approx(34 / 70)
    assert entry.error_after == pytest.approx(25.5 / 70)


def test_a_weight_that_is_not_pruned_stays():
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    parameters = prune.select(net)
    grams = collected(GramMatrices(parameters), net, torch.randn(9, 4))
    prune.l1_unstructured(net[0], "weight", 0.5)
    weight = net[1].weight.detach().clone()
    report = prune.reconstruct(parameters, grams)
    assert torch.equal(net[1].weight, weight)
    assert [entry.num_pruned for entry in report.parameters] == [8, 0]
    assert "least squares, 15 steps" in str(report)


@pytest.mark.parametrize("is_transposed", [False, True])
def test_each_expert_has_its_own_matrix(is_transposed):
    torch.manual_seed(0)
    experts = Experts(is_transposed)
    x = torch.randn(3, 20, 4)
    grams, weight = pruned_layer(experts, x)
    prune.reconstruct([(experts, "weight")], grams, steps=50)
    for expert in range(3):
        matrices = weight[expert], experts.weight_mask[expert], experts.weight_orig[expert]
        old, keep, new = (m.T if is_transposed else m for m in matrices)
        assert torch.allclose(
            new.double(), reconstructed(old, keep, gram_of(x[expert]), 0.3), atol=1e-6
        )


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_a_convolution_has_a_matrix_of_each_group(groups, memory_format):
    torch.manual_seed(0)
    layer = nn.Conv2d(4, 6, 3, groups=groups).to(memory_format=memory_format)
    grams, weight = pruned_layer(layer, torch.randn(4, 4, 8, 8))
    matrices = grams.matrix(layer).view(groups, 36 // groups, -1)
    prune.reconstruct([(layer, "weight")], grams, steps=80)
    new, keep, old = (
        values.reshape(groups, 6 // groups, -1)
        for values in (layer.weight_orig, layer.weight_mask, weight)
    )
    for group in range(groups):
        right = reconstructed(old[group], keep[group], matrices[group], 0.3)
        assert torch.allclose(new[group].double(), right, atol=1e-6)


def test_a_singular_matrix_needs_damping():
    layer = nn.Linear(4, 2)
    grams, weight = pruned_layer(layer, torch.ones(3, 4))
    with pytest.raises(ValueError, match=r"weight: damping=0, and its Gram matrix is singular"):
        prune.reconstruct([(layer, "weight")], grams, damping=0)
    assert torch.equal(layer.weight_orig, weight)
    prune.reconstruct([(layer, "weight")], grams)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"damping": -1}, "damping=-1; expected a finite number >= 0"),
        ({"steps": 0}, "steps=0; expected a whole number >= 1"),
        ({"dtype": torch.float16}, "dtype=torch.float16; expected"),
    ],
)
def test_arguments_are_checked(keywords, message):
    layer = nn.Linear(4, 2)
    grams, _ = pruned_layer(layer, torch.ones(3, 4))
    with pytest.raises(ValueError, match=re.escape(message)):
        prune.reconstruct([(layer, "weight")], grams, **keywords)


def test_weights_that_overflow_are_refused_before_anything_changes():
    """Of four equal inputs two are kept: each weight has to become 120,000."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)).half()
    for parameter in net.parameters():
        parameter.data.fill_(60000.0 if len(parameter) == 1 else 0.0025)
    pairs = prune.select(net, everything=True, names="weight")
    grams = collected(GramMatrices(pairs), net, torch.ones(9, 4).half())
    for module in net:
        mask = torch.tensor([0, 0, 1, 1]).expand(len(module.weight), 4)
        prune.custom_from_mask(module, "weight", mask)
    before = [module.weight_orig.detach().clone() for module in net]
    with pytest.raises(ValueError, match=r"^1\.weight: .*not finite in torch.float16"):
        prune.reconstruct(pairs, grams)
    assert all(torch.equal(m.weight_orig, old) for m, old in zip(net, before, strict=True))


@pytest.mark.parametrize("damping", [1e-12, 0.01])
def test_no_row_moves_further_than_its_norm(damping):
    """With a Gram matrix of rank 1 and hardly any damping, rounding may lead anywhere."""
    torch.manual_seed(0)
    layer, direction = nn.Linear(16, 8), torch.randn(1, 16)
    grams, weight = pruned_layer(layer, torch.randn(5, 1) * direction)
    (entry,) = prune.reconstruct([(layer, "weight")], grams, damping=damping).parameters
    masked = weight * layer.weight_mask
    moved = (layer.weight_orig - masked).norm(dim=1)
    assert bool((moved <= weight.norm(dim=1)).all())
    assert entry.num_rows_unmoved == int((moved == 0).sum())
    assert entry.error_after <= entry.error_before * (1 + 1e-6)

    stretched = torch.cat([torch.ones(5, 1), torch.full((5, 3), 10.0)], 1)
    layer = nn.Linear(4, 2, bias=False)
    layer.weight.data = torch.tensor([[1.0, 1, 1, 1], [1, 0.01, 0, 0]])
    grams = collected(GramMatrices([(layer, "weight")]), layer, stretched)
    prune.custom_from_mask(layer, "weight", torch.tensor([[1, 0, 0, 0], [1, 0, 0, 0]]))
    report = prune.reconstruct([(layer, "weight")], grams, damping=damping)
    assert layer.weight[0].tolist() == [1, 0, 0, 0]  # 31 would be best
    assert 1.05 < layer.weight[1, 0].item() < 1.1 + 1e-6  # 1.1 is best, without damping
    assert report.parameters[0].num_rows_unmoved == 1
    assert "1 rows kept their weights" in str(report)


def test_a_weight_that_is_zero_stays_zero():
    """A 2:4 pattern prunes no more of blocks that have lost three elements already."""
    torch.manual_seed(0)
    layer, x = nn.Linear(16, 8), torch.randn(40, 16)
    layer.weight.data[torch.rand(8, 16) < 0.7] = 0
    weight, is_zero = layer.weight.detach().clone(), layer.weight == 0
    grams = collected(GramMatrices(pairs := prune.select(layer)), layer, x)
    prune.global_unstructured(pairs, prune.L1Unstructured, pattern="2:4")
    assert bool((layer.weight_mask.bool() & is_zero).any())
    prune.reconstruct(pairs, grams, steps=80)
    assert not bool(layer.weight[is_zero].any())
    right = reconstructed(weight, layer.weight_mask * ~is_zero, gram_of(x), 0.3)
    assert torch.allclose(layer.weight.double(), right, atol=1e-6)


@pytest.mark.parametrize("until", ["made", "pruned", "reconstructed"])
def test_parameters_made_in_inference_mode(until):
    with torch.inference_mode():
        layer = nn.Linear(4, 2)
    with torch.inference_mode(until != "made"):
        grams, _ = pruned_layer(layer, torch.randn(9, 4))
    with torch.inference_mode(until == "reconstructed"):
        (entry,) = prune.reconstruct([(layer, "weight")], grams).parameters
    assert 0 < entry.error_after < entry.error_before
    assert int((layer.weight_orig == 0).sum()) == 4


@pytest.mark.parametrize("listed", ["selected", "one of both"])
def test_a_weight_of_two_layers_is_moved_in_both(listed):
    """As the docstring says: of one that is pruned in some layers only, the others stay dense."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    net[1].weight = net[0].weight
    pairs = prune.select(net) if listed == "selected" else [(net[0], "weight")]
    before, grams = net[0].weight.detach().clone(), GramMatrices(pairs)
    collected(grams, net, torch.randn(9, 4))
    prune.global_unstructured(pairs, prune.L1Unstructured, amount=8)
    prune.reconstruct(pairs, grams)
    moved = net[0].weight_orig.detach()
    other = net[1].weight_orig if listed == "selected" else net[1].weight
    assert other.data_ptr() == moved.data_ptr() and not torch.equal(moved, before)
    assert int((moved == 0).sum()) == 8
    assert prune.is_pruned(net[1]) == (listed == "selected")


@pytest.mark.parametrize("damping", [0.01, 0])
def test_the_weight_has_a_graph_afterwards(damping):
    """Also after an error: programs may use the attribute without calling the layer."""
    layer = nn.Linear(4, 2)
    grams, _ = pruned_layer(layer, torch.ones(3, 4))
    with pytest.raises(ValueError, match="singular") if not damping else nullcontext():
        prune.reconstruct([(layer, "weight")], grams, damping=damping)
    assert torch.equal(layer.weight, layer.weight_orig * layer.weight_mask)
    layer.weight.sum().backward()
    assert torch.equal(layer.weight_orig.grad, layer.weight_mask)


LAYOUTS = [
    WeightLayout("linear", (5, 6)),
    WeightLayout("conv1d_of_transformers", (5, 6)),
    WeightLayout("convolution", (4, 3, 2, 2)),
    WeightLayout("convolution", (4, 3, 5), groups=2),
    WeightLayout("experts", (4, 3, 5)),
    WeightLayout("transposed_experts", (3, 1, 4)),
]


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(LAYOUTS), st.integers(0, 10**6))
def test_the_positions_of_rows_and_columns_on_any_shard(layout, seed):
    generator, shape = random.Random(seed), torch.Size(layout.shape)
    index = torch.arange(shape.numel()).view(shape)
    memory_dims = generator.sample(range(len(shape)), len(shape))
    by_row = (index.mT if layout.is_transposed else index).reshape(layout.num_outputs, -1)
    for shard in shards_of(index, memory_dims, generator):
        rows, columns = positions_of(shard, layout)
        at = rows.view(-1, 1) + columns
        is_here = (at >= 0) & (at < shard.values.numel())
        assert int(is_here.sum()) == shard.values.numel()
        assert torch.equal(shard.flat_values[at[is_here]], by_row[is_here])
