"""AC/DC, ADMM and proximal steps of examples/projections.py: on shards as in one process.

The gradients are sums of integers that do not depend on the weights, and all else is elementwise:
so every weight has to be equal bit for bit.
"""

import runpy
from pathlib import Path

import pytest
import torch
from torch import Tensor

import distprune as prune
from distprune.testing import run_ranks
from helpers import criteria_runs as runs
from helpers import wrappings
from helpers.comparisons import assert_nothing_wrong_on
from helpers.models import Net

EXAMPLE = Path(__file__).parents[2] / "examples" / "projections.py"
METHODS = ["AC/DC", "ADMM", "hard", "soft"]
K = 37


class ThreeLayers(Net):
    """Net with its layers beside each other: the gradient of each is one of the data alone."""

    def forward(self, x: Tensor) -> Tensor:
        parts = x.split([layer.in_features for layer in self.children()], dim=1)
        return torch.cat([layer(p) for layer, p in zip(self.children(), parts, strict=True)], 1)


def trained(wrapping: str, method: str) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(values, mask, indices) of this rank's part of each weight."""
    generator = torch.Generator().manual_seed(1)
    dense = ThreeLayers().double()
    for parameter in dense.parameters():
        parameter.data.copy_(torch.randint(-40, 41, parameter.shape, generator=generator) / 8)
    indices = wrappings.local_indices(dense, wrapping)
    model = wrappings.wrap(dense, wrapping)
    pairs = runs.named_targets(model, runs.WEIGHTS)
    optimizer = torch.optim.SGD(model.parameters(), lr=2**-6, momentum=0.5)
    methods = runpy.run_path(str(EXAMPLE))
    admm = methods["ADMM"](pairs, K, optimizer, rho=0.5, every=3) if method == "ADMM" else None
    for step in range(26):
        batch = tuple(
            torch.randint(-2, 3, (runs.ROWS, size), generator=generator).double()
            for size in (21, 18)
        )
        runs.backward(model, batch, *wrappings.data_rank(wrapping))
        optimizer.step()
        optimizer.zero_grad()
        if method == "AC/DC" and step % 4 == 3:
            methods["acdc_phase"](pairs, K, optimizer, is_sparse=step % 8 == 3)
        if method in ("hard", "soft"):
            methods["proximal_step"](pairs, K, soft=method == "soft")
    held = [wrappings.shard(model, name, indices) for name in runs.WEIGHTS] if not admm else admm.z
    masks = map(wrappings.local, prune.get_masks(pairs))
    held = [wrappings.local(values).clone() for values in held]
    return list(zip(held, masks, (indices[name] for name in runs.WEIGHTS), strict=True))


def differences(wrapping: str, singles: dict[str, list]) -> list[str]:
    wrong = []
    for method, single in singles.items():
        for found, (weight, whole_mask, _) in zip(trained(wrapping, method), single, strict=True):
            held, mask, indices = (each.flatten() for each in found)
            if not torch.equal(held, weight.flatten()[indices]):
                wrong.append(f"{method}: {held} is not a part of {weight}")
            if not torch.equal(mask, whole_mask.flatten()[indices]):
                wrong.append(f"{method}: another mask")
    return wrong


def all_trained() -> dict[str, list]:
    return {method: trained("plain-1", method) for method in METHODS}


@pytest.mark.thorough
def test_on_shards_as_in_one_process():
    (singles,) = run_ranks(all_trained, 1)
    for method, single in singles.items():
        sparse = sum(int((weight * mask).count_nonzero()) for weight, mask, _ in single)
        # AC/DC ends in a dense phase here; the others have k elements, or fewer that are not zero.
        assert (sparse > K) == (method == "AC/DC"), method
    for wrapping in ("fsdp2-2", "ddp-2", "fsdp2-3"):
        assert_nothing_wrong_on(wrapping, differences, singles)
    only = {"AC/DC": singles["AC/DC"]}  # FSDP1's runs are no DTensors, which ADMM multiplies
    assert_nothing_wrong_on("fsdp1-2", differences, only)
