"""``inspect`` counts floats of 16 bits and more, scalars and empty tensors too."""

import json

import pytest

from distprune.base.selecting import DTYPE_BITS
from distprune.files.checkpoint import open_checkpoint
from distprune.files.verifying import inspect
from helpers.tiny_checkpoints import encode


def folder_of(path, **tensors):
    """A checkpoint of (dtype, shape, bytes)."""
    header, data = {}, b""
    for name, (dtype, shape, raw) in tensors.items():
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        data += raw
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model_type": "tiny"}))
    (path / "model.safetensors").write_bytes(encode(header, data))
    return path


def look(folder):
    return {facts.entry.name: facts for facts in inspect(open_checkpoint(folder), [(2, 4)])}


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F6_E2M3", "F4", "C64", "X7"])
def test_zeros_that_are_not_counted_are_not_told(run, tmp_path, dtype):
    data = bytes(4 * DTYPE_BITS.get(dtype, 6) // 8)
    source = folder_of(tmp_path / "source", a=(dtype, [4], data), b=("F32", [2], bytes(8)))
    assert look(source)["a"].num_zero is None
    rows = {line.split()[0]: line.split() for line in run("inspect", source).out.splitlines()}
    assert rows["a"][4:7] == ["4", "-", "-"]
    assert rows["all"][1:] == ["floats", "1", "2", "2", "100.00", "%", "-", "0", "0"]
    tensors = {each["name"]: each for each in run("inspect", source, "--json").json["tensors"]}
    assert tensors["a"]["num_zero"] is None and tensors["b"]["num_zero"] == 2
