"""The ranks that take part: those of ``group`` or of a parameter's mesh, and no others."""

import re
import threading
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import distprune as prune
from distprune.testing import run_ranks
from helpers import reference, wrappings
from helpers.collective_traffic import Traffic
from helpers.comparisons import assert_nothing_wrong, other_errors, outcome, raised, wrong_masks
from helpers.models import Net, fill, seeded, target


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
    model = seeded(Net())
    pairs = [(model.l1, "weight")]
    options = {"group": group, "amount": 0.5}
    return raised(partial(prune.global_unstructured, pairs, prune.L1Unstructured, **options))


def test_a_rank_outside_the_group_is_told_so():
    inside, also_inside, outside = run_ranks(error_of_an_outsider, 3)
    assert inside == also_inside == "nothing was raised"
    assert re.search("ValueError.*rank 2.*group|ValueError.*group.*rank 2", outside, re.DOTALL)


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
    model = seeded(Net())
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


# Two calls on one group at a time are refused.


NAMES = ["l1.weight", "l2.weight"]


class Calling(prune.BasePruningMethod):
    """Ranks by values, and does something else while it is at it."""

    PRUNING_TYPE = "unstructured"
    DISTRIBUTED = "scores"

    def __init__(self, amount, action=None):
        self.amount = amount
        self.action = action

    def compute_scores(self, t):
        if self.action is not None:
            self.action()
        return t.abs()


class Action:
    """What one rank's method does once; to other ranks it looks the same."""

    def __init__(self, do):
        self.do = do

    def __call__(self):
        do, self.do = self.do, None
        if do is not None:
            do()


def model_and_targets(wrapping: str):
    model = wrappings.wrap(seeded(Net()), wrapping)
    return model, [target(wrappings.unwrapped(model), name) for name in NAMES]


def wrong_inside_a_call(wrapping: str, where: str) -> list[str]:
    """A second call on the same group: from a function that the first one calls, or a thread."""
    _, targets = model_and_targets(wrapping)
    other, other_targets = model_and_targets("plain-2")
    refused: list[tuple[str, str, list[str]]] = []

    call = partial(prune.global_unstructured, other_targets, prune.L1Unstructured, amount=0.5)

    def second() -> None:
        refused.append(outcome(other, call))

    def in_thread() -> None:
        thread = threading.Thread(target=second)
        thread.start()
        thread.join()

    action = Action(second if where == "this thread" else in_thread)
    report = prune.global_unstructured(targets, Calling, amount=0.5, action=action)
    wrong = [] if report.num_pruned_now == 55 else [str(report)]
    ((kind, text, changed),) = refused
    if kind != "RuntimeError" or "under way" not in text or where not in text or changed:
        wrong.append(f"{kind}: {text}; changed {changed}")
    second()  # nothing is held after the call
    return wrong + ([] if refused[-1][0] == "nothing" else [str(refused[-1])])


@pytest.mark.parametrize("where", ["this thread", "another thread"])
@pytest.mark.parametrize("wrapping", ["plain-2", "fsdp2-2"])
def test_a_call_inside_a_call(wrapping, where):
    assert_nothing_wrong(run_ranks(wrong_inside_a_call, 2, wrapping, where))


def wrong_with_two_groups() -> list[str]:
    """Two threads may call at the same time, each on a group of its own."""
    groups = [dist.new_group() for _ in range(2)]
    settings = [model_and_targets("plain-2") for _ in groups]
    errors: list[BaseException] = []

    def work(which: int) -> None:
        try:
            for _ in range(5):
                prune.global_unstructured(
                    settings[which][1], prune.L1Unstructured, group=groups[which], amount=3
                )
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(which,)) for which in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wrong = [f"{type(error).__name__}: {error}" for error in errors]
    for _, targets in settings:
        pruned = sum(int((module.weight_mask == 0).sum()) for module, _ in targets)
        wrong += [] if pruned == 15 else [f"{pruned} pruned"]
    return wrong


def test_threads_with_groups_of_their_own():
    assert_nothing_wrong(run_ranks(wrong_with_two_groups, 2))


# One model, many meshes: sharded, replicated, frozen and absent parameters in one ranking.


NAMES_OF_MESHES = ["l1.weight", "l2.weight", "l3.weight", "l1.bias", "l3.bias"]


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
        scores = [model.get_parameter(name).detach().clone() for name in NAMES_OF_MESHES]
        keeps = None
        mix(model, kind)
        targets = [target(model, name) for name in NAMES_OF_MESHES]
        for amount in amounts:
            keeps = reference.prune(scores, amount, keeps)
            report = prune.global_unstructured(targets, prune.L1Unstructured, amount=amount)
        num_pruned = sum(int((~keep).sum()) for keep in keeps)
        if report.num_pruned != num_pruned:
            wrong.append(f"{data}: {report.num_pruned} are reported, not {num_pruned}")
        wrong += [
            f"{data}: {name}"
            for name, keep in zip(NAMES_OF_MESHES, keeps, strict=True)
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
    model = seeded(Net((6, 12, 6, 6)))
    (keep,) = reference.prune([model.l1.weight], 0.5)
    mix(model, "outside")
    found = outcome(model, lambda: prune.l1_unstructured(model.l1, "weight", 0.5))
    if dist.get_rank() == dist.get_world_size() - 1:
        return other_errors([found], "ValueError", "outside the mesh")
    return [] if torch.equal(whole(model.l1.weight_mask), keep) else ["another mask"]


def test_single_parameters_of_a_sub_mesh():
    assert_nothing_wrong(run_ranks(single_functions_outside, 3))
