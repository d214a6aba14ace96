"""A forward of a pruned model launches the kernels of the dense one, and a product per mask."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import distprune as prune
from distprune.testing import run_ranks
from helpers import wrappings
from helpers.models import Net, fill, target

SIZES = (8, 16, 16, 8)  # that no rank has to pad


class Kernels(TorchDispatchMode):
    """Counts the operations that run on elements: no views, and no memory that is only taken."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]
        is_view = any(argument.alias_info is not None for argument in func._schema.arguments)
        writes = func._schema.is_mutable
        if (writes or not is_view) and "empty" not in name and func.namespace == "aten":
            self.counts[name] += 1
        return result


def kernels_of_forward(wrapping: str, is_pruned: bool) -> dict[str, int]:
    model = wrappings.wrap(fill(Net(SIZES), "normal", "float32"), wrapping)
    if is_pruned:
        layers = [target(wrappings.unwrapped(model), f"l{i}.weight") for i in (1, 2, 3)]
        prune.global_unstructured(layers, prune.L1Unstructured, amount=0.5)
    x = torch.ones(4, 8)
    model(x).sum().backward()  # the first one sets wrappers up
    with Kernels() as kernels:
        model(x)
    return dict(kernels.counts)


@pytest.mark.parametrize("wrapping", ["plain-1", "ddp-2", "fsdp2-2", "tp-2", "fsdp2_tp-2x2"])
def test_a_product_per_mask_is_all_that_is_added(wrapping):
    size = wrappings.world_size(wrapping)
    dense = run_ranks(kernels_of_forward, size, wrapping, False)
    pruned = run_ranks(kernels_of_forward, size, wrapping, True)
    for of_dense, of_pruned in zip(dense, pruned, strict=True):
        added = Counter(of_pruned) - Counter(of_dense)
        assert added in ({"mul": 3}, {"masked_fill_": 3}, {})
