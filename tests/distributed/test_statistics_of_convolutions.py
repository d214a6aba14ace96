"""Convolutions, transformers' Conv1D, and ranks without a batch, on wrappers that can run them."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor

import distprune as prune
from distprune.statistics import ActivationStatistics
from distprune.testing import run_ranks
from helpers import wrappings
from helpers.comparisons import assert_nothing_wrong, assert_nothing_wrong_on

WRAPPINGS = [
    "plain-2", "ddp-3", "fsdp1-2", "fsdp1-3", "fsdp1_root-3", "fsdp1_flat-2", "fsdp1_hybrid-2x2",
    "fsdp2-2", "fsdp2-3", "fsdp2_root-2", "hsdp-1x3", "hsdp-2x2",
]  # fmt: skip


class ConvNet(nn.Module):
    """Convolutions with and without groups, and a weight that is [in, out]."""

    def __init__(self):
        super().__init__()
        from transformers.pytorch_utils import Conv1D

        self.l1 = nn.Conv2d(2, 6, 3, padding=1, stride=2)
        self.l2 = nn.Conv2d(6, 9, (2, 1), groups=3)
        self.depthwise = nn.Conv2d(9, 9, 1, groups=9, padding="same")
        self.l3 = Conv1D(5, 9)

    def forward(self, x: Tensor) -> Tensor:
        x = self.depthwise(torch.relu(self.l2(torch.relu(self.l1(x)))))
        return self.l3(torch.relu(x).flatten(2).mT.contiguous())


@torch.no_grad()
def integer_net() -> ConvNet:
    generator = torch.Generator().manual_seed(0)
    net = ConvNet()
    for parameter in net.parameters():
        parameter.copy_(torch.randint(-1, 2, parameter.shape, generator=generator))
    return net


def data_of(part: int) -> Tensor:
    generator = torch.Generator().manual_seed(part)
    return torch.randint(-1, 2, (1 + part, 2, 5, 4), generator=generator).float()


def differences(wrapping: str) -> list[str]:
    """Factors of every criterion have the bits of one process, dense and with a mask."""
    model = wrappings.wrap(integer_net(), wrapping)
    part, size = dist.get_rank(), dist.get_world_size()
    single, alone = integer_net(), dist.new_subgroups(1)[0]
    wrong = []
    for when in ("dense", "pruned"):
        both = []
        for net, batches, group in (
            (model, [data_of(part)], None),
            (single, [data_of(other) for other in range(size)], alone),
        ):
            parameters = prune.select(net, everything=True)
            statistics = ActivationStatistics(parameters, group=group)
            with statistics.collecting():
                for x in batches:
                    net(x)
            found = {name: getattr(statistics, name)() for name in ("wanda", "ria", "stade")}
            found["owl"] = statistics.outlier_ratios(threshold_multiple=1.5, per="parameter")
            both.append({k: {p.fqn: v for p, v in of.items()} for k, of in found.items()})
            scores = statistics.ria()
            prune.global_unstructured(
                parameters, prune.L1Unstructured, scores, amount=0.3, group=group
            )
        mine, right = both
        for name, of in mine.items():
            for parameter, value in of.items():
                expected = right[name][parameter]
                is_owl = name == "owl"
                if value != expected if is_owl else value.checksum() != expected.checksum():
                    wrong.append(f"{when} {name} of {parameter}: {value}, not {expected}")
    return wrong


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_factors_are_those_of_one_process(wrapping):
    pytest.importorskip("transformers")
    assert_nothing_wrong_on(wrapping, differences)


def totals_with_an_idle_rank(wrapping: str) -> tuple[int, list[float]]:
    """Rank 1 has no batch: no forward at all."""
    layer = nn.Linear(2, 2)
    model = wrappings.wrap(nn.Sequential(layer), wrapping)
    statistics = ActivationStatistics(prune.select(model))
    with statistics.collecting():
        for _ in range(0 if dist.get_rank() == 1 else 2):
            model(torch.ones(3, 2))
    (totals,) = statistics.totals().values()
    return totals.num_tokens, totals.squares.tolist()


@pytest.mark.parametrize("wrapping", ["plain-2", "ddp-3"])
def test_a_rank_without_a_batch_takes_part(wrapping):
    size = wrappings.world_size(wrapping)
    num_tokens = 6 * (size - 1)
    results = run_ranks(totals_with_an_idle_rank, size, wrapping)
    assert results == [(num_tokens, [float(num_tokens)] * 2)] * size


def wrong_with_checkpoints_and_bf16() -> list[str]:
    """Checkpointed layers under FSDP2, which casts to bf16: inputs count once, as they are seen."""
    model = nn.Sequential(
        checkpoint_wrapper(nn.Linear(3, 4)), nn.ReLU(), checkpoint_wrapper(nn.Linear(4, 2))
    )
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = wrappings.wrap(model, "fsdp2-2", mp_policy=policy)
    x = torch.tensor([[1.0, 2**-10 + 1, 3.0]]) * (dist.get_rank() + 1)
    statistics = ActivationStatistics(prune.select(model))
    with statistics.collecting():
        model(x)
    first, second = statistics.totals().values()
    seen = torch.cat([torch.tensor([[1.0, 1.0, 3.0]]) * (rank + 1) for rank in range(2)])
    wrong = []
    if not torch.equal(first.squares, seen.double().square().sum(0)):
        wrong.append(f"{first}")
    if (first.num_tokens, second.num_tokens) != (2, 2):
        wrong.append(f"{first} {second}")
    return wrong


def test_checkpoints_and_mixed_precision_under_fsdp2():
    assert_nothing_wrong(run_ranks(wrong_with_checkpoints_and_bf16, 2))


def results_of_dtensor_images(dim: int) -> str:
    mesh = init_device_mesh("cpu", (2,))
    model = distribute_module(nn.Sequential(nn.Conv2d(2, 2, 1)), mesh)
    statistics = ActivationStatistics(prune.select(model))
    image = distribute_tensor(torch.ones(2, 2, 4, 4), mesh, [Shard(dim)])
    try:
        with statistics.collecting():
            model(image)
        (totals,) = statistics.totals().values()
        return f"{totals.num_tokens} {totals.sums.flatten().tolist()}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize(
    ("dim", "expected"),
    [(0, "32 [32.0, 32.0]"), (1, "to have 2 channels"), (2, "by channels or by places")],
)
def test_images_that_are_sharded(dim, expected):
    """Samples of different ranks all count; a part of an image is refused."""
    for result in run_ranks(results_of_dtensor_images, 2, dim):
        assert expected in result


def totals_on_two_axes() -> list[tuple[int, list[float]]]:
    """DTensor inputs on two axes of a mesh: tokens over one, features or copies over the other."""
    mesh = init_device_mesh("cpu", (2, 2))
    x = torch.arange(12.0).view(4, 3)
    found = []
    for placements in ([Shard(0), Replicate()], [Replicate(), Shard(1)], [Shard(1), Shard(0)]):
        layer = distribute_module(nn.Linear(3, 2), mesh)
        statistics = ActivationStatistics(prune.select(nn.Sequential(layer)))
        with statistics.collecting():
            layer(distribute_tensor(x, mesh, placements))
        (totals,) = statistics.totals().values()
        found.append((totals.num_tokens, totals.sums.tolist()))
    return found


def test_inputs_on_a_mesh_of_two_axes():
    x = torch.arange(12.0).view(4, 3)
    for found in run_ranks(totals_on_two_axes, 4):
        assert found == [(4, x.sum(0).tolist())] * 3
