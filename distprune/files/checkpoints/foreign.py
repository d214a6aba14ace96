"""Folders that hold weights in a form that cannot be pruned as it is: what to do with them."""

from __future__ import annotations

import os
from collections.abc import Collection
from fnmatch import fnmatchcase

_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_INSIDE = 8  # folders to look into for a checkpoint, and to name


def what_to_do(folder: str, names: Collection[str]) -> str:
    """A sentence on a folder that has no safetensors file of a model in it.

    Args:
        folder: to look at.
        names: of all its files, relative to it.
    """
    top = sorted(name for name in names if os.sep not in name)

    def has(*patterns: str) -> bool:
        return any(fnmatchcase(name, pattern) for name in top for pattern in patterns)

    inner = sorted({os.path.dirname(n) for n in names if n.endswith(".safetensors")} - {""})
    listed = ", ".join(os.path.join(folder, each) for each in inner[:_INSIDE])
    if has("model_index.json"):
        return (
            "is a pipeline of diffusers (model_index.json), which is several models. Prune one of "
            f"them ({listed or 'their folders hold no safetensors files'}), and put the result in "
            "its place in a copy of the pipeline."
        )
    if has("consolidated*.safetensors"):
        name = next(name for name in top if fnmatchcase(name, "consolidated*.safetensors"))
        return (
            "holds Mistral's consolidated form (consolidated.safetensors, params.json). Take the "
            "model's form for transformers (model.safetensors), or give the file itself: "
            f"{os.path.join(folder, name)}; look at what is selected with `distprune plan`."
        )
    if has(".metadata", "*.distcp"):
        return (
            "holds a checkpoint of torch.distributed.checkpoint (.metadata, *.distcp). Make one "
            "file of it (python -m torch.distributed.checkpoint.format_utils dcp_to_torch "
            f"{folder} model.pt), and convert that: distprune convert model.pt NEW."
        )
    if has("*.gguf", "*.ggml"):
        return (
            "holds GGUF, whose numbers are codes. Prune the safetensors checkpoint that it was "
            "made from, and convert the result with llama.cpp's convert_hf_to_gguf.py."
        )
    if has("latest_checkpointed_iteration.txt") or any("mp_rank_" in name for name in names):
        return (
            "holds a checkpoint of Megatron. Convert it to the form of Hugging Face first, for "
            "example with NVIDIA's Megatron-Bridge."
        )
    if any(name.endswith(_PICKLES) for name in top if not _is_of_training(name)):
        return (
            "holds pickled weights (.bin, .pt); expected safetensors. Convert them: "
            f"distprune convert {folder} NEW."
        )
    if has("*.h5", "saved_model.pb", "*.ckpt.index", "*.ckpt.data-*", "*.msgpack"):
        return (
            "holds weights of TensorFlow or Flax; expected safetensors. Load them with "
            "transformers 4 (from_pretrained(SRC, from_tf=True) or from_flax=True, of the model's "
            "own class), and save them with save_pretrained."
        )
    if has("*.onnx") or any(name.startswith("onnx" + os.sep) for name in names):
        return "holds ONNX. Prune the safetensors checkpoint that it was exported from."
    if inner:
        return f"holds no safetensors file itself; give one of its folders: {listed}."
    return "holds no safetensors file."


def _is_of_training(name: str) -> bool:
    return name.startswith(("training_args", "optimizer", "scheduler", "rng_state", "scaler"))
