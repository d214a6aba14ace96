"""``verify(reference=True)``: the last selection once more, by gathering and sorting everything."""

import pytest
import torch

import distprune as prune
from distprune.testing import run_ranks
from helpers import wrappings
from helpers.comparisons import assert_nothing_wrong_on
from helpers.models import Net, fill

WRAPPINGS = [
    "plain-1", "plain-2", "ddp-2", "fsdp1-2", "fsdp1_root-3", "fsdp1_flat-2", "fsdp1_hybrid-2x2",
    "fsdp2-3", "fsdp2_root-2", "hsdp-2x2", "tp-2", "fsdp2_tp-2x2",
]  # fmt: skip


def pruned(wrapping: str, data: str = "few", dtype: str = "float32"):
    model = wrappings.wrap(fill(Net(wrappings.runnable_sizes(wrapping)), data, dtype), wrapping)
    pairs = prune.select(model, names=("weight", "bias"), everything=True)
    prune.global_unstructured(pairs, prune.L1Unstructured, amount=0.4)
    return model, pairs


def wrong_when_right(wrapping: str, data: str, dtype: str) -> list[str]:
    model, pairs = pruned(wrapping, data, dtype)
    report = prune.verify(model, reference=True)
    wrong = [] if set(report.recomputed) == {pair.fqn for pair in pairs} else [str(report)]
    return wrong + list(report.not_recomputed)


@pytest.mark.parametrize(
    ("data", "dtype"), [("few", "float32"), ("normal", "bfloat16"), ("denormal", "mixed")]
)
@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_a_right_selection_passes(wrapping, data, dtype):
    if dtype == "mixed" and "fsdp1" in wrapping:
        pytest.skip("FSDP1 joins parameters of one dtype")
    assert_nothing_wrong_on(wrapping, wrong_when_right, data, dtype)


@torch.no_grad()
def wrong_when_wrong(wrapping: str) -> list[str]:
    """On one shard a kept element and a pruned one change places; the new mask is accepted."""
    model, _ = pruned(wrapping, "normal")
    mask = wrappings.local(wrappings.unwrapped(model).l1.weight_mask).view(-1)
    kept, gone = int(mask.nonzero()[0]), int((mask == 0).nonzero()[0])
    mask[kept], mask[gone] = 0, 1
    prune.verify(model, accept=True)
    try:
        prune.verify(model, reference=True)
    except prune.VerificationError as error:
        text = str(error)
        return [] if "l1.weight" in text and "sorting" in text else [text]
    return ["nothing was raised"]


@pytest.mark.parametrize("wrapping", ["plain-2", "ddp-2", "fsdp1-2", "fsdp2-2", "hsdp-2x2", "tp-2"])
def test_a_wrong_selection_is_found(wrapping):
    assert_nothing_wrong_on(wrapping, wrong_when_wrong)


def reasons(wrapping: str, case: str) -> list[str]:
    """Why nothing was recomputed."""
    model, pairs = pruned(wrapping)
    if case == "step":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(4, 6)).square().mean().backward()
        optimizer.step()
    elif case == "again":
        prune.global_unstructured(pairs, prune.L1Unstructured, amount=0.1)
    elif case == "random":
        prune.global_unstructured(pairs, prune.RandomUnstructured, amount=0.1)
    elif case == "removed":
        prune.remove(*pairs[0])
    report = prune.verify(model, reference=True)
    return [str(report)] if report.recomputed else list(report.not_recomputed)


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("step", "changed since"),
        ("again", "pruned before"),
        ("random", "magnitude"),
        ("removed", "ranked together"),
    ],
)
@pytest.mark.parametrize("wrapping", ["plain-2", "ddp-2", "fsdp1-2", "fsdp2-2", "tp-2"])
def test_what_cannot_be_repeated_is_named(wrapping, case, reason):
    for found in run_ranks(reasons, wrappings.world_size(wrapping), wrapping, case):
        assert len(found) >= 5 and all(reason in each for each in found), found
