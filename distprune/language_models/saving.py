"""Save a sharded model, pruned or not, as a Hugging Face folder."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn

from distprune._common.collectives import Communicator
from distprune._common.naming import NamedParameter, full_name, named_modules
from distprune._common.process_groups import world
from distprune._common.pruned_form import local_tensor, masked_product, name_of_mask
from distprune._transformers.table import SavedMasks, as_saved, pretrained_model
from distprune.call.reading import read_parameters
from distprune.call.replicas import count_live_and_compare
from distprune.call.request import ParameterArguments
from distprune.files.checkpoints.checkpoint import SIDECAR, open_checkpoint
from distprune.files.checkpoints.header import INDEX_SUFFIX, make_header
from distprune.files.disk.access import write_atomically, writing
from distprune.files.output import check_place, new_folder, resolve_destination
from distprune.language_models.loading import DTYPE_NAMES, require_extra
from distprune.masks.hook import find_hook
from distprune.shards.parameters import Target, all_places, find_places
from distprune.shards.shard import FlatShard, FoldedShard, LocalShard

# Files by name: a text, bytes, or the path of a file to copy.
Contents = Mapping[str, str | bytes | Path]


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
    sidecar: Contents | None = None,
    files: Contents | None = None,
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
    max_bytes = communicator.run(lambda: _parse_size(max_shard_size))
    facts = [("folder", os.fspath(folder)), ("max_shard_size", str(max_bytes))]
    extra = (sidecar or {}, files or {})

    def arguments() -> ParameterArguments:
        return ParameterArguments(parameters=_parameters(model), facts=facts)

    with (
        communicator.exclusively(),
        torch.inference_mode(False),
        torch.no_grad(),
        contextlib.ExitStack() as output,
    ):
        _, targets = read_parameters(arguments, communicator)
        count_live_and_compare(targets, True, communicator)
        weights, buffers = communicator.run(lambda: _plan(model, targets, max_bytes))

        def start() -> None:
            if communicator.index == 0:
                output.enter_context(_folder_for(weights, Path(folder), source, model, *extra))

        communicator.run(start)
        _gather(targets, buffers, weights, communicator)
        communicator.run(output.close)
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


_PIECE_BYTES = 8 * 2**20
# What the first rank does with a piece: the number of its first element, and its values, 1-d.
UsePiece = Callable[[int, Tensor], None]


def _gather(
    targets: list[Target],
    buffers: Mapping[str, Tensor],
    weights: WeightFiles,
    communicator: Communicator,
) -> None:
    """Write parameters, zeros where they are pruned, and buffers, on the first rank. Collective.

    It writes a piece, row-major and in order, while the next one comes: an all-reduce of 8 MB, or
    of one index of dimension 0, of each parameter that not every rank has whole.
    """
    waiting: list[Callable[[], None]] = []

    def write_waiting() -> None:
        for step in waiting:
            step()
        waiting.clear()

    def part(shard: LocalShard, rows: range) -> Tensor:
        """This rank's elements of a piece, the others zero, as int64 words."""
        write_waiting()
        num_bytes = len(rows) * _row_bytes(shard)
        words = torch.zeros(-(-num_bytes // 8), dtype=torch.int64)
        if shard.replica == 0 and shard.values.numel():
            _write_own(shard, rows, words.view(torch.uint8)[:num_bytes].view(shard.values.dtype))
        return words

    for target in targets:
        shard, add = target.shard, functools.partial(weights.add, target.label)
        for rows in _pieces(shard) if target.label in weights.zeros else ():
            step = functools.partial(_use_own, add, shard, rows)
            if not _is_whole(shard):
                num_bytes = len(rows) * _row_bytes(shard)
                words = communicator.reduce(
                    -(-num_bytes // 8), functools.partial(part, shard, rows)
                )
                values = words.view(torch.uint8)[:num_bytes].view(shard.values.dtype)
                step = functools.partial(add, rows.start * _row_numel(shard), values)
            if communicator.index == 0:
                waiting.append(step)
    communicator.run(write_waiting)

    def add_buffers() -> None:
        for name, buffer in buffers.items() if communicator.index == 0 else ():
            weights.add(name, 0, buffer.detach().cpu().reshape(-1))

    communicator.run(add_buffers)


def _use_own(use: UsePiece, shard: LocalShard, rows: range) -> None:
    """Use a piece of a parameter that this rank has whole."""
    piece = torch.empty(len(rows) * _row_numel(shard), dtype=shard.values.dtype)
    _write_own(shard, rows, piece)
    use(rows.start * _row_numel(shard), piece)


def _is_whole(shard: LocalShard) -> bool:
    """Whether every rank has the whole; a fact that all ranks share.

    Not a matter of ``ranks``: under FSDP2 over tensor parallelism a norm is spread over each row of
    the mesh, so that the ranks of a shard differ.
    """
    if shard.ranks is None:
        return True
    return shard.placements is not None and all(p.is_replicate() for p in shard.placements)


def _pieces(shard: LocalShard) -> Iterator[range]:
    """Ranges of dimension 0."""
    if not shard.numel:
        return
    num_rows = shard.shape[0] if shard.shape else 1
    step = max(_PIECE_BYTES // _row_bytes(shard), 1)
    for start in range(0, num_rows, step):
        yield range(start, min(start + step, num_rows))


def _row_numel(shard: LocalShard) -> int:
    return math.prod(shard.shape[1:])


def _row_bytes(shard: LocalShard) -> int:
    return _row_numel(shard) * shard.values.itemsize


def _write_own(shard: LocalShard, rows: range, piece: Tensor) -> None:
    """Write this rank's part of some rows into the whole of them, 1-d."""
    if isinstance(shard, (FlatShard, FoldedShard)):
        _write_run(shard, rows.start * _row_numel(shard), piece)
        return
    own, *inner = shard.coordinates or [range(1)]
    first, last = max(rows.start, own.start), min(rows.stop, own.stop)
    if first >= last:
        return
    part = slice(first - own.start, last - own.start) if shard.shape else ...
    mask = None if shard.mask is None else shard.mask[part]
    target = piece.view(len(rows), *shard.shape[1:])[first - rows.start : last - rows.start]
    for dim, columns in enumerate(inner, 1):
        target = target.narrow(dim, columns.start, len(columns))
    target.copy_(_masked(shard.values[part], mask))


def _write_run(shard: LocalShard, start: int, piece: Tensor) -> None:
    """Write this rank's run of elements into a whole piece, 1-d, that begins at ``start``."""
    stop = start + piece.numel()
    if shard.index.start is not None:
        own = shard.index.start
        first, last = max(start, own), min(stop, own + shard.values.numel())
        if first < last:
            part = slice(first - own, last - own)
            mask = None if shard.mask is None else shard.mask[part]
            piece[first - start : last - start] = _masked(shard.values[part], mask)
        return
    # Not row-major in memory: channels_last, say; or apart from each other.
    indices = shard.index(torch.arange(shard.values.numel()))
    inside = (indices >= start) & (indices < stop)
    values = _masked(shard.values, shard.mask).cpu().view(-1)
    piece[indices[inside] - start] = values[inside]


def _masked(values: Tensor, mask: Tensor | None) -> Tensor:
    """What ``remove`` would leave: pruned elements are +0."""
    if mask is None:
        return values
    return masked_product(values, mask).masked_fill(mask == 0, 0)


@contextlib.contextmanager
def _folder_for(
    weights: WeightFiles,
    destination: Path,
    source: str | Path,
    model: nn.Module,
    sidecar: Contents,
    files: Contents,
) -> Iterator[None]:
    """A new folder with all files, the weights empty; it gets its name when the context ends.

    Only the first rank uses it. After an exception the folder is removed.
    """
    checkpoint = open_checkpoint(source)
    contents = {f"{SIDECAR}/{_plain(name)}": content for name, content in sidecar.items()}
    contents |= {_plain(name): content for name, content in files.items()}
    for name, content in contents.items():
        if isinstance(content, Path) and not content.is_file():
            raise ValueError(f"{name}: {content} is not a file; expected one to copy.")
    config = _with_dtype(checkpoint.config, pretrained_model(model))
    contents = {"config.json": json.dumps(config, indent=2) + "\n", **contents}
    for other in checkpoint.others:
        if other.name != checkpoint.index:
            contents.setdefault(other.name, Path(other.path))
    target = resolve_destination(destination)
    check_place(checkpoint.root, target)
    new = new_folder(target, sum(weights.sizes.values()))
    with new as partial, contextlib.closing(weights):
        weights.start(partial)
        for name, content in contents.items():
            _write(partial / name, content)
        yield
        weights.finish()


def _with_dtype(config: dict[str, Any], model: Any) -> dict[str, Any]:
    """A config that says the dtype of the weights, also in its parts that say one."""
    dtype = str(model.dtype).removeprefix("torch.")

    def changed(part: dict[str, Any]) -> dict[str, Any]:
        said = {k for k in ("dtype", "torch_dtype") if isinstance(part.get(k), str)}
        return part | dict.fromkeys(said, dtype)

    config = json.loads(json.dumps(config), object_hook=changed)
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
            shutil.copyfile(content, path)
            return
    write_atomically(path, content.encode() if isinstance(content, str) else content)


_Described = tuple[tuple[int, ...], torch.dtype]  # of a tensor, shape and dtype


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
        self._shapes = shapes
        tensors = {
            name: (shape, dtypes[item.parameters[0]])
            for item in saved
            for name, shape in item.tensors.items()
        }
        self._headers, self._places, self.sizes = _lay_out(tensors, max_bytes)
        self.num_bytes = sum(map(_num_bytes, tensors.values()))
        self.zeros = dict.fromkeys(shapes, 0)
        self._numel = sum(math.prod(shape) for shape, _ in tensors.values())
        self._waiting: dict[str, Tensor] = {}
        self._missing: dict[str, int] = {}
        self._folder = Path()
        self._files: dict[str, BinaryIO] = {}

    def start(self, folder: Path) -> None:
        """Reserve the disk for all files, and write their headers and the index."""
        self._folder = folder
        for file, header in self._headers.items():
            with writing(folder / file):
                self._files[file] = (folder / file).open("wb")
                self._files[file].write(header)
                self._files[file].truncate(self.sizes[file])
        if len(self.sizes) > 1:
            index = {
                "metadata": {"total_parameters": self._numel, "total_size": self.num_bytes},
                "weight_map": {name: self._places[name].file for name in sorted(self._places)},
            }
            text = json.dumps(index, indent=2) + "\n"
            write_atomically(folder / f"model{INDEX_SUFFIX}", text.encode())

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
        for name, file in self._files.items():
            with writing(self._folder / name):
                file.flush()
                os.fsync(file.fileno())

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()

    def _write(self, name: str, start: int, values: Tensor) -> None:
        place = self._places[name]
        assert values.dtype == place.dtype, (name, values.dtype)
        data = values.contiguous().view(torch.uint8).numpy().data
        offset = place.offset + start * place.dtype.itemsize
        with writing(self._folder / place.file):
            self._files[place.file].seek(offset)
            self._files[place.file].write(data)


def _num_bytes(tensor: _Described) -> int:
    shape, dtype = tensor
    return math.prod(shape) * dtype.itemsize


def _parse_size(size: int | str) -> int:
    """A number of bytes: 5_000_000_000, "5GB" or "512MiB".

    Raises:
        ValueError: it is none, or not positive.
    """
    units = {f"{unit}B": 1000**n for n, unit in enumerate("KMGT", 1)}
    units |= {f"{unit}IB": 1024**n for n, unit in enumerate("KMGT", 1)}
    try:
        if isinstance(size, str):
            text = size.strip().upper()
            unit = next((unit for unit in units if text.endswith(unit)), "")
            num_bytes = int(float(text.removesuffix(unit)) * units.get(unit, 1))
        else:
            num_bytes = int(size)
    except (ValueError, OverflowError):
        num_bytes = 0
    if num_bytes <= 0:
        raise ValueError(
            f"max_shard_size={size!r}; expected a number of bytes, or a text such as '5GB'."
        )
    return num_bytes


def _lay_out(
    tensors: Mapping[str, _Described], max_bytes: int
) -> tuple[dict[str, bytes], dict[str, _Place], dict[str, int]]:
    """Headers by file, the place of every tensor, and sizes by file, as transformers has them."""
    from huggingface_hub import split_state_dict_into_shards_factory

    split = split_state_dict_into_shards_factory(
        dict(tensors),
        get_storage_size=_num_bytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_bytes,
    )
    headers: dict[str, bytes] = {}
    places: dict[str, _Place] = {}
    sizes: dict[str, int] = {}
    for file, names in split.filename_to_tensors.items():
        described = {}
        # Wide dtypes first, as in the safetensors library, so that all elements are aligned.
        for name in sorted(names, key=lambda name: -tensors[name][1].itemsize):
            shape, dtype = tensors[name]
            described[name] = (DTYPE_NAMES[dtype], shape, _num_bytes(tensors[name]))
        headers[file], starts = make_header(described, {"format": "pt"}, is_ascii=False)
        sizes[file] = len(headers[file]) + sum(size for _, _, size in described.values())
        places |= {n: _Place(file, start, tensors[n][1]) for n, start in starts.items()}
    return headers, places, sizes
