"""1-d importance scores under FSDP1, where they have two meanings: one rule for all of them.

FSDP1 lays a parameter out in the order of its memory, and a gradient is this rank's run of
that. For a channels_last weight that is another order than the row-major one of ``view(-1)``. A
1-d tensor is such a run, also where a rank has the whole parameter; whole scores are of its shape.
"""

import functools
import itertools

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

import distprune as prune
from distprune.testing import run_ranks
from helpers import reference
from helpers.comparisons import assert_nothing_wrong, outcome

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


def differences(sizes: tuple) -> tuple[list[str], int]:
    """What is wrong, and how many weights this rank holds whole, with every kind of scores."""
    wrong, whole = [], 0
    for memory, kind in itertools.product(MEMORY, ("gradients", "all gradients", "whole", "flat")):
        full = [scores_of(layer) for layer in model(memory, sizes)]
        root = wrapped(memory, sizes)  # which has to live
        # The values are the indices, whatever the order of memory.
        indices = [layer.weight.detach().long() for layer in root.module]
        whole += sum(mine.numel() == s.numel() for mine, s in zip(indices, full, strict=True))
        # At each place of the rank's run, as a gradient has it, that element's score.
        given = [scores.flatten()[mine] for scores, mine in zip(full, indices, strict=True)]
        keeps = [reference.prune([scores.contiguous()], 0.5)[0] for scores in full]
        pairs = [(layer, "weight") for layer in root.module]
        if kind == "flat":
            for pair, scores in zip(pairs, full, strict=True):
                call = functools.partial(
                    prune.l1_unstructured, *pair, 0.5, importance_scores=scores.flatten()
                )
                name, text, changed = outcome(root.module, call)
                if "expected the whole parameter's shape" not in text or changed:
                    wrong.append(f"{memory}: {name}: {text} {changed}")
            continue
        if kind == "all gradients":
            keeps = reference.prune([scores.contiguous() for scores in full], 0.5)
            scores = dict(zip(pairs, given, strict=True))
            prune.global_unstructured(pairs, prune.L1Unstructured, scores, amount=0.5)
        else:
            for pair, scores in zip(pairs, full if kind == "whole" else given, strict=True):
                prune.l1_unstructured(*pair, 0.5, importance_scores=scores)
        for (layer, _), keep, mine in zip(pairs, keeps, indices, strict=True):
            if not torch.equal(layer.weight_mask, keep.flatten()[mine].bool()):
                wrong.append(f"{memory}, {kind}: the mask is wrong")
    return wrong, whole


# Sizes that cut the second weight, that cut the first one, and that cut none.
@pytest.mark.parametrize("sizes", [(2, 6), (6, 2), (5, 5)])
def test_a_run_is_in_the_order_of_memory_and_whole_scores_have_the_shape(sizes):
    per_rank = run_ranks(differences, 2, sizes)
    assert_nothing_wrong([wrong for wrong, _ in per_rank])
    assert sum(whole for _, whole in per_rank) >= 1, "no rank held a weight whole"
