"""Recipes: every mistake is named; what is right becomes a pruner."""

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import distprune as prune
from distprune.recipe import Recipe, RecipeError, load_recipe, parse_recipe
from distprune.schedule import Cubic, OneShot
from distprune.testing import run_ranks

CUBIC = {"kind": "cubic", "end": 30, "frequency": 10, "final_sparsity": 0.8}


class Tiny(nn.Module):
    """With the names of a Llama's layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed_tokens = nn.Embedding(7, 6)
        self.block = nn.ModuleDict(
            {
                "self_attn": nn.ModuleDict({"q_proj": nn.Linear(6, 10)}),
                "mlp": nn.ModuleDict({"up_proj": nn.Linear(6, 20)}),
            }
        )
        self.lm_head = nn.Linear(6, 7)


def problems_of(recipe) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        load_recipe(recipe) if isinstance(recipe, Path) else parse_recipe(recipe)
    assert all(problem in str(caught.value) for problem in caught.value.problems)
    return list(caught.value.problems)


def test_every_problem_of_a_file_is_named(tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text(
        """\
version: 3
methd: magnitude
sparsity: 1e-1
schedule:
  kind: cubicc
  stop: 3
select:
  exlude: [lm_head]
  include: ["re:("]
limits: {min_sparsity: 0.9, max_sparsity: 0.2}
seed: 3
seed: 4
"""
    )
    assert problems_of(file) == [
        "seed: given twice; expected every key once.",
        "schedule: is given beside 'sparsity'; expected one of the two.",
        "version: Input should be 1 or 2, found 3 (int).",
        "sparsity: Input should be a valid number, found '1e-1' (str).",
        "schedule: Input tag 'cubicc' found using 'kind' does not match any of the expected tags: "
        "'one_shot', 'linear', 'cubic', found {'kind': 'cubicc', 'stop': 3} (dict).",
        "limits: Value error, min_sparsity 0.9 is above max_sparsity 0.2, "
        "found {'min_sparsity': 0.9, 'max_sparsity': 0.2} (dict).",
        "select.include: Value error, expected a regular expression after 're:' (missing ), "
        "unterminated subpattern at position 0), found ['re:('] (list).",
        "select.exlude: Extra inputs are not permitted, found ['lm_head'] (list).",
        "methd: Extra inputs are not permitted, found 'magnitude' (str).",
    ]
    file.write_text("version: [1")
    with pytest.raises(ValueError, match=r"recipe.yaml is no valid YAML.*(.|\n)*line 1"):
        load_recipe(file)
    file.write_text("")
    assert problems_of(file)[0].startswith("the document: Input should be a valid dict")


@pytest.mark.parametrize(
    ("recipe", "problems"),
    [
        ({}, ["version: Field required", "has no 'sparsity', 'pattern' or 'schedule'"]),
        ([], ["the document: Input should be a valid dictionary"]),
        ({"version": 1, "sparsity": True}, ["sparsity: Input should be a valid number"]),
        ({"version": 1, "sparsity": float("nan")}, ["sparsity: Input should be a finite"]),
        (
            {"version": 1, "sparsity": 0.5, "scope": "rows"},
            ["scope: Input should be 'global', 'layer' or 'row', found 'rows'"],
        ),
        (
            {"version": 1, "sparsity": 0.5, "score": "random", "method": "random"},
            ["method: is given beside 'score'"],
        ),
        (
            {"version": 1, "sparsity": 0.5, "output": {"masks": 1}, "nan": "drop"},
            [
                "output.masks: Input should be a valid boolean",
                "nan: Input should be 'error' or 'keep'",
            ],
        ),
        (
            {"version": 1, "pattern": "4:2"},
            ["pattern: Value error, expected a pattern N:M"],
        ),
        ({"version": 1, "pattern": 124}, ["pattern: Value error, expected a pattern N:M"]),
        (
            {"version": 1, "pattern": "2:4", "sparsity": 0.5, "scope": "row", "limits": {}},
            [f"{key}: has no place beside 'pattern'" for key in ("sparsity", "scope", "limits")],
        ),
        (
            {"version": 2, "pattern": "4x4", "normalize": "rms"},
            ["pattern: Value error, expected a pattern N:M"],
        ),
        (
            {"version": 2, "pattern": "2:4", "normalize": "rms"},
            ["normalize: has no effect beside a pattern"],
        ),
        ({"version": 1, "sparsity": 0.5, "seed": 1}, ["seed: has no effect without score"]),
        (
            {"version": 1, "sparsity": 0.5, "select": 3},
            ["select: Input should be a valid dict"],
        ),
        (
            {"version": 1, "sparsity": None, "seed": None, "select": {"include": None}},
            [f"{key}: has no value" for key in ("sparsity", "seed", "select.include")],
        ),
        (
            {"version": 1, "sparsity": 0.5, "scope": "row", "limits": {"max_sparsity": 0.9}},
            ["limits: has no effect with scope 'row'"],
        ),
        (
            {
                "version": 1,
                "sparsity": 0.5,
                "limits": {"max_sparsity": 0.9},
                "groups": [{"select": {}, "scope": "layer"}, {"select": {}, "scope": "global"}],
            },
            ["groups[0].limits: has no effect with scope 'layer'"],
        ),
        (
            {"version": 1, "sparsity": 0.5, "select": {"include": [], "names": [1]}},
            ["select.include: Value error, expected", "select.names: Value error, expected"],
        ),
        (
            {"version": 1, "schedule": {**CUBIC, "begin": 40}},
            ["schedule.cubic: Value error, end=30 comes before begin=40"],
        ),
        (
            {"version": 1, "schedule": {"kind": "one_shot", "end": 3, "step": -1}},
            [
                "schedule.one_shot.end: Extra inputs",
                "schedule.one_shot.step: Input should be greater",
                "schedule.one_shot.sparsity: Field required",
            ],
        ),
        (
            {"version": 1, "select": {}, "groups": [{"sparsity": 0.5}, 3, {"select": {}}]},
            [
                "select: goes into each of the groups",
                "groups[1]: Input should be a valid dictionary",
                "groups[0].select: Field required",
                "groups[2]: has no 'sparsity', 'pattern' or 'schedule'",
            ],
        ),
        ({"version": 1, "groups": {}}, ["groups: Value error, expected a list of mappings"]),
        (
            {
                "version": 1,
                "groups": [
                    {"select": {}, "pattern": "2:4", "sparsity": 0.5, "scope": "row", "limits": {}},
                    {"select": {}, "sparsity": 0.5, "scope": "rows"},
                    {"select": {}, "pattern": 24},
                ],
            },
            [
                "groups[0].sparsity: has no place beside 'pattern'",
                "groups[0].scope: has no place beside 'pattern'",
                "groups[0].limits: has no place beside 'pattern'",
                "groups[1].scope: Input should be 'global', 'layer' or 'row'",
                "groups[2].pattern: Value error, expected a pattern N:M such as",
            ],
        ),
    ],
)
def test_problems_of_plain_values(recipe, problems):
    found = problems_of(recipe)
    assert len(found) == len(problems), found
    for expected in problems:
        assert any(expected in each for each in found), (expected, found)


def test_defaults_and_values():
    recipe = parse_recipe({"version": 1, "sparsity": 1})
    assert recipe == Recipe(1.0) and recipe.course == OneShot(0, 1.0)
    recipe = parse_recipe(
        {
            "version": 1,
            "method": "random",
            "seed": 5,
            "schedule": CUBIC,
            "limits": {"max_sparsity": 0.9},
            "groups": [
                {"select": {"include": "a.*", "names": ["weight", "bias"]}},
                {"select": {"exclude": ["a.*"]}, "method": "magnitude", "sparsity": 0.25},
            ],
        }
    )
    assert recipe.seed == 5
    assert recipe.groups == (
        Recipe(
            schedule=Cubic(0, 30, 10, 0.8),
            score="random",
            seed=5,
            include=("a.*",),
            names=("weight", "bias"),
            max_sparsity=0.9,
        ),
        Recipe(0.25, exclude=("a.*",), max_sparsity=0.9),
    )
    assert "Cubic(begin=0, end=30, frequency=10, final_sparsity=0.8" in repr(recipe)
    recipe = parse_recipe({"version": 1, "pattern": "3:4"})
    assert recipe.kept_of == (3, 4) and recipe.course == OneShot(0, 0.25)


@pytest.mark.parametrize(
    "recipe",
    [
        {"sparsity": 0.5, "scope": "row", "method": "random", "seed": 3},
        {"pattern": "2:4", "select": {"include": "a", "exclude": ["re:b.*"], "min_ndim": 3}},
        {"pattern": "2:4", "select": {"also": "a", "input_dims": {"*.b": 0, "c": [0, 2]}}},
        {"sparsity": 0.5, "nan": "keep", "output": {"masks": False}},
        {"schedule": CUBIC, "limits": {"max_sparsity": 0.9}},
        {"schedule": {"kind": "one_shot", "step": 3, "sparsity": 0.25}},
        {
            "sparsity": 0.5,
            "limits": {"max_sparsity": 0.9},
            "groups": [
                {"select": {"include": "a"}, "scope": "row", "limits": {}},
                {"select": {"include": "b"}, "pattern": "2:4"},
            ],
        },
        {
            "groups": [
                {"select": {}, "sparsity": 0.1},
                {"select": {"names": "b"}, "schedule": CUBIC},
            ]
        },
    ],
)
def test_a_recipe_as_plain_values_is_the_same_recipe(recipe):
    parsed = parse_recipe({"version": 1, **recipe})
    assert parse_recipe(parsed.as_mapping()) == parsed
    assert parsed.as_mapping().items() >= {"version": 1}.items()


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        ({"version": 1}, [None]),
        ({"version": 2}, ["rms"]),
        ({"version": 1, "normalize": "l2"}, ["l2"]),
        ({"version": 2, "normalize": "none"}, [None]),
        ({"version": 2, "scope": "layer"}, [None]),
        ({"version": 2, "scope": "layer", "normalize": "none"}, [None]),
        ({"version": 2, "score": "random"}, [None]),
        ({"version": 2, "method": "random"}, [None]),
        (
            {
                "version": 2,
                "normalize": "mean",
                "groups": [
                    {"select": {}},
                    {"select": {}, "normalize": "none"},
                    {"select": {}, "score": "random"},
                    {"select": {}, "pattern": "2:4"},
                    {"select": {}, "scope": "row"},
                ],
            },
            ["mean", None, None, None, None],
        ),
        (
            {"version": 2, "scope": "row", "groups": [{"select": {}, "scope": "global"}]},
            ["rms"],
        ),
    ],
)
def test_normalize_has_a_default_by_version_where_it_has_an_effect(recipe, expected):
    parsed = parse_recipe({"sparsity": 0.5, **recipe})
    assert [part.normalize for part in parsed.parts] == expected
    assert parse_recipe(parsed.as_mapping()) == parsed


@pytest.mark.parametrize(
    ("recipe", "problem"),
    [
        ({"normalize": "RMS"}, "normalize: Input should be 'rms', 'l2', 'mean' or 'none'"),
        ({"normalize": None}, "normalize: has no value"),
        ({"normalize": "rms", "scope": "row"}, "normalize: has no effect with scope 'row'"),
        ({"normalize": "rms", "score": "random"}, "normalize: has no effect with score 'random'"),
        (
            {"groups": [{"select": {}, "score": "random", "normalize": "l2"}]},
            "groups[0].normalize: has no effect with score 'random'",
        ),
        (
            {"normalize": "l2", "groups": [{"select": {}, "score": "random"}]},
            "normalize: has no effect in any of the groups",
        ),
    ],
)
def test_mistakes_in_normalize(recipe, problem):
    (found,) = problems_of({"version": 2, "sparsity": 0.5, **recipe})
    assert found.startswith(problem)


def test_a_pruner_divides_by_what_the_recipe_says():
    for version, normalize in ((1, None), (2, "rms")):
        model, twin = Tiny(), Tiny()
        for each in (model, twin):
            with torch.no_grad():
                each.block["mlp"]["up_proj"].weight.mul_(10)
        parse_recipe({"version": version, "sparsity": 0.5}).pruner(model).step()
        prune.global_unstructured(
            prune.select(twin), prune.L1Unstructured, amount=0.5, normalize=normalize
        )
        masks, expected = masks_of(model), masks_of(twin)
        assert masks.keys() == expected.keys() and len(masks) == 2
        assert all(torch.equal(masks[name], expected[name]) for name in masks)


@pytest.mark.parametrize(
    ("recipe", "what"),
    [
        ({"nan": "keep", "output": {"masks": False}}, "nan 'keep', output.masks"),
    ],
)
def test_a_pruner_refuses_what_only_the_command_line_does(recipe, what):
    with pytest.raises(ValueError, match=f"the recipe has {what}; expected none of that"):
        parse_recipe({"version": 1, "sparsity": 0.5, **recipe}).pruner(Tiny())


BLOCKS = {"include": ["block.*"]}


@pytest.mark.parametrize(
    ("recipe", "arguments"),
    [
        ({"scope": "layer", "sparsity": 0.3}, {"scope": "layer", "amount": 0.3}),
        ({"scope": "row", "sparsity": 0.4}, {"scope": "row", "amount": 0.4}),
        ({"pattern": "1:2"}, {"pattern": "1:2"}),
        (
            {"groups": [{"select": {**BLOCKS, "input_dims": {"*": 0}}, "pattern": "1:2"}]},
            {"pattern": "1:2", "input_dims": {"*": 0}},
        ),
        (
            {"scope": "layer", "sparsity": 0.5, "groups": [{"select": BLOCKS, "pattern": "1:2"}]},
            {"pattern": "1:2"},
        ),
        ({"pattern": "01:002"}, {"pattern": "1:2"}),
    ],
)
def test_scopes_and_patterns_of_models(recipe, arguments):
    torch.manual_seed(0)
    model = Tiny()
    twin = copy.deepcopy(model)
    if "groups" not in recipe:
        recipe = {**recipe, "select": BLOCKS}
    parsed = parse_recipe({"version": 2, **recipe})
    assert parse_recipe(parsed.as_mapping()) == parsed
    parsed.pruner(model).step()
    pairs = prune.select(twin, BLOCKS["include"])
    prune.global_unstructured(pairs, prune.L1Unstructured, **arguments)
    masks, expected = masks_of(model), masks_of(twin)
    assert masks.keys() == expected.keys() and len(masks) > 1
    assert all(torch.equal(masks[name], expected[name]) for name in masks)


def test_shipped_recipes_fit_a_llama():
    names = ("cubic_80", "magnitude_50", "random_50")
    found = {name: load_recipe(name) for name in names}
    assert found["cubic_80"].schedule == Cubic(0, 1000, 50, 0.8)
    assert found["cubic_80"].max_sparsity == 0.95
    for recipe in found.values():
        assert recipe.pruner(Tiny()).num_steps == 0
    with pytest.raises(ValueError, match="has groups; expected none of that for a model"):
        load_recipe("by_kind_of_layer").pruner(Tiny())


def masks_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: b.clone() for n, b in model.named_buffers() if n.endswith("_mask")}


def test_a_pruner_does_what_the_recipe_says():
    model, twin = Tiny(), Tiny()
    recipe = {"version": 1, "schedule": CUBIC, "select": {"exclude": ["lm_head", "embed*"]}}
    pruner = parse_recipe(recipe).pruner(model)
    reports = [pruner.step() for _ in range(31)]
    assert sum(report is not None for report in reports) == 3
    targets = prune.select(twin, exclude=["lm_head", "embed*"])
    prune.global_unstructured(targets, prune.L1Unstructured, amount=0.8)
    masks, expected = masks_of(model), masks_of(twin)
    assert masks.keys() == expected.keys() and len(masks) == 2
    assert all(torch.equal(masks[name], expected[name]) for name in masks)

    model = Tiny()
    recipe["limits"] = {"min_sparsity": 0.75, "max_sparsity": 0.85}
    pruner = parse_recipe(recipe).pruner(model)
    *_, report = [report for report in (pruner.step() for _ in range(31)) if report is not None]
    assert report.num_pruned == round(0.8 * 180)
    assert all(0.75 <= each.sparsity <= 0.85 for each in report.parameters)

    recipe["select"] = {"exclude": "no_such_layer"}
    with pytest.raises(ValueError, match="'no_such_layer' match no parameter"):
        parse_recipe(recipe).pruner(model)


def prune_at_random(seed: int | None) -> dict[str, torch.Tensor]:
    model = Tiny()
    values = {"version": 1, "method": "random", "schedule": CUBIC} | (
        {} if seed is None else {"seed": seed}
    )
    pruner = parse_recipe(values).pruner(model)
    for step in range(31):
        torch.manual_seed(step)
        pruner.step()
        assert torch.initial_seed() == step
    return masks_of(model)


@pytest.mark.slow
def test_a_seed_decides_on_any_number_of_ranks_and_leaves_the_generator_alone():
    alone, other = prune_at_random(5), prune_at_random(6)
    for masks in run_ranks(prune_at_random, 2, 5):
        assert all(torch.equal(masks[name], alone[name]) for name in alone)
    assert any(not torch.equal(other[name], alone[name]) for name in alone)
    count = sum(mask.numel() for mask in alone.values())
    assert sum(int((mask == 0).sum()) for mask in alone.values()) == round(0.8 * count)
    torch.manual_seed(30)
    drawn = torch.rand(())
    prune_at_random(5)
    assert torch.rand(()) == drawn


@pytest.mark.slow
def test_what_is_missing_is_named(tmp_path):
    """A mapping needs no PyYAML."""
    file = tmp_path / "recipe.yaml"
    file.write_text("version: 1\nsparsity: 0.5\n")
    script = f"""
import sys
sys.modules["yaml"] = None
from distprune.recipe import load_recipe, parse_recipe
parse_recipe(dict(version=1, sparsity=0.5))
def try_to(read, what):
    try:
        read(what)
    except ImportError as error:
        print(error)
try_to(load_recipe, {str(file)!r})
sys.modules["pydantic"] = None
try_to(parse_recipe, dict(version=1, sparsity=0.5))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    yaml, pydantic = done.stdout.splitlines()
    assert "needs PyYAML: pip install 'distprune[recipes]'" in yaml
    assert pydantic == "recipes need pydantic: pip install 'distprune[recipes]'"
    assert load_recipe(str(file)) == parse_recipe({"version": 1, "sparsity": 0.5})
