"""What only FSDP1 has: flat parameters and summon_full_params."""

import pytest
import torch
import torch.nn.utils.prune as torch_prune
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

import distprune as prune
from distprune import checkpoint
from distprune.testing import run_ranks
from helpers import reference
from helpers.comparisons import assert_nothing_wrong, assert_nothing_wrong_on
from helpers.models import Net, fill, target
from helpers.training_pair import WEIGHTS, Pair


class TiedNet(Net):
    """l2 and l4 share their weight; l1 lies in memory by columns."""

    def __init__(self):
        super().__init__((6, 6, 6, 3))
        self.l4 = nn.Linear(6, 6)
        self.l4.weight = self.l2.weight
        self.l1.weight = nn.Parameter(torch.empty(6, 6).t())

    def forward(self, x):
        return super().forward(torch.tanh(self.l4(x)))


def tied_and_by_columns(use_orig_params: bool) -> list[str]:
    options = {"device_id": torch.device("cpu"), "use_orig_params": use_orig_params}
    dense, net = (fill(TiedNet(), "few", "float32") for _ in range(2))
    model = FSDP(net, **options)
    selected = prune.select(model)
    names = [pair.fqn for pair in selected]
    wrong = [] if names == WEIGHTS else [f"selected {names}"]
    keeps = reference.prune([dense.get_parameter(name) for name in WEIGHTS], 0.5)
    report = prune.global_unstructured(selected, prune.L1Unstructured, amount=0.5)
    if report.num_elements != 90:
        wrong.append(f"{report.num_elements} elements")
    for name, keep in zip(WEIGHTS, keeps, strict=True):
        torch_prune.custom_from_mask(*target(dense, name), keep)
    torch_prune.custom_from_mask(dense.l4, "weight", keeps[1])
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(0))
    for when in ("pruned", "stepped"):
        out, expected = model(x), dense(x)
        if not torch.allclose(out, expected, atol=1e-6):
            wrong.append(f"{when}: outputs are off by {(out - expected).abs().max()}")
        out.sum().backward()
        expected.sum().backward()
        for parameters in (model.parameters(), [p for n, p in dense.named_parameters()]):
            torch.optim.SGD(parameters, lr=0.1).step()
    expected = {**dense.state_dict(), **checkpoint.fold(dense.state_dict())}
    for key, value in model.state_dict().items():
        if not torch.allclose(value.float(), expected[key].float(), atol=1e-6):
            wrong.append(f"state dict: {key}")
    for module, name in selected:
        prune.remove(module, name)
    if prune.is_pruned(model) or sorted(model.state_dict()) != sorted(TiedNet().state_dict()):
        wrong.append("not an ordinary model again")
    return wrong


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_tied_and_transposed_parameters_of_one_flat_parameter(use_orig_params):
    assert_nothing_wrong(run_ranks(tied_and_by_columns, 2, use_orig_params))


def summoned(wrapping: str) -> list[str]:
    """Inside summon_full_params the stored weights are whole."""
    pair = Pair(wrapping)
    pair.prune(0.5)
    x = torch.ones(2, 6)
    with torch.no_grad():
        pair.model(x)  # the root keeps a gathered copy
    layer = pair.model.module.l1.module
    with FSDP.summon_full_params(pair.model, writeback=True):
        pair.close(layer.weight, pair.dense.l1.weight, "summoned")
        layer.weight.data.add_(1)
    with torch.no_grad():
        pair.dense.l1.weight_orig.add_(1)
    prune.hold_zeros(pair.model)
    pair.compare_values("written back")
    pair.close(pair.model(x), pair.dense(x), "after")
    return pair.wrong


@pytest.mark.parametrize("wrapping", ["fsdp1-2", "fsdp1_flat-2"])
def test_summon_full_params_shows_the_stored_weights(wrapping):
    assert_nothing_wrong_on(wrapping, summoned)
