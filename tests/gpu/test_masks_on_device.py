"""Masks that are decided on the device equal those that are decided on the CPU, bit for bit."""

import copy

import pytest
import torch
import torch.nn.utils.prune as torch_prune
from torch import nn

import distprune
from helpers.models import fill

pytestmark = pytest.mark.gpu

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def network() -> nn.ModuleList:
    """Layers whose sizes nothing divides; the convolution is channels-last in memory."""
    layers = [nn.Linear(67, 101), nn.Conv2d(13, 5, 3), nn.Linear(40, 12), nn.Embedding(97, 31)]
    layers[1].to(memory_format=torch.channels_last)
    return nn.ModuleList(layers)


def prune_globally(pairs, method="L1Unstructured", **options):
    torch.manual_seed(3)
    distprune.global_unstructured(pairs, getattr(distprune, method), **options)


def by_given_scores(pairs):
    """Of another dtype, and of another order than the weights."""
    scores = {}
    for module, name in pairs:
        weight = getattr(module, name)
        drawn = torch.randn(weight.shape, generator=torch.Generator().manual_seed(5))
        scores[module, name] = drawn.to(weight.device)
    prune_globally(pairs, importance_scores=scores, amount=0.5)


def by_random_keys(pairs):
    torch.manual_seed(3)
    k = round(0.6 * sum(getattr(*pair).numel() for pair in pairs))
    masks = distprune.global_mask(pairs, k, scores="random").masks
    for pair, mask in zip(pairs, masks, strict=True):
        distprune.custom_from_mask(*pair, mask)


# Calls that follow each other, so that masks are in force.
CASES = {
    "magnitude": [
        lambda pairs, amount=amount: prune_globally(pairs, amount=amount)
        for amount in (0.3, 17, 0.5)
    ],
    "random": [by_random_keys],
    "random per layer": [
        lambda pairs: prune_globally(pairs, "RandomUnstructured", amount=0.4, scope="layer")
    ] * 2,
    "given scores": [by_given_scores],
    "divided by the rms": [lambda pairs: prune_globally(pairs, amount=0.5, normalize="rms")],
    "per layer": [lambda pairs: prune_globally(pairs, amount=0.5, scope="layer")],
    "per row": [lambda pairs: prune_globally(pairs, amount=0.5, scope="row")],
    "2:4": [lambda pairs: prune_globally(pairs[2:3], pattern="2:4")],
    "bounds": [
        lambda pairs: prune_globally(pairs, amount=0.5, min_sparsity=0.2, max_sparsity=0.7)
    ],
    "erk": [lambda pairs: prune_globally(pairs, amount=distprune.budgets.erk(pairs, 0.5))],
    "channels": [lambda pairs: [distprune.ln_structured(*pair, 0.3, n=2, dim=0) for pair in pairs]],
}  # fmt: skip
FEW_CASES = ("magnitude", "random", "divided by the rms")


def after_each(model, device, calls):
    """Masks and masked weights after each call, on the CPU; or the error that ended the calls."""
    model, found = copy.deepcopy(model).to(device), []
    pairs = [(layer, "weight") for layer in model]
    for call in calls:
        try:
            call(pairs)
        except ValueError as error:  # no score may be infinite that is to be normalised
            return [*found, str(error)]
        pruned = [layer for layer in model if hasattr(layer, "weight_mask")]
        assert pruned and all(layer.weight_mask.device == device for layer in pruned)
        for layer in pruned:
            found += [layer.weight_mask.detach().cpu(), layer.weight.detach().cpu()]
    return found


def compare(model, device, calls):
    """Every bit; NaN, of inf * 0, equals NaN."""
    expected = after_each(model, torch.device("cpu"), calls)
    for mine, wanted in zip(after_each(model, device, calls), expected, strict=True):
        if isinstance(wanted, str):
            assert mine == wanted
            continue
        assert mine.dtype == wanted.dtype
        torch.testing.assert_close(mine, wanted, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(mine.signbit() & ~mine.isnan(), wanted.signbit() & ~wanted.isnan())


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("data", ["normal", "few", "equal", "zeros", "denormal", "inf"])
@pytest.mark.parametrize("dtype", [*DTYPES, "mixed"])
def test_small_layers(device, dtype, data, case):
    model = fill(network(), data, str(dtype).removeprefix("torch."))
    compare(model, device, CASES[case])


@pytest.mark.parametrize("case", FEW_CASES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_many_chunks(device, is_small, dtype, case):
    sizes = [(64, 70), (129, 13)] if is_small else [(8192, 11008), (4097, 4099), (1, 70_001)]
    torch.manual_seed(0)
    model = nn.ModuleList(nn.Linear(b, a, bias=False, dtype=dtype) for a, b in sizes)
    compare(model, device, CASES[case])


def test_random_numbers_of_torch(device):
    """On plain modules RandomUnstructured draws, on each device, the numbers that torch draws."""
    model = nn.ModuleList([nn.Linear(67, 101), nn.Conv2d(13, 5, 3), nn.Embedding(97, 31)])
    other = copy.deepcopy(model.to(device))
    for call in range(2):
        for layers, module in ((model, distprune), (other, torch_prune)):
            torch.manual_seed(7 + call)
            pairs = [(layer, "weight") for layer in layers]
            module.global_unstructured(pairs, module.RandomUnstructured, amount=0.4)
        for mine, theirs in zip(model, other, strict=True):
            assert torch.equal(mine.weight_mask, theirs.weight_mask)
