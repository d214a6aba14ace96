"""1-d importance scores under FSDP1, where they have two meanings: one rule for all of them.

FSDP1 lays a parameter out in the order of its memory, and a gradient is this rank's run of
that. For a channels_last weight that is another order than the row-major one of ``view(-1)``. A
1-d tensor is such a run, also where a rank has the whole parameter; whole scores are of its shape.
"""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

import distprune as prune
from distprune.testing import run_ranks
from helpers import reference
from helpers.comparisons import assert_nothing_wrong, changes, snapshot

MEMORY = {"contiguous": torch.contiguous_format, "channels last": torch.channels_last}


def model(memory, sizes):
    """Two convolutions in one flat parameter: each may be cut, or lie on one rank whole."""
    layers = [nn.Conv2d(3, channels, 2, bias=False) for channels in sizes]
    with torch.no_grad():
        for layer in layers:
            layer.weight.copy_(torch.arange(layer.weight.numel()).view(layer.weight.shape))
    return nn.ModuleList(layers).to(memory_format=MEMORY[memory])


def scores_of(layer):
    """Whole scores, by index, no two of them equal."""
    numel = layer.weight.numel()
    generator = torch.Generator().manual_seed(numel)
    scores = torch.randperm(numel, generator=generator).float() + 1
    return scores.view(layer.weight.shape) / numel


def wrapped(memory, sizes):
    return FullyShardedDataParallel(
        model(memory, sizes), device_id=torch.device("cpu"), use_orig_params=True
    )


def wrong_with_gradients(memory, sizes, is_global):
    """Scores in the form of a gradient: at each place of the rank's run, that element's score."""
    expected = []
    plain = model(memory, sizes)
    full = [scores_of(layer) for layer in plain]
    if is_global:
        keeps = reference.prune(full, 0.5)
    else:
        keeps = [reference.prune([scores], 0.5)[0] for scores in full]
    root = wrapped(memory, sizes)  # which has to live
    layers, found, whole = root.module, [], 0
    for layer, scores in zip(layers, full, strict=True):
        # The values are the indices, whatever the order of memory.
        indices = layer.weight.detach().long()
        whole += indices.numel() == scores.numel()
        layer.weight.grad = scores.flatten()[indices]
        expected.append(indices)
    targets = [(layer, "weight") for layer in layers]
    if is_global:
        given = {(layer, "weight"): layer.weight.grad for layer in layers}
        prune.global_unstructured(
            targets, prune.L1Unstructured, importance_scores=given, amount=0.5
        )
    else:
        for layer in layers:
            prune.l1_unstructured(layer, "weight", 0.5, importance_scores=layer.weight.grad)
    for layer, keep, indices in zip(layers, keeps, expected, strict=True):
        num_wrong = int((layer.weight_mask != keep.flatten()[indices].bool()).sum())
        if num_wrong:
            found.append(f"{num_wrong} of {indices.numel()} of the mask wrong")
    return found, whole


# Sizes that cut the second weight, that cut the first one, and that cut none.
@pytest.mark.parametrize("is_global", [False, True])
@pytest.mark.parametrize("sizes", [(2, 6), (6, 2), (5, 5)])
@pytest.mark.parametrize("memory", MEMORY)
def test_gradients_are_scores_in_the_order_of_memory(memory, sizes, is_global):
    per_rank = run_ranks(wrong_with_gradients, 2, memory, sizes, is_global)
    assert_nothing_wrong([found for found, _ in per_rank])
    assert sum(whole for _, whole in per_rank) >= 1, "no rank held a weight whole"


def with_flat_scores(memory, sizes):
    root = wrapped(memory, sizes)
    before, errors = snapshot(root.module), []
    for layer, whole in zip(root.module, model("contiguous", sizes), strict=True):
        try:
            scores = scores_of(whole).flatten()
            prune.l1_unstructured(layer, "weight", 0.5, importance_scores=scores)
        except ValueError as error:
            errors.append(str(error))
    return errors, changes(before, snapshot(root.module))


@pytest.mark.parametrize("sizes", [(2, 6), (5, 5)])
@pytest.mark.parametrize("memory", MEMORY)
def test_whole_flat_scores_are_refused(memory, sizes):
    for errors, changed in run_ranks(with_flat_scores, 2, memory, sizes):
        assert len(errors) == 2 and changed == []
        assert all("expected the whole parameter's shape" in error for error in errors)


def wrong_with_whole_scores(memory, sizes):
    root, found = wrapped(memory, sizes), []
    full = [scores_of(layer) for layer in model(memory, sizes)]
    for layer, whole in zip(root.module, full, strict=True):
        indices = layer.weight.detach().long()
        prune.l1_unstructured(layer, "weight", 0.5, importance_scores=whole)
        [keep] = reference.prune([whole.contiguous()], 0.5)
        if not torch.equal(layer.weight_mask, keep.flatten()[indices].bool()):
            found.append("mask wrong")
    return found


@pytest.mark.parametrize("sizes", [(2, 6), (5, 5)])
@pytest.mark.parametrize("memory", MEMORY)
def test_scores_of_the_shape_of_the_parameter(memory, sizes):
    assert_nothing_wrong(run_ranks(wrong_with_whole_scores, 2, memory, sizes))
