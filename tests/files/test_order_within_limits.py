"""Of all masks with the right count, only the oracle's is accepted as ordered."""

import itertools
from math import prod

import numpy as np
import pytest
import torch
from test_verifying import MODEL, entry, flip

from distprune.files import planning, pruning, verifying
from distprune.files.checks.group_order import GroupOrder
from distprune.files.recipe import FileRecipe
from helpers import reference, tiny_checkpoints

SHAPES = [(1, 5), (2, 2), (1, 4)]


@pytest.mark.parametrize(
    "limits", [(0.0, 1.0), (0.25, 1.0), (0.0, 0.6), (0.25, 0.6), (0.4, 0.8), (0.2, 0.75)]
)
@pytest.mark.parametrize("num_values", [1, 2, 4, 100])
def test_one_mask_of_all_is_accepted(tmp_path, limits, num_values):
    g = torch.Generator().manual_seed(num_values)
    tensors = {
        f"{name}.weight": torch.randint(1, num_values + 1, shape, generator=g).float()
        for name, shape in zip("abc", SHAPES, strict=True)
    }
    source = tiny_checkpoints.save(tmp_path / "source", tensors)
    recipe = FileRecipe(0.5, min_ndim=1, min_sparsity=limits[0], max_sparsity=limits[1])
    plan = planning.plan(source, recipe)
    values = list(tensors.values())
    expected = reference.prune_bounded(values, plan.num_to_prune, [limits[0]] * 3, [limits[1]] * 3)
    sizes = [prod(shape) for shape in SHAPES]
    accepted = []
    for pruned in itertools.combinations(range(sum(sizes)), plan.num_to_prune):
        keep = np.ones(sum(sizes), dtype=bool)
        keep[list(pruned)] = False
        keeps = np.split(keep, np.cumsum(sizes)[:-1])
        order = GroupOrder(plan, 0)
        for position, (tensor, part) in enumerate(zip(values, keeps, strict=True)):
            keys = tensor.flatten().numpy().view(np.uint32)
            for first in range(0, len(keys), 3):
                order.add(position, first, keys[first : first + 3], part[first : first + 3])
        if not order.problems():
            accepted.append(keeps)
    assert len(accepted) == 1
    for found, wanted in zip(accepted[0], expected, strict=True):
        assert found.tolist() == wanted.flatten().tolist()


@pytest.mark.parametrize("change", ["within", "between", "limit"])
def test_verify_finds_an_exchange_in_a_group(tmp_path, change):
    """As many elements are pruned as before, but others."""
    g = torch.Generator().manual_seed(0)
    names = ["a.0.weight", "a.1.weight", "b.weight"]
    tensors = {n: (torch.randn(4, 40, generator=g) * 4).round() / 4 + 9 for n in names}
    tensors["a.1.weight"] += 50 if change == "limit" else 1
    source = tiny_checkpoints.save(tmp_path / "source", tensors)
    groups = (
        FileRecipe(0.5, include=("a*",), max_sparsity=0.8 if change == "limit" else 1.0),
        FileRecipe(0.25, include=("b*",)),
    )
    target = tmp_path / "target"
    pruning.prune(planning.plan(source, FileRecipe(groups=groups)), target)
    assert verifying.verify(target, source).is_good
    if change == "within":
        pair, text = ("a.0.weight", "a.0.weight"), "is pruned, but comes after a kept one"
    elif change == "between":
        pair, text = ("a.0.weight", "b.weight"), "elements are pruned in group 0"
    else:  # a.0 is at its ceiling
        pair, text = ("a.1.weight", "a.0.weight"), "limits of the recipe allow for 0 to 128."
    exchange(source, target, *pair)
    problems = verifying.verify(target, source).problems
    assert any(text in problem for problem in problems), problems
    assert not any("neither kept" in problem for problem in problems)


def exchange(source, target, back, out):
    """Keep an element of one tensor, and prune one of another."""
    from distprune.files.checkpoints.mask_files import MASK_FILE, open_masks, read_keep
    from distprune.files.disk.open_files import OpenFiles

    masks, files = open_masks(target), OpenFiles(0)
    for name, is_kept in ((back, False), (out, True)):
        keep = read_keep(masks, files, name, 0, 160)
        index = int(np.flatnonzero(keep == is_kept)[0 if not is_kept else -1])
        flip(target / MASK_FILE, masks.starts[name] + index // 8, 1 << index % 8)
        start = entry(source, name).start + 4 * index
        raw = bytearray((target / MODEL).read_bytes())
        old = (source / MODEL).read_bytes()[start : start + 4]
        raw[start : start + 4] = bytes(4) if is_kept else old
        (target / MODEL).write_bytes(raw)
    files.close()
