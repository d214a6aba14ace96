"""Scores of criteria that are linear in the gradient are those of one process, bit for bit.

Data are small integers (helpers.criteria_runs), so every sum is exact, and masks are compared from
end to end. The expected scores are written from the papers, on plain tensors.
"""

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import distprune as prune
from distprune.criteria import SNIP, Custom, Fisher, GradientMagnitude, Movement
from distprune.testing import run_ranks
from helpers import criteria_runs as runs
from helpers import reference, wrappings
from helpers.collective_traffic import Traffic
from helpers.comparisons import assert_nothing_wrong, wrong_masks

NUM_UNITS = 3


def custom(pairs):
    """The sum of (w * g)^2, and from it |w| * sum."""
    return Custom(
        pairs,
        lambda w, g, s: s + (w * g) ** 2,
        unit="global_batch",
        score=lambda w, s: w.abs() * s,
    )


def fisher(pairs):
    return Fisher(pairs, unit="global_batch")


CRITERIA = {"SNIP": SNIP, "Movement": Movement, "GradientMagnitude": GradientMagnitude}
CRITERIA |= {"Custom": custom}


class OneProcess:
    """Weights, masks and units of a single process that sees every batch whole."""

    def __init__(self, wrapping: str):
        self.wrapping = wrapping
        self.model = runs.integer_net(wrapping)
        self.indices = wrappings.local_indices(self.model, wrapping)
        self.batches = runs.batches(self.model, NUM_UNITS)
        self.masks: list[Tensor] | None = None
        self.units: list[list[tuple[Tensor, Tensor]]] = []  # (w, g) of each parameter

    def wrapped(self) -> nn.Module:
        """The same model under the wrapping."""
        return wrappings.wrap(copy.deepcopy(self.model), self.wrapping)

    def weights(self) -> list[Tensor]:
        return [self.model.get_parameter(name).detach().clone() for name in runs.WEIGHTS]

    def backward(self, number: int) -> None:
        """Gradients with respect to the masked weights, dense."""
        weights, masked = self.weights(), copy.deepcopy(self.model)
        for name, mask in zip(runs.WEIGHTS, self.masks or [], strict=bool(self.masks)):
            masked.get_parameter(name).data.mul_(mask)
        leaves = [masked.get_parameter(name) for name in runs.WEIGHTS]
        gradients = torch.autograd.grad(runs.loss(masked, *self.batches[number]), leaves)
        self.units.append(list(zip(weights, gradients, strict=True)))

    def scores(self, kind: str) -> dict[str, Tensor]:
        found: list[Tensor] = []
        for position, now in enumerate(self.weights()):
            units = [unit[position] for unit in self.units]
            total = sum(gradient for _, gradient in units)
            match kind:
                case "SNIP":  # arXiv 1810.02340, equation 5, of one batch with all examples
                    found.append((now * total).abs())
                case "Movement":  # arXiv 2005.07683, equation 3, with alpha = 1
                    found.append(-sum(weight * gradient for weight, gradient in units))
                case "GradientMagnitude":  # arXiv 1911.11134: |gradient of the loss|
                    found.append(total.abs())
                case "Fisher":
                    squares = sum(gradient**2 for _, gradient in units)
                    mean = squares / torch.tensor(float(len(units)))
                    found.append(mean * now.abs() * now.abs() / 2)
                case "Custom":
                    found.append(now.abs() * sum((w * g) ** 2 for w, g in units))
        return dict(zip(runs.WEIGHTS, found, strict=True))

    def prune(self, kind: str, amount: float) -> None:
        key = (lambda score: score + 0.0) if kind == "Movement" else abs
        self.masks = reference.prune(list(self.scores(kind).values()), amount, self.masks, key=key)


def differences(wrapping: str, kind: str) -> list[str]:
    """Units with other weights each, and after each of them dense gradients and a pruning."""
    one = OneProcess(wrapping)
    model = one.wrapped()
    pairs = runs.named_targets(model, runs.WEIGHTS)
    criterion, wrong = CRITERIA[kind](pairs), []
    for number, batch in enumerate(one.batches):
        one.backward(number)
        with prune.dense_gradients(pairs):
            runs.backward(model, batch, *wrappings.data_rank(wrapping))
            with Traffic() as traffic:
                criterion.update()
        if traffic.calls:
            wrong.append(f"update sent {traffic.calls}")
        with Traffic() as traffic:
            scores = criterion.scores()
        if traffic.num_bytes > 40:
            wrong.append(f"scores sent {traffic.num_bytes} bytes")
        wrong += runs.differing(scores, one.scores(kind), one.indices, f"unit {number}")
        one.prune(kind, 0.25)
        prune.global_unstructured(pairs, criterion.pruning_method, scores, amount=0.25)
        masks = dict(zip(runs.WEIGHTS, one.masks, strict=True))
        wrong += wrong_masks(model, masks, one.indices, f"unit {number}")
        model.zero_grad()
        # In place of the optimizer's step, because its weights would be no integers.
        one.model = runs.integer_net(wrapping, seed=10 + number)
        for name, mine in one.indices.items():
            part = wrappings.my_part(one.model.get_parameter(name).detach(), mine)
            wrappings.shard(model, name, one.indices).copy_(part)
    return wrong


@pytest.mark.parametrize("kind", CRITERIA)
@pytest.mark.parametrize("wrapping", wrappings.sampled(wrappings.ALL))
def test_scores_and_masks(wrapping, kind):
    size = wrappings.world_size(wrapping)
    assert_nothing_wrong(run_ranks(differences, size, wrapping, kind))


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


@pytest.mark.parametrize("wrapping", wrappings.sampled(wrappings.ALL))
def test_accumulation_and_no_sync(wrapping):
    size = wrappings.world_size(wrapping)
    assert_nothing_wrong(run_ranks(differences_when_accumulating, size, wrapping))


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


def differences_of_weighted_tokens(wrapping: str) -> list[str]:
    """Ranks with unequal numbers of rows weight the loss: the mean over all rows."""
    part, num_parts = wrappings.data_rank(wrapping)
    one = OneProcess(wrapping)
    model = one.wrapped()
    x, factors = one.batches[0]
    cuts = [0, *(1 << number for number in range(num_parts - 1)), len(x)]  # 1, 1, 2, ... rows
    rows = slice(cuts[part], cuts[part + 1])
    mean = (model(x[rows]) * factors[rows]).sum(dim=1).mean()  # of this rank's rows
    num_rows = cuts[part + 1] - cuts[part]
    (mean * num_rows * num_parts / len(x)).backward()
    criterion = SNIP(runs.named_targets(model, runs.WEIGHTS))
    criterion.update(weight=len(x))
    one.backward(0)
    wrong = []
    pairs = zip(criterion.scores().values(), one.scores("SNIP").items(), strict=True)
    for score, (name, whole) in pairs:
        mine = wrappings.my_part(whole, one.indices[name])
        if not torch.allclose(wrappings.local(score), mine, rtol=1e-6, atol=1e-4):
            wrong.append(f"{name}: {score} is not {mine}")
    return wrong


@pytest.mark.parametrize("wrapping", ["ddp-3", "fsdp1-3", "fsdp2-4", "hsdp-2x2", "fsdp2_tp-2x2"])
def test_unequal_token_counts(wrapping):
    size = wrappings.world_size(wrapping)
    assert_nothing_wrong(run_ranks(differences_of_weighted_tokens, size, wrapping))


def non_finite(wrapping: str, how: str) -> tuple[str, int, int, list[str]]:
    """A step whose gradient is infinite in one element, which only one rank of FSDP has."""
    one = OneProcess(wrapping)
    model = one.wrapped()
    criterion = SNIP(runs.named_targets(model, runs.WEIGHTS), non_finite=how)
    message = ""
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
    wrong = []
    if how == "skip":
        wrong = runs.differing(criterion.scores(), one.scores("SNIP"), one.indices)
    else:
        with pytest.raises(ValueError) as error:
            criterion.scores()
        message = str(error.value)
    return message, criterion.num_updates, criterion.num_skipped, wrong


@pytest.mark.parametrize("wrapping", ["plain-1", "ddp-2", "fsdp1-3", "fsdp2-3", "tp-2"])
def test_steps_that_are_not_finite(wrapping):
    size = wrappings.world_size(wrapping)
    for found in run_ranks(non_finite, size, wrapping, "skip"):
        assert found == ("", 2, 1, [])
    for message, num_updates, num_skipped, _ in run_ranks(non_finite, size, wrapping, "refuse"):
        assert "l2.weight has a score that is not finite, after 3 updates" in message
        assert (num_updates, num_skipped) == (3, 0)


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


def scaled(wrapping: str, how: str) -> tuple[list[str], int]:
    """A gradient scaler that halves its scale after an infinite loss, in the second of 4 steps."""
    one = OneProcess(wrapping)
    model = one.wrapped()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    criterion = SNIP(runs.named_targets(model, runs.WEIGHTS), non_finite="skip")
    part, num_parts = wrappings.data_rank(wrapping)
    for number in (0, None, 1, 2):
        x, factors = (tensor.chunk(num_parts)[part] for tensor in one.batches[number or 0])
        loss = runs.loss(model, x, factors) * num_parts
        scaler.scale(loss * (torch.inf if number is None else 1.0)).backward()
        if how == "weight":
            criterion.update(weight=1 / scaler.get_scale())
        scaler.unscale_(optimizer)
        if how == "unscale":
            criterion.update()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if number is not None:
            one.backward(number)
    assert scaler.get_scale() == 2.0**9
    wrong = runs.differing(criterion.scores(), one.scores("SNIP"), one.indices)
    return wrong, criterion.num_skipped


@pytest.mark.parametrize("how", ["unscale", "weight"])
@pytest.mark.parametrize("wrapping", ["plain-1", "ddp-2", "fsdp2-2"])
def test_gradient_scalers_and_clipping(wrapping, how):
    for wrong, num_skipped in run_ranks(scaled, wrappings.world_size(wrapping), wrapping, how):
        assert wrong == []
        assert num_skipped == 1


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


def differences_in_half_precision(wrapping: str) -> list[str]:
    """bf16 weights and gradients, fp32 sums: those of one process with bf16 gradients."""
    one = OneProcess(wrapping)
    one.indices = wrappings.local_indices(one.model.bfloat16(), wrapping)
    model = one.wrapped()
    criterion = SNIP(runs.named_targets(model, runs.WEIGHTS))
    total = dict.fromkeys(runs.WEIGHTS, 0.0)
    part, num_parts = wrappings.data_rank(wrapping)
    for x, factors in one.batches:
        rows = [(x[row : row + 1].bfloat16(), factors[row : row + 1]) for row in range(num_parts)]
        runs.backward(model, rows[part], 0, num_parts)
        criterion.update(weight=1 / 3)
        model.zero_grad()
        for name in runs.WEIGHTS:
            weight = one.model.get_parameter(name)
            of_ranks = [
                torch.autograd.grad(runs.loss(one.model, *row) * num_parts, weight)[0]
                for row in rows
            ]
            mean = (sum(gradient.float() for gradient in of_ranks) / num_parts).bfloat16()
            total[name] = total[name] + mean.double() / 3
    wrong = []
    for (name, gradient), score in zip(total.items(), criterion.scores().values(), strict=True):
        whole = (one.model.get_parameter(name).double() * gradient).abs().detach()
        mine, found = wrappings.my_part(whole, one.indices[name]), wrappings.local(score)
        if not torch.allclose(found.double(), mine, rtol=1e-6, atol=1e-7):
            wrong.append(f"{name}: {found} is not {mine}")
    return wrong


@pytest.mark.thorough
@pytest.mark.parametrize("wrapping", ["plain-1", "ddp-2", "fsdp1-2", "fsdp2-2"])
def test_half_precision(wrapping):
    size = wrappings.world_size(wrapping)
    assert_nothing_wrong(run_ranks(differences_in_half_precision, size, wrapping))


def differences_of_a_calibration(wrapping: str, kind: str) -> list[str]:
    """A loop without zero_grad, with a batch that fails in the middle."""
    one = OneProcess(wrapping)
    model = one.wrapped()
    pairs = runs.named_targets(model, runs.WEIGHTS)
    criterion = (CRITERIA | {"Fisher": fisher})[kind](pairs)
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


@pytest.mark.parametrize("kind", ["SNIP", "Fisher"])
@pytest.mark.parametrize("wrapping", wrappings.sampled(wrappings.ALL))
def test_calibration(wrapping, kind):
    size = wrappings.world_size(wrapping)
    assert_nothing_wrong(run_ranks(differences_of_a_calibration, size, wrapping, kind))
