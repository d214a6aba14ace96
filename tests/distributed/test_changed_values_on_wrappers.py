"""Values that change for a while, on every wrapper: in place, on all ranks or none."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import distprune as prune
from distprune._common.process_groups import world
from distprune.masks.values import changed_values, keep_copy, keep_signs
from distprune.testing import run_ranks
from helpers import reference, wrappings
from helpers.comparisons import assert_nothing_wrong_on, changes, snapshot
from helpers.models import Net, fqns, seeded, target


def changed(values):
    """A function of each element whose results are exact, so that all wrappers agree."""
    return values.abs() * 2 + 1


def write(number, values):
    values.copy_(changed(values))


def absolute(number, values):
    values.abs_()


class Case:
    """A wrapped model, and a dense copy of it on every rank."""

    def __init__(self, wrapping: str, pruned: bool) -> None:
        sizes = wrappings.runnable_sizes(wrapping)
        self.dense = seeded(Net(sizes))
        self.names = fqns(self.dense)
        self.indices = wrappings.local_indices(self.dense, wrapping)
        self.model = wrappings.wrap(seeded(Net(sizes)), wrapping)
        inner = wrappings.unwrapped(self.model)
        self.pairs = [target(inner, name) for name in self.names]
        self.keeps = {}
        if pruned:
            weights = [name for name in self.names if name.endswith("weight")]
            keeps = reference.prune([self.dense.get_parameter(w) for w in weights], 0.4)
            self.keeps = dict(zip(weights, keeps, strict=True))
            pairs = [target(inner, name) for name in weights]
            prune.global_unstructured(pairs, prune.L1Unstructured, amount=0.4)
        self.x = torch.randn(4, sizes[0], generator=torch.Generator().manual_seed(1))

    @torch.no_grad()
    def dense_output(self, change) -> torch.Tensor:
        state = {name: change(value) for name, value in self.dense.state_dict().items()}
        for name, keep in self.keeps.items():
            state[name] = state[name] * keep
        return torch.func.functional_call(self.dense, state, self.x)

    def wrong_output(self, when: str, change) -> list[str]:
        expected, output = self.dense_output(change), self.model(self.x)
        is_close = torch.allclose(output, expected, rtol=1e-5, atol=1e-5)
        return [] if is_close else [f"{when}: {output} instead of {expected}"]

    def wrong_shards(self, when: str, change) -> list[str]:
        wrong = []
        for name in self.names:
            held = wrappings.shard(self.model, name, self.indices)
            full = change(self.dense.get_parameter(name).detach())
            if not torch.equal(held, wrappings.my_part(full, self.indices[name])):
                wrong.append(f"{when}: {name} is {held}")
        return wrong


def noticed(before: dict[str, object], model: nn.Module) -> list[str]:
    """What changed. Not the names of attributes: FSDP1 and FSDP2 add some in the first forward."""
    return [key for key in changes(before, snapshot(model)) if not key.endswith("attributes")]


def same(values):
    return values


def differences(wrapping: str, pruned: bool, evaluated: bool) -> list[str]:
    case = Case(wrapping, pruned)
    wrong = []
    if evaluated:  # FSDP's root keeps its gathered copy
        with torch.no_grad():
            case.model(case.x)
    for change, write_values, keep in (
        (changed, write, keep_copy),
        (torch.abs, absolute, keep_signs),
    ):
        if not evaluated:
            case.model(case.x).sum().backward()  # frees what an evaluation has left
        before = snapshot(case.model) if not evaluated else None
        with changed_values(case.pairs, write_values, world(), keep=keep):
            if not evaluated:
                wrong += case.wrong_shards("inside", change)
            with torch.no_grad():
                wrong += case.wrong_output("inside", change)
            if not evaluated:
                case.model(case.x).square().sum().backward()
        if before is not None:
            wrong += noticed(before, case.model)
        wrong += case.wrong_shards("after", same)
        with torch.no_grad():
            wrong += case.wrong_output("after", same)
    return wrong


@pytest.mark.parametrize("evaluated", [False, True])
@pytest.mark.parametrize("pruned", [False, True])
@pytest.mark.parametrize("wrapping", wrappings.sampled(wrappings.TRAINED))
def test_forwards_inside_and_after(wrapping, pruned, evaluated):
    assert_nothing_wrong_on(wrapping, differences, pruned, evaluated)


def errors(wrapping: str, where: str) -> list[str]:
    """An error on the last rank; what is wrong afterwards."""
    case = Case(wrapping, pruned=True)
    last = dist.get_rank() == dist.get_world_size() - 1

    def fail(number, values):
        values.zero_()
        if last and number == 2:
            raise MemoryError("too large")

    match where:
        case "change":
            expected, text, change = MemoryError, "too large", fail
        case "block":
            expected, text, change = ValueError, "all ranks", write
        case "before":
            expected, text, change = RuntimeError, "was used by a forward", write
        case "after":
            expected, text, change = RuntimeError, "at the end of a block", write
    loss = case.model(case.x).sum() if where == "before" else None
    before = snapshot(case.model)
    wrong = [f"nothing raised, where {text!r} was expected"]
    try:
        with changed_values(case.pairs, change, world()):
            if where == "block":
                case.model(case.x)
                raise ValueError("all ranks")
            loss = case.model(case.x).sum()
    except expected as error:
        wrong = [] if text in str(error) else [str(error)]
    if where != "after":
        wrong += noticed(before, case.model)
    if where == "before":
        loss.backward()  # until then FSDP2's root keeps its gathered copy
    del loss
    wrong += case.wrong_shards("after the error", same)
    with torch.no_grad():
        wrong += case.wrong_output("after the error", same)
    return wrong


@pytest.mark.parametrize("where", ["change", "block", "before", "after"])
@pytest.mark.parametrize(
    "wrapping",
    ["plain-1", "ddp-2", "fsdp1-2", "fsdp1_flat-2", "fsdp2-2", "fsdp2_root-2", "hsdp-2x2", "tp-2"],
)
def test_errors_leave_the_values(wrapping, where):
    assert_nothing_wrong_on(wrapping, errors, where)


def different_lists() -> str:
    case = Case("fsdp2-2", pruned=False)
    pairs = case.pairs[: 2 + dist.get_rank()]
    try:
        with changed_values(pairs, write, world()):
            return "entered"
    except ValueError as error:
        return "; ".join([str(error), *case.wrong_shards("after", same)])


def test_ranks_that_differ_in_their_parameters():
    first, second = run_ranks(different_lists, 2)
    assert "called with different arguments" in first and first == second


def in_forward() -> list[str]:
    case, messages = Case("fsdp2-2", pruned=False), []

    def hook(module: nn.Module, inputs: object) -> None:
        try:
            with changed_values(case.pairs, write, world()):
                messages.append("entered")
        except RuntimeError as error:
            messages.append(str(error))

    wrappings.unwrapped(case.model).l2.register_forward_pre_hook(hook)
    case.model(case.x).sum().backward()
    return messages


def test_inside_a_forward():
    for messages in run_ranks(in_forward, 2):
        assert len(messages) == 1 and "is running, which has gathered it" in messages[0]
