"""Checkpoints of many architectures, pruned by files: every byte against an oracle of its own.

The oracle holds everything in memory, sorts with numpy, and shares no code with the package. Which
tensors are selected is asked of the plan; tests/files/test_policy.py and its neighbours judge that.
"""

import json
import re
import shutil

import numpy as np
import pytest
import torch

from distprune.files.planning import plan
from distprune.files.pruning import prune
from distprune.files.verifying import verify
from helpers.architecture_checkpoints import ARCHITECTURES, in_the_cache
from helpers.recipes import raw_recipe
from helpers.tiny_checkpoints import load

transformers = pytest.importorskip("transformers")
safetensors_torch = pytest.importorskip("safetensors.torch")

RECIPES = {
    "global": {"sparsity": 0.5},
    "layer": {"sparsity": 0.37, "scope": "layer"},
    "row": {"sparsity": 0.25, "scope": "row"},
    "2:4": {"pattern": "2:4"},
}
NOT_COPIED = ("pytorch_model.bin", "original/consolidated.00.pth", "onnx/model.onnx")


@pytest.fixture(scope="module", params=ARCHITECTURES, ids=lambda each: each.name)
def made(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints") / request.param.name
    return request.param, request.param.make(folder)


@pytest.mark.parametrize("way", RECIPES)
def test_every_byte_is_that_of_the_oracle(made, tmp_path, way):
    architecture, source = made
    planned = plan_for(architecture, source, way)
    names = [tensor.entry.name for tensor in planned.tensors]
    keeps = oracle(architecture, load(source), names, **RECIPES[way])
    report = prune(planned, tmp_path / "out")
    wanted = write_expected(source, tmp_path / "wanted", keeps)
    assert contents(tmp_path / "out") == contents(wanted)
    assert report.num_pruned == sum(int((~keep).sum()) for keep in keeps.values())
    check_masks(tmp_path / "out", keeps)
    assert verify(tmp_path / "out", source).problems == ()
    check_models(architecture, tmp_path / "out", wanted)


def test_there_are_24_checkpoints_of_20_architectures():
    assert len(ARCHITECTURES) >= 24
    assert len({each.config for each in ARCHITECTURES}) >= 20
    assert any(each.layout is in_the_cache for each in ARCHITECTURES)


def plan_for(architecture, source, way):
    uneven = architecture.not_by_four if way == "2:4" else ()
    return plan(source, raw_recipe(**RECIPES[way], exclude=uneven))


# The oracle.


def oracle(architecture, tensors, names, sparsity=None, scope="global", pattern=None):
    """Masks by name, True = keep."""
    names = sorted(names, key=by_number)
    scores = {name: np.abs(tensors[name].double().numpy()) for name in names}
    if pattern is not None:
        kept, size = map(int, pattern.split(":"))
        return {
            name: grouped(architecture, name, scores[name], size - kept, size) for name in names
        }
    if scope == "row":
        return {name: grouped(architecture, name, scores[name], sparsity, None) for name in names}
    if scope == "layer":
        return {name: lowest(scores[name].reshape(1, -1), sparsity, scores[name]) for name in names}
    flat = np.concatenate([scores[name].reshape(-1) for name in names])
    keep = lowest(flat.reshape(1, -1), sparsity, flat).numpy()
    keeps, first = {}, 0
    for name in names:
        keeps[name] = torch.from_numpy(keep[first : first + scores[name].size]).reshape(
            tensors[name].shape
        )
        first += scores[name].size
    return keeps


def lowest(rows, amount, like):
    """True where an element stays: each row loses its first ``amount`` in the total order."""
    count = round(amount * rows.shape[1]) if isinstance(amount, float) else amount
    keep = np.ones(rows.shape, dtype=bool)
    order = np.argsort(rows, axis=1, kind="stable")
    np.put_along_axis(keep, order[:, :count], False, axis=1)
    return torch.from_numpy(keep.reshape(like.shape))


def grouped(architecture, name, scores, amount, size):
    """Rows of an output unit each, or groups of ``size`` neighbours along the inputs."""
    is_input_first = architecture.stores_input_first(name)
    is_convolution = scores.ndim > 2 and "experts" not in name
    moved = scores
    if is_input_first:
        moved = np.swapaxes(scores, -1, -2)
    elif is_convolution and size is not None:
        moved = np.moveaxis(scores, 1, -1)
    if size is None:
        length = scores[0].size if is_convolution else moved.shape[-1]
    else:
        length = size
    keep = lowest(np.ascontiguousarray(moved).reshape(-1, length), amount, moved)
    if is_input_first:
        return keep.transpose(-1, -2).contiguous()
    if is_convolution and size is not None:
        return keep.movedim(-1, 1).contiguous()
    return keep


def by_number(name):
    return [int(part) if part.isdigit() else part for part in re.split("([0-9]+)", name)], name


def write_expected(source, folder, keeps):
    """The folder as it has to be, but for what distprune adds."""
    shutil.copytree(source, folder, ignore=lambda *_: ["distprune"])
    for name in NOT_COPIED:
        (folder / name).unlink(missing_ok=True)
    for path in folder.glob("*.safetensors"):
        raw = bytearray(path.read_bytes())
        start = 8 + int.from_bytes(raw[:8], "little")
        for name, entry in json.loads(raw[8:start]).items():
            if name in keeps:
                first, last = (start + offset for offset in entry["data_offsets"])
                numbers = np.frombuffer(raw, np.uint8, last - first, first)
                rows = numbers.reshape(keeps[name].numel(), -1)
                rows[~keeps[name].numpy().reshape(-1)] = 0
        path.write_bytes(raw)
    return folder


def contents(folder):
    """The bytes of each file; the card and what distprune adds are compared elsewhere."""
    paths = (path for path in sorted(folder.rglob("*")) if path.is_file())
    names = {str(path.relative_to(folder)): path.read_bytes() for path in paths}
    return {
        name: data
        for name, data in names.items()
        if name != "README.md" and not name.startswith("distprune/")
    }


def check_masks(folder, keeps):
    stored = load(folder / "distprune")
    assert stored.keys() == keeps.keys()
    for name, keep in keeps.items():
        bits = np.unpackbits(stored[name].numpy(), bitorder="little")
        assert np.array_equal(bits[: keep.numel()].astype(bool), keep.numpy().reshape(-1)), name
        assert not bits[keep.numel() :].any(), name


def check_models(architecture, folder, wanted):
    """transformers reads the same model from both."""
    cls = getattr(transformers, architecture.model)
    models = [cls.from_pretrained(each).state_dict() for each in (folder, wanted)]
    assert models[0].keys() == models[1].keys()
    for name, value in models[0].items():
        assert torch.equal(value, models[1][name]), name
