"""Ranks that own different parameters: the masks are those of one process with the whole model."""

import copy
import re
import sys

import pytest
import torch
import torch.distributed as dist
import torch.nn.utils.prune as torch_prune
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import distprune as prune
from distprune import schedule
from distprune.testing import run_ranks
from helpers import reference, wrappings
from helpers.comparisons import assert_nothing_wrong
from helpers.models import fill, target
from helpers.sampling import every

NUM_LAYERS = 12  # "layers.10" has to come after "layers.2"


class Deep(nn.Module):
    """Layers by number; a stage has some of them under their names in the whole model."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict({str(i): nn.Linear(6, 6) for i in range(NUM_LAYERS)})
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        for layer in self.layers.values():
            x = x + torch.tanh(layer(x))
        return self.head(x) if self.head is not None else x


NAMES = ["head.weight", *(f"layers.{i}.weight" for i in range(NUM_LAYERS))]


def cut(model: Deep, stage: int, num_stages: int) -> Deep:
    """Keep what belongs to one stage."""
    for i in range(NUM_LAYERS):
        if i * num_stages // NUM_LAYERS != stage:
            del model.layers[str(i)]
    if stage < num_stages - 1:
        model.head = None
    return model


def make_stage(kind: str, data: str) -> tuple[nn.Module, int, int]:
    """This rank's stage of a model that is the same everywhere, wrapped; which of how many."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model = fill(Deep(), data, "float32")
    if kind == "plain":
        return cut(model, rank, size), rank, size
    if kind == "whole":  # every rank has everything: replicas
        return model, 0, 1
    if kind == "uneven":  # the last rank has nothing at all
        if rank == size - 1:
            return nn.Identity(), rank, size - 1
        return cut(model, rank, size - 1), rank, size - 1
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("pp", "inner"))
    stage = mesh.get_local_rank("pp")
    model, inner = cut(model, stage, 2), mesh["inner"]
    if kind == "fsdp2":
        for layer in model.layers.values():
            fully_shard(layer, mesh=inner)
        model = fully_shard(model, mesh=inner)
    elif kind == "fsdp1":
        model = FullyShardedDataParallel(
            model, process_group=inner.get_group(), device_id=torch.device("cpu")
        )
    elif kind == "ddp":
        model = DistributedDataParallel(model, process_group=inner.get_group())
    elif kind == "tp":
        plan = {name: ColwiseParallel() for name, _ in model.layers.named_children()}
        parallelize_module(model.layers, inner, plan)
    return model, stage, 2


def keeps_of(data: str, amounts: tuple) -> dict[str, torch.Tensor]:
    model = fill(Deep(), data, "float32")
    scores, keeps = [model.get_parameter(name).detach() for name in NAMES], None
    for amount in amounts:
        keeps = reference.prune(scores, amount, keeps)
    return dict(zip(NAMES, keeps, strict=True))


def held(kind: str, data: str, amounts: tuple) -> list[tuple]:
    """(name, mask shard, how many are pruned everywhere) of what this rank has."""
    model, _, _ = make_stage(kind, data)
    chosen = (
        prune.select(model, everything=True) if kind != "uneven" or list(model.parameters()) else []
    )
    if dist.get_rank() % 2:
        chosen.reverse()  # the order of a rank's own list does not matter
    for amount in amounts:
        report = prune.global_unstructured(
            chosen, prune.L1Unstructured, amount=amount, pipeline_parallel=True
        )
    assert [entry.name for entry in report.parameters] == NAMES
    masks = [(pair.fqn, wrappings.local(pair[0].weight_mask)) for pair in chosen]
    return [(name, mask, report.num_pruned) for name, mask in masks]


KINDS = ["plain-2", "plain-3", "whole-2", "uneven-3", "fsdp2-4", "fsdp1-4", "ddp-4", "tp-4"]


@pytest.mark.parametrize("kind", KINDS)
def test_masks_are_those_of_one_process(kind):
    kind, size = kind.split("-")
    cases = [("equal", (0.3, 0.5)), ("normal", (0.5,)), ("few", (100, 0.25))]
    for data, amounts in every(2, cases, int(size)):
        keeps = keeps_of(data, amounts)
        num_pruned = sum(int((~keep).sum()) for keep in keeps.values())
        per_rank = run_ranks(held, int(size), kind, data, amounts)
        parts: dict[str, list[torch.Tensor]] = {name: [] for name in NAMES}
        for masks in per_rank:
            for name, mask, reported in masks:
                assert reported == num_pruned
                parts[name].append(mask.bool())
        for name, keep in keeps.items():
            assert_parts_of(keep, parts[name], kind, name)


def assert_parts_of(keep: torch.Tensor, parts: list[torch.Tensor], kind: str, name: str) -> None:
    """The parts that the ranks hold, in their order, make up a whole mask."""
    is_whole = kind in ("plain", "whole", "uneven", "ddp")
    if is_whole or (kind == "tp" and name == "head.weight"):
        assert parts and all(torch.equal(part, keep) for part in parts), name
    else:  # two ranks in the order of their rows
        joined = torch.cat([part.reshape(-1) for part in parts])
        assert torch.equal(joined, keep.reshape(-1)), name


def test_one_process_with_the_whole_model():
    for data, amounts in [("equal", (0.3, 0.5)), ("few", (100, 0.25))]:
        model = fill(Deep(), data, "float32")
        for amount in amounts:
            prune.global_unstructured(
                prune.select(model, everything=True),
                prune.L1Unstructured,
                amount=amount,
                pipeline_parallel=True,
            )
        for name, keep in keeps_of(data, amounts).items():
            assert torch.equal(target(model, name)[0].weight_mask.bool(), keep), name


def random_masks(kind: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(5 if dist.get_rank() == 0 else 6)
    model, _, _ = make_stage(kind, "normal")
    chosen = prune.select(model, everything=True)
    floors = {"head.weight": 0.8}
    prune.global_unstructured(
        chosen, prune.RandomUnstructured, amount=0.5, pipeline_parallel=True, min_sparsity=floors
    )
    return {pair.fqn: pair[0].weight_mask for pair in chosen}


def test_random_masks_and_bounds_over_stages():
    (expected,) = run_ranks(random_masks, 1, "whole")
    assert sum(int((mask == 0).sum()) for mask in expected.values()) == 225
    assert int((expected["head.weight"] == 0).sum()) >= 15
    for masks in run_ranks(random_masks, 3, "plain"):
        for name, mask in masks.items():
            assert torch.equal(mask, expected[name])


def scheduled(kind: str, resume_at: int) -> tuple[dict[str, torch.Tensor], list[int]]:
    """A ramp with floors and ceilings over all stages, with another pruner from a step on."""
    model, _, _ = make_stage(kind, "few")

    def pruner() -> schedule.ScheduledPruner:
        return schedule.ScheduledPruner(
            prune.select(model, everything=True),
            schedule.Linear(begin=0, end=4, frequency=2, final_sparsity=0.6),
            min_sparsity={"layers.3.weight": 0.9},
            max_sparsity=0.95,
            pipeline_parallel=True,
        )

    mine, counts = pruner(), []
    for step in range(5):
        if step == resume_at:
            state, mine = mine.state_dict(), pruner()
            mine.load_state_dict(state)
        report = mine.step()
        counts.append(report.num_pruned if report else 0)
    masks = {pair.fqn: pair[0].weight_mask for pair in prune.select(model, everything=True)}
    mine.remove()
    return masks, counts


def test_schedules_over_stages():
    ((expected, counts),) = run_ranks(scheduled, 1, "whole", 9)
    assert counts == [0, 0, 135, 0, 270]
    assert int((expected["layers.3.weight"] == 0).sum()) == 33
    for masks, seen in run_ranks(scheduled, 3, "plain", 3):
        assert seen == counts
        for name, mask in masks.items():
            assert torch.equal(mask, expected[name])


def trained(steps: int) -> list[str]:
    """torch's own pipeline schedule, against a dense model that torch pruned."""
    size, rank = dist.get_world_size(), dist.get_rank()
    dense = fill(Deep(), "normal", "float32")
    model, stage, _ = make_stage("plain", "normal")
    for name, keep in keeps_of("normal", (0.5,)).items():
        torch_prune.custom_from_mask(*target(dense, name), keep)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, dense)]
    prune.global_unstructured(
        prune.select(model, everything=True),
        prune.L1Unstructured,
        amount=0.5,
        pipeline_parallel=True,
    )
    pipeline = ScheduleGPipe(
        PipelineStage(model, stage, size, torch.device("cpu")),
        n_microbatches=2,
        loss_fn=lambda out, y: (out - y).square().mean(),
    )
    generator, wrong = torch.Generator().manual_seed(1), []
    for step in range(steps):
        x, y = (torch.randn(4, width, generator=generator) for width in (6, 3))
        for optimizer in optimizers:
            optimizer.zero_grad()
        pipeline.step(*((x,) if rank == 0 else ()), **({"target": y} if rank == size - 1 else {}))
        (dense(x) - y).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
        for name, parameter in model.named_parameters():
            if not torch.allclose(parameter, dense.get_parameter(name), rtol=1e-5, atol=1e-5):
                wrong.append(f"step {step}: {name}")
    return wrong


@pytest.mark.skipif(sys.platform != "linux", reason="gloo's pipelining is tested on Linux")
def test_training_with_torch_pipelining():
    assert_nothing_wrong(run_ranks(trained, 2, 3))


def error_of(case: str) -> str:
    rank = dist.get_rank()
    model, _, _ = make_stage("plain", "normal")
    chosen, options = prune.select(model, everything=True), {"pipeline_parallel": True}
    match case:
        case "experts":
            chosen = prune.select(fill(nn.Linear(4, 4), "normal", "float32", seed=rank))
        case "other shapes":
            chosen = prune.select(nn.Linear(4, 4 + rank))
        case "no names":
            chosen = [tuple(pair) for pair in chosen]
        case "twice":
            chosen = [
                *prune.select(nn.Linear(4, 4)),
                *prune.select(nn.Linear(4, 4)),
            ]
        case "one rank only":
            options["pipeline_parallel"] = rank == 0
        case "nan":
            with torch.no_grad():
                next(model.parameters())[:1] = torch.nan if rank else 1.0
        case "all empty":
            chosen = []
        case "own method":
            options["pruning_method"] = Own
    method = options.pop("pruning_method", prune.L1Unstructured)
    try:
        prune.global_unstructured(chosen, method, amount=0.5, **options)
    except Exception as error:
        assert not prune.is_pruned(model)
        return f"{type(error).__name__}: {error}"
    return "nothing"


class Own(prune.BasePruningMethod):
    PRUNING_TYPE = "unstructured"

    def __init__(self, amount):
        self.amount = amount

    def compute_mask(self, t, default_mask):
        return default_mask


ERRORS = {
    "experts": "ValueError(.|\n)*weight(.|\n)*differ",
    "other shapes": "ValueError: weight: ranks hold different parameters(.|\n)*prefix",
    "no names": "TypeError(.|\n)*select",
    "twice": "ValueError: weight is the name of two(.|\n)*prefix",
    "one rank only": "ValueError(.|\n)*pipeline_parallel",
    "nan": "UnfitScores(.|\n)*layers.6.weight(.|\n)*NaN",
    "all empty": "ValueError(.|\n)*empty on every rank",
    "own method": "NotImplementedError(.|\n)*DISTRIBUTED",
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors_are_the_same_on_every_rank(case):
    first, second = run_ranks(error_of, 2, case, timeout=30)
    assert first == second
    assert re.match(ERRORS[case], first), first


def renamed() -> tuple[list[str], int]:
    """Experts under names of their own, and a stage that is placed by a prefix."""
    rank = dist.get_rank()
    expert = fill(nn.Linear(4, 4), "normal", "float32", seed=rank)
    (pair,) = prune.select(expert, prefix="experts")
    assert pair.fqn == "experts.weight"
    own = prune.NamedParameter(*pair, f"{pair.fqn}@{rank}")
    placed = prune.select(copy.deepcopy(expert), prefix=f"layers.{rank}", include="layers.*")
    report = prune.global_unstructured(
        [own, *placed], prune.L1Unstructured, amount=0.5, pipeline_parallel=True
    )
    return [entry.name for entry in report.parameters], report.num_pruned


def test_names_that_the_caller_makes_unique():
    names = ["experts.weight@0", "experts.weight@1", "layers.0.weight", "layers.1.weight"]
    assert run_ranks(renamed, 2) == [(names, 32)] * 2
