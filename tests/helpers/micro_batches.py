"""Micro-batches that differ between ranks, and the scores of one process that runs all of them."""

import copy

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distprune.criteria import Criterion
from helpers.criteria_cases import ReluNet
from helpers.models import fill, target
from helpers.wrappings import (
    kind_of,
    local,
    mesh_shape,
    my_part,
    runnable_sizes,
    unwrapped,
    world_size,
)


def make_model(wrapping: str, data: str) -> nn.Module:
    """A model that a wrapping can run.

    Args:
        data: "float64", "float32" or "bfloat16", normal values of that type; or "integer float32"
            or "integer bfloat16", where all sums are exact.
    """
    kind, _, dtype = data.rpartition(" ")
    model = fill(ReluNet(runnable_sizes(wrapping)), "normal", dtype, seed=3)
    if kind == "integer":
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randint(-1, 2, parameter.shape, generator=generator))
            # Each rank of RowwiseParallel adds its share of the bias.
            model.l2.bias.mul_(num_tensor_ranks(wrapping))
    return model


def num_tensor_ranks(wrapping: str) -> int:
    return world_size(wrapping) // num_data_ranks(wrapping)


def micro_batch(model: nn.Module, data: str, rank: int, number: int) -> tuple[Tensor, Tensor]:
    """(inputs, targets) of one micro-batch of a data-parallel rank."""
    kind, _, dtype = data.rpartition(" ")
    generator = torch.Generator().manual_seed(1000 * rank + number)
    inputs, outputs = model.l1.in_features, model.l3.out_features
    if kind == "integer":
        x = torch.randint(-1, 2, (2, inputs), generator=generator)
        y = torch.randint(-1, 2, (2, outputs), generator=generator)
    else:
        x = torch.randn(4, inputs, generator=generator, dtype=torch.float64)
        y = torch.randn(4, outputs, generator=generator, dtype=torch.float64)
    return x.to(getattr(torch, dtype)), y.to(getattr(torch, dtype))


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return (model(x) * y).sum()


def num_tokens(rank: int, number: int) -> int:
    """Token counts that differ between ranks and between micro-batches."""
    return 1 + (2 * rank + 3 * number) % 4


def data_rank(wrapping: str) -> int:
    """This rank's place among the data-parallel ranks."""
    kind, rank = kind_of(wrapping), dist.get_rank()
    if kind == "tp":
        return 0
    return rank // mesh_shape(wrapping)[1] if kind == "fsdp2_tp" else rank


def num_data_ranks(wrapping: str) -> int:
    kind = kind_of(wrapping)
    if kind == "tp":
        return 1
    return mesh_shape(wrapping)[0] if kind == "fsdp2_tp" else world_size(wrapping)


def gradients_of_units(
    model: nn.Module,
    data: str,
    num_ranks: int,
    num_batches: int,
    run_in: torch.dtype | None = None,
) -> list[tuple[float, dict[str, Tensor]]]:
    """(weight, gradients by name) of each unit, in one process, one after the other.

    Args:
        run_in: the dtype of forward and backward, where it is not the model's.
    """
    model = copy.deepcopy(model).to(run_in)
    units = []
    for rank in range(num_ranks):
        for number in range(num_batches):
            x, y = micro_batch(model, data, rank, number)
            loss = loss_of(model, (x.to(run_in), y))
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            names = [name for name, _ in model.named_parameters()]
            units.append((num_tokens(rank, number), dict(zip(names, gradients, strict=True))))
    return units


def expected_scores(
    model: nn.Module, units: list[tuple[float, dict[str, Tensor]]], power: int, factor: float
) -> dict[str, Tensor]:
    """factor * |w|^p * (sum of n * |g|^p) / (sum of n), in float64."""
    count = sum(n for n, _ in units)
    scores = {}
    for name, parameter in model.named_parameters():
        moment = sum(n * gradients[name].double().abs() ** power for n, gradients in units) / count
        scores[name] = factor * parameter.detach().double().abs() ** power * moment
    return scores


def wrong_scores(
    model: nn.Module,
    scores: dict[tuple[nn.Module, str], Tensor],
    expected: dict[str, Tensor],
    indices: dict[str, Tensor],
    data: str = "float32",
    when: str = "",
) -> list[str]:
    """Compare this rank's parts: equal to rounding, or all bits where sums are exact."""
    wrong = []
    for name, whole in expected.items():
        held = local(scores[target(unwrapped(model), name)])
        mine = my_part(whole, indices[name])
        if held.dtype != torch.float32 or held.shape != mine.shape:
            wrong.append(f"{when} {name}: {held.dtype} {list(held.shape)}, not {list(mine.shape)}")
        elif data.startswith("integer"):
            if not torch.equal(held, mine.float()):
                wrong.append(f"{when} {name}: {held} not {mine.float()}")
        elif not torch.allclose(held.double(), mine, rtol=1e-6, atol=1e-30):
            error = ((held - mine).abs() / mine.abs()).max()
            wrong.append(f"{when} {name}: relative error {error:.1e}")
    return wrong


def calibrate(
    criterion: Criterion,
    model: nn.Module,
    dense: nn.Module,
    wrapping: str,
    data: str,
    num_batches: int,
) -> None:
    """This rank's micro-batches; gradients pile up in .grad, as in gradient accumulation."""
    rank = data_rank(wrapping)
    with criterion.calibrating():
        for number in range(num_batches):
            with criterion.batch(weight=num_tokens(rank, number)):
                loss_of(model, micro_batch(dense, data, rank, number)).backward()
