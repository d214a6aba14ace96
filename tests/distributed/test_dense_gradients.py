"""Inside prune.dense_gradients, .grad is that of the masked weights, at pruned places too.

Data are small integers, so that all is exact; RigL, which needs such gradients, ends on any
wrapping with the masks and weights of one process.
"""

import contextlib
import copy

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

import distprune as prune
from distprune import dynamic
from distprune.testing import run_ranks
from helpers import criteria_runs as runs
from helpers import reference, wrappings
from helpers.comparisons import assert_nothing_wrong_on, wrong_masks
from helpers.sampling import THOROUGH


class Recomputing(runs.IntegerNet):
    """Activation checkpointing in both of torch's ways."""

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(lambda t: torch.relu(self.l1(t)), x, use_reentrant=False)
        x = checkpoint(self.l2, x, use_reentrant=True)
        return checkpoint(self.l3, x, use_reentrant=False)


class Case:
    """A pruned model on a wrapping, and what one process computes for it."""

    def __init__(
        self, wrapping: str, recompute: str = "", pruned_first: bool = False, dtype=torch.float32
    ):
        self.dense = runs.integer_net(wrapping).to(dtype)
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
        self.run = self.model  # or compiled
        self.pairs = runs.named_targets(self.model, runs.WEIGHTS)
        for name, mask in self.masks.items():
            self.dense.get_parameter(name).data.mul_(mask)
        batches = runs.batches(self.dense, 7)
        self.batches = [tuple(t.to(dtype) for t in batch) for batch in batches]

    def prune(self, model: torch.nn.Module) -> None:
        targets = runs.targets(model, runs.WEIGHTS)
        for (module, name), mask in zip(targets, self.masks.values(), strict=True):
            prune.custom_from_mask(module, name, mask)

    def backward(self, *numbers: int, sync: bool = True) -> None:
        for number in numbers:
            with wrappings.synchronised(self.model, sync):
                part = wrappings.data_rank(self.wrapping)
                runs.backward(self.run, self.batches[number], *part)

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


def differences_when_compiled(wrapping: str, backend: str) -> list[str]:
    """Compiled before the context, and run once without it."""
    torch._dynamo.reset()
    case = Case(wrapping)
    case.run = torch.compile(case.model, backend=backend)
    case.backward(0)
    wrong = case.differences(case.masked(case.expected(0)), "before")
    for _ in range(2):
        case.model.zero_grad()
        wrong += case.differences_of_a_backward()
    torch._dynamo.reset()
    return wrong


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


def differences_in_other_cases(wrapping: str) -> list[str]:
    """Layers that run again in backward, and a model that is pruned first and wrapped second."""
    cases = [{"recompute": "inside"}, {"recompute": "wrapper"}] * (wrapping in RECOMPUTED)
    cases += [{"pruned_first": True}] * (wrapping in PRUNED_FIRST)
    wrong = []
    for options in cases:
        wrong += [f"{options}: {w}" for w in Case(wrapping, **options).differences_of_a_backward()]
    return wrong


RECOMPUTED = ["plain-1", "ddp-2", "fsdp1-2", "fsdp2-3", "tp-3"]
PRUNED_FIRST = ["ddp-2", "fsdp2_root-2", "fsdp1-2"]


class TiedNet(nn.Module):
    """Two layers of one weight, and small integers."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 5, bias=False)
        self.second = nn.Linear(5, 5, bias=False)
        self.second.weight = self.first.weight
        generator = torch.Generator().manual_seed(0)
        self.first.weight.data = torch.randint(-2, 3, (5, 5), generator=generator).float()

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))


def differences_of_tied(wrapping: str, given: str) -> list[str]:
    """Given by select, or by the second name of the weight."""
    dense, model = TiedNet(), TiedNet()
    indices = wrappings.local_indices(nn.Sequential(dense.first), wrapping)["0.weight"]
    model = wrappings.wrap(model, wrapping)
    inner = wrappings.unwrapped(model)
    pairs = prune.select(model) if given == "select" else [(inner.second, "weight")]
    criterion = prune.criteria.SNIP(pairs)
    report = prune.global_unstructured(prune.select(model), prune.L1Unstructured, amount=12)
    assert report.num_elements == 25

    (mask,) = reference.prune([dense.first.weight], 12)
    leaf = (dense.first.weight * mask).detach().requires_grad_()
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(-2, 3, (12, 5), generator=generator).float()
    (gradient,) = torch.autograd.grad((torch.relu(x @ leaf.T) @ leaf.T).sum(), leaf)
    is_held = wrappings.kind_of(wrapping) not in ("plain", "ddp")  # zero where it is pruned
    expected = ((leaf if is_held else dense.first.weight) * gradient).abs().detach()

    part, num_parts = wrappings.data_rank(wrapping)
    with prune.dense_gradients(model if given == "select" else pairs):
        (model(x.chunk(num_parts)[part]).sum() * num_parts).backward()
        criterion.update()
    (score,) = criterion.scores().values()
    mine = wrappings.my_part(expected, indices)
    wrong = [] if torch.equal(wrappings.local(score), mine) else [f"{score} is not {mine}"]
    has_scores = bool((expected * (mask == 0)).any())
    return wrong + ([] if has_scores != is_held else ["scores of pruned elements"])


class Signs(torch.optim.Optimizer):
    """Steps of -1, 0 and 1 along the sign of a momentum: integers stay small integers."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                    momentum.add_(p.grad.sign())
                    p.sub_(momentum.sign())


class OneProcess:
    """RigL as its authors describe it, of whole tensors, by the oracle."""

    def __init__(self, dense: nn.Module, masks: dict[str, Tensor]):
        self.dense, self.masks = dense, masks
        self.weights = {name: p.detach().clone() for name, p in dense.named_parameters()}
        self.momenta = {name: torch.zeros_like(w) for name, w in self.weights.items()}

    def gradients(self, batch) -> dict[str, Tensor]:
        for name, p in self.dense.named_parameters():
            p.data.copy_(self.weights[name] * self.masks.get(name, 1))
        parameters = dict(self.dense.named_parameters())
        found = torch.autograd.grad(runs.loss(self.dense, *batch), list(parameters.values()))
        return dict(zip(parameters, found, strict=True))

    def step(self, batch) -> None:
        for name, gradient in self.gradients(batch).items():
            self.momenta[name] += (gradient * self.masks.get(name, 1)).sign()
            self.weights[name] -= self.momenta[name].sign()

    def update(self, batch, fraction: float) -> None:
        gradients = self.gradients(batch)
        for name, mask in self.masks.items():
            num_dropped = round(fraction * int(mask.sum()))
            (kept,) = reference.prune([self.weights[name]], num_dropped, [mask])
            free = ~kept
            (left,) = reference.prune([gradients[name]], int(free.sum()) - num_dropped, [free])
            new = kept | left
            self.weights[name][new & ~mask] = 0
            self.momenta[name][new ^ mask] = 0
            self.masks[name] = new


def differences_of_rigl(wrapping: str, num_steps: int, interval: int) -> list[str]:
    sharded = Case(wrapping, dtype=torch.float64)
    optimizer = Signs(sharded.model.parameters())
    single = OneProcess(sharded.dense, dict(sharded.masks))
    wrong, num_grown = [], 0
    for step in range(num_steps):
        batch = sharded.batches[step % 7]
        if step % interval:
            sharded.backward(step % 7)
            optimizer.step()
            single.step(batch)
        else:
            with prune.dense_gradients(sharded.model):
                sharded.backward(step % 7)
                fraction = dynamic.cosine_fraction(step, num_steps, first=0.5)
                report = dynamic.rigl_step(sharded.pairs, fraction, optimizer=optimizer)
            num_grown += report.num_grown
            single.update(batch, fraction)
            wrong += wrong_masks(sharded.model, single.masks, sharded.indices, f"step {step}")
        optimizer.zero_grad()
        if wrong:
            return wrong
    for name, whole in single.weights.items():
        mask = single.masks.get(name, torch.ones_like(whole))
        keep = wrappings.my_part(mask, sharded.indices[name])
        held = wrappings.shard(sharded.model, name, sharded.indices).view(keep.shape) * keep
        part = wrappings.my_part(whole, sharded.indices[name]) * keep
        if not torch.equal(held.view(part.shape), part):
            wrong.append(f"{name}: {held} is not {part}")
    if not prune.verify(sharded.model).ok or num_grown < max(1, num_steps // 10):
        wrong.append(f"{num_grown} elements have grown")
    return wrong


TIED = ["plain-1", "ddp-2", "fsdp2_root-2", "fsdp1_root-3"]
RIGL = ["plain-1", "ddp-2", "fsdp1-2", "fsdp1_root-3", "fsdp1_flat-2", "hsdp-2x2", "tp-3",
        "fsdp2_tp-2x2"]  # fmt: skip


def all_differences(wrapping: str) -> list[str]:
    wrong = differences_of_a_step(wrapping) + differences_of_unusual_contexts(wrapping)
    if wrapping != "ddp-3":  # a third of sums that DDP has averaged already is no integer
        wrong += differences_when_accumulating(wrapping)
        wrong += differences_when_left_without_sync(wrapping)
    for given in ("select", "second name") if wrapping in TIED else ():
        wrong += differences_of_tied(wrapping, given)
    if wrapping in RIGL:
        wrong += differences_of_rigl(wrapping, 24 if THOROUGH else 8, 3)
    return wrong + differences_in_other_cases(wrapping)


@pytest.mark.whole
@pytest.mark.parametrize("wrapping", ["plain-1", "ddp-2", *wrappings.sampled(wrappings.ALL)])
def test_gradients_are_those_of_one_process(wrapping):
    assert_nothing_wrong_on(wrapping, all_differences)


def test_rigl_over_many_steps():
    assert_nothing_wrong_on("fsdp2-2", differences_of_rigl, 200 if THOROUGH else 24, 4)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("wrapping", "backend"),
    [("ddp-2", "eager"), ("tp-2", "eager"), ("fsdp2-2", "aot_eager"), ("fsdp2_root-2", "eager")],
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


def refused_by_rigl() -> list[str]:
    sharded = Case("fsdp2-2")
    texts, before = [], prune.get_masks(sharded.pairs)
    attempts = [
        lambda: dynamic.rigl_step(sharded.pairs, 0.3),  # gradients are masked
        lambda: dynamic.set_step(sharded.pairs, 1.5),
    ]

    def without_backward():
        with prune.dense_gradients(sharded.model):
            dynamic.rigl_step(sharded.pairs, 0.3)

    for attempt in (*attempts, without_backward):
        try:
            attempt()
            texts.append("nothing was raised")
        except (RuntimeError, ValueError) as error:
            texts.append(str(error))
    for mask, other in zip(before, prune.get_masks(sharded.pairs), strict=True):
        assert torch.equal(mask.to_local(), other.to_local())
    return texts


def test_rigl_and_set_refuse():
    for texts in run_ranks(refused_by_rigl, 2):
        assert "l1.weight: the gradients of its pruned elements are masked" in texts[0]
        assert "fraction=1.5" in texts[1] and "l1.weight has no gradient" in texts[2]
