"""A file, a name of the hub, a folder of the cache; and what to do with other forms of weights."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from distprune.files.checkpoints.checkpoint import open_checkpoint
from distprune.files.errors import CheckpointError
from distprune.files.planning import plan
from distprune.files.pruning import prune
from distprune.files.recipe import FileRecipe
from helpers import tiny_checkpoints
from helpers.tiny_checkpoints import file_bytes

WEIGHTS = {"layers.0.weight": torch.randn(8, 8).bfloat16()}
VARIABLES = ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME", "HOME")


@pytest.fixture
def source(tmp_path):
    return tiny_checkpoints.save(tmp_path / "source", WEIGHTS)


def refused(source):
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(source)
    assert error.value.exit_code == 3
    (text,) = error.value.problems or (error.value.headline,)
    assert "\n" not in text
    return text


def names_of(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


# The file itself


def test_the_file_of_a_folder_stands_for_the_folder(source, tmp_path):
    found = open_checkpoint(source / "model.safetensors")
    assert found.folder == str(source) and found.note == ""
    assert found == open_checkpoint(source)


def test_a_file_without_a_config_is_the_whole_checkpoint(tmp_path):
    downloads = tmp_path / "downloads"
    downloads.mkdir()
    (downloads / "diary.txt").write_text("private")
    (downloads / "other.safetensors").write_bytes(file_bytes(WEIGHTS))
    (downloads / "lora.safetensors").write_bytes(file_bytes(WEIGHTS))
    made = plan(downloads / "lora.safetensors", FileRecipe(0.5, masks=False))
    assert "so it is the whole checkpoint" in made.checkpoint.note
    prune(made, downloads / "target")  # beside it, but not inside of what it is
    assert names_of(downloads / "target") == {
        "lora.safetensors", "README.md", "distprune/recipe.yaml", "distprune/report.json",
        "distprune/run.json",
    }  # fmt: skip


def test_a_file_says_which_of_several_is_meant(source):
    half = {name: tensor.half() for name, tensor in WEIGHTS.items()}
    (source / "model.fp16.safetensors").write_bytes(file_bytes(half))
    (source / "model.safetensors").rename(source / "weights.safetensors")
    assert "Give the right one" in refused(source)
    found = open_checkpoint(source / "model.fp16.safetensors")
    assert [entry.dtype for entry in found.tensors] == ["F16"]
    assert [name for name, _ in found.skipped] == ["weights.safetensors"]


def test_a_file_beside_a_stale_index(source):
    index = {"weight_map": {"layers.0.weight": "model-00001-of-00002.safetensors"}}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(source)
    assert f"or give {source / 'model.safetensors'} itself" in str(error.value)
    found = open_checkpoint(source / "model.safetensors")
    assert found.index is None and [file.name for file in found.files] == ["model.safetensors"]
    assert [name for name, _ in found.skipped] == ["model.safetensors.index.json"]


def test_one_shard_is_no_checkpoint_but_the_index_is(tmp_path):
    other = {"layers.1.weight": torch.randn(8, 8)}
    source = tiny_checkpoints.save(tmp_path / "source", WEIGHTS, other)
    shard = source / "model-00001-of-00002.safetensors"
    assert "is one of the 2 files that model.safetensors.index.json lists" in refused(shard)
    found = open_checkpoint(source / "model.safetensors.index.json")
    assert found == open_checkpoint(source)


# The hub's cache


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A hub cache, and no other one: cache("org/name", folder) puts a model into it."""
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)

    def add(name, source, commit="a1", is_main=True):
        model = tmp_path / "hub" / ("models--" + name.replace("/", "--"))
        (model / "blobs").mkdir(parents=True, exist_ok=True)
        snapshot = model / "snapshots" / commit
        snapshot.mkdir(parents=True)
        for path in source.iterdir():
            blob = f"{commit}-{path.name}"
            (model / "blobs" / blob).write_bytes(path.read_bytes())
            (snapshot / path.name).symlink_to(f"../../blobs/{blob}")
        if is_main:
            (model / "refs").mkdir(exist_ok=True)
            (model / "refs" / "main").write_text(commit)
        return model

    return add


@pytest.mark.parametrize("name", ["org/na.me-1", "gpt2"])
def test_a_name_is_its_main_snapshot(cache, source, tmp_path, name):
    model = cache(name, source)
    cache(name, source, "b2", is_main=False)
    found = open_checkpoint(name)
    assert found.folder == str(model / "snapshots" / "a1")
    assert found.note == f"{name} is {found.folder}."
    prune(plan(name, FileRecipe(0.5)), tmp_path / "target")
    assert {"model.safetensors", "config.json", "tokenizer.json"} < names_of(tmp_path / "target")
    assert not any(path.is_symlink() for path in (tmp_path / "target").rglob("*"))


def test_a_path_comes_before_a_name(cache, source, tmp_path):
    cache("org/name", source)
    tiny_checkpoints.save(tmp_path / "org" / "name", {"other.weight": torch.ones(8, 8)})
    assert [entry.name for entry in open_checkpoint("org/name").tensors] == ["other.weight"]


@pytest.mark.parametrize(
    ("variable", "place"),
    [
        ("HF_HUB_CACHE", ""),
        ("HUGGINGFACE_HUB_CACHE", ""),
        ("HF_HOME", "hub"),
        ("XDG_CACHE_HOME", "huggingface/hub"),
        ("HOME", ".cache/huggingface/hub"),
    ],
)
def test_where_the_cache_is(cache, source, tmp_path, monkeypatch, variable, place):
    model = cache("org/name", source)
    home = tmp_path / "elsewhere"
    (home / place).mkdir(parents=True)
    os.rename(model, home / place / model.name)
    monkeypatch.delenv("HF_HUB_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path / "empty"))
    assert "does not exist, neither" in refused("org/name")
    monkeypatch.setenv(variable, str(home))
    assert len(open_checkpoint("org/name").tensors) == 1


def test_a_folder_of_the_cache_is_its_main_snapshot(cache, source, tmp_path):
    model = cache("org/name", source)
    assert open_checkpoint(model).folder == str(model / "snapshots" / "a1")
    (model / "refs" / "main").write_text("c3")
    text = refused(model)
    assert "the main branch is at c3, which was not downloaded" in text
    assert f"Give one of its snapshots: {model / 'snapshots' / 'a1'}." in text
    (model / "refs" / "main").unlink()
    assert open_checkpoint(model).folder == str(model / "snapshots" / "a1")
    cache("org/name", source, "b2", is_main=False)
    text = refused("org/name")
    assert "snapshots/a1" in text and "snapshots/b2" in text
    (model / "refs" / "main").write_text("../../../../etc")
    assert "which was not downloaded" in refused(model)


def test_a_whole_cache_is_no_checkpoint(cache, source, tmp_path):
    for name in ("org/one", "gpt2"):
        cache(name, source)
    assert "expected one of its models, by its name: gpt2, org/one." in refused(tmp_path / "hub")


def test_a_folder_that_is_no_checkpoint_is_not_searched_to_the_ground(tmp_path, monkeypatch):
    make(tmp_path / "home", "a/b/c/deep.txt", "a/model.safetensors")
    looked_at = []
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: looked_at.append(str(path)) or scandir(path))
    assert "give one of its folders" in refused(tmp_path / "home")
    assert [os.path.relpath(path, tmp_path / "home") for path in looked_at] == [".", "a"]


def test_names_that_are_nowhere(cache, tmp_path):
    assert "To download it: hf download org/name." in refused("org/name")
    assert str(tmp_path / "hub") in refused("org/name")
    assert "does not exist; expected a folder" in refused("../up/there")
    (tmp_path / "hub" / "models--org--empty" / "snapshots").mkdir(parents=True)
    assert "It has no snapshot: download it." in refused("org/empty")


@pytest.mark.parametrize(
    ("url", "texts"),
    [
        ("hf://org/name", ("hf download org/name", "give its name: org/name")),
        ("hf:/org/name", ("hf://org/name is a URL",)),  # as a Path has it
        ("https://huggingface.co/org/name/tree/main", ("hf download org/name",)),
        ("s3://bucket/key", ("aws s3 cp --recursive s3://bucket/key DIR",)),
        ("gs://bucket/key", ("gcloud storage cp -r",)),
        ("https://example.com/x.safetensors", ("Copy it to a local disk first, and give",)),
        ("file:///data/model", ("expected a path: /data/model",)),
    ],
)
def test_a_url_gets_a_sentence(cache, url, texts):
    text = refused(url)
    assert all(each in text for each in texts), text
    assert "is a URL" in text


# Other forms of weights


def make(folder, *names, content=b"x"):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


FORMS = {
    "diffusers": (
        ("model_index.json", "unet/config.json", "unet/diffusion_pytorch_model.safetensors"),
        ("pipeline of diffusers", "/unet)"),
    ),
    "mistral": (
        ("consolidated.safetensors", "params.json"),
        ("Mistral's consolidated form", "/consolidated.safetensors;"),
    ),
    "dcp": (
        (".metadata", "__0_0.distcp", "__1_0.distcp"),
        ("torch.distributed.checkpoint", "save_pretrained"),
    ),
    "gguf": (("model.Q4_K_M.gguf",), ("holds GGUF", "convert_hf_to_gguf.py")),
    "megatron": (
        ("latest_checkpointed_iteration.txt", "iter_0000010/mp_rank_00/model_optim_rng.pt"),
        ("Megatron",),
    ),
    "tensorflow": (("saved_model.pb", "variables/variables.index"), ("TensorFlow or Flax",)),
    "keras": (("tf_model.h5", "config.json"), ("TensorFlow or Flax",)),
    "flax": (("flax_model.msgpack", "config.json"), ("TensorFlow or Flax",)),
    "onnx": (("onnx/model.onnx", "config.json"), ("holds ONNX",)),
    "pickles": (("pytorch_model.bin", "config.json"), ("holds pickled weights", "save_pretrained")),
    "deeper": (("a/model.safetensors", "b/model.safetensors"), ("give one of its folders", "/a, ")),
    "nothing": (("README.md",), ("holds no safetensors file, and no pickled one",)),
    "only training's": (
        ("training_args.bin", "optimizer.pt"),
        ("holds no safetensors file, and no pickled one",),
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_another_form_gets_a_sentence(tmp_path, form):
    names, texts = FORMS[form]
    make(tmp_path / "source", *names, content=b"{}")
    text = refused(tmp_path / "source")
    assert all(each in text for each in texts), text


def test_files_that_are_no_safetensors_get_a_sentence(tmp_path):
    make(tmp_path, "a.bin", "b.gguf", "c.txt")
    assert "save_pretrained" in refused(tmp_path / "a.bin")
    assert "GGUF cannot be pruned" in refused(tmp_path / "b.gguf")
    assert "Give a folder" in refused(tmp_path / "c.txt")


def test_what_the_sentences_advise_works(tmp_path):
    pipeline = tmp_path / "pipeline"
    make(pipeline, "model_index.json", "unet/config.json", content=b"{}")
    (pipeline / "unet" / "diffusion_pytorch_model.safetensors").write_bytes(file_bytes(WEIGHTS))
    assert len(open_checkpoint(pipeline / "unet").tensors) == 1
    mistral = tmp_path / "mistral"
    make(mistral, "params.json", "tokenizer.model.v3", content=b"{}")
    (mistral / "consolidated.safetensors").write_bytes(file_bytes(WEIGHTS))
    found = open_checkpoint(mistral / "consolidated.safetensors")
    assert {other.name for other in found.others} == {"params.json", "tokenizer.model.v3"}


def test_the_cache_is_read_without_the_hub_library(cache, source):
    cache("org/name", source)
    program = (
        "import sys\n"
        "from distprune.files.checkpoints.checkpoint import open_checkpoint\n"
        "open_checkpoint('org/name')\n"
        "assert not {'torch', 'numpy', 'huggingface_hub'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, env=os.environ | {
        "PYTHONPATH": str(Path(__file__).resolve().parents[2])
    })  # fmt: skip
