"""Files of a checkpoint that hold the same weights in another form.

They are not copied: beside pruned weights they would be stale, and a program that prefers their
form would load dense weights. Only known duplicates are left out; all other files are copied.

Reports store the reasons, and ``verify`` compares them: a new wording would fail existing results.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from fnmatch import fnmatchcase

from distprune.files.errors import CheckpointError
from distprune.files.formats.header import INDEX_SUFFIX, read_header

_OTHER_FORM = "the same weights in another form; dense, so stale beside pruned ones"
# Patterns for files in the folder itself.
_TOP = (
    "pytorch_model*.bin", "pytorch_model*.bin.index.json", "consolidated*.pth",
    "consolidated*.safetensors", "tf_model*.h5.index.json", "flax_model*.msgpack.index.json",
    "rust_model.ot",
    "openvino_model*.bin", "openvino_model*.xml", "*.tflite", "*.mlmodel", "model.ckpt.*",
    "*.ckpt.data-*", "*.ckpt.index", "*.ckpt.meta", "saved_model.pb",
)  # fmt: skip
# Patterns for files in the folder or any subfolder.
_ANYWHERE = (
    "*.onnx", "*.onnx_data*", "*.onnx.data", "*.gguf", "*.ggml", "*.h5", "*.msgpack",
    "ggml-model*.bin",
)  # fmt: skip
# Subfolders that hold nothing but another form.
_FOLDERS = ("onnx", "openvino", "coreml", "metal")
# Meta and OpenAI put their own form into the subfolder "original".
_ORIGINAL = ("*.pth", "*.pt", "*.bin", "*.safetensors", "*.safetensors.index.json")
_MODEL = re.compile(r"model\.safetensors|model(\.[\w-]+)?-\d+-of-\d+\.safetensors")

_WEIGHTS = (
    "*.safetensors", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.npz", "*.pkl",
)  # fmt: skip
# Files of training and of tokenizers, which hold no weights of the model.
_NO_WEIGHTS = (
    "training_args.bin", "optimizer*", "scheduler*", "rng_state*", "scaler*", "*vocab*",
    "*tokenizer*", "*sentencepiece*", "*.spm.bin",
)  # fmt: skip


def why_duplicate(folder: str, name: str, tensors: Collection[str]) -> str | None:
    """Why a file is a duplicate of the checkpoint's weights; None if it is not known to be one.

    Args:
        folder: of the checkpoint.
        name: of the file, relative to it.
        tensors: names of the checkpoint's tensors; a safetensors file in the folder without other
            names is a duplicate.
    """
    inner, base = os.path.split(name)
    first = name.split(os.sep)[0]
    if inner and first in _FOLDERS:
        return _OTHER_FORM
    if first == "original" and inner and _matches(base, _ORIGINAL):
        return _OTHER_FORM
    if _matches(base, _ANYWHERE) or (not inner and _matches(base, _TOP)):
        return _OTHER_FORM
    if inner:
        return None
    if base.endswith(INDEX_SUFFIX) or _MODEL.fullmatch(base):
        return "weights of the model that are in no index of it, or another index"
    if base.endswith(".safetensors") and _holds_only(os.path.join(folder, name), tensors):
        return "tensors of the same names once more"
    return None


def is_weights(name: str) -> bool:
    """Whether a file holds weights of the model, by its name."""
    base = os.path.basename(name)
    return _matches(base, _WEIGHTS) and not _matches(base.lower(), _NO_WEIGHTS)


def _matches(name: str, patterns: Collection[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _holds_only(path: str, tensors: Collection[str]) -> bool:
    try:
        names = [entry.name for entry in read_header(path).tensors]
    except CheckpointError:
        return False  # unreadable, so not known to be a duplicate
    return bool(names) and set(tensors).issuperset(names)
