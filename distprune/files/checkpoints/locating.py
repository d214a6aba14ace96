"""The location of a checkpoint: a folder, a safetensors file, or a model in the local hub cache.

Nothing is downloaded. The cache is read as plain files, without the ``huggingface_hub`` package.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

from distprune.files.errors import CheckpointError
from distprune.files.formats.header import INDEX_SUFFIX
from distprune.files.text import printable

_URL = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]+):/+(.*)", re.DOTALL)
_HUB_ID = re.compile(r"(\w[\w.-]*/)?\w[\w.-]*", re.ASCII)
_HUB_URL = re.compile(r"(?:huggingface\.co|hf\.co)/([\w.-]+/[\w.-]+)")
_CONFIGS = ("config.json", "params.json", "adapter_config.json")
_NUM_SHOWN = 8  # models of a cache in a message


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


def locate(source: str | Path, suffixes: tuple[str, ...] = ()) -> Location:
    """Find the checkpoint that a path or name denotes.

    A path that exists is a folder, a model's folder in the hub cache (``models--org--name``: its
    main snapshot is used), a safetensors file or its index. Any other name is looked up in the
    local hub cache ("org/name": the snapshot that ``refs/main`` names).

    Args:
        source: the path or name.
        suffixes: of other files than safetensors files that may be given.

    Raises:
        CheckpointError: the source does not exist or cannot be read.

    Cost: a few system calls; nothing is downloaded.
    """
    path = os.fspath(source)
    try:
        is_folder = stat.S_ISDIR(os.stat(path).st_mode)
    except FileNotFoundError:
        return _locate_name(path)
    except (OSError, ValueError) as error:  # ValueError: the path has a NUL byte
        raise CheckpointError(f"{printable(path)} cannot be read: {_reason(error)}.") from error
    if not is_folder:
        return _locate_file(path, suffixes)
    name = os.path.basename(os.path.abspath(path))
    if name.startswith("models--") and os.path.isdir(os.path.join(path, "snapshots")):
        return _snapshot(path, path)
    _refuse_cache(path)
    return Location(path)


def hub_cache() -> str:
    """The folder of the hub's downloads, from the same variables that Hugging Face reads."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if os.environ.get(variable):
            return os.path.expanduser(os.environ[variable])
    home = os.environ.get("HF_HOME")
    if not home:
        cache = os.environ.get("XDG_CACHE_HOME") or os.path.join("~", ".cache")
        home = os.path.join(cache, "huggingface")
    return os.path.join(os.path.expanduser(home), "hub")


def _refuse_cache(path: str) -> None:
    """Raise CheckpointError for a whole cache, which has too many files to list."""
    try:
        models = sorted(name for name in os.listdir(path) if name.startswith("models--"))
    except OSError:
        return  # an error when the folder is listed
    if models:
        names = [name.removeprefix("models--").replace("--", "/") for name in models[:_NUM_SHOWN]]
        more = f" and {len(models) - _NUM_SHOWN} more" if len(models) > _NUM_SHOWN else ""
        raise CheckpointError(
            f"{printable(path)} is a Hugging Face cache; expected one of its models, by its name: "
            f"{', '.join(map(printable, names))}{more}."
        )


def _locate_file(path: str, suffixes: tuple[str, ...]) -> Location:
    folder, name = os.path.split(path)
    folder = folder or os.curdir
    if name.endswith(INDEX_SUFFIX):
        return Location(folder)
    if not name.endswith((".safetensors", *suffixes)):
        if name.endswith((".bin", ".pt", ".pth", ".ckpt")):
            way = f"Convert it first: distprune convert {printable(path)} NEW."
        elif name.endswith(".gguf"):
            way = "GGUF cannot be pruned: prune the safetensors checkpoint that it was made from."
        else:
            way = "Give a folder with safetensors files, or such a file."
        raise CheckpointError(f"{printable(path)} is a file, but not a safetensors file. {way}")
    if any(os.path.exists(os.path.join(folder, config)) for config in _CONFIGS):
        return Location(folder, name)
    note = (
        f"{printable(path)} has no config.json beside it, so it is the whole checkpoint: "
        "other files of its folder are ignored."
    )
    return Location(folder, name, True, note)


def _locate_name(path: str) -> Location:
    url = _URL.match(path)
    if url is not None:
        raise CheckpointError(_about_url(*url.groups()))
    if os.path.islink(path):
        target = printable(os.readlink(path))
        raise CheckpointError(f"{printable(path)} is a link to {target}, which does not exist.")
    if not _HUB_ID.fullmatch(path):
        raise CheckpointError(
            f"{printable(path)} does not exist; expected a folder with safetensors files, such a "
            "file, or the name of a model in the local Hugging Face cache (org/name)."
        )
    cache = hub_cache()
    model = os.path.join(cache, "models--" + path.replace("/", "--"))
    if not os.path.isdir(model):
        way = f"To download it: hf download {path}." if "/" in path else "Check the name."
        raise CheckpointError(
            f"{path} does not exist, neither as a folder nor as a model in the Hugging Face cache "
            f"({printable(cache)}). {way}"
        )
    return _snapshot(model, path)


def _snapshot(model: str, source: str) -> Location:
    """The snapshot of a model's main branch.

    Args:
        model: its folder in the cache.
        source: the user's name of it, for messages.
    """
    snapshots = os.path.join(model, "snapshots")
    try:
        commits = sorted(os.listdir(snapshots)) if os.path.isdir(snapshots) else []
        main = os.path.join(model, "refs", "main")
        commit = None
        if os.path.isfile(main):
            with open(main, "rb") as file:
                commit = file.read(200).decode("ascii", "replace").strip()
    except OSError as error:
        raise CheckpointError(
            f"{printable(error.filename or model)} cannot be read: {error.strerror}."
        ) from error
    if commit is None and len(commits) == 1:
        commit = commits[0]
    if commit is not None and commit in commits:
        folder = os.path.join(snapshots, commit)
        return Location(folder, note=f"{source} is {printable(folder)}.")
    state = f"is at {printable(commit)}, which was not downloaded" if commit else "is unknown"
    listed = ", ".join(printable(os.path.join(snapshots, name)) for name in commits)
    way = f"Give one of its snapshots: {listed}" if commits else "It has no snapshot: download it"
    raise CheckpointError(f"{source}: the main branch {state}. {way}.")


def _about_url(scheme: str, rest: str) -> str:
    shown = printable(f"{scheme}://{rest}")
    if scheme == "file":
        return f"{shown} is a URL; expected a path: /{rest.lstrip('/')}."
    web = _HUB_URL.match(rest) if scheme in ("http", "https") else None
    name = "/".join(rest.split("/")[:2]) if scheme == "hf" else web and web[1]
    if name:
        return (
            f"{shown} is a URL; distprune reads local files. Download it with "
            f"`hf download {name}`, and give its name: {name}."
        )
    tools = {"s3": "aws s3 cp --recursive", "gs": "gcloud storage cp -r"}
    command = f" ({tools[scheme]} {shown} DIR)" if scheme in tools else ""
    return (
        f"{shown} is a URL; distprune reads local files. Copy it to a local disk first{command}, "
        "and give that folder."
    )


def _reason(error: OSError | ValueError) -> str:
    if isinstance(error, OSError) and error.errno == errno.ELOOP:
        return "it is a circular link"
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)
