"""examples/prune_torchtitan.py: in a stand-in of torchtitan's trainer.

The stand-in (helpers/torchtitan_standin) has the names and types of torchtitan 0.3.0 that the
example uses.
"""

import contextlib
import importlib.util
import shutil
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader

import distprune as prune
from distprune.testing import run_ranks
from helpers.comparisons import assert_nothing_wrong

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "prune_torchtitan.py"
STANDIN = ROOT / "tests" / "helpers" / "torchtitan_standin"


def whole(tensor):
    tensor = tensor.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()


def watch(trainer, wrong):
    """Verify the masks after each step."""
    step = trainer.pruner.step

    def watched():
        report = step()
        wrong.extend(trainer.pruner.verify().all_problems)
        return report

    trainer.pruner.step = watched


def train(trainer, folder):
    """Train, and take the last checkpoint away; what is wrong, and the weights at the end."""
    wrong = []
    watch(trainer, wrong)
    trainer.train()
    pairs = trainer.pruner.parameters
    end = [whole(getattr(module, name)) for module, name in pairs]
    number = sum(int((value == 0).sum()) for value in end)
    if number != round(0.5 * sum(value.numel() for value in end)):
        wrong.append(f"{number} weights are zero")
    if any(prune.is_pruned(module) for module, _ in pairs):
        wrong.append("the model is still pruned")
    last = folder / "checkpoint" / "step-10"
    saved = FileSystemReader(last).read_metadata()
    if [name for name in saved.state_dict_metadata if name.endswith(("_orig", "_mask"))]:
        wrong.append("the last checkpoint has masks")
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(last)
    dist.barrier()
    return wrong, end


@contextlib.contextmanager
def example_in_the_standin():
    """The example, imported with the stand-in; both are forgotten afterwards."""
    before = dict(sys.modules), list(sys.path)
    sys.path[:0] = [str(EXAMPLE.parent), str(STANDIN)]
    try:
        yield importlib.import_module("prune_torchtitan")
    finally:
        for name in set(sys.modules) - set(before[0]):
            if name.partition(".")[0] in ("torchtitan", "prune_torchtitan"):
                del sys.modules[name]
        sys.path[:] = before[1]


def in_the_standin(folder):
    with example_in_the_standin() as module:

        def config():
            made = module.pruned_llama3()
            made.dump_folder, made.prune_every = str(folder), 2
            made.training.disable_cuda_graphs = True
            made.checkpoint.enable, made.checkpoint.interval = True, 4
            return made

        with pytest.raises(ValueError, match="disable_cuda_graphs"):
            module.PruningTrainer(module.pruned_llama3())
        wrong, first = train(module.PruningTrainer(config()), folder)
        others, second = train(module.PruningTrainer(config()), folder)  # resumes at step 8
        wrong += others
        if not all(map(torch.equal, first, second)):
            wrong.append("the resumed run ended differently")
        return wrong


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_example_in_a_standin(world_size, tmp_path):
    assert_nothing_wrong(run_ranks(in_the_standin, world_size, tmp_path))
