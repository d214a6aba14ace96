"""What of the zeros in weights becomes a mask; on every wrapper: test_operations.py."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import distprune as prune
from distprune.testing import run_ranks
from helpers.comparisons import assert_nothing_wrong, changes, snapshot


def test_a_model_stands_for_its_matrices_under_any_name():
    class Fused(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = nn.Parameter(torch.ones(2, 3, 4))
            self.dense = nn.Parameter(torch.ones(3, 4))
            self.scale = nn.Parameter(torch.zeros(4))
            self.row = nn.Parameter(torch.zeros(1, 4))
            self.tied = self.experts

    model = Fused()
    with torch.no_grad():
        model.experts[1, 2, 0] = -0.0
        model.experts[0, 0, 0] = float("nan")
    report = prune.masks_from_zeros(model)
    assert [(each.name, each.num_pruned) for each in report.parameters] == [("experts", 1)]
    assert prune.is_pruned(model) and not hasattr(model, "dense_mask")
    for mask in (model.experts_mask, model.tied_mask):
        assert mask[1, 2, 0] == 0 and mask.sum() == 23


def entirely_zero() -> nn.ModuleDict:
    model = nn.ModuleDict({"a": nn.Linear(4, 3), "lora_B": nn.Linear(4, 3)})
    with torch.no_grad():
        model["a"].weight[0] = 0
        model["lora_B"].weight.zero_()
    return model


@pytest.mark.parametrize(
    ("all_zero", "pruned"), [("leave", ["a.weight"]), ("prune", ["a.weight", "lora_B.weight"])]
)
def test_a_parameter_that_is_zero_entirely(all_zero, pruned):
    model = entirely_zero()
    before = snapshot(model)
    with pytest.raises(ValueError, match=r"lora_B\.weight: every element is zero"):
        prune.masks_from_zeros(model)
    with pytest.raises(ValueError, match="all_zero='no'; expected 'error', 'leave' or 'prune'"):
        prune.masks_from_zeros(model, all_zero="no")
    assert not changes(before, snapshot(model))
    report = prune.masks_from_zeros(model, all_zero=all_zero)
    assert [each.name for each in report.parameters] == pruned


def test_nothing_is_zero():
    model = nn.Linear(4, 3)
    nn.init.ones_(model.weight)
    with pytest.raises(ValueError, match="none of the 1 parameters has a zero"):
        prune.masks_from_zeros(model)
    assert not prune.is_pruned(model)


def stage() -> list[str]:
    """Each rank has a part of the model; one has no zeros at all."""
    rank = dist.get_rank()
    part = nn.ModuleDict({f"l{rank}": nn.Linear(4, 3)})
    nn.init.ones_(part[f"l{rank}"].weight)
    if rank != 1:
        with torch.no_grad():
            part[f"l{rank}"].weight[0, : rank + 1] = 0
    report = prune.masks_from_zeros(part, pipeline_parallel=True)
    counts = [(each.name, each.num_pruned) for each in report.parameters]
    wrong = [f"{counts}"] * (counts != [("l0.weight", 1), ("l2.weight", 3)])
    return wrong + ["the wrong one is pruned"] * (prune.is_pruned(part) != (rank != 1))


def test_pipeline_stages():
    assert_nothing_wrong(run_ranks(stage, 3))


def refusals() -> list[str]:
    """Replicas that differ; other arguments; zeros of one rank alone under FSDP are no fault."""
    rank, wrong = dist.get_rank(), []
    model = nn.Linear(4, 3, bias=False)
    nn.init.ones_(model.weight)
    with torch.no_grad():
        model.weight[0, rank] = 0
    before = snapshot(model)
    for arguments in ({}, {"all_zero": ("leave", "prune")[rank]}):
        try:
            prune.masks_from_zeros(model, **arguments)
            wrong.append("nothing was raised")
        except ValueError as error:
            told = "differ" in str(error)
            wrong += [str(error)] * (not told)
    return wrong + changes(before, snapshot(model))


def test_every_rank_raises_and_nothing_changes():
    assert_nothing_wrong(run_ranks(refusals, 2))
