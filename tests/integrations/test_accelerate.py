"""Accelerate: every silent fallback is detected, and saved states carry all that pruning needs."""

import contextlib
import functools
import os
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from accelerate.utils.launch import prepare_multi_gpu_env
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import distprune as prune
from distprune import criteria
from distprune.integrations.accelerate import check_wrapping, load_state, register_pruning
from distprune.schedule import Cubic, ScheduledPruner
from distprune.testing import run_ranks
from helpers.wrappings import whole

CONFIGS = Path(__file__).resolve().parents[2] / "configs" / "accelerate"


def small_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))


@contextlib.contextmanager
def as_launched(**environment):
    """A process that a launcher has just started; accelerate keeps its state in classes."""
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    launcher = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    before = dict(os.environ)
    os.environ.update({k: str(v) for k, v in {**launcher, **environment}.items()})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()


def plugin(version: int) -> FullyShardedDataParallelPlugin:
    return FullyShardedDataParallelPlugin(
        fsdp_version=version, auto_wrap_policy="no_wrap", cpu_ram_efficient_loading=False
    )


def prepared(accelerator: Accelerator, model: nn.Module | None = None) -> nn.Module:
    model = model or small_model()
    return accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))[0]


def pretend_fsdp2() -> None:
    """Let accelerate take its own FSDP2 path on gloo, where it says that it has none."""
    os.environ["ACCELERATE_USE_FSDP"] = "true"
    AcceleratorState._shared_state["fsdp_plugin"] = plugin(2)
    for state in (AcceleratorState, PartialState):
        state._shared_state["distributed_type"] = DistributedType.FSDP
        state._shared_state["device"] = torch.device("cpu")


def real_fsdp2_on_the_cpu() -> Accelerator:
    accelerator = Accelerator(cpu=True)
    pretend_fsdp2()
    return accelerator


def every_case() -> None:
    def refused(text: str, *args, **kwargs) -> None:
        with pytest.raises(RuntimeError, match=f"^{text}"):
            check_wrapping(*args, **kwargs)

    asked = "is what accelerate was asked for, and the model is"
    with as_launched():
        accelerator = Accelerator(cpu=True)
        assert check_wrapping(accelerator, prepared(accelerator)) == "ddp"
        refused(f"one model on 2 processes {asked} plain", accelerator, small_model())
        model = prepared(accelerator)
        refused(f"4 processes {asked} ddp, on 2 processes", accelerator, model, num_processes=4)

    with as_launched():
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin(2))
        refused(f"fsdp {asked} ddp", accelerator, prepared(accelerator))

    # accelerate launch --use_fsdp --fsdp_version 2, on a machine without an accelerator
    with as_launched(ACCELERATE_USE_FSDP="true", FSDP_VERSION="2"):
        accelerator = Accelerator()
        refused(f"2 processes {asked}", accelerator, prepared(accelerator))
    with as_launched(ACCELERATE_USE_FSDP="true", FSDP_VERSION="2", ACCELERATE_USE_CPU="true"):
        accelerator = Accelerator()
        refused(f"fsdp2 {asked} ddp", accelerator, prepared(accelerator))

    with as_launched(FSDP_VERSION="2"):
        accelerator = real_fsdp2_on_the_cpu()
        model = prepared(accelerator)
        refused(f"fsdp2 {asked} plain, on 2 processes", accelerator, small_model())
        # Pruned after prepare, it stays what it is.
        prune.global_unstructured(prune.select(model), prune.L1Unstructured, amount=0.5)
        assert check_wrapping(accelerator, model) == "fsdp2"
        AcceleratorState._shared_state["fsdp_plugin"] = plugin(1)
        refused(f"fsdp1 {asked} fsdp2", accelerator, model)

    with as_launched(PARALLELISM_CONFIG_TP_SIZE="2"):
        accelerator = Accelerator(cpu=True)
        model = prepared(accelerator)
        refused(f"tensor parallelism over 2 ranks {asked} ddp", accelerator, model)
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        model = parallelize_module(small_model(), mesh, {"0": ColwiseParallel()})
        assert check_wrapping(accelerator, model) == "tp"


def test_two_ranks():
    run_ranks(every_case, 2)


def one_process(folder) -> None:
    with as_launched():
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            del os.environ[name]
        run = Run(Accelerator(cpu=True), TAYLOR).train(4)
        # Which is what accelerate launch --cpu --num_processes 2 is.
        assert check_wrapping(run.accelerator, run.model) == "plain"
        with pytest.raises(RuntimeError, match="2 processes is what accelerate was asked for"):
            check_wrapping(run.accelerator, run.model, num_processes=2)
        run.accelerator.save_state(folder, safe_serialization=False)
        state = run.state()
        fresh = Run(Accelerator(cpu=True), TAYLOR, seed=9)
        fresh.accelerator._models[:] = [fresh.model]
        fresh.accelerator._optimizers[:] = [fresh.optimizer]
        load_state(fresh.accelerator, folder, fresh.model)
        assert all(torch.equal(state[key], value) for key, value in fresh.state().items())
        with pytest.raises(FileNotFoundError, match="no model 0 that accelerate saved"):
            load_state(fresh.accelerator, f"{folder}/missing", fresh.model)


def test_one_process(tmp_path):
    run_ranks(one_process, 1, str(tmp_path / "state"))


@pytest.mark.parametrize("name", sorted(path.stem for path in CONFIGS.glob("*")))
def test_configs_are_what_they_are_called(name):
    """As `accelerate launch` reads them, short of starting it."""
    file, script = str(CONFIGS / f"{name}.yaml"), "script.py"
    parser = launch_command_parser()
    arguments = parser.parse_args(["--config_file", file, "--num_processes", "8", script])
    arguments, _, _ = _validate_launch_command(arguments)
    assert (arguments.use_fsdp, arguments.multi_gpu) == (name != "ddp", name == "ddp")
    arguments.main_process_port = 0
    environment = prepare_multi_gpu_env(arguments)
    assert arguments.nproc_per_node == "8"
    assert environment["ACCELERATE_MIXED_PRECISION"] == "bf16"
    if name == "ddp":
        assert "ACCELERATE_USE_FSDP" not in environment
        return
    assert environment["FSDP_VERSION"] == ("1" if name == "fsdp1" else "2")
    assert environment.get("PARALLELISM_CONFIG_TP_SIZE", "1") == ("2" if "tp" in name else "1")


# -- save_state and load_state carry masks, schedules and criteria

SCHEDULE = Cubic(begin=1, end=7, frequency=2, final_sparsity=0.8)
TAYLOR = functools.partial(criteria.Taylor, unit="global_batch")


class Run:
    """A training run on this rank, as a script writes it."""

    def __init__(self, accelerator, make_criterion, seed=0):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4), nn.Linear(4, 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        self.accelerator = accelerator
        self.model, self.optimizer = accelerator.prepare(model, optimizer)
        pairs = prune.select(self.model, exclude="3")
        self.criterion = make_criterion and make_criterion(pairs)
        options = {"importance_scores": self.criterion.scores} if self.criterion else {}
        self.pruner = ScheduledPruner(pairs, SCHEDULE, **options)
        register_pruning(
            accelerator, self.model, self.pruner,
            criteria=[self.criterion] if self.criterion else [],
        )  # fmt: skip

    def train(self, num_steps):
        rank, size = self.accelerator.process_index, self.accelerator.num_processes
        generator = torch.Generator().manual_seed(1)
        x = torch.randint(-2, 3, (4, 6), generator=generator).float()[rank::size]
        for _ in range(num_steps):
            self.optimizer.zero_grad()
            self.accelerator.backward(self.model(x).square().mean())
            if self.criterion:
                self.criterion.update()
            self.optimizer.step()
            self.pruner.step()
            prune.verify(self.model, expected=self.pruner.pruned_parameters)
        return self

    def state(self):
        state = {name.removeprefix("module."): t for name, t in self.model.state_dict().items()}
        return {key: whole(tensor).clone() for key, tensor in state.items()}


def make_accelerator(wrapping) -> Accelerator:
    return real_fsdp2_on_the_cpu() if wrapping == "fsdp2" else Accelerator(cpu=True)


def interrupted_and_resumed(wrapping, folder, make_criterion) -> dict[str, torch.Tensor]:
    with as_launched(FSDP_VERSION="2"):
        run = Run(make_accelerator(wrapping), make_criterion).train(4)
        assert prune.is_pruned(run.model)
        run.accelerator.save_state(folder)
        run.train(6)
        undisturbed = run.state()
    with as_launched(FSDP_VERSION="2"):
        resumed = Run(make_accelerator(wrapping), make_criterion, seed=9)
        assert not prune.is_pruned(resumed.model)
        load_state(resumed.accelerator, folder, resumed.model)
        assert resumed.pruner.num_steps == 4
        resumed.train(6)
        state = resumed.state()
    assert state.keys() == undisturbed.keys()
    for key, value in undisturbed.items():
        assert torch.equal(state[key], value), key
    masks = [value for key, value in state.items() if key.endswith("_mask")]
    assert sum(int((mask == 0).sum()) for mask in masks) == round(0.8 * 80)
    return state


@pytest.mark.parametrize("wrapping", ["ddp", "fsdp2"])
@pytest.mark.parametrize("make_criterion", [None, TAYLOR], ids=["magnitude", "taylor"])
def test_two_ranks_resume_bit_for_bit(tmp_path, wrapping, make_criterion):
    folder = str(tmp_path / "state")
    one, other = run_ranks(interrupted_and_resumed, 2, wrapping, folder, make_criterion)
    assert all(torch.equal(one[key], other[key]) for key in one)
