"""``convert``: every tensor of a pickled checkpoint, bit for bit, and no code of the pickle."""

import contextlib
import json
import os
import pickle
import random
import resource
import time
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from distprune.files.converting import Conversion, Converted, _load
from distprune.files.errors import CheckpointError, Interrupted, OutputError, SelectionError
from distprune.files.planning import plan
from distprune.files.recipe import FileRecipe
from helpers.disk_crashes import Steps, disk_is_full, run_forked
from helpers.sampling import every
from helpers.tiny_checkpoints import tree_digest

MANY = {
    "half": torch.randn(3, 5).half(),
    "brain": torch.randn(7).bfloat16(),
    "single": torch.randn(2, 3, 4),
    "double": torch.randn(3, dtype=torch.float64),
    "complex": torch.randn(3, dtype=torch.complex64),
    "whole": torch.arange(5),
    "bytes": torch.arange(5, dtype=torch.uint8),
    "wide": torch.arange(5).to(torch.uint64),
    "flags": torch.tensor([True, False]),
    "eight": torch.randn(9).to(torch.float8_e4m3fn),
    "scalar": torch.tensor(2.5),
    "empty": torch.empty(0, 3),
    "transposed": torch.randn(6, 4).t(),
    "part": torch.randn(10, 10)[2:7, 1::3],
    "spread": torch.randn(1, 3).expand(4, 3),
    "conjugated": torch.randn(3, dtype=torch.complex64).conj(),
    "nan": torch.tensor([float("nan"), -0.0, float("inf")]),
    "größe": torch.ones(1),
}


def folder_of(tmp_path, *shards, config=None, nest=lambda tensors: tensors):
    folder = tmp_path / "pickled"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config or {"model_type": "tiny"}))
    (folder / "code").mkdir()
    (folder / "code" / "modeling.py").write_text("x = 1\n")
    if len(shards) == 1:
        torch.save(nest(shards[0]), folder / "pytorch_model.bin")
        return folder
    weight_map = {}
    for which, tensors in enumerate(shards, 1):
        name = f"pytorch_model-{which:05d}-of-{len(shards):05d}.bin"
        torch.save(tensors, folder / name)
        weight_map |= dict.fromkeys(tensors, name)
    index = {"metadata": {"total_size": 1, "kept": "yes"}, "weight_map": weight_map}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return folder


def convert(source, target, **keywords):
    return Conversion(source).write(target, **keywords)


def refused(source, target):
    with pytest.raises(CheckpointError) as error:
        convert(source, target)
    assert not os.path.lexists(target)
    assert [name for name in os.listdir(target.parent) if "partial" in name] == []
    return str(error.value)


def test_the_bytes_are_those_of_the_safetensors_library(tmp_path):
    source = folder_of(tmp_path, MANY)
    done = convert(source, tmp_path / "target")
    plain = {name: tensor.resolve_conj().contiguous() for name, tensor in MANY.items()}
    plain["spread"] = plain["spread"].clone()
    save_file(plain, tmp_path / "expected.safetensors", metadata={"format": "pt"})
    found = (tmp_path / "target" / "model.safetensors").read_bytes()
    assert found == (tmp_path / "expected.safetensors").read_bytes()
    assert done.num_tensors == len(MANY)
    target = tmp_path / "target"
    names = {str(path.relative_to(target)) for path in target.rglob("*")}
    assert names == {"model.safetensors", "config.json", "code", "code/modeling.py"}


def test_shards_stay_shards_with_an_index_of_their_own(tmp_path):
    shards = [{f"layers.{i}.weight": torch.randn(4, 4)} for i in range(3)]
    source = folder_of(tmp_path, *shards)
    done = convert(source, tmp_path / "target")
    index = json.loads((tmp_path / "target" / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 3 * 64, "kept": "yes"}
    for i, shard in enumerate(shards):
        name = f"model-{i + 1:05d}-of-00003.safetensors"
        assert index["weight_map"][f"layers.{i}.weight"] == name
        found = load_file(tmp_path / "target" / name)
        assert torch.equal(found[f"layers.{i}.weight"], shard[f"layers.{i}.weight"])
    assert set(done.copied) == {"config.json", "code/modeling.py"}
    assert plan(tmp_path / "target", FileRecipe(0.5)).num_to_prune == 24


def test_tied_weights_are_written_under_each_name(tmp_path):
    weight = torch.randn(4, 4)
    source = folder_of(tmp_path, {"a": weight, "b": weight, "rows": weight[:2]})
    done = convert(source, tmp_path / "target")
    found = load_file(tmp_path / "target" / "model.safetensors")
    assert torch.equal(found["a"], weight) and torch.equal(found["b"], weight)
    assert torch.equal(found["rows"], weight[:2])
    assert done.tied == [["a", "b"]]


@pytest.mark.parametrize(
    "save",
    [
        lambda tensors, path: torch.save(tensors, path),
        lambda tensors, path: torch.save(tensors, path, _use_new_zipfile_serialization=False),
    ],
    ids=["zip", "before 1.6"],
)
def test_a_lone_file_in_either_form(tmp_path, save):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "diary.txt").write_text("private")
    save(OrderedDict(weight=torch.nn.Parameter(torch.ones(3, 3))), tmp_path / "in" / "best.pt")
    conversion = Conversion(tmp_path / "in" / "best.pt")
    assert "it is the whole checkpoint" in conversion.note
    conversion.write(tmp_path / "in" / "target")
    assert os.listdir(tmp_path / "in" / "target") == ["model.safetensors"]
    found = load_file(tmp_path / "in" / "target" / "model.safetensors")
    assert torch.equal(found["weight"], torch.ones(3, 3))


def test_one_level_of_nesting_is_opened_with_a_note(tmp_path):
    def nest(tensors):
        optimizer = {"state": {}, "lr": 0.1}
        return {"state_dict": tensors, "step": torch.tensor(3), "optimizer": optimizer}

    source = folder_of(tmp_path, {"w": torch.ones(2)}, nest=nest)
    done = convert(source, tmp_path / "target")
    assert list(load_file(tmp_path / "target" / "model.safetensors")) == ["w"]
    assert done.notes == [
        "pytorch_model.bin: the weights are those of 'state_dict'; left out: step, optimizer."
    ]


def test_what_safetensors_cannot_hold_is_refused_by_name(tmp_path):
    source = folder_of(tmp_path, {})
    one = torch.ones(1)
    for content, text in [
        ({"model": {"w": one}, "ema": {"w": one}}, "'ema' is a dict."),
        ({"w": one, "step": 3}, "'step' is a int."),
        ({"w": one, "model": {"v": one}}, "'model' is a dict."),
        ({"w": one, 5: one}, "5 is a Tensor"),
        ({"w": torch.eye(2).to_sparse()}, "'w' is a Tensor torch.float32 torch.sparse_coo cpu."),
        ({"w": torch.ones(1, device="meta")}, "'w' is a Tensor torch.float32 torch.strided meta."),
        ({"w": torch.ones(1, dtype=torch.complex128)}, "'w' is a Tensor torch.complex128"),
        ({"a\ud800": one}, "a\\ud800' is a Tensor"),
        ({"a": {"b": {"w": one}}}, "'a' is a dict."),
        ([one], "holds a list"),
        ({}, "It holds no tensors."),
    ]:
        torch.save(content, source / "pytorch_model.bin")
        assert text in refused(source, tmp_path / "target"), content


def test_a_missing_safetensors_names_the_extra(monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SelectionError, match=r"pip install 'distprune\[convert\]'"):
        Conversion(folder_of(tmp_path, {"w": torch.ones(1)}))


class _Malicious:
    """Runs a command when it is loaded as Python does."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


class _Exec(_Malicious):
    def __reduce__(self):
        return exec, (f"open({str(self.path)!r}, 'w')",)


@pytest.mark.parametrize("kind", [_Malicious, _Exec])
@pytest.mark.parametrize("how", ["zip", "legacy", "pickle"])
def test_code_in_a_pickle_is_refused_and_does_not_run(tmp_path, kind, how):
    source = folder_of(tmp_path, {"w": torch.ones(1)})
    path = source / "pytorch_model.bin"
    content = {"w": torch.ones(1), "x": kind(tmp_path / "ran")}
    if how == "pickle":
        path.write_bytes(pickle.dumps({"x": kind(tmp_path / "ran")}))
    else:
        torch.save(content, path, _use_new_zipfile_serialization=how == "zip")
    text = refused(source, tmp_path / "target")
    assert not (tmp_path / "ran").exists()
    name = "system" if kind is _Malicious else "exec"
    if how == "pickle":  # of no form that torch.save ever wrote
        assert "is not a file of torch.save" in text
    else:
        assert "contains the Python object" in text and name in text
    assert "weights_only=False" not in text and "\n" not in text
    with open(path, "rb") as file:  # it would have run
        (torch.load(file, weights_only=False) if how != "pickle" else pickle.load(file))
    assert (tmp_path / "ran").exists()


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")
def test_files_that_are_none_are_refused(tmp_path):
    source = folder_of(tmp_path, {"w": torch.randn(100)})
    path = source / "pytorch_model.bin"
    whole = path.read_bytes()
    for content, text in [
        (b"", "is not a file of torch.save"),
        (b"hello", "is not a file of torch.save"),
        (whole[: len(whole) // 2], "is not a file of torch.save"),
    ]:
        path.write_bytes(content)
        assert text in refused(source, tmp_path / "target")
    torch.jit.script(torch.nn.Linear(2, 2)).save(path)
    assert "TorchScript" in refused(source, tmp_path / "target")


def test_indices_that_do_not_fit(tmp_path):
    source = folder_of(tmp_path, {"a": torch.ones(1)}, {"b": torch.ones(1)})
    path = source / "pytorch_model.bin.index.json"
    first, second = (f"pytorch_model-0000{i}-of-00002.bin" for i in (1, 2))
    for weight_map, text in [
        ({"a": first, "b": second, "c": second}, f"{second} lacks c"),
        ({"a": first, "b": "../x.bin"}, "is not a plain name"),
        ({"a": first, "b": "gone.bin"}, "gone.bin is missing"),
        ({}, "no weight_map"),
    ]:
        path.write_text(json.dumps({"weight_map": weight_map}))
        assert text in refused(source, tmp_path / "target")
    path.write_text(json.dumps({"weight_map": {"a": first, "b": second}}))
    torch.save({"a": torch.ones(1), "b": torch.ones(1)}, source / second)
    assert "a is in pytorch_model-00002-of-00002.bin and in another file" in refused(
        source, tmp_path / "target"
    )


def test_folders_without_one_meaning(tmp_path):
    source = folder_of(tmp_path, {"a": torch.ones(1)})
    convert(source, tmp_path / "ready")
    assert "safetensors already" in refused(tmp_path / "ready", tmp_path / "target")
    (source / "pytorch_model.bin").rename(source / "one.pt")
    torch.save({"a": torch.zeros(1)}, source / "two.pt")
    assert "has 2 bin files (one.pt, two.pt, ...) and no index" in refused(
        source, tmp_path / "target"
    )
    convert(source / "two.pt", tmp_path / "target")
    assert load_file(tmp_path / "target" / "model.safetensors")["a"] == 0
    assert (tmp_path / "target" / "one.pt").exists()
    for name in ("one.pt", "two.pt"):
        (source / name).unlink()
    assert "and no pickled one" in refused(source, tmp_path / "other")


def test_the_destination_is_all_or_nothing(tmp_path):
    source = folder_of(tmp_path, {"a": torch.randn(50)}, {"b": torch.randn(50)})
    before = tree_digest(source)
    convert(source, tmp_path / "whole")
    with Steps() as steps:
        convert(source, tmp_path / "counted")
    for at in every(3, range(1, steps.count + 1), steps.count - 1):
        target = tmp_path / f"target-{at}"
        with Steps(at, disk_is_full) as failing, contextlib.suppress(OutputError, OSError):
            convert(source, target)
        assert failing.has_acted
        if os.path.lexists(target):  # only what comes after the rename failed
            assert tree_digest(target) == tree_digest(tmp_path / "whole")
        else:
            convert(source, target)
            assert tree_digest(target) == tree_digest(tmp_path / "whole")
    calls = iter([False, True])
    with pytest.raises(Interrupted):
        convert(source, tmp_path / "stopped", stop=lambda: next(calls))
    assert [name for name in os.listdir(tmp_path) if name.startswith("stopped")] == []
    with pytest.raises(OutputError, match="exists"):
        convert(source, tmp_path / "whole")
    with pytest.raises(OutputError, match="inside the source"):
        convert(source, source / "target")
    assert tree_digest(source) == before


def test_a_disk_that_is_full_while_weights_are_written(tmp_path):
    source = folder_of(tmp_path, {"a": torch.ones(1 << 18)})
    assert run_forked(_convert_into_little_room, source, tmp_path / "out") == 0
    assert sorted(os.listdir(tmp_path)) == ["pickled"]


def _convert_into_little_room(source, target):
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    with pytest.raises(OutputError, match=r"model\.safetensors cannot be written"):
        convert(source, target)


def test_permissions_are_those_of_pruning(tmp_path):
    source = folder_of(tmp_path, {"a": torch.ones(4)})
    for mode in (0o600, 0o644):
        (source / "pytorch_model.bin").chmod(mode)
        convert(source, tmp_path / f"{mode}")
        assert (tmp_path / f"{mode}" / "model.safetensors").stat().st_mode & 0o777 == mode


def test_a_shard_is_not_held_in_memory(tmp_path):
    """Pages of the mapped file are the system's; the process has little memory of its own."""
    source = folder_of(tmp_path, {f"w{i}": torch.ones(8 << 20) for i in range(6)})  # 200 MB
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            torch.set_num_threads(1)
            convert(source, tmp_path / "target")
            os._exit(0)
        os._exit(1)
    own = []
    while (status := os.waitpid(child, os.WNOHANG)) == (0, 0):
        with contextlib.suppress(IndexError):  # it has just ended
            text = Path(f"/proc/{child}/status").read_text()
            own.append(int(text.split("RssAnon:")[1].split()[0]))
        time.sleep(0.001)
    assert status == (child, 0)
    assert max(own) - own[0] < 100_000, (own[0], max(own))  # kB


def test_a_model_of_the_local_cache(tmp_path, monkeypatch):
    source = folder_of(tmp_path, {"w": torch.ones(2)})
    model = tmp_path / "hub" / "models--org--name"
    (model / "snapshots").mkdir(parents=True)
    source.rename(model / "snapshots" / "a1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    convert("org/name", "target")
    assert torch.equal(load_file(tmp_path / "target" / "model.safetensors")["w"], torch.ones(2))


def test_an_adapter_keeps_the_name_that_peft_looks_for(tmp_path):
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter" / "training_args.bin").write_bytes(b"a pickle of another kind")
    torch.save({"lora_A.weight": torch.ones(2)}, tmp_path / "adapter" / "adapter_model.bin")
    done = convert(tmp_path / "adapter", tmp_path / "target")
    assert done.files == {"adapter_model.bin": "adapter_model.safetensors"}
    assert set(done.copied) == {"adapter_config.json", "training_args.bin"}


@pytest.mark.parametrize("is_zip", [True, False])
def test_malformed_files_raise_nothing_else(tmp_path, is_zip):
    path = tmp_path / "model.pt"
    state = {"w": torch.randn(4, 4), "b": torch.ones(3)}
    torch.save(state, path, _use_new_zipfile_serialization=is_zip)
    raw, draw = path.read_bytes(), random.Random(0)
    refused = 0
    for _ in range(200):
        data = bytearray(raw)
        if draw.random() < 0.7:
            for _ in range(draw.randint(1, 4)):
                data[draw.randrange(len(data))] = draw.randrange(256)
        else:
            del data[draw.randrange(len(data)) :]
        path.write_bytes(data)
        try:
            _load(str(path), "model.pt", Converted({}, [], {}))
        except CheckpointError as error:
            assert "\n" not in error.headline
            refused += 1
    assert refused > 50
