"""The weight files of a checkpoint, by its index or by their names."""

from __future__ import annotations

import os
from pathlib import Path

from distprune.files.checkpoints.duplicates import is_weights
from distprune.files.checkpoints.foreign import what_to_do
from distprune.files.checkpoints.locating import Location
from distprune.files.disk.listing import Listing
from distprune.files.errors import CheckpointError
from distprune.files.formats.header import INDEX_SUFFIX
from distprune.files.formats.strict_json import load_json

# The suffixes of the files of a form, that of its index, and the name of a single file.
SAFETENSORS = ((".safetensors",), INDEX_SUFFIX, "model.safetensors")
PICKLES = ((".bin", ".pt", ".pth", ".ckpt"), ".bin.index.json", "pytorch_model.bin")
_MAX_INDEX_BYTES = 200_000_000


def find_weights(
    location: Location,
    listing: Listing,
    problems: list[str],
    form: tuple[tuple[str, ...], str, str] = SAFETENSORS,
) -> tuple[str | None, list[str], dict[str, str]]:
    """Find the weight files of a checkpoint.

    Args:
        location: of the checkpoint.
        listing: of its folder.
        problems: sentences are added on what is wrong.
        form: ``SAFETENSORS`` or ``PICKLES``.

    Returns:
        The name of the index, or None; the names of the files; and the index's map from tensors to
        files.
    """
    folder, top = location.folder, listing.top()
    suffixes, index_suffix, single = form
    indices = [name for name in top if name.endswith(index_suffix)]
    if location.file is not None and location.file.endswith(suffixes):
        return _find_given(location, indices, problems, suffixes)
    weights = [
        name
        for name in top
        if name.endswith(suffixes)
        and not name.startswith("consolidated")
        and (form is SAFETENSORS or is_weights(name))
    ]
    indices = [name for name in indices if not name.startswith("consolidated")]
    if len(indices) > 1:
        problems.append(f"has {len(indices)} indices ({', '.join(indices)}); expected one.")
        return None, [], {}
    if indices:
        if single in weights:
            problems.append(
                f"has both {single} and {indices[0]}, and programs differ in which one they read; "
                f"remove the one that is stale, or give {os.path.join(folder, single)} itself."
            )
        weight_map = _read_index(folder, indices[0], problems, suffixes)
        return indices[0], sorted(set(weight_map.values())), weight_map
    if "model_index.json" in top and "config.json" not in top:
        problems.append(what_to_do(folder, listing.files))
    elif single in weights:
        return None, [single], {}
    elif len(weights) == 1:
        return None, weights, {}
    elif weights:
        problems.append(
            f"has {len(weights)} {suffixes[0][1:]} files ({', '.join(weights[:3])}, ...) and no "
            f"index; expected one (*{index_suffix}) to say which belong together. Give the right "
            f"one, as in {os.path.join(folder, weights[0])}."
        )
    elif not problems and not listing.outside:
        problems.append(what_to_do(folder, listing.files))
    return None, [], {}


def _find_given(
    location: Location, indices: list[str], problems: list[str], suffixes: tuple[str, ...]
) -> tuple[str | None, list[str], dict[str, str]]:
    """The same as :func:`find_weights`, for a weight file that the user named."""
    for index in indices:
        weight_map = _read_index(location.folder, index, [], suffixes)  # its problems do not matter
        names = sorted(set(weight_map.values()))
        if names == [location.file]:
            return index, names, weight_map
        if location.file in names:
            problems.append(
                f"{location.file} is one of the {len(names)} files that {index} lists, and not a "
                f"whole checkpoint. Give the folder: {location.folder}."
            )
            return None, [], {}
    return None, [location.file or ""], {}


def _read_index(
    folder: str, name: str, problems: list[str], suffixes: tuple[str, ...]
) -> dict[str, str]:
    """The weight map of an index, without invalid names and missing files."""
    path = os.path.join(folder, name)
    try:
        if os.path.getsize(path) > _MAX_INDEX_BYTES:
            raise CheckpointError(f"{name} has more than {_MAX_INDEX_BYTES} bytes.")
        index = load_json(Path(path).read_bytes(), name)
    except OSError as error:
        problems.append(f"{name} cannot be read: {error.strerror}.")
        return {}
    except CheckpointError as error:
        problems.append(error.headline)
        return {}
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        problems.append(f"{name} has no weight_map, or an empty one.")
        return {}
    good: dict[str, str] = {}
    bad: set[str] = set()
    for key, file in weight_map.items():
        if _is_plain_name(file, suffixes):
            good[key] = file
        else:
            bad.add(ascii(file)[:100])
    problems += [
        f"{name}: {file} is not a plain name of a {suffixes[0][1:]} file in this folder."
        for file in sorted(bad)
    ]
    missing = sorted({f for f in good.values() if not os.path.exists(os.path.join(folder, f))})
    problems += [f"{file} is missing; {name} needs it." for file in missing]
    return {key: file for key, file in good.items() if file not in missing}


def _is_plain_name(file: object, suffixes: tuple[str, ...]) -> bool:
    return (
        isinstance(file, str)
        and file.endswith(suffixes)
        and not file.startswith(".")
        and not set(file) & set('/\\\0:*?"<>|')
        and file.isprintable()
    )
