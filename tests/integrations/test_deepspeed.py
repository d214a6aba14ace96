"""DeepSpeed's ZeRO, stages 1 to 3, on real DeepSpeed: masks, training, checkpoints, criteria."""

import contextlib
import itertools
import os

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import distprune as prune
from distprune.base.naming import unwrap
from distprune.criteria import SNIP, Fisher
from distprune.testing import run_ranks
from helpers import deepspeed_state, reference
from helpers.comparisons import assert_nothing_wrong
from helpers.wrong_steps import NUM_STEPS, wrong_steps

os.environ.setdefault("DS_ACCELERATOR", "cpu")
pytest.importorskip("deepspeed", minversion="0.19")

SIZES = (7, 9, 5, 3)  # 63, 45 and 15 weights: paddings, and on 4 ranks an empty run
STILL = {"type": "AdamW", "params": {"lr": 0.0, "torch_adam": True}}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(i, o) for i, o in itertools.pairwise(SIZES))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


NAMES = [f"layers.{number}.weight" for number in range(3)]


def run_here(function, args) -> object:
    """ZeRO-3 replaces ``torch.nn.functional.linear`` for all that comes later in a process."""
    linear = nn.functional.linear
    try:
        return function(*args)
    finally:
        nn.functional.linear = linear


def run_deepspeed(function, world_size: int, *args) -> list:
    return run_ranks(run_here, world_size, function, args)


def start() -> None:
    """Let DeepSpeed use the process group of this test, and compile nothing."""
    import deepspeed

    deepspeed_state.forget()
    for variable, value in (("LOCAL_RANK", dist.get_rank()), ("WORLD_SIZE", dist.get_world_size())):
        os.environ[variable] = str(value)
    os.environ["RANK"] = os.environ["LOCAL_RANK"]
    deepspeed.init_distributed("gloo", verbose=False)


def net(dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(0)
    return Net().to(dtype)


def engine_of(model: nn.Module, stage: int, *, offload: bool = False, **config):
    import deepspeed

    zero = {"stage": stage, "stage3_param_persistence_threshold": config.pop("persist", 0)}
    if offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 1e-2, "weight_decay": 0.1, "torch_adam": True},
        },
        "gradient_clipping": 0.05,
    }
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=settings | config
    )
    return engine


def trained(stage: int, num_steps: int = 2, **options):
    """An engine after some steps, so that its optimizer has momentum."""
    start()
    engine = engine_of(net(), stage, **options)
    for batch in batches(dist.get_rank())[:num_steps]:
        step(engine, batch)
    return engine


def step(engine, batch: Tensor) -> None:
    dtype = next(engine.module.parameters()).dtype
    engine.backward(engine(batch.to(dtype)).float().square().mean())
    engine.step()


def prune_part(engine, amount: float = 0.5):
    return prune.global_unstructured(
        prune.select(engine), pruning_method=prune.L1Unstructured, amount=amount
    )


def whole(engine, name: str) -> Tensor:
    """A parameter of the forward, whole."""
    import deepspeed

    named = dict(engine.module.named_parameters())  # a frozen one of stage 1 is plain
    parameter = named[name if name in named else name + "_orig"]
    with deepspeed.zero.GatheredParameters([parameter]):
        return parameter.detach().clone()


def places(model: nn.Module) -> list[tuple[nn.Module, str]]:
    return [(model.get_submodule(name.rpartition(".")[0]), "weight") for name in NAMES]


def my_run(whole: Tensor, stage: int) -> Tensor:
    """What this rank has of a parameter, 1-d."""
    flat = whole.detach().reshape(-1)
    if stage < 3:
        return flat
    chunk = -(-flat.numel() // dist.get_world_size())
    return flat[dist.get_rank() * chunk :][:chunk]


def stored(parameter: Tensor, stage: int) -> Tensor:
    flat = parameter.ds_tensor if stage == 3 else parameter.detach().reshape(-1)
    return flat[: my_run(torch.empty(parameter.ds_shape), 3).numel()] if stage == 3 else flat


def batches(rank: int | None = None) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    whole = torch.randn(NUM_STEPS, dist.get_world_size(), 2, SIZES[0], generator=generator)
    return list(whole.flatten(1, 2) if rank is None else whole[:, rank])


OPTIMIZERS = {
    "AdamW": {"lr": 1e-2, "weight_decay": 0.1},
    "SGD": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1},
}


def differences(engine, stage: int, keeps: list[Tensor], when: str = "") -> list[str]:
    """What this rank's masks are not, and pruned weights that are not zero."""
    wrong = []
    for number, ((module, _), whole_keep) in enumerate(
        zip(places(engine.module), keeps, strict=True)
    ):
        keep = my_run(whole_keep, stage)
        if not torch.equal(module.weight_mask.reshape(-1) != 0, keep):
            wrong.append(f"{when}: mask of layer {number}")
        if bool(stored(module.weight, stage)[~keep].any()):
            wrong.append(f"{when}: pruned weights of layer {number} are not zero")
    return wrong


def train_as_one_process(stage: int, kind: str, options: dict) -> list[str]:
    """Prune, train, prune again; compare masks and weights with a dense model at each step."""
    start()
    dense = net()
    optimizer = getattr(torch.optim, kind)(dense.parameters(), foreach=False, **OPTIMIZERS[kind])
    parameters = OPTIMIZERS[kind] | ({"torch_adam": True} if kind == "AdamW" else {})
    options = {**options, "optimizer": {"type": kind, "params": parameters}}
    engine = engine_of(net(), stage, **options)
    mine, whole = batches(dist.get_rank()), batches()
    layers = places(engine.module)

    def step_of_one(number: int) -> None:
        optimizer.zero_grad()
        dense(whole[number]).square().mean().backward()
        nn.utils.clip_grad_norm_(dense.parameters(), 0.05)
        optimizer.step()

    return wrong_steps(
        layers, places(dense),
        lambda i, tensor: my_run(tensor, stage),
        lambda i: stored(layers[i][0].weight, stage),
        lambda number: step(engine, mine[number]), step_of_one,
    )  # fmt: skip


CASES = {
    "one": (1, {}),
    "two": (2, {}),
    "three": (3, {}),
    "three_persisting": (3, {"persist": 50}),
    "three_offloaded": (3, {"offload": True}),
    "two_offloaded": (2, {"offload": True}),
}


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_zero_trains_as_one_process(case, world_size, optimizer):
    stage, options = CASES[case]
    assert_nothing_wrong(run_deepspeed(train_as_one_process, world_size, stage, optimizer, options))


def checkpoint_and_go_on(stage: int, folder) -> list[str]:
    """Save a pruned run, go on, and let a fresh engine load it and go on as well."""
    engine = trained(stage)
    prune_part(engine)
    step(engine, batches(dist.get_rank())[2])
    engine.save_checkpoint(str(folder), tag="pruned")
    step(engine, batches(dist.get_rank())[3])

    fresh = engine_of(net(), stage)
    for parameter in fresh.module.parameters():
        with torch.no_grad():
            parameter.add_(1)
    prune_part(fresh)
    fresh.load_checkpoint(str(folder), tag="pruned")
    step(fresh, batches(dist.get_rank())[3])
    # Other masks than those that this process pruned to, and nothing else.
    problems = [str(problem) for problem in prune.verify(fresh, raise_errors=False).all_problems]
    wrong = [problem for problem in problems if "was changed since" not in problem]
    for (module, _), (other, _) in zip(places(engine.module), places(fresh.module), strict=True):
        if not torch.equal(module.weight_mask, other.weight_mask):
            wrong.append("a mask was not loaded")
        if not torch.equal(stored(module.weight, stage), stored(other.weight, stage)):
            wrong.append("a layer went on differently")
    return wrong


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_checkpoint_continues_and_consolidates(stage, tmp_path):
    assert_nothing_wrong(run_deepspeed(checkpoint_and_go_on, 2, stage, tmp_path))
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    state = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path), tag="pruned")
    assert [name for name in state if "_orig" in name] == []
    pruned = sum(int((state[name] == 0).sum()) for name in NAMES)
    assert pruned == round(0.5 * sum(state[name].numel() for name in NAMES))
    # What torch loads is the pruned model, under its own names.
    assert set(net().state_dict()) <= set(state)


def bf16_ranks_what_the_forward_uses(stage: int) -> list[str]:
    engine = trained(stage, 3, bf16={"enabled": True})
    values = [whole(engine, name) for name in NAMES]
    assert {value.dtype for value in values} == {torch.bfloat16}
    keeps = reference.prune(values, 0.5)
    prune_part(engine)
    step(engine, batches(dist.get_rank())[3])
    return differences(engine, stage, keeps)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_low_precision_is_ranked_as_the_forward_uses_it(stage):
    assert_nothing_wrong(run_deepspeed(bf16_ranks_what_the_forward_uses, 3, stage))


def criteria_equal_those_of_replicas(stage: int) -> list[str]:
    """Of single batches and of averaged gradients, before and after a pruning."""
    engine, dense, wrong = trained(stage, 0, optimizer=STILL), net(), []
    batch = batches(dist.get_rank())[0]
    for when in ("dense", "pruned"):
        scores = []
        for model in (engine, dense):
            module = unwrap(model)
            snip, fisher = SNIP(places(module)), Fisher(places(module), unit="rank_batch")
            with fisher.calibrating(), fisher.batch():
                loss = model(batch).square().mean()
                (engine if model is engine else torch.autograd).backward(loss)
            for parameter in dense.parameters() if model is dense else ():
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
            if stage == 3:
                snip.update()
            elif model is engine:
                with pytest.raises(NotImplementedError, match="rank_batch"):
                    snip.update()
            collected = [snip, fisher] if stage == 3 else [fisher]
            scores.append([each for one in collected for each in one.scores().values()])
            if model is engine:
                engine.step()  # at a rate of 0
                with pytest.raises((RuntimeError, NotImplementedError), match="gradient"):
                    snip.update()
            dense.zero_grad()
        for one, other in zip(*scores, strict=True):
            if not torch.allclose(one.reshape(-1), my_run(other, stage), rtol=1e-5, atol=1e-9):
                wrong.append(f"{when}: {one} {other}")
        prune_part(engine)
        prune_part(dense)
    return wrong


@pytest.mark.parametrize("stage", [2, 3])
def test_criteria_equal_those_of_replicas(stage):
    assert_nothing_wrong(run_deepspeed(criteria_equal_those_of_replicas, 2, stage))


def frozen_and_tied(stage: int) -> list[str]:
    """A parameter that is never trained, and one that two modules have."""
    start()
    model = net()
    model.layers[0].weight.requires_grad_(False)
    model.layers.append(nn.Linear(SIZES[2], SIZES[3]))
    model.layers[3].weight = model.layers[2].weight
    model.forward = lambda x: (
        model.layers[2](h := model.layers[1](model.layers[0](x))) + model.layers[3](h)
    )
    keeps = reference.prune([model.get_parameter(n).detach().clone() for n in NAMES], 0.5)
    engine = engine_of(model, stage)
    report = prune_part(engine)
    wrong = [] if report.num_pruned == 62 else [f"{report.num_pruned} are pruned"]
    for batch in batches(dist.get_rank())[:2]:
        step(engine, batch)
    for number, (module, _) in enumerate(places(engine.module)):
        weight = whole(engine, NAMES[number]) if stage == 3 else module.weight
        if not torch.equal(weight == 0, ~keeps[number]):
            wrong.append(f"layer {number}: other elements are zero than the reference pruned")
    wrong += prune.verify(engine, raise_errors=False).all_problems
    if stage == 3:
        with torch.no_grad():
            stored(engine.module.layers[1].weight, stage).fill_(1)
        found = prune.verify(engine, raise_errors=False).all_problems or ["verify finds nothing"]
        wrong += [each for each in found if "not zero in what the rank stores" not in each]
    return wrong


@pytest.mark.parametrize("stage", [1, 3])
def test_frozen_and_tied_parameters(stage):
    assert_nothing_wrong(run_deepspeed(frozen_and_tied, 2, stage))


def single_parameter_functions(stage: int) -> list[str]:
    engine = trained(stage)
    module = engine.module.layers[1]
    (keep,) = reference.prune([whole(engine, NAMES[1])], 0.3)
    prune.l1_unstructured(module, "weight", 0.3)
    prune.random_unstructured(module, "weight", 10)
    kept = module.weight_mask.reshape(-1) != 0
    wrong = ["l1_unstructured"] * bool((kept & ~my_run(keep, stage)).any())
    step(engine, batches(dist.get_rank())[2])
    before = whole(engine, NAMES[1])
    prune.remove(module, "weight")
    wrong += ["remove left something"] * prune.is_pruned(module)
    wrong += ["remove changed a value"] * (not torch.equal(before, whole(engine, NAMES[1])))
    number = int((before == 0).sum())
    wrong += [f"{number} are pruned"] * (number != round(0.3 * 45) + 10)
    step(engine, batches(dist.get_rank())[3])
    if not bool((whole(engine, NAMES[1]) != 0).all()):
        wrong.append("what is no longer pruned is not trained")
    return wrong


@pytest.mark.parametrize("stage", [1, 3])
def test_single_parameter_functions(stage):
    assert_nothing_wrong(run_deepspeed(single_parameter_functions, 2, stage))


def pruned_before(stage: int) -> list[str]:
    """Masks that were made before DeepSpeed took the model."""
    import deepspeed

    start()
    model = net()
    prune_part(model)
    keeps = [module.weight_mask != 0 for module, _ in places(model)]
    with prune.masks_aside(model):
        engine = engine_of(model, stage)
    for batch in batches(dist.get_rank())[:2]:
        step(engine, batch)
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}}
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = net()
    with pytest.raises(NotImplementedError, match=r"prune after deepspeed\.initialize"):
        prune_part(model)
    return ["it is pruned"] * prune.is_pruned(model) + differences(engine, stage, keeps)


@pytest.mark.parametrize("stage", [1, 3])
def test_pruned_before_initialize(stage):
    assert_nothing_wrong(run_deepspeed(pruned_before, 2, stage))


@contextlib.contextmanager
def launched_by_accelerate():
    """What ``accelerate launch --use_deepspeed`` sets; reset afterwards."""
    from accelerate import DistributedType
    from accelerate.state import AcceleratorState, PartialState

    start()
    prepare = PartialState._prepare_backend
    variables = {
        "ACCELERATE_USE_DEEPSPEED": "true", "LOCAL_WORLD_SIZE": str(dist.get_world_size()),
        "MASTER_ADDR": "localhost", "MASTER_PORT": "29999",
    }  # fmt: skip
    os.environ |= variables
    # Without a GPU accelerate takes DeepSpeed for one process; nothing else is simulated here.
    PartialState._prepare_backend = lambda *_: ("gloo", DistributedType.MULTI_CPU)
    try:
        yield
    finally:
        PartialState._prepare_backend = prepare
        AcceleratorState._reset_state(True)
        for name in variables:
            os.environ.pop(name, None)


def config_of(stage: int) -> dict:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {
            "stage": stage, "stage3_gather_16bit_weights_on_model_save": True
        },
        "zero_allow_untested_optimizer": True,
    }  # fmt: skip


def with_accelerate(stage: int, folder) -> list[str]:
    """What a user of accelerate does: prepare, prune, train, save, load into a dense model."""
    import accelerate

    from distprune.integrations.accelerate import check_wrapping, load_state, register_pruning

    with launched_by_accelerate():
        plugin = accelerate.DeepSpeedPlugin(hf_ds_config=config_of(stage))
        accelerator = accelerate.Accelerator(deepspeed_plugin=plugin)
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        engine, optimizer = accelerator.prepare(model, optimizer)
        wrong = [] if check_wrapping(accelerator, engine) == f"zero{stage}" else ["kind"]
        register_pruning(accelerator, engine)
        for number, batch in enumerate(batches(dist.get_rank())[:3]):
            if number == 1:
                prune_part(engine)
            accelerator.backward(engine(batch).square().mean())
            optimizer.step()
        accelerator.save_state(folder)
        kept = [stored(m.weight, stage).clone() for m, _ in places(engine.module)]
        accelerator.free_memory()
        model = net()
        engine, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        load_state(accelerator, folder, engine)
        for (module, _), values in zip(places(engine.module), kept, strict=True):
            if not torch.equal(stored(module.weight, stage), values):
                wrong.append("weights were not loaded")
        return wrong


@pytest.mark.parametrize("stage", [2, 3])
def test_with_accelerate(stage, tmp_path):
    assert_nothing_wrong(run_deepspeed(with_accelerate, 2, stage, tmp_path))


def with_trainer(stage: int, folder) -> list[str]:
    """A run that was stopped and resumed ends as an undisturbed one; what it saves is ordinary."""
    from test_transformers import SCHEDULE, StopAt, make_trainer
    from transformers import LlamaForCausalLM

    from distprune.criteria import SNIP
    from distprune.integrations.transformers import PruningCallback

    def train(name: str, *callbacks, resume=False):
        options = {"use_cpu": False, "deepspeed": config_of(stage)}
        trainer = make_trainer(folder / name, list(callbacks), **options)
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    with launched_by_accelerate():
        with pytest.raises(NotImplementedError, match="between backward and step"):
            train("criterion", PruningCallback(SCHEDULE, criterion=SNIP))
        train("whole", PruningCallback(SCHEDULE)).save_model(str(folder / "saved"))
        train("parts", PruningCallback(SCHEDULE), StopAt(5))
        train("parts", PruningCallback(SCHEDULE), resume=True).save_model(str(folder / "resumed"))
    dist.barrier()
    one, other = (
        LlamaForCausalLM.from_pretrained(folder / name).state_dict()
        for name in ("saved", "resumed")
    )
    wrong = [name for name in one if not torch.equal(one[name], other[name])]
    pruned = [value for name, value in one.items() if name.endswith("proj.weight")]
    number = sum(int((value == 0).sum()) for value in pruned)
    if number < 0.79 * sum(value.numel() for value in pruned):
        wrong.append(f"{number} elements are zero")
    return wrong


@pytest.mark.parametrize("stage", [2, 3])
def test_with_the_trainer(stage, tmp_path):
    assert_nothing_wrong(run_deepspeed(with_trainer, 2, stage, tmp_path))
