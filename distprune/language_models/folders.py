"""Load a model of transformers onto the ranks, each its own part, and save it as a folder."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import math
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from distprune.checkpoint import save_pretrained
from distprune.files.checkpoint import Checkpoint, locate, open_checkpoint
from distprune.files.disk import new_folder, resolve_destination, writing
from distprune.files.errors import CheckpointError
from distprune.ranks.collectives import is_distributed, world

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# The sizes of a mesh that each wrap takes, by transformers' names.
_MESHES: dict[str, list[tuple[str, ...]]] = {
    "none": [()],
    "ddp": [()],
    "fsdp2": [("fsdp_size",), ("dp_replicate_size", "fsdp_size")],
    "tp": [("tp_size",)],
    "fsdp2_tp": [("fsdp_size", "tp_size")],
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
        checkpoint = open_checkpoint(folder)
        if checkpoint.config.get("quantization_config") is not None:
            raise NotImplementedError(
                f"{checkpoint.folder}: config.json has a quantization_config, so the stored "
                "numbers are codes, not weights; expected the checkpoint that it was made from."
            )
        return checkpoint, _sizes(wrap, mesh, communicator.size)

    def facts(checked: tuple[Checkpoint, dict[str, int]]) -> list[tuple[str, str]]:
        tensors = sorted((t.name, t.dtype, t.shape) for t in checked[0].tensors)
        files = hashlib.sha256(repr((checked[0].config, tensors)).encode()).hexdigest()
        return [("wrap", f"{wrap}, {checked[1]}"), ("dtype", str(dtype)), ("files", files)]

    checkpoint, sizes = communicator.run(check, facts)

    def load() -> Any:
        import transformers
        from transformers.distributed.configuration_utils import DistributedConfig

        factory: Any = transformers.AutoModelForCausalLM
        config: Any = DistributedConfig
        model, loaded = factory.from_pretrained(
            checkpoint.folder,
            dtype=dtype or "auto",
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            distributed_config=config(**sizes) if sizes else None,
        )
        if loaded["missing_keys"]:
            raise ValueError(
                f"{checkpoint.folder} lacks {sorted(loaded['missing_keys'])}, which the model of "
                "its config.json has; expected a complete checkpoint."
            )
        return model

    model = communicator.run(load)
    if not sizes:
        model = model.to(device or torch.accelerator.current_accelerator(True) or "cpu")
    if wrap == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    return model.eval()


def _sizes(wrap: str, mesh: Sequence[int] | None, num_ranks: int) -> dict[str, int]:
    """The sizes of transformers' DistributedConfig.

    Raises:
        ValueError: the wrap is unknown, or the mesh does not fit it or the ranks.
    """
    names = {len(each): each for each in _MESHES.get(wrap, ())}
    sizes = () if mesh is None and 0 in names else (num_ranks,) if mesh is None else tuple(mesh)
    if len(sizes) not in names or (sizes and math.prod(sizes) != num_ranks):
        raise ValueError(
            f"wrap={wrap!r}, mesh={mesh!r} on {num_ranks} ranks; expected one of "
            f"{', '.join(_MESHES)}, and sizes whose product is the number of ranks."
        )
    if (sizes or wrap == "ddp") and not is_distributed():
        raise ValueError(
            f"wrap={wrap!r} needs a process group; expected torchrun, and "
            "torch.distributed.init_process_group(), or wrap='none'."
        )
    return dict(zip(names[len(sizes)], sizes, strict=True))


def save_sharded(
    model: nn.Module, folder: str | Path, *, source: str | Path, max_shard_size: int | str = "5GB"
) -> Path:
    """Save a model as a Hugging Face folder, pruned weights as zeros. Collective over all ranks.

    The folder loads in transformers alone. Tensors have the names, shapes and dtypes that
    ``save_pretrained`` would give them; tied ones are written once. What a mask prunes is zero in
    the file; the model stays as it is, pruned. The first rank writes, into a folder beside the
    destination that gets its name at the end: a folder of this name is complete. If a run is
    killed, the next one begins anew.

    Args:
        model: of transformers, sharded in any way, wrapped or not.
        folder: must not exist; its parent must. Only the first rank uses the disk.
        source: the folder from which the model was loaded, or its name in the local Hugging Face
            cache: all files but its weights are copied (config, generation config, tokenizer,
            licence, ...). In config.json the dtype becomes that of the saved weights.
        max_shard_size: bytes of weights in one file, or a text such as "5GB".

    Returns:
        The absolute path of the folder.

    Raises:
        TypeError: the model is not one of transformers (merge adapters first).
        ValueError: the ranks were given different folders, or a tied parameter is pruned
            differently under its names.
        NotImplementedError: see :func:`checkpoint.check_writable`; or transformers computes with a
            parameter when it saves it.
        CheckpointError: ``source`` is damaged or does not exist.
        OutputError: the destination exists or is in use, or cannot be written.
        ImportError: the extra ``language-models`` is not installed.

    Where one rank fails, every rank raises; what was written is removed.

    Cost: every parameter is gathered, in turn; the first rank holds the whole model on the CPU, and
        parameters that are several tensors in the file twice.
    """
    require_extra()

    def save(partial: Path) -> None:
        save_pretrained(model, partial, max_shard_size=max_shard_size)

    return write_folder(folder, source, sum(p.nbytes for p in model.parameters()), save)


def write_folder(
    folder: str | Path, source: str | Path, num_bytes: int, save: Callable[[Path], None]
) -> Path:
    """Make a folder that has all files of another one but its weights. Collective.

    Args:
        folder, source: as for :func:`save_sharded`.
        num_bytes: that the disk needs.
        save: writes weights, and what is not to be copied, into the unfinished folder. Collective.
    """
    communicator, target = world(), Path(os.path.abspath(folder))
    unfinished = contextlib.ExitStack()

    def begin() -> Path:
        """The folder that becomes the destination, on the first rank."""
        if communicator.index:
            return target
        place = resolve_destination(folder, open_checkpoint(source).root)
        return unfinished.enter_context(new_folder(place, num_bytes))

    def finish() -> None:
        if communicator.index:
            return
        with writing(partial):
            for other in open_checkpoint(source).others:
                path = partial / other.name
                if not path.exists() and not other.name.endswith(".index.json"):
                    path.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(other.path, path)
            for path in filter(Path.is_file, partial.rglob("*")):
                with path.open("rb") as file:
                    os.fsync(file.fileno())
        unfinished.close()

    with unfinished:
        partial = communicator.run(begin, lambda _: [("folder", os.fspath(folder))])
        save(partial)
        communicator.run(finish)
    return target


def load_tokenizer(folder: str | os.PathLike[str]) -> PreTrainedTokenizerBase:
    """The tokenizer of a Hugging Face folder, or of a model in the local cache; no downloads.

    Raises:
        CheckpointError: there is none, or it cannot be read.
        ImportError: the extra ``language-models`` is not installed.
    """
    require_extra()
    from transformers import AutoTokenizer

    place = locate(Path(folder))
    try:
        return AutoTokenizer.from_pretrained(place, local_files_only=True)
    except (OSError, ValueError, TypeError, KeyError, ImportError) as error:
        text = str(error).strip().splitlines()
        raise CheckpointError(
            f"{folder} has no tokenizer that transformers can load ({text[0] if text else error!r})"
            "; expected tokenizer.json or the like. Give the folder of one that has."
        ) from error


_PACKAGES = ("transformers", "safetensors")


def require_extra() -> None:
    """Raise ImportError, which names the extra, if a package of it is not installed."""
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(
            f"distprune.language_models needs {' and '.join(missing)}; expected the extra "
            "language-models. Install it: pip install 'distprune[language-models]'"
        )
