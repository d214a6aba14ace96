"""What scope, pattern and input_dims accept, and schedules of them."""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import distprune as prune
from distprune import budgets, schedule


def layers():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 4))
    return model, [(model[0], "weight"), (model[1], "weight")]


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"scope": "column", "amount": 0.5}, "scope='column'; expected 'global', 'layer' or 'row'"),
        ({"scope": "row", "amount": 3}, "amount=3 with scope='row'; expected a fraction"),
        ({"pattern": "4:2"}, "expected a pattern N:M such as '2:4', got '4:2'"),
        ({"pattern": "2:4", "amount": 0.5}, "amount=0.5 beside pattern='2:4'"),
        ({"pattern": "2:4", "scope": "row"}, "scope='row' and amount=None beside pattern='2:4'"),
        ({"pattern": "2:4"}, "6 inputs .* which 4 does not divide: 2:4 does not fit"),
        ({"pattern": "4x4"}, "expected a pattern N:M such as '2:4', got '4x4'"),
        ({"scope": "row", "amount": {"0.weight": 0.5}}, "expected a fraction"),
        ({"scope": "row", "amount": 0.5, "min_sparsity": 0.1}, "min_sparsity=0.1"),
        ({"pattern": "1:2", "input_dims": {"x.*": 0}}, "'x.*' matches none of the 2 parameters"),
        ({"pattern": "1:2", "input_dims": {"re:.*": 2}}, "expected one of its dimensions"),
    ],
)
def test_errors_say_what_was_expected(arguments, message):
    _, pairs = layers()
    with pytest.raises(ValueError, match=message):
        prune.global_unstructured(pairs, prune.L1Unstructured, **arguments)
    assert not any(hasattr(module, "weight_mask") for module, _ in pairs)


def test_stacked_matrices_need_input_dims():
    module = nn.Module()
    module.experts = nn.Parameter(torch.randn(2, 4, 6))
    pairs = [(module, "experts")]
    with pytest.raises(ValueError, match="along which dimension its inputs lie is not known"):
        prune.global_unstructured(pairs, prune.L1Unstructured, pattern="2:4")
    prune.global_unstructured(
        pairs, prune.L1Unstructured, pattern="2:4", input_dims={(module, "experts"): 1}
    )
    assert (module.experts_mask.sum(1) == 2).all()


def test_pairs_are_keys_in_any_wrapper():
    layer = nn.Linear(6, 4)
    wrapped = (checkpoint_wrapper(layer), "weight")
    for call in (
        {"amount": 0.5, "min_sparsity": {wrapped: 0.25}, "max_sparsity": {wrapped: 0.75}},
        {"amount": {wrapped: 0.75}},
        {"amount": budgets.owl([wrapped], 0.5, {wrapped: 0.1})},
        {"pattern": "1:2", "input_dims": {wrapped: 1}},
    ):
        prune.global_unstructured([(layer, "weight")], prune.L1Unstructured, **call)
        prune.remove(layer, "weight")
    two = {wrapped: 0.25, (layer, "weight"): 0.5}
    with pytest.raises(ValueError, match=r"several values for .*: 0\.25, 0\.5"):
        prune.global_unstructured([wrapped], prune.L1Unstructured, amount=0.5, min_sparsity=two)


def test_modules_of_transformers_that_say_it_need_none():
    module = nn.Module()
    module.is_transposed = True
    module.gate_up_proj = nn.Parameter(torch.randn(2, 4, 6))
    prune.global_unstructured([(module, "gate_up_proj")], prune.L1Unstructured, pattern="2:4")
    assert (module.gate_up_proj_mask.sum(1) == 2).all()


def test_rounding_of_layers_is_each_for_itself_and_that_of_a_budget_of_the_total():
    pairs = [(nn.Linear(1, 1), "weight") for _ in range(3)]
    report = prune.global_unstructured(pairs, prune.L1Unstructured, scope="layer", amount=0.6)
    assert report.num_pruned == 3
    pairs = [(nn.Linear(1, 1), "weight") for _ in range(3)]
    shares = budgets.uniform(pairs, 0.6)
    report = prune.global_unstructured(pairs, prune.L1Unstructured, amount=shares)
    assert report.num_pruned == 2


def test_a_schedule_of_rows():
    _, pairs = layers()
    steps = schedule.Linear(begin=0, end=4, frequency=1, final_sparsity=0.5)
    pruner = schedule.ScheduledPruner(pairs, steps, scope="row")
    for step in range(5):
        pruner.step()
        target = step / 8
        for module, name in pairs:
            mask = getattr(module, name + "_mask", torch.ones(1, module.in_features))
            assert ((mask == 0).sum(1) == round(target * module.in_features)).all()


def test_a_schedule_of_a_pattern():
    _, pairs = layers()
    pruner = schedule.ScheduledPruner(pairs[:1], schedule.Linear(0, 4, 1, 0.5), pattern="2:4")
    counts = []
    for _ in range(5):
        pruner.step()
        mask = getattr(pairs[0][0], "weight_mask", torch.ones(6, 8))
        counts.append({int(n) for n in (mask.view(-1, 4) == 0).sum(1)})
    assert counts == [{0}, {0}, {1}, {2}, {2}]
    with pytest.raises(ValueError, match=r"expected a schedule that ends at 0\.5"):
        schedule.ScheduledPruner(pairs[:1], schedule.Linear(0, 4, 1, 0.9), pattern="2:4")
