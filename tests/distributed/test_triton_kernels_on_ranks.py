"""Whole calls on sharded models, with what is on a CPU routed to Triton's interpreter."""

import os
from unittest import mock

import pytest
import torch

import distprune as prune
from distprune.selection import kernels
from distprune.testing import run_ranks
from helpers import reference, wrappings
from helpers.comparisons import assert_nothing_wrong_on, wrong_masks
from helpers.models import Net, fill, fqns, target

pytest.importorskip("triton")


def differences(wrapping: str) -> list[str]:
    """On every rank: masks after two calls by magnitude, and after one at random on 1 process."""
    os.environ["TRITON_INTERPRET"] = "1"
    from distprune.selection import triton_kernels

    scans = mock.Mock(wraps=triton_kernels.scan)
    wrong = []
    indices = wrappings.local_indices(Net(), wrapping)
    for data, dtype in (("few", "float32"), ("normal", "bfloat16")):
        model = fill(Net(), data, dtype, 0)
        names = fqns(model)
        scores = [model.get_parameter(name).detach().clone() for name in names]
        keeps = [torch.ones(score.shape, dtype=torch.bool) for score in scores]
        model = wrappings.wrap(model, wrapping)
        targets = [target(wrappings.unwrapped(model), name) for name in names]
        with (
            mock.patch.object(kernels, "fused_on", lambda device: triton_kernels),
            mock.patch.object(triton_kernels, "scan", scans),
        ):
            for amount in (0.3, 0.5):
                keeps = reference.prune(scores, amount, keeps)
                prune.global_unstructured(targets, prune.L1Unstructured, amount=amount)
                expected = dict(zip(names, keeps, strict=True))
                wrong += wrong_masks(model, expected, indices, f"{data} {dtype}, {amount}")
    return wrong if scans.called else ["the kernels were not used"]


def random_masks(wrapping: str, fused: bool) -> list[torch.Tensor]:
    """This rank's masks of a random pruning."""
    os.environ["TRITON_INTERPRET"] = "1"
    from distprune.selection import triton_kernels

    model = fill(Net(), "normal", "float32", 0)
    names = fqns(model)
    model = wrappings.wrap(model, wrapping)
    targets = [target(wrappings.unwrapped(model), name) for name in names]
    torch.manual_seed(3)
    with mock.patch.object(kernels, "fused_on", lambda device: triton_kernels if fused else None):
        prune.global_unstructured(targets, prune.RandomUnstructured, amount=0.5)
    return [wrappings.local(getattr(module, name + "_mask")).clone() for module, name in targets]


@pytest.mark.parametrize("wrapping", ["fsdp2-2", "tp-2"])
def test_masks_equal_those_of_one_process(wrapping):
    assert_nothing_wrong_on(wrapping, differences)


def test_random_masks_are_those_of_the_functions_for_a_cpu():
    size = wrappings.world_size("fsdp2-2")
    for one, other in zip(
        run_ranks(random_masks, size, "fsdp2-2", False),
        run_ranks(random_masks, size, "fsdp2-2", True),
        strict=True,
    ):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
