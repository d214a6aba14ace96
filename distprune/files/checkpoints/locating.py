"""The location of a checkpoint: a folder, a safetensors file, or a model in the local hub cache."""

from __future__ import annotations

import os
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from distprune.base.report_text import listed
from distprune.files.checkpoints.header import INDEX_SUFFIX, load_json
from distprune.files.disk.access import reading
from distprune.files.errors import CheckpointError

_CONFIGS = ("config.json", "params.json", "adapter_config.json")
_SINGLE = "model.safetensors"  # the name of a file without an index
_WEIGHTS = (
    "*.safetensors", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.ckpt.*", "*.npz", "*.pkl", "*.h5",
    "*.msgpack", "*.ot", "*.gguf", "*.ggml", "*.onnx", "*.onnx_data*", "*.onnx.data", "*.tflite",
    "*.mlmodel", "saved_model.pb", "openvino_model*.xml", "*.index.json",
)  # fmt: skip
_TOKENIZERS = ("*vocab*", "*tokenizer*", "*sentencepiece*", "*.spm.bin")
# Weights of another part than the model: of an adapter, of the layers of sentence-transformers.
_PARTS = ("adapter_model.*", "[0-9]_*/model.safetensors", "[0-9]_*/pytorch_model.bin")


@dataclass(frozen=True, slots=True)
class Location:
    """The location of a checkpoint.

    Attributes:
        folder: an existing one.
        file: the weight file in it that the user named; None: all weights of the folder.
        is_alone: whether ``file`` is the whole checkpoint, without other files of the folder.
        note: a sentence for the user on how the checkpoint was found; may be empty.
    """

    folder: str
    file: str | None = None
    is_alone: bool = False
    note: str = ""


def locate(source: str | Path) -> Location:
    """Find the checkpoint that a path or name denotes.

    A path that exists is a folder, a safetensors file or its index. Any other name is that of a
    model in the cache of huggingface_hub; nothing is downloaded.

    Args:
        source: the path or name.

    Raises:
        CheckpointError: the source does not exist or cannot be read.

    Cost: a few system calls.
    """
    path = os.fspath(source)
    if os.path.isdir(path):
        return Location(path)
    if not os.path.lexists(path):
        folder = _in_cache(path)
        return Location(folder, note=f"{path} is {folder}.")
    folder, name = os.path.split(path)
    folder = folder or os.curdir
    if name.endswith(INDEX_SUFFIX):
        return Location(folder)
    if not name.endswith(".safetensors"):
        raise CheckpointError(
            f"{path} is not a safetensors file; expected such a file, or a folder with them."
        )
    if any(os.path.exists(os.path.join(folder, config)) for config in _CONFIGS):
        return Location(folder, name)
    note = (
        f"{path} has no config.json beside it, so it is the whole checkpoint: other files of its "
        "folder are ignored."
    )
    return Location(folder, name, True, note)


def _in_cache(name: str) -> str:
    """The folder of a model that huggingface_hub has downloaded."""
    try:
        from huggingface_hub import snapshot_download

        return snapshot_download(name, local_files_only=True)
    except (ImportError, OSError, ValueError) as error:
        raise CheckpointError(
            f"{name} does not exist, neither as a path nor as a model that was downloaded; "
            "expected a folder with safetensors files, such a file, or the name of a model "
            f"(org/name) in the cache of huggingface_hub: {str(error).splitlines()[0]}"
        ) from error


def is_weights(name: str) -> bool:
    """Whether a file holds weights of the model, an index of them, or state of training.

    Such files are not copied: beside pruned weights they would be stale, and a program that prefers
    their form would load dense weights.

    Args:
        name: relative to the checkpoint's folder.
    """
    if _matches(name, _PARTS):
        return False
    base = os.path.basename(name).lower()
    return _matches(base, _WEIGHTS) and not _matches(base, _TOKENIZERS)


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def find_weights(location: Location) -> tuple[str | None, list[str], dict[str, str]]:
    """Find the safetensors files of a checkpoint.

    Returns:
        The name of the index, or None; the names of the files; and the index's map from tensors to
        files.

    Raises:
        CheckpointError: there are none, or it is not clear which belong together.
    """
    folder = location.folder
    with reading(folder):
        top = sorted(os.listdir(folder))
    indices = [name for name in top if name.endswith(INDEX_SUFFIX)]
    if f"model{INDEX_SUFFIX}" in indices:
        indices = [f"model{INDEX_SUFFIX}"]
    if location.file is not None:
        for index in indices if not location.is_alone else ():
            names = set(_read_index(folder, index).values())
            if location.file in names and len(names) > 1:
                raise CheckpointError(
                    f"{location.file} is one of {len(names)} files that {index} lists; expected "
                    f"all of them: give the folder, {folder}."
                )
        return None, [location.file], {}
    weights = [name for name in top if name.endswith(".safetensors")]
    if len(indices) > 1:
        raise CheckpointError(f"{folder} has {', '.join(indices)}; expected one index.")
    if indices and _SINGLE in weights:
        raise CheckpointError(
            f"{folder} has both {_SINGLE} and {indices[0]}, and programs differ in which one they "
            f"read; remove the one that is stale, or give {os.path.join(folder, _SINGLE)} itself."
        )
    if indices:
        weight_map = _read_index(folder, indices[0])
        return indices[0], sorted(set(weight_map.values())), weight_map
    if _SINGLE in weights:
        weights = [_SINGLE]
    if not weights:
        raise CheckpointError(
            f"expected safetensors files in {folder}; it has {listed(top, 8) or 'no files'}."
        )
    if len(weights) > 1:
        raise CheckpointError(
            f"{folder} has {len(weights)} safetensors files and no index (*{INDEX_SUFFIX}) that "
            f"says which belong together; give one of them: {listed(weights, 4)}."
        )
    return None, weights, {}


def _read_index(folder: str, name: str) -> dict[str, str]:
    """The weight map of an index, whose files are names in the folder."""
    path = os.path.join(folder, name)
    with reading(path):
        index = load_json(Path(path).read_bytes(), path)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path} has no weight_map, or an empty one.")
    for file in weight_map.values():
        is_name = isinstance(file, str) and os.path.basename(file) == file
        if not (is_name and file.endswith(".safetensors")):
            raise CheckpointError(
                f"{path} lists {file!a}; expected the name of a safetensors file in its folder."
            )
    return weight_map
