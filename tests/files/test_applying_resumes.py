"""``apply``: killed anywhere or stopped, on any number of ranks, it ends with the same bytes."""

import functools
import json
import os
import random
import signal

import pytest
import torch
import torch.distributed as dist

from distprune.files import planning, pruning, rewriting
from distprune.files.applying import Application
from distprune.files.errors import CheckpointError, FilesError, OutputError
from distprune.files.recipe import FileRecipe
from distprune.testing import run_ranks
from helpers.disk_crashes import Steps, kill_self, run_forked
from helpers.sampling import every
from helpers.small_work_units import small_units
from helpers.tiny_checkpoints import load, save, tree_digest

RUN = ("distprune/run.json",)
DTYPES = (torch.bfloat16, torch.float32, torch.float16)


@pytest.fixture(autouse=True)
def many_small_units(monkeypatch):
    monkeypatch.setattr(rewriting, "_CHUNK", 64)
    with small_units():
        yield


@functools.cache
def made(seed):
    g = torch.Generator().manual_seed(seed)
    tensors = {
        f"layers.{n}.weight": torch.randn(13, 40, generator=g).to(DTYPES[n % 3]) for n in range(6)
    }
    return {**tensors, "odd.weight": torch.randn(3, 7, generator=g), "norm": torch.ones(100)}


@pytest.fixture
def masks(tmp_path):
    base = save(tmp_path / "base", made(0))
    pruning.prune(planning.plan(base, FileRecipe(0.6)), tmp_path / "masks")
    return tmp_path / "masks"


@pytest.fixture
def source(tmp_path):
    names = list(made(1))
    return save(tmp_path / "tuned", *({n: made(1)[n] for n in p} for p in (names[:4], names[4:])))


def apply(masks, source, target, **kwargs):
    return Application(masks, source).write(target, **kwargs)


@small_units()
def apply_small(masks, source, target):
    rewriting._CHUNK = 64
    return apply(masks, source, target)


def undisturbed(masks, source, tmp_path):
    with Steps() as steps:
        apply(masks, source, tmp_path / "undisturbed")
    return tree_digest(tmp_path / "undisturbed", RUN), steps.count


def test_the_result_is_that_of_torch_and_says_so(masks, source, tmp_path):
    applied = apply(masks, source, tmp_path / "target")
    pruned, result = load(masks), load(tmp_path / "target")
    num_pruned = num_zeroed = 0
    for name, tensor in made(1).items():
        drop = (pruned[name] == 0) & (made(0)[name] != 0)
        assert torch.equal(result[name], tensor.masked_fill(drop, 0))
        num_pruned += int(drop.sum())
        num_zeroed += int((drop & (tensor != 0)).sum())
    assert (applied["num_pruned"], applied["num_zeroed"]) == (num_pruned, num_zeroed)
    report = json.loads((tmp_path / "target/distprune/report.json").read_text())
    assert report["kind"] == "apply" and report["num_pruned"] == num_pruned
    assert sum(tensor["num_zeroed"] for tensor in report["tensors"]) == num_zeroed
    recipe = (tmp_path / "target/distprune/recipe.yaml").read_text()
    assert "kind: apply" in recipe and str(masks) in recipe


def killed_at(step, masks, source, target):
    with Steps(step, kill_self):
        apply(masks, source, target)


def test_killed_at_any_step_it_goes_on_and_ends_the_same(masks, source, tmp_path):
    wanted, num_steps = undisturbed(masks, source, tmp_path)
    target = tmp_path / "target"
    middle = random.Random(0).sample(range(6, num_steps - 12), 4)
    last = every(2, range(num_steps - 12, num_steps + 1))
    for step in (1, 3, *middle, *last):
        status = run_forked(killed_at, step, masks, source, target)
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, step
        apply(masks, source, target)
        assert tree_digest(target, RUN) == wanted, step
        left = {path.name for path in tmp_path.iterdir()}
        assert left == {"base", "masks", "tuned", "undisturbed", "target"}, step
        target.rename(tmp_path / "done")
        run_forked(remove, tmp_path / "done")


def remove(path):
    import shutil

    shutil.rmtree(path)


def test_any_number_of_ranks_writes_the_same_bytes(masks, source, tmp_path):
    wanted, _ = undisturbed(masks, source, tmp_path)
    for size in (1, 2, 3):
        results = run_ranks(apply_small, size, masks, source, tmp_path / f"target{size}")
        assert results == [results[0]] * size
        assert tree_digest(tmp_path / f"target{size}", RUN) == wanted


def test_stopped_on_one_rank_it_goes_on_on_another_number(masks, source, tmp_path):
    wanted, _ = undisturbed(masks, source, tmp_path)
    target = tmp_path / "target"
    assert run_ranks(stopped_on_rank_one, 2, masks, source, target) == ["Interrupted"] * 2
    assert list(tmp_path.glob("target.partial-*"))
    said = []
    apply(masks, source, target, tell=said.append)
    assert "are finished" in said[0]
    assert tree_digest(target, RUN) == wanted


@small_units()
def stopped_on_rank_one(masks, source, target):
    rewriting._CHUNK = 64
    calls = []

    def stop():
        calls.append(1)
        return dist.get_rank() == 1 and len(calls) > 12

    try:
        apply(masks, source, target, stop=stop)
    except FilesError as error:
        return type(error).__name__


def test_a_finished_result_is_success(masks, source, tmp_path):
    first = apply(masks, source, tmp_path / "target")
    said = []
    assert apply(masks, source, tmp_path / "target", tell=said.append) == first
    assert "Nothing was changed" in said[0]
    os.utime(masks / "distprune/masks.safetensors", ns=(1, 1))
    with pytest.raises(OutputError, match="a new name"):
        apply(masks, source, tmp_path / "target")


def test_masks_that_change_meanwhile_are_an_error(masks, source, tmp_path):
    application = Application(masks, source)
    os.utime(masks / "distprune/masks.safetensors", ns=(1, 1))
    with pytest.raises(CheckpointError, match=r"masks\.safetensors has changed"):
        application.write(tmp_path / "target")
    assert not (tmp_path / "target").exists()
