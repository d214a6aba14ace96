"""verify: it passes on healthy models under every wrapper, and reports what they hold."""

import copy
import json
import pickle

import pytest
import torch
from healthy_models import found, make, prune_all, train
from torch import nn

import distprune as prune
from distprune.testing import run_ranks
from helpers import wrappings
from helpers.collective_traffic import Traffic
from helpers.comparisons import assert_nothing_wrong, assert_nothing_wrong_on
from helpers.models import Net, fill

WRAPPINGS = [
    "plain-1", "plain-2", "ddp-2", "fsdp1-2", "fsdp1_flat-2", "fsdp1_root-3", "fsdp1_hybrid-2x2",
    "fsdp2-1", "fsdp2-2", "fsdp2-3", "fsdp2_root-2", "hsdp-2x2", "tp-2", "fsdp2_tp-2x2",
]  # fmt: skip


def lifetime(wrapping: str) -> list[str]:
    model = make(wrapping)
    report = prune_all(model, 0.4)
    wrong = found(model, "pruned", report)
    train(model)
    wrong += found(model, "trained", report)
    with torch.no_grad():
        model.eval()(torch.ones(2, 6))
    wrong += found(model, "evaluated", report, expected=report)
    model.train()
    report = prune_all(model, 0.5)
    wrong += found(model, "pruned again", report)
    state = copy.deepcopy(model.state_dict())
    train(model)
    model.load_state_dict(state)
    wrong += found(model, "loaded", report)
    for module, name in prune.select(model, "l1"):
        prune.custom_from_mask(module, name, torch.ones(prune_shape(report, "l1.weight", model)))
    wrong += found(model, "custom mask")
    for module, name in prune.select(model, "l2"):
        prune.remove(module, name)
    wrong += found(model, "one removed")
    train(model)
    wrong += found(model, "one removed, trained")
    return wrong


def prune_shape(report: prune.PruningReport, name: str, model: nn.Module) -> tuple[int, ...]:
    sizes = wrappings.runnable_sizes("tp-2")[:2]
    numel = next(entry.num_elements for entry in report.parameters if entry.name == name)
    return (numel // sizes[0], sizes[0])


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_nothing_is_found_on_a_healthy_model(wrapping):
    assert_nothing_wrong_on(wrapping, lifetime)


def other_ways(wrapping: str) -> list[str]:
    wrong = []
    for dtype in ("bfloat16", "float16", "float64"):
        model = make(wrapping, dtype)
        prune_all(model)
        if not prune.verify(model, raise_errors=False).ok:
            wrong.append(f"{dtype}: {prune.verify(model, raise_errors=False)}")
    model = make(wrapping)
    for module, name in prune.select(model):
        prune.l1_unstructured(module, name, 0.3)
        torch.manual_seed(0)  # or replicas would differ, which verify tells
        prune.random_unstructured(module, name, 2)
        prune.ln_structured(module, name, 1, n=2, dim=0)
    wrong += found(model, "one by one")
    model = make(wrapping)
    pruner = prune.schedule.ScheduledPruner(
        prune.select(model),
        prune.schedule.Linear(begin=0, end=4, frequency=1, final_sparsity=0.6),
    )
    for step in range(6):
        report = pruner.step()
        expected = prune.select(model) if step else ()  # it begins at sparsity 0
        wrong += found(model, f"step {step}", report, expected=expected)
        train(model, 1)
        wrong += found(model, f"step {step}, trained", expected=expected)
    for options in ({"assign": True}, {}):
        state = {name: value.clone() for name, value in model.state_dict().items()}
        inner = model.module if wrappings.kind_of(wrapping) == "ddp" else model
        state = {name.removeprefix("module."): value for name, value in state.items()}
        if options and wrappings.kind_of(wrapping).startswith("fsdp1"):
            continue
        inner.load_state_dict(state, **options)
        wrong += found(model, f"loaded with {options}")
    pruner.remove()
    report = prune.verify(model, raise_errors=False)
    if report.ok or prune.verify(model, expected=()).parameters:
        wrong.append(f"removed: {report}")
    return wrong


@pytest.mark.parametrize("wrapping", ["plain-1", "ddp-2", "fsdp1-2", "fsdp2-3", "tp-2"])
def test_nothing_is_found_however_it_was_pruned(wrapping):
    assert_nothing_wrong_on(wrapping, other_ways)


def wrapped_afterwards(wrapping: str) -> list[str]:
    model = fill(Net(wrappings.runnable_sizes(wrapping)), "normal", "float32")
    report = prune_all(model)
    with prune.masks_aside(model):
        model = wrappings.wrap(model, wrapping)
    wrong = found(model, "wrapped", report)
    train(model)
    return wrong + found(model, "trained", report)


@pytest.mark.parametrize("wrapping", ["ddp-2", "fsdp1-2", "fsdp2-3", "hsdp-2x2", "tp-2"])
def test_wrapping_a_pruned_model_is_no_fault(wrapping):
    assert_nothing_wrong_on(wrapping, wrapped_afterwards)


class Tied(Net):
    def __init__(self):
        super().__init__((6, 6, 6, 6))
        self.l3.weight = self.l1.weight


def tied(wrapping: str) -> list[str]:
    model = wrappings.wrap(fill(Tied(), "normal", "float32"), wrapping)
    report = prune_all(model)
    wrong = found(model, "tied", report)
    train(model)
    return wrong + found(model, "tied, trained", report)


@pytest.mark.parametrize("wrapping", ["plain-2", "ddp-2", "fsdp1_root-2", "fsdp2_root-2"])
def test_a_tied_parameter_is_one(wrapping):
    assert_nothing_wrong(run_ranks(tied, 2, wrapping))


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "moved", "submodule", "outer"])
def test_copies_and_parts_of_a_plain_model_are_fine(how):
    model = nn.Sequential(make("plain-1"), nn.Linear(3, 3))
    prune_all(model)
    assert prune.verify(model).ok
    match how:
        case "deepcopy":
            model = copy.deepcopy(model)
        case "pickle":
            model = pickle.loads(pickle.dumps(model))
        case "moved":
            model = model.double()
        case "submodule":
            model = model[0]
        case "outer":
            model = nn.Sequential(nn.Identity(), model)
    assert prune.verify(model).ok
    model(torch.ones(1, 6, dtype=next(model.parameters()).dtype))
    assert prune.verify(model).ok
    assert prune.verify(copy.deepcopy(model)).ok


def stages() -> list[str]:
    rank = torch.distributed.get_rank()
    part = nn.Sequential(nn.Linear(4, 4 + rank), nn.Linear(4 + rank, 3))
    fill(part, "normal", "float32", seed=rank)
    parameters = prune.select(part, prefix=f"stage{rank}")
    report = prune.global_unstructured(
        parameters, prune.L1Unstructured, amount=0.5, pipeline_parallel=True
    )
    wrong = found(part, "stages", pipeline_parallel=True, prefix=f"stage{rank}")
    result = prune.verify(part, pipeline_parallel=True, prefix=f"stage{rank}")
    if result.num_pruned != report.num_pruned or len(result.parameters) != 4:
        wrong.append(str(result))
    return wrong


def test_pipeline_stages_have_parameters_of_their_own():
    assert_nothing_wrong(run_ranks(stages, 2))


def traffic(wrapping: str) -> tuple[int, int, int, list[str], str]:
    model = make(wrapping)
    prune_all(model)
    with Traffic() as seen:
        report = prune.verify(model)
    kinds = sorted({name for name, _ in seen.calls})
    data = json.loads(report.to_json())
    assert data["ok"] and data["num_pruned"] == report.num_pruned
    table = "\n".join(str(report).splitlines()[:-1])
    return report.num_collectives, report.bytes_sent, seen.num_bytes, kinds, table


@pytest.mark.parametrize("wrapping", ["ddp-2", "fsdp1-2", "fsdp2-3", "tp-2"])
def test_it_takes_a_few_small_all_reduces(wrapping):
    first, *others = run_ranks(traffic, wrappings.world_size(wrapping), wrapping)
    assert all(other == first for other in others)
    num_collectives, reported, seen, kinds, _ = first
    assert num_collectives == 4 and reported == seen and kinds == ["allreduce_"]
    assert seen <= 200 * 3 + 200


def test_the_report_is_a_table():
    model = make("plain-1")
    prune_all(model)
    text = str(prune.verify(model))
    assert "l1.weight" in text and "total" in text and "nothing is wrong" in text


@pytest.mark.parametrize("layer", ["lstm", "attention"])
def test_modules_that_read_their_weights_themselves(layer):
    model = nn.ModuleDict(
        {"lstm": nn.LSTM(4, 4)} if layer == "lstm" else {"attn": nn.MultiheadAttention(4, 2)}
    )
    names = ["weight_ih_l0", "weight_hh_l0"] if layer == "lstm" else ["in_proj_weight", "weight"]
    prune.global_unstructured(prune.select(model, names=names), prune.L1Unstructured, amount=0.5)
    x = torch.ones(2, 1, 4)
    for when in ("pruned", "forward", "stepped", "forward again"):
        assert prune.verify(model).ok, when
        if when != "stepped":
            out = model["lstm"](x)[0] if layer == "lstm" else model["attn"](x, x, x)[0]
            out.sum().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
    state = copy.deepcopy(model.state_dict())
    model.load_state_dict(state)
    assert prune.verify(model).ok
