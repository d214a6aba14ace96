"""Load a model of transformers onto the ranks, each its own part, and its tokenizer."""

from __future__ import annotations

import hashlib
import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from distprune.files.checkpoints.checkpoint import Checkpoint, open_checkpoint
from distprune.files.checkpoints.locating import locate
from distprune.files.errors import CheckpointError
from distprune.ranks.process_groups import is_distributed, world

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# The sizes of a mesh that each wrap takes.
_MESHES: dict[str, dict[int, tuple[str, ...]]] = {
    "none": {0: ()},
    "ddp": {0: ()},
    "fsdp2": {1: ("fsdp_size",), 2: ("dp_replicate_size", "fsdp_size")},
    "tp": {1: ("tp_size",)},
    "fsdp2_tp": {2: ("fsdp_size", "tp_size")},
}


def load_sharded(
    folder: str | Path,
    *,
    wrap: Literal["none", "ddp", "fsdp2", "tp", "fsdp2_tp"] = "none",
    mesh: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> nn.Module:
    """Load the model of a Hugging Face folder, each rank only what it holds. Collective.

    The model is that of ``AutoModelForCausalLM.from_pretrained``, which also shards it, by
    transformers' plans for the model, and reads of each file what the rank holds.

    Args:
        folder: with config.json and safetensors files; or the name of a model in the local Hugging
            Face cache, as on the command line. Nothing is downloaded. Every rank reads it.
        wrap: "none", a whole model on every rank; "ddp"; "fsdp2", sharded by decoder layer; "tp",
            tensor parallelism; "fsdp2_tp", both.
        mesh: numbers of ranks, which multiply to all ranks (the default for one number). Two
            numbers are (replicas, shards) for "fsdp2", and (data-parallel, tensor-parallel) for
            "fsdp2_tp".
        dtype: of the parameters; by default that of the config, else of the first weights.
        device: of a whole model; by default the current accelerator, or the CPU. Sharded models
            are where transformers puts them, on the accelerator if there is one.

    Returns:
        The model in eval mode; a DistributedDataParallel for "ddp".

    Raises:
        ValueError: an argument is wrong; the ranks were given different ones, or have different
            files; tensors of the model are missing in the checkpoint; transformers has no plan for
            the model.
        NotImplementedError: the weights are quantised.
        CheckpointError: the folder does not exist or is damaged.
        ImportError: the extra ``language-models`` is not installed.

    Cost: memory for the shard; the bytes of the shard from the disk. On the wire a few hundred
    bytes; for "ddp", what it sends when it is made.
    """
    require_extra()
    communicator = world()

    def check() -> tuple[Checkpoint, dict[str, int]]:
        sizes = _sizes(wrap, mesh)
        checkpoint = open_checkpoint(folder)
        if checkpoint.config.get("quantization_config") is not None:
            raise NotImplementedError(
                f"{checkpoint.folder}: config.json has a quantization_config, so the stored "
                "numbers are codes, not weights; expected the checkpoint that it was made from."
            )
        return checkpoint, sizes

    checkpoint, sizes = communicator.run(
        check,
        lambda checked: [
            ("wrap", wrap),
            ("sizes of the mesh", str(checked[1])),
            ("dtype", str(dtype)),
            ("files", _digest(checked[0])),
        ],
    )
    model = communicator.run(lambda: _from_pretrained(checkpoint, sizes, dtype))
    if not sizes:
        model = model.to(device or torch.accelerator.current_accelerator(True) or "cpu")
    if wrap == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    return model.eval()  # type: ignore[no-any-return]


def _sizes(wrap: str, mesh: Sequence[int] | None) -> dict[str, int]:
    """The sizes of transformers' DistributedConfig.

    Raises:
        ValueError: the wrap is unknown, or the mesh does not fit it.
    """
    if wrap not in _MESHES:
        raise ValueError(f"wrap={wrap!r} is unknown; expected one of {', '.join(_MESHES)}.")
    names = _MESHES[wrap]
    if 0 in names and mesh is None:
        return {}
    if not is_distributed():
        raise ValueError(
            f"wrap={wrap!r}, mesh={mesh!r} need a process group; expected torchrun, and "
            "torch.distributed.init_process_group(), or wrap='none'."
        )
    num_ranks = dist.get_world_size()
    sizes = (num_ranks,) if mesh is None else tuple(mesh)
    if len(sizes) not in names or 0 in names or torch.Size(sizes).numel() != num_ranks:
        counts = " or ".join(map(str, names))
        raise ValueError(
            f"mesh={mesh!r} for wrap={wrap!r} on {num_ranks} ranks; expected {counts} numbers "
            "whose product is the number of ranks."
        )
    return dict(zip(names[len(sizes)], sizes, strict=True))


def _from_pretrained(checkpoint: Checkpoint, sizes: dict[str, int], dtype: Any) -> Any:
    import transformers

    factory: Any = transformers.AutoModelForCausalLM
    model, loaded = factory.from_pretrained(
        checkpoint.folder,
        dtype=dtype or "auto",
        local_files_only=True,
        trust_remote_code=False,
        output_loading_info=True,
        distributed_config=_distributed_config(sizes) if sizes else None,
    )
    if loaded["missing_keys"]:
        raise ValueError(
            f"{checkpoint.folder} lacks {sorted(loaded['missing_keys'])}, which the model of its "
            "config.json has; expected a complete checkpoint."
        )
    return model


def _distributed_config(sizes: dict[str, int]) -> Any:
    from transformers.distributed.configuration_utils import DistributedConfig

    made: Any = DistributedConfig
    return made(**sizes)


def _digest(checkpoint: Checkpoint) -> str:
    tensors = sorted((t.name, t.dtype, t.shape) for t in checkpoint.tensors)
    return hashlib.sha256(repr((checkpoint.config, tensors)).encode()).hexdigest()


def load_tokenizer(folder: str | os.PathLike[str]) -> PreTrainedTokenizerBase:
    """The tokenizer of a Hugging Face folder, or of a model in the local cache; no downloads.

    Raises:
        CheckpointError: there is none, or it cannot be read.
        ImportError: the extra ``language-models`` is not installed.
    """
    require_extra()
    from transformers import AutoTokenizer

    place = locate(Path(folder)).folder
    try:
        made: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(place, local_files_only=True)
    except (OSError, ValueError, TypeError, KeyError, ImportError) as error:
        text = str(error).strip().splitlines()
        raise CheckpointError(
            f"{folder} has no tokenizer that transformers can load ({text[0] if text else error!r})"
            "; expected tokenizer.json or the like. Give the folder of one that has."
        ) from error
    return made


_PACKAGES = ("transformers", "safetensors")


def require_extra() -> None:
    """Raise ImportError, which names the extra, if a package of it is not installed."""
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(
            f"distprune.language_models needs {' and '.join(missing)}; expected the extra "
            "language-models. Install it: pip install 'distprune[language-models]'"
        )
