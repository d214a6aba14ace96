"""Dense gradients of tied weights, and in loops of movement pruning."""

import pytest
import torch
from torch import nn

import distprune as prune
from distprune.base.naming import unwrap
from distprune.testing import run_ranks
from helpers import criteria_runs as runs
from helpers import wrappings
from helpers.comparisons import assert_nothing_wrong_on


class TiedNet(nn.Module):
    """Two layers of one weight, and small integers."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 5, bias=False)
        self.second = nn.Linear(5, 5, bias=False)
        self.second.weight = self.first.weight
        generator = torch.Generator().manual_seed(0)
        self.first.weight.data = torch.randint(-2, 3, (5, 5), generator=generator).float()

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))


def differences_of_tied(wrapping: str, given: str) -> list[str]:
    dense, model = TiedNet(), TiedNet()
    indices = wrappings.local_indices(nn.Sequential(dense.first), wrapping)["0.weight"]
    model = wrappings.wrap(model, wrapping)
    inner = wrappings.unwrapped(model)
    pairs = prune.select(model) if given == "select" else [(inner.second, "weight")]
    criterion = prune.criteria.SNIP(pairs)
    report = prune.global_unstructured(prune.select(model), prune.L1Unstructured, amount=12)
    assert report.num_elements == 25

    mask = prune_mask(dense.first.weight.detach(), 12)
    leaf = (dense.first.weight * mask).detach().requires_grad_()
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(-2, 3, (12, 5), generator=generator).float()
    (gradient,) = torch.autograd.grad((torch.relu(x @ leaf.T) @ leaf.T).sum(), leaf)
    is_held = wrappings.kind_of(wrapping) not in ("plain", "ddp")  # zero where it is pruned
    expected = ((leaf if is_held else dense.first.weight) * gradient).abs().detach()

    part, num_parts = wrappings.data_rank(wrapping)
    with prune.dense_gradients(model if given == "select" else pairs):
        (model(x.chunk(num_parts)[part]).sum() * num_parts).backward()
        criterion.update()
    (score,) = criterion.scores().values()
    mine = wrappings.my_part(expected, indices)
    wrong = [] if torch.equal(wrappings.local(score), mine) else [f"{score} is not {mine}"]
    has_scores = bool((expected * (mask == 0)).any())
    return wrong + ([] if has_scores != is_held else ["scores of pruned elements"])


def prune_mask(values: torch.Tensor, number: int) -> torch.Tensor:
    mask = torch.ones_like(values).view(-1)
    mask[values.abs().view(-1).sort(stable=True).indices[:number]] = 0
    return mask.view_as(values)


@pytest.mark.parametrize("given", ["select", "second name"])
@pytest.mark.parametrize("wrapping", ["plain-1", "ddp-2", "fsdp2_root-2", "fsdp1_root-2"])
def test_tied_weights(wrapping, given):
    assert_nothing_wrong_on(wrapping, differences_of_tied, given)


def movement_in_training(wrapping: str) -> tuple[int, bool, int]:
    """A loop as users write it: (pruned elements, whether no pruned one has a gradient, units)."""
    model = wrappings.wrap(runs.integer_net(wrapping), wrapping)
    indices = wrappings.local_indices(runs.integer_net(wrapping), wrapping)
    pairs = runs.named_targets(model, runs.WEIGHTS)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    movement = prune.criteria.Movement(pairs)
    pruner = prune.schedule.ScheduledPruner(
        pairs,
        prune.schedule.Cubic(begin=0, end=8, frequency=2, final_sparsity=0.6),
        pruning_method=movement.pruning_method,
        importance_scores=movement.scores,
        verify_every=4,
    )
    num_pruned, is_masked = 0, True
    for batch in runs.batches(runs.integer_net(wrapping), 10):
        with prune.dense_gradients(model):
            runs.backward(model, batch, *wrappings.data_rank(wrapping))
            movement.update()
        for (module, _), name in zip(pairs, runs.WEIGHTS, strict=True):
            mask = getattr(unwrap(module), "weight_mask", None)
            if mask is not None:
                gradient = wrappings.local(wrappings.gradient(model, name, indices))
                is_masked &= not gradient[wrappings.local(mask) == 0].any()
        optimizer.step()
        optimizer.zero_grad()
        report = pruner.step()
        num_pruned += 0 if report is None else report.num_pruned_now
    return num_pruned, is_masked, movement.num_updates


@pytest.mark.parametrize("wrapping", ["plain-1", "ddp-2", "fsdp1-2", "fsdp2-3", "tp-2"])
def test_movement_in_a_training_loop(wrapping):
    num_elements = sum(runs.integer_net(wrapping).get_parameter(n).numel() for n in runs.WEIGHTS)
    for found in run_ranks(movement_in_training, wrappings.world_size(wrapping), wrapping):
        assert found == (round(0.6 * num_elements), True, 10)


def test_global_mask_refuses_signed_scores_without_the_sign():
    layer = nn.Linear(3, 2)
    movement = prune.criteria.Movement([(layer, "weight")])
    layer.weight.grad = torch.ones(2, 3)
    movement.update()
    pairs = movement.parameters
    with pytest.raises(TypeError, match="expected signed=True"):
        prune.global_mask(pairs, 3, scores=movement.scores())
    chosen = prune.global_mask(pairs, 3, scores=movement.scores(), signed=True)
    (mask,) = chosen.masks
    lowest = (-layer.weight.detach()).flatten().sort().indices[:3]
    assert not mask.flatten()[lowest].any()
    assert int(mask.sum()) == 3
