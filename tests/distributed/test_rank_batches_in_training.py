"""Gradients of rank batches do not see what a training loop does; global batches are its steps."""

import contextlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecision, MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

from distprune.criteria import Taylor
from helpers.comparisons import assert_nothing_wrong_on
from helpers.micro_batches import Wrapped, num_data_ranks, num_tokens
from helpers.models import fqns

NUM_BATCHES = 3
FSDP2 = ["fsdp2-1", "fsdp2-3", "hsdp-2x2", "fsdp2_root-2", "replicate-2"]


def backward(model: nn.Module, loss: Tensor, number: int) -> None:
    loss.backward()


def clip_and_zero(model: nn.Module, loss: Tensor, number: int) -> None:
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    model.zero_grad(set_to_none=number == 0)


def change_weights(model: nn.Module, loss: Tensor, number: int) -> None:
    """A step that leaves the weights as they are, so that one process is easy to compare with."""
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.0).step()
    model.zero_grad()


def accumulate(model: nn.Module, loss: Tensor, number: int) -> None:
    """Only the last backward synchronises."""
    is_last = number == NUM_BATCHES - 1
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(is_last)
    without = model.no_sync() if hasattr(model, "no_sync") and not is_last else None
    with without or contextlib.nullcontext():
        loss.backward()


def divide_by_other_factors(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(8.0)
            module.set_force_sum_reduction_for_comms(True)


def forward_and_backward(model: nn.Module) -> None:
    """Let the wrapper make what it makes in a first step."""
    dtype = next(model.parameters()).dtype
    model(torch.ones(2, 6, dtype=dtype)).sum().backward()
    model.zero_grad()


def differences(
    wrapping: str,
    *,
    step: Callable[[nn.Module, Tensor, int], None] = backward,
    prepare: Callable[[nn.Module], None] | None = None,
    data: str = "float32",
    run_in: torch.dtype | None = None,
    rounded_to: torch.dtype | None = None,
    loss_scale: float = 1.0,
    power: int = 2,
    **options,
) -> list[str]:
    """Scores after NUM_BATCHES micro-batches, beside those of one process.

    Args:
        step: what is done with the loss of a micro-batch.
        prepare: what is done to the wrapped model first.
        run_in: the dtype in which the wrapper runs forward and backward.
        rounded_to: the dtype of gradients, where it is another one.
        loss_scale: of the loss.
        options: for the wrapper.
    """
    wrapped = Wrapped(wrapping, data, **options)
    if prepare:
        prepare(wrapped.model)
    criterion = Taylor(wrapped.pairs, unit="rank_batch", power=power)
    with criterion.calibrating():
        for number in range(NUM_BATCHES):
            weight = num_tokens(wrapped.rank, number)
            with criterion.batch(weight=weight, loss_scale=loss_scale):
                step(wrapped.model, wrapped.loss(number) * loss_scale, number)
    units = wrapped.units(NUM_BATCHES, run_in)
    units = [(n, {name: g.to(rounded_to) for name, g in all_g.items()}) for n, all_g in units]
    return wrapped.wrong(criterion, units, power, 1.0)


def check(wrapping: str, **options) -> None:
    assert_nothing_wrong_on(wrapping, differences, **options)


@pytest.mark.parametrize("wrapping", ["ddp-2", "fsdp1-2", "fsdp1_flat-2", *FSDP2])
def test_backward_passes_that_do_not_synchronise(wrapping):
    check(wrapping, step=accumulate)


@pytest.mark.parametrize("wrapping", ["ddp-2", "fsdp1_root-3", "fsdp2-3", "hsdp-2x2"])
@pytest.mark.parametrize("step", [clip_and_zero, change_weights])
def test_steps_between_batches(wrapping, step):
    check(wrapping, step=step)


@pytest.mark.parametrize("wrapping", FSDP2)
def test_a_divisor_and_a_reduction_of_the_users(wrapping):
    check(wrapping, prepare=divide_by_other_factors)


@pytest.mark.parametrize("wrapping", ["fsdp2-2", "hsdp-2x2", "fsdp1-2"])
def test_half_precision_that_the_wrapper_divides_before_it_reduces(wrapping):
    """FSDP divides gradients in fp16 by about the square root of the ranks before the sum."""
    check(wrapping, data="float16")


@pytest.mark.parametrize("wrapping", ["fsdp1-3", "fsdp1_hybrid-2x2", "fsdp2-2"])
def test_a_criterion_that_begins_after_a_first_step(wrapping):
    check(wrapping, prepare=forward_and_backward)


@pytest.mark.parametrize("wrapping", ["fsdp2-1", "fsdp2-3", "hsdp-2x2"])
@pytest.mark.parametrize("reduce", [torch.float32, torch.bfloat16, None])
def test_mixed_precision_of_fsdp2(wrapping, reduce):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce)
    check(wrapping, run_in=torch.bfloat16, mp_policy=policy)


@pytest.mark.parametrize("wrapping", ["fsdp2-1", "fsdp2-3"])
def test_gradients_that_fsdp2_reduces_in_low_precision(wrapping):
    """They are not rounded here; but torch 2.15 lets autograd round them before any hook."""
    is_rounded = hasattr(FSDPParam, "unsharded_grad_dtype")
    policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    check(wrapping, mp_policy=policy, rounded_to=torch.bfloat16 if is_rounded else None)


@pytest.mark.parametrize("wrapping", ["fsdp1-3", "fsdp1_flat-2"])
def test_mixed_precision_of_fsdp1(wrapping):
    policy = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    check(wrapping, run_in=torch.bfloat16, mixed_precision=policy)


@pytest.mark.parametrize("power", [1, 2])
@pytest.mark.parametrize("wrapping", ["ddp-2", "fsdp1-2", "fsdp2-2"])
def test_a_loss_scale_is_divided_out(wrapping, power):
    check(wrapping, loss_scale=1024.0, power=power)


STEP_WEIGHTS, STEP_BATCHES = [3.0, 1.0], 2


def global_differences(wrapping: str, power: int, loss_scale: float) -> list[str]:
    """Steps of several micro-batches each; gradients are averaged over the ranks by the wrapper."""
    wrapped = Wrapped(wrapping, "integer float32")
    criterion = Taylor(wrapped.pairs, unit="global_batch", power=power)
    size = num_data_ranks(wrapping)
    with criterion.calibrating():
        for step in range(len(STEP_WEIGHTS)):
            with criterion.batch(weight=STEP_WEIGHTS[step], loss_scale=loss_scale):
                for number in range(STEP_BATCHES):
                    loss = wrapped.loss(STEP_BATCHES * step + number)
                    # Times the ranks: the average is then a sum of integers.
                    (loss * size * loss_scale).backward()
            wrapped.model.zero_grad()
    units = wrapped.units(len(STEP_WEIGHTS) * STEP_BATCHES)
    steps = []
    for step, weight in enumerate(STEP_WEIGHTS):
        chosen = [
            gradients
            for number, (_, gradients) in enumerate(units)
            if number % (len(STEP_WEIGHTS) * STEP_BATCHES) // STEP_BATCHES == step
        ]
        names = fqns(wrapped.dense)
        steps.append((weight, {name: sum(g[name] for g in chosen) for name in names}))
    return wrapped.wrong(criterion, steps, power, 1.0)


@pytest.mark.parametrize(
    ("wrapping", "power", "loss_scale"),
    [
        ("ddp-2", 1, 256.0), ("ddp-2", 2, 256.0), ("fsdp1-2", 2, 1.0), ("fsdp2_dim1-3", 2, 1.0),
        ("hsdp-2x2", 1, 1.0), ("fsdp2_tp-2x2", 2, 1.0),
    ],
)  # fmt: skip
def test_global_batches_of_several_backwards(wrapping, power, loss_scale):
    assert_nothing_wrong_on(wrapping, global_differences, power, loss_scale)
