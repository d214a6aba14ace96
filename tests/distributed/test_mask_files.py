"""Masks go from a folder onto any wrapper and back, bit for bit; all ranks or none."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import distprune as prune
from distprune.testing import run_ranks
from helpers import wrappings
from helpers.comparisons import assert_nothing_wrong, assert_nothing_wrong_on, outcome, wrong_masks
from helpers.models import Net, ShapesNet, fill

WRAPPINGS = wrappings.sampled(["plain-1", *wrappings.ALL])
FILE = "distprune/masks.safetensors"


def pruned_net(net=ShapesNet, amount=0.4) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    model = fill(net(), "normal", "float32")
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
    model = fill(net(), "normal", "float32", seed=9)
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
    model = fill(ShapesNet(), "normal", "float32", seed=9)
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
    model = fill(ShapesNet(), "normal", "float32", seed=9)
    prune.load_masks(model, tmp_path / "out")
    keeps = pruned_net()[1]
    assert all(torch.equal(m.bool(), keeps[n[:-5]]) for n, m in model.named_buffers())


def error_of(function, model, *arguments, **options) -> str:
    kind, text, changed = outcome(model, lambda: function(model, *arguments, **options))
    return f"{kind}: {text}" + "".join(f" CHANGED {each}" for each in changed)


def refusals(folders: list[Path], file: Path) -> list[str]:
    """Errors: another model, other shapes, no masks, other masks on one rank, a lost folder."""
    rank = dist.get_rank()
    wrapped = wrappings.wrap(fill(ShapesNet(), "normal", "float32"), "fsdp2-2")
    cut = wrappings.wrap(fill(Net(), "normal", "float32"), "fsdp2-2")
    wide = wrappings.wrap(fill(ShapesNet((6, 10, 4, 3)), "normal", "float32"), "fsdp2-2")
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
