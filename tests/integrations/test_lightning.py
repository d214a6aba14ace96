"""Callbacks in Lightning's real Trainer, on its strategies: exact, saved, resumed bit for bit."""

import contextlib
import functools
import os
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import (
    FullStateDictConfig,
    FullyShardedDataParallel,
    StateDictType,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import distprune as prune
from distprune import criteria
from distprune.integrations.lightning import PruningCallback
from distprune.schedule import Cubic, OneShot
from distprune.testing import run_ranks
from helpers.wrappings import whole

SCHEDULE = Cubic(begin=1, end=7, frequency=2, final_sparsity=0.8)
TAYLOR = functools.partial(criteria.Taylor, unit="global_batch")
STRATEGIES = ["ddp", "fsdp1", "fsdp2", "tp"]


class Net(pl.LightningModule):
    """Small integers are its data, and halves its weights."""

    def __init__(self, wrapping: str = "plain", seed: int = 0) -> None:
        super().__init__()
        self.wrapping, self.is_wrapped = wrapping, False
        torch.manual_seed(seed)
        self.l1, self.l2, self.head = nn.Linear(6, 8), nn.Linear(8, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.l2(self.l1(x).relu()).relu())

    def configure_model(self):
        if self.wrapping not in ("fsdp2", "tp") or self.is_wrapped:
            return
        self.is_wrapped = True
        if self.wrapping == "tp":
            plan = {"l1": ColwiseParallel(), "l2": RowwiseParallel()}
            parallelize_module(self, self.device_mesh["tensor_parallel"], plan)
            return
        for layer in (self.l1, self.l2, self.head):
            fully_shard(layer, mesh=self.device_mesh["data_parallel"])
        fully_shard(self, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch, index):
        return (self(batch[0]) - batch[1]).square().mean()

    def validation_step(self, batch, index):
        self.log("val", (self(batch[0]) - batch[1]).square().mean())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.05)


class OnCPU(FSDPStrategy):
    """Lightning refuses FSDP without a GPU, by the exact class; torch runs it on gloo."""

    def _setup_model(self, model):
        device = torch.device("cpu")  # Lightning passes an index, which the CPU does not have
        return FullyShardedDataParallel(
            model, device_id=device, sharding_strategy=self.sharding_strategy, **self.kwargs
        )


def strategy_for(wrapping: str):
    size = 1 if not torch.distributed.is_initialized() else torch.distributed.get_world_size()
    match wrapping:
        case "fsdp1":
            policy = ModuleWrapPolicy({nn.Linear})
            return OnCPU(state_dict_type="sharded", auto_wrap_policy=policy)
        case "fsdp2":
            return ModelParallelStrategy(data_parallel_size=size, tensor_parallel_size=1)
        case "tp":
            return ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=size)
    return "ddp" if wrapping == "ddp" else "auto"


def loader(wrapping: str = "plain", num_batches: int = 10) -> torch.utils.data.DataLoader:
    """Batches of a rank are all the same: Lightning begins with the first one when it resumes."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(-2, 3, (4, 6), generator=generator).float()
    y = torch.randint(-2, 3, (4, 2), generator=generator).float()
    if wrapping in ("ddp", "fsdp1", "fsdp2"):
        mine = slice(torch.distributed.get_rank(), None, torch.distributed.get_world_size())
        x, y = x[mine], y[mine]
    data = torch.utils.data.TensorDataset(x.repeat(num_batches, 1), y.repeat(num_batches, 1))
    return torch.utils.data.DataLoader(data, batch_size=len(x))


def make_trainer(folder, callbacks, wrapping="plain", **options) -> pl.Trainer:
    size = torch.distributed.get_world_size() if wrapping != "plain" else 1
    settings = {
        "accelerator": "cpu",
        "strategy": strategy_for(wrapping),
        "devices": size,
        "max_steps": 10,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": str(folder),
    }
    if wrapping != "plain":
        settings["plugins"] = [LightningEnvironment()]
        settings["use_distributed_sampler"] = False
    return pl.Trainer(**{**settings, **options}, callbacks=callbacks)


def launched():
    """The environment in which a launcher starts a rank."""
    rank = str(torch.distributed.get_rank())
    names = {"LOCAL_RANK": rank, "NODE_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    return mock.patch.dict(os.environ, names)


class SaveAt(pl.Callback):
    """Saves after a step, behind the callback that prunes, and perhaps stops there."""

    def __init__(self, step, path, *, stops=False):
        self.step, self.path, self.stops = step, path, stops

    def on_train_batch_end(self, trainer, pl_module, *args):
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)
            trainer.should_stop = self.stops


def final_state(trainer: pl.Trainer) -> dict[str, torch.Tensor]:
    """The whole parameters, by name, after the zeros were made permanent."""
    model = trainer.strategy.model
    if isinstance(trainer.strategy, FSDPStrategy):
        config = FullStateDictConfig(offload_to_cpu=False, rank0_only=False)
        kind = StateDictType.FULL_STATE_DICT
        with FullyShardedDataParallel.state_dict_type(model, kind, config):
            return {key: value.clone() for key, value in model.state_dict().items()}
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    return {key: whole(value).clone() for key, value in model.state_dict().items()}


def assert_equal(one, other):
    assert one.keys() == other.keys()
    for key, value in one.items():
        assert torch.equal(value, other[key]), key


def run_scheduled(wrapping, folder, criterion):
    """Undisturbed, and stopped and resumed by another model with other weights."""

    def new_callback():
        return PruningCallback(SCHEDULE, exclude="head", criterion=criterion, verify_every=1)

    context = contextlib.nullcontext() if wrapping == "plain" else launched()
    with context:
        path = f"{folder}/at_4.ckpt"
        undisturbed = new_callback()
        trainer = make_trainer(folder, [undisturbed, SaveAt(4, path)], wrapping)
        trainer.fit(Net(wrapping), loader(wrapping))
        state = final_state(trainer)

        callback = new_callback()
        resumed = make_trainer(folder, [callback], wrapping)
        resumed.fit(Net(wrapping, seed=9), loader(wrapping), ckpt_path=path)
        assert_equal(final_state(resumed), state)
    assert callback.last_report.parameters == undisturbed.last_report.parameters
    assert callback.pruner.num_steps == 10
    zeros = sum(int((state[f"{name}.weight"] == 0).sum()) for name in ("l1", "l2"))
    assert zeros == round(0.8 * 80)
    assert not any(map(prune.is_pruned, trainer.strategy.model.modules()))
    return state


@pytest.mark.parametrize("criterion", [None, TAYLOR])
def test_one_process_resumes_bit_for_bit(tmp_path, criterion):
    run_scheduled("plain", tmp_path, criterion)


@pytest.mark.parametrize("wrapping", STRATEGIES)
def test_two_ranks_resume_bit_for_bit(tmp_path, wrapping):
    criterion = TAYLOR if wrapping == "ddp" else None
    one, other = run_ranks(run_scheduled, 2, wrapping, str(tmp_path), criterion)
    assert_equal(one, other)


def train_with_a_sharded_criterion(folder):
    callback = PruningCallback(SCHEDULE, exclude="head", criterion=TAYLOR)
    with launched():
        trainer = make_trainer(folder, [callback], "fsdp2")
        trainer.fit(Net("fsdp2"), loader("fsdp2"))
        with pytest.raises(NotImplementedError, match="collected is sharded"):
            trainer.save_checkpoint(f"{folder}/end.ckpt")
        trainer = make_trainer(folder, [callback], "fsdp2", enable_checkpointing=True)
        with pytest.raises(NotImplementedError, match="collected is sharded"):
            trainer.fit(Net("fsdp2"), loader("fsdp2"))
    return callback.last_report.num_pruned


def test_what_a_criterion_has_of_shards_is_not_saved(tmp_path):
    assert run_ranks(train_with_a_sharded_criterion, 2, str(tmp_path)) == [round(0.8 * 80)] * 2


def test_a_checkpoint_of_the_training_is_evaluated_with_its_masks(tmp_path):
    path = tmp_path / "at_4.ckpt"
    callback = PruningCallback(OneShot(0, 0.5), permanent=False, scope="layer")
    trainer = make_trainer(tmp_path, [callback, SaveAt(4, path, stops=True)])
    trainer.fit(Net(), loader())
    assert float(trainer.callback_metrics["sparsity"]) == 0.5
    model = Net(seed=9)
    tester = make_trainer(tmp_path, [PruningCallback(OneShot(0, 0.5))])
    tester.validate(model, loader(), ckpt_path=path)
    mask = model.l1.weight_mask
    assert int((mask == 0).sum()) == 24
    saved = torch.load(path, weights_only=True)
    plain = Net()
    plain.load_state_dict(prune.checkpoint.fold(saved["state_dict"]))
    assert torch.equal(plain.l1.weight, model.l1.weight_orig * mask)


def test_what_cannot_work_is_refused(tmp_path):
    with pytest.raises(TypeError, match="go with a schedule"):
        PruningCallback(plan=prune.select, exclude="head")

    def fit(*callbacks):
        make_trainer(tmp_path, list(callbacks), max_steps=1).fit(Net(), loader())

    averaging = pl.callbacks.EMAWeightAveraging(decay=0.9)
    for callback in (averaging, pl.callbacks.StochasticWeightAveraging(swa_lrs=0.1)):
        with pytest.raises(NotImplementedError, match=r"Averaging beside PruningCallback"):
            fit(PruningCallback(SCHEDULE), callback)
    with pytest.raises(TypeError, match="excludes"):
        fit(PruningCallback(SCHEDULE, excludes="head"))
    fisher = functools.partial(criteria.Fisher, unit="rank_batch")
    with pytest.raises(RuntimeError, match="unit='rank_batch'"):
        fit(PruningCallback(SCHEDULE, criterion=fisher))


@pytest.mark.parametrize("end", [{"max_steps": 2}, {"max_steps": -1, "max_epochs": 2}])
def test_a_training_that_ends_before_its_schedule_is_a_warning(tmp_path, caplog, end):
    make_trainer(tmp_path, [PruningCallback(SCHEDULE)], **end).fit(Net(), loader(num_batches=1))
    assert "training ends after 2 steps at sparsity" in caplog.text


def test_a_checkpoint_with_permanent_zeros_does_not_resume(tmp_path):
    trainer = make_trainer(tmp_path, [PruningCallback(SCHEDULE)])
    trainer.fit(Net(), loader())
    trainer.save_checkpoint(tmp_path / "final.ckpt")
    plain = Net()
    plain.load_state_dict(torch.load(tmp_path / "final.ckpt", weights_only=True)["state_dict"])
    again = make_trainer(tmp_path, [PruningCallback(SCHEDULE)], max_steps=12)
    with pytest.raises(RuntimeError, match="has no masks; expected one that was saved before"):
        again.fit(Net(), loader(), ckpt_path=tmp_path / "final.ckpt")
