"""Criteria of rank batches: the scores of one process, whatever a loop and a model do meanwhile.

A row is a way to train (LOOPS) or a model (MODELS); all rows of a wrapping run in one start of its
ranks. Which batches count, and mistakes, which every rank raises, come after them.
"""

import contextlib
import re
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

import distprune as prune
from distprune.criteria import Fisher, Taylor
from distprune.statistics import GradientStatistics
from distprune.testing import run_ranks
from distprune.wrappers import fsdp2
from helpers import reference, wrappings
from helpers.collective_traffic import Traffic
from helpers.comparisons import assert_nothing_wrong, assert_nothing_wrong_on, raised
from helpers.micro_batches import (
    WEIGHTS,
    Units,
    Wrapped,
    loss_of,
    make_model,
    micro_batch,
    num_tokens,
    wrong_totals,
)
from helpers.models import Net, target
from helpers.sampling import every
from helpers.wrappings import local

NUM_BATCHES = 3
FSDP2 = ["fsdp2-1", "fsdp2-3", "hsdp-2x2", "fsdp2_root-2", "replicate-2"]
HALF = torch.bfloat16


# What a training loop does with the loss of a micro-batch.


def backward(model: nn.Module, loss: Tensor, number: int) -> None:
    loss.backward()


def clip_and_zero(model: nn.Module, loss: Tensor, number: int) -> None:
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    model.zero_grad(set_to_none=number == 0)


def change_weights(model: nn.Module, loss: Tensor, number: int) -> None:
    """A step that leaves the weights as they are, so that one process is easy to compare with."""
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.0).step()
    model.zero_grad()


def accumulate(model: nn.Module, loss: Tensor, number: int) -> None:
    """Only the last backward synchronises."""
    with wrappings.synchronised(model, number == NUM_BATCHES - 1):
        loss.backward()


def divide_by_other_factors(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(8.0)
            module.set_force_sum_reduction_for_comms(True)


def forward_and_backward(model: nn.Module) -> None:
    """Let the wrapper make what it makes in a first step."""
    model(torch.ones(2, 6, dtype=next(model.parameters()).dtype)).sum().backward()
    model.zero_grad()


@dataclass(frozen=True)
class Loop:
    """A way to train.

    Attributes:
        on: the wrappings.
        step: what is done with the loss of a micro-batch.
        prepare: what is done to the wrapped model first.
        run_in: the dtype in which the wrapper runs forward and backward.
        rounded_to: the dtype of gradients, where it is another one.
        options: for the wrapper.
    """

    on: list[str]
    step: Callable[[nn.Module, Tensor, int], None] = backward
    prepare: Callable[[nn.Module], None] = lambda model: None
    data: str = "float32"
    run_in: torch.dtype | None = None
    rounded_to: torch.dtype | None = None
    loss_scale: float = 1.0
    power: int = 2
    options: dict = field(default_factory=dict)

    def differences(self, wrapping: str) -> list[str]:
        """Scores after NUM_BATCHES micro-batches, beside those of one process."""
        wrapped = Wrapped(wrapping, self.data, **self.options)
        self.prepare(wrapped.model)
        criterion = Taylor(wrapped.pairs, unit="rank_batch", power=self.power)
        with criterion.calibrating():
            for number in range(NUM_BATCHES):
                weight = num_tokens(wrapped.rank, number)
                with criterion.batch(weight=weight, loss_scale=self.loss_scale):
                    self.step(wrapped.model, wrapped.loss(number) * self.loss_scale, number)
        units = [
            (weight, {name: g.to(self.rounded_to) for name, g in gradients.items()})
            for weight, gradients in wrapped.units(NUM_BATCHES, self.run_in)
        ]
        return wrapped.wrong(criterion, units, self.power, 1.0)


def mixed_precision(reduce: torch.dtype | None) -> dict:
    return {"mp_policy": MixedPrecisionPolicy(param_dtype=HALF, reduce_dtype=reduce)}


LOOPS = {
    "no synchronisation": Loop(["ddp-2", "fsdp1-2", "fsdp1_flat-2", *FSDP2], accumulate),
    "clipping": Loop(["ddp-2", "fsdp1_root-3", "fsdp2-3", "hsdp-2x2"], clip_and_zero),
    "optimizer steps": Loop(["ddp-2", "fsdp1_root-3", "fsdp2-3", "hsdp-2x2"], change_weights),
    "a divisor of the user's": Loop(FSDP2, prepare=divide_by_other_factors),
    # FSDP divides gradients in fp16 by about the square root of the ranks before the sum.
    "fp16": Loop(["fsdp2-2", "hsdp-2x2", "fsdp1-2"], data="float16"),
    "after a first step": Loop(
        ["fsdp1-3", "fsdp1_hybrid-2x2", "fsdp2-2"], prepare=forward_and_backward
    ),
    **{
        f"gathered in bf16, reduced in {reduce}": Loop(
            ["fsdp2-1", "fsdp2-3", "hsdp-2x2"], run_in=HALF, options=mixed_precision(reduce)
        )
        for reduce in (torch.float32, HALF, None)
    },
    # They are not rounded here; but torch 2.15 lets autograd round them before any hook.
    "reduced in bf16": Loop(
        ["fsdp2-1", "fsdp2-3"],
        rounded_to=HALF if hasattr(FSDPParam, "unsharded_grad_dtype") else None,
        options={"mp_policy": MixedPrecisionPolicy(reduce_dtype=HALF)},
    ),
    "bf16 of FSDP1": Loop(
        ["fsdp1-3", "fsdp1_flat-2"],
        run_in=HALF,
        options={"mixed_precision": MixedPrecision(param_dtype=HALF, reduce_dtype=HALF)},
    ),
    **{
        f"a loss scale, power {power}": Loop(
            ["ddp-2", "fsdp1-2", "fsdp2-2"], loss_scale=1024.0, power=power
        )
        for power in (1, 2)
    },
}


def two_calibrations(wrapping: str) -> list[str]:
    """Twice the same three batches: the scores of the first time; and replicas with equal bits."""
    wrong = []
    for data in ("integer float32", "float32"):
        wrapped = Wrapped(wrapping, data)
        criterion = Fisher(wrapped.pairs, unit="rank_batch")
        for _ in range(2):
            wrapped.calibrate(criterion)
        wrong += wrapped.wrong(criterion, wrapped.units())
        if criterion.num_updates != 2 * 3 * dist.get_world_size():
            wrong.append(f"{criterion.num_updates} updates")
    of_all: list = [None] * dist.get_world_size()
    scores = [local(score).tolist() for score in criterion.scores().values()]
    dist.all_gather_object(of_all, (list(map(Tensor.tolist, wrapped.indices.values())), scores))
    for indices, others in of_all:
        if indices == of_all[dist.get_rank()][0] and others != scores:
            wrong.append("replicas have other bits")
    return wrong


def two_criteria(wrapping: str) -> list[str]:
    """Two calibrations at once, of which the first ends first."""
    wrapped, wrong = Wrapped(wrapping, "integer float32"), []
    first = Fisher(wrapped.pairs, unit="rank_batch")
    second = Taylor(wrapped.pairs, unit="rank_batch", power=1)
    with contextlib.ExitStack() as stack:
        stack.enter_context(second.calibrating())
        with first.calibrating():
            for number in range(2):
                with first.batch(1.0), second.batch(1.0):
                    wrapped.loss(number).backward()
        with second.batch():
            wrapped.loss(2).backward()
    for criterion, count, power, factor in ((first, 2, 2, 0.5), (second, 3, 1, 1.0)):
        units = [(1.0, gradients) for _, gradients in wrapped.units(count)]
        wrong += wrapped.wrong(criterion, units, power, factor)
    return wrong


def pruned_model(wrapping: str) -> list[str]:
    """Zero at pruned places, elsewhere the gradients of the masked weights."""
    wrapped = Wrapped(wrapping, "float64")
    prune.global_unstructured(wrapped.pairs, prune.L1Unstructured, amount=0.4)
    parameters = list(wrapped.dense.parameters())
    for parameter, keep in zip(parameters, reference.prune(parameters, 0.4), strict=True):
        parameter.data *= keep
    criterion = Fisher(wrapped.pairs, unit="rank_batch")
    wrapped.calibrate(criterion)
    return wrapped.wrong(criterion, wrapped.units())


OTHERS = {
    two_calibrations: [
        "plain-1", "plain-3", "ddp-3", "fsdp1_hybrid-2x2", "fsdp2-2", "fsdp2_dim1-2", "hsdp-2x2",
    ],
    two_criteria: ["ddp-2", "fsdp1-2", "fsdp2-2", "hsdp-2x2"],
    pruned_model: ["ddp-2", "fsdp1-2", "fsdp2-3", "hsdp-2x2", "tp-2"],
}  # fmt: skip


@wrappings.sharing_meshes
def differences(wrapping: str) -> list[str]:
    rows = {name: loop.differences for name, loop in LOOPS.items() if wrapping in loop.on}
    rows |= {check.__name__: check for check, on in OTHERS.items() if wrapping in on}
    return [f"{name}: {text}" for name, check in rows.items() for text in check(wrapping)]


@pytest.mark.whole
@pytest.mark.parametrize(
    "wrapping",
    sorted({w for on in [*(loop.on for loop in LOOPS.values()), *OTHERS.values()] for w in on}),
)
def test_scores_are_those_of_one_process(wrapping):
    assert_nothing_wrong_on(wrapping, differences)


# Models.


class Tied(nn.Module):
    """Two layers with one weight, and one of their own."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.second(torch.relu(self.first(x)))))


class Twice(nn.Module):
    """One layer that is called two times."""

    def __init__(self):
        super().__init__()
        self.layer, self.last = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.layer(torch.relu(self.layer(x)))))


class Checkpointed(Net):
    """Two layers run again in backward."""

    use_reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.l1, x.requires_grad_(), use_reentrant=self.use_reentrant)
        x = checkpoint(self.l2, torch.relu(x), use_reentrant=self.use_reentrant)
        return self.l3(torch.relu(x))


class Reentrant(Checkpointed):
    use_reentrant = True


class CheckpointedTwice(Twice):
    """Reentrant checkpoints give the layer two gradients in one backward."""

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.layer, x.requires_grad_(), use_reentrant=True)
        return self.last(checkpoint(self.layer, torch.relu(x), use_reentrant=True))


class Experts(nn.Module):
    """The last expert gets no token, and the second one none on rank 0."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(6, 3) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        return self.experts[0](x) + (self.experts[1](x) if x[0, 0] > -2 else 0)


class Unused(Experts):
    """Two layers that no loss depends on."""

    def forward(self, x: Tensor) -> Tensor:
        return self.experts[0](x)


class OwnOrder(Experts):
    """Rank 1 runs two layers in another order than rank 0; FSDP2 does not care."""

    def forward(self, x: Tensor) -> Tensor:
        layers = list(self.experts) if dist.get_rank() == 0 else list(self.experts)[::-1]
        return layers[0](x) + layers[1](x) + layers[2](x)


class Normed(nn.Module):
    """A norm between two layers, as sequence parallelism shards it."""

    def __init__(self):
        super().__init__()
        self.l1, self.norm, self.l2 = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Rows are two sequences of two tokens."""
        return self.l2(self.norm(self.l1(x.view(2, 2, 6)))).flatten(0, 1)


def two_meshes(model: Net) -> nn.Module:
    """One module whose parameters are sharded over different meshes: two reductions of its own."""
    mesh = init_device_mesh("cpu", (4,))
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    hybrid = _fsdp_common.HSDPMeshInfo(grid, shard_mesh_dim=1, replicate_mesh_dim=0)
    of_grid = {id(parameter) for parameter in model.l2.parameters()}

    def place(parameter: nn.Parameter):
        other = _fsdp_common.ShardPlacementResult(Shard(0), hybrid)
        return other if id(parameter) in of_grid else None

    return fully_shard(model, mesh=mesh, shard_placement_fn=place)


def sequence_parallel(model: nn.Module) -> nn.Module:
    """Gradients of the norm are pending sums over the TP ranks; squares come after the sum."""
    shape = (dist.get_world_size() // 2, 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    plan = {
        "l1": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "l2": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    model = parallelize_module(model, mesh["tp"], plan)
    return fully_shard(model, mesh=mesh["dp"]) if shape[0] > 1 else model


def model_differences(kind: type, wrapping: str, wrap: Callable | None = None) -> list[str]:
    """Scores after one micro-batch on each data-parallel rank; or the error of the call."""
    options = {"find_unused_parameters": True} if wrapping == "ddp-2" and kind in UNUSED else {}
    w = Wrapped(wrapping, "float64", kind_of_model=kind, wrap_model=wrap, **options)
    criterion = Fisher(w.pairs, unit="rank_batch")
    try:
        w.calibrate(criterion, 1)
    except RuntimeError as error:
        return [str(error)]
    return [f"{kind.__name__}: {text}" for text in w.wrong(criterion, w.units(1))]


UNUSED = (Experts, Unused, OwnOrder)
WRAPPERS = ["plain-2", "ddp-2", "fsdp1_root-2", "fsdp2_root-2"]
# FSDP1 itself fails if a checkpointed layer shares a flat parameter with others, and FSDP2 hangs
# where a parameter has a gradient on some ranks only.
MODELS = {
    Tied: WRAPPERS, Twice: WRAPPERS, Checkpointed: WRAPPERS, Unused: WRAPPERS,
    Reentrant: ["plain-2", "ddp-2", "fsdp2_root-2"], Experts: ["plain-2", "ddp-2", "fsdp1_root-2"],
    OwnOrder: ["plain-2", "fsdp1_root-2"],
}  # fmt: skip


def differences_of_models(wrapping: str) -> list[str]:
    kinds = [kind for kind, on in MODELS.items() if wrapping in on]
    return [text for kind in kinds for text in model_differences(kind, wrapping)]


@pytest.mark.whole
@pytest.mark.parametrize("wrapping", WRAPPERS)
def test_models(wrapping):
    assert_nothing_wrong_on(wrapping, differences_of_models)


@pytest.mark.parametrize("wrapping", ["fsdp2_tp-1x2", "fsdp2_tp-2x2"])
def test_sequence_parallelism(wrapping):
    size = wrappings.world_size(wrapping)
    assert_nothing_wrong(run_ranks(model_differences, size, Normed, wrapping, sequence_parallel))


@pytest.mark.skipif(
    not hasattr(_fsdp_common, "ShardPlacementResult"), reason="this torch has one mesh per module"
)
def test_several_parameter_groups_in_one_module():
    assert_nothing_wrong(run_ranks(model_differences, 4, Net, "fsdp2-4", two_meshes))


@pytest.mark.parametrize(
    ("kind", "wrapping", "text"),
    [
        # Their squares are not the square of their sum.
        (CheckpointedTwice, "plain-2", "2 gradients in one batch(.|\n)*use_reentrant=False"),
        (CheckpointedTwice, "fsdp2_root-2", "2 gradients in one batch(.|\n)*use_reentrant=False"),
        # The ranks would add up gradients of different parameters.
        (OwnOrder, "fsdp2_root-2", "different orders"),
    ],
)
def test_models_that_are_refused(kind, wrapping, text):
    for found in run_ranks(model_differences, 2, kind, wrapping):
        assert len(found) == 1 and re.search(text, found[0]), found


# Whose batches count.


def made(kind: str, wrapped: Wrapped, **options) -> Fisher | GradientStatistics:
    if kind == "sums":
        return GradientStatistics(iter(wrapped.matrices), **options)
    return Fisher(wrapped.pairs, unit="rank_batch", **options)


def wrong_of(wrapped: Wrapped, found: Fisher | GradientStatistics, units: Units) -> list[str]:
    if isinstance(found, GradientStatistics):
        return wrong_totals(found, units)
    return wrapped.wrong(found, units)


def uneven_participation(wrapping: str, kind: str) -> list[str]:
    """Rank r has r micro-batches. Where a backward needs all ranks, the others weigh nothing."""
    wrapped = Wrapped(wrapping, "integer float32")
    calibrated = made(kind, wrapped)
    rank, size = dist.get_rank(), dist.get_world_size()
    is_quiet = kind == "sums" and wrapping.startswith("ddp")
    is_alone = is_quiet or wrappings.kind_of(wrapping) == "plain"
    quiet = wrapped.model.no_sync() if is_quiet else contextlib.nullcontext()
    with calibrated.calibrating(), quiet:
        for number in range(rank if is_alone else size - 1):
            has_data = number < rank
            with calibrated.batch(weight=num_tokens(rank, number) if has_data else 0):
                # Whatever a rank without data runs.
                (wrapped.loss(number) * (1 if has_data else torch.inf)).backward()
    units = wrapped.units(size - 1)
    units = [units[r * (size - 1) + a] for r in range(size) for a in range(r)]
    return wrong_of(wrapped, calibrated, units)


@pytest.mark.parametrize("kind", ["scores", "sums"])
@pytest.mark.parametrize("wrapping", ["plain-3", "ddp-3", "fsdp1-3", "fsdp2-3"])
def test_ranks_with_fewer_batches(wrapping, kind):
    assert_nothing_wrong_on(wrapping, uneven_participation, kind)


def data_parallel_over_tensor_parallel(kind: str) -> list[str]:
    """The ranks of group= have other batches."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plan = {"l1": ColwiseParallel(), "l2": RowwiseParallel()}
    shard = lambda model: parallelize_module(model, mesh["tp"], plan)  # noqa: E731
    wrapped = Wrapped("fsdp2_tp-2x2", "integer float32", wrap_model=shard)
    with (
        pytest.raises(ValueError, match=r"2 of 4 ranks(.|\n)*expected group="),
        made(kind, wrapped).calibrating(),
    ):
        pass
    world = made(kind, wrapped, group=dist.group.WORLD)
    with pytest.raises(ValueError, match="data-parallel ranks"):
        wrapped.calibrate(world)
    wrapped.model.zero_grad()
    calibrated = made(kind, wrapped, group=mesh["dp"].get_group())
    wrapped.calibrate(calibrated)
    return wrong_of(wrapped, calibrated, wrapped.units())


@pytest.mark.parametrize("kind", ["scores", "sums"])
def test_data_parallel_replicas_of_a_tensor_parallel_model(kind):
    assert_nothing_wrong(run_ranks(data_parallel_over_tensor_parallel, 4, kind))


# Mistakes.


def hooks_left(model: nn.Module) -> list[str]:
    """Whatever a criterion could have left on the leaves of a model."""
    leaves = dict(wrappings.unwrapped(model).named_parameters())
    for module in FullyShardedDataParallel.fsdp_modules(model):
        if module._handle is not None:
            leaves[f"flat {len(leaves)}"] = module._handle.flat_param
    for group in fsdp2._groups():
        for fsdp_param in group.fsdp_params:
            leaves[f"gathered {len(leaves)}"] = getattr(fsdp_param, "_unsharded_param", None)
            if "init_unsharded_param" in fsdp_param.__dict__:
                leaves["replaced method"] = None
    left = [name for name, leaf in leaves.items() if leaf is not None and leaf._backward_hooks]
    return left + ["a method"] * ("replaced method" in leaves)


def play(criterion: Fisher, run_backward: Callable[[], None], script: list) -> None:
    """Run steps: a backward, a method of the criterion, or (options of a batch, steps inside)."""
    for step in script:
        if step == "backward":
            run_backward()
        elif step == "error":
            raise KeyError("of the user's")
        elif step == "calibrating":
            criterion.calibrating().__enter__()
        elif isinstance(step, str):
            getattr(criterion, step)()
        else:
            options, inside = step
            with contextlib.suppress(KeyError), criterion.batch(**options):
                play(criterion, run_backward, inside)


BATCH = ({}, ["backward"])
MISTAKES = [
    ([({}, [])], "no gradient of any parameter"),
    ([({}, ["backward", "backward"])], "2 gradients in one batch"),
    ([BATCH, "backward"], r"outside of batch\(\)"),
    ([({}, ["backward", "error"])], "ended with an error"),
    ([({}, ["backward", ({}, [])])], r"batch\(\) inside of batch\(\)"),
    (["calibrating"], r"calibrating\(\) inside of calibrating\(\)"),
    ([BATCH, "scores"], r"after calibrating\(\)"),
    (["state_dict"], r"after calibrating\(\)"),
    (["reset"], r"after calibrating\(\)"),
    ([({"weight": -1}, ["backward"])], "weight=-1"),
    ([({"loss_scale": 0}, ["backward"])], "loss_scale=0"),
    (["update"], "unit='rank_batch'"),
]


def after_mistakes(wrapping: str) -> list[str]:
    """Each mistake, scores() afterwards, hooks that are left, and a second try after reset()."""
    wrapped, wrong = Wrapped(wrapping, "float32"), []
    criterion = Fisher(wrapped.pairs, unit="rank_batch")

    def run_backward() -> None:
        wrapped.loss(0).backward()

    for script, text in MISTAKES:
        try:
            with criterion.calibrating():
                play(criterion, run_backward, script)
            wrong.append(f"{script}: nothing was raised")
        except (RuntimeError, ValueError) as error:
            wrong += [] if re.search(text, str(error)) else [f"{script}: {error}"]
        with pytest.raises(RuntimeError, match=r"reset\(\)"):
            criterion.scores()
        wrong += [f"{script}: {left}" for left in hooks_left(wrapped.model)]
        criterion.reset()
        with criterion.calibrating():
            play(criterion, run_backward, [BATCH])
        criterion.scores()
        wrapped.model.zero_grad()
        criterion.reset()
    with pytest.raises(KeyError), criterion.calibrating():
        raise KeyError("of the user's")
    return wrong + hooks_left(wrapped.model)


@pytest.mark.parametrize("wrapping", ["plain-2", "ddp-2", "fsdp1-2", "fsdp2-2", "tp-2"])
def test_mistakes(wrapping):
    assert_nothing_wrong_on(wrapping, after_mistakes)


ON_ONE_RANK = {
    "no backward": (["plain-3"], "no gradient of any parameter"),
    "backward outside": (["plain-3", "fsdp1-3", "fsdp2-3"], r"Linear\.(.|\n)*outside of batch\(\)"),
    "infinite gradient": (
        ["plain-3", "ddp-3", "fsdp1-3", "fsdp2-3", "hsdp-2x2"], r"Linear\.(.|\n)*not finite"
    ),
}  # fmt: skip


def after_mistakes_of_one_rank(wrapping: str) -> list[str]:
    """Rank 1 alone does something wrong; every rank goes on to the end of the calibration."""
    is_wrong, wrong = dist.get_rank() == 1, []
    for kind, (on, text) in ON_ONE_RANK.items():
        if wrapping not in on:
            continue
        wrapped = Wrapped(wrapping, "float32")
        criterion = Fisher(wrapped.pairs, unit="rank_batch")
        x, y = micro_batch(wrapped.dense, "float32", dist.get_rank(), 0)
        if kind == "infinite gradient" and is_wrong:
            y = y * torch.inf
        script = [BATCH]
        if is_wrong and kind != "infinite gradient":
            script = [({}, [])] if kind == "no backward" else ["backward"]

        def run_backward(model=wrapped.model, batch=(x, y)) -> None:
            loss_of(model, batch).backward()

        with pytest.raises((RuntimeError, ValueError)) as error, criterion.calibrating():
            play(criterion, run_backward, script)
        wrong += [] if re.search(text, str(error.value)) else [f"{kind}: {error.value}"]
        wrong += [f"{kind}: {left}" for left in hooks_left(wrapped.model)]
    return wrong


@pytest.mark.whole
@pytest.mark.parametrize("wrapping", ["plain-3", "ddp-3", "fsdp1-3", "fsdp2-3", "hsdp-2x2"])
def test_a_mistake_of_one_rank_is_raised_on_all(wrapping):
    assert_nothing_wrong_on(wrapping, after_mistakes_of_one_rank)


def test_arguments():
    layer = nn.Linear(2, 2)
    pairs = [(layer, "weight")]
    with pytest.raises(TypeError, match="unit"):
        Fisher(pairs)
    with pytest.raises(ValueError, match="unit='sample'"):
        Fisher(pairs, unit="sample")
    with pytest.raises(ValueError, match="power=3"):
        Taylor(pairs, unit="rank_batch", power=3)
    criterion = Fisher(pairs, unit="rank_batch")
    with pytest.raises(RuntimeError, match=r"outside of calibrating\(\)"), criterion.batch():
        pass
    layer.weight.requires_grad_(False)
    with pytest.raises(ValueError, match=r"Linear\.weight.*frozen"), criterion.calibrating():
        pass
    assert not layer.weight._backward_hooks


# Gradient statistics on every wrapper and of every kind of parameter: those of one process.


ALL = wrappings.sampled([*wrappings.TRAINED, *wrappings.FSDP2_DIM1])


def differing_sums(wrapping: str, case: tuple[str, int], path: str) -> list[str]:
    """Twice the same batches, in two calibrations, of which each has other tokens on each rank.

    What the first one saves goes on here, and is what one process with all parameters loads.
    """
    (data, num_batches), wrong = case, []
    wrapped = Wrapped(wrapping, data)
    statistics = GradientStatistics(wrapped.matrices)
    wrapped.calibrate(statistics, num_batches)
    statistics.save(path)
    single, scores = make_model(wrapping, data), statistics.fisher().values()
    alone = [prune.NamedParameter(*target(single, name), name) for name in WEIGHTS]
    on_one = GradientStatistics.load(path, alone, group=dist.new_subgroups(1)[0])
    for mine, its in zip(scores, on_one.fisher().values(), strict=True):
        wrong += [] if mine.checksum() == its.checksum() else [f"{its} is loaded, not {mine}"]
    statistics = GradientStatistics.load(path, wrapped.matrices)
    wrapped.calibrate(statistics, num_batches)
    is_exact = data.startswith("integer")
    wrong += wrong_totals(statistics, 2 * wrapped.units(num_batches), is_exact)
    for held in statistics.totals().values():
        own = torch.cat([held.by_output, held.by_input])
        of_all = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(of_all, own)
        if not all(torch.equal(own, other) for other in of_all):
            wrong.append("ranks have different bits")
    return wrong


CASES = [(d, n) for d in ("integer float32", "integer bfloat16", "float32") for n in (3, 1)]


@pytest.mark.parametrize(
    ("wrapping", "case"),
    [(w, case) for i, w in enumerate(ALL) for case in every(4, CASES, start=i)],
)
def test_the_sums_are_those_of_one_process(wrapping, case, tmp_path):
    assert_nothing_wrong_on(wrapping, differing_sums, case, str(tmp_path / "a.safetensors"))


def traffic(wrapping: str) -> tuple[dict[str, int], int]:
    """Bytes that are sent besides the training's own, and the number of outputs and inputs."""
    wrapped = Wrapped(wrapping, "integer float32")
    statistics = GradientStatistics(wrapped.matrices)

    def run(batch=contextlib.nullcontext) -> None:
        for number in range(2):
            with batch():
                wrapped.loss(number).backward()

    run()  # what is sent at the first step only
    with Traffic() as without:
        run()
    with Traffic() as both, statistics.calibrating(), Traffic() as inside:
        run(statistics.batch)
    with Traffic() as asked:
        statistics.fisher()
    sent = {
        "inside": inside.num_bytes - without.num_bytes,
        "outside": both.num_bytes - inside.num_bytes,
        "asked": asked.num_bytes,
    }
    shapes = [wrapped.dense.get_parameter(name).shape for name in WEIGHTS]
    return sent, sum(sum(shape) for shape in shapes)


@pytest.mark.parametrize("wrapping", ["ddp-2", "fsdp1-2", "fsdp2-2", "tp-2"])
def test_what_is_sent(wrapping):
    for sent, num_sums in run_ranks(traffic, 2, wrapping):
        assert sent["inside"] == 0
        # Agreements when it begins and when it ends, and the sums.
        assert 0 <= sent["outside"] - 3 * 40 - 8 * (num_sums + 3 * 3 + 1) <= 3 * 8 * 10
        assert sent["asked"] == 40 + 8 * 2 * 3  # an agreement, and two words per parameter


def errors_of(wrapping: str) -> list[str]:
    """What goes wrong on one rank alone is raised on all of them, and changes nothing."""
    wrapped = Wrapped(wrapping, "integer float32")
    pairs = wrapped.matrices
    statistics = GradientStatistics(pairs)
    wrapped.calibrate(statistics)
    is_first = dist.get_rank() == 0
    found = []

    def note(attempt) -> None:
        found.append(raised(attempt))

    def run(weight=1.0, scale=1.0) -> None:
        with statistics.calibrating(), statistics.batch(weight):
            (wrapped.loss(0) * scale).backward()

    note(lambda: run(scale=torch.inf if is_first else 1.0))
    if wrapping == "tp-2":
        note(lambda: run(weight=1.0 + is_first))
    note(lambda: statistics.fisher([(wrapped.model, "weight")] if is_first else None))
    note(lambda: GradientStatistics(pairs[: 2 + is_first]))
    note(GradientStatistics(pairs).fisher)
    return found + wrong_totals(statistics, wrapped.units())  # those of the first calibration


@pytest.mark.parametrize("wrapping", ["plain-2", "fsdp1-2", "fsdp2-2", "tp-2"])
def test_an_error_of_one_rank_is_raised_on_all_and_changes_nothing(wrapping):
    messages = [
        r"ValueError: .*l\d.weight: the sum of its squared gradients is not finite",
        *[r"ValueError: .*different weights"] * (wrapping == "tp-2"),
        r"ValueError: .*is none of the parameters of these statistics",
        r"ValueError: .*number of parameters",
        r"ValueError: .*l1.weight: the weights of all its batches are 0, or there was none",
    ]
    for found in run_ranks(errors_of, 2, wrapping):
        assert len(found) == len(messages), found
        for text, message in zip(found, messages, strict=True):
            assert re.match(message, text), text


def refusal_under(wrapping: str) -> str:
    wrapped = Wrapped(wrapping, "integer float32")
    pairs = wrapped.matrices
    statistics = GradientStatistics(pairs)
    prune.global_unstructured(pairs, prune.L1Unstructured, amount=0.5)
    return raised(lambda: wrapped.calibrate(statistics))


@pytest.mark.parametrize("wrapping", ["fsdp1-2", "fsdp2-2"])
def test_pruned_parameters_under_fsdp_are_refused(wrapping):
    for text in run_ranks(refusal_under, 2, wrapping):
        assert text.startswith("NotImplementedError: l1.weight is pruned and sharded"), text


class Kinds(nn.Module):
    """Tied embedding and head, convolutions, fused experts both ways, and a transposed weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.conv = nn.Conv2d(4, 6, (2, 1), bias=False)
        self.grouped = nn.Conv1d(4, 6, 2, groups=2, bias=False)
        self.experts = FusedExperts((3, 4, 2), is_transposed=False)
        self.transposed = FusedExperts((3, 4, 2), is_transposed=True)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)  # [batch, tokens, 4]
        columns = x.transpose(1, 2)
        images = self.conv(columns.unsqueeze(-1)).sum()
        waves = self.grouped(columns).sum()
        rows = x.flatten(0, 1)
        some = self.experts(rows[:, :2], 0) + self.experts(rows[:, :2], 2).flip(0)
        others = self.transposed(rows, 1).sum()
        return self.head(x)[..., 0].sum() + images + waves + (some * rows).sum() + others


class FusedExperts(nn.Module):
    def __init__(self, shape: tuple[int, ...], is_transposed: bool) -> None:
        super().__init__()
        self.is_transposed = is_transposed
        self.weight = nn.Parameter(torch.empty(shape))

    def forward(self, rows: Tensor, expert: int) -> Tensor:
        weight = self.weight[expert]
        return rows @ (weight if self.is_transposed else weight.T)


def integer_kinds() -> Kinds:
    model, generator = Kinds(), torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randint(-1, 2, parameter.shape, generator=generator))
    return model


def as_matrices(squares: Tensor, name: str) -> Tensor:
    """[matrices, outputs, inputs], written out for each kind of parameter."""
    if name == "conv.weight":
        return squares.reshape(1, 6, 8)
    if name == "grouped.weight":
        return squares.reshape(2, 3, 4)
    if name == "experts.weight":
        return squares
    if name == "transposed.weight":
        return squares.transpose(1, 2)
    return squares.unsqueeze(0)


def wrong_kinds(wrapping: str) -> list[str]:
    single, model = integer_kinds(), wrappings.wrap(integer_kinds(), wrapping)
    rank, size = dist.get_rank(), dist.get_world_size()
    batches = [torch.arange(3 * r, 3 * r + 6).view(2, 3) % 5 for r in range(size)]
    named = dict(single.named_parameters())
    inner = wrappings.unwrapped(model)
    pairs = [prune.NamedParameter(*target(inner, name), name) for name in named]
    statistics = GradientStatistics(pairs)
    with statistics.calibrating(), statistics.batch(weight=rank + 1):
        model(batches[rank]).backward()
    squares = {name: torch.zeros_like(p).double() for name, p in named.items()}
    for r, batch in enumerate(batches):
        found = torch.autograd.grad(single(batch), list(named.values()))
        for name, gradient in zip(named, found, strict=True):
            squares[name] += (r + 1) * gradient.double() ** 2
    wrong = []
    total = sum(r + 1 for r in range(size))
    scores = statistics.fisher()
    for pair, held in statistics.totals().items():
        matrices = as_matrices(squares[pair.fqn], pair.fqn)
        if not torch.equal(held.by_output, matrices.sum(2).flatten()):
            wrong.append(f"{pair.fqn}: {held.by_output}, not {matrices.sum(2)}")
        if not torch.equal(held.by_input.flatten(), matrices.sum(1).flatten()):
            wrong.append(f"{pair.fqn}: {held.by_input}, not {matrices.sum(1)}")
        mean = matrices / total
        rows, columns = mean.sum(2, keepdim=True), mean.sum(1, keepdim=True)
        fitted = rows.sqrt() * columns / rows.sqrt().sum(1, keepdim=True).clamp(min=1e-300)
        factor = torch.ones(named[pair.fqn].shape)
        for each in scores[pair].terms[0]:
            factor = factor * each
        found = as_matrices(factor, pair.fqn).double()
        is_seen = matrices.sum((1, 2), keepdim=True) > 0  # else others of the layer speak for it
        found = torch.where(is_seen, found, 0)
        if not torch.allclose(found, fitted.sqrt(), rtol=1e-6, atol=0):
            wrong.append(f"{pair.fqn}: the factor {found}, not {fitted.sqrt()}")
    return wrong


@pytest.mark.parametrize("wrapping", WRAPPERS)
def test_every_kind_of_parameter(wrapping):
    assert_nothing_wrong_on(wrapping, wrong_kinds)
