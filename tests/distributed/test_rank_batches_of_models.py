"""Gradients of rank batches of models that are tied, checkpointed, pruned, compiled, or sparse."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import distprune as prune
from distprune.criteria import Fisher
from distprune.testing import run_ranks
from helpers import reference, wrappings
from helpers.comparisons import assert_nothing_wrong, assert_nothing_wrong_on
from helpers.models import Net, fill, fqns, target
from helpers.wrappings import local

WRAPPERS = ["plain", "ddp", "fsdp1", "fsdp2"]


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
        return self.experts[0](x) + (self.experts[1](x) if x[0, 0] > 0 else 0)


class Unused(nn.Module):
    """One layer that no loss depends on."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


class OwnOrder(nn.Module):
    """Rank 1 runs two layers in another order than rank 0; FSDP2 does not care."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 3, bias=False) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        layers = list(self.layers) if dist.get_rank() == 0 else list(self.layers)[::-1]
        return layers[0](x) + layers[1](x)


KINDS = [
    Net, Tied, Twice, Checkpointed, Reentrant, CheckpointedTwice, Experts, Unused, OwnOrder,
]  # fmt: skip
MODELS = {model.__name__: model for model in KINDS}


def inputs(rank: int) -> Tensor:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(rank))
    x[0, 0] = rank - 0.5
    return x


def make_model(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return fill(MODELS[kind](), "normal", "float32") if kind == "Net" else MODELS[kind]()


def wrap(model: nn.Module, wrapper: str) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if wrapper == "fsdp2":
        return fully_shard(model, mesh=mesh)
    if wrapper == "fsdp1":
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    if wrapper == "ddp":
        return DistributedDataParallel(
            model, find_unused_parameters=isinstance(model, (Experts, Unused))
        )
    return model


def expected_scores(dense: nn.Module, batches: list[Tensor]) -> dict[str, Tensor]:
    """One half w^2 times the mean square of the gradients of all ranks' batches."""
    total = {name: torch.zeros_like(p) for name, p in dense.named_parameters()}
    for batch in batches:
        dense.zero_grad()
        dense(batch).square().sum().backward()
        for name, parameter in dense.named_parameters():
            if parameter.grad is not None:
                total[name] += parameter.grad.square()
    return {
        name: 0.5 * parameter.detach().square() * total[name] / len(batches)
        for name, parameter in dense.named_parameters()
    }


def scores_of(model: nn.Module, names: list[str], batch: Tensor, run=None) -> dict[str, Tensor]:
    """This rank's part of every score, after one backward of ``run``, by default of the model."""
    pairs = [target(wrappings.unwrapped(model), name) for name in names]
    criterion = Fisher(pairs, unit="rank_batch")
    with criterion.calibrating(), criterion.batch():
        (model if run is None else run)(batch).square().sum().backward()
    return dict(zip(names, criterion.scores().values(), strict=True))


def wrong(
    found: dict[str, Tensor], expected: dict[str, Tensor], rtol: float = 1e-6, is_run: bool = False
) -> list[str]:
    """Compare whole scores."""
    texts = []
    for name, right in expected.items():
        score = whole(found[name], right.shape, is_run).to(right.dtype)
        if not torch.allclose(score, right, rtol=rtol, atol=1e-30):
            texts.append(f"{name}: {score}, not {right}")
    return texts


def whole(scores: Tensor, shape: torch.Size, is_run: bool = False) -> Tensor:
    """All elements of scores on every rank; runs of FSDP1 lie one after the other."""
    if isinstance(scores, DTensor):
        return scores.full_tensor()
    if not is_run:
        return scores
    parts: list = [None] * dist.get_world_size()
    dist.all_gather_object(parts, scores)
    return torch.cat(parts).view(shape)


def differences(
    kind: str, wrapper: str, backend: str | None = None, is_warm: bool = False
) -> list[str]:
    """Scores after one micro-batch on each rank, beside those of one process."""
    dense = make_model(kind)
    batches = [inputs(rank) for rank in range(dist.get_world_size())]
    model = wrap(copy.deepcopy(dense), wrapper)
    run = model if backend is None else torch.compile(model, backend=backend)
    own = batches[dist.get_rank()]
    if is_warm:  # compiled without hooks
        run(own).square().sum().backward()
    found = scores_of(model, fqns(dense), own, run)
    return wrong(found, expected_scores(dense, batches), is_run=wrapper == "fsdp1")


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("kind", ["Tied", "Twice", "Checkpointed"])
def test_models_that_use_a_parameter_more_than_once(kind, wrapper):
    assert_nothing_wrong(run_ranks(differences, 2, kind, wrapper))


@pytest.mark.parametrize("wrapper", ["plain", "ddp", "fsdp2"])
def test_reentrant_checkpoints(wrapper):
    """FSDP1 itself fails if a checkpointed layer shares a flat parameter with others."""
    assert_nothing_wrong(run_ranks(differences, 2, "Reentrant", wrapper))


@pytest.mark.parametrize("wrapper", ["plain", "ddp", "fsdp1"])
def test_experts_without_tokens_have_gradients_of_zero(wrapper):
    """FSDP2 itself hangs where a parameter has a gradient on some ranks only."""
    assert_nothing_wrong(run_ranks(differences, 2, "Experts", wrapper))


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_layers_that_no_loss_depends_on(wrapper):
    assert_nothing_wrong(run_ranks(differences, 2, "Unused", wrapper))


@pytest.mark.thorough
@pytest.mark.parametrize("is_warm", [False, True])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_compiled_models(wrapper, is_warm):
    assert_nothing_wrong(run_ranks(differences, 2, "Net", wrapper, "aot_eager", is_warm))


def error_of(kind: str, wrapper: str) -> str:
    model = wrap(make_model(kind), wrapper)
    try:
        scores_of(model, fqns(make_model(kind)), inputs(dist.get_rank()))
    except RuntimeError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("wrapper", ["plain", "fsdp2"])
def test_gradients_in_two_parts_are_refused(wrapper):
    """Their squares are not the square of their sum."""
    for text in run_ranks(error_of, 2, "CheckpointedTwice", wrapper):
        assert "Linear" in text and "2 gradients in one batch" in text
        assert "use_reentrant=False" in text


@pytest.mark.parametrize("wrapper", ["plain", "fsdp1"])
def test_an_order_of_its_own_on_each_rank(wrapper):
    assert_nothing_wrong(run_ranks(differences, 2, "OwnOrder", wrapper))


def test_an_order_of_its_own_on_each_rank_is_refused_under_fsdp2():
    """The ranks would add up gradients of different parameters."""
    for text in run_ranks(error_of, 2, "OwnOrder", "fsdp2"):
        assert "different orders" in text


def pruned_differences(wrapping: str) -> list[str]:
    """A masked model: zero at pruned places, elsewhere the gradients of the masked weights."""
    dense = fill(Net(wrappings.runnable_sizes(wrapping)), "normal", "float64")
    names = fqns(dense)
    indices = wrappings.local_indices(copy.deepcopy(dense), wrapping)
    keeps = dict(zip(names, reference.prune(list(dense.parameters()), 0.4), strict=True))
    model = wrappings.wrap(copy.deepcopy(dense), wrapping)
    parameters = [target(wrappings.unwrapped(model), name) for name in names]
    prune.global_unstructured(parameters, prune.L1Unstructured, amount=0.4)
    with torch.no_grad():
        for name, parameter in dense.named_parameters():
            parameter.mul_(keeps[name])
    rank, num_ranks = wrappings.data_rank(wrapping)
    batches = [inputs(number).double() for number in range(num_ranks)]
    found, texts = scores_of(model, names, batches[rank]), []
    for name, expected in expected_scores(dense, batches).items():
        mine, held = wrappings.my_part(expected, indices[name]), local(found[name]).double()
        if not torch.allclose(held, mine, rtol=1e-6, atol=1e-30):
            texts.append(f"{name}: {held}, not {mine}")
    return texts


@pytest.mark.parametrize("wrapping", ["ddp-2", "fsdp1-2", "fsdp2-3", "hsdp-2x2", "tp-2"])
def test_pruned_models(wrapping):
    assert_nothing_wrong_on(wrapping, pruned_differences)


class Normed(nn.Module):
    """A norm between two layers, as sequence parallelism shards it."""

    def __init__(self):
        super().__init__()
        self.l1, self.norm, self.l2 = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.l2(self.norm(self.l1(x)))


def sequence_parallel_differences(shape: tuple[int, ...]) -> list[str]:
    """Gradients of the norm are pending sums over the TP ranks; squares come after the sum."""
    torch.manual_seed(1)
    dense = Normed().double()
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[-len(shape) :])
    tp = mesh["tp"]
    model = parallelize_module(
        copy.deepcopy(dense),
        tp,
        {
            "l1": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "l2": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        },
    )
    if len(shape) == 2:
        model = fully_shard(model, mesh=mesh["dp"])
    num_ranks = shape[0] if len(shape) == 2 else 1
    rank = dist.get_rank() // shape[1] if len(shape) == 2 else 0

    generator = torch.Generator().manual_seed(0)
    batches = list(torch.randn(num_ranks, 2, 4, 6, generator=generator, dtype=torch.float64))
    found = scores_of(model, fqns(dense), batches[rank])
    return wrong(found, expected_scores(dense, batches), rtol=1e-5)


@pytest.mark.parametrize("shape", [(2,), (2, 2)])
def test_sequence_parallelism(shape):
    assert_nothing_wrong(run_ranks(sequence_parallel_differences, 2 ** len(shape), shape))


def several_groups_differences() -> list[str]:
    """One module whose parameters are sharded over different meshes: two reductions of its own."""
    mesh = init_device_mesh("cpu", (4,))
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    dense = make_model("Net")
    batches = [inputs(rank) for rank in range(4)]
    expected = expected_scores(copy.deepcopy(dense), batches)
    model = copy.deepcopy(dense)
    hybrid = _fsdp_common.HSDPMeshInfo(grid, shard_mesh_dim=1, replicate_mesh_dim=0)
    of_grid = {id(parameter) for parameter in model.l2.parameters()}

    def place(parameter: nn.Parameter):
        other = _fsdp_common.ShardPlacementResult(Shard(0), hybrid)
        return other if id(parameter) in of_grid else None

    fully_shard(model, mesh=mesh, shard_placement_fn=place)
    return wrong(scores_of(model, fqns(dense), batches[dist.get_rank()]), expected)


@pytest.mark.skipif(
    not hasattr(_fsdp_common, "ShardPlacementResult"), reason="this torch has one mesh per module"
)
def test_several_parameter_groups_in_one_module():
    assert_nothing_wrong(run_ranks(several_groups_differences, 4))
