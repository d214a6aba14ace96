"""Pickled checkpoints (``pytorch_model.bin``, ``*.pt``) as safetensors: ``distprune convert``.

torch's restricted reader (``weights_only=True``) maps the tensors, and runs no code of the pickle.
The ``safetensors`` library writes them. Names that share one tensor are all written, with the same
bytes: only the model's class knows which of them it ties.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import warnings
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distprune.files.checkpoints.checkpoint import list_source
from distprune.files.checkpoints.header import load_json
from distprune.files.checkpoints.locating import PICKLES, find_weights, locate
from distprune.files.disk.access import allocate, sync_file, write_atomically, writing
from distprune.files.disk.destination import resolve_destination
from distprune.files.disk.listing import OtherFile, unreadable
from distprune.files.errors import CheckpointError, Interrupted, SelectionError, headline
from distprune.files.partial import check_unchanged, new_folder
from distprune.files.places import check_place
from distprune.files.text import printable

# Names that libraries look for; any other file becomes model.safetensors.
_KNOWN = re.compile("pytorch_(model(?:-.*)?)|((?:adapter_model|diffusion_pytorch_model).*)")


@dataclass
class Converted:
    """The result of :meth:`Conversion.write`.

    Attributes:
        files: by name of a pickled file, the name of its safetensors file.
        copied: names of other files.
        not_copied: by name of a file, the reason.
        num_tensors, num_bytes: how many tensors there are, and their bytes.
        tied: groups of names that shared one tensor.
        notes: sentences on other content of the pickled files.
    """

    files: dict[str, str]
    copied: list[str]
    not_copied: dict[str, str]
    num_tensors: int = 0
    num_bytes: int = 0
    tied: list[list[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class Conversion:
    """A pickled checkpoint to be converted; its files are listed and not yet loaded.

    Args:
        source: a folder, a pickled file, or a model in the local hub cache.

    Attributes:
        folder: the folder of the checkpoint.
        skipped: (name, reason) of files that are not copied.
        note: a sentence for the user on how the checkpoint was found; may be empty.
        total_bytes: to write, approximately.

    Raises:
        CheckpointError: there are no pickled weights, or safetensors files already; a file is
            missing or cannot be read; with all problems.
        SelectionError: safetensors is not installed.
    """

    def __init__(self, source: str | Path) -> None:
        if importlib.util.find_spec("safetensors") is None:
            raise SelectionError("convert needs safetensors: pip install 'distprune[convert]'")
        location = locate(source, PICKLES[0])
        self.folder, self.note = location.folder, location.note
        self._root = os.path.join(self.folder, (location.is_alone and location.file) or "")
        listing = list_source(location, (*PICKLES[0], PICKLES[1]))
        problems, self._files = listing.problems, listing.files
        ready = [name for name in listing.top() if name.endswith(".safetensors")]
        if ready and not (location.file or "").endswith(PICKLES[0]):
            problems.append(
                f"holds safetensors already ({', '.join(ready[:3])}); expected a pickled file. To "
                "convert one beside them, give that file."
            )
        self._index, names, self._map = find_weights(location, listing, problems, PICKLES)
        self._outputs = {name: _output_name(name) for name in names}
        self._copied = [name for name in self._files if name not in (*names, self._index)]
        taken = sorted({*self._outputs.values()} & {*self._copied})
        problems += [f"{name} exists already, beside its pickled form." for name in taken]
        problems += unreadable(self._files.values())
        self._check(problems)
        self._folders, self.skipped = sorted(listing.folders.items()), sorted(listing.skipped)
        self.total_bytes = sum(file.size for file in self._files.values())

    def write(
        self,
        destination: str | Path,
        on_bytes: Callable[[int], None] = lambda num_bytes: None,
        stop: Callable[[], bool] = lambda: False,
    ) -> Converted:
        """Write the checkpoint as safetensors; one rename at the end makes it visible.

        Names, dtypes, shapes and bits of all tensors, and their distribution over files, are those
        of the pickles. The index is new; all other files are copied.

        Args:
            destination: must not exist.
            on_bytes: called with numbers of bytes that were written.
            stop: called after each file; if it returns True, the conversion stops.

        Raises:
            CheckpointError: loading a file would run code, a file holds values that are not plain
                tensors, the index does not fit, or the source has changed.
            OutputError: the destination exists, or the disk is full.
            Interrupted: ``stop`` returned True. The written files are removed.

        Cost: one read, one write. One pickled file is mapped at a time; a file of torch before 1.6
        is loaded into memory.
        """
        target = resolve_destination(destination)
        check_place(self._root, target)
        done = Converted(self._outputs, self._copied, dict(self.skipped))
        weight_map: dict[str, str] = {}
        with new_folder(target, "convert", self._folders, self.total_bytes) as folder:
            for name, file in self._files.items():
                if name != self._index:
                    path = folder / self._outputs.get(name, name)
                    allocate(str(path), 0, file.mode)
                    tensors = None if name in self._copied else _load(file.path, name, done)
                    if tensors is not None:
                        self._add(name, tensors, weight_map)
                        done.num_bytes += sum(tensor.nbytes for tensor in tensors.values())
                    with writing(path):
                        _write(file, path, tensors)
                on_bytes(file.size)
                if stop():
                    raise Interrupted("stopped as asked; nothing was kept.")
            if self._index is not None:
                index = load_json(Path(self._files[self._index].path).read_bytes(), self._index)
                metadata = {**(index.get("metadata") or {}), "total_size": done.num_bytes}
                index = {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}
                output = _output_name(self._index.removesuffix(".index.json")) + ".index.json"
                write_atomically(folder / output, f"{json.dumps(index, indent=2)}\n".encode())
            check_unchanged(self.folder, self._files.values())
        done.num_tensors = len(weight_map)
        return done

    def _add(self, name: str, tensors: Mapping[str, Any], weight_map: dict[str, str]) -> None:
        """Note which tensors a file has; it has to have those that the index lists."""
        lost = [key for key, its in self._map.items() if its == name and key not in tensors]
        problems = [f"{name} lacks {key}, which {self._index} lists." for key in lost]
        twice = tensors.keys() & weight_map.keys()
        self._check([*problems, *(f"{key} is in {name} and in another file." for key in twice)])
        weight_map |= dict.fromkeys(tensors, self._outputs[name])

    def _check(self, problems: list[str]) -> None:
        if problems:
            raise CheckpointError(headline(printable(self.folder), problems), problems)


def _write(file: OtherFile, path: Path, tensors: Mapping[str, Any] | None) -> None:
    """Write tensors, or a copy of the file, in the place of an empty file, and sync it."""
    if tensors is None:
        shutil.copyfile(file.path, path)
    else:
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        mode = os.stat(path).st_mode & 0o777
        try:
            save_file(dict(tensors), path, {"format": "pt"})
        except SafetensorError as error:
            raise OSError(None, str(error)) from error
        os.chmod(path, mode)  # the library replaces the file
    sync_file(path)


def _output_name(name: str) -> str:
    known = _KNOWN.fullmatch(os.path.splitext(name)[0])
    return f"{(known[1] or known[2]) if known else 'model'}.safetensors"


def _load(path: str, name: str, done: Converted) -> dict[str, Any]:
    """The tensors of a file of ``torch.save``, contiguous; none shares memory with another."""
    import torch

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            content = torch.load(path, "cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:  # a malformed pickle can raise anything
        raise CheckpointError(f"{name} {_why_refused(str(error))}") from error
    tensors: dict[str, Any] = {}
    names: dict[object, list[str]] = {}
    storages: set[int] = set()
    for key, tensor in _state_dict(content, name, done).items():
        place = (tensor.data_ptr() or key, tensor.shape, tensor.stride(), tensor.dtype)
        names.setdefault(place, []).append(key)
        tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
        storage = tensor.untyped_storage().data_ptr()
        tensors[key] = tensor.clone() if storage in storages else tensor
        storages.add(storage)
    done.tied += [tied for tied in names.values() if len(tied) > 1]
    return tensors


def _why_refused(text: str) -> str:
    """The end of a sentence; torch's own text suggests to run the pickle's code."""
    if refused := re.search(r"(?:GLOBAL|Unsupported class) ([\w.]+)", text):
        return (
            f"contains the Python object {refused[1]}, which is not a tensor, and loading it could "
            "run code of the file. If you trust it, save its state dict alone."
        )
    first = text.split("WeightsUnpickler error:")[-1].strip().split("\n")[0][:120]
    return f"is not a file of torch.save that holds tensors alone ({first}). Download it again?"


def _state_dict(content: Any, name: str, done: Converted) -> Mapping[str, Any]:
    """The mapping from names to tensors: the content, or the only one inside it."""
    from torch import Tensor

    values = content if isinstance(content, Mapping) else {}
    inner = [
        key for key, value in values.items()
        if isinstance(value, Mapping) and any(isinstance(v, Tensor) for v in value.values())
    ]  # fmt: skip
    # Scalars beside a mapping of weights are counters of the training, such as the step.
    if len(inner) == 1 and not any(isinstance(v, Tensor) and v.dim() for v in values.values()):
        left = ", ".join(str(key) for key in values if key != inner[0]) or "nothing"
        done.notes.append(f"{name}: the weights are those of {inner[0]!a}; left out: {left}.")
        values = values[inner[0]]
    problems = [problem for item in values.items() if (problem := _problem(*item))]
    if problems or not values:
        raise CheckpointError(
            f"{name} holds a {type(content).__name__} of other content than names and dense "
            "tensors of dtypes that safetensors has:", problems[:8] or ["It holds no tensors."],
        )  # fmt: skip
    return values


def _problem(key: Any, value: Any) -> str | None:
    """A sentence if a safetensors file cannot store an entry."""
    from safetensors.torch import save

    try:
        save({key: value.detach().flatten()[:0]})
        return None
    except Exception:
        words = (getattr(value, word, "") for word in ("dtype", "layout", "device"))
        return f"{key!a} is a {type(value).__name__} {' '.join(map(str, words))}".rstrip() + "."
