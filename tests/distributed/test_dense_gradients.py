"""Inside prune.dense_gradients, .grad is that of the masked weights, at pruned places too.

Whole steps are plans of helpers/random_sequences. Where data are small integers all is exact; so
RigL, which needs such gradients, ends on any wrapping with the masks and weights of one process.
"""

import contextlib

import pytest
import torch
from torch import Tensor, nn

import distprune as prune
from distprune import dynamic
from distprune.testing import run_ranks
from helpers import reference, wrappings
from helpers.comparisons import assert_nothing_wrong_on, raised, wrong_masks
from helpers.micro_batches import WEIGHTS, Wrapped, loss_of, micro_batch
from helpers.random_sequences.plans import TIED_KINDS, Plan, do, global_l1
from helpers.random_sequences.run import assert_nothing_differs
from helpers.sampling import THOROUGH

DENSE = do("train", seed=1, dense=True)
ACCUMULATED = do("train", seed=2, dense=True, micro_batches=2)
PRUNE, TRAIN = global_l1(0.5, WEIGHTS), do("train", seed=3)
OPTIONS = {
    "plain-1": [{"recompute": "inside"}, {"recompute": "wrapper"}],
    "ddp-2": [{"recompute": "wrapper"}],
    "fsdp1-2": [{"recompute": "inside"}, {"recompute": "wrapper"}],
    "fsdp2-3": [{"recompute": "inside"}, {"recompute": "wrapper"}],
    "tp-3": [{"recompute": "inside"}],
}


def plan(wrapping: str, operations: list, family: str = "net", **options) -> Plan:
    sizes = wrappings.runnable_sizes(wrapping)
    made = family, sizes, "float32", "normal", wrapping, "sgd"
    return Plan(0, *made, tuple(operations), **options)


@pytest.mark.whole
@pytest.mark.parametrize("wrapping", ["plain-1", "ddp-2", *wrappings.sampled(wrappings.ALL)])
def test_gradients_are_those_of_one_process(wrapping):
    wrapped = do("wrap_pruned", wrapping=wrapping)
    plans = [plan(wrapping, [PRUNE, DENSE, TRAIN, ACCUMULATED, TRAIN])]
    plans += [plan(wrapping, [PRUNE, wrapped, DENSE])] * (wrapping in ("ddp-2", "fsdp1-2"))
    plans += [plan(wrapping, [PRUNE, DENSE], **each) for each in OPTIONS.get(wrapping, ())]
    if wrappings.kind_of(wrapping) in TIED_KINDS:
        tied = global_l1(20, ["embedding.weight", "hidden.weight"])
        plans.append(plan(wrapping, [tied, DENSE, TRAIN], "tied"))
    assert_nothing_differs(plans)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("wrapping", "compiler"),
    [("ddp-2", "eager"), ("tp-2", "eager"), ("fsdp2-2", "aot_eager"), ("fsdp2_root-2", "eager")],
)
def test_compiled(wrapping, compiler):
    operations = [PRUNE, TRAIN, DENSE, TRAIN, DENSE]  # compiled before the context
    assert_nothing_differs([plan(wrapping, operations, compiler=compiler)])


class Case(Wrapped):
    """A pruned model of small integers."""

    def __init__(self, wrapping: str, data: str = "integer float32"):
        super().__init__(wrapping, data, are_replicas=True)
        generator = torch.Generator().manual_seed(5)
        self.masks = {}
        for pair in self.matrices:
            weight = self.dense.get_parameter(pair.fqn)
            self.masks[pair.fqn] = torch.rand(weight.shape, generator=generator) < 0.6
            prune.custom_from_mask(*pair, self.masks[pair.fqn])
            weight.data.mul_(self.masks[pair.fqn])

    def backward(self, *numbers: int, sync: bool = True) -> None:
        for number in numbers:
            with wrappings.synchronised(self.model, sync):
                self.step(number)

    def expected(self, *numbers: int) -> dict[str, Tensor]:
        """Dense gradients of the sum of some batches, with respect to the masked weights."""
        steps = self.steps(max(numbers) + 1)
        return {name: sum(steps[number][1][name] for number in numbers) for name in WEIGHTS}

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


def differences_of_contexts(wrapping: str) -> list[str]:
    case = Case(wrapping)
    dense = case.expected(0)
    assert all((dense[name] * ~case.masks[name]).any() for name in WEIGHTS)
    with prune.dense_gradients(case.model):
        with prune.dense_gradients(case.matrices[:1]):
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
        loss = case.loss(0)
    (loss * case.num_ranks).backward()
    wrong += case.differences(case.masked(dense), "backward after the context")

    case.model.zero_grad()
    with prune.dense_gradients(case.matrices[:1]):
        case.backward(0)
        expected = {**case.masked(dense), WEIGHTS[0]: dense[WEIGHTS[0]]}
        wrong += case.differences(expected, "one of the parameters")
    with prune.dense_gradients([]):
        pass

    case.model.zero_grad()
    with prune.dense_gradients(case.matrices):
        case.backward(0, sync=False)
    case.backward(1)
    return wrong + case.differences(case.masked(case.expected(0, 1)), "reduced after the context")


@pytest.mark.parametrize("wrapping", wrappings.sampled(wrappings.ALL))
def test_contexts_inside_of_each_other_and_left_early(wrapping):
    if wrapping == "ddp-3":
        pytest.skip("a third of sums that DDP has averaged already is no integer")
    assert_nothing_wrong_on(wrapping, differences_of_contexts)


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

    def gradients(self, batches: list) -> dict[str, Tensor]:
        for name, p in self.dense.named_parameters():
            p.data.copy_(self.weights[name] * self.masks.get(name, 1))
        parameters = dict(self.dense.named_parameters())
        loss = sum(loss_of(self.dense, batch) for batch in batches)
        found = torch.autograd.grad(loss, list(parameters.values()))
        return dict(zip(parameters, found, strict=True))

    def step(self, batches: list) -> None:
        for name, gradient in self.gradients(batches).items():
            self.momenta[name] += (gradient * self.masks.get(name, 1)).sign()
            self.weights[name] -= self.momenta[name].sign()

    def update(self, batches: list, fraction: float) -> None:
        gradients = self.gradients(batches)
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
    sharded = Case(wrapping, "integer float64")
    optimizer = Signs(sharded.model.parameters())
    single = OneProcess(sharded.dense, dict(sharded.masks))
    wrong, num_grown = [], 0
    for step in range(num_steps):
        batches = [
            micro_batch(sharded.dense, sharded.data, rank, step % 7)
            for rank in range(sharded.num_ranks)
        ]
        if step % interval:
            sharded.backward(step % 7)
            optimizer.step()
            single.step(batches)
        else:
            with prune.dense_gradients(sharded.model):
                sharded.backward(step % 7)
                fraction = dynamic.cosine_fraction(step, num_steps, first=0.5)
                report = dynamic.rigl_step(sharded.matrices, fraction, optimizer=optimizer)
            num_grown += report.num_grown
            single.update(batches, fraction)
            wrong += wrong_masks(sharded.model, single.masks, sharded.indices, f"step {step}")
        optimizer.zero_grad()
        if wrong:
            return wrong
    for name, whole in single.weights.items():
        indices = sharded.indices[name]
        keep = wrappings.my_part(single.masks.get(name, torch.ones_like(whole)), indices)
        held = wrappings.shard(sharded.model, name, sharded.indices).view(keep.shape) * keep
        if not torch.equal(held, wrappings.my_part(whole, indices) * keep):
            wrong.append(f"{name}: {held} is not {whole}")
    if not prune.verify(sharded.model).ok or num_grown < max(1, num_steps // 10):
        wrong.append(f"{num_grown} elements have grown")
    return wrong


RIGL = ["plain-1", "ddp-2", "fsdp1-2", "fsdp1_root-3", "fsdp1_flat-2", "hsdp-2x2", "tp-3",
        "fsdp2_tp-2x2"]  # fmt: skip


@pytest.mark.whole
@pytest.mark.parametrize("wrapping", RIGL)
def test_rigl(wrapping):
    assert_nothing_wrong_on(wrapping, differences_of_rigl, 24 if THOROUGH else 8, 3)


def test_rigl_over_many_steps():
    assert_nothing_wrong_on("fsdp2-2", differences_of_rigl, 200 if THOROUGH else 24, 4)


def refused_when_unreduced(wrapping: str) -> str:
    case = Case(wrapping)
    case.backward(0, sync=False)
    text = raised(prune.dense_gradients(case.model).__enter__)
    case.backward(1)
    assert not case.differences(case.masked(case.expected(0, 1)), "nothing has changed")
    return text


@pytest.mark.parametrize("wrapping", ["fsdp1-2", "fsdp1_flat-2", "fsdp2-2", "hsdp-2x2"])
def test_gradients_that_were_not_reduced_before_are_refused(wrapping):
    for text in run_ranks(refused_when_unreduced, wrappings.world_size(wrapping), wrapping):
        assert text.startswith("RuntimeError: ")
        assert "Linear.weight: a backward without gradient synchronisation" in text


def refused_by_rigl() -> None:
    case = Case("fsdp2-2")
    pairs, before = case.matrices, prune.get_masks(case.matrices)
    with pytest.raises(RuntimeError, match="gradients of its pruned elements are masked"):
        dynamic.rigl_step(pairs, 0.3)
    with pytest.raises(ValueError, match=r"fraction=1\.5"):
        dynamic.set_step(pairs, 1.5)
    with (
        pytest.raises(RuntimeError, match=r"l1\.weight has no gradient"),
        prune.dense_gradients(case.model),
    ):
        dynamic.rigl_step(pairs, 0.3)
    for mask, other in zip(before, prune.get_masks(pairs), strict=True):
        assert torch.equal(mask.to_local(), other.to_local())


class Equal(nn.Linear):
    """A layer that is equal to all others of its kind."""

    def __eq__(self, other):
        return isinstance(other, Equal)

    def __hash__(self):
        return 0


def test_modules_that_are_equal_are_not_the_same():
    layers = [Equal(4, 4, bias=False) for _ in range(2)]
    pairs = [(layer, "weight") for layer in layers]
    prune.global_unstructured(pairs, prune.L1Unstructured, amount=0.5)
    with dynamic.dense_gradients(pairs):
        layers[1](layers[0](torch.ones(1, 4))).sum().backward()
        assert all(layer.weight_orig.grad[layer.weight_mask == 0].any() for layer in layers)


def test_rigl_and_set_refuse():
    run_ranks(refused_by_rigl, 2)
