"""What to do with folders whose weights are in a form that distprune cannot read."""

from __future__ import annotations

import os
from collections.abc import Collection
from fnmatch import fnmatchcase

_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_NUM_SHOWN = 8  # subfolders in a message


def what_to_do(folder: str, names: Collection[str]) -> str:
    """What a folder without safetensors weights holds, and how to convert it.

    Args:
        folder: its path.
        names: of all its files, relative to it.

    Returns:
        A sentence without its subject, the folder.
    """
    top = sorted(name for name in names if os.sep not in name)

    def has(*patterns: str) -> bool:
        return any(fnmatchcase(name, pattern) for name in top for pattern in patterns)

    inner = sorted({os.path.dirname(n) for n in names if n.endswith(".safetensors")} - {""})
    listed = ", ".join(os.path.join(folder, name) for name in inner[:_NUM_SHOWN])
    if has("model_index.json"):
        return (
            "is a pipeline of diffusers (model_index.json), which has several models. Prune one of "
            f"them ({listed or 'their folders hold no safetensors files'}), and put the "
            "result into a copy of the pipeline."
        )
    if has("consolidated*.safetensors"):
        name = next(name for name in top if fnmatchcase(name, "consolidated*.safetensors"))
        return (
            "holds Mistral's consolidated form (consolidated.safetensors, params.json). Take the "
            "model's form for transformers (model.safetensors), or give the file itself: "
            f"{os.path.join(folder, name)}; check what is selected with `distprune plan`."
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
    return "holds no safetensors file, and no pickled one (.bin, .pt)."


def _is_of_training(name: str) -> bool:
    """Whether a pickle belongs to a training run and not to the model."""
    return name.startswith(("training_args", "optimizer", "scheduler", "rng_state", "scaler"))
