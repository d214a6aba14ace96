"""StartingValues: kept, recognised, restored and drawn anew, alike on every wrapper."""

import pytest
import torch

import distprune as prune
from distprune.api.starting_values import StartingValues
from distprune.testing import run_ranks
from helpers.models import Net, fqns
from helpers.wrappings import (
    ALL,
    local_indices,
    my_part,
    runnable_sizes,
    sampled,
    shard,
    world_size,
    wrap,
)


def new_model(wrapping):
    torch.manual_seed(0)
    return Net(runnable_sizes(wrapping))


def everything(model):
    return prune.select(model, "*", names=["weight", "bias"])


def keep_and_restore(wrapping: str) -> int:
    whole = {name: p.detach().clone() for name, p in new_model(wrapping).named_parameters()}
    indices = local_indices(new_model(wrapping), wrapping)
    model = wrap(new_model(wrapping), wrapping)
    values = StartingValues(everything(model))
    assert StartingValues(everything(model)).checksum == values.checksum
    prune.global_unstructured(everything(model), prune.L1Unstructured, amount=0.5)
    with torch.no_grad():
        for name in whole:
            shard(model, name, indices).add_(1)
    assert StartingValues(everything(model)).checksum != values.checksum
    values.restore()
    for name, value in whole.items():
        assert torch.equal(shard(model, name, indices), my_part(value, indices[name]))
    assert StartingValues(everything(model)).checksum == values.checksum
    prune.verify(model)
    return values.checksum


@pytest.mark.parametrize("wrapping", sampled(ALL))
def test_values_come_back_and_their_checksum_is_that_of_one_process(wrapping):
    model = new_model(wrapping)
    expected = StartingValues(everything(model)).checksum
    assert set(run_ranks(keep_and_restore, world_size(wrapping), wrapping)) == {expected}
    with torch.no_grad():
        model.l1.bias[0] += 1
    assert StartingValues(everything(model)).checksum != expected


def draw_anew(wrapping: str) -> bool:
    indices = local_indices(new_model(wrapping), wrapping)
    model, alone = wrap(new_model(wrapping), wrapping), new_model(wrapping)
    results = []
    for each in (model, alone):
        pairs = everything(each)
        values = StartingValues(pairs)
        prune.global_unstructured(pairs, prune.L1Unstructured, amount=0.5)
        torch.manual_seed(7)
        values.resample()
    for name in fqns(new_model(wrapping)):
        path, _, leaf = name.rpartition(".")
        expected = getattr(alone.get_submodule(path), f"{leaf}_orig").detach()
        mine = shard(model, name, indices)
        assert torch.equal(mine, my_part(expected, indices[name])), name
        results.append(not torch.equal(expected, new_model(wrapping).get_parameter(name)))
    return all(results)


WITH_MODULES = [w for w in sampled(ALL) if not w.startswith("fsdp1_flat")]


@pytest.mark.parametrize("wrapping", WITH_MODULES)
def test_new_values_do_not_depend_on_the_sharding(wrapping):
    assert all(run_ranks(draw_anew, world_size(wrapping), wrapping))


def draw_from_flat() -> None:
    model = wrap(new_model("fsdp1_flat-2"), "fsdp1_flat-2")
    with pytest.raises(NotImplementedError, match="use_orig_params=True"):
        StartingValues(everything(model)).resample()


def test_flat_parameters_are_refused():
    run_ranks(draw_from_flat, 2)
