"""One model, many meshes: sharded, replicated, frozen and absent parameters in one ranking."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import distprune as prune
from distprune.base.pruned_form import local_tensor
from distprune.criteria import SNIP
from distprune.dynamic import rigl_step
from distprune.testing import run_ranks
from helpers import reference
from helpers.comparisons import assert_nothing_wrong
from helpers.models import Net, fill, fqns, target
from helpers.wrappings import stored

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


def channel_groups(model: nn.Module) -> list[prune.ChannelGroup]:
    """Rows of l1 with columns of l2, two by two; l3 alone."""
    joint = [
        prune.ChannelPart(target(model, "l1.weight"), 0, 2),
        prune.ChannelPart(target(model, "l1.bias"), 0, 2, is_ranked=False),
        prune.ChannelPart(target(model, "l2.weight"), 1, 2),
    ]
    alone = [prune.ChannelPart(target(model, "l3.weight"), 1)]
    return [prune.ChannelGroup(joint, "joint"), prune.ChannelGroup(alone, "alone")]


def problems_of_channels(kind: str) -> list[str]:
    """Twice, since the second call counts what the first has left."""
    wrong, rank = [], dist.get_rank()
    alone = [dist.new_group([other]) for other in range(dist.get_world_size())][rank]
    for data, n in (("normal", 2), ("few", 1), ("equal", float("inf"))):
        dense = fill(Net((6, 12, 6, 6)), data, "float32")
        model = copy.deepcopy(dense)
        mix(model, kind)
        for amount in (3, 0.5):
            expected = prune.global_structured(
                channel_groups(dense), amount=amount, n=n, group=alone
            )
            report = prune.global_structured(channel_groups(model), amount=amount, n=n)
            if report.groups != expected.groups or report.threshold != expected.threshold:
                wrong.append(f"{data}: {report.groups} is not {expected.groups}")
            counts = [entry.num_pruned for entry in report.parameters]
            if counts != [entry.num_pruned for entry in expected.parameters]:
                wrong.append(f"{data}: {counts}")
        wrong += [
            f"{data}: {name}"
            for name in ("l1.weight", "l1.bias", "l2.weight", "l3.weight")
            if is_wrong(model, kind, name, dense.get_buffer(name + "_mask").bool())
        ]
    return wrong


@pytest.mark.parametrize(
    ("kind", "size"), [("halves", 4), ("fsdp1, fsdp2, plain", 2), ("outside", 3)]
)
def test_channels_of_many_meshes_are_those_of_one_process(kind, size):
    assert_nothing_wrong(run_ranks(problems_of_channels, size, kind))


def calls_with_tensors_of_a_mesh() -> list[str]:
    """Scores, candidates, criteria and masks of parameters that the last rank does not have."""
    model = fill(Net((6, 12, 6, 6)), "normal", "float32")
    scores = [model.get_parameter(name).detach().square() for name in NAMES]
    mix(model, "outside")
    targets = [target(model, name) for name in NAMES]
    parameters = [getattr(*place) for place in targets]
    of_mesh = [parameter.detach().square() for parameter in parameters]
    wrong = []

    def compare(masks, keeps, what):
        held = [whole(mask) for mask in masks]
        pairs = zip(NAMES, held, keeps, strict=True)
        wrong.extend(f"{what}: {n}" for n, m, k in pairs if m is not None and not torch.equal(m, k))

    num = sum(score.numel() for score in scores)
    keeps = reference.prune(scores, num - 50)
    kept = prune.global_mask(targets, 50, scores=of_mesh)
    compare(kept.masks, keeps, "global_mask with scores")
    again = prune.global_mask(targets, 20, scores=of_mesh, candidates=kept.masks)
    compare(again.masks, reference.prune(scores, 30, keeps), "global_mask with candidates")

    criterion = SNIP(targets)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    criterion.update()
    of_criterion = criterion.scores()
    prune.global_unstructured(targets, prune.L1Unstructured, of_criterion, amount=0.5)
    keeps = reference.prune([score.sqrt() for score in scores], 0.5)
    compare([getattr(m, f"{n}_mask") for m, n in targets], keeps, "importance_scores")
    with prune.dense_gradients(targets):
        for module, name in targets:
            parameter = stored(module, name)
            parameter.grad = torch.ones_like(parameter)
        rigl_step(targets, fraction=0.2)
    prune.verify(model)
    for place in targets:
        prune.remove(*place)
    wrong += [
        f"{name} is still pruned" for name in NAMES if prune.is_pruned(target(model, name)[0])
    ]
    # Outside of the mesh, too, it is what torch made.
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
    for name, value in zip(NAMES, of_mesh, strict=True):
        if local_tensor(model.get_parameter(name)).shape != local_tensor(value).shape:
            wrong.append(f"{name} has another local shape")
    return wrong


def test_tensors_of_a_mesh_that_has_only_some_of_the_ranks():
    assert_nothing_wrong(run_ranks(calls_with_tensors_of_a_mesh, 3))


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
