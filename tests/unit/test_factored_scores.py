"""Scores that are computed from values and factors: the same in any chunks, layout and order."""

import itertools
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import distprune as prune
from distprune.base.memory import Scratch
from distprune.ranking.scores import FactorScores, Runs
from distprune.shards.geometry import index_map
from distprune.shards.shard import Shard
from helpers.virtual_ranks import shards_of

SHAPES = [(7,), (5, 6), (6, 1), (1, 6), (4, 3, 2, 2), (3, 1, 4), (4, 3, 5), (1, 3, 5)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


def factors_for(shape, number, generator):
    """Some terms of one to three factors, each dimension broadcast or not."""
    terms = []
    for _ in range(1 + number % 3):
        sizes = [
            [size if generator.random() < 0.5 else 1 for size in shape]
            for _ in range(generator.choice([1, 1, 2, 3]))
        ]
        terms.append([torch.rand(size, dtype=torch.float64) + 0.5 for size in sizes])
    return prune.FactoredScores(terms)


def dense(values, factored):
    """The formula on whole tensors; a term's factors multiply from left to right."""
    dtype = torch.promote_types(values.dtype, torch.float32)
    total = 0.0
    for term in factored.terms:
        product = torch.ones((), dtype=torch.float64)
        for factor in term:
            product = product * factor
        total = total + product
    return (values.double().abs() * total).to(dtype)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(SHAPES), st.sampled_from(DTYPES), st.integers(0, 10**6))
def test_chunks_of_any_shard_have_the_scores_of_the_formula(shape, dtype, seed):
    generator = random.Random(seed)
    torch.manual_seed(seed)
    values = torch.randn(shape).to(dtype)
    factored = factors_for(shape, seed, generator)
    expected = dense(values, factored).flatten()
    memory_dims = generator.sample(range(len(shape)), len(shape))
    for shard in shards_of(values, memory_dims, generator):
        size = shard.values.numel()
        source = FactorScores.of_shard(shard, factored, are_signed=True)
        scratch, chunks = Scratch(), []
        cuts = sorted({0, size, *(generator.randrange(size + 1) for _ in range(3))})
        for start, stop in itertools.pairwise(cuts):
            chunks.append(source.load(start, stop, scratch).clone())
        scores = torch.cat(chunks) if chunks else torch.empty(0, dtype=expected.dtype)
        positions = shard.index(torch.arange(size))
        torch.testing.assert_close(scores, expected[positions], rtol=1e-6, atol=0)
        whole = FactorScores.of_shard(shard, factored, are_signed=True).load(0, size)
        assert torch.equal(scores, whole)
        # The order of |score| alone needs no |w|; samples are the same numbers.
        unsigned = FactorScores.of_shard(shard, factored, are_signed=False)
        assert torch.equal(unsigned.load(0, size).abs(), whole.abs())
        runs = Runs(0, size, 1, torch.arange(size))
        assert torch.equal(source.gather(runs), whole)
        assert torch.equal(unsigned.gather(runs).abs(), whole.abs())


@pytest.mark.parametrize(
    "terms, error, message",
    [
        ([], ValueError, "is empty"),
        ([[]], ValueError, "without factors"),
        ([[torch.ones(1, 3, dtype=torch.int64)]], TypeError, r"terms\[0\].*int64"),
        ([[2.0]], TypeError, r"terms\[0\].*float"),
    ],
)
def test_terms_are_checked(terms, error, message):
    with pytest.raises(error, match=message):
        prune.FactoredScores(terms)


@pytest.mark.parametrize("shape", [(3,), (1, 4), (3, 2, 1)])
def test_a_factor_of_another_shape_is_named(shape):
    layer = torch.nn.Linear(3, 2)
    scores = {(layer, "weight"): prune.FactoredScores([[torch.ones(shape)]])}
    with pytest.raises(ValueError, match=r"Linear.weight.*factor of shape .*expected 2 dimensions"):
        prune.global_unstructured(
            [(layer, "weight")], prune.L1Unstructured, importance_scores=scores, amount=1
        )
    assert not prune.is_pruned(layer)


def test_methods_that_do_not_rank_in_chunks_get_a_tensor():
    class Threshold(prune.BasePruningMethod):
        PRUNING_TYPE = "unstructured"
        DISTRIBUTED = "elementwise"

        def compute_mask(self, t, default_mask):
            return default_mask * (t > 1.0)

    layer = torch.nn.Linear(3, 2)
    weight = layer.weight.detach().clone()
    factor = torch.tensor([[1.0, 10.0, 100.0]])
    scores = {(layer, "weight"): prune.FactoredScores([[factor]])}
    prune.global_unstructured([(layer, "weight")], Threshold, importance_scores=scores)
    assert torch.equal(layer.weight_mask, (weight.abs() * factor > 1.0).float())


@pytest.mark.parametrize("normalize", ["rms", "l2", "mean"])
def test_scores_of_pruned_elements_are_not_in_a_norm(normalize):
    first, second = torch.nn.Linear(4, 1), torch.nn.Linear(4, 1)
    prune.custom_from_mask(first, "weight", torch.tensor([[0, 1, 1, 1]]))
    given = [(first, [1000.0, 3, 3, 3]), (second, [1.0, 2, 10, 10])]
    scores = {(layer, "weight"): torch.tensor([row]) for layer, row in given}
    prune.global_unstructured(scores, prune.L1Unstructured, scores, amount=2, normalize=normalize)
    assert [layer.weight_mask.tolist() for layer, _ in given] == [[[0, 1, 1, 1]], [[0, 0, 1, 1]]]


@pytest.mark.parametrize("normalize", ["rms", "mean", None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_operations_of_other_devices_give_the_same_masks(monkeypatch, normalize, dtype):
    """On a GPU, where these operations run, nothing is computed by numpy."""

    def masks():
        torch.manual_seed(0)
        layers = [torch.nn.Linear(30, 20).to(dtype), torch.nn.Conv2d(4, 6, 3).to(dtype)]
        places = [(layer, name) for layer in layers for name in ("weight", "bias")]
        scores = {
            (layers[0], "weight"): prune.FactoredScores(
                [[torch.rand(20, 1), torch.rand(1, 30)], [torch.rand(1, 30)]]
            ),
            (layers[1], "weight"): prune.FactoredScores([[torch.rand(1, 4, 3, 3)]]),
        }
        for amount in (0.3, 0.5):  # the second one has masks in force
            prune.global_unstructured(
                places, prune.L1Unstructured, scores, amount=amount, normalize=normalize
            )
        return [getattr(layer, f"{name}_mask").clone() for layer, name in places]

    expected = masks()
    monkeypatch.setattr("distprune.base.memory.takes_numpy", lambda device: False)
    assert all(map(torch.equal, masks(), expected))
    assert not all(mask.all() for mask in expected)


@pytest.mark.parametrize("experts", [range(8), range(3, 7), range(2, 3)])
@pytest.mark.parametrize("sizes", [(8, 1, 5), (8, 7, 1)])
def test_factors_of_fused_experts_stay_small(experts, sizes):
    """A number for each input of each expert is not spread over its outputs."""
    shape = torch.Size((8, 7, 5))
    coordinates = (experts, range(7), range(5))
    part = torch.ones(len(experts), 7, 5)
    index = index_map(shape, coordinates, (0, 1, 2))
    shard = Shard("w", part, part, None, shape, index)
    factor = torch.rand(sizes)
    source = FactorScores.of_shard(shard, prune.FactoredScores([[factor]]), are_signed=False)
    held = [each.numel() for term in source._make_terms() for each in term]
    assert held == [factor[experts.start : experts.stop].numel()]
    expected = factor[experts.start : experts.stop].expand(part.shape).flatten()
    assert torch.equal(source.load(0, part.numel()), expected)
