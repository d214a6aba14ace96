"""Headers are read or refused; no bytes, however damaged, have another effect."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save as safetensors_save

from distprune.files.checkpoints.header import MAX_HEADER_BYTES, read_header
from distprune.files.errors import CheckpointError
from helpers.sampling import num_examples
from helpers.tiny_checkpoints import encode, file_bytes

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
    "empty": (b"", "is empty"),
    "short": (b"abc", "8 bytes of a header length"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:12\n", "git lfs pull"),
    "huge": ((2**63).to_bytes(8, "little") + b"{}", "claims a header of 9223372036854775808"),
    "cut header": (file_bytes({"x": torch.ones(4)})[:30], "truncated"),
    "cut data": (file_bytes({"x": torch.ones(4)})[:-1], "truncated"),
    "more data": (file_bytes({"x": torch.ones(4)}) + b"x", "expected no bytes after them"),
    "array": (encode(b"[]"), "not a JSON object"),
    "no JSON": (encode(b"{'x': 1}"), "not valid JSON"),
    "latin": (encode(b'{"\xe9": 1}'), "not valid JSON"),
    "deep": (encode(b'{"x":' + b"[" * 200_000 + b"]" * 200_000 + b"}"), "nested too deeply"),
    "long number": (encode(b'{"x":' + b"9" * 10_000 + b"}"), "4300 digits"),
    "NaN": (encode(b'{"x": NaN}'), "not JSON"),
    "surrogate": (encode(b'{"\\ud800": {}}'), "Unicode"),
    "twice, other range": (
        encode(b'{"x": %s, "x": {"shape": [1]}}' % json.dumps(ONE).encode(), bytes(8)),
        "'x' occurs twice",
    ),
    "twice, same range": (
        encode(b'{"x": %s, "x": %s}' % (2 * (json.dumps(ONE).encode(),)), bytes(8)),
        "'x' occurs twice",
    ),
    "overlap": (
        encode({"x": ONE, "y": ONE | {"data_offsets": [4, 12]}}, bytes(12)),
        "overlaps with tensor 'x'",
    ),
    "same bytes": (encode({"x": ONE, "y": ONE}, bytes(8)), "overlaps with tensor 'x'"),
    "hole": (
        encode({"x": ONE, "y": ONE | {"data_offsets": [12, 20]}}, bytes(20)),
        "hole after tensor 'x'",
    ),
    "hole first": (
        encode({"x": ONE | {"data_offsets": [4, 12]}}, bytes(12)),
        "hole after the header",
    ),
    "wrong shape": (encode({"x": ONE | {"shape": [3]}}, bytes(8)), "needs 12 bytes, but has 8"),
    "beyond": (encode({"x": ONE | {"data_offsets": [0, 2**60]}}, bytes(8)), "truncated"),
    "backwards": (encode({"x": ONE | {"data_offsets": [8, 0]}}, bytes(8)), "claims the bytes"),
    "negative": (encode({"x": ONE | {"data_offsets": [-8, 0]}}, bytes(8)), "not two sizes"),
    "float": (encode({"x": ONE | {"shape": [2.0]}}, bytes(8)), "not a list of sizes"),
    "bool": (encode({"x": ONE | {"shape": [True]}}, bytes(8)), "not a list of sizes"),
    "overflow": (
        encode({"x": ONE | {"shape": [2**62, 2**62, 0]}}, bytes(8)),
        "has more than 2**63 - 1 elements",
    ),
    "no shape": (encode({"x": {"dtype": "F32"}}, bytes(8)), "lacks one of"),
    "dtype": (encode({"x": ONE | {"dtype": 3}}, bytes(8)), "dtype that is not a string"),
    "metadata": (encode({"__metadata__": {"a": 1}, "x": ONE}, bytes(8)), "__metadata__"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_files_are_refused_by_name(tmp_path, case):
    raw, text = BROKEN[case]
    with pytest.raises(CheckpointError, match=r"model\.safetensors") as error:
        read(tmp_path, raw)
    assert text in str(error.value)


def test_no_memory_is_taken_for_what_a_header_claims(tmp_path, monkeypatch):
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:  # sparse: the bytes are there, and none of them is stored
        file.write((MAX_HEADER_BYTES + 1).to_bytes(8, "little"))
        file.truncate(2**40)
    with pytest.raises(CheckpointError, match="expected at most 100000000"):
        read_header(path)


def test_folders_and_missing_files_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="not a regular file"):
        read_header(tmp_path)
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_header(tmp_path / "none")


GOOD = file_bytes(
    {"a.weight": torch.arange(6.0).reshape(2, 3), "b.bias": torch.ones(3, dtype=torch.bfloat16)}
)
MUTATION = st.tuples(
    st.sampled_from(["set", "insert", "delete", "cut", "copy"]),
    st.integers(0, len(GOOD)),
    st.binary(min_size=1, max_size=4) | st.sampled_from([b'"', b"{", b"[", b",", b"1e9", b"-1"]),
)


def mutate(raw, kind, at, piece):
    if kind == "set":
        return raw[:at] + piece + raw[at + len(piece) :]
    if kind == "insert":
        return raw[:at] + piece + raw[at:]
    if kind == "delete":
        return raw[:at] + raw[at + len(piece) :]
    return raw[:at] if kind == "cut" else raw[:at] + raw[at // 2 : at] + raw[at:]


@settings(max_examples=num_examples(400), deadline=None)
@given(st.lists(MUTATION, min_size=1, max_size=4), st.booleans())
def test_mutated_bytes_raise_our_error_or_make_sense(tmp_path_factory, mutations, mend_length):
    raw = GOOD
    for mutation in mutations:
        raw = mutate(raw, *mutation)
    if mend_length and b"}}" in raw:  # let the mutation reach the JSON
        raw = (raw.rindex(b"}}") + 2 - 8).to_bytes(8, "little", signed=True) + raw[8:]
    try:
        found = read(tmp_path_factory.getbasetemp(), raw)
    except CheckpointError:
        return
    assert sum(t.nbytes for t in found.tensors) == len(raw) - found.data_start
    assert all(t.numel >= 0 for t in found.tensors)
