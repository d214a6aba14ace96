"""Recipes have one form: what the Python API writes, ``-r`` and ``load_recipe`` read again."""

import json
from dataclasses import asdict, fields

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from distprune.files import planning, pruning
from distprune.files.errors import SelectionError
from distprune.files.recipe import FileRecipe
from distprune.recipe import RecipeError, load_recipe, parse_recipe
from distprune.recipes import form
from helpers import tiny_checkpoints
from helpers.sampling import num_examples

yaml = pytest.importorskip("yaml")
FILE_FIELDS = [field.name for field in fields(FileRecipe)]
FIELDS = [*FILE_FIELDS, "schedule", "select", "limits", "output", "method"]
RECIPES = [
    FileRecipe(0.5, normalize="rms"),
    FileRecipe(
        groups=(
            FileRecipe(0.5, include=("a*",), normalize="mean", max_sparsity=0.9),
            FileRecipe(0.5, include=("b*",)),
            FileRecipe(0.5, "row", include=("c*",)),
        )
    ),
    FileRecipe(0.5),
    FileRecipe(1e-5, include=("re:a\\.b", "*"), exclude=('"quoted": #', "x: {y}"), min_ndim=1),
    FileRecipe(1, scope="layer", score="random", nan="keep", masks=False),
    FileRecipe(0.5, "row", include=("ü*", "\U0001f600*", "caf\udce9", "tab\t\x7f\x85\u2028")),
    FileRecipe(pattern="4:8", score="random", seed=2**40),
    FileRecipe(0.5, min_sparsity=1e-5, max_sparsity=0.9),
    FileRecipe(
        seed=3,
        nan="keep",
        masks=False,
        groups=(
            FileRecipe(0.5, include=("*attn*",), max_sparsity=0.75),
            FileRecipe(0.25, "row", score="random", exclude=("a", "b"), min_ndim=1),
            FileRecipe(pattern="2:4", include=("*mlp*",)),
            FileRecipe(0.0, "layer", include=("c",)),
        ),
    ),
]  # fmt: skip


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_is_written_is_read_again(recipe, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(recipe.to_yaml())
    assert FileRecipe.load(path) == recipe
    assert load_recipe(path).parts[0].score == recipe.parts[0].score
    assert FileRecipe(**json.loads(json.dumps(asdict(recipe)))) == recipe  # as in a report
    assert yaml.safe_load(recipe.to_yaml()) == json.loads(json.dumps(recipe.as_mapping()))


def test_the_recipe_beside_a_result_makes_the_same_plan(tmp_path):
    source = tiny_checkpoints.save(
        tmp_path / "source", {"a.weight": torch.arange(1.0, 65).reshape(8, 8)}
    )
    plan = planning.plan(source, FileRecipe(0.3, "layer", include=("a*",)))
    pruning.prune(plan, tmp_path / "out")
    again = FileRecipe.load(tmp_path / "out" / "distprune" / "recipe.yaml")
    assert planning.plan(source, again) == plan


def test_a_recipe_is_checked_once(tmp_path, monkeypatch):
    """When it is made; not by the plan, the search, the report, or what a result keeps."""
    calls = []
    check = form.check
    monkeypatch.setattr(form, "check", lambda *args: calls.append(args) or check(*args))
    source = tiny_checkpoints.save(tmp_path / "source", {"a.weight": torch.ones(8, 8)})
    recipe = FileRecipe(0.5, include=("a*",))
    pruning.prune(planning.plan(source, recipe), tmp_path / "out")
    assert len(calls) == 1 and recipe.as_stored() == recipe
    FileRecipe.load(tmp_path / "out" / "distprune" / "recipe.yaml")
    assert len(calls) == 2


# What version 0.2.0 wrote. verify compares recipe.yaml with what is written now, byte by byte.
OUTPUT = 'nan: "error"\noutput: {"masks": true, "card": true}\n'
WRITTEN = [
    (
        FileRecipe(0.5),
        'version: 1\nscore: "magnitude"\nscope: "global"\nsparsity: 0.5\n'
        'select: {"min_ndim": 2}\n' + OUTPUT,
    ),
    (
        FileRecipe(1e-5, include=("re:a\\.b", "*"), exclude=('"quoted": #', "x: {y}"), min_ndim=1),
        'version: 1\nscore: "magnitude"\nscope: "global"\nsparsity: 0.00001\n'
        'select: {"min_ndim": 1, "include": ["re:a\\\\.b", "*"], '
        '"exclude": ["\\"quoted\\": #", "x: {y}"]}\n' + OUTPUT,
    ),
    (
        FileRecipe(pattern="4:8", score="random", seed=2**40, card=False),
        'version: 1\nseed: 1099511627776\nscore: "random"\npattern: "4:8"\n'
        'select: {"min_ndim": 2}\nnan: "error"\noutput: {"masks": true, "card": false}\n',
    ),
    (
        FileRecipe(0.5, also=("a",), input_dims={"*.b": 0, "c": (0, 2)}, min_sparsity=0.25),
        'version: 1\nscore: "magnitude"\nscope: "global"\nsparsity: 0.5\n'
        'select: {"min_ndim": 2, "also": ["a"], "input_dims": {"*.b": [0], "c": [0, 2]}}\n'
        'limits: {"min_sparsity": 0.25, "max_sparsity": 1.0}\n' + OUTPUT,
    ),
    (
        FileRecipe(
            seed=3, nan="keep", masks=False,
            groups=(
                FileRecipe(0.5, include=("*attn*",), max_sparsity=0.75),
                FileRecipe(0.25, "row", score="random", exclude=("a",)),
                FileRecipe(pattern="2:4"),
            ),
        ),
        'version: 1\nseed: 3\ngroups:\n'
        '  - score: "magnitude"\n    scope: "global"\n    sparsity: 0.5\n'
        '    select: {"min_ndim": 2, "include": ["*attn*"]}\n'
        '    limits: {"min_sparsity": 0.0, "max_sparsity": 0.75}\n'
        '  - score: "random"\n    scope: "row"\n    sparsity: 0.25\n'
        '    select: {"min_ndim": 2, "exclude": ["a"]}\n'
        '  - score: "magnitude"\n    pattern: "2:4"\n    select: {"min_ndim": 2}\n'
        'nan: "keep"\noutput: {"masks": false, "card": true}\n',
    ),
]  # fmt: skip


@pytest.mark.parametrize(("recipe", "text"), WRITTEN)
def test_recipes_of_older_versions_are_read_and_written_as_they_were(recipe, text, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    assert FileRecipe.load(path) == recipe and recipe.to_yaml() == text


def some(fields, **required):
    """Mappings with some of the fields."""
    return st.fixed_dictionaries(required, optional=fields)


texts = st.text(min_size=1, max_size=8) | st.sampled_from(["*", "re:a.b", "<<", "=", "~", "1e3"])
lists = st.lists(texts, min_size=1, max_size=3).filter(lambda names: "re:" not in names[0][:3])
shares = st.sampled_from([0.0, 0.25, 1, 1e-300]) | st.floats(0, 1)
scores = st.sampled_from(["magnitude", "random"])
dims = st.dictionaries(texts, st.integers(-9, 9) | st.lists(st.integers(), min_size=1, max_size=3))
limits = st.tuples(shares, shares).map(sorted)
amounts = (
    some({"scope": st.sampled_from(["global", "layer", "row"])}, sparsity=shares)
    | some({}, pattern=st.sampled_from(["2:4", "02:4", "1:9999"]))
    | st.builds(
        lambda share, pair: {"sparsity": share, "min_sparsity": pair[0], "max_sparsity": pair[1]},
        shares,
        limits,
    )
)
wholes = {
    "seed": st.integers(0, 2**63 - 1), "nan": st.sampled_from(["error", "keep"]),
    "masks": st.booleans(), "card": st.booleans(),
}  # fmt: skip
selections = some({"include": lists, "exclude": lists, "min_ndim": st.integers(1, 5)}) | some(
    {"also": lists, "exclude": st.just(()), "input_dims": dims}
)
budgets = st.builds(lambda *parts: {k: v for part in parts for k, v in part.items()}, amounts,
                    selections, some({"score": scores}))  # fmt: skip


@settings(max_examples=num_examples(160), deadline=None)
@given(st.lists(budgets, min_size=1, max_size=3), some(wholes), st.booleans())
def test_whatever_is_a_recipe_is_read_as_it_was_written(parts, whole, is_flat):
    parts = parts[:1] if is_flat else parts
    if not any(part.get("score") == "random" for part in parts):
        whole.pop("seed", None)
    if is_flat:
        expected = recipe = FileRecipe(**parts[0], **whole)
    else:
        expected = recipe = FileRecipe(groups=tuple(FileRecipe(**part) for part in parts), **whole)
        if len(parts) == 1:  # read as a recipe without groups, which prunes the same
            (expected,) = recipe.groups
    document = yaml.safe_load(recipe.to_yaml())
    assert FileRecipe.parse(document) == expected
    assert FileRecipe(**json.loads(json.dumps(asdict(recipe)))) == recipe  # as in a report


schedules = (
    some({"step": st.integers(0, 9)}, kind=st.just("one_shot"), sparsity=shares)
    | some(
        {"begin": st.integers(0, 50)},
        kind=st.sampled_from(["linear", "cubic"]), end=st.integers(50, 99),
        frequency=st.integers(1, 9), final_sparsity=shares,
    )
)  # fmt: skip
patterns = texts.filter(lambda text: text[:3] != "re:") | lists
selects = some({
    "include": patterns, "exclude": patterns, "names": lists, "min_ndim": st.integers(1, 4),
    "input_dims": dims,
})  # fmt: skip
ranges = limits.map(lambda pair: {"min_sparsity": pair[0], "max_sparsity": pair[1]})
live_amounts = (
    some({"limits": ranges, "scope": st.just("global")}, sparsity=shares)
    | some({"limits": ranges}, schedule=schedules)
    | some({"scope": st.sampled_from(["layer", "row"])}, sparsity=shares)
)
patterned = some({"score": scores}, pattern=st.just("2:4"), select=selects)
groups = patterned | st.builds(
    lambda amount, rest: amount | rest, live_amounts, some({"method": scores}, select=selects)
)


@settings(max_examples=num_examples(160), deadline=None)
@given(st.lists(groups, min_size=1, max_size=3), st.booleans(), some({"score": scores}))
def test_whatever_is_read_is_the_same_as_plain_values(parts, is_flat, top):
    document = {"version": 1} | (parts[0] if is_flat else {"groups": parts} | top)
    recipe = parse_recipe(document)
    assert parse_recipe(recipe.as_mapping()) == recipe


@settings(max_examples=num_examples(100), deadline=None)
@given(st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts | st.dates(),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(
        st.sampled_from([*FIELDS, "kind", "include", "max_sparsity", "x"]) | texts, values
    ), max_leaves=12,
))  # fmt: skip
@example({"sparsity": 0.5, "scope": "\ud800", "nan": "\ud800", "score": ["\ud800"]})
@example({"schedule": {"kind": "\ud800"}})
@example({"schedule": {"kind": ["one_shot"], "\ud800": 3}})
@example({"schedule": {"kind": True}, "\ud800": 1, "select": {"\ud800": 1}})
@example({"sparsity": "\ud800", "groups": "\ud800", "pattern": "\ud800", "seed": 10**400})
@example({"sparsity": 10**400, "select": "\ud800", "limits": {"min_sparsity": b"1"}})
@example({"sparsity": 0.5, "select": {"include": "\ud800", "input_dims": {"\ud800": 10**400}}})
@example({"pattern": False})
def test_whatever_else_is_refused_in_words(document):
    document = {"version": 1, **document} if isinstance(document, dict) else document
    try:
        parse_recipe(document)
    except RecipeError as error:
        assert error.problems and all(": " in problem for problem in error.problems)
    if isinstance(document, dict):
        try:
            FileRecipe(**{key: value for key, value in document.items() if key in FILE_FIELDS})
        except SelectionError as error:
            assert "\n  - " in str(error)


def test_limits_that_are_whole_numbers_are_stored_as_floats():
    recipe = FileRecipe(1, min_sparsity=0, max_sparsity=1, groups=None)
    assert json.dumps(asdict(recipe)) == json.dumps(asdict(FileRecipe(1.0)))
