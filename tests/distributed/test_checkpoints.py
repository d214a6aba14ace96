"""Saved on any sharding, loaded on any other: the same masks and weights, and training goes on.

Weights and masks are compared exactly. The next update to 1e-6, and exactly where the sharding is
the same: other shardings sum gradients in another order.
"""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import distprune as prune
from distprune import checkpoint, schedule
from distprune.base.naming import named_modules
from distprune.testing import run_ranks
from helpers import wrappings
from helpers.comparisons import assembled, assert_nothing_wrong_on, raised
from helpers.models import EVEN_HIDDEN, Net, fqns, seeded, target
from helpers.sampling import THOROUGH

SAVERS = ["fsdp1-3", "fsdp2-4", "hsdp-2x2", "fsdp2_tp-2x2", "tp-2", "ddp-2", "plain-1"]
SAVERS += ["replicate-2"]
LOADERS = ["fsdp2-1", "fsdp2-2", "fsdp2-3", "fsdp2-4", "fsdp2_root-2", "hsdp-2x2", "hsdp-1x3"]
LOADERS += ["fsdp1-2", "fsdp1_root-3", "fsdp1_flat-2", "fsdp1_hybrid-2x2"]
LOADERS += ["fsdp2_tp-2x2", "tp-2", "ddp-2", "plain-1", "replicate-2"]
WEIGHTS = ["l1.weight", "l2.weight", "l3.weight"]
NUM_STEPS = 3  # before the checkpoint; the pruner prunes at steps 1, 3 and 5

Part = dict[str, tuple[Tensor, Tensor]]


class Run:
    """A training run with a schedule, up to the step that it is asked for."""

    def __init__(self, wrapping: str, seed: int = 0, optimizer: type = torch.optim.AdamW):
        dense = seeded(Net(EVEN_HIDDEN), seed)
        self.wrapping = wrapping
        self.indices = wrappings.local_indices(dense, wrapping)
        self.model = wrappings.wrap(dense, wrapping)
        options = {"momentum": 0.9} if optimizer is torch.optim.SGD else {}
        parameters = self.model.parameters()
        self.optimizer = optimizer(parameters, lr=0.05, weight_decay=0.1, **options)
        ramp = schedule.Linear(1, 5, 2, final_sparsity=0.6, initial_sparsity=0.3)
        self.pruner = schedule.ScheduledPruner(prune.select(self.model), ramp)
        self.everything = self.model, self.optimizer, self.pruner

    def step(self) -> None:
        generator = torch.Generator().manual_seed(self.pruner.num_steps)
        x, y = torch.randn(12, 6, generator=generator), torch.randn(12, 3, generator=generator)
        part, num_parts = wrappings.data_rank(self.wrapping)
        self.optimizer.zero_grad()
        out = self.model(x.chunk(num_parts)[part])
        F.mse_loss(out, y.chunk(num_parts)[part]).backward()
        self.optimizer.step()
        self.pruner.step()

    def parts(self) -> Part:
        """(masked values, indices) of what this rank holds of every parameter; and masks."""
        modules, parts = dict(named_modules(self.model)), {}
        for name, indices in self.indices.items():
            path, _, parameter = name.rpartition(".")
            mask = modules[path]._buffers.get(parameter + "_mask")
            held = wrappings.shard(self.model, name, self.indices).clone()
            if mask is not None:
                parts[name + "_mask"] = wrappings.local(mask).clone(), indices
                held *= wrappings.local(mask)
            parts[name] = held, indices
        return parts

    def compare(self, full: dict[str, Tensor], when: str, exact: bool) -> list[str]:
        parts, wrong = self.parts(), []
        if set(parts) != set(full):
            return [f"{when}: {sorted(parts)}, not {sorted(full)}"]
        for name, (held, indices) in parts.items():
            expected = wrappings.my_part(full[name], indices).to(held.dtype)
            tolerance = 0 if exact or name.endswith("_mask") else 1e-6
            if not torch.allclose(held, expected, rtol=0, atol=tolerance):
                wrong.append(f"{when}: {name} is off by {(held.float() - expected).abs().max()}")
        return wrong


def save(wrapping: str, path: str, optimizer: type) -> tuple[Part, Part]:
    """Train, save, and make one step more: what was held before and after it."""
    run = Run(wrapping, optimizer=optimizer)
    for _ in range(NUM_STEPS):
        run.step()
    state = checkpoint.get_state_dict(*run.everything)
    before = run.parts()
    dcp.save(state, checkpoint_id=path)
    run.step()
    return before, run.parts()


def put_together(per_rank: list[Part]) -> dict[str, Tensor]:
    shapes = {name: parameter.shape for name, parameter in Net(EVEN_HIDDEN).named_parameters()}
    return {
        name: assembled([parts[name] for parts in per_rank], shapes[name.removesuffix("_mask")])
        for name in per_rank[0]
    }


def optimizer_of(saver: str) -> type:
    """Moments of two kinds are saved."""
    return torch.optim.SGD if saver in ("fsdp2_tp-2x2", "ddp-2") else torch.optim.AdamW


Saved = dict[str, tuple[str, dict[str, Tensor], dict[str, Tensor]]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Saved:
    """By wrapping: where the checkpoint is, what was saved, and what came one step later."""
    checkpoints = {}
    for wrapping in SAVERS:
        path = str(tmp_path_factory.mktemp(wrapping))
        size, optimizer = wrappings.world_size(wrapping), optimizer_of(wrapping)
        per_rank = run_ranks(save, size, wrapping, path, optimizer)
        before, after = zip(*per_rank, strict=True)
        checkpoints[wrapping] = path, put_together(before), put_together(after)
    return checkpoints


def load_all(wrapping: str, saved: Saved) -> list[str]:
    """Each checkpoint into a fresh model: dense, pruned in part, or trained with other values.

    By default every third checkpoint, and the one of the same wrapping.
    """
    wrong = []
    for turn, (saver, (path, before, after)) in enumerate(saved.items()):
        if not (THOROUGH or turn % 3 == LOADERS.index(wrapping) % 3 or saver == wrapping):
            continue
        run = Run(wrapping, seed=turn, optimizer=optimizer_of(saver))
        if turn % 3 == 1:
            prune.global_unstructured([prune.select(run.model)[1]], prune.L1Unstructured, amount=9)
        if turn % 3 == 2:
            run.step()
        checkpoint.load(path, *run.everything)
        when = f"{saver} in {wrapping}"
        wrong += run.compare(before, when, exact=True)
        if run.pruner.num_steps != NUM_STEPS:
            wrong.append(f"{when}: the pruner is at step {run.pruner.num_steps}")
        run.step()
        wrong += run.compare(after, f"{when}, one step later", exact=saver == wrapping)
    return wrong


@pytest.mark.parametrize("wrapping", LOADERS)
def test_training_goes_on_from_any_checkpoint(wrapping, saved):
    assert_nothing_wrong_on(wrapping, load_all, saved)


def test_every_wrapper_saves_the_same_keys(saved):
    """But for "_orig", which plain modules have."""
    keys = {
        wrapping: set(dcp.FileSystemReader(path).read_metadata().state_dict_metadata)
        for wrapping, (path, _, _) in saved.items()
    }
    assert {"model.l1.weight_orig", "model.l1.weight_mask", "model.l1.bias"} < keys["plain-1"]
    assert "optimizer.state.l1.weight_orig.exp_avg" in keys["plain-1"]
    for wrapping in SAVERS:
        is_adam = optimizer_of(wrapping) is torch.optim.AdamW
        found, expected = (
            {k.replace("_orig", "") for k in some if is_adam or not k.startswith("optimizer")}
            for some in (keys[wrapping], keys["plain-1"])
        )
        assert found == expected, wrapping
        if wrapping.startswith(("fsdp", "hsdp")):
            assert not any("_orig" in key for key in keys[wrapping]), wrapping


def test_a_checkpoint_of_shards_loads_into_a_plain_model(saved, tmp_path):
    path, before, _ = saved["fsdp2-4"]
    dcp_to_torch_save(path, tmp_path / "consolidated.pt")
    state = torch.load(tmp_path / "consolidated.pt", weights_only=False)["model"]
    model = Net(EVEN_HIDDEN)
    model.load_state_dict(checkpoint.prepare_for_load(model, state))
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name.removesuffix("_orig")].float()), name
    folded = checkpoint.fold(state)
    assert list(folded) == fqns(Net())
    Net(EVEN_HIDDEN).load_state_dict(folded)
    for name in WEIGHTS:
        module, parameter = target(model, name)
        prune.remove(module, parameter)
        assert torch.equal(folded[name], getattr(module, parameter))


def differing(path: str) -> str:
    """One rank that asks for something else, or whose file system has no such checkpoint."""
    run = Run("fsdp2-2")
    path = path if dist.get_rank() == 0 else path + "-elsewhere"
    return raised(lambda: checkpoint.load(path, run.model))


def test_all_ranks_load_or_none(saved):
    first, second = run_ranks(differing, 2, saved["fsdp2-4"][0])
    assert "on rank 1" in first and "on rank 1" in second
