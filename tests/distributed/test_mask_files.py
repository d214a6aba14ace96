"""Masks go from a folder onto any wrapper and back, bit for bit; all ranks or none."""

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import distprune as prune
from distprune.base.naming import unwrap
from distprune.testing import run_ranks
from helpers import wrappings
from helpers.comparisons import (
    assert_nothing_wrong,
    assert_nothing_wrong_on,
    changes,
    outcome,
    raised,
    snapshot,
    wrong_masks,
)
from helpers.models import Net, ShapesNet, seeded, target

WRAPPINGS = wrappings.sampled(["plain-1", *wrappings.ALL])
FILE = "distprune/masks.safetensors"


def pruned_net(net=ShapesNet, amount=0.4) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    model = seeded(net())
    pairs = prune.select(model, names=("weight", "bias"), exclude="l2.bias", everything=True)
    prune.global_unstructured(pairs, prune.L1Unstructured, amount=amount)
    masks = {n.removesuffix("_mask"): m.bool() for n, m in model.named_buffers()}
    return model, masks


@pytest.fixture
def folder(tmp_path) -> Path:
    prune.save_masks(pruned_net()[0], tmp_path / "saved")
    return tmp_path / "saved"


def loaded_and_saved(wrapping: str, net: type, folder: Path, out: Path) -> list[str]:
    """What is wrong with the masks of a dense model after loading."""
    _, keeps = pruned_net(net)
    model = seeded(net(), seed=9)
    indices = wrappings.local_indices(model, wrapping)
    model = wrappings.wrap(model, wrapping)
    report = prune.load_masks(model, folder)
    wrong = wrong_masks(model, keeps, indices)
    counts = {each.name: each.num_pruned for each in report.parameters}
    expected = {name: int((~keep).sum()) for name, keep in keeps.items()}
    if counts != expected:
        wrong.append(f"{counts} pruned, not {expected}")
    prune.save_masks(model, out)
    return wrong


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_masks_reach_every_wrapper_and_come_back_to_the_byte(wrapping, tmp_path):
    folder, out = tmp_path / "folder", tmp_path / "out"
    # FSDP1 without use_orig_params makes one flat parameter of a layer, whatever its shapes.
    net = Net if wrappings.kind_of(wrapping) == "fsdp1_flat" else ShapesNet
    prune.save_masks(pruned_net(net)[0], folder)
    assert_nothing_wrong_on(wrapping, loaded_and_saved, net, folder, out)
    assert (out / FILE).read_bytes() == (folder / FILE).read_bytes()
    assert [path.name for path in (out / "distprune").iterdir()] == ["masks.safetensors"]


def test_bits_are_row_major_and_the_first_is_the_lowest(tmp_path):
    model = nn.Linear(5, 3, bias=False)
    keep = torch.ones(3, 5)
    keep[0, 0] = keep[1, 4] = keep[2, 4] = 0
    prune.custom_from_mask(model, "weight", keep)
    prune.save_masks(model, tmp_path)
    assert (tmp_path / FILE).read_bytes()[-2:] == bytes([0b11111110, 0b00111101])


def test_an_earlier_mask_holds_on_and_tied_parameters_are_one(tmp_path):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
            self.c.weight = self.a.weight

    model, other = Tied(), Tied()
    prune.l1_unstructured(model.b, "weight", 5)
    prune.global_unstructured(
        prune.select(model, include=["a", "c"]), prune.L1Unstructured, amount=3
    )
    prune.save_masks(model, tmp_path)
    prune.random_unstructured(other.b, "weight", 6)
    before = other.b.weight_mask.clone()
    report = prune.load_masks(other, tmp_path)
    assert torch.equal(other.b.weight_mask, before * model.b.weight_mask)
    assert [each.name for each in report.parameters] == ["a.weight", "b.weight"]
    assert torch.equal(other.a.weight_mask, model.a.weight_mask)
    assert torch.equal(other.c.weight_mask, other.a.weight_mask)
    assert other.c.weight_orig is other.a.weight_orig
    assert prune.is_pruned(other.c)


def stage(folder: Path, out: Path) -> list[str]:
    """Each rank has a part of the model, and one more a replica of the first."""
    rank, (_, keeps) = dist.get_rank(), pruned_net()
    model = seeded(ShapesNet(), seed=9)
    parts = [["l1", "conv"], ["l2", "l3", "norm", "one"], ["l1", "conv"]]
    part = nn.ModuleDict({name: getattr(model, name) for name in parts[rank]})
    mine = {n: keep for n, keep in keeps.items() if n.partition(".")[0] in parts[rank]}
    group, _ = dist.new_subgroups_by_enumeration([[0, 2], [1]])
    report = prune.load_masks(part, folder, strict=False, group=group)
    others = [n for n in keeps if n not in mine]
    masks = {n.removesuffix("_mask"): m.bool() for n, m in part.named_buffers()}
    wrong = [name for name, keep in mine.items() if not torch.equal(masks[name], keep)]
    prune.save_masks(part, out, pipeline_parallel=True)
    wrong += [str(report)] * (sorted(report.unexpected_keys) != sorted(others))
    return wrong + [f"{name} has a mask" for name in masks.keys() - mine.keys()]


def test_pipeline_stages(folder, tmp_path):
    assert_nothing_wrong(run_ranks(stage, 3, folder, tmp_path / "out"))
    model = seeded(ShapesNet(), seed=9)
    prune.load_masks(model, tmp_path / "out")
    keeps = pruned_net()[1]
    assert all(torch.equal(m.bool(), keeps[n[:-5]]) for n, m in model.named_buffers())


def error_of(function, model, *arguments, **options) -> str:
    kind, text, changed = outcome(model, lambda: function(model, *arguments, **options))
    return f"{kind}: {text}" + "".join(f" CHANGED {each}" for each in changed)


def refusals(folders: list[Path], file: Path) -> list[str]:
    """Errors: another model, other shapes, no masks, other masks on one rank, a lost folder."""
    rank = dist.get_rank()
    wrapped = wrappings.wrap(seeded(ShapesNet()), "fsdp2-2")
    cut = wrappings.wrap(seeded(Net()), "fsdp2-2")
    wide = wrappings.wrap(seeded(ShapesNet((6, 10, 4, 3))), "fsdp2-2")
    return [
        error_of(prune.load_masks, cut, folders[0]),
        error_of(prune.load_masks, wide, folders[0]),
        error_of(prune.load_masks, wrapped, folders[0].parent / "nothing"),
        error_of(prune.load_masks, wrapped, folders[rank]),
        error_of(prune.load_masks, wrapped, folders[0] if rank else folders[0].parent),
        error_of(prune.save_masks, wrapped, folders[0]),
        error_of(prune.save_masks, wrappings.wrap(pruned_net()[0], "ddp-2"), file),
    ]


def test_errors_are_raised_on_every_rank_and_change_nothing(folder, tmp_path):
    other, file = tmp_path / "other", tmp_path / "file"
    prune.save_masks(pruned_net(amount=0.5)[0], other)
    file.write_text("in the way")
    expected = [
        "masks in",
        "l2.weight has shape (4, 10); its mask has (5, 10); l3.weight has",
        "has no masks (distprune/masks.safetensors is missing)",
        "rank 0 has crc32 of the masks",
        "on rank 0: CheckpointError",
        "ValueError: nothing is pruned in this model",
        "on rank 0: ",
    ]
    for errors in run_ranks(refusals, 2, [folder, other], file):
        for text, part in zip(errors, expected, strict=True):
            assert part in text and "CHANGED" not in text, text


# What of the zeros in weights becomes a mask; on every wrapper: test_operations.py.


def test_a_model_stands_for_its_matrices_under_any_name():
    class Fused(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = nn.Parameter(torch.ones(2, 3, 4))
            self.dense = nn.Parameter(torch.ones(3, 4))
            self.scale = nn.Parameter(torch.zeros(4))
            self.row = nn.Parameter(torch.zeros(1, 4))
            self.tied = self.experts

    model = Fused()
    with torch.no_grad():
        model.experts[1, 2, 0] = -0.0
        model.experts[0, 0, 0] = float("nan")
    report = prune.masks_from_zeros(model)
    assert [(each.name, each.num_pruned) for each in report.parameters] == [("experts", 1)]
    assert prune.is_pruned(model) and not hasattr(model, "dense_mask")
    for mask in (model.experts_mask, model.tied_mask):
        assert mask[1, 2, 0] == 0 and mask.sum() == 23


def entirely_zero() -> nn.ModuleDict:
    model = nn.ModuleDict({"a": nn.Linear(4, 3), "lora_B": nn.Linear(4, 3)})
    with torch.no_grad():
        model["a"].weight[0] = 0
        model["lora_B"].weight.zero_()
    return model


@pytest.mark.parametrize(
    ("all_zero", "pruned"), [("leave", ["a.weight"]), ("prune", ["a.weight", "lora_B.weight"])]
)
def test_a_parameter_that_is_zero_entirely(all_zero, pruned):
    model = entirely_zero()
    before = snapshot(model)
    with pytest.raises(ValueError, match=r"lora_B\.weight: every element is zero"):
        prune.masks_from_zeros(model)
    with pytest.raises(ValueError, match="all_zero='no'; expected 'error', 'leave' or 'prune'"):
        prune.masks_from_zeros(model, all_zero="no")
    assert not changes(before, snapshot(model))
    report = prune.masks_from_zeros(model, all_zero=all_zero)
    assert [each.name for each in report.parameters] == pruned


def test_nothing_is_zero():
    model = nn.Linear(4, 3)
    nn.init.ones_(model.weight)
    with pytest.raises(ValueError, match="none of the 1 parameters has a zero"):
        prune.masks_from_zeros(model)
    assert not prune.is_pruned(model)


def stage_of_zeros() -> list[str]:
    """Each rank has a part of the model; one has no zeros at all."""
    rank = dist.get_rank()
    part = nn.ModuleDict({f"l{rank}": nn.Linear(4, 3)})
    nn.init.ones_(part[f"l{rank}"].weight)
    if rank != 1:
        with torch.no_grad():
            part[f"l{rank}"].weight[0, : rank + 1] = 0
    report = prune.masks_from_zeros(part, pipeline_parallel=True)
    counts = [(each.name, each.num_pruned) for each in report.parameters]
    wrong = [f"{counts}"] * (counts != [("l0.weight", 1), ("l2.weight", 3)])
    return wrong + ["the wrong one is pruned"] * (prune.is_pruned(part) != (rank != 1))


def test_pipeline_stages_of_zeros():
    assert_nothing_wrong(run_ranks(stage_of_zeros, 3))


def refusals_of_zeros() -> list[str]:
    """Replicas that differ; other arguments; zeros of one rank alone under FSDP are no fault."""
    rank, wrong = dist.get_rank(), []
    model = nn.Linear(4, 3, bias=False)
    nn.init.ones_(model.weight)
    with torch.no_grad():
        model.weight[0, rank] = 0
    before = snapshot(model)
    for arguments in ({}, {"all_zero": ("leave", "prune")[rank]}):
        text = raised(lambda given=arguments: prune.masks_from_zeros(model, **given))
        wrong += [text] * (not re.match(r"ValueError: (.|\n)*differ", text))
    return wrong + changes(before, snapshot(model))


def test_every_rank_raises_and_nothing_changes():
    assert_nothing_wrong(run_ranks(refusals_of_zeros, 2))


# ``masks_aside`` loses no mask, whatever fails: all are handed back, and none is on a model.


NAMES = ["l1.weight", "l2.weight", "l3.weight"]


def pruned() -> tuple[nn.Module, dict[str, torch.Tensor], dict[str, object]]:
    """A pruned model, its masks, and a snapshot."""
    model = seeded(Net())
    own = dist.new_subgroups(1)[0]
    prune.global_unstructured(prune.select(model), prune.L1Unstructured, amount=0.5, group=own)
    masks = {name: target(model, name)[0].weight_mask.clone() for name in NAMES}
    return model, masks, snapshot(model)


def other_masks(model: nn.Module, masks: dict[str, torch.Tensor], names=NAMES) -> list[str]:
    wrong = []
    for name in names:
        held = wrappings.whole(target(model, name)[0].weight_mask)
        wrong += [] if torch.equal(held.bool(), masks[name].bool()) else [f"{name}: another mask"]
    return wrong


def handed_back(
    model: nn.Module, back: dict[str, torch.Tensor], masks: dict[str, torch.Tensor]
) -> list[str]:
    wrong = ["some masks are on the model"] * prune.is_pruned(model)
    if list(back) != NAMES or not all(torch.equal(back[n], masks[n].bool()) for n in NAMES):
        wrong.append(f"handed back: {back}")
    return wrong


def one_layer_is_refused(only_on: int | None) -> list[str]:
    """By its wrapper on every rank, or by its dtype on one."""
    model, masks, _ = pruned()
    mesh = init_device_mesh("cpu", (4,))
    with pytest.raises(NotImplementedError) as caught, prune.masks_aside(model):
        fully_shard(model.l1, mesh=mesh)
        if only_on is None:
            fully_shard(model.l2, mesh=DeviceMesh("cpu", [3, 2, 1, 0]))
        elif dist.get_rank() == only_on:
            quantised = model.l2.weight.detach().to(torch.float8_e4m3fn)
            model.l2.weight = nn.Parameter(quantised, requires_grad=False)
    text, back = str(caught.value), caught.value.masks
    wrong = [] if re.search("l2.weight(.|\n)*(ascend|float8)", text) else [text]
    wrong += handed_back(model, back, masks)
    # What was handed back goes on the layers that take it.
    for name in ("l1.weight", "l3.weight"):
        prune.custom_from_mask(target(model, name)[0], "weight", back[name])
    return wrong + other_masks(model, masks, ["l1.weight", "l3.weight"])


@pytest.mark.parametrize("only_on", [None, 0, 3])
def test_one_unsupported_layer(only_on):
    assert_nothing_wrong(run_ranks(one_layer_is_refused, 4, only_on))


def body_raises(only_on: int | None, kind: type[BaseException]) -> list[str]:
    model, masks, _ = pruned()
    mesh = init_device_mesh("cpu", (2,))
    with pytest.raises(BaseException, match="out of memory") as caught, prune.masks_aside(model):
        fully_shard(model.l1, mesh=mesh)
        if only_on is None or dist.get_rank() == only_on:
            raise kind("out of memory")
    wrong = [] if isinstance(caught.value, kind) else [repr(caught.value)]
    return wrong + handed_back(model, caught.value.masks, masks)


def bodies_raise() -> list[str]:
    cases = [(None, RuntimeError), (0, RuntimeError), (1, RuntimeError), (None, KeyboardInterrupt)]
    return [f"{case}: {text}" for case in cases for text in body_raises(*case)]


def test_the_body_raises_or_is_interrupted():
    assert_nothing_wrong(run_ranks(bodies_raise, 2))


def refused_on_entry(only_on: int) -> list[str]:
    """A rank has a mask that multiplies; then another set of masks."""
    model, *_ = pruned()
    is_other = dist.get_rank() == only_on
    if is_other:
        model.l2.weight_mask[0, 0] = 0.5
    before = snapshot(model)
    with pytest.raises(ValueError, match=r"l2\.weight(.|\n)*0\.5"), prune.masks_aside(model):
        pass
    wrong = changes(before, snapshot(model))
    if is_other:
        prune.remove(model.l2, "weight")
    before = snapshot(model)
    with pytest.raises(ValueError, match="pruned parameters: l1"), prune.masks_aside(model):
        pass
    return wrong + changes(before, snapshot(model))


@pytest.mark.parametrize("only_on", [0, 1])
def test_refused_on_entry(only_on):
    assert_nothing_wrong(run_ranks(refused_on_entry, 2, only_on))


def told(wrapping: str) -> list[str]:
    """Pruning, verify and remove say what to do; with masks_aside nothing whole is left."""
    model = wrappings.wrap(pruned()[0], wrapping)
    layer, wrong = unwrap(wrappings.unwrapped(model).l1), []
    calls = {
        "prune": lambda: prune.l1_unstructured(layer, "weight", 0.1),
        "remove": lambda: prune.remove(layer, "weight"),
        "verify": lambda: prune.verify(model),
    }
    for what, call in calls.items():
        text = raised(call)
        is_told = re.match(r"(RuntimeError|VerificationError): (.|\n)*masks_aside", text)
        wrong += [f"{what}: {text}"] * (not is_told)
    model, *_ = pruned()
    with prune.masks_aside(model):
        wrong += ["still pruned inside"] * prune.is_pruned(model)
        model = wrappings.wrap(model, wrapping)
    for module in wrappings.unwrapped(model).modules():
        for name, held in [*module._buffers.items(), *module.__dict__.items()]:
            whole = isinstance(held, torch.Tensor) and not isinstance(held, DTensor)
            if whole and held.numel() >= 50 and name not in ("weight", "_flat_param"):
                wrong.append(f"a whole tensor is left: {name} {tuple(held.shape)}")
    return wrong


def test_what_is_told_of_a_model_that_was_pruned_before_it_was_sharded():
    for wrapping in ("fsdp2-2", "fsdp1-2", "fsdp1_flat-2"):
        assert_nothing_wrong(run_ranks(told, 2, wrapping))
