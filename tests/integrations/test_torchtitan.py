"""examples/prune_torchtitan.py: in a stand-in of torchtitan's trainer, and in torchtitan itself.

The stand-in (helpers/torchtitan_standin) has the names and types of torchtitan 0.3.0 that the
example uses. torchtitan itself needs torch 2.15 and is not installed by ``make test``; where it can
be imported, its own trainer, models and parallelise functions run here on CPUs, with what
helpers/torchtitan_on_cpus.py replaces.
"""

import ast
import contextlib
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader

import distprune as prune
from distprune.testing import run_ranks
from helpers import reference
from helpers.comparisons import assert_nothing_wrong

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "prune_torchtitan.py"
USED = {"config", "parallel_dims", "model_parts", "checkpointer", "step"}  # of the trainer
STANDIN = ROOT / "tests" / "helpers" / "torchtitan_standin"


def sources_of_torchtitan() -> Path:
    found = importlib.util.find_spec("torchtitan")
    if found is None or found.origin is None:
        pytest.skip("torchtitan is not installed")
    return Path(found.origin).parent


def test_the_example_has_the_types_of_the_standin():
    """The types of torchtitan's names as the stand-in writes them down; see the next test."""
    pytest.importorskip("mypy")
    command = [sys.executable, "-m", "mypy", str(EXAMPLE)]
    environment = {**os.environ, "MYPYPATH": str(STANDIN)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_standin_has_torchtitans_names():
    """Each class, method and argument of the stand-in that the example uses."""
    real = sources_of_torchtitan()
    for path, kind, names in (
        ("trainer.py", "Trainer", ["train_step", "load_state_dict", "state_dict", "train"]),
        ("components/checkpointer/base.py", "ModelWrapper", ["state_dict", "load_state_dict"]),
    ):
        arguments = []
        for root in (real, STANDIN / "torchtitan"):
            tree = ast.parse((root / path).read_text())
            (found,) = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == kind]
            methods = {n.name: n for n in found.body if isinstance(n, ast.FunctionDef)}
            arguments.append([[each.arg for each in methods[n].args.args] for n in names])
            declared = {n.target.id for n in found.body if isinstance(n, ast.AnnAssign)}
            assert kind != "Trainer" or declared >= USED, (root, USED - declared)
        assert arguments[0] == arguments[1]


def whole(tensor):
    tensor = tensor.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()


def watch(trainer, wrong):
    """Compare each pruning with the oracle, and verify the masks after each step."""
    pruner, step = trainer.pruner, trainer.pruner.step

    def watched():
        pairs = pruner.parameters
        values = [whole(getattr(module, name)) for module, name in pairs]
        keeps = [whole(getattr(module, name + "_mask")) != 0 for module, name in pairs]
        report = step()
        if report is not None:
            keeps = reference.prune(values, report.num_pruned_now, keeps)
        for (module, name), keep in zip(pairs, keeps, strict=True):
            if not torch.equal(whole(getattr(module, name + "_mask")) != 0, keep):
                wrong.append(f"step {trainer.step}: another mask than the oracle's")
        wrong.extend(pruner.verify().all_problems)
        return report

    pruner.step = watched


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


REPLICATED = {"data_parallel_replicate_degree": 2}
WITH_EXPERTS = {"expert_parallel_degree": 2}
LAYOUTS = {
    "one": (1, {}),
    "fsdp": (2, {}),
    "replicate": (2, {**REPLICATED, "data_parallel_shard_degree": 1}),
    "tp": (2, {"tensor_parallel_degree": 2}),
    "fsdp_tp": (4, {"tensor_parallel_degree": 2}),
    "hsdp": (4, REPLICATED),
    "mixture_fsdp": (2, {}),
    "mixture_ep": (2, WITH_EXPERTS),
    "mixture_ep_fsdp": (4, WITH_EXPERTS),
    "mixture_ep_tp": (4, {**WITH_EXPERTS, "tensor_parallel_degree": 2}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_example_in_torchtitan(layout, tmp_path):
    """In processes of their own: torchtitan keeps meshes of a process group for good."""
    sources_of_torchtitan()
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 15):
        pytest.skip("torchtitan 0.3.0 needs torch 2.15")
    world_size, _ = LAYOUTS[layout]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    command += [str(world_size), __file__, str(tmp_path), layout]
    folders = [ROOT, ROOT / "tests", EXAMPLE.parent, *sys.path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))}
    for _ in range(2):  # the second run resumes the first one at step 8
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-5000:]
    first, second = (torch.load(tmp_path / f"{number}.pt") for number in (0, 1))
    assert all(map(torch.equal, first, second))


def main():
    from helpers import torchtitan_on_cpus

    module = importlib.import_module("prune_torchtitan")
    folder, layout = Path(sys.argv[1]), sys.argv[2]
    config = module.pruned_llama3()
    if layout.startswith("mixture"):
        models = importlib.import_module("torchtitan.models.qwen3")
        config.model_spec = models.model_registry("debugmodel_moe")
        config.loss.loss_fn.global_vocab_size = config.model_spec.model.vocab_size
        torchtitan_on_cpus.shrink(config.model_spec.model)
        config.debug.moe_force_load_balance = True  # gloo fails where an expert gets no token
    config.prune_every = 2
    trainer = torchtitan_on_cpus.trainer_of(config, str(folder), **LAYOUTS[layout][1])
    wrong, end = train(trainer, folder)
    if dist.get_rank() == 0:
        torch.save(end, folder / f"{len(list(folder.glob('*.pt')))}.pt")
    trainer.close()
    assert not wrong, wrong


if __name__ == "__main__":
    main()
