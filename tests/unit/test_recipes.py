"""Recipes: every mistake is named; what is right is written, read again, and becomes a pruner."""

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import distprune as prune
from distprune.recipes import Recipe, load_recipe, shipped_recipes
from distprune.schedule import Cubic, OneShot, ScheduledPruner
from helpers.sampling import num_examples

CUBIC = {"kind": "cubic", "begin": 0, "end": 30, "frequency": 10, "final_sparsity": 0.8}


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


def masks_of(model):
    buffers = model.named_buffers()
    return {name: mask.bool() for name, mask in buffers if name.endswith("_mask")}


@pytest.mark.parametrize(
    ("keys", "texts"),
    [
        ({}, ["expected one of sparsity, pattern and schedule, found none"]),
        ({"sparsity": True}, ["sparsity: Input should be a valid number, found 'True'"]),
        ({"sparsity": float("nan")}, ["sparsity: Input should be a finite number"]),
        ({"sparsity": 1.5, "methd": 1}, ["sparsity: Input should be less than", "methd: Extra"]),
        ({"sparsity": 0.5, "scope": "rows"}, ["scope: Input should be 'global', 'layer' or 'row'"]),
        ({"sparsity": 0.5, "pattern": "2:4"}, ["found sparsity 0.5 and pattern '2:4'"]),
        ({"sparsity": 0.5, "schedule": CUBIC}, ["found sparsity 0.5 and schedule Cubic("]),
        ({"pattern": "4:2"}, ["pattern: expected a pattern N:M"]),
        ({"pattern": 124}, ["YAML needs quotes around it, found '124'"]),
        ({"pattern": "2:4", "scope": "row"}, ["scope 'row' has no place beside pattern '2:4'"]),
        ({"pattern": "2:4", "budget": "erk"}, ["budget 'erk' has no effect with pattern '2:4'"]),
        (
            {"sparsity": 0.5, "scope": "row", "max_sparsity": 0.9, "normalize": "l2"},
            [
                "max_sparsity 0.9 has no effect with scope",
                "normalize 'l2' has no effect with scope",
            ],
        ),
        (
            {"sparsity": 0.5, "budget": "erk", "normalize": "l2"},
            ["normalize 'l2' has no effect with budget 'erk'"],
        ),
        (
            {"sparsity": 0.5, "score": "random", "normalize": "l2"},
            ["normalize 'l2' has no effect with score 'random'"],
        ),
        ({"sparsity": 0.5, "seed": 1}, ["seed 1 has no effect without score 'random'"]),
        ({"sparsity": 0.5, "statistics": "a"}, ["have no effect without score wanda"]),
        ({"sparsity": 0.5, "scores": "a"}, ["have no effect without score taylor"]),
        ({"sparsity": 0.5, "also": "a", "include": "b"}, ["also adds to the default, which incl"]),
        ({"sparsity": 0.5, "min_sparsity": 0.9, "max_sparsity": 0.2}, ["min_sparsity 0.9 is ab"]),
        ({"sparsity": 0.5, "include": "re:("}, ["include.0: missing ), unterminated"]),
        ({"sparsity": 0.5, "exclude": [3]}, ["exclude.0: Input should be a valid string"]),
        ({"sparsity": 0.5, "input_dims": {"a": []}}, ["input_dims.a: Tuple should have at least"]),
        ({"schedule": {"kind": "cubicc"}}, ["schedule: expected a mapping with the key 'kind'"]),
        ({"schedule": {"kind": "one_shot"}}, ["schedule: ", "'step' and 'sparsity'"]),
        ({"schedule": {**CUBIC, "begin": 40}}, ["schedule: end=30 comes before begin=40"]),
        ({"sparsity": 0.5, "groups": [{"sparsity": 0.5}]}, ["groups stand beside sparsity"]),
        ({"groups": [{"sparsity": 0.5, "seed": 3}]}, ["groups.0.seed: Extra inputs"]),
        ({"groups": [{"sparsity": 0.5, "pattern": "2:4"}]}, ["groups.0: expected one of sparsity"]),
    ],
)
def test_what_is_wrong_is_named(keys, texts, tmp_path):
    with pytest.raises(ValueError):
        Recipe(**keys)
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(keys))
    with pytest.raises(ValueError, match=r"recipe\.yaml") as caught:
        load_recipe(path)
    assert all(text in str(caught.value) for text in texts), caught.value
    assert str(caught.value).count("\n") == len(str(caught.value).splitlines()) - 1 <= len(texts)


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join(9 * ['*' + old])}]\n"
    for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)
HEAD = b"sparsity: 0.5\n"
HOSTILE = {
    "alias bomb": (BOMB.encode(), "aliases are not read"),
    "list in itself": (b"&a [*a]", "aliases are not read"),
    "a pattern without quotes": (b"exclude: *lm_head\n", "needs quotes"),
    "NUL": (HEAD + b"seed: \x00\n", "special characters are not allowed"),
    "binary": (bytes(range(128, 256)), "is no valid YAML"),
    "large": (HEAD + b"#" * 1_000_000, "has more than 1,000,000 bytes"),
    "deep": (b"[" * 5_000, "is no valid YAML"),
    "code": (b"sparsity: !!python/object/apply:os.getpid []\n", "could not determine a con"),
    "no date": (HEAD + b"seed: 2001-99-99\n", "is no valid YAML"),
    "two documents": (HEAD + b"---\n" + HEAD, "expected a single document"),
    "a key twice": (HEAD + b"sparsity: 0.6\n", "given twice"),
    "a key twice further in": (HEAD + b"input_dims: {a: 0, a: 1}\n", "given twice"),
    "a list as a key": (HEAD + b"? [a, b]\n: 1\n", "unhashable key"),
    "a number as a key": (HEAD + b"3: 1\n", "expected keys with values"),
    "empty": (b"", "expected keys with values"),
}  # fmt: skip


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_file_that_is_no_recipe_is_refused_by_name(tmp_path, kind):
    raw, text = HOSTILE[kind]
    path = tmp_path / "hostile recipe.yaml"
    path.write_bytes(raw)
    with pytest.raises(ValueError, match=r"hostile recipe\.yaml") as caught:
        load_recipe(path)
    assert text in str(caught.value) and len(str(caught.value)) < 2000


shares = st.sampled_from([0.0, 0.25, 1, 1e-300]) | st.floats(0, 1)
texts = st.text(min_size=1, max_size=8) | st.sampled_from(["*", "re:a.b", "<<", "=", "~", "1e3"])
patterns = st.lists(texts.filter(lambda text: "re:" not in text[:3]), max_size=3)
scores = st.sampled_from(["magnitude", "random"])


def some(optional, **required):
    """Mappings with some of the keys."""
    return st.fixed_dictionaries(required, optional=optional)


limits = st.tuples(shares, shares).map(sorted)
amounts = (
    some({"scope": st.sampled_from(["layer", "row"])}, sparsity=shares)
    | some({}, pattern=st.sampled_from(["2:4", "02:4", "1:9999"]))
    | some({}, schedule=st.just(CUBIC) | st.just({"kind": "one_shot", "step": 3, "sparsity": 0.5}))
    | st.builds(
        lambda share, pair: {"sparsity": share, "min_sparsity": pair[0], "max_sparsity": pair[1]},
        shares, limits,
    )
)  # fmt: skip
selections = some({"include": patterns, "exclude": patterns, "min_ndim": st.integers(1, 5)}) | some(
    {
        "also": patterns,
        "names": patterns,
        "input_dims": st.dictionaries(
            texts.filter(lambda text: "re:" not in text[:3]),
            st.integers(-9, 9) | st.lists(st.integers(-9, 9), min_size=1, max_size=3),
        ),
    }
)
groups = st.builds(
    lambda *parts: {k: v for part in parts for k, v in part.items()},
    amounts, selections, some({"score": scores}),
)  # fmt: skip
wholes = some({"seed": st.integers(0, 2**63 - 1), "card": st.booleans()})


@settings(max_examples=num_examples(200), deadline=None)
@given(st.lists(groups, min_size=1, max_size=3), wholes, st.booleans())
def test_what_is_written_is_read_again(parts, whole, is_flat):
    if not any(part.get("score") == "random" for part in parts[: 1 if is_flat else 3]):
        whole.pop("seed", None)
    recipe = Recipe(**whole, **(parts[0] if is_flat else {"groups": parts}))
    again = Recipe(**yaml.safe_load(recipe.to_yaml()))
    assert again.as_values() == recipe.as_values() == yaml.safe_load(recipe.to_yaml())
    assert [part.divisor for part in again.parts] == [part.divisor for part in recipe.parts]
    assert [part.course for part in again.parts] == [part.course for part in recipe.parts]


def test_defaults_and_values():
    assert Recipe(sparsity=1).course == OneShot(0, 1.0)
    assert Recipe(pattern="03:4").course == OneShot(0, 0.25)
    recipe = Recipe(schedule=CUBIC, exclude="a*", input_dims={"b": 0})
    assert recipe.schedule == Cubic(0, 30, 10, 0.8)
    assert (recipe.exclude, recipe.input_dims) == (("a*",), {"b": (0,)})
    with pytest.raises(ValueError, match="frozen"):
        recipe.sparsity = 0.5


@pytest.mark.parametrize(
    ("keys", "divisor"),
    [
        ({}, "rms"),
        ({"normalize": "l2"}, "l2"),
        ({"normalize": "none"}, None),
        ({"score": "wanda"}, "rms"),
        ({"score": "fisher"}, None),
        ({"score": "fisher", "normalize": "rms"}, "rms"),
        ({"scope": "layer"}, None),
        ({"scope": "row", "normalize": "none"}, None),
        ({"budget": "erk"}, None),
        ({"score": "random"}, None),
    ],
)
def test_scores_are_divided_by_the_rms_where_that_has_an_effect(keys, divisor):
    assert Recipe(sparsity=0.5, **keys).divisor == divisor


BLOCKS = ("block.*",)


@pytest.mark.parametrize(
    ("keys", "arguments"),
    [
        ({"sparsity": 0.5}, {"amount": 0.5, "normalize": "rms"}),
        ({"sparsity": 0.5, "normalize": "none"}, {"amount": 0.5}),
        ({"scope": "layer", "sparsity": 0.3}, {"scope": "layer", "amount": 0.3}),
        ({"scope": "row", "sparsity": 0.4}, {"scope": "row", "amount": 0.4}),
        ({"budget": "erk", "sparsity": 0.4}, {"budget": prune.budgets.erk, "amount": 0.4}),
        ({"pattern": "1:2"}, {"pattern": "1:2"}),
        ({"pattern": "1:2", "input_dims": {"*": 0}}, {"pattern": "1:2", "input_dims": {"*": 0}}),
    ],
)
def test_a_pruner_does_what_the_call_does(keys, arguments):
    model, twin = Tiny(), Tiny()
    for each in (model, twin):
        with torch.no_grad():
            each.block["mlp"]["up_proj"].weight.mul_(10)
    ScheduledPruner.from_recipe(model, Recipe(**keys, include=BLOCKS)).step()
    pairs, arguments = prune.select(twin, BLOCKS), dict(arguments)
    if budget := arguments.pop("budget", None):
        arguments["amount"] = budget(pairs, arguments["amount"])
    prune.global_unstructured(pairs, prune.L1Unstructured, **arguments)
    masks, expected = masks_of(model), masks_of(twin)
    assert masks.keys() == expected.keys() and len(masks) > 1
    assert all(torch.equal(masks[name], expected[name]) for name in masks)


@pytest.mark.parametrize("seed", [None, 5])
def test_random_scores_are_the_same_at_every_step(seed):
    schedule = {"kind": "linear", "begin": 0, "end": 2, "frequency": 1, "final_sparsity": 0.8}
    recipe = Recipe(schedule=schedule, score="random", seed=seed)
    model, twin = Tiny(), Tiny()
    pruner = ScheduledPruner.from_recipe(model, recipe)
    for _ in range(3):
        pruner.step()
    torch.manual_seed(99)
    once = Recipe(sparsity=0.8, score="random", seed=seed)
    ScheduledPruner.from_recipe(twin, once).step()
    masks, expected = masks_of(model), masks_of(twin)
    assert masks and all(torch.equal(masks[name], expected[name]) for name in masks)


@pytest.mark.parametrize(
    ("keys", "what"),
    [
        ({"sparsity": 0.5, "card": False}, "card"),
        ({"sparsity": 0.5, "score": "wanda"}, "score 'wanda'"),
        ({"sparsity": 0.5, "budget": "owl"}, "budget 'owl'"),
        ({"groups": [{"sparsity": 0.5}]}, "groups"),
    ],
)
def test_a_pruner_refuses_what_only_checkpoints_have(keys, what):
    with pytest.raises(ValueError, match=f"the recipe has {what}; expected none of that"):
        ScheduledPruner.from_recipe(Tiny(), Recipe(**keys))


def test_shipped_recipes_are_recipes():
    recipes = {name: load_recipe(name) for name in shipped_recipes()}
    assert recipes["cubic_80"].schedule == Cubic(0, 1000, 50, 0.8)
    for name in ("cubic_80", "magnitude_50", "random_50", "row_50"):
        assert ScheduledPruner.from_recipe(Tiny(), recipes[name]).num_steps == 0
