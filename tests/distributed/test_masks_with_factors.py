"""Masks with other values than 0 and 1: multiplied in on plain modules, refused on shards."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.utils.prune as torch_prune
from torch import nn

import distprune as prune
from distprune.base.naming import unwrap
from helpers import wrappings
from helpers.comparisons import assert_nothing_wrong_on, other_errors, outcome
from helpers.models import EVEN_HIDDEN, Net, fill

SHARDED = ["fsdp2-2", "fsdp2-3", "fsdp1-2", "hsdp-2x2", "tp-2", "fsdp2_tp-2x2"]


def factors(shape, value: float = 0.5) -> torch.Tensor:
    mask = torch.ones(shape)
    mask[0, 0], mask[-1, -1] = 0, value
    return mask


class Damped(prune.L1Unstructured):
    """What is pruned keeps a tenth."""

    def apply_mask(self, module: nn.Module) -> torch.Tensor:
        mask, original = (getattr(module, self._tensor_name + end) for end in ("_mask", "_orig"))
        return original * (mask + 0.1 * (1 - mask))


def refused(wrapping: str) -> list[str]:
    """A value of the mask of all ranks, or of one alone; and a method's own apply_mask."""
    model = wrappings.wrap(fill(Net(EVEN_HIDDEN), "normal", "float32"), wrapping)
    layer, rank = unwrap(wrappings.unwrapped(model).l2), dist.get_rank()
    rows = []
    for value, only_on in ((0.5, None), (-1.0, None), (2.0, None), (0.5, 0), (0.5, 1)):
        mask = factors((5, 12), value if only_on in (None, rank) else 0)
        call = partial(prune.custom_from_mask, layer, "weight", mask)
        rows.append((call, "ValueError", rf"Linear\.weight(.|\n)*{value:g}(.|\n)*0 and 1"))
    call = partial(Damped.apply, layer, "weight", 0.5)
    rows.append((call, "NotImplementedError", "Damped has an apply_mask"))
    return [
        text
        for call, kind, pattern in rows
        for text in other_errors([outcome(model, call)], kind, pattern)
    ]


@pytest.mark.whole
@pytest.mark.parametrize("wrapping", SHARDED)
def test_refused_on_shards(wrapping):
    assert_nothing_wrong_on(wrapping, refused)


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
