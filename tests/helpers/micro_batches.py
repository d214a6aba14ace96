"""Micro-batches that differ between ranks, and the scores of one process that runs all of them."""

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

import distprune as prune
from distprune.criteria import Criterion
from distprune.statistics import GradientStatistics
from helpers.models import Net, fill, fqns, target
from helpers.wrappings import (
    data_rank,
    local,
    local_indices,
    my_part,
    runnable_sizes,
    unwrapped,
    world_size,
    wrap,
)

WEIGHTS = ["l1.weight", "l2.weight", "l3.weight"]
Units = list[tuple[float, dict[str, Tensor]]]


class ReluNet(Net):
    """Net without tanh: integers stay integers."""

    def forward(self, x: Tensor) -> Tensor:
        return self.l3(torch.relu(self.l2(torch.relu(self.l1(x)))))


def make_model(wrapping: str, data: str, kind_of_model: type | None = None) -> nn.Module:
    """A model that a wrapping can run.

    Args:
        kind_of_model: its class, with 6 inputs and 3 outputs; None: ReluNet.
        data: "float64", "float32" or "bfloat16", normal values of that type; or "integer float32"
            or "integer bfloat16", where all sums are exact.
    """
    kind, _, dtype = data.rpartition(" ")
    made = kind_of_model() if kind_of_model else ReluNet(runnable_sizes(wrapping))
    model = fill(made, "normal", dtype, seed=3)
    if kind == "integer":
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randint(-1, 2, parameter.shape, generator=generator))
            for layer in (model.l1, model.l2):  # so that few units are dead
                layer.bias.fill_(1)
            # Each rank of RowwiseParallel adds its share of the bias.
            _, num_parts = data_rank(wrapping, are_replicas=False)
            model.l2.bias.mul_(world_size(wrapping) // num_parts)
    return model


def micro_batch(model: nn.Module, data: str, rank: int, number: int) -> tuple[Tensor, Tensor]:
    """(inputs, targets) of one micro-batch of a data-parallel rank."""
    kind, _, dtype = data.rpartition(" ")
    generator = torch.Generator().manual_seed(1000 * rank + number)
    inputs, outputs = 6, 3
    if isinstance(model, ReluNet):
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


def gradients_of_units(
    model: nn.Module, data: str, num_ranks: int, num_batches: int, run_in: torch.dtype | None = None
) -> Units:
    """(weight, gradients by name) of each unit, in one process, one after the other.

    Args:
        run_in: the dtype of forward and backward, where it is not the model's.
    """
    model = copy.deepcopy(model).to(run_in)
    units = []
    for rank in range(num_ranks):
        for number in range(num_batches):
            x, y = micro_batch(model, data, rank, number)
            model.zero_grad()
            loss_of(model, (x.to(run_in), y)).backward()
            gradients = {
                name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                for name, parameter in model.named_parameters()
            }
            units.append((num_tokens(rank, number), gradients))
    return units


def expected_scores(model: nn.Module, units: Units, power: int, factor: float) -> dict[str, Tensor]:
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
    share: float = 0.0,
) -> list[str]:
    """Compare this rank's parts: equal to rounding, or all bits where sums are exact.

    Args:
        share: of a parameter's largest score by which sums may differ whose terms cancel.
    """
    wrong = []
    for name, whole in expected.items():
        if not whole.any():  # without a gradient: it scores as its siblings do
            continue
        held = local(scores[target(unwrapped(model), name)])
        mine = my_part(whole, indices[name])
        if held.dtype != torch.float32 or held.shape != mine.shape:
            wrong.append(f"{name}: {held.dtype} {list(held.shape)}, not {list(mine.shape)}")
        elif data.startswith("integer"):
            if not torch.equal(held, mine.float()):
                wrong.append(f"{name}: {held} not {mine.float()}")
        elif not torch.allclose(
            held.double(), mine.double(), rtol=1e-6, atol=share * float(whole.abs().max()) + 1e-30
        ):
            error = ((held - mine).abs() / mine.abs()).max()
            wrong.append(f"{name}: relative error {error:.1e}")
    return wrong


def wrong_totals(statistics: GradientStatistics, units: Units, is_exact: bool = True) -> list[str]:
    """Compare the sums of matrices with those of all units."""
    wrong = []
    weight = sum(n for n, _ in units)
    for pair, held in statistics.totals().items():
        squares = sum(n * gradients[pair.fqn].double() ** 2 for n, gradients in units)
        if held.weight != weight:
            wrong.append(f"{pair.fqn}: weight {held.weight}, not {weight}")
        for what, mine, right in (
            ("output", held.by_output, squares.sum(1)),
            ("input", held.by_input, squares.sum(0)),
        ):
            is_equal = (
                torch.equal(mine, right)
                if is_exact
                else torch.allclose(mine, right, rtol=2e-6, atol=0)
            )
            if not is_equal:
                wrong.append(f"{pair.fqn} by {what}: {mine.tolist()}, not {right.tolist()}")
    return wrong


class Wrapped:
    """A dense model, the same model wrapped, and this rank's micro-batches.

    Args:
        wrapping, data: see :func:`make_model`.
        sizes_for: another wrapping, whose model is taken.
        are_replicas: whether ranks with a plain model have the same batches.
        kind_of_model: see :func:`make_model`.
        wrap_model: shards a model in place of the wrapping, which only says who has which batches.
        options: for the wrapper.

    Attributes:
        indices: by name, the elements that this rank has.
        matrices: the weights, with their names.
        pairs: (module, name) of all parameters.
        rank: this rank's place among the data-parallel ranks.
    """

    def __init__(
        self,
        wrapping: str,
        data: str,
        *,
        sizes_for: str | None = None,
        are_replicas: bool = False,
        kind_of_model: type | None = None,
        wrap_model: Callable[[nn.Module], nn.Module] | None = None,
        **options: object,
    ) -> None:
        self.wrapping, self.data = wrapping, data
        self.rank, self.num_ranks = data_rank(wrapping, are_replicas)
        self.dense = make_model(sizes_for or wrapping, data, kind_of_model)
        if wrap_model is not None:
            numbered = copy.deepcopy(self.dense).double()
            for parameter in numbered.parameters():
                parameter.data = torch.arange(parameter.numel()).view(parameter.shape).double()
            parts = wrap_model(numbered).named_parameters()
            self.indices = {name: local(parameter).long() for name, parameter in parts}
            self.model = wrap_model(copy.deepcopy(self.dense))
            return
        cuts = options if wrapping.startswith("fsdp1-") else {}  # which depend on the dtypes there
        self.indices = local_indices(copy.deepcopy(self.dense), wrapping, **cuts)
        self.model = wrap(copy.deepcopy(self.dense), wrapping, **options)

    @property
    def pairs(self) -> list[tuple[nn.Module, str]]:
        return [target(unwrapped(self.model), name) for name in fqns(self.dense)]

    @property
    def matrices(self) -> list[prune.NamedParameter]:
        inner = unwrapped(self.model)
        return [prune.NamedParameter(*target(inner, name), name) for name in WEIGHTS]

    def loss(self, number: int) -> Tensor:
        """Of one micro-batch of this rank."""
        return loss_of(self.model, micro_batch(self.dense, self.data, self.rank, number))

    def step(self, number: int) -> None:
        """Leave a sum over all ranks in .grad: wrappers divide by the number of ranks."""
        (self.loss(number) * self.num_ranks).backward()

    def calibrate(self, criterion: Criterion | GradientStatistics, num_batches: int = 3) -> None:
        """Gradients pile up in .grad, as in gradient accumulation."""
        with criterion.calibrating():
            for number in range(num_batches):
                with criterion.batch(weight=num_tokens(self.rank, number)):
                    self.loss(number).backward()

    def units(self, num_batches: int = 3, run_in: torch.dtype | None = None) -> Units:
        """(weight, gradients by name) of all units of all ranks, in one process."""
        return gradients_of_units(self.dense, self.data, self.num_ranks, num_batches, run_in)

    def steps(self, num_batches: int = 3) -> Units:
        """The same of global batches: sums over the ranks."""
        units, found = self.units(num_batches), []
        for number in range(num_batches):
            own = units[number::num_batches]
            sums = {name: sum(gradients[name] for _, gradients in own) for name in own[0][1]}
            found.append((sum(weight for weight, _ in own), sums))
        return found

    def wrong(
        self, criterion: Criterion, units: Units, power: int = 2, factor: float = 0.5
    ) -> list[str]:
        """Compare scores with those of one process, by default Fisher's."""
        expected = expected_scores(self.dense, units, power, factor)
        return wrong_scores(self.model, criterion.scores(), expected, self.indices, self.data)
