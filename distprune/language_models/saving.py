"""Save a sharded model, pruned or not, as a Hugging Face folder."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor, nn

from distprune._common.collectives import Communicator
from distprune._common.naming import NamedParameter, full_name, named_modules
from distprune._common.process_groups import world
from distprune._common.pruned_form import local_tensor, name_of_mask
from distprune._transformers.saving import SavedMasks, as_saved
from distprune._transformers.table import pretrained_model
from distprune.call.reading import read_parameters
from distprune.call.replicas import count_live_and_compare
from distprune.call.request import ParameterArguments
from distprune.files.checkpoints.checkpoint import SIDECAR, Checkpoint, open_checkpoint
from distprune.files.checkpoints.header import INDEX_SUFFIX
from distprune.files.checkpoints.locating import is_weights
from distprune.files.disk.access import (
    OpenFiles,
    allocate,
    copy_file,
    write_atomically,
    write_from,
    writing,
)
from distprune.files.disk.destination import resolve_destination
from distprune.files.errors import OutputError
from distprune.files.partial import check_place, new_folder
from distprune.language_models.gathering import Gathering
from distprune.language_models.loading import DTYPES, require_extra
from distprune.masks.hook import find_hook
from distprune.shards.parameters import Target, all_places, find_places


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Buffers by their full names, without masks; the same on every rank."""
    found: dict[str, Tensor] = {}
    for path, module in named_modules(model):
        for name, buffer in module._buffers.items():
            masked = name_of_mask(name)
            is_mask = masked is not None and find_hook(module, masked) is not None
            if buffer is None or is_mask or name in module._non_persistent_buffers_set:
                continue
            found[full_name(path, name)] = local_tensor(buffer)
    return found


@dataclass(frozen=True)
class SavedModel:
    """The result of :func:`save_sharded`, the same on every rank.

    Attributes:
        folder: that was written, absolute.
        num_bytes: of all weights.
        zeros: by the model's parameter, how many of its saved elements are zero.
        numel: by the model's parameter, how many elements it has.
    """

    folder: Path
    num_bytes: int
    zeros: dict[str, int]
    numel: dict[str, int]


def save_sharded(
    model: nn.Module,
    folder: str | Path,
    *,
    source: str | Path,
    max_shard_size: int | str = "5GB",
    sidecar: Mapping[str, str | bytes | Path] | None = None,
    files: Mapping[str, str | bytes | Path] | None = None,
) -> SavedModel:
    """Save a model as a Hugging Face folder, pruned weights as zeros. Collective over all ranks.

    The folder loads in transformers alone. Tensors have the names and shapes that
    ``save_pretrained`` would give them; tied ones are written once. What a mask prunes is zero in
    the file; the model stays as it is, pruned. The first rank writes, into a folder beside the
    destination that gets its name at the end: a folder of this name is complete. If a run is
    killed, the next one begins anew.

    Args:
        model: of transformers, sharded in any way, wrapped or not.
        folder: must not exist; its parent must. Only the first rank uses the disk.
        source: the folder from which the model was loaded, or its name in the local Hugging Face
            cache: all files but its weights are taken over (config, generation config, tokenizer,
            licence, ...). In config.json the dtype becomes that of the saved weights.
        max_shard_size: bytes of weights in one file, or a text such as "5GB".
        sidecar: files in the subfolder ``distprune``, by name: a text, bytes, or the path of a file
            to copy.
        files: other files of the folder in the same form, in place of those of ``source``.

    Returns:
        Where the model is, and its zeros.

    Raises:
        TypeError: the model is not one of transformers (merge adapters first).
        ValueError: nothing can be named so, the ranks were given different arguments, replicas of
            a parameter differ, or a tied parameter is pruned differently under its names.
        NotImplementedError: a parameter's layout is not supported, or transformers computes with a
            parameter when it saves it.
        CheckpointError: ``source`` is damaged or does not exist.
        OutputError: the destination exists or is in use, or cannot be written.
        ImportError: the extra ``language-models`` is not installed.
        Where one rank fails, every rank raises; what was written is removed.

    Cost: memory: some copies of 8 MB of a parameter, or of one index of its dimension 0; on the
        first rank, parameters that are several tensors in the file as a whole, twice. On the wire:
        an all-reduce of each sharded parameter's bytes, 8 MB at a time, and 24 bytes per parameter.
    """
    require_extra()
    communicator = world()
    max_bytes = communicator.run(lambda: parse_size(max_shard_size))
    facts = [("folder", os.fspath(folder)), ("max_shard_size", str(max_bytes))]

    def arguments() -> ParameterArguments:
        return ParameterArguments(parameters=_parameters(model), facts=facts)

    with communicator.exclusively(), torch.inference_mode(False), torch.no_grad():
        _, targets = read_parameters(arguments, communicator)
        count_live_and_compare(targets, True, communicator)
        weights, buffers = communicator.run(lambda: _plan(model, targets, max_bytes))
        output = _Output(Path(folder), weights) if communicator.index == 0 else None
        try:
            communicator.run(
                lambda: output.start(source, model, sidecar or {}, files or {}) if output else None
            )
            _gather(targets, buffers, weights, communicator)
            communicator.run(lambda: output.publish() if output else None)
        finally:
            if output is not None:
                output.close()
    names = list(weights.zeros)
    zeros = communicator.leader_of(
        len(names), lambda: torch.tensor([weights.zeros[name] for name in names])
    )
    numel = {t.label: t.shard.numel for t in targets} | {n: b.numel() for n, b in buffers.items()}
    return SavedModel(
        Path(os.path.abspath(folder)),
        weights.num_bytes,
        dict(zip(names, zeros.tolist(), strict=True)),
        {name: numel[name] for name in names},
    )


def _parameters(model: nn.Module) -> list[NamedParameter]:
    """Every parameter once, tied ones under the name by which transformers saves them."""
    pretrained = pretrained_model(model)
    if pretrained is None:
        raise TypeError(
            f"model is a {type(model).__name__}, and not a model of transformers, wrapped or not; "
            "expected what load_sharded returned. If it has adapters, merge them first "
            "(merge_and_unload)."
        )
    left_out = getattr(pretrained, "all_tied_weights_keys", None) or {}
    named = {place.pair.fqn: place.pair for place in all_places(model)}
    names_of = {(id(module), name): fqn for fqn, (module, name) in named.items()}
    chosen = []
    for pair in find_places(model, lambda place: True):
        names = [names_of[id(module), name] for module, name in pair.places]
        kept = next((name for name in names if name not in left_out), names[0])
        module, name = named[kept]
        chosen.append(NamedParameter(module, name, kept).with_places(pair.places))
    return chosen


def _plan(
    model: nn.Module, targets: list[Target], max_bytes: int
) -> tuple[WeightFiles, dict[str, Tensor]]:
    pretrained = pretrained_model(model)
    buffers = persistent_buffers(model)
    ignored = set(getattr(pretrained, "_keys_to_ignore_on_save", None) or ())
    shapes = {t.label: tuple(t.shard.shape) for t in targets}
    shapes |= {name: tuple(buffer.shape) for name, buffer in buffers.items()}
    dtypes = {t.label: t.shard.values.dtype for t in targets}
    dtypes |= {name: buffer.dtype for name, buffer in buffers.items()}
    for name in ignored & set(shapes):
        del shapes[name]
        buffers.pop(name, None)
    saved = as_saved(model, shapes, shapes)
    return WeightFiles(saved, shapes, dtypes, max_bytes), buffers


def _gather(
    targets: list[Target],
    buffers: Mapping[str, Tensor],
    weights: WeightFiles,
    communicator: Communicator,
) -> None:
    gathering = Gathering(communicator)
    for target in targets:
        if target.label in weights.zeros:
            gathering.gather(target.shard, _adder(weights, target.label))
    gathering.finish()

    def add_buffers() -> None:
        for name, buffer in buffers.items() if communicator.index == 0 else ():
            weights.add(name, 0, buffer.detach().cpu().reshape(-1))

    communicator.run(add_buffers)


def _adder(weights: WeightFiles, name: str) -> Any:
    return lambda start, values: weights.add(name, start, values)


class _Output:
    """The folder under way. Only the first rank uses it.

    Args:
        destination: of the caller.
        weights: to write.
    """

    def __init__(self, destination: Path, weights: WeightFiles) -> None:
        self._given = destination
        self._weights = weights
        self._context: AbstractContextManager[Path] | None = None
        self._partial = destination

    def start(
        self,
        source: str | Path,
        model: nn.Module,
        sidecar: Mapping[str, str | bytes | Path],
        files: Mapping[str, str | bytes | Path],
    ) -> None:
        """Make the unfinished folder with all files, the weights empty."""
        checkpoint = open_checkpoint(source, follow_links=True)
        extra = {f"{SIDECAR}/{_plain(name)}": content for name, content in sidecar.items()}
        extra |= {_plain(name): content for name, content in files.items()}
        for name, content in extra.items():
            if isinstance(content, Path) and not content.is_file():
                raise ValueError(f"{name}: {content} is not a file; expected one to copy.")
        target = resolve_destination(self._given)
        check_place(checkpoint.root, target)
        num_bytes = sum(self._weights.sizes.values())
        context = new_folder(target, "save", checkpoint.folders, num_bytes)
        self._partial = context.__enter__()
        self._context = context
        self._weights.start(self._partial)
        self._take_over(checkpoint, model)
        for name, content in extra.items():
            _write(self._partial / name, content)

    def publish(self) -> None:
        """Give the folder its name."""
        self._weights.finish()
        context, self._context = self._context, None
        assert context is not None
        context.__exit__(None, None, None)

    def close(self) -> None:
        """Release everything; an unfinished folder is removed."""
        self._weights.close()
        if self._context is not None:
            unfinished = OutputError("the folder is not finished.")
            self._context.__exit__(OutputError, unfinished, None)

    def _take_over(self, checkpoint: Checkpoint, model: nn.Module) -> None:
        for other in checkpoint.others:
            if is_weights(other.name) or other.name == "config.json":
                continue
            if other.name.endswith((".safetensors", ".safetensors.index.json")):
                continue
            _write(self._partial / other.name, Path(other.path))
        config = _with_dtype(checkpoint.config, pretrained_model(model))
        text = json.dumps(config, indent=2, sort_keys=False) + "\n"
        write_atomically(self._partial / "config.json", text.encode())


def _with_dtype(config: dict[str, Any], model: Any) -> dict[str, Any]:
    """A config that says the dtype of the weights, also in its parts that say one."""
    dtype = str(model.dtype).removeprefix("torch.")

    def changed(part: dict[str, Any]) -> dict[str, Any]:
        result = {}
        for key, value in part.items():
            if key in ("dtype", "torch_dtype") and isinstance(value, str):
                value = dtype
            elif isinstance(value, dict):
                value = changed(value)
            result[key] = value
        return result

    config = changed(config)
    if not config.keys() & {"dtype", "torch_dtype"}:
        config["dtype"] = dtype
    return config


def _plain(name: str) -> str:
    """The name of a file inside a folder."""
    path = PurePosixPath(name)
    if not name or path.is_absolute() or ".." in path.parts or "\0" in name:
        raise ValueError(f"{name!r} is no name for a file inside the folder.")
    return str(path)


def _write(path: Path, content: str | bytes | Path) -> None:
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, Path):
            copy_file(content, path)
            return
    write_atomically(path, content.encode() if isinstance(content, str) else content)


_STEM = "model"
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class _Place:
    """Where a tensor is written.

    Attributes:
        file: its name.
        offset: of its first byte in the file.
        dtype: of the tensor.
    """

    file: str
    offset: int
    dtype: torch.dtype


class WeightFiles:
    """The weight files of a model under way.

    Args:
        saved: what is written of which parameters; SavedMasks converts any tensors.
        shapes, dtypes: of the parameters.
        max_bytes: of tensors in one file; a larger tensor has a file of its own.

    Attributes:
        num_bytes: of all tensors.
        sizes: of the files, by name.
        zeros: zeros written so far, by parameter.
    """

    def __init__(
        self,
        saved: Sequence[SavedMasks],
        shapes: Mapping[str, tuple[int, ...]],
        dtypes: Mapping[str, torch.dtype],
        max_bytes: int,
    ) -> None:
        self._saved_of = {name: item for item in saved for name in item.parameters}
        self._shapes, self._dtypes = shapes, dtypes
        tensors = {
            name: (shape, dtypes[item.parameters[0]])
            for item in saved
            for name, shape in item.tensors.items()
        }
        self._headers, self._places, self.sizes = _lay_out(tensors, max_bytes)
        self.num_bytes = sum(math.prod(s) * d.itemsize for s, d in tensors.values())
        self.zeros = dict.fromkeys(shapes, 0)
        self._numel = sum(math.prod(shape) for shape, _ in tensors.values())
        self._waiting: dict[str, Tensor] = {}
        self._missing: dict[str, int] = {}
        self._folder = Path()
        self._files = OpenFiles(os.O_RDWR)

    def start(self, folder: Path) -> None:
        """Reserve the disk for all files, and write their headers and the index."""
        self._folder = folder
        for file, header in self._headers.items():
            allocate(str(folder / file), self.sizes[file])
            write_from(self._files, str(folder / file), 0, header)
        if len(self.sizes) > 1:
            index = {
                "metadata": {"total_parameters": self._numel, "total_size": self.num_bytes},
                "weight_map": {name: self._places[name].file for name in sorted(self._places)},
            }
            text = json.dumps(index, indent=2) + "\n"
            write_atomically(folder / f"{_STEM}{INDEX_SUFFIX}", text.encode())

    def add(self, parameter: str, start: int, values: Tensor) -> None:
        """Write a piece of a parameter.

        Args:
            parameter: its name.
            start: the number of the first element, row-major.
            values: 1-d, contiguous, on the CPU.

        Raises:
            OutputError: the disk is full, or reports an error.
        """
        self.zeros[parameter] += values.numel() - int(torch.count_nonzero(values))
        saved = self._saved_of[parameter]
        if saved.conversion is None:
            (name,) = saved.tensors
            self._write(name, start, values)
            return
        if parameter not in self._waiting:
            shape = self._shapes[parameter]
            self._waiting[parameter] = torch.empty(shape, dtype=values.dtype)
            self._missing[parameter] = math.prod(shape)
        self._waiting[parameter].view(-1)[start : start + values.numel()] = values
        self._missing[parameter] -= values.numel()
        if all(self._missing.get(name) == 0 for name in saved.parameters):
            made = saved.make({name: self._waiting.pop(name) for name in saved.parameters})
            for name in saved.tensors:
                self._write(name, 0, made.pop(name).reshape(-1))

    def finish(self) -> None:
        """Wait until everything is on the disk."""
        assert not self._waiting
        self._files.sync()

    def close(self) -> None:
        """Close the files."""
        self._files.close()

    def _write(self, name: str, start: int, values: Tensor) -> None:
        place = self._places[name]
        assert values.dtype == place.dtype, (name, values.dtype)
        data = values.contiguous().view(torch.uint8).numpy().data
        offset = place.offset + start * place.dtype.itemsize
        write_from(self._files, str(self._folder / place.file), offset, data)


def parse_size(size: int | str) -> int:
    """A number of bytes: 5_000_000_000, "5GB" or "512MiB".

    Raises:
        ValueError: it is none, or not positive.
    """
    units = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
    units |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
    try:
        if isinstance(size, str):
            text = size.strip().upper()
            unit = next((unit for unit in units if text.endswith(unit)), "")
            num_bytes = int(float(text.removesuffix(unit)) * units.get(unit, 1))
        else:
            num_bytes = int(size)
    except ValueError:
        num_bytes = 0
    if num_bytes <= 0:
        raise ValueError(
            f"max_shard_size={size!r}; expected a number of bytes, or a text such as '5GB'."
        )
    return num_bytes


def _lay_out(
    tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]], max_bytes: int
) -> tuple[dict[str, bytes], dict[str, _Place], dict[str, int]]:
    """Headers by file, the place of every tensor, and sizes by file; as transformers names them."""
    groups: list[list[str]] = [[]]
    size = 0
    for name, (shape, dtype) in tensors.items():
        num_bytes = math.prod(shape) * dtype.itemsize
        if groups[-1] and size + num_bytes > max_bytes:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += num_bytes
    headers: dict[str, bytes] = {}
    places: dict[str, _Place] = {}
    sizes: dict[str, int] = {}
    for number, names in enumerate(groups, 1):
        suffix = f"-{number:05d}-of-{len(groups):05d}" if len(groups) > 1 else ""
        file = f"{_STEM}{suffix}.safetensors"
        # Wide dtypes first, as in the safetensors library, so that all elements are aligned.
        names = sorted(names, key=lambda name: -tensors[name][1].itemsize)
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        starts = {}
        for name in names:
            shape, dtype = tensors[name]
            starts[name], end = end, end + math.prod(shape) * dtype.itemsize
            header[name] = {
                "dtype": _NAMES[dtype],
                "shape": list(shape),
                "data_offsets": [starts[name], end],
            }
        raw = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        raw += b" " * (-len(raw) % 8)
        headers[file] = len(raw).to_bytes(8, "little") + raw
        data = len(headers[file])
        sizes[file] = data + end
        places |= {name: _Place(file, data + starts[name], tensors[name][1]) for name in names}
    return headers, places, sizes
