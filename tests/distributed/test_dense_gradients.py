"""Inside prune.dense_gradients, .grad is that of the masked weights, at pruned places too."""

import contextlib
import copy

import pytest
import torch
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

import distprune as prune
from distprune.testing import run_ranks
from helpers import criteria_runs as runs
from helpers import wrappings
from helpers.comparisons import assert_nothing_wrong_on
from helpers.sampling import every


class Recomputing(runs.IntegerNet):
    """Activation checkpointing in both of torch's ways."""

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(lambda t: torch.relu(self.l1(t)), x, use_reentrant=False)
        x = checkpoint(self.l2, x, use_reentrant=True)
        return checkpoint(self.l3, x, use_reentrant=False)


class Case:
    """A pruned model on a wrapping, and what one process computes for it."""

    def __init__(self, wrapping: str, recompute: str = "", pruned_first: bool = False):
        self.dense = runs.integer_net(wrapping)
        self.wrapping = wrapping
        self.indices = wrappings.local_indices(self.dense, wrapping)
        model = copy.deepcopy(self.dense)
        if recompute == "inside":
            model.__class__ = Recomputing
        if recompute == "wrapper":
            model.l3 = checkpoint_wrapper(model.l3)
        generator = torch.Generator().manual_seed(5)
        self.masks = {
            name: torch.rand(self.dense.get_parameter(name).shape, generator=generator) < 0.6
            for name in runs.WEIGHTS
        }
        if pruned_first:
            self.prune(model)
            with prune.masks_aside(model):
                self.model = wrappings.wrap(model, wrapping)
        else:
            self.model = wrappings.wrap(model, wrapping)
            self.prune(self.model)
        self.pairs = runs.targets(self.model, runs.WEIGHTS)
        for name, mask in self.masks.items():
            self.dense.get_parameter(name).data.mul_(mask)
        self.batches = runs.batches(self.dense, 4)

    def prune(self, model: torch.nn.Module) -> None:
        targets = runs.targets(model, runs.WEIGHTS)
        for (module, name), mask in zip(targets, self.masks.values(), strict=True):
            prune.custom_from_mask(module, name, mask)

    def backward(self, *numbers: int, sync: bool = True) -> None:
        for number in numbers:
            with runs.synchronised(self.model, sync):
                part = wrappings.data_rank(self.wrapping)
                runs.backward(self.model, self.batches[number], *part)

    def expected(self, *numbers: int) -> dict[str, Tensor]:
        """Dense gradients of the sum of some batches, with respect to the masked weights."""
        total = sum(runs.loss(self.dense, *self.batches[number]) for number in numbers)
        weights = [self.dense.get_parameter(name) for name in runs.WEIGHTS]
        return dict(zip(runs.WEIGHTS, torch.autograd.grad(total, weights), strict=True))

    def masked(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: gradient * self.masks[name] for name, gradient in gradients.items()}

    def differences(self, expected: dict[str, Tensor], when: str) -> list[str]:
        wrong = []
        for name, whole in expected.items():
            part = wrappings.my_part(whole, self.indices[name])
            mine = wrappings.gradient(self.model, name, self.indices)
            if not torch.equal(wrappings.local(mine).view(part.shape), part):
                wrong.append(f"{when}, {name}: {mine} is not {part}")
        return wrong

    def differences_of_a_backward(self) -> list[str]:
        dense = self.expected(0)
        with prune.dense_gradients(self.model):
            self.backward(0)
            wrong = self.differences(dense, "inside")
        return wrong + self.differences(self.masked(dense), "after")

    def output(self) -> Tensor:
        part, num_parts = wrappings.data_rank(self.wrapping)
        return self.model(self.batches[0][0].chunk(num_parts)[part])


def differences_of_a_step(wrapping: str) -> list[str]:
    case = Case(wrapping)
    before = case.output()
    with prune.dense_gradients(case.model):
        inside = case.output()
        case.backward(0)
        dense = case.expected(0)
        wrong = case.differences(dense, "inside")
    assert all((dense[name] * ~case.masks[name]).any() for name in runs.WEIGHTS)
    wrong += case.differences(case.masked(dense), "after")
    case.model.zero_grad()
    if not (torch.equal(before, inside) and torch.equal(before, case.output())):
        wrong.append("the output differs")
    case.backward(1)
    return wrong + case.differences(case.masked(case.expected(1)), "a step later")


@pytest.mark.parametrize("wrapping", wrappings.sampled(wrappings.ALL))
def test_a_step(wrapping):
    assert_nothing_wrong_on(wrapping, differences_of_a_step)


def sums(*terms: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: sum(term[name] for term in terms) for name in terms[0]}


def differences_when_accumulating(wrapping: str) -> list[str]:
    """One backward before, two inside of which the first is not synchronised, and one after."""
    case = Case(wrapping)
    case.backward(0)
    with prune.dense_gradients(case.pairs):
        case.backward(1, sync=False)
        case.backward(2)
        expected = sums(case.masked(case.expected(0)), case.expected(1, 2))
        wrong = case.differences(expected, "inside")
    wrong += case.differences(case.masked(expected), "after")
    case.backward(3)
    return wrong + case.differences(case.masked(case.expected(0, 1, 2, 3)), "one more")


def differences_when_left_without_sync(wrapping: str) -> list[str]:
    """The context is left before the backward that reduces the gradients."""
    case = Case(wrapping)
    with prune.dense_gradients(case.pairs):
        case.backward(0, sync=False)
    case.backward(1)
    return case.differences(case.masked(case.expected(0, 1)), "reduced after")


@pytest.mark.parametrize(
    "function", [differences_when_accumulating, differences_when_left_without_sync]
)
@pytest.mark.parametrize(
    "wrapping", ["ddp-2", *(w for w in wrappings.sampled(wrappings.ALL) if w != "ddp-3")]
)  # with 3 ranks DDP takes a third of sums that it has averaged already: no integers
def test_accumulation(wrapping, function):
    assert_nothing_wrong_on(wrapping, function)


def differences_of_unusual_contexts(wrapping: str) -> list[str]:
    case = Case(wrapping)
    dense = case.expected(0)
    with prune.dense_gradients(case.model):
        with prune.dense_gradients(case.pairs[:1]):
            case.backward(0)
        wrong = case.differences(dense, "the inner context was left")
    wrong += case.differences(case.masked(dense), "both were left")

    case.model.zero_grad()
    with contextlib.suppress(KeyError), prune.dense_gradients(case.model):
        case.backward(0)
        raise KeyError
    wrong += case.differences(case.masked(dense), "left by an error")

    case.model.zero_grad()
    with prune.dense_gradients(case.model):
        output = case.output()
    part, num_parts = wrappings.data_rank(wrapping)
    ((output * case.batches[0][1].chunk(num_parts)[part]).sum() * num_parts).backward()
    wrong += case.differences(case.masked(dense), "backward after the context")

    case.model.zero_grad()
    with prune.dense_gradients(case.pairs[:1]):
        case.backward(0)
        name = runs.WEIGHTS[0]
        expected = {**case.masked(dense), name: dense[name]}
        wrong += case.differences(expected, "one of the parameters")
    with prune.dense_gradients([]):
        pass
    return wrong


@pytest.mark.parametrize("wrapping", wrappings.sampled(wrappings.ALL))
def test_unusual_contexts(wrapping):
    assert_nothing_wrong_on(wrapping, differences_of_unusual_contexts)


def differences_when_recomputing(wrapping: str, kind: str) -> list[str]:
    return Case(wrapping, recompute=kind).differences_of_a_backward()


@pytest.mark.parametrize("kind", ["inside", "wrapper"])
@pytest.mark.parametrize("wrapping", ["plain-1", "ddp-2", "fsdp1-2", "fsdp2-3", "tp-2"])
def test_activation_checkpointing(wrapping, kind):
    assert_nothing_wrong_on(wrapping, differences_when_recomputing, kind)


def differences_after_wrapping(wrapping: str) -> list[str]:
    """Pruned first and wrapped second."""
    return Case(wrapping, pruned_first=True).differences_of_a_backward()


@pytest.mark.parametrize("wrapping", ["ddp-2", "fsdp2_root-3", "fsdp1-2"])
def test_pruned_and_then_wrapped(wrapping):
    assert_nothing_wrong_on(wrapping, differences_after_wrapping)


def differences_when_compiled(wrapping: str, backend: str) -> list[str]:
    torch._dynamo.reset()
    case = Case(wrapping)
    eager, wrong = case.model, []
    dense, compiled = case.expected(0), torch.compile(case.model, backend=backend)
    for turn in range(2):
        case.model = compiled
        case.backward(0)
        case.model = eager
        wrong += case.differences(case.masked(dense), f"before, turn {turn}")
        eager.zero_grad()
        with prune.dense_gradients(eager if turn else compiled):
            case.model = compiled
            case.backward(0)
            case.model = eager
            wrong += case.differences(dense, f"inside, turn {turn}")
        wrong += case.differences(case.masked(dense), f"after, turn {turn}")
        eager.zero_grad()
    torch._dynamo.reset()
    return wrong


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("wrapping", "backend"),
    every(
        2,
        [
            ("ddp-2", "eager"),
            ("plain-1", "aot_eager"),
            ("tp-2", "eager"),
            ("fsdp2-2", "aot_eager"),
            ("fsdp2_root-2", "eager"),
        ],
        start=1,
    ),
)
def test_compiled(wrapping, backend):
    assert_nothing_wrong_on(wrapping, differences_when_compiled, backend)


def refused_when_unreduced(wrapping: str) -> str:
    case = Case(wrapping)
    case.backward(0, sync=False)
    with pytest.raises(RuntimeError) as error, prune.dense_gradients(case.model):
        pass
    case.backward(1)
    assert not case.differences(case.masked(case.expected(0, 1)), "nothing has changed")
    return str(error.value)


@pytest.mark.parametrize("wrapping", ["fsdp1-2", "fsdp1_flat-2", "fsdp2-2", "hsdp-2x2"])
def test_gradients_that_were_not_reduced_before_are_refused(wrapping):
    for text in run_ranks(refused_when_unreduced, wrappings.world_size(wrapping), wrapping):
        assert "Linear.weight: a backward without gradient synchronisation" in text
