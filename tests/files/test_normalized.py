"""Magnitudes that are divided by a statistic of their tensor: the masks of the oracle, exactly."""

import itertools

import pytest
import torch

from distprune.files import planning, pruning, ranked, verifying
from distprune.files.errors import CheckpointError, NaNError
from distprune.files.reports import read_report
from helpers import file_oracle, tiny_checkpoints
from helpers.recipes import raw_recipe
from helpers.sampling import every
from helpers.tiny_checkpoints import load, tree_digest

STATISTICS = ["rms", "l2", "mean"]
RUN = ("distprune/report.json",)
DTYPES = {
    "bf16": [torch.bfloat16],
    "fp16": [torch.float16],
    "fp32": [torch.float32],
    "fp64": [torch.float64],
    "mixed": [torch.bfloat16, torch.float32, torch.float16],
    "wide mix": [torch.float64, torch.bfloat16, torch.float32],
}
SHAPES = [(9, 8), (4, 24), (7, 16), (3, 8), (5, 40)]


def weights(kind="bf16", *, ties=True, seed=0):
    """Tensors whose scales differ; with signed zeros, denormals and a tensor of zeros."""
    g = torch.Generator().manual_seed(seed)
    dtypes = itertools.cycle(DTYPES[kind])
    tensors = {"embed.weight": torch.randn(11, 8, generator=g)}
    for number, shape in enumerate(SHAPES):
        values = torch.randn(shape, generator=g) * 4
        values = values.round() / 4 if ties else values
        tensors[f"layers.{9 + number}.weight"] = (values * 3.0 ** (1 - number)).to(next(dtypes))
    tensors["layers.2.weight"] = torch.zeros(3, 8, dtype=next(dtypes))
    tensors["layers.9.weight"].view(-1)[:4] = torch.tensor([-0.0, 0.0, 1e-40, -1e-40])
    return tensors


def names_of(tensors):
    return [name for name in tensors if name.startswith("layers")]


def save(folder, tensors):
    names = list(tensors)
    shards = ({n: tensors[n] for n in part} for part in (names[:3], names[3:]))
    return tiny_checkpoints.save(folder, *shards)


def check(tensors, recipe, source, target):
    """Prune, and compare everything with the oracle."""
    report = pruning.prune(planning.plan(source, recipe), target)
    masks = {}
    for part in recipe.parts:
        include = part.include or ("layers",)
        masks |= file_oracle.masks(
            tensors,
            [name for name in names_of(tensors) if name.startswith(include[0].rstrip("*"))],
            sparsity=part.sparsity,
            scope=part.scope,
            limits=(part.min_sparsity, part.max_sparsity) if part.has_limits else None,
            normalize=part.normalize,
        )
    file_oracle.check(source, target, masks, load)
    counts = {name: int((~keep).sum()) for name, keep in masks.items()}
    assert {t.name: t.num_pruned for t in report.tensors} == counts
    assert verifying.verify(target, source).problems == ()
    assert read_report(target) == report
    return report


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("has_ties", [True, False])
def test_equals_the_oracle(tmp_path, kind, has_ties, small_pieces):
    tensors = weights(kind, ties=has_ties)
    source = save(tmp_path / "source", tensors)
    turn = list(DTYPES).index(kind)
    for normalize in STATISTICS:
        for sparsity in every(2, (0.5, 0.93), turn + STATISTICS.index(normalize)):
            target = tmp_path / f"{normalize}{sparsity}"
            recipe = raw_recipe(sparsity, normalize=normalize)
            report = check(tensors, recipe, source, target)
            for tensor in report.tensors:
                assert tensor.divisor == file_oracle.divisor_of(tensors[tensor.name], normalize)
            scores = torch.cat(
                [
                    file_oracle.normalized(tensors[n], normalize).double().flatten()
                    for n in names_of(tensors)
                ]
            )
            assert report.groups[0].threshold == float(scores.sort().values[report.num_pruned - 1])
            assert report.groups[0].num_ties == int((scores == report.groups[0].threshold).sum())


@pytest.mark.parametrize("kind", ["bf16", "mixed", "wide mix"])
@pytest.mark.parametrize("limits", [(0.3, 0.6), (0.0, 0.55), (0.49, 1.0), (0.5, 0.5)])
def test_limits_bound_the_normalised_ranking(tmp_path, kind, limits, small_pieces):
    tensors = weights(kind)
    source = save(tmp_path / "source", tensors)
    recipe = raw_recipe(0.5, normalize="rms", min_sparsity=limits[0], max_sparsity=limits[1])
    check(tensors, recipe, source, tmp_path / "target")


def test_groups_normalise_or_not(tmp_path, small_pieces):
    tensors = weights("mixed")
    source = save(tmp_path / "source", tensors)
    recipe = raw_recipe(
        groups=(
            raw_recipe(0.5, include=("layers.1*",), normalize="mean", max_sparsity=0.7),
            raw_recipe(0.4, include=("layers.2*",)),
            raw_recipe(0.25, include=("layers.9*",), scope="layer"),
        )
    )
    check(tensors, recipe, source, tmp_path / "target")


@pytest.mark.parametrize("kind", ["bf16", "mixed"])
def test_keys_around_the_cut_that_do_not_fit_are_counted(tmp_path, monkeypatch, kind, small_pieces):
    tensors = weights(kind)
    source = save(tmp_path / "source", tensors)
    recipe = raw_recipe(0.5, normalize="rms", max_sparsity=0.6)
    check(tensors, recipe, source, tmp_path / "kept")
    for limit in (0, 7):
        monkeypatch.setattr(ranked, "_MOST_COLLECTED", limit)
        check(tensors, recipe, source, tmp_path / f"limit{limit}")
        assert tree_digest(tmp_path / f"limit{limit}", RUN) == tree_digest(tmp_path / "kept", RUN)


GROUPS = (
    raw_recipe(0.5, include=("layers.1*",), normalize="mean", max_sparsity=0.7),
    raw_recipe(0.4, include=("layers.2*",)),
    raw_recipe(0.25, include=("layers.9*",), normalize="rms"),
)


def test_numbers_that_have_no_statistic(tmp_path, small_pieces):
    tensors = weights("mixed")
    broken = tensors["layers.10.weight"]
    broken.view(-1)[3:5] = float("nan")
    source = save(tmp_path / "source", tensors)
    with pytest.raises(NaNError, match="NaN in layers"):
        pruning.prune(planning.plan(source, raw_recipe(0.5, normalize="rms")), tmp_path / "target")
    report = pruning.prune(
        planning.plan(source, raw_recipe(0.5, normalize="rms", nan="keep")), tmp_path / "target"
    )
    by_name = {tensor.name: tensor for tensor in report.tensors}
    assert by_name["layers.10.weight"].num_nan == 2
    assert by_name["layers.10.weight"].divisor == file_oracle.divisor_of(broken, "rms")
    assert verifying.verify(tmp_path / "target", source).problems == ()
    broken.view(-1)[3:5] = torch.tensor([1.0, float("-inf")])
    source = save(tmp_path / "infinite", tensors)
    recipe = raw_recipe(0.5, normalize="rms", nan="keep")
    with pytest.raises(CheckpointError, match=r"layers\.10\.weight has infinite scores"):
        pruning.prune(planning.plan(source, recipe), tmp_path / "other")


def test_many_small_numbers_tie_after_the_multiplication(tmp_path, small_pieces):
    """Denormal scores: several magnitudes have one score, and go by their place, not their size."""
    g = torch.Generator().manual_seed(0)
    tiny = torch.randint(1, 40, (6, 16), generator=g).float() * 2.0**-149
    tiny[0, 0] = 2.0**-130
    tensors = {"layers.0.weight": tiny, "layers.1.weight": tiny.flip(1)}
    tensors["layers.1.weight"][0, 1] = 2.5
    source = tiny_checkpoints.save(tmp_path / "source", tensors)
    for number, sparsity in enumerate((0.2, 0.4, 0.55, 0.7)):
        recipe = raw_recipe(sparsity, normalize="l2")
        report = check(tensors, recipe, source, tmp_path / f"target{number}")
    magnitudes = tensors["layers.1.weight"].unique()
    scores = file_oracle.normalized(tensors["layers.1.weight"], "l2").unique()
    assert len(scores) < len(magnitudes) and report.groups[0].num_ties > 1
