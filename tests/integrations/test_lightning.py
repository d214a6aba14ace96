"""Callbacks in Lightning's real Trainer, on its strategies: exact, saved, resumed bit for bit."""

import contextlib
import functools
import inspect
import os

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import callbacks as lightning_callbacks
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
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import distprune as prune
from distprune import criteria
from distprune.integrations.lightning import ModelPruning, PruningCallback
from distprune.schedule import Cubic, OneShot
from distprune.testing import run_ranks

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


@contextlib.contextmanager
def launched():
    """The environment in which a launcher starts a rank."""
    rank = str(torch.distributed.get_rank())
    names = {"LOCAL_RANK": rank, "NODE_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    before = dict(os.environ)
    os.environ.update(names)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


class SaveAt(pl.Callback):
    """Saves after a step, behind the callback that prunes, and perhaps stops there."""

    def __init__(self, step, path, *, stops=False):
        self.step, self.path, self.stops = step, path, stops

    def on_train_batch_end(self, trainer, pl_module, *args):
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)
            trainer.should_stop = self.stops


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


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
    return {key: whole(value).detach().clone() for key, value in model.state_dict().items()}


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
        assert "load_checkpoint" not in vars(resumed.strategy)
    assert callback.last_report.parameters == undisturbed.last_report.parameters
    assert callback.pruner.num_steps == 10
    zeros = sum(int((state[f"{name}.weight"] == 0).sum()) for name in ("l1", "l2"))
    assert zeros == round(0.8 * 80) and not is_any_pruned(trainer)
    return state


def is_any_pruned(trainer) -> bool:
    return any(prune.is_pruned(m) for m in trainer.strategy.model.modules())


@pytest.mark.parametrize("criterion", [None, TAYLOR, criteria.AdamSecondMoment])
def test_one_process_resumes_bit_for_bit(tmp_path, criterion):
    run_scheduled("plain", tmp_path, criterion)


@pytest.mark.parametrize("wrapping", STRATEGIES)
@pytest.mark.parametrize("criterion", [None, TAYLOR], ids=["magnitude", "taylor"])
def test_two_ranks_resume_bit_for_bit(tmp_path, wrapping, criterion):
    one, other = run_ranks(run_scheduled, 2, wrapping, str(tmp_path), criterion)
    assert_equal(one, other)


EPOCHS = {"max_steps": -1, "max_epochs": 4}
L1 = {"pruning_fn": "l1_unstructured", "parameter_names": ["weight"], "amount": 0.3}


class SaveAtEpoch(pl.Callback):
    def __init__(self, epoch, path):
        self.epoch, self.path = epoch, path

    def on_train_epoch_end(self, trainer, pl_module):
        if trainer.current_epoch == self.epoch:
            trainer.save_checkpoint(self.path)


def fitted(folder, callback, wrapping="plain", path=None, seed=0, **options):
    saver = [SaveAtEpoch(1, path)] if path is not None else []
    trainer = make_trainer(folder, [callback, *saver], wrapping, **{**EPOCHS, **options})
    trainer.fit(Net(wrapping, seed), loader(wrapping, 3))
    return trainer


def test_model_pruning_has_the_arguments_of_lightnings():
    ours, theirs = (
        list(inspect.signature(cls.__init__).parameters.values())
        for cls in (ModelPruning, lightning_callbacks.ModelPruning)
    )
    assert [(p.name, p.default, p.kind) for p in ours] == [
        (p.name, p.default, p.kind) for p in theirs
    ]


@pytest.mark.parametrize(
    "arguments",
    [
        L1,
        {**L1, "amount": lambda epoch: 5 * epoch},
        {**L1, "parameter_names": None},
        {**L1, "use_global_unstructured": False},
        {**L1, "pruning_fn": torch.nn.utils.prune.L1Unstructured},
        {
            **L1, "pruning_fn": "ln_structured", "use_global_unstructured": False,
            "pruning_dim": 1, "pruning_norm": 2,
        },
    ],
)  # fmt: skip
def test_one_process_ends_as_with_lightnings(tmp_path, arguments):
    """With one pruning: in a second one torch ranks the weights of the forward before."""
    once = {"apply_pruning": lambda epoch: epoch == 2, "use_lottery_ticket_hypothesis": False}
    states = [
        final_state(fitted(tmp_path, cls(**arguments, **once)))
        for cls in (ModelPruning, lightning_callbacks.ModelPruning)
    ]
    assert_equal(*states)
    assert any(int((value == 0).sum()) for value in states[0].values())


def test_lottery_tickets_have_their_starting_values_every_time(tmp_path):
    """Lightning's later rewinds write back what the first one aliased, and training changed."""
    start = Net().state_dict()
    for cls, is_right in ((ModelPruning, True), (lightning_callbacks.ModelPruning, False)):
        state = final_state(fitted(tmp_path, cls(**L1)))
        zeros = sum(int((value == 0).sum()) for value in state.values())
        left = 88
        for _ in range(4):
            left -= round(0.3 * left)
        assert zeros == 88 - left
        weights = [key for key in start if key.endswith("weight")]
        rewound = all(torch.equal(state[k], start[k] * (state[k] != 0)) for k in weights)
        assert rewound == is_right


def run_lottery(wrapping, folder, resamples=False):
    def new_callback():
        return ModelPruning(**L1, resample_parameters=resamples, verbose=2)

    context = contextlib.nullcontext() if wrapping == "plain" else launched()
    with context:
        path = f"{folder}/epoch_1.ckpt"
        torch.manual_seed(5)
        state = final_state(fitted(folder, new_callback(), wrapping, path))
        trainer = make_trainer(folder, [new_callback()], wrapping, **EPOCHS)
        torch.manual_seed(5)
        trainer.fit(Net(wrapping), loader(wrapping, 3), ckpt_path=path)
        if not resamples:
            assert_equal(final_state(trainer), state)
            trainer = make_trainer(folder, [new_callback()], wrapping, **EPOCHS)
            with pytest.raises(ValueError, match="had other values before training"):
                trainer.fit(Net(wrapping, 9), loader(wrapping, 3), ckpt_path=path)
    return state


def test_lottery_tickets_on_one_process_resume(tmp_path):
    run_lottery("plain", tmp_path)


@pytest.mark.parametrize("wrapping", STRATEGIES)
def test_lottery_tickets_on_two_ranks(tmp_path, wrapping):
    one, other = run_ranks(run_lottery, 2, wrapping, str(tmp_path))
    assert_equal(one, other)
    start = Net().state_dict()
    for key in ("l1.weight", "l2.weight", "head.weight"):
        assert torch.equal(one[key], start[key] * (one[key] != 0))


@pytest.mark.parametrize("wrapping", STRATEGIES)
def test_resampled_values_do_not_depend_on_the_sharding(tmp_path, wrapping):
    """All that is left has the new values of reset_parameters, from one seed."""
    torch.manual_seed(5)
    one, other = run_ranks(run_lottery, 2, wrapping, str(tmp_path), resamples=True)
    assert_equal(one, other)
    start = Net().state_dict()
    left = one["l1.weight"] != 0
    assert not torch.isclose(one["l1.weight"], start["l1.weight"])[left].any()
    assert one["l1.weight"].abs().max() <= 6**-0.5  # the bound of kaiming_uniform_(a=sqrt(5))


def random_masks(folder):
    with launched():
        masks = []
        for cls in (ModelPruning, lightning_callbacks.ModelPruning):
            callback = cls(
                "random_unstructured", amount=0.5, use_global_unstructured=False,
                parameter_names=["weight"], use_lottery_ticket_hypothesis=False,
            )  # fmt: skip
            trainer = make_trainer(folder, [callback], "ddp", max_steps=-1, max_epochs=1)
            model = Net("ddp")
            torch.manual_seed(torch.distributed.get_rank())
            trainer.fit(model, loader("ddp", 3))
            masks.append({key: value != 0 for key, value in final_state(trainer).items()})
        return masks


def test_random_pruning_is_the_same_on_all_ranks(tmp_path):
    (ours, theirs), (our_other, their_other) = run_ranks(random_masks, 2, str(tmp_path))
    assert_equal(ours, our_other)
    assert not torch.equal(theirs["l1.weight"], their_other["l1.weight"])
    assert int((~ours["l1.weight"]).sum()) == 24


def test_parameters_to_prune(tmp_path):
    model = Net()
    for given in ([(model.l1, "weight")], lambda module: prune.select(module, "l1")):
        callback = ModelPruning("l1_unstructured", given, amount=10)
        trainer = make_trainer(tmp_path, [callback], max_steps=-1, max_epochs=1)
        trainer.fit(model, loader())
        zeros = {name: int((p == 0).sum()) for name, p in model.named_parameters()}
        assert zeros["l1.weight"] == 10 and sum(zeros.values()) == 10
        model = Net()
    callback = ModelPruning("l1_unstructured", [(Net().l1, "weight")])
    with pytest.raises(Exception, match="the model does not have"):
        make_trainer(tmp_path, [callback]).fit(model, loader())


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
    for arguments, text in (
        ({"pruning_fn": "l3"}, "pruning_fn='l3'"),
        ({"pruning_fn": 3}, "pruning_fn=3"),
        ({"pruning_fn": "ln_structured", "use_global_unstructured": False}, "needs pruning_dim"),
        ({"pruning_fn": "ln_structured", "pruning_dim": 0}, "needs pruning_norm"),
        ({"pruning_fn": "random_structured", "pruning_dim": 0}, "expected False for structured"),
        ({"pruning_fn": prune.LnStructured}, "PRUNING_TYPE='structured'"),
        ({"pruning_fn": torch.nn.utils.prune.LnStructured}, "interface of torch's"),
        ({**L1, "parameter_names": ["scale"]}, "'scale'"),
        ({**L1, "amount": "half"}, "amount='half'"),
        ({**L1, "verbose": 3}, "verbose=3"),
    ):
        with pytest.raises(Exception, match=text):
            ModelPruning(**arguments)
    for arguments, text in (
        ({"plan": 0.5}, "plan is a float"),
        ({"plan": prune.select, "exclude": "head"}, "go with a schedule"),
        ({"plan": prune.select, "scope": "row"}, "go with a schedule"),
        ({"plan": prune.select, "criterion": criteria.SNIP}, "goes with a schedule"),
        ({"plan": SCHEDULE, "reset_criterion": True}, "goes with a criterion"),
        ({"plan": SCHEDULE, "criterion": "taylor"}, "criterion is a str"),
    ):
        with pytest.raises(TypeError, match=text):
            PruningCallback(**arguments)

    def fit(*callbacks):
        make_trainer(tmp_path, list(callbacks), max_steps=1).fit(Net(), loader())

    for criterion, text in (
        (functools.partial(criteria.Fisher, unit="rank_batch"), "unit='rank_batch'"),
        (lambda pairs: criteria.SynFlow(pairs, model=Net()), "runs forwards and backwards"),
    ):
        with pytest.raises(NotImplementedError, match=text):
            fit(PruningCallback(SCHEDULE, criterion=criterion))
    with pytest.raises(NotImplementedError, match="2 callbacks that prune"):
        fit(PruningCallback(SCHEDULE), ModelPruning("l1_unstructured"))


def test_a_checkpoint_with_permanent_zeros_does_not_resume(tmp_path):
    trainer = make_trainer(tmp_path, [PruningCallback(SCHEDULE)])
    trainer.fit(Net(), loader())
    trainer.save_checkpoint(tmp_path / "final.ckpt")
    plain = Net()
    plain.load_state_dict(torch.load(tmp_path / "final.ckpt", weights_only=True)["state_dict"])
    again = make_trainer(tmp_path, [PruningCallback(SCHEDULE)], max_steps=12)
    with pytest.raises(RuntimeError, match="has no masks; expected one that was saved before"):
        again.fit(Net(), loader(), ckpt_path=tmp_path / "final.ckpt")
