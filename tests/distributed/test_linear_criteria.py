"""Criteria that read averaged gradients, in training loops: the scores are those of one process.

Data are small integers (helpers.criteria_runs), so every sum is exact. test_criteria_matrix.py has
each criterion, with its masks and its traffic.
"""

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import distprune as prune
from distprune.criteria import SNIP, Fisher
from distprune.testing import run_ranks
from helpers import criteria_runs as runs
from helpers import criterion_references as references
from helpers import wrappings
from helpers.comparisons import assert_nothing_wrong_on

NUM_UNITS = 3


def fisher(pairs):
    return Fisher(pairs, unit="global_batch")


CRITERIA = {"SNIP": SNIP, "Fisher": fisher}


class OneProcess:
    """Weights and units of a single process that sees every batch whole."""

    def __init__(self, wrapping: str):
        self.wrapping = wrapping
        self.model = runs.integer_net(wrapping)
        self.indices = wrappings.local_indices(self.model, wrapping)
        self.batches = runs.batches(self.model, NUM_UNITS)
        self.units: list[dict[str, Tensor]] = []  # the gradient of each parameter

    def wrapped(self) -> nn.Module:
        """The same model under the wrapping."""
        return wrappings.wrap(copy.deepcopy(self.model), self.wrapping)

    def backward(self, number: int) -> None:
        leaves = [self.model.get_parameter(name) for name in runs.WEIGHTS]
        gradients = torch.autograd.grad(runs.loss(self.model, *self.batches[number]), leaves)
        self.units.append(dict(zip(runs.WEIGHTS, gradients, strict=True)))

    def scores(self, kind: str) -> dict[str, Tensor]:
        weights = {name: self.model.get_parameter(name).detach() for name in runs.WEIGHTS}
        if kind == "SNIP":
            return references.snip(weights, self.units)
        return references.fisher(weights, self.units, [1.0] * len(self.units))


def differences_when_accumulating(wrapping: str) -> list[str]:
    """One step of three micro-batches, the first two without synchronisation."""
    one = OneProcess(wrapping)
    model = one.wrapped()
    criterion = SNIP(runs.named_targets(model, runs.WEIGHTS))
    wrong = []
    with criterion.calibrating(), criterion.batch():
        for number, batch in enumerate(one.batches):
            is_last = number == NUM_UNITS - 1
            with runs.synchronised(model, is_last):
                runs.backward(model, batch, *wrappings.data_rank(wrapping))
            one.backward(number)
            if not is_last and runs.knows_unreduced(model):
                with pytest.raises(RuntimeError, match="without gradient synchronisation"):
                    criterion.update()
    wrong += [] if criterion.num_updates == 1 else [f"{criterion.num_updates} updates"]
    return wrong + runs.differing(criterion.scores(), one.scores("SNIP"), one.indices)


def read_before_the_ranks_agree() -> str:
    """DDP leaves local gradients after no_sync, which look like averaged ones."""
    one = OneProcess("ddp-2")
    model = one.wrapped()
    pairs = runs.named_targets(model, runs.WEIGHTS)
    criterion = SNIP(pairs)
    with runs.synchronised(model, False):
        runs.backward(model, one.batches[0], *wrappings.data_rank("ddp-2"))
    criterion.update()
    with pytest.raises(ValueError) as error:
        prune.global_unstructured(pairs, SNIP.pruning_method, criterion.scores(), amount=0.5)
    assert not prune.is_pruned(model)
    return str(error.value)


def test_gradients_of_ddp_that_are_not_averaged_are_refused_at_the_pruning():
    for text in run_ranks(read_before_the_ranks_agree, 2):
        assert "l1.weight" in text
        assert "replica" in text


def differences_when_not_finite(wrapping: str) -> list[str]:
    """A step whose gradient is infinite in one element, which only one rank of FSDP has."""
    wrong = []
    for how, counts in (("skip", (2, 1)), ("refuse", (3, 0))):
        one = OneProcess(wrapping)
        model = one.wrapped()
        criterion = SNIP(runs.named_targets(model, runs.WEIGHTS), non_finite=how)
        for number, batch in enumerate(one.batches):
            runs.backward(model, batch, *wrappings.data_rank(wrapping))
            if number == 1:
                gradient = wrappings.gradient(model, "l2.weight", one.indices)
                at = (one.indices["l2.weight"] == 7).nonzero()
                if len(at):
                    gradient[tuple(at[0])] = torch.inf
            else:
                one.backward(number)
            criterion.update()
            model.zero_grad()
        if how == "skip":
            wrong += runs.differing(criterion.scores(), one.scores("SNIP"), one.indices)
        else:
            text = "l2.weight has a score that is not finite, after 3 updates"
            with pytest.raises(ValueError, match=text):
                criterion.scores()
        if (criterion.num_updates, criterion.num_skipped) != counts:
            wrong.append(f"{how}: {criterion.num_updates}, {criterion.num_skipped} skipped")
    return wrong


def different_numbers_of_updates() -> str:
    model = wrappings.wrap(runs.integer_net("plain-1"), "plain-2")
    criterion = SNIP(runs.named_targets(model, runs.WEIGHTS))
    runs.backward(model, runs.batches(model, 1)[0], 0, 1)
    for _ in range(dist.get_rank() + 1):
        criterion.update()
    with pytest.raises(ValueError) as error:
        criterion.scores()
    return str(error.value)


def test_ranks_with_different_numbers_of_updates():
    for text in run_ranks(different_numbers_of_updates, 2):
        assert "number of updates: 1" in text
        assert "number of updates: 2" in text


def unreduced(kind: str) -> str:
    """Gradients that FSDP2 keeps apart until a later backward reduces them."""
    wrapping = "hsdp-2x2" if kind == "no all-reduce" else "fsdp2-2"
    model = runs.integer_net(wrapping)
    batch = runs.batches(model, 1)[0]
    options = {}
    if kind == "mixed precision":  # kept in the dtype of the reduction
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model = wrappings.wrap(model, wrapping, **options)
    criterion = SNIP(runs.named_targets(model, runs.WEIGHTS))
    if kind == "no all-reduce":  # summed over the shards, and not yet over the replicas
        model.set_requires_all_reduce(False)
    else:
        model.set_requires_gradient_sync(False)
    runs.backward(model, batch, *wrappings.data_rank(wrapping))
    with pytest.raises(RuntimeError) as error:
        criterion.update()
    return str(error.value)


@pytest.mark.parametrize("kind", ["no all-reduce", "no reduction", "mixed precision"])
def test_gradients_that_fsdp2_has_not_reduced_are_refused(kind):
    for text in run_ranks(unreduced, 4 if kind == "no all-reduce" else 2, kind):
        assert text.startswith("l1.weight: a backward without gradient synchronisation")


def differences_of_a_calibration(wrapping: str, kind: str) -> list[str]:
    """A loop without zero_grad, with a batch that fails in the middle."""
    one = OneProcess(wrapping)
    model = one.wrapped()
    pairs = runs.named_targets(model, runs.WEIGHTS)
    criterion = CRITERIA[kind](pairs)
    part = wrappings.data_rank(wrapping)
    with criterion.calibrating():
        for number, batch in enumerate(one.batches):
            with criterion.batch(weight=1.0):
                runs.backward(model, batch, *part)
            one.backward(number)
            with contextlib.suppress(KeyError), criterion.batch():
                runs.backward(model, batch, *part)
                raise KeyError
    wrong = runs.differing(criterion.scores(), one.scores(kind), one.indices)
    for refused in ("a gradient is left", "inside of itself"):
        with contextlib.ExitStack() as stack:
            if refused == "inside of itself":
                model.zero_grad()
                stack.enter_context(criterion.calibrating())
            else:
                with criterion.batch():  # the optimizer needs these gradients
                    runs.backward(model, one.batches[0], *part)
            message = "inside of calibrating" if "itself" in refused else "has a gradient already"
            with pytest.raises(RuntimeError, match=message), criterion.calibrating():
                pass
    return wrong


NOT_FINITE = ["plain-2", "ddp-3", "fsdp1-2", "fsdp2-3", "tp-3"]


def all_differences(wrapping: str) -> list[str]:
    wrong = differences_when_accumulating(wrapping)
    for kind in CRITERIA:
        wrong += differences_of_a_calibration(wrapping, kind)
    return wrong + (differences_when_not_finite(wrapping) if wrapping in NOT_FINITE else [])


@pytest.mark.whole
@pytest.mark.parametrize("wrapping", wrappings.sampled(wrappings.ALL))
def test_scores_are_those_of_one_process(wrapping):
    assert_nothing_wrong_on(wrapping, all_differences)


def test_global_mask_refuses_signed_scores_without_the_sign():
    layer = nn.Linear(3, 2)
    movement = prune.criteria.Movement([(layer, "weight")])
    layer.weight.grad = torch.ones(2, 3)
    movement.update()
    pairs = movement.parameters
    with pytest.raises(TypeError, match="expected signed=True"):
        prune.global_mask(pairs, 3, scores=movement.scores())
    chosen = prune.global_mask(pairs, 3, scores=movement.scores(), signed=True)
    (mask,) = chosen.masks
    lowest = (-layer.weight.detach()).flatten().sort().indices[:3]
    assert not mask.flatten()[lowest].any()
    assert int(mask.sum()) == 3
