"""Masks that are decided on the device equal those that are decided on the CPU, bit for bit.

Each on its own copy of a model; the CPU's path is the
reference, which the tests compare with an oracle.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.utils.prune as torch_prune
from stage import Stage, main
from torch import Tensor, nn

import distprune
from helpers.models import fill

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DATA = ("normal", "few", "equal", "zeros", "denormal", "inf")
Pairs = list[tuple[nn.Module, str]]


def network() -> nn.Module:
    """Layers whose sizes nothing divides; the convolution is channels-last in memory."""
    layers = [nn.Linear(67, 101), nn.Conv2d(13, 5, 3), nn.Linear(40, 12), nn.Embedding(97, 31)]
    layers[1].to(memory_format=torch.channels_last)
    return nn.ModuleList(layers)


def scores_of(pairs: Pairs) -> dict[tuple[nn.Module, str], Tensor]:
    """Of another dtype, and of another order than the weights."""
    found = {}
    for module, name in pairs:
        shape, device = getattr(module, name).shape, getattr(module, name).device
        scores = torch.randn(shape, generator=torch.Generator().manual_seed(5))
        found[module, name] = scores.to(device)
    return found


def prune_globally(pairs: Pairs, method: str = "L1Unstructured", **options: Any) -> None:
    torch.manual_seed(3)
    distprune.global_unstructured(pairs, getattr(distprune, method), **options)


def select_at_random(pairs: Pairs) -> None:
    """By random keys, which are a function of a seed and of the place: those of any device."""
    torch.manual_seed(3)
    k = round(0.6 * sum(getattr(module, name).numel() for module, name in pairs))
    found = distprune.global_mask(pairs, k, scores="random")
    for (module, name), mask in zip(pairs, found.masks, strict=True):
        distprune.custom_from_mask(module, name, mask)


# On a model with weights in any number of layers; a call follows the others of its case, so that
# masks are in force.
CASES: dict[str, tuple[Callable[[Pairs], Any], ...]] = {
    "magnitude": tuple(
        lambda pairs, amount=amount: prune_globally(pairs, amount=amount)
        for amount in (0.3, 17, 0.5)
    ),
    "random": (lambda pairs: select_at_random(pairs),),
    "random per layer": tuple(
        lambda pairs: prune_globally(pairs, "RandomUnstructured", amount=0.4, scope="layer")
        for _ in range(2)
    ),
    "given scores": (
        lambda pairs: prune_globally(pairs, importance_scores=scores_of(pairs), amount=0.5),
    ),
    "divided by the rms": (lambda pairs: prune_globally(pairs, amount=0.5, normalize="rms"),),
    "per layer": (lambda pairs: prune_globally(pairs, amount=0.5, scope="layer"),),
    "per row": (lambda pairs: prune_globally(pairs, amount=0.5, scope="row"),),
    "2:4": (lambda pairs: prune_globally(pairs[2:3], pattern="2:4"),),
    "bounds": (
        lambda pairs: prune_globally(pairs, amount=0.5, min_sparsity=0.2, max_sparsity=0.7),
    ),
    "erk": (lambda pairs: prune_globally(pairs, amount=distprune.budgets.erk(pairs, 0.5)),),
    "channels": (
        lambda pairs: [distprune.ln_structured(m, n, 0.3, n=2, dim=0) for m, n in pairs],
    ),
}  # fmt: skip


def small_layers(stage: Stage) -> None:
    """Every case on every kind of data."""
    data = DATA[1:2] if stage.quick else DATA
    for dtype in DTYPES:
        for kind in data:
            model = network().to(dtype)
            fill(model, kind, str(dtype).removeprefix("torch."))
            compare(stage, model, f"{dtype}, {kind} data", CASES)


def many_chunks(stage: Stage) -> None:
    """Matrices of many chunks."""
    sizes = [(64, 70), (129, 13)] if stage.quick else [(8192, 11008), (4097, 4099), (1, 70_001)]
    chosen = {name: CASES[name] for name in ("magnitude", "random", "divided by the rms")}
    for dtype in DTYPES:
        model = nn.ModuleList(nn.Linear(b, a, bias=False, dtype=dtype) for a, b in sizes)
        with torch.no_grad():
            for number, parameter in enumerate(model.parameters()):
                generator = torch.Generator().manual_seed(number)
                values = torch.empty(parameter.shape).normal_(generator=generator)
                parameter.copy_(values)
        compare(stage, model, f"{dtype}, {sizes}", chosen)


def dtypes_together(stage: Stage) -> None:
    """bfloat16 beside float32 and float16, which are ranked as float32."""
    for dtypes in ((torch.bfloat16, torch.float32), (torch.float16, torch.float32)):
        model = network()
        for number, layer in enumerate(model):
            layer.to(dtypes[number % 2])
            for parameter in layer.parameters():
                generator = torch.Generator().manual_seed(number)
                values = torch.randn(parameter.shape, generator=generator)
                parameter.data.copy_((values * 8).round() / 8)
        chosen = {name: CASES[name] for name in ("magnitude", "random", "divided by the rms")}
        compare(stage, model, f"{dtypes}", chosen)


def random_numbers_of_torch(stage: Stage) -> None:
    """On plain modules RandomUnstructured draws, on each device, the numbers that torch draws.

    So its masks are those of torch's own pruning on the same device, and not those of a CPU.
    """
    theirs, mine = (each.RandomUnstructured for each in (torch_prune, distprune))
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(67, 101), nn.Conv2d(13, 5, 3), nn.Embedding(97, 31)])
    other = copy.deepcopy(model.to(stage.device))
    for call in range(2):
        for layers, module, method in ((model, distprune, mine), (other, torch_prune, theirs)):
            torch.manual_seed(7 + call)
            pairs = [(layer, "weight") for layer in layers]
            module.global_unstructured(pairs, method, amount=0.4)
        pairs_of_layers = zip(model, other, strict=True)
        wrong = sum(int((a.weight_mask != b.weight_mask).sum()) for a, b in pairs_of_layers)
        what = f"call {call}: the masks are those of torch.nn.utils.prune"
        stage.check(what, wrong == 0, f"{wrong} elements differ")


def compare(
    stage: Stage, model: nn.Module, about: str, cases: dict[str, tuple[Callable[[Pairs], Any], ...]]
) -> None:
    """Run cases on copies of a model on the CPU and on the device, and compare masks."""
    for name, calls in cases.items():
        expected = list(after_each(model, torch.device("cpu"), calls))
        found = list(after_each(model, stage.device, calls))
        what = f"{name}, {about}"
        if isinstance(expected[-1], str) or isinstance(found[-1], str):
            stage.check(what, found[-1] == expected[-1], f"{expected[-1]} / {found[-1]}")
            continue
        differing = differences(found, expected)
        stage.check(what, differing == 0, f"{differing} elements differ")


def after_each(
    model: nn.Module, device: torch.device, calls: tuple[Callable[[Pairs], Any], ...]
) -> Iterator[list[Tensor] | str]:
    """Masks of all weights after each call, and the masked weights, on the CPU; or the error."""
    model = copy.deepcopy(model).to(device)
    pairs = [(layer, "weight") for layer in model]
    for call in calls:
        try:
            call(pairs)
        except ValueError as error:  # no score may be infinite that is to be normalised
            yield f"ValueError: {error}"
            return
        pruned = [layer for layer in model if hasattr(layer, "weight_mask")]
        assert pruned
        for layer in pruned:
            assert layer.weight_mask.device == device and layer.weight.device == device
        yield [t.detach().cpu() for layer in pruned for t in (layer.weight_mask, layer.weight)]


def differences(found: list[list[Tensor]], expected: list[list[Tensor]]) -> int:
    """How many elements differ in a bit; NaN, of inf * 0, equals NaN."""
    total = 0
    for masks, wanted in zip(found, expected, strict=True):
        for one, other in zip(masks, wanted, strict=True):
            assert one.dtype == other.dtype and one.shape == other.shape
            integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[one.itemsize]
            same = one.contiguous().view(integer) == other.contiguous().view(integer)
            total += int((~(same | (one.isnan() & other.isnan()))).sum())
    return total


if __name__ == "__main__":
    main(small_layers, dtypes_together, random_numbers_of_torch, many_chunks)
