"""``save_masks``: the masks of a live model, in a folder.

    distprune.save_masks(model, "masks")  # `distprune apply masks SRC DST` prunes a checkpoint so

The form is that of distprune.files.masks: one bit per element of the whole parameter.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import torch
from torch import Tensor, nn

from distprune.collectives import Communicator, attempt, world
from distprune.files.disk import sync_folder
from distprune.files.header import TensorEntry
from distprune.files.masks import MASK_FILE, mask_layout
from distprune.masking.hook import find_hook
from distprune.naming import NamedParameter
from distprune.parameter_places import find_places
from distprune.pipeline import count_pruned
from distprune.reading import read_together
from distprune.shard import LocalShard
from distprune.target import Target

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_CHUNK = 1 << 20  # elements


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


def _pruned(model: nn.Module, pipeline_parallel: bool) -> list[NamedParameter]:
    found = find_places(model, lambda place: find_hook(*place.pair) is not None)
    if not found and not pipeline_parallel:
        raise ValueError("nothing is pruned in this model; expected at least one parameter.")
    return found


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
