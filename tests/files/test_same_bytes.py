"""A result has the same bytes on any number of ranks."""

import os
import random
import signal

import pytest
import test_groups_and_limits as budgets
import test_inputs_of_scores
import test_inputs_stored_first
import test_normalized
import test_pruning

from distprune.files import planning, pruning, verifying
from distprune.testing import run_ranks
from helpers import tiny_checkpoints
from helpers.disk_crashes import Steps, kill_self, run_forked
from helpers.recipes import raw_recipe
from helpers.sampling import every
from helpers.small_chunks import small_chunks
from helpers.tiny_checkpoints import tree_digest

RUN = ("distprune/report.json",)
MANY = {
    f"model.layers.{n}.k.weight": test_pruning.weights(n)["model.layers.2.mlp.weight"]
    for n in range(3, 9)
}


def sources(folder):
    """Checkpoints of every kind, and the recipes for each."""
    files = test_pruning.KINDS["bf16"]
    first, config = test_inputs_stored_first.CASES["gpt_oss"][::2]
    made = {
        "plain": tiny_checkpoints.save(folder / "plain", files, MANY),
        "llama": budgets.save(folder / "llama", budgets.llama("mixed")),
        "scales": test_normalized.save(folder / "scales", test_normalized.weights("mixed")),
        "turned": tiny_checkpoints.save(folder / "turned", first, config=config),
    }
    turned = test_inputs_stored_first.WAYS
    recipes = {
        "plain": [raw_recipe(**way) for way in test_pruning.WAYS[:6]],
        "llama": [
            *(raw_recipe(groups=budgets.GROUPS[name], seed=5) for name in ("all ways", "limits")),
            raw_recipe(0.5, min_sparsity=0.4, max_sparsity=0.6),
        ],
        "scales": [
            raw_recipe(0.5, normalize="rms", max_sparsity=0.8),
            raw_recipe(0.5, normalize="l2"),
            raw_recipe(groups=test_normalized.GROUPS),
        ],
        "turned": [raw_recipe(**turned[which]) for which in (0, 3)],
    }
    return [(made[kind], recipe) for kind, of_kind in recipes.items() for recipe in of_kind]


def digests_here(cases, folder):
    """On every rank: the digest of each result, after a comparison with its source."""
    digests = []
    with pytest.MonkeyPatch.context() as patch:
        small_chunks(patch, 24)
        for number, (source, recipe) in enumerate(cases):
            target = folder / str(number)
            pruning.prune(planning.plan(source, recipe), target)
            assert verifying.verify(target, source).problems == ()
            digests.append(tree_digest(target, RUN))
    return digests


def test_any_number_of_ranks_writes_the_same_bytes(tmp_path):
    """Those of one rank are compared with the oracle where each kind of recipe is tested."""
    cases, found = every(4, sources(tmp_path)), []
    for world_size in (1, 2, 3):
        folder = tmp_path / str(world_size)
        folder.mkdir()
        found += run_ranks(digests_here, world_size, cases, folder)
    assert all(digests == found[0] for digests in found)


def made_of_statistics(folder):
    names = test_inputs_of_scores
    statistics = names.write(folder / "statistics.safetensors")
    source = tiny_checkpoints.save(folder / "source", names.weights())
    return source, names.wanda(statistics, normalize="rms")


def made_of_groups(folder):
    groups = (
        *budgets.GROUPS["kinds"][:1],
        budgets.part(0.7, "*mlp*", max_sparsity=0.75),
    )
    source = budgets.save(folder / "source", budgets.llama("mixed"))
    return source, raw_recipe(groups=groups)


def prune(source, target, recipe):
    pruning.prune(planning.plan(source, recipe), target)


def killed_at(step, *what):
    with Steps(step, kill_self):
        prune(*what)


MAKES = [made_of_statistics, made_of_groups]


@pytest.mark.parametrize("make", MAKES)
def test_killed_at_any_step_it_goes_on_and_ends_the_same(tmp_path, make):
    source, recipe = make(tmp_path)
    with Steps() as steps:
        prune(source, tmp_path / "undisturbed", recipe)
    wanted, num_steps = tree_digest(tmp_path / "undisturbed", RUN), steps.count
    middle = random.Random(0).sample(range(6, num_steps - 12), 3)
    last = (num_steps - 12, num_steps - 6, num_steps - 4, num_steps)
    for step in every(3, (*middle, *last), MAKES.index(make)):
        target = tmp_path / f"target{step}"
        status = run_forked(killed_at, step, source, target, recipe)
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, step
        prune(source, target, recipe)
        assert tree_digest(target, RUN) == wanted, step
