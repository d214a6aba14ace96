"""Save a model of transformers, sharded or not, pruned or not, as a Hugging Face folder."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from distprune._transformers.table import as_saved, pretrained_model
from distprune.checkpoint import gather_folded
from distprune.files.checkpoints.checkpoint import open_checkpoint
from distprune.files.disk.access import writing
from distprune.files.output import check_place, check_taken, new_folder, resolve_destination
from distprune.language_models.loading import require_extra
from distprune.ranks.process_groups import world


def save_sharded(
    model: nn.Module,
    folder: str | Path,
    *,
    source: str | Path,
    max_shard_size: int | str = "5GB",
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
    communicator = world()
    target = Path(os.path.abspath(folder))
    pretrained: Any = pretrained_model(model)

    def check() -> None:
        if pretrained is None:
            raise TypeError(
                f"model is a {type(model).__name__}, and not a model of transformers, wrapped or "
                "not; expected what load_sharded returned. If it has adapters, merge them first "
                "(merge_and_unload)."
            )
        if communicator.index == 0:
            check_place(open_checkpoint(source).root, resolve_destination(folder))
            check_taken(target, replaces=None)

    communicator.run(check, lambda _: [("folder", os.fspath(folder))])
    state = gather_folded(model)

    def write() -> None:
        if communicator.index == 0:
            tensors = _named_as_saved(pretrained, state)
            dtype = str(pretrained.dtype).removeprefix("torch.")
            _write(tensors, target, source, dtype, max_shard_size)

    communicator.run(write)
    return target


def _named_as_saved(model: Any, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors that transformers would write, by their names there; empties ``state``."""
    for name in getattr(model, "_keys_to_ignore_on_save", None) or ():
        state.pop(name, None)
    for name, kept in (getattr(model, "all_tied_weights_keys", None) or {}).items():
        if name in state and state[name] is state.get(kept):
            del state[name]
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    tensors: dict[str, Tensor] = {}
    for saved in as_saved(model, shapes, shapes):
        whole = {name: state.pop(name) for name in saved.parameters}
        if saved.conversion is None:
            tensors |= zip(saved.tensors, whole.values(), strict=True)
        else:  # into copies, because files of safetensors hold no parts of one storage
            tensors |= {name: part.clone() for name, part in saved.make(whole).items()}
    return tensors


def _write(
    tensors: dict[str, Tensor],
    target: Path,
    source: str | Path,
    dtype: str,
    max_shard_size: int | str,
) -> None:
    """Write the folder: weights, the source's config with the model's dtype, its other files."""
    from huggingface_hub import save_torch_state_dict

    checkpoint = open_checkpoint(source)
    config = _with_dtype(checkpoint.config, dtype)
    with (
        new_folder(target, sum(tensor.nbytes for tensor in tensors.values())) as partial,
        writing(partial),
    ):
        save_torch_state_dict(
            tensors,
            partial,
            filename_pattern="model{suffix}.safetensors",
            max_shard_size=max_shard_size,
        )
        for other in checkpoint.others:
            if other.name != checkpoint.index:
                (partial / other.name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(other.path, partial / other.name)
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        for path in partial.rglob("*"):
            if path.is_file():
                with path.open("rb") as file:
                    os.fsync(file.fileno())


def _with_dtype(config: dict[str, Any], dtype: str) -> dict[str, Any]:
    """A config that says the dtype of the weights, also in its parts that say one."""

    def changed(part: dict[str, Any]) -> dict[str, Any]:
        said = {k for k in ("dtype", "torch_dtype") if isinstance(part.get(k), str)}
        return part | dict.fromkeys(said, dtype)

    config = json.loads(json.dumps(config), object_hook=changed)
    if not config.keys() & {"dtype", "torch_dtype"}:
        config["dtype"] = dtype
    return config
