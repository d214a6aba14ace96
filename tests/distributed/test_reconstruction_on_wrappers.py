"""Least squares for kept weights on every wrapper: what one process gives."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from test_activation_statistics_on_wrappers import ALL, parts_of
from torch import Tensor, nn

import distprune as prune
from distprune import reconstruction
from distprune.statistics import GramMatrices
from distprune.testing import run_ranks
from helpers import wrappings
from helpers.comparisons import assert_nothing_wrong, assert_nothing_wrong_on
from helpers.least_squares import gram_of, reconstructed
from helpers.models import Net, seeded, target

LAYERS = ["l1.weight", "l2.weight", "l3.weight"]


def data(sizes: tuple[int, ...], num_parts: int) -> Tensor:
    """A batch for each data-parallel rank: inputs that depend on each other."""
    generator = torch.Generator().manual_seed(1)
    mixing = torch.randn(sizes[0], sizes[0], generator=generator)
    return torch.randn(num_parts, 40, sizes[0], generator=generator) @ mixing


def expected(
    net: nn.Module, masks: dict[str, Tensor], inputs: Tensor, damping: float
) -> dict[str, Tensor]:
    """The new weights: every layer's inputs are those of the dense model."""
    result = {}
    with torch.no_grad():
        for name in LAYERS:
            layer, _ = target(net, name)
            result[name] = reconstructed(layer.weight, masks[name], gram_of(inputs), damping)
            inputs = layer(inputs)
            inputs = torch.relu(inputs) if name == "l1.weight" else torch.tanh(inputs)
    return result


def reconstruct_on(wrapping: str, damping: float) -> list[str]:
    sizes = wrappings.runnable_sizes(wrapping)
    model = wrappings.wrap(seeded(Net(sizes)), wrapping)
    indices = wrappings.local_indices(seeded(Net(sizes)), wrapping)
    part, num_parts = parts_of(wrapping)
    parameters = [pair for pair in prune.select(model) if pair.fqn in LAYERS]
    grams = GramMatrices(parameters)
    inputs = data(sizes, num_parts)
    with grams.collecting():
        model(inputs[part])
    single = seeded(Net(sizes))
    prune.global_unstructured(
        [target(single, name) for name in LAYERS], prune.L1Unstructured, amount=0.5,
        group=dist.new_subgroups(1)[0],
    )  # fmt: skip
    masks = {name: target(single, name)[0].weight_mask for name in LAYERS}
    right = expected(seeded(Net(sizes)), masks, inputs.flatten(0, 1), damping)
    with prune.keep_pruned_values():
        prune.global_unstructured(parameters, prune.L1Unstructured, amount=0.5)
        report = prune.reconstruct(parameters, grams, damping=damping, steps=60)
    wrong = []
    for name, entry in zip(LAYERS, report.parameters, strict=True):
        own = wrappings.shard(model, name, indices).double().view(-1)
        new = wrappings.my_part(right[name], indices[name]).view(-1)
        keep = wrappings.my_part(masks[name], indices[name]).view(-1)
        if len(own) and (own - new).abs().max() > 1e-5 * right[name].abs().max():
            wrong.append(f"{name}: {own.tolist()}, not {new.tolist()}")
        if own[keep == 0].any() or own[keep == 0].signbit().any():
            wrong.append(f"{name}: pruned elements are not +0")
        if not 0 < entry.error_after < entry.error_before < 1:
            wrong.append(f"{name}: {entry}")
    verified = prune.verify(model)
    if verified.problems:
        wrong.append(str(verified))
    return wrong


@pytest.mark.parametrize("wrapping", ALL)
def test_weights_are_those_of_one_process(wrapping):
    assert_nothing_wrong_on(wrapping, reconstruct_on, 0.01)


def values_after_an_error(wrapping: str) -> list[str]:
    """One rank fails in the last layer: every rank raises, and every parameter is as it was."""
    sizes = wrappings.runnable_sizes(wrapping)
    model = wrappings.wrap(seeded(Net(sizes)), wrapping)
    indices = wrappings.local_indices(seeded(Net(sizes)), wrapping)
    parameters = [pair for pair in prune.select(model) if pair.fqn in LAYERS]
    grams = GramMatrices(parameters)
    with grams.collecting():
        model(torch.ones(2, sizes[0]))
    context = prune.keep_pruned_values()
    context.__enter__()
    prune.global_unstructured(parameters, prune.L1Unstructured, amount=0.5)
    before = [wrappings.shard(model, name, indices).clone() for name in LAYERS]
    right, calls = reconstruction.least_squares, []

    def fails(*arguments):
        calls.append(arguments)
        if dist.get_rank() == 1 and len(calls) == 2:
            raise MemoryError("no memory")
        return right(*arguments)

    with mock.patch.object(reconstruction, "least_squares", fails):
        try:
            prune.reconstruct(parameters, grams)
        except MemoryError as error:
            if "no memory" not in str(error):
                return [str(error)]
        else:
            return ["nothing was raised"]
    after = [wrappings.shard(model, name, indices).clone() for name in LAYERS]
    context.__exit__(None, None, None)
    return [
        f"{name} has changed"
        for name, old, new in zip(LAYERS, before, after, strict=True)
        if not torch.equal(old, new)
    ]


@pytest.mark.parametrize("wrapping", ["fsdp1-2", "fsdp2-2", "ddp-2"])
def test_an_error_on_one_rank_changes_nothing(wrapping):
    assert_nothing_wrong(run_ranks(values_after_an_error, 2, wrapping))
