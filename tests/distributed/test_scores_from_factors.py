"""Factored scores and normalisations give the masks of one process, on every wrapping."""

import pytest
import torch

import distprune as prune
from distprune.testing import run_ranks
from helpers import reference, wrappings
from helpers.comparisons import assert_nothing_wrong_on, wrong_masks
from helpers.models import EVEN, Net, ShapesNet, fill, fqns, target
from helpers.normalization_reference import normalized

NORMALIZATIONS = ["rms", "l2", "mean", None]


def terms_for(shape, seed):
    """One to three terms with factors along the first and the last dimension."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.rand([shape[0], *[1] * (len(shape) - 1)], generator=generator) + 0.1
    columns = torch.rand([1, *shape[1:]], generator=generator) + 0.1
    terms = [[columns], [rows, columns], [rows]]
    return terms[: 1 + seed % 3]


def scores_of(values, terms):
    """|w| * m in float32, or float64 for such values, with one rounding per operation."""
    dtype = torch.promote_types(values.dtype, torch.float32)
    total = None
    for term in terms:
        product = term[0].to(dtype)
        for factor in term[1:]:
            product = product * factor.to(dtype)
        total = product if total is None else total + product
    return values.abs().to(dtype) * total


def differences(wrapping, cases, net=ShapesNet, *sizes):
    wrong = []
    indices = wrappings.local_indices(net(*sizes), wrapping)
    for data, dtype, normalize, has_factors in cases:
        model = fill(net(*sizes), data, dtype)
        if wrappings.kind_of(wrapping).startswith("fsdp1"):  # cuts by bytes
            indices = wrappings.local_indices(model, wrapping)
        names = fqns(model)
        whole = {name: model.get_parameter(name).detach().clone() for name in names}
        factors = {
            name: terms_for(values.shape, seed)
            for seed, (name, values) in enumerate(whole.items())
            if has_factors and seed != 1
        }
        model = wrappings.wrap(model, wrapping)
        targets = {name: target(wrappings.unwrapped(model), name) for name in names}
        keeps = [torch.ones(values.shape, dtype=torch.bool) for values in whole.values()]
        for amount in (0.4, 0.5):  # the second one ranks what the first one left
            scores = [
                normalized(
                    scores_of(values, factors[name]) if name in factors else values, normalize, keep
                )
                for (name, values), keep in zip(whole.items(), keeps, strict=True)
            ]
            keeps = reference.prune(scores, amount, keeps)
            prune.global_unstructured(
                list(targets.values()),
                prune.L1Unstructured,
                {targets[name]: prune.FactoredScores(terms) for name, terms in factors.items()},
                amount=amount,
                normalize=normalize,
            )
            when = f"{data} {dtype}, normalize={normalize}, factors: {has_factors}, {amount}"
            expected = dict(zip(names, keeps, strict=True))
            wrong += wrong_masks(model, expected, indices, when)
    return wrong


@pytest.mark.parametrize("wrapping", wrappings.sampled(wrappings.ALL))
def test_masks_are_those_of_one_process(wrapping):
    dtypes = ["float32", "bfloat16", "float16", "mixed"]
    if wrappings.kind_of(wrapping) == "fsdp1_root":  # a flat parameter has one dtype
        dtypes.remove("mixed")
    turn = wrappings.ALL.index(wrapping)
    cases = [
        (data, dtypes[(turn + i) % len(dtypes)], NORMALIZATIONS[(turn + i) % 4], i % 2 == 0)
        for i, data in enumerate(["normal", "rounded", "few", "equal", "zeros", "denormal"])
    ]
    cases.append(("normal", "float64", "rms", True))
    cases.append(("few", "bfloat16", "rms", False))
    assert_nothing_wrong_on(wrapping, differences, cases)


@pytest.mark.parametrize("wrapping", wrappings.sampled(wrappings.FSDP2_DIM1))
def test_shards_of_columns(wrapping):
    cases = [("normal", "float32", "rms", True), ("rounded", "bfloat16", "mean", True)]
    assert_nothing_wrong_on(wrapping, differences, cases, Net, EVEN)


def errors_on_each_rank(rank_with_other_factors):
    import torch.distributed as dist

    layer = torch.nn.Linear(4, 3)
    with torch.no_grad():
        layer.weight.fill_(1.0)
    number = 2.0 if dist.get_rank() == rank_with_other_factors else 1.0
    scores = {(layer, "weight"): prune.FactoredScores([[torch.full((1, 4), number)]])}
    try:
        prune.global_unstructured(
            [(layer, "weight")], prune.L1Unstructured, importance_scores=scores, amount=1
        )
    except ValueError as error:
        return str(error), prune.is_pruned(layer)
    return None


def test_factors_that_differ_between_ranks_are_an_error_everywhere():
    for message, is_pruned in run_ranks(errors_on_each_rank, 2, 1):
        assert "checksum" in message and not is_pruned


def normalizing_infinity():
    import torch.distributed as dist

    layers = [torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)]
    with torch.no_grad():
        for layer in layers:
            layer.weight.fill_(1.0)
        layers[1].weight[0, 0] = torch.inf
    messages = []
    for normalize in ("rms", "median") if dist.get_rank() == 0 else ("rms", "mean"):
        try:
            prune.global_unstructured(
                [(layer, "weight") for layer in layers],
                prune.L1Unstructured,
                amount=3,
                normalize=normalize,
            )
        except ValueError as error:
            messages.append(str(error))
    return messages, [prune.is_pruned(layer) for layer in layers]


def test_infinite_scores_and_unknown_normalisations_are_errors_everywhere():
    for (infinite, unknown), is_pruned in run_ranks(normalizing_infinity, 2):
        assert "Linear.weight (#1) has infinite scores" in infinite
        assert "normalize='median'" in unknown
        assert is_pruned == [False, False]


def test_a_method_that_does_not_rank_takes_no_normalisation():
    layer = torch.nn.Linear(4, 3)
    for method in (prune.Identity, prune.RandomUnstructured):
        options = {} if method is prune.Identity else {"amount": 1}
        with pytest.raises((NotImplementedError, ValueError), match="normalize='rms'"):
            prune.global_unstructured([(layer, "weight")], method, normalize="rms", **options)
        assert not prune.is_pruned(layer)
