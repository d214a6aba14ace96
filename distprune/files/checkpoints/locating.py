"""Where a checkpoint lies: a folder, one safetensors file, or a model of the local hub cache.

Nothing is downloaded, and the cache is read as files: no other package is needed.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

from distprune.files.disk.listing import ascii_name
from distprune.files.errors import CheckpointError

_URL = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]+):/+(.*)", re.DOTALL)
_HUB_ID = re.compile(r"(\w[\w.-]*/)?\w[\w.-]*", re.ASCII)
_HUB_URL = re.compile(r"(?:huggingface\.co|hf\.co)/([\w.-]+/[\w.-]+)")
_CONFIGS = ("config.json", "params.json", "adapter_config.json")
_INDEX = ".safetensors.index.json"
_SHOWN = 8  # models of a cache in a message


@dataclass(frozen=True, slots=True)
class Place:
    """Where a checkpoint lies.

    Attributes:
        folder: an existing one.
        file: the weight file in it that was asked for; None: whatever the folder's weights are.
        is_alone: no other file of the folder belongs to ``file``.
        note: what a user should know of it; "" if there is nothing to say.
    """

    folder: str
    file: str | None = None
    is_alone: bool = False
    note: str = ""


def locate(source: str | Path) -> Place:
    """Find the folder that a user means.

    A path that exists is what it says: a folder, a folder of the hub cache
    (``models--org--name``: its main snapshot), a safetensors file or its index. Else a name is
    looked for in the local hub cache ("org/name": what ``refs/main`` says).

    Raises:
        CheckpointError: there is nothing of that name, or nothing that can be read.

    Cost: a few system calls; nothing is downloaded.
    """
    path = os.fspath(source)
    try:
        is_folder = stat.S_ISDIR(os.stat(path).st_mode)
    except FileNotFoundError:
        return _not_a_path(path)
    except (OSError, ValueError) as error:  # ValueError: of a NUL byte
        raise CheckpointError(f"{ascii_name(path)} cannot be read: {_reason(error)}.") from error
    if not is_folder:
        return _file(path)
    name = os.path.basename(os.path.abspath(path))
    if name.startswith("models--") and os.path.isdir(os.path.join(path, "snapshots")):
        return _snapshot(path, path)
    _refuse_cache(path)
    return Place(path)


def hub_cache() -> str:
    """The folder in which the hub's downloads lie, by the variables that Hugging Face reads."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if os.environ.get(variable):
            return os.path.expanduser(os.environ[variable])
    home = os.environ.get("HF_HOME")
    if not home:
        cache = os.environ.get("XDG_CACHE_HOME") or os.path.join("~", ".cache")
        home = os.path.join(cache, "huggingface")
    return os.path.join(os.path.expanduser(home), "hub")


def _refuse_cache(path: str) -> None:
    """A whole cache is no checkpoint, and has more files than one wants to look at."""
    try:
        models = sorted(each for each in os.listdir(path) if each.startswith("models--"))
    except OSError:
        return  # whoever lists the folder says so
    if models:
        names = [each.removeprefix("models--").replace("--", "/") for each in models[:_SHOWN]]
        more = f" and {len(models) - _SHOWN} more" if len(models) > _SHOWN else ""
        raise CheckpointError(
            f"{ascii_name(path)} is a Hugging Face cache; expected one of its models, by its name: "
            f"{', '.join(map(ascii_name, names))}{more}."
        )


def _file(path: str) -> Place:
    folder, name = os.path.split(path)
    folder = folder or os.curdir
    if name.endswith(_INDEX):
        return Place(folder)
    if not name.endswith(".safetensors"):
        if name.endswith((".bin", ".pt", ".pth", ".ckpt")):
            way = f"Convert it first: distprune convert {ascii_name(path)} NEW."
        elif name.endswith(".gguf"):
            way = "GGUF cannot be pruned: prune the safetensors checkpoint that it was made from."
        else:
            way = "Give a folder with safetensors files, or such a file."
        raise CheckpointError(f"{ascii_name(path)} is a file, and no safetensors file. {way}")
    if any(os.path.exists(os.path.join(folder, config)) for config in _CONFIGS):
        return Place(folder, name)
    note = (
        f"{ascii_name(path)} has no config.json beside it: it is taken for the whole checkpoint, "
        "without the other files of its folder."
    )
    return Place(folder, name, True, note)


def _not_a_path(path: str) -> Place:
    url = _URL.match(path)
    if url is not None:
        raise CheckpointError(_about_url(*url.groups()))
    if os.path.islink(path):
        goal = ascii_name(os.readlink(path))
        raise CheckpointError(f"{ascii_name(path)} is a link to {goal}, which does not exist.")
    if not _HUB_ID.fullmatch(path):
        raise CheckpointError(
            f"{ascii_name(path)} does not exist; expected a folder with safetensors files, such a "
            "file, or the name of a model in the local Hugging Face cache (org/name)."
        )
    cache = hub_cache()
    found = os.path.join(cache, "models--" + path.replace("/", "--"))
    if not os.path.isdir(found):
        way = f"To download it: hf download {path}." if "/" in path else "Check the name."
        raise CheckpointError(
            f"{path} does not exist, neither as a folder nor as a model in the Hugging Face cache "
            f"({ascii_name(cache)}). {way}"
        )
    return _snapshot(found, path)


def _snapshot(model: str, asked_for: str) -> Place:
    """The snapshot of a model's folder in the cache that its main branch is."""
    snapshots = os.path.join(model, "snapshots")
    try:
        there = sorted(os.listdir(snapshots)) if os.path.isdir(snapshots) else []
        main = os.path.join(model, "refs", "main")
        commit = None
        if os.path.isfile(main):
            with open(main, "rb") as file:
                commit = file.read(200).decode("ascii", "replace").strip()
    except OSError as error:
        raise CheckpointError(
            f"{ascii_name(error.filename or model)} cannot be read: {error.strerror}."
        ) from error
    if commit is None and len(there) == 1:
        commit = there[0]
    if commit in there:
        folder = os.path.join(snapshots, commit)
        return Place(folder, note=f"{asked_for} is {ascii_name(folder)}.")
    found = f"is at {ascii_name(commit)}, which was not downloaded" if commit else "is unknown"
    listed = ", ".join(ascii_name(os.path.join(snapshots, each)) for each in there)
    way = f"Give one of its snapshots: {listed}" if there else "It has no snapshot: download it"
    raise CheckpointError(f"{asked_for}: the main branch {found}. {way}.")


def _about_url(scheme: str, rest: str) -> str:
    shown = ascii_name(f"{scheme}://{rest}")
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
    way = (
        f"Copy it to a local disk first ({tools[scheme]} {shown} DIR)"
        if scheme in tools
        else ("Copy it to a local disk first")
    )
    return f"{shown} is a URL; distprune reads local files. {way}, and give that folder."


def _reason(error: OSError | ValueError) -> str:
    if isinstance(error, OSError) and error.errno == errno.ELOOP:
        return "it is a link that leads around in a circle"
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)
