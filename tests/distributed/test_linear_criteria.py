"""Scores of criteria that are linear in the gradient are those of one process, bit for bit."""

import copy

import pytest
import torch

import distprune as prune
from distprune.testing import run_ranks
from helpers import criteria_runs as runs
from helpers import wrappings
from helpers.collective_traffic import Traffic
from helpers.comparisons import assert_nothing_wrong


def snip_of_one_process(model, batches) -> dict[str, torch.Tensor]:
    """Equation 5 of arXiv 1810.02340 with one batch that holds all: |w * dL/dw|."""
    model = copy.deepcopy(model)
    model.zero_grad()
    x, factors = (torch.cat(tensors) for tensors in zip(*batches, strict=True))
    gradients = torch.autograd.grad(
        runs.loss(model, x, factors), [model.get_parameter(name) for name in runs.WEIGHTS]
    )
    return {
        name: (model.get_parameter(name) * gradient).detach().abs()
        for name, gradient in zip(runs.WEIGHTS, gradients, strict=True)
    }


def differences_of_snip(wrapping: str) -> list[str]:
    model = runs.integer_net(wrapping)
    indices = wrappings.local_indices(model, wrapping)
    batches = runs.batches(model, 3)
    expected = snip_of_one_process(model, batches)
    model = wrappings.wrap(model, wrapping)
    criterion = prune.criteria.SNIP(runs.named_targets(model, runs.WEIGHTS))
    for batch in batches:
        runs.backward(model, batch, *wrappings.data_rank(wrapping))
        with Traffic() as traffic:
            criterion.update()
        assert traffic.calls == []
        model.zero_grad()
    return runs.differing(criterion.scores(), expected, indices)


@pytest.mark.parametrize("wrapping", wrappings.sampled(wrappings.ALL))
def test_snip(wrapping):
    size = wrappings.world_size(wrapping)
    assert_nothing_wrong(run_ranks(differences_of_snip, size, wrapping))
