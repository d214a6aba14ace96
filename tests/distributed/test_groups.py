"""The ranks that take part: those of ``group`` or of a parameter's mesh, and no others."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import distprune as prune
from distprune.testing import run_ranks
from helpers import reference, wrappings
from helpers.collective_traffic import Traffic
from helpers.comparisons import assert_nothing_wrong, wrong_masks
from helpers.models import Net, fill


def my_group(groups: list[list[int]]) -> dist.ProcessGroup:
    """The group of this rank; new_group has to be called for all of them on every rank."""
    made = [dist.new_group(ranks) for ranks in groups]
    return next(g for g, ranks in zip(made, groups, strict=True) if dist.get_rank() in ranks)


def differences_between_groups(groups: list[list[int]]) -> list[str]:
    """Each group prunes plain modules of its own: other values, other amounts."""
    group = my_group(groups)
    seed = min(dist.get_process_group_ranks(group))
    dense, model = fill(Net(), "rounded", "float32", seed), fill(Net(), "rounded", "float32", seed)
    indices = wrappings.local_indices(dense, "plain-1")
    pairs, amount = prune.select(model, everything=True), 0.1 * (seed + 1)
    names = [pair.fqn for pair in pairs]
    keeps = reference.prune([dense.get_parameter(name) for name in names], amount)
    once = prune.schedule.OneShot(0, amount)
    prune.schedule.ScheduledPruner(pairs, once, group=group).step()
    return wrong_masks(model, dict(zip(names, keeps, strict=True)), indices)


@pytest.mark.parametrize("groups", [[[0], [1]], [[0], [1], [2]], [[0, 2], [1]], [[0, 1], [2, 3]]])
def test_groups_do_not_see_each_other(groups):
    size = sum(map(len, groups))
    assert_nothing_wrong(run_ranks(differences_between_groups, size, groups))


def error_of_an_outsider() -> str:
    group = dist.new_group([0, 1])
    model = fill(Net(), "normal", "float32")
    try:
        prune.global_unstructured(
            [(model.l1, "weight")], prune.L1Unstructured, group=group, amount=0.5
        )
        return f"pruned: {prune.is_pruned(model)}"
    except ValueError as error:
        return str(error)


def test_a_rank_outside_the_group_is_told_so():
    inside, also_inside, outside = run_ranks(error_of_an_outsider, 3)
    assert inside == also_inside == "pruned: True"
    assert "rank 2" in outside and "group" in outside


def parameter_on_two_of_three_ranks() -> bool | None:
    """Rank 2 makes the mesh, as torch demands, and then takes no part."""
    mesh = DeviceMesh("cpu", [0, 1])
    if dist.get_rank() == 2:
        return None
    layer = fully_shard(fill(Net(), "rounded", "float32").l1, mesh=mesh)
    prune.l1_unstructured(layer, "weight", 0.5)
    weight = fill(Net(), "rounded", "float32").l1.weight
    (keep,) = reference.prune([weight], 0.5)
    return torch.equal(layer.weight_mask.to_local(), keep.chunk(2)[dist.get_rank()])


def test_one_sharded_parameter_needs_the_ranks_of_its_mesh_only():
    assert run_ranks(parameter_on_two_of_three_ranks, 3) == [True, True, None]


def calls_of_a_plain_parameter() -> list | None:
    """Rank 0 alone, in a world of two."""
    if dist.get_rank() == 1:
        return None
    model = fill(Net(), "normal", "float32")
    with Traffic() as traffic:
        prune.l1_unstructured(model.l1, "weight", 0.5)
        prune.random_unstructured(model.l1, "weight", 0.5)
        prune.ln_structured(model.l2, "weight", 0.5, 2, 0)
        prune.random_structured(model.l2, "weight", 1, 1)
        prune.custom_from_mask(model.l3, "weight", torch.ones(3, 5))
        prune.remove(model.l1, "weight")
    return traffic.calls


def test_one_plain_parameter_needs_nobody():
    assert run_ranks(calls_of_a_plain_parameter, 2) == [[], None]
