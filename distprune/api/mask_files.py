"""Masks between models and folders: those that ``distprune prune`` wrote, and those of live models.

    distprune.load_masks(model, "Llama-3-8B-sparse")  # wrapped or not: train with the zeros held
    distprune.save_masks(model, "masks")  # `distprune apply masks SRC DST` prunes a checkpoint so

The form is that of distprune.files.masks: one bit per element of the whole parameter.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Hashable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import torch
from torch import Tensor, nn

from distprune._common.collectives import Communicator, attempt, world
from distprune._common.naming import NamedParameter, named_modules
from distprune.call.context import Decision, LocalMasks, PruningCall
from distprune.call.reading import read_together
from distprune.call.report import PruningReport
from distprune.call.run import count_pruned, prune_together
from distprune.files.disk import OpenFiles, sync_folder
from distprune.files.header import TensorEntry
from distprune.files.masks import MASK_FILE, MaskFile, mask_layout, open_masks, read_keep
from distprune.masks.hook import find_hook
from distprune.methods.builtin import chosen_hook
from distprune.selection.passes import count_live
from distprune.shards.shard import LocalShard
from distprune.shards.target import Target
from distprune.torch_private.wrapper import managed_parameters

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_CHUNK = 1 << 20  # elements


def load_masks(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    group: ProcessGroup | None = None,
    pipeline_parallel: bool = False,
) -> PruningReport:
    """Put the masks of a pruned checkpoint onto a model, whatever wraps it. Collective.

    Each rank gets its slice. Parameters are found by their names in the checkpoint, which have
    to be those of the model (of the class that the checkpoint is for). A parameter that is
    pruned already keeps its zeros, too. The weights do not change; what was pruned is zero in the
    forward, whichever weights the model has.

    Args:
        model: plain or wrapped in anything that distprune supports; a stage, with
            ``pipeline_parallel``.
        folder: what ``distprune prune`` or :func:`save_masks` wrote, on every rank's disk.
        group: the ranks that take part; every rank by default.
        pipeline_parallel: the ranks hold different parts of the model.

    Returns:
        A report, the same on every rank.

    Raises:
        ValueError: a mask whose parameter the model does not have, or has in another shape; ranks
            that read different masks. On every rank; no module has changed then.
        FilesError: no masks, or malformed ones; on every rank (a RuntimeError where only some
            ranks failed).

    Cost: every rank reads the masks, an eighth of a byte per element; memory for its part of the
    masks and, for a moment, one byte per element of one parameter.
    """
    communicator = world(group)

    def find() -> tuple[MaskFile, int, list[NamedParameter]]:
        masks = open_masks(folder)
        return masks, _file_crc(masks.path), _find(model, lambda place: place.fqn in masks.shapes)

    found, error = attempt(find)
    masks, crc, parameters = found or (None, 0, [])
    if error is None and not parameters and not pipeline_parallel:
        error = _not_found(folder, masks.shapes, model)
    method = _FromFile(folder, masks, model) if masks is not None else None
    return prune_together(
        parameters,
        method,  # type: ignore[arg-type]  # None only with an error
        chosen_hook,
        communicator,
        facts=[("crc32 of the masks", str(crc))],
        error=error,
        pipeline_parallel=pipeline_parallel,
    )


def save_masks(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    group: ProcessGroup | None = None,
    pipeline_parallel: bool = False,
) -> None:
    """Write the masks of a pruned model, in the form that ``distprune prune`` writes. Collective.

    The first rank writes ``folder/distprune/masks.safetensors``; a file that is there is replaced
    at the end, or stays as it was.

    Args:
        model: plain or wrapped; a stage, with ``pipeline_parallel``.
        folder: where to; made if it is not there. It may be that of a checkpoint.
        group: the ranks that take part; every rank by default.
        pipeline_parallel: the ranks hold different parts of the model.

    Raises:
        ValueError: nothing is pruned; replicas have different masks. On every rank.
        OSError: the folder cannot be written to; a RuntimeError on the other ranks.

    Cost: an all-reduce of an eighth of a byte per element; memory for that of one parameter.
    """
    communicator = world(group)
    parameters, error = attempt(_pruned, model, pipeline_parallel)
    # Compares replicas; then nothing is left that could differ.
    count_pruned(parameters or [], communicator, error=error, pipeline_parallel=pipeline_parallel)
    assert parameters is not None
    with torch.inference_mode(False), torch.no_grad():
        targets, _ = read_together(
            parameters, None, communicator, (), None, pipeline_parallel=pipeline_parallel
        )
        writer, error = None, None
        if communicator.index == 0:
            entries = [_entry(target) for target in targets]
            writer, error = attempt(_Writer, Path(folder), entries)
        for target in targets:
            try:
                words = _whole_bits(target.shard, communicator)
            except BaseException:  # of a step on any rank, or of the network
                if writer is not None:
                    writer.abandon()
                raise
            if error is None and writer is not None:
                _, error = attempt(writer.add, words, target.shard.numel)
        if error is None and writer is not None:
            _, error = attempt(writer.finish)
        if error is not None and writer is not None:
            writer.abandon()
        communicator.agree(error=error)


class _FromFile:
    """Decides on masks by reading them; see pipeline.DecidesMasks."""

    READS_VALUES = False

    def __init__(self, folder: str | os.PathLike[str], masks: MaskFile, model: nn.Module) -> None:
        self._folder = folder
        self._masks = masks
        self._model = model

    def decide(self, call: PruningCall) -> Decision:
        def finish() -> LocalMasks:
            files = OpenFiles(os.O_RDONLY)
            try:
                return self._read(call, files)
            finally:
                files.close()

        return Decision(finish)

    def _read(self, call: PruningCall, files: OpenFiles) -> LocalMasks:
        shapes = {shard.name: tuple(shard.shape) for shard in call.shards}
        missing = {n: shape for n, shape in self._masks.shapes.items() if n not in shapes}
        if missing:
            raise _not_found(self._folder, missing, self._model)
        other = [n for n, shape in shapes.items() if shape != self._masks.shapes[n]]
        if other:
            raise ValueError(
                f"{other[0]} has shape {shapes[other[0]]}; its mask in {self._folder} has "
                f"{self._masks.shapes[other[0]]}. Expected the model that the masks are for; "
                f"{len(other)} of {len(shapes)} parameters differ."
            )
        masks, num_pruned = [], []
        for which, shard in enumerate(call.shards):
            mask = call.start_mask(which)
            before = count_live(shard.flat(mask), shard.counted)
            if mask.numel():
                keep = read_keep(self._masks, files, shard.name, 0, shard.numel)
                whole = torch.from_numpy(keep).view(shard.shape)
                mask.mul_(shard.slice_of(whole).to(mask.device, mask.dtype).view(mask.shape))
            masks.append(mask)
            num_pruned.append(before - count_live(shard.flat(mask), shard.counted))
        return LocalMasks(masks, num_pruned)


class _Writer:
    """Writes a mask file, one parameter after the other, and puts it in place at the end."""

    def __init__(self, folder: Path, entries: list[TensorEntry]) -> None:
        self._path = folder / MASK_FILE
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._unfinished = self._path.with_suffix(".new")
        self._file: BinaryIO = self._unfinished.open("wb")
        self._file.write(mask_layout(entries, ()).header)

    def add(self, words: Tensor, numel: int) -> None:
        self._file.write(words.cpu().numpy().astype("<i8", copy=False).tobytes()[: -(-numel // 8)])

    def finish(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._unfinished.replace(self._path)
        sync_folder(self._path.parent)

    def abandon(self) -> None:
        self._file.close()
        self._unfinished.unlink(missing_ok=True)


def _find(model: nn.Module, is_wanted: Callable[[NamedParameter], bool]) -> list[NamedParameter]:
    """Some parameters, pruned or not; a tied one once, with all its places."""
    places: dict[Hashable, list[NamedParameter]] = {}
    found: dict[Hashable, NamedParameter] = {}
    for key, place in _all_places(model):
        places.setdefault(key, []).append(place)
        if is_wanted(place):
            found.setdefault(key, place)
    return [place.with_places(places[key]) for key, place in found.items()]


def _pruned(model: nn.Module, pipeline_parallel: bool) -> list[NamedParameter]:
    found = _find(model, lambda place: find_hook(*place) is not None)
    if not found and not pipeline_parallel:
        raise ValueError("nothing is pruned in this model; expected at least one parameter.")
    return found


def _all_places(model: nn.Module) -> Iterable[tuple[Hashable, NamedParameter]]:
    """Every parameter at every place, with what is the same for all places of one."""
    managed = managed_parameters(model)
    names_of: dict[int, list[str]] = {}
    for module_id, name in managed:
        names_of.setdefault(module_id, []).append(name)
    for path, module in named_modules(model):
        registered = [name for name, value in module._parameters.items() if value is not None]
        for name in dict.fromkeys([*registered, *names_of.get(id(module), ())]):
            record = managed.get((id(module), name))
            key = record.key if record is not None else id(module._parameters[name])
            plain = name.removesuffix("_orig")
            if plain != name and plain + "_mask" not in module._buffers:
                plain = name
            yield key, NamedParameter(module, plain, f"{path}.{plain}" if path else plain)


def _whole_bits(shard: LocalShard, communicator: Communicator) -> Tensor:
    """The bits of a whole mask, 64 to an int64, the first in the lowest; the same on all ranks."""
    num_words = -(-shard.numel // 64)

    def own_bits() -> Tensor:
        words = torch.zeros(num_words, dtype=torch.int64)
        if shard.values.numel():
            assert shard.mask is not None
            flat = shard.flat(shard.mask)
            for start in range(shard.counted.start, shard.counted.stop, _CHUNK):
                positions = torch.arange(start, min(start + _CHUNK, shard.counted.stop))
                keep = flat[positions[0] : positions[-1] + 1].cpu() != 0
                kept = shard.index(positions.to(flat.device)).cpu()[keep]
                # Each bit is set by one rank: a sum of them is as good as a union.
                words.scatter_add_(0, kept >> 6, torch.ones_like(kept) << (kept & 63))
        return words

    return communicator.sum_of(num_words, own_bits)


def _entry(target: Target) -> TensorEntry:
    return TensorEntry(target.label, "", tuple(target.shard.shape), "", 0, 0)


def _file_crc(path: str) -> int:
    crc = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            crc = zlib.crc32(block, crc)
    return crc


def _not_found(
    folder: str | os.PathLike[str], missing: Mapping[str, Any], model: nn.Module
) -> ValueError:
    known = [place.fqn for _, place in _all_places(model)]
    return ValueError(
        f"the model has no parameter {', '.join(list(missing)[:3])}"
        f"{f' and {len(missing) - 3} more' if len(missing) > 3 else ''}, of which {folder} has "
        f"masks; expected the model that the checkpoint is for, with names such as "
        f"{', '.join(known[:2])}."
    )
