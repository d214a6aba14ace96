"""The location of a checkpoint: a folder, a safetensors file, or a model in the local hub cache.

Nothing is downloaded. The cache is read as plain files, without the ``huggingface_hub`` package.

[Note: duplicates] Files that hold the same weights in another form are not copied: beside pruned
weights they would be stale, and a program that prefers their form would load dense weights. Only
known duplicates are left out; all other files are copied. Reports store the reasons, and ``verify``
compares them: a new wording would fail existing results.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Collection
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from distprune._common.report_text import listed
from distprune.files.checkpoints.header import INDEX_SUFFIX, load_json, read_header
from distprune.files.disk.listing import Listing
from distprune.files.errors import CheckpointError
from distprune.files.text import printable

_URL = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]+):/+(.*)", re.DOTALL)
_HUB_ID = re.compile(r"(\w[\w.-]*/)?\w[\w.-]*", re.ASCII)
_HUB_URL = re.compile(r"(?:huggingface\.co|hf\.co)/([\w.-]+/[\w.-]+)")
_CONFIGS = ("config.json", "params.json", "adapter_config.json")
_NUM_SHOWN = 8  # subfolders in a message
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_SINGLE = "model.safetensors"  # the name of a file without an index


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


def locate(source: str | Path) -> Location:
    """Find the checkpoint that a path or name denotes.

    A path that exists is a folder, a model's folder in the hub cache (``models--org--name``: its
    main snapshot is used), a safetensors file or its index. Any other name is looked up in the
    local hub cache ("org/name": the snapshot that ``refs/main`` names).

    Args:
        source: the path or name.

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
        return _locate_file(path)
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
        names = (name.removeprefix("models--").replace("--", "/") for name in models)
        raise CheckpointError(
            f"{printable(path)} is a Hugging Face cache; expected one of its models, by its name: "
            f"{listed(map(printable, names), 8)}."
        )


def _locate_file(path: str) -> Location:
    folder, name = os.path.split(path)
    folder = folder or os.curdir
    if name.endswith(INDEX_SUFFIX):
        return Location(folder)
    if not name.endswith(".safetensors"):
        if name.endswith(_PICKLES):
            way = "Load the model with transformers, and save it with save_pretrained."
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
    shown = ", ".join(printable(os.path.join(snapshots, name)) for name in commits)
    way = f"Give one of its snapshots: {shown}" if commits else "It has no snapshot: download it"
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
        folder: the folder of the checkpoint.
        name: the name of the file, relative to the folder.
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


def what_to_do(folder: str, names: Collection[str]) -> str:
    """What a folder without safetensors weights holds, and how to convert it.

    Args:
        folder: its path.
        names: the names of all its files, relative to it.

    Returns:
        A sentence without its subject, the folder.
    """
    top = sorted(name for name in names if os.sep not in name)

    def has(*patterns: str) -> bool:
        return any(fnmatchcase(name, pattern) for name in top for pattern in patterns)

    inner = sorted({os.path.dirname(n) for n in names if n.endswith(".safetensors")} - {""})
    folders = ", ".join(os.path.join(folder, name) for name in inner[:_NUM_SHOWN])
    if has("model_index.json"):
        return (
            "is a pipeline of diffusers (model_index.json), which has several models. Prune one of "
            f"them ({folders or 'their folders hold no safetensors files'}), and put the "
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
            "holds a checkpoint of torch.distributed.checkpoint (.metadata, *.distcp). Load it "
            "into the model, and save that with save_pretrained."
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
    if any(name.endswith(_PICKLES) and is_weights(name) for name in top):
        return (
            "holds pickled weights (.bin, .pt); expected safetensors. Load the model with "
            "transformers, and save it with save_pretrained."
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
        return f"holds no safetensors file itself; give one of its folders: {folders}."
    return "holds no safetensors file, and no pickled one (.bin, .pt)."


_MAX_INDEX_BYTES = 200_000_000


def find_weights(
    location: Location, listing: Listing, problems: list[str]
) -> tuple[str | None, list[str], dict[str, str]]:
    """Find the weight files of a checkpoint.

    Args:
        location: where the checkpoint is.
        listing: the content of its folder.
        problems: sentences are added on what is wrong.

    Returns:
        The name of the index, or None; the names of the files; and the index's map from tensors to
        files.
    """
    folder, top = location.folder, listing.top()
    indices = [name for name in top if name.endswith(INDEX_SUFFIX)]
    if location.file is not None:
        return _find_given(location, indices, problems)
    indices = [name for name in indices if not name.startswith("consolidated")]
    weights = [
        name
        for name in top
        if name.endswith(".safetensors") and not name.startswith("consolidated")
    ]
    if len(indices) > 1:
        problems.append(f"has {len(indices)} indices ({', '.join(indices)}); expected one.")
        return None, [], {}
    if indices:
        if _SINGLE in weights:
            problems.append(
                f"has both {_SINGLE} and {indices[0]}, and programs differ in which one they read; "
                f"remove the one that is stale, or give {os.path.join(folder, _SINGLE)} itself."
            )
        weight_map = _read_index(folder, indices[0], problems)
        return indices[0], sorted(set(weight_map.values())), weight_map
    if "model_index.json" in top and "config.json" not in top:
        problems.append(what_to_do(folder, listing.files))
    elif _SINGLE in weights:
        return None, [_SINGLE], {}
    elif len(weights) == 1:
        return None, weights, {}
    elif weights:
        problems.append(
            f"has {len(weights)} safetensors files ({', '.join(weights[:3])}, ...) and no "
            f"index; expected one (*{INDEX_SUFFIX}) to say which belong together. Give the right "
            f"one, as in {os.path.join(folder, weights[0])}."
        )
    elif not problems:
        problems.append(what_to_do(folder, listing.files))
    return None, [], {}


def _find_given(
    location: Location, indices: list[str], problems: list[str]
) -> tuple[str | None, list[str], dict[str, str]]:
    """The same as :func:`find_weights`, for a weight file that the user named."""
    for index in indices:
        weight_map = _read_index(location.folder, index, [])  # its problems do not matter
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


def _read_index(folder: str, name: str, problems: list[str]) -> dict[str, str]:
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
    # Many tensors name few files: each is looked at once.
    files = {file for file in weight_map.values() if isinstance(file, str)}
    plain = {file for file in files if _is_plain_name(file)}
    others = {ascii(file)[:100] for file in weight_map.values() if not isinstance(file, str)}
    problems += [
        f"{name}: {file} is not a plain name of a safetensors file in this folder."
        for file in sorted(others | {ascii(file)[:100] for file in files - plain})
    ]
    missing = {file for file in plain if not os.path.exists(os.path.join(folder, file))}
    problems += [f"{file} is missing; {name} needs it." for file in sorted(missing)]
    present = plain - missing
    return {k: file for k, file in weight_map.items() if isinstance(file, str) and file in present}


def _is_plain_name(file: str) -> bool:
    return (
        file.endswith(".safetensors")
        and not file.startswith(".")
        and not set(file) & set('/\\\0:*?"<>|')
        and file.isprintable()
    )
