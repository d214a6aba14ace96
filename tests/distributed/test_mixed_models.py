"""One model, many meshes: sharded, replicated, frozen and absent parameters in one ranking."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import distprune as prune
from distprune.testing import run_ranks
from helpers import reference
from helpers.comparisons import assert_nothing_wrong
from helpers.models import Net, fill, fqns, target

NAMES = ["l1.weight", "l2.weight", "l3.weight", "l1.bias", "l3.bias"]


def mix(model: nn.Module, kind: str) -> None:
    """Put the three layers of a Net on meshes of their own, in place."""
    size = dist.get_world_size()
    world = init_device_mesh("cpu", (size,))
    match kind:
        case "fsdp2, plain, hsdp":
            grid = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("r", "s"))
            fully_shard(model.l1, mesh=world)
            fully_shard(model.l3, mesh=grid)
        case "halves":  # each half of the ranks has a copy, sharded over the half
            grid = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("r", "s"))
            fully_shard(model.l1, mesh=grid["s"])
            fully_shard(model.l2, mesh=world)
        case "fsdp1, fsdp2, plain":
            model.l1 = FullyShardedDataParallel(model.l1, device_id=torch.device("cpu"))
            fully_shard(model.l2, mesh=world)
        case "frozen":
            model.l1.requires_grad_(False)
            fully_shard(model.l1, mesh=world)
            model.l2.requires_grad_(False)
            fully_shard(model.l3, mesh=world)
        case "outside":  # the last rank is in no mesh of l1, and holds nothing of it
            inside = DeviceMesh("cpu", list(range(size - 1)))
            for name, parameter in list(model.l1.named_parameters()):
                part = distribute_tensor(parameter.detach(), inside, [Shard(0)])
                setattr(model.l1, name, nn.Parameter(part))
            replicated = distribute_tensor(model.l2.weight.detach(), inside, [Replicate()])
            model.l2.weight = nn.Parameter(replicated)


def whole(mask: torch.Tensor) -> torch.Tensor | None:
    """A mask as one tensor; None on a rank outside of its mesh. Even shards only."""
    if not isinstance(mask, DTensor):
        return mask.bool()
    if mask.device_mesh.get_coordinate() is None:
        assert mask.to_local().numel() == 0
        return None
    return mask.full_tensor().bool()


def is_wrong(model: nn.Module, kind: str, name: str, keep: torch.Tensor) -> bool:
    """Whether a mask is another one than ``keep``, as far as this rank has it."""
    module, parameter = target(model, name)
    mask = getattr(module, parameter + "_mask")
    if kind.startswith("fsdp1") and name.startswith("l1"):
        parts = [torch.empty(0, dtype=torch.bool)] * dist.get_world_size()
        dist.all_gather_object(parts, mask)
        mask = torch.cat(parts).view(keep.shape)  # one layer, cut in the order of memory
    mask = whole(mask)
    return mask is not None and not torch.equal(mask, keep)


def problems(kind: str) -> list[str]:
    wrong = []
    for data, amounts in [("normal", (0.5,)), ("few", (0.3, 0.5)), ("equal", (40,))]:
        model = fill(Net((6, 12, 6, 6)), data, "float32")
        scores, keeps = [model.get_parameter(name).detach().clone() for name in NAMES], None
        mix(model, kind)
        targets = [target(model, name) for name in NAMES]
        for amount in amounts:
            keeps = reference.prune(scores, amount, keeps)
            report = prune.global_unstructured(targets, prune.L1Unstructured, amount=amount)
        num_pruned = sum(int((~keep).sum()) for keep in keeps)
        if report.num_pruned != num_pruned:
            wrong.append(f"{data}: {report.num_pruned} are reported, not {num_pruned}")
        wrong += [
            f"{data}: {name}"
            for name, keep in zip(NAMES, keeps, strict=True)
            if is_wrong(model, kind, name, keep)
        ]
        if kind != "outside":
            out = model(torch.ones(2, 6))
            if out.requires_grad:
                out.sum().backward()
    return wrong


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        ("fsdp2, plain, hsdp", 4),
        ("halves", 4),
        ("fsdp1, fsdp2, plain", 2),
        ("frozen", 2),
        ("outside", 3),
        ("outside", 4),
    ],
)
def test_the_masks_are_those_of_one_process(kind, size):
    assert_nothing_wrong(run_ranks(problems, size, kind))


def single_functions_outside() -> list[str]:
    """Collective over the parameter's mesh alone: the ranks outside do not take part."""
    model = fill(Net((6, 12, 6, 6)), "normal", "float32")
    (keep,) = reference.prune([model.l1.weight], 0.5)
    names = fqns(model)
    mix(model, "outside")
    try:
        prune.l1_unstructured(model.l1, "weight", 0.5)
    except ValueError as error:
        last = dist.get_rank() == dist.get_world_size() - 1
        unchanged = fqns(model) == names
        return [] if last and unchanged and "outside the mesh" in str(error) else [str(error)]
    return [] if torch.equal(whole(model.l1.weight_mask), keep) else ["another mask"]


def test_single_parameters_of_a_sub_mesh():
    assert_nothing_wrong(run_ranks(single_functions_outside, 3))
