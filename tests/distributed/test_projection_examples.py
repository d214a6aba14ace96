"""AC/DC, ADMM and proximal steps of examples/projections.py: on shards as in one process.

The gradients are sums of integers that do not depend on the weights, and all else is elementwise:
so every weight has to be equal bit for bit.
"""

import importlib.util
from pathlib import Path

import pytest
import torch
from torch import Tensor

import distprune as prune
from distprune.testing import run_ranks
from helpers import criteria_runs as runs
from helpers import wrappings
from helpers.comparisons import assert_nothing_wrong, assert_nothing_wrong_on
from helpers.models import Net
from helpers.sampling import every

EXAMPLE = Path(__file__).parents[2] / "examples" / "projections.py"


class ThreeLayers(Net):
    """Net with its layers beside each other: the gradient of each is one of the data alone."""

    def forward(self, x: Tensor) -> Tensor:
        parts = x.split([layer.in_features for layer in self.children()], dim=1)
        return torch.cat([layer(p) for layer, p in zip(self.children(), parts, strict=True)], 1)


def example():
    spec = importlib.util.spec_from_file_location("projections", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def trained(wrapping: str, method: str) -> dict[str, tuple[Tensor, Tensor]]:
    """Each weight with its mask, this rank's part, and the indices of the part."""
    generator = torch.Generator().manual_seed(1)
    dense = ThreeLayers().double()
    for parameter in dense.parameters():
        parameter.data.copy_(torch.randint(-40, 41, parameter.shape, generator=generator) / 8)
    indices = wrappings.local_indices(dense, wrapping)
    model = wrappings.wrap(dense, wrapping)
    pairs = runs.named_targets(model, runs.WEIGHTS)
    k = 37
    optimizer = torch.optim.SGD(model.parameters(), lr=2**-6, momentum=0.5)
    methods = example()
    admm = methods.ADMM(pairs, k, optimizer, rho=0.5, every=3) if method == "ADMM" else None
    part = wrappings.data_rank(wrapping)
    for step in range(26):
        batch = tuple(
            torch.randint(-2, 3, (runs.ROWS, size), generator=generator).double()
            for size in (21, 18)
        )
        runs.backward(model, batch, *part)
        optimizer.step()
        optimizer.zero_grad()
        if method == "AC/DC" and step % 4 == 3:
            methods.acdc_phase(pairs, k, optimizer, is_sparse=step % 8 == 3)
        if method in ("hard", "soft"):
            methods.proximal_step(pairs, k, soft=method == "soft")
    result = {}
    for i, (name, mask) in enumerate(zip(runs.WEIGHTS, prune.get_masks(pairs), strict=True)):
        held = wrappings.shard(model, name, indices)
        if admm is not None:
            held = wrappings.local(admm.z[i])
        result[name] = (wrappings.local(held).clone(), wrappings.local(mask), indices[name])
    return result


METHODS = ["AC/DC", "ADMM", "hard", "soft"]


def differences(wrapping: str, method: str, single: dict) -> list[str]:
    wrong = []
    for name, (held, mask, indices) in trained(wrapping, method).items():
        weight, whole_mask, _ = single[name]
        part = wrappings.my_part(weight, indices)
        if not torch.equal(held.view(part.shape), part):
            wrong.append(f"{name}: {held} is not {part}")
        if not torch.equal(mask.flatten(), whole_mask.flatten()[indices.flatten()]):
            wrong.append(f"{name}: another mask")
    return wrong


@pytest.mark.thorough
@pytest.mark.parametrize("method", every(2, METHODS))
def test_on_shards_as_in_one_process(method):
    single = trained("plain-1", method)
    sparse = sum(int((weight * mask).count_nonzero()) for weight, mask, _ in single.values())
    # AC/DC ends in a dense phase here; the others have k elements, or fewer that are not zero.
    assert sparse <= 37 if method != "AC/DC" else sparse > 37
    for wrapping in ("fsdp2-2", "ddp-2", "fsdp2-3"):
        assert_nothing_wrong_on(wrapping, differences, method, single)


@pytest.mark.thorough
def test_acdc_under_fsdp1():
    single = trained("plain-1", "AC/DC")
    assert_nothing_wrong(run_ranks(differences, 2, "fsdp1-2", "AC/DC", single))
