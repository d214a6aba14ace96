"""Whole tiles of checkpoints: the oracle's masks in any layout, in pieces, on ranks; verify."""

import pytest
import torch

from distprune.files import planning, pruning, verifying
from distprune.files.errors import NaNError, SelectionError
from distprune.files.recipe import FileRecipe
from helpers import file_oracle, tiny_checkpoints
from helpers.reference import prune as lowest_of
from helpers.small_work_units import small_chunks, small_units
from helpers.tiny_checkpoints import load, tree_digest

# Per tensor: its shape, and which of its dimensions are the outputs and the inputs.
SHAPES = {
    "a.weight": ((8, 24), 0, 1),
    "b.weight": ((16, 12), 1, 0),
    "c.weight": ((2, 8, 16), 2, 1),
    "d.weight": ((8, 4, 3), 0, 1),
    "e.weight": ((4, 32), 0, 1),
}
INPUT_DIMS = {"b.weight": 0, "c.weight": 1, "d.weight": [1, 2]}
RUN = ("distprune/run.json",)
WAYS = [
    {"pattern": "2x4", "sparsity": 0.4},
    {"pattern": "2x4", "sparsity": 0.5, "scope": "layer"},
    {"pattern": "2x2", "sparsity": 0.4, "scope": "row"},
    {"pattern": "4x1", "sparsity": 0.7, "scope": "row"},
    {"pattern": "1x4", "sparsity": 0.3},
    {"pattern": "4x4", "sparsity": 0.5, "score": "random", "seed": 3},
    {"pattern": "2x4", "sparsity": 0.5, "score": "random", "seed": 3, "scope": "row"},
    {"pattern": "2x2", "sparsity": 0.0, "scope": "layer"},
    {"pattern": "2x2", "sparsity": 1.0},
]


def weights(dtypes=(torch.bfloat16, torch.float32, torch.float16)):
    """Few different magnitudes: sums are exact, and tie."""
    g = torch.Generator().manual_seed(0)
    made = {}
    for number, (name, (shape, _, _)) in enumerate(SHAPES.items()):
        values = (torch.randn(shape, generator=g) * 2).round() / 2
        made[name] = values.to(dtypes[number % len(dtypes)])
    return made


def expected(tensors, way):
    """Masks by name, True = keep; each tile has one flag."""
    outputs, inputs = map(int, way["pattern"].split("x"))
    sizes = {}
    for name, (shape, out_dim, in_dim) in SHAPES.items():
        sizes[name] = [1] * len(shape)
        sizes[name][out_dim], sizes[name][in_dim] = outputs, inputs
    grids = {name: sums(tensors[name], sizes[name]) for name in SHAPES}
    grids = file_oracle._scores(grids, list(SHAPES), way.get("seed"))
    scope = way.get("scope", "global")
    if scope == "global":
        kept = dict(zip(grids, lowest_of(list(grids.values()), way["sparsity"]), strict=True))
    elif scope == "layer":
        kept = {name: lowest_of([grid], way["sparsity"])[0] for name, grid in grids.items()}
    else:
        kept = {name: of_rows(name, grid, way["sparsity"]) for name, grid in grids.items()}
    for name, own in sizes.items():
        for dim, size in enumerate(own):
            kept[name] = kept[name].repeat_interleave(size, dim)
    return kept


def sums(tensor, sizes):
    total = tensor.double().abs()
    for dim, size in enumerate(sizes):
        total = total.unflatten(dim, (-1, size)).sum(dim + 1)
    return total


def of_rows(name, grid, sparsity):
    """Rows of tiles of the same outputs, in the order in which they are stored."""
    shape, out_dim, _ = SHAPES[name]
    fronts = [0, 2] if len(shape) == 3 and out_dim == 2 else [out_dim]
    order = [*fronts, *(dim for dim in range(grid.ndim) if dim not in fronts)]
    turned = grid.permute(order)
    rows = turned.flatten(0, len(fronts) - 1).flatten(1)
    kept = torch.stack([lowest_of([row], sparsity)[0] for row in rows]).reshape(turned.shape)
    return kept.permute([order.index(dim) for dim in range(grid.ndim)])


def recipe_of(way, **more):
    return FileRecipe(**way, include=("*.weight",), input_dims=INPUT_DIMS, **more)


def make_source(folder, tensors):
    tensors = tensors | {"norm.bias": torch.ones(7)}
    names = list(tensors)
    parts = ({n: tensors[n] for n in names[:2]}, {n: tensors[n] for n in names[2:]})
    return tiny_checkpoints.save(folder, *parts)


@pytest.mark.parametrize("sizes", [None, (100, 12), (24, 4)])
@pytest.mark.parametrize("dtype", ["mixed", torch.float64])
def test_equals_the_oracle(tmp_path, monkeypatch, sizes, dtype):
    tensors = weights() if dtype == "mixed" else weights([dtype])
    source = make_source(tmp_path / "source", tensors)
    if sizes is not None:
        small_chunks(monkeypatch, *sizes)
    for which, way in enumerate(WAYS):
        target = tmp_path / f"target{which}"
        with small_units(num_elements=64 if sizes else 1 << 20):
            plan = planning.plan(source, recipe_of(way))
            report = pruning.prune(plan, target)
            assert verifying.verify(target, source).problems == ()
        file_oracle.check(source, target, expected(tensors, way), load)
        assert report.num_pruned == plan.num_to_prune


def test_a_nan_is_an_error_that_names_its_tensor(tmp_path):
    tensors = weights()
    tensors["c.weight"][1, 2, 3] = float("nan")
    source = make_source(tmp_path / "source", tensors)
    for way in WAYS[:3]:
        with pytest.raises(NaNError, match=r"c\.weight"):
            pruning.prune(planning.plan(source, recipe_of(way)), tmp_path / "target")
        assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_numbers_of_the_report_count_tiles_and_elements(tmp_path):
    tensors = weights([torch.float32])
    source = make_source(tmp_path / "source", tensors)
    plan = planning.plan(source, recipe_of(WAYS[0]))
    report = pruning.prune(plan, tmp_path / "target")
    kept = expected(tensors, WAYS[0])
    grids = {n: sums(tensors[n], [2, 4]) for n in ("a.weight", "e.weight")}
    pruned = {n: ~kept[n][::2, ::4] for n in grids}
    num_tiles = sum(tensor.numel() for tensor in tensors.values()) // 8
    assert report.num_pruned == plan.num_to_prune == round(0.4 * num_tiles) * 8
    assert report.num_pruned == sum(int((~keep).sum()) for keep in kept.values())
    assert report.threshold >= max(float(grids[n][pruned[n]].max()) for n in grids)
    assert report.threshold <= min(float(grids[n][~pruned[n]].min()) for n in grids)
    assert 0 < report.num_ties_pruned <= report.num_ties < num_tiles


def test_tiles_that_do_not_fit_are_named(tmp_path):
    source = make_source(tmp_path / "source", weights())
    with pytest.raises(SelectionError) as error:
        planning.plan(source, recipe_of({"pattern": "4x8", "sparsity": 0.5}))
    assert "d.weight has 8 outputs and 4 inputs" in "".join(error.value.problems)


def test_sums_do_not_depend_on_what_is_read_at_a_time(tmp_path):
    """Magnitudes of any size: sums are rounded once."""
    g = torch.Generator().manual_seed(5)
    tensors = {
        name: torch.randn(shape, generator=g) * 10.0 ** torch.randint(-30, 30, shape, generator=g)
        for name, (shape, _, _) in SHAPES.items()
    }
    tensors["a.weight"][0, 0] = float("inf")
    source = make_source(tmp_path / "source", tensors)
    for which in (0, 1, 2):
        target = tmp_path / f"whole{which}"
        pruning.prune(planning.plan(source, recipe_of(WAYS[which])), target)
        with pytest.MonkeyPatch.context() as patch:
            small_chunks(patch, 24, 4)
            pruning.prune(planning.plan(source, recipe_of(WAYS[which])), tmp_path / "pieces")
        wanted, found = tree_digest(target, RUN), tree_digest(tmp_path / "pieces", RUN)
        assert wanted == found
        (tmp_path / "pieces").rename(tmp_path / f"pieces{which}")


def test_outputs_along_several_dimensions_are_named(tmp_path):
    tensors = {"a.weight": torch.ones(4, 2, 6), "b.weight": torch.ones(4, 1, 6)}
    source = tiny_checkpoints.save(tmp_path / "source", tensors)
    dims = {"*": 0}
    recipe = FileRecipe(0.5, pattern="2x2", include=("*",), input_dims=dims)
    with pytest.raises(SelectionError) as error:
        planning.plan(source, recipe)
    (problem,) = error.value.problems
    assert "a.weight has the shape [4, 2, 6], whose outputs lie along several dim" in problem
    whole = FileRecipe(0.5, pattern="1x2", include=("*",), input_dims=dims)
    assert planning.plan(source, whole).num_to_prune == 36


def test_groups_with_tiles_of_their_own(tmp_path):
    tensors = weights()
    source = make_source(tmp_path / "source", tensors)
    parts = {"a.weight": WAYS[0], "e.weight": {"pattern": "1x8", "sparsity": 0.25}}
    groups = [FileRecipe(**way, include=(name,)) for name, way in parts.items()]
    groups.append(FileRecipe(pattern="2:4", include=("b.weight",), input_dims={"b.weight": 0}))
    with small_units(num_elements=64):
        plan = planning.plan(source, FileRecipe(groups=groups))
        report = pruning.prune(plan, tmp_path / "target")
        assert verifying.verify(tmp_path / "target", source).problems == ()
    assert [group.num_pruned for group in report.groups] == [10 * 8, 4 * 8, 96]
    kept = {}
    for name, sizes in (("a.weight", (2, 4)), ("e.weight", (1, 8))):
        grid = sums(tensors[name], sizes)
        keep = lowest_of([grid], parts[name]["sparsity"])[0]
        kept[name] = keep.repeat_interleave(sizes[0], 0).repeat_interleave(sizes[1], 1)
    stored = load(tmp_path / "target")
    for name, keep in kept.items():
        assert stored[name].equal(tensors[name] * keep)


def test_a_collapsed_tensor_is_not_told_of_limits_that_tiles_do_not_have(tmp_path):
    tensors = weights([torch.float32])
    tensors["e.weight"] /= 1000
    source = make_source(tmp_path / "source", tensors)
    report = pruning.prune(planning.plan(source, recipe_of(WAYS[0])), tmp_path / "target")
    (warning,) = [text for text in report.warnings if "e.weight" in text]
    assert "scope layer" in warning and "max_sparsity" not in warning
