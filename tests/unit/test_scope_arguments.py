"""What global_unstructured refuses; what scope, pattern and input_dims accept, and schedules."""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import distprune as prune
from distprune import budgets, schedule
from helpers.models import Net, seeded

HALF = dict.fromkeys(["l1.weight", "l2.weight", "l3.weight"], 0.5)  # of 60, 50 and 15 elements
SCOPES = "scope='column'; expected 'global', 'layer' or 'row'"
N_OF_M = "expected a pattern N:M such as '2:4', got"


def layers():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 4))
    return model, [(model[0], "weight"), (model[1], "weight")]


class Own(prune.Identity):
    """A method that does not rank, and takes an amount."""

    def __init__(self, amount=0):
        pass


def of_method(method, what, **options):
    text = f"{method.__name__} does not rank .*{what} has"
    return {"pruning_method": method, **options}, text, NotImplementedError


@pytest.mark.parametrize(
    ("arguments", "message", "error"),
    [
        ({"scope": "column", "amount": 0.5}, SCOPES, ValueError),
        ({"scope": "row", "amount": 3}, "amount=3 with scope='row'; expected a fra", ValueError),
        ({"pattern": "4:2"}, f"{N_OF_M} '4:2'", ValueError),
        ({"pattern": "4x4"}, f"{N_OF_M} '4x4'", ValueError),
        ({"pattern": "2:4", "amount": 0.5}, "amount=0.5 beside pattern='2:4'", ValueError),
        ({"pattern": "2:4", "scope": "row"}, "scope='row' and amount=None beside pat", ValueError),
        ({"pattern": "2:4"}, "6 inputs .* which 4 does not divide: 2:4 does not fit", ValueError),
        ({"scope": "row", "amount": 0.5, "min_sparsity": 0.1}, "min_sparsity=0.1", ValueError),
        ({"pattern": "1:2", "input_dims": {"x.*": 0}}, "'x.*' matches none of the 3", ValueError),
        ({"pattern": "1:2", "input_dims": {"re:.*": 2}}, "expected one of its dimen", ValueError),
        ({"amount": {"l1.weight": 0.5, "l2.weight": 0.5}}, "does not have l3.weight", ValueError),
        ({"amount": {**HALF, "l9": 0.1}}, "'l9', which is none", ValueError),
        ({"amount": {**HALF, "l1.weight": 1.5}}, r"amount\[l1.weight\]=1.5 is not in", ValueError),
        ({"amount": {**HALF, "l1.weight": "0.5"}}, "'0.5'", TypeError),
        ({"amount": HALF, "max_sparsity": 0.9}, "functions of distprune.bud", ValueError),
        ({"amount": HALF, "scope": "layer"}, "expected a fraction", ValueError),
        ({"amount": 9, "min_sparsity": 0.6, "max_sparsity": 0.5}, "at least 36", ValueError),
        ({"amount": 9, "max_sparsity": 1.5}, "max_sparsity=1.5", ValueError),
        ({"amount": 9, "max_sparsity": {"l1.weight": True}}, r"y\[l1.weight\]=True", TypeError),
        ({"amount": 9, "min_sparsity": {"l1.wieght": 0.5}}, "'l1.wieght', which is n", ValueError),
        ({"amount": 20, "min_sparsity": 0.5}, r"for 63 to .* more .*, and 20 are", ValueError),
        ({"amount": 20, "max_sparsity": 0.1}, "to 12 more pruned elements, and 20", ValueError),
        of_method(prune.Identity, "min_sparsity or max_sparsity", max_sparsity=0.9),
        of_method(Own, "min_sparsity or max_sparsity", min_sparsity=0.1),
        of_method(Own, "a mapping as amount", amount=HALF),
        of_method(Own, "scope or pattern", amount=0.5, scope="row"),
        of_method(prune.Identity, "normalize='rms'", normalize="rms"),
        of_method(prune.RandomUnstructured, "normalize='rms'", normalize="rms", amount=1),
    ],
)
def test_errors_say_what_was_expected(arguments, message, error):
    model = seeded(Net())
    arguments = {"pruning_method": prune.L1Unstructured, **arguments}
    with pytest.raises(error, match=message):
        prune.global_unstructured(prune.select(model), **arguments)
    assert not prune.is_pruned(model)


def test_stacked_matrices_need_input_dims():
    module = nn.Module()
    module.experts = nn.Parameter(torch.randn(2, 4, 6))
    pairs = [(module, "experts")]
    with pytest.raises(ValueError, match="along which dimension its inputs lie is not known"):
        prune.global_unstructured(pairs, prune.L1Unstructured, pattern="2:4")
    along = {(module, "experts"): 1}
    prune.global_unstructured(pairs, prune.L1Unstructured, pattern="2:4", input_dims=along)
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
