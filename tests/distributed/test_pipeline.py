"""Ranks that own different parameters: masks are those of one process with the whole model."""

import copy
import functools
import re
import sys

import pytest
import torch
import torch.distributed as dist
import torch.nn.utils.prune as torch_prune
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import distprune as prune
from distprune import budgets, schedule
from distprune.testing import run_ranks
from helpers import reference, wrappings
from helpers.comparisons import assert_nothing_wrong, raised
from helpers.models import fill, seeded, target
from helpers.sampling import every

NUM_LAYERS = 12  # "layers.10" has to come after "layers.2"
SIZE = NUM_LAYERS * 36 + 18  # elements of all weights
NAMES = ["head.weight", *(f"layers.{i}.weight" for i in range(NUM_LAYERS))]
KINDS = ["plain-2", "plain-3", "whole-2", "uneven-3", "fsdp2-4", "fsdp1-4", "ddp-4", "tp-4"]


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


def cut(model: Deep, stage: int, num_stages: int) -> Deep:
    """Keep what belongs to one stage."""
    for i in range(NUM_LAYERS):
        if i * num_stages // NUM_LAYERS != stage:
            del model.layers[str(i)]
    if stage < num_stages - 1:
        model.head = None
    return model


def make_stage(kind: str, data: str) -> nn.Module:
    """This rank's stage of a model that is the same everywhere, wrapped."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model = fill(Deep(), data, "float32")
    if kind == "plain":
        return cut(model, rank, size)
    if kind == "whole":  # every rank has everything: replicas
        return model
    if kind == "uneven":  # the last rank has nothing at all
        return nn.Identity() if rank == size - 1 else cut(model, rank, size - 1)
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("pp", "inner"))
    model, inner = cut(model, mesh.get_local_rank("pp"), 2), mesh["inner"]
    if kind == "fsdp2":
        for layer in model.layers.values():
            fully_shard(layer, mesh=inner)
        return fully_shard(model, mesh=inner)
    if kind == "fsdp1":
        options = {"process_group": inner.get_group(), "device_id": torch.device("cpu")}
        return FullyShardedDataParallel(model, **options)
    if kind == "ddp":
        return DistributedDataParallel(model, process_group=inner.get_group())
    plan = {name: ColwiseParallel() for name, _ in model.layers.named_children()}
    parallelize_module(model.layers, inner, plan)
    return model


class Stage:
    """A stage, its parameters in an order that is not that of other ranks, and what is found."""

    def __init__(self, kind: str, data: str):
        self.model = make_stage(kind, data)
        has_any = any(True for _ in self.model.parameters())
        self.chosen = prune.select(self.model, everything=True) if has_any else []
        if dist.get_rank() % 2:
            self.chosen.reverse()

    def prune(self, method=prune.L1Unstructured, **arguments) -> prune.PruningReport:
        return prune.global_unstructured(self.chosen, method, pipeline_parallel=True, **arguments)

    def masks(self) -> dict[str, Tensor]:
        return {pair.fqn: wrappings.local(pair[0].weight_mask).bool() for pair in self.chosen}


def pruned(kind: str, data: str, amounts: tuple) -> tuple:
    stage = Stage(kind, data)
    for amount in amounts:
        report = stage.prune(amount=amount)
    return [(entry.name, entry.num_pruned) for entry in report.parameters], stage.masks()


def budgeted(kind: str, *amounts: dict) -> tuple:
    """Sparsities by full name, of layers of other ranks too."""
    stage = Stage(kind, "normal")
    for amount in amounts:
        report = stage.prune(amount=amount)
    return [(entry.name, entry.num_pruned) for entry in report.parameters], stage.masks()


def random_with_bounds(kind: str) -> tuple:
    torch.manual_seed(5 + dist.get_rank())  # the first one counts
    stage = Stage(kind, "normal")
    report = stage.prune(prune.RandomUnstructured, amount=0.5, min_sparsity={"head.weight": 0.8})
    return report.num_pruned, stage.masks()


def scheduled(kind: str, resume_at: int = 3) -> tuple:
    """A ramp with floors and ceilings over all stages, with another pruner from a step on."""
    stage = Stage(kind, "few")

    def pruner() -> schedule.ScheduledPruner:
        return schedule.ScheduledPruner(
            stage.chosen,
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
    return counts, stage.masks()


def selected(kind: str, data: str, k: int) -> tuple:
    stage = Stage(kind, data)
    found = prune.global_mask(stage.chosen, k, pipeline_parallel=True)
    names = [pair.fqn for pair in stage.chosen]
    masks = dict(zip(names, map(wrappings.local, found.masks), strict=True))
    return (found.threshold, found.num_ties), masks


def replaced(kind: str, which: int) -> tuple:
    """Masks, values or momenta after set_masks, which drops and grows elements."""
    stage = Stage(kind, "few")
    generator = torch.Generator().manual_seed(9)
    shapes = {name: p.shape for name, p in Deep().named_parameters()}
    wanted = {name: torch.rand(shapes[name], generator=generator) < 0.6 for name in NAMES}
    optimizer = None
    if stage.chosen:
        optimizer = torch.optim.SGD(stage.model.parameters(), lr=0.0, momentum=0.9)
        for parameter in stage.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    stage.prune(amount=0.4)
    given = [wanted[pair.fqn] for pair in stage.chosen]
    options = {"optimizer": optimizer, "pipeline_parallel": True}
    report = prune.set_masks(stage.chosen, given, **options)
    assert prune.verify(stage.model, pipeline_parallel=True).ok
    after = {}
    for pair, mask in zip(stage.chosen, prune.get_masks(stage.chosen), strict=True):
        original = wrappings.stored(*pair)
        momentum = optimizer.state[original]["momentum_buffer"]
        found = (mask, original.detach() * mask, momentum)[which]
        after[pair.fqn] = wrappings.local(found.detach()).clone()
    return [(p.name, p.num_grown, p.num_pruned_now) for p in report.parameters], after


SHAPES = {n: tuple(p.shape) for n, p in Deep().named_parameters() if n in NAMES}
RATIOS = {name: number % 3 / 10 for number, name in enumerate(NAMES)}
CALLS = [
    (pruned, "equal", (0.3, 0.5)),
    (pruned, "normal", (0.5,)),
    (pruned, "few", (100, 0.25)),
    *((selected, data, k) for data, k in (("normal", 200), ("few", 0), ("equal", 131))),
    (random_with_bounds,),
    (scheduled,),
    (budgeted, budgets.uniform(SHAPES, 0.3), budgets.erk(SHAPES, 0.5, max_sparsity=0.8)),
    (budgeted, budgets.owl(SHAPES, 0.4, RATIOS, lam=0.2)),
    *((replaced, which) for which in range(3)),
]


def results(kind: str, calls: list) -> list:
    return [call(kind, *arguments) for call, *arguments in calls]


@functools.cache
def of_one_process() -> list:
    return run_ranks(results, 1, "whole", CALLS)[0]


@pytest.mark.parametrize("kind", KINDS)
def test_masks_are_those_of_one_process(kind):
    number, (kind, size) = KINDS.index(kind), kind.split("-")
    # Runs of FSDP1 need their module, and no step is made of them here; candidates are whole.
    expected = list(zip(CALLS, of_one_process(), strict=True))
    expected = every(2, expected[:-3] if kind == "fsdp1" else expected, number)
    per_call = zip(*run_ranks(results, int(size), kind, [c for c, _ in expected]), strict=True)
    for found, (call, (facts, whole)) in zip(per_call, expected, strict=True):
        assert all(seen == facts for seen, _ in found), call
        for name, tensor in whole.items():
            parts = [tensors[name] for _, tensors in found if name in tensors]
            assert_parts_of(tensor, parts, kind, f"{name} of {call}")


def assert_parts_of(whole: Tensor, parts: list[Tensor], kind: str, what: str) -> None:
    """The parts that the ranks hold, in their order, make up a whole tensor."""
    is_whole = kind in ("plain", "whole", "uneven", "ddp")
    if is_whole or (kind == "tp" and what.startswith("head.weight")):
        assert parts and all(torch.equal(part, whole) for part in parts), what
    else:  # two ranks in the order of their rows
        assert torch.equal(torch.cat([part.reshape(-1) for part in parts]), whole.reshape(-1)), what


def keeps_of(data: str, amounts: tuple) -> dict[str, Tensor]:
    model = fill(Deep(), data, "float32")
    scores, keeps = [model.get_parameter(name).detach() for name in NAMES], None
    for amount in amounts:
        keeps = reference.prune(scores, amount, keeps)
    return dict(zip(NAMES, keeps, strict=True))


def test_one_process_with_the_whole_model():
    for (call, *arguments), (facts, masks) in zip(CALLS, of_one_process(), strict=False):
        if call not in (pruned, selected):
            continue
        data, amounts = arguments
        keeps = keeps_of(data, amounts if call is pruned else (SIZE - amounts,))
        assert all(torch.equal(masks[name], keep) for name, keep in keeps.items())
        if call is pruned:
            assert facts == [(name, int((~keep).sum())) for name, keep in keeps.items()]
    random, ramp, half, share, changed = of_one_process()[6:11]
    assert [sum(n for _, n in facts) for facts, _ in (half, share)] == [SIZE // 2, SIZE * 2 // 5]
    assert random[0] == 225 and int((~random[1]["head.weight"]).sum()) >= 15
    assert ramp[0] == [0, 0, 135, 0, 270] and int((~ramp[1]["layers.3.weight"]).sum()) == 33
    before = keeps_of("few", (0.4,))
    assert changed[0] == [
        (name, int((mask & ~before[name]).sum()), int((before[name] & ~mask).sum()))
        for name, mask in ((name, changed[1][name] != 0) for name in NAMES)
    ]


def trained(steps: int) -> list[str]:
    """torch's own pipeline schedule, against a dense model that torch pruned."""
    size, rank = dist.get_world_size(), dist.get_rank()
    dense, stage = seeded(Deep()), Stage("plain", "normal")
    for name, keep in keeps_of("normal", (0.5,)).items():
        torch_prune.custom_from_mask(*target(dense, name), keep)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (stage.model, dense)]
    stage.prune(amount=0.5)
    pipeline = ScheduleGPipe(
        PipelineStage(stage.model, rank, size, torch.device("cpu")),
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
        for name, parameter in stage.model.named_parameters():
            if not torch.allclose(parameter, dense.get_parameter(name), rtol=1e-5, atol=1e-5):
                wrong.append(f"step {step}: {name}")
    return wrong


@pytest.mark.skipif(sys.platform != "linux", reason="gloo's pipelining is tested on Linux")
def test_training_with_torch_pipelining():
    assert_nothing_wrong(run_ranks(trained, 2, 3))


class Own(prune.BasePruningMethod):
    PRUNING_TYPE = "unstructured"

    def __init__(self, amount):
        self.amount = amount

    def compute_mask(self, t, default_mask):
        return default_mask


def errors(calls: list[tuple[str, str]]) -> list[str]:
    """What pruning, or global_mask, raises in some cases."""
    found, rank = [], dist.get_rank()
    for function, case in calls:
        stage, method, k = Stage("plain", "normal"), prune.L1Unstructured, 10
        chosen, options = stage.chosen, {"pipeline_parallel": True}
        match case:
            case "experts":
                chosen = prune.select(seeded(nn.Linear(4, 4), seed=rank))
            case "other shapes":
                chosen = prune.select(nn.Linear(4, 4 + rank))
            case "no names":
                chosen = [tuple(pair) for pair in chosen]
            case "twice":
                chosen = [*prune.select(nn.Linear(4, 4)), *prune.select(nn.Linear(4, 4))]
            case "one rank only":
                options["pipeline_parallel"] = rank == 0
            case "nan":
                next(stage.model.parameters()).data[:1] = torch.nan if rank else 1.0
            case "empty":
                chosen = []
            case "own method":
                method = Own
            case "other k":
                k = 10 + rank
            case "too many":
                k = SIZE + 1
            case "candidates":
                options["candidates"] = [torch.ones(pair[0].weight.shape) > 0 for pair in chosen]
        if function == "global_mask":
            call = functools.partial(prune.global_mask, chosen, k, **options)
        else:
            call = functools.partial(
                prune.global_unstructured, chosen, method, amount=0.5, **options
            )
        found.append(raised(call))
        assert not prune.is_pruned(stage.model)
    return found


BOTH = {
    "no names": "TypeError(.|\n)*select",
    "twice": "ValueError: weight is the name of two(.|\n)*prefix",
    "empty": "ValueError: (parameters|tensors) is empty on every rank",
    "one rank only": "ValueError(.|\n)*pipeline_parallel",
}
ERRORS = {
    **{(function, case): BOTH[case] for function in ("prune", "global_mask") for case in BOTH},
    ("prune", "experts"): "ValueError(.|\n)*weight(.|\n)*differ",
    ("prune", "other shapes"): "ValueError: weight: ranks hold different parameters(.|\n)*prefix",
    ("prune", "nan"): "UnfitScores(.|\n)*layers.6.weight(.|\n)*NaN",
    ("prune", "own method"): "NotImplementedError(.|\n)*DISTRIBUTED",
    ("global_mask", "other k"): "ValueError(.|\n)*k(.|\n)*11",
    ("global_mask", "candidates"): "NotImplementedError: candidates",
    ("global_mask", "too many"): "ValueError: k is 451, and 450",
}


def test_errors_are_the_same_on_every_rank():
    first, second = run_ranks(errors, 2, list(ERRORS), timeout=60)
    assert first == second
    for case, text in zip(ERRORS, first, strict=True):
        assert re.match(ERRORS[case], text), (case, text)


def renamed() -> tuple[list[str], int]:
    """Experts under names of their own, and a stage that is placed by a prefix."""
    rank = dist.get_rank()
    expert = seeded(nn.Linear(4, 4), seed=rank)
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
