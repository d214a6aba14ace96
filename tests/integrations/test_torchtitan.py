"""examples/prune_torchtitan.py: in a stand-in of torchtitan's trainer."""

import shutil

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader
from torchtitan_standin import example

import distprune as prune
from distprune.testing import run_ranks
from helpers.comparisons import assert_nothing_wrong


def train(trainer, folder):
    """Train, and take the last checkpoint away; what is wrong, and the weights at the end."""
    wrong, step = [], trainer.pruner.step

    def verified():
        report = step()
        wrong.extend(prune.verify(trainer.model_parts[0]).all_problems)
        return report

    trainer.pruner.step = verified
    trainer.train()
    pairs = trainer.pruner.parameters
    end = [getattr(*pair).detach().full_tensor() for pair in pairs]
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


def in_the_standin(folder):
    with example() as module:

        def config():
            made = module.pruned_llama3()
            made.dump_folder, made.prune_every = str(folder), 2
            made.training.disable_cuda_graphs = made.checkpoint.enable = True
            return made

        with pytest.raises(ValueError, match="disable_cuda_graphs"):
            module.PruningTrainer(module.pruned_llama3())
        wrong, first = train(module.PruningTrainer(config()), folder)
        others, second = train(module.PruningTrainer(config()), folder)  # resumes at step 8
        same = all(map(torch.equal, first, second))
        return wrong + others + ["the resumed run ended differently"] * (not same)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_example_in_a_standin(world_size, tmp_path):
    assert_nothing_wrong(run_ranks(in_the_standin, world_size, tmp_path))
