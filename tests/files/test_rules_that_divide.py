"""Budgets and RIA on checkpoints: counts, reports, interruptions, and what is refused."""

import pytest
import torch
from test_scores_from_statistics import make_model, make_statistics, selected

import distprune
from distprune.files import planning, pruning
from distprune.files.errors import CheckpointError, NaNError
from distprune.files.verifying import verify
from distprune.recipes import Recipe
from distprune.schedule import ScheduledPruner
from helpers.recipes import raw_recipe
from helpers.tiny_checkpoints import save

RUN = ("distprune/report.json",)
WHERE = {
    "include": ("layers.*",),
    "exclude": ("layers.4*", "*.bias"),
    "input_dims": {"layers.1.weight": 0, "layers.3.weight": (1, 2)},
}
pytestmark = pytest.mark.filterwarnings("ignore:no token")


@pytest.fixture
def model():
    return make_model(torch.float32)


@pytest.fixture
def source(tmp_path, model):
    return save(tmp_path / "source", {n: t.detach() for n, t in model.state_dict().items()})


@pytest.fixture
def statistics(tmp_path):
    return str(make_statistics(tmp_path / "statistics.safetensors"))


@pytest.mark.parametrize("budget", ["uniform", "erk"])
@pytest.mark.parametrize("limits", [{}, {"min_sparsity": 0.45, "max_sparsity": 0.7}])
def test_the_report_has_the_counts_of_the_model(tmp_path, model, source, budget, limits):
    shares = getattr(distprune.budgets, budget)(selected(model), 0.55, **limits)
    live = distprune.global_unstructured(selected(model), distprune.L1Unstructured, amount=shares)
    expected = {each.name: each for each in live.parameters}
    plan = planning.plan(source, raw_recipe(0.55, budget=budget, **limits, **WHERE))
    report = pruning.prune(plan, tmp_path / "target")
    assert report.num_pruned == live.num_pruned_now and report.groups[0].threshold is None
    for tensor, planned in zip(report.tensors, plan.tensors, strict=True):
        of_model = expected[tensor.name]
        assert tensor.num_pruned == of_model.num_pruned_now
        assert (tensor.threshold is None) == (tensor.num_pruned == 0)
        assert planned.num_to_prune == tensor.num_pruned
    assert verify(tmp_path / "target", source).is_good
    card = (tmp_path / "target" / "README.md").read_text()
    assert f"budget: {budget}\n" in card


@pytest.mark.parametrize(
    "fields", [{"score": "ria", "scope": "row"}, {"score": "ria"}, {"budget": "owl"}], ids=str
)
def test_what_has_no_sum_is_named(tmp_path, model, statistics, fields):
    recipe = raw_recipe(0.5, **fields, statistics=statistics, **WHERE)
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    for value, error in ((float("nan"), NaNError), (float("inf"), CheckpointError)):
        state["layers.2.weight"][1, 1] = value
        plan = planning.plan(save(tmp_path / str(value), state), recipe)
        with pytest.raises(error, match=r"layers\.2\.weight.*[Rr]epair"):
            pruning.prune(plan, tmp_path / "target")
    assert not (tmp_path / "target").exists()


def test_a_recipe_for_a_model(model):
    recipe = {"sparsity": 0.5, "budget": "erk", "exclude": "layers.4*"}
    pruner = ScheduledPruner.from_recipe(model, Recipe(**recipe))
    pruner.step()
    other = make_model(torch.float32)
    shares = distprune.budgets.erk(selected(other), 0.5)
    distprune.global_unstructured(selected(other), distprune.L1Unstructured, amount=shares)
    for layer, expected in zip(model["layers"], other["layers"], strict=True):
        if hasattr(expected, "weight_mask"):
            assert layer.weight_mask.equal(expected.weight_mask)
    with pytest.raises(ValueError, match=r"budget 'owl'.*none of that for a model"):
        ScheduledPruner.from_recipe(model, Recipe(**{**recipe, "budget": "owl", "statistics": "a"}))
