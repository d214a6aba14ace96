"""Masks with other values than 0 and 1: multiplied in on plain modules, refused on shards."""

import re

import pytest
import torch
import torch.distributed as dist
import torch.nn.utils.prune as torch_prune
from torch import nn

import distprune as prune
from distprune.base.naming import unwrap
from distprune.testing import run_ranks
from helpers import wrappings
from helpers.comparisons import assert_nothing_wrong, assert_nothing_wrong_on, changes, snapshot
from helpers.models import EVEN_HIDDEN, Net, fill

SHARDED = ["fsdp2-2", "fsdp2-3", "fsdp1-2", "hsdp-2x2", "tp-2", "fsdp2_tp-2x2"]


def factors(shape, value: float = 0.5) -> torch.Tensor:
    mask = torch.ones(shape)
    mask[0, 0], mask[-1, -1] = 0, value
    return mask


def refused(wrapping: str, value: float, only_on: int | None) -> list[str]:
    model = wrappings.wrap(fill(Net(EVEN_HIDDEN), "normal", "float32"), wrapping)
    layer = unwrap(wrappings.unwrapped(model).l2)
    mask = factors((5, 12), value if only_on in (None, dist.get_rank()) else 0)
    before = snapshot(model)
    try:
        prune.custom_from_mask(layer, "weight", mask)
    except ValueError as error:
        text = rf"Linear\.weight(.|\n)*{value:g}(.|\n)*0 and 1"
        return changes(before, snapshot(model)) + [str(error)] * (not re.search(text, str(error)))
    return ["nothing was raised"]


@pytest.mark.parametrize("value", [0.5, -1.0, 2.0])
@pytest.mark.parametrize("wrapping", SHARDED)
def test_refused_on_shards(wrapping, value):
    assert_nothing_wrong_on(wrapping, refused, value, None)


@pytest.mark.parametrize("only_on", [0, 1])
def test_refused_by_one_rank(only_on):
    assert_nothing_wrong(run_ranks(refused, 2, "fsdp2-2", 0.5, only_on))


def as_in_torch(wrapping: str) -> list[str]:
    mine, of_torch = (fill(Net(), "normal", "float32") for _ in range(2))
    prune.custom_from_mask(mine.l2, "weight", factors((5, 10)))
    torch_prune.custom_from_mask(of_torch.l2, "weight", factors((5, 10)))
    model = wrappings.wrap(mine, wrapping)
    x = torch.ones(2, 6)
    wrong = [] if torch.equal(model(x), of_torch(x)) else ["other outputs"]
    prune.remove(mine.l2, "weight")
    torch_prune.remove(of_torch.l2, "weight")
    return wrong + ([] if torch.equal(model(x), of_torch(x)) else ["other outputs after remove"])


@pytest.mark.parametrize("wrapping", ["plain-1", "ddp-2"])
def test_multiplied_on_whole_parameters(wrapping):
    assert_nothing_wrong_on(wrapping, as_in_torch)


class Damped(prune.L1Unstructured):
    """What is pruned keeps a tenth."""

    def apply_mask(self, module: nn.Module) -> torch.Tensor:
        mask, original = (getattr(module, self._tensor_name + end) for end in ("_mask", "_orig"))
        return original * (mask + 0.1 * (1 - mask))


def damped() -> list[str]:
    model = wrappings.wrap(fill(Net(EVEN_HIDDEN), "normal", "float32"), "fsdp2-2")
    before = snapshot(model)
    try:
        Damped.apply(unwrap(wrappings.unwrapped(model).l2), "weight", 0.5)
    except NotImplementedError as error:
        wrong = changes(before, snapshot(model))
        return wrong + [str(error)] * ("Damped has an apply_mask" not in str(error))
    return ["nothing was raised"]


def test_an_apply_mask_of_its_own_is_refused_on_shards():
    assert_nothing_wrong(run_ranks(damped, 2))
