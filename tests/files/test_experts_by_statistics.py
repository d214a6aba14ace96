"""Statistics of fused experts for a checkpoint: whose they are, and what is refused."""

import numpy as np
import pytest
import torch

from distprune.files import planning
from distprune.files.errors import SelectionError
from distprune.files.statistics_file import StoredStatistics, WeightLayout, write_statistics
from helpers.recipes import raw_recipe
from helpers.tiny_checkpoints import save

E, INNER, H = 3, 10, 12
LAYER = "model.layers.0.mlp.experts"
GATE_UP, DOWN = (E, 2 * INNER, H), (E, H, INNER)


def stored(shape, layout="experts", counts=(5, 9, 2)):
    draws = np.random.default_rng(shape[1])
    weight = WeightLayout(layout, shape)
    sums, squares = draws.random((2, *weight.input_shape)) * 50
    return StoredStatistics(weight, counts, sums, squares)


def fused(stem=LAYER, **changes):
    return {
        f"{stem}.gate_up_proj": stored(GATE_UP, **changes),
        f"{stem}.down_proj": stored(DOWN, **changes),
    }


def separate(stem=LAYER, num_experts=E, hidden=INNER):
    g = torch.Generator().manual_seed(0)
    shapes = {"gate_proj": (hidden, H), "up_proj": (hidden, H), "down_proj": (H, hidden)}
    return {
        f"{stem}.{expert}.{own}.weight": torch.randn(shape, generator=g)
        for expert in range(num_experts)
        for own, shape in shapes.items()
    }


def plan_of(tmp_path, tensors, statistics, **more):
    folder = tmp_path / str(len(list(tmp_path.iterdir())))
    source = save(folder / "source", tensors)
    write_statistics(folder / "statistics", "one_pass", statistics)
    recipe = raw_recipe(0.5, score="wanda", statistics=str(folder / "statistics"), **more)
    return planning.plan(source, recipe)


def problems_of(tmp_path, tensors, statistics, **more):
    with pytest.raises(SelectionError) as error:
        plan_of(tmp_path, tensors, statistics, **more)
    return str(error.value)


@pytest.mark.parametrize(
    ("on_disk", "in_model"),
    [
        (LAYER, "layers.0.mlp.experts"),
        ("layers.0.mlp.experts", LAYER),
        ("layers.0.block_sparse_moe.experts", LAYER),
        (LAYER.replace("mlp", "feed_forward"), LAYER.replace("mlp", "feed_forward")),
    ],
)
def test_each_expert_has_its_own_row_of_statistics(tmp_path, on_disk, in_model):
    statistics = fused(in_model)
    plan = plan_of(tmp_path, separate(on_disk), statistics)
    assert not plan.warnings and plan.statistics.facts()["count"] == 9
    for name, found in plan.statistics.of_tensor.items():
        expert, own = name.removeprefix(on_disk + ".").split(".")[:2]
        merged = "down_proj" if own == "down_proj" else "gate_up_proj"
        whole, row = statistics[f"{in_model}.{merged}"], int(expert)
        assert found.layout.kind == "linear" and found.count == (5, 9, 2)[row]
        assert np.array_equal(found.first, whole.first[row])
        assert np.array_equal(found.second, whole.second[row])
    assert len(plan.statistics.of_tensor) == 9


def test_a_gate_without_a_partner_is_all_of_its_parameter(tmp_path):
    """As of Nemotron-H, whose experts have no gate."""
    tensors = {n: t for n, t in separate().items() if "gate" not in n}
    statistics = {f"{LAYER}.up_proj": stored((E, INNER, H)), f"{LAYER}.down_proj": stored(DOWN)}
    assert len(plan_of(tmp_path, tensors, statistics).statistics.of_tensor) == 6
    statistics[f"{LAYER}.up_proj"] = stored(GATE_UP)
    text = problems_of(tmp_path, tensors, statistics)
    assert f"{LAYER}.0.up_proj.weight has the shape" in text


@pytest.mark.parametrize("kind", ["experts", "hidden", "layout"])
def test_statistics_of_other_experts_are_refused_by_name(tmp_path, kind):
    tensors, statistics = separate(), fused()
    if kind == "experts":
        tensors = separate(num_experts=4)
    elif kind == "hidden":
        tensors = separate(hidden=INNER // 2)
    else:
        linear = StoredStatistics(WeightLayout("linear", GATE_UP[1:]), 5, np.ones(H), np.ones(H))
        statistics[f"{LAYER}.gate_up_proj"] = linear
    text = problems_of(tmp_path, tensors, statistics)
    assert f"{LAYER}.{3 if kind == 'experts' else 0}." in text and "has the shape" in text


def test_experts_that_saw_no_token_are_named(tmp_path):
    (warning,) = plan_of(tmp_path, separate(), fused(counts=(5, 0, 2))).warnings
    assert warning.startswith(f"no token came to {LAYER}.1.down_proj.weight, {LAYER}.1.gate_proj")
    whole = {f"{LAYER}.gate_up_proj": torch.ones(GATE_UP), f"{LAYER}.down_proj": torch.ones(DOWN)}
    (warning,) = plan_of(tmp_path, whole, fused(counts=(5, 0, 0))).warnings
    assert f"no token came to {LAYER}.down_proj (experts 1, 2), {LAYER}.gate_up_proj" in warning
    assert "(4 of 6 matrices)" in warning
    (warning,) = plan_of(tmp_path, whole, fused(counts=(0, 0, 0))).warnings
    assert f"no token came to {LAYER}.down_proj, {LAYER}.gate_up_proj (6" in warning
