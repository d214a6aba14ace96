"""Groups and limits of recipes for checkpoints: the masks of the oracle, the total exact."""

import itertools

import pytest
import torch

from distprune.files import planning, pruning, verifying
from distprune.files.errors import SelectionError
from distprune.files.reports import read_report
from helpers import file_oracle, tiny_checkpoints
from helpers.recipes import raw_recipe
from helpers.sampling import every
from helpers.small_chunks import small_chunks
from helpers.tiny_checkpoints import load

DTYPES = {
    "bf16": [torch.bfloat16],
    "fp16": [torch.float16],
    "fp32": [torch.float32],
    "mixed": [torch.bfloat16, torch.float32, torch.float16],
    "wide": [torch.float64, torch.bfloat16],
}


def llama(kind="bf16", *, ties=True, seed=0):
    """Names and kinds of layers as in a Llama; the tensors of a kind have a scale of their own."""
    g = torch.Generator().manual_seed(seed)
    dtypes = itertools.cycle(DTYPES[kind])
    shapes = {
        "self_attn.q_proj": (8, 8), "self_attn.k_proj": (4, 8), "self_attn.o_proj": (8, 8),
        "mlp.gate_proj": (24, 8), "mlp.up_proj": (24, 8), "mlp.down_proj": (8, 24),
    }  # fmt: skip
    tensors = {"model.embed_tokens.weight": torch.randn(11, 8, generator=g).bfloat16()}
    for layer in (0, 1, 2, 10):
        for scale, (name, shape) in enumerate(shapes.items(), 1):
            values = torch.randn(shape, generator=g) * scale
            values = (values * 4).round() / 4 if ties else values
            tensors[f"model.layers.{layer}.{name}.weight"] = values.to(next(dtypes))
    tensors["model.norm.weight"] = torch.ones(8)
    return tensors


def save(folder, tensors):
    names = list(tensors)
    half = len(names) // 2
    shards = [{n: tensors[n] for n in part} for part in (names[:half], names[half:])]
    return tiny_checkpoints.save(folder, *shards)


def part(sparsity, include, exclude=(), **more):
    return raw_recipe(sparsity, include=(include,), exclude=exclude, **more)


FIRST = ("*.layers.0.*",)
GROUPS = {
    "kinds": (
        part(0.5, "*self_attn*", FIRST),
        part(0.7, "*mlp*", FIRST),
        part(0.0, "re:.*layers[.]0[.].*"),
    ),
    "all ways": (
        part(0.37, "*q_proj*"),
        part(0.5, "*k_proj*", scope="layer"),
        part(0.25, "*o_proj*", scope="row"),
        raw_recipe(pattern="2:4", include=("*gate_proj*",)),
        part(0.61, "*up_proj*", score="random"),
        part(0.8, "*down_proj*", FIRST, min_sparsity=0.3, max_sparsity=0.9),
    ),
    "limits": (
        part(0.5, "*self_attn*", min_sparsity=0.45, max_sparsity=0.55),
        part(0.7, "*mlp*", score="random", min_sparsity=0.6, max_sparsity=0.75),
    ),
}
LIMITS = [
    (0.5, 0.0, 1.0), (0.5, 0.0, 0.6), (0.5, 0.4, 1.0), (0.5, 0.3, 0.7), (0.5, 0.47, 0.53),
    (0.0, 0.0, 0.3), (1.0, 0.2, 1.0), (0.75, 0.0, 0.75), (0.25, 0.25, 1.0), (0.25, 0.25, 0.25),
    (0.9, 0.0, 0.95), (0.03, 0.01, 0.9),
]  # fmt: skip


def wanted(tensors, recipe):
    """The masks of the oracle."""
    masks = {}
    for group in recipe.parts:
        plain = {n: t for n, t in tensors.items() if n.startswith("model.layers")}
        names = [
            n for n in plain
            if group.include is None or any(_matches(n, p) for p in group.include)
            if not any(_matches(n, p) for p in group.exclude)
        ]  # fmt: skip
        masks |= file_oracle.masks(
            tensors, names, sparsity=group.sparsity, scope=group.scope, pattern=group.pattern,
            seed=(recipe.seed or 0) if group.score == "random" else None,
            limits=(group.min_sparsity, group.max_sparsity) if group.has_limits else None,
        )  # fmt: skip
    return masks


def _matches(name, pattern):
    import fnmatch
    import re

    if pattern.startswith("re:"):
        return re.fullmatch(pattern[3:], name)
    return fnmatch.fnmatchcase(name, pattern)


def check(tensors, recipe, source, target):
    """Prune, and compare everything with the oracle."""
    plan = planning.plan(source, recipe)
    report = pruning.prune(plan, target)
    masks = wanted(tensors, recipe)
    file_oracle.check(source, target, masks, load)
    counts = {name: int((~keep).sum()) for name, keep in masks.items()}
    assert {t.name: t.num_pruned for t in report.tensors} == counts
    assert report.num_pruned == plan.num_to_prune == sum(counts.values())
    for group, each in zip(plan.groups, report.groups, strict=True):
        names = [t.entry.name for t in plan.tensors[group.first : group.last]]
        assert each.num_pruned == group.num_to_prune == sum(counts[n] for n in names)
    assert verifying.verify(target, source).problems == ()
    assert read_report(target) == report
    return report


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("which", GROUPS)
def test_groups_equal_the_oracle(tmp_path, kind, which, small_pieces):
    tensors = llama(kind)
    source = save(tmp_path / "source", tensors)
    seed = 5 if which != "kinds" else None
    recipe = raw_recipe(groups=GROUPS[which], seed=seed)
    report = check(tensors, recipe, source, tmp_path / "target")
    assert len(report.groups) == len(recipe.groups)
    if which == "kinds":
        dense = [t for t in report.tensors if ".layers.0." in t.name]
        assert len(dense) == 6 and not any(t.num_pruned for t in dense)
        assert all(t.group == 2 for t in dense)


@pytest.mark.parametrize("ties", [True, False])
@pytest.mark.parametrize("kind", DTYPES)
def test_limits_equal_the_oracle(tmp_path, kind, ties, monkeypatch):
    small_chunks(monkeypatch, 24)
    tensors = llama(kind, ties=ties, seed=1)
    source = save(tmp_path / "source", tensors)
    turn = list(DTYPES).index(kind) + ties
    for number, (sparsity, low, high) in every(4, enumerate(LIMITS), turn):
        more = {"score": "random", "seed": 7} if number % 4 == 3 else {}
        recipe = raw_recipe(sparsity, min_sparsity=low, max_sparsity=high, **more)
        report = check(tensors, recipe, source, tmp_path / str(number))
        for tensor in report.tensors:
            if recipe.has_limits and tensor.limits is not None:
                assert tensor.limits[0] <= tensor.num_pruned <= tensor.limits[1]
            bound = {"min_sparsity": 0, "max_sparsity": 1}.get(tensor.held_at)
            assert bound is None or tensor.num_pruned == tensor.limits[bound]


def test_nan_are_kept_within_limits_or_refused(tmp_path, small_pieces):
    tensors = llama("bf16")
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name].view(-1)[3:50] = float("nan")
    source = save(tmp_path / "source", tensors)
    recipe = raw_recipe(0.7, max_sparsity=0.8, nan="keep")
    pruning.prune(planning.plan(source, recipe), tmp_path / "a")
    # As if they were the largest, and the ceiling that of the numbers where it is lower.
    large = {n: t.where(~t.isnan(), float("inf")) for n, t in tensors.items()}
    masks = wanted(large, recipe)
    assert int((~masks[name]).sum()) <= tensors[name].numel() - 47
    file_oracle.check(source, tmp_path / "a", masks, load)
    with pytest.raises(SelectionError, match="only 145 may be"):
        recipe = raw_recipe(0.9, min_sparsity=0.8, nan="keep")
        pruning.prune(planning.plan(source, recipe), tmp_path / "b")
    # All that is no NaN goes, and not one NaN.
    recipe = raw_recipe(0.98404, min_sparsity=0.7, nan="keep")
    report = pruning.prune(planning.plan(source, recipe), tmp_path / "c")
    assert {t.name: t.num_pruned for t in report.tensors}[name] == 145
    assert load(tmp_path / "c")[name].isnan().sum() == 47


@pytest.mark.parametrize(
    ("recipe", "texts"),
    [
        (
            raw_recipe(groups=(part(0.5, "*mlp*"), part(0.5, "*up_proj*"))),
            ["layers.0.mlp.up_proj.weight is in groups[0] and groups[1]"],
        ),
        (
            raw_recipe(groups=(part(0.5, "*mlp*"), part(0.5, "no"))),
            ["groups[1]: include: 'no' matches none"],
        ),
        (
            raw_recipe(0.5, max_sparsity=0.4),
            ["sparsity 0.5 prunes 1,472 elements", "max_sparsity 0.4", "leaves 1,160"],
        ),
        (
            raw_recipe(groups=(part(0.5, "*mlp*"), part(0.5, "*k_proj*", min_sparsity=0.52))),
            ["groups[1]: sparsity 0.5 prunes 64 elements", "min_sparsity 0.52", "needs 68"],
        ),
        (
            raw_recipe(0.5, min_sparsity=0.499, max_sparsity=0.4999),
            ["down_proj.weight: min_sparsity asks for at least 96 pruned elements of 192"],
        ),
    ],
)
def test_what_cannot_be_is_refused_with_the_numbers(tmp_path, recipe, texts):
    tensors = llama()
    source = save(tmp_path / "source", tensors)
    with pytest.raises(SelectionError) as error:
        planning.plan(source, recipe)
    for text in texts:
        assert text in str(error.value), str(error.value)
