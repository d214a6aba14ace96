"""The pickled weights of a folder, and the names of their safetensors files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from distprune.files.checkpoints.duplicates import is_weights
from distprune.files.checkpoints.locating import Location, locate
from distprune.files.disk.listing import OtherFile
from distprune.files.errors import CheckpointError
from distprune.files.formats.header import INDEX_SUFFIX
from distprune.files.formats.strict_json import load_json
from distprune.files.text import printable

_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_INDEX = ".bin.index.json"
SUFFIXES = (*_PICKLES, _INDEX)  # of the files of a pickled checkpoint
# Names that libraries expect; any other file becomes model.safetensors.
_KNOWN_STEMS = ("adapter_model", "diffusion_pytorch_model")


def locate_pickles(source: str | Path) -> Location:
    """Find the checkpoint that a path or name denotes; the path may be of a pickled file.

    Raises:
        CheckpointError: the source does not exist or cannot be read.
    """
    path = os.fspath(source)
    if not path.endswith(_PICKLES) or not os.path.isfile(path):
        return locate(source)
    folder, name = os.path.split(path)
    folder = folder or os.curdir
    is_alone = not any(
        os.path.exists(os.path.join(folder, config))
        for config in ("config.json", "adapter_config.json")
    )
    note = ""
    if is_alone:
        note = (
            f"{printable(path)} has no config.json beside it: it is converted alone, without the "
            "other files of its folder."
        )
    return Location(folder, name, is_alone, note)


def find_pickles(
    location: Location, files: Mapping[str, OtherFile], problems: list[str]
) -> tuple[str | None, dict[str, str], list[str]]:
    """Find the pickled weights of a folder.

    Args:
        location: of the checkpoint.
        files: of its folder, by name.
        problems: sentences are added on what is wrong.

    Returns:
        The name of the index, or None; its map from tensors to files; and the pickled files.
    """
    top = sorted(name for name in files if os.sep not in name)
    if location.file is not None and location.file.endswith(_PICKLES):
        return None, {}, [location.file]
    ready = [name for name in top if name.endswith((".safetensors", INDEX_SUFFIX))]
    if ready:
        problems.append(
            f"holds safetensors already ({', '.join(ready[:3])}): there is nothing to convert. To "
            "convert a pickled file beside them, give that file."
        )
        return None, {}, []
    indices = [name for name in top if name.endswith(_INDEX)]
    if len(indices) == 1:
        weight_map = _read_map(indices[0], files, problems)
        return indices[0], weight_map, sorted(set(weight_map.values()))
    if "pytorch_model.bin" in top and not indices:
        return None, {}, ["pytorch_model.bin"]
    pickles = [name for name in top if name.endswith(_PICKLES) and is_weights(name)]
    if len(pickles) == 1 and not indices:
        return None, {}, pickles
    if not pickles:
        problems.append(
            "holds no pickled weights (.bin, .pt, .pth); expected a file of torch.save."
        )
    else:
        problems.append(
            f"holds {len(pickles)} pickled files ({', '.join(pickles[:4])}) and {len(indices)} "
            "indices of them; expected one index, or one file. Give the right file."
        )
    return None, {}, []


def _read_map(index: str, files: Mapping[str, OtherFile], problems: list[str]) -> dict[str, str]:
    """The map of an index from tensors to files; {} if there are problems."""
    try:
        content = load_json(Path(files[index].path).read_bytes(), index)
    except (OSError, CheckpointError) as error:
        problems.append(f"{index} cannot be read: {error}")
        return {}
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        problems.append(f"{index} has no weight_map, or an empty one.")
        return {}
    bad = sorted({ascii(v) for v in weight_map.values() if not isinstance(v, str) or os.sep in v})
    problems += [f"{index}: {name} is not a plain name of a file." for name in bad]
    names = {name for name in weight_map.values() if isinstance(name, str) and os.sep not in name}
    problems += [f"{name} is missing; {index} needs it." for name in sorted(names - files.keys())]
    return {} if problems else weight_map


def output_name(name: str) -> str:
    """The name of the safetensors file for a pickled file."""
    stem, _ = os.path.splitext(name)
    if stem == "pytorch_model" or stem.startswith("pytorch_model-"):
        return f"{stem.removeprefix('pytorch_')}.safetensors"
    return f"{stem if stem.startswith(_KNOWN_STEMS) else 'model'}.safetensors"


def index_output(index: str | None) -> str | None:
    """The name of the new index; None without an index."""
    if index is None:
        return None
    return output_name(index.removesuffix(".index.json")) + ".index.json"
