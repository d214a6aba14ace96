"""Headers, and metadata of masks, are read or refused by name."""

import json

import pytest
import torch
from safetensors.torch import save as safetensors_save

from distprune.files.checkpoint import read_header
from distprune.files.errors import CheckpointError
from distprune.files.mask_files import MASK_FILE, open_masks
from distprune.files.planning import plan
from distprune.files.pruning import prune
from helpers.recipes import raw_recipe
from helpers.tiny_checkpoints import encode, file_bytes, save

ONE = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def read(tmp_path, raw):
    path = tmp_path / "model.safetensors"
    path.write_bytes(raw)
    return read_header(path)


def test_reads_what_safetensors_writes(tmp_path):
    tensors = {
        "b": torch.ones(2, 3, dtype=torch.bfloat16),
        "a": torch.zeros(()),
        "e": torch.ones(0),
    }
    raw = safetensors_save(tensors, metadata={"format": "pt"})
    found = read(tmp_path, raw)
    assert found.metadata == {"format": "pt"}
    assert {t.name: (t.dtype, t.shape) for t in found.tensors} == {
        "a": ("F32", ()), "b": ("BF16", (2, 3)), "e": ("F32", (0,)),
    }  # fmt: skip
    assert found.size == len(raw) and found.tensors[-1].stop == len(raw)
    b = next(t for t in found.tensors if t.name == "b")
    assert raw[b.start : b.stop] == b"\x80\x3f" * 6 and b.numel == 6


def test_odd_header_length_and_unknown_dtypes_are_read(tmp_path):
    header = {"x": {"dtype": "F3_NEW", "shape": [5], "data_offsets": [0, 3]}}
    raw = encode(header, b"abc", padding=1)
    found = read(tmp_path, raw)
    assert (found.tensors[0].dtype, found.tensors[0].nbytes) == ("F3_NEW", 3)
    assert found.tensors[0].start == len(raw) - 3


BROKEN = {
    "empty": (b"", "truncated, or not a safetensors file: it has 0 bytes"),
    "short": (b"abc", "it has 3 bytes"),
    "huge": ((2**63).to_bytes(8, "little") + b"{}", "should have 9223372036854775808"),
    "cut header": (file_bytes({"x": torch.ones(4)})[:30], "truncated"),
    "cut data": (file_bytes({"x": torch.ones(4)})[:-1], "truncated"),
    "more data": (file_bytes({"x": torch.ones(4)}) + b"x", "where its tensors end"),
    "array": (encode(b"[]"), "malformed"),
    "no JSON": (encode(b"{'x': 1}"), "not valid JSON"),
    "latin": (encode(b'{"\xe9": 1}'), "not valid JSON"),
    "deep": (encode(b'{"x":' + b"[" * 200_000 + b"]" * 200_000 + b"}"), "not valid JSON"),
    "overlap": (encode({"x": ONE, "y": ONE | {"data_offsets": [4, 12]}}, bytes(12)), "'y' is"),
    "hole": (encode({"x": ONE | {"data_offsets": [4, 12]}}, bytes(12)), "tensor 'x' is F32"),
    "wrong shape": (encode({"x": ONE | {"shape": [3]}}, bytes(8)), "that it needs"),
    "overflow": (encode({"x": ONE | {"shape": [2**62, 2**62]}}, bytes(8)), "that it needs"),
    "beyond": (encode({"x": ONE | {"dtype": "X", "data_offsets": [0, 9]}}, bytes(8)), "truncated"),
    "backwards": (encode({"x": ONE | {"data_offsets": [8, 0]}}, bytes(8)), "'x' is F32"),
    "negative": (encode({"x": ONE | {"data_offsets": [0, -88]}}, bytes(8)), "has the sizes"),
    "float": (encode({"x": ONE | {"shape": [2.0]}}, bytes(8)), "has the sizes"),
    "bool": (encode({"x": ONE | {"shape": [True]}}, bytes(8)), "has the sizes"),
    "no shape": (encode({"x": {"dtype": "F32"}}, bytes(8)), "malformed: 'shape'"),
    "metadata": (encode({"__metadata__": [1], "x": ONE}, bytes(8)), "malformed"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_files_are_refused_by_name(tmp_path, case):
    raw, text = BROKEN[case]
    with pytest.raises(CheckpointError, match=r"model\.safetensors") as error:
        read(tmp_path, raw)
    assert text in str(error.value)


def test_folders_and_missing_files_are_refused(tmp_path):
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(CheckpointError, match="cannot be read"):
            read_header(path)


BAD = [None, -1, "x", [[]], [-4, -4, 3], ["4", 4], [[4], 4], {"a": "x"}, 2**70]


@pytest.fixture(scope="module")
def pruned(tmp_path_factory):
    folder = tmp_path_factory.mktemp("masks")
    source = save(folder / "source", {"a.weight": torch.randn(4, 4)})
    prune(plan(source, raw_recipe(0.5)), folder / "pruned")
    return folder / "pruned"


@pytest.mark.parametrize("bad", BAD)
def test_bad_metadata(pruned, tmp_path, bad):
    raw = (pruned / MASK_FILE).read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    path = tmp_path / MASK_FILE
    path.parent.mkdir()
    texts = [json.dumps({"a.weight": bad}), json.dumps({"b.weight": [4, 4]}), "{", "[" * 99999]
    for text in [json.dumps(bad), *texts]:
        header["__metadata__"]["shapes"] = text
        path.write_bytes(encode(header, raw[8 + length :]))
        with pytest.raises(CheckpointError, match="malformed"):
            open_masks(tmp_path)
