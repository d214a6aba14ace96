"""``save_masks``: the masks of a live model, in a folder.

    distprune.save_masks(model, "masks")  # `distprune apply masks SRC DST` prunes a checkpoint so

The form is that of distprune.files.checkpoints.mask_files: one bit per element of the whole
parameter.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Literal

import torch
from torch import Tensor, nn

from distprune._common import mask_bits
from distprune._common.attempts import attempt, error_of
from distprune._common.collectives import Communicator
from distprune._common.naming import NamedParameter
from distprune._common.process_groups import world
from distprune._transformers.saving import SavedMasks, as_saved
from distprune.call.reading import read_parameters
from distprune.call.replicas import count_live_and_compare
from distprune.call.request import ParameterArguments
from distprune.files.checkpoints.header import TensorEntry
from distprune.files.checkpoints.mask_files import MASK_FILE, mask_layout
from distprune.files.disk.access import sync_folder
from distprune.masks.hook import find_hook
from distprune.shards.parameters import Target, all_places, find_places
from distprune.shards.shard import LocalShard

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_CHUNK = 1 << 20  # elements


def save_masks(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    names: Literal["checkpoint", "model"] = "checkpoint",
    group: ProcessGroup | None = None,
    pipeline_parallel: bool = False,
) -> None:
    """Write the masks of a pruned model, in the form that ``distprune prune`` writes. Collective.

    The first rank writes ``folder/distprune/masks.safetensors``; an existing file is replaced
    at the end, or stays as it was.

    Args:
        model: plain or wrapped; a stage, with ``pipeline_parallel``.
        folder: where to write; made if it does not exist. It may be that of a checkpoint.
        names: whose names and shapes masks have. "checkpoint": those of the files that
            ``save_pretrained`` writes of a model of transformers, as ``distprune apply`` needs
            them (experts that are one tensor in the model are several there). "model": those of
            the model; always so for a model of another kind, and with ``pipeline_parallel``.
        group: the ranks that take part; every rank by default.
        pipeline_parallel: the ranks hold different parts of the model.

    Raises:
        ValueError: nothing is pruned; replicas have different masks. On every rank.
        NotImplementedError: transformers computes with a parameter when it saves it; on every
            rank. names="model" writes its mask.
        OSError: the folder cannot be written to; a RuntimeError on the other ranks.

    Cost: an all-reduce of an eighth of a byte per element; memory for that of one parameter. On
    the first rank also three bytes per element of a parameter that has another shape in the
    files, or of several that are one tensor there.
    """
    communicator = world(group)

    def make_arguments() -> ParameterArguments:
        return ParameterArguments(
            parameters=_pruned(model, names, pipeline_parallel),
            facts=[("names", str(names))],
            pipeline_parallel=pipeline_parallel,
        )

    with communicator.exclusively(), torch.inference_mode(False), torch.no_grad():
        _, targets = read_parameters(make_arguments, communicator)
        # Nothing can differ between ranks once replicas have been compared.
        count_live_and_compare(targets, False, communicator)
        keeps_names = names == "model" or pipeline_parallel
        plan = communicator.run(lambda: _as_saved(model, targets, keeps_names))
        writer = None
        if communicator.index == 0:
            writer = attempt(_Writer, Path(folder), plan, targets)
        error = error_of(writer)
        for target in targets:
            try:
                words = _whole_bits(target.shard, communicator)
            except BaseException:  # of a step on any rank, or of the network
                if isinstance(writer, _Writer):
                    writer.abandon()
                raise
            if isinstance(writer, _Writer) and error is None:
                error = error_of(attempt(writer.add, target.label, words))
        if isinstance(writer, _Writer):
            error = error or error_of(attempt(writer.finish))
            if error is not None:
                writer.abandon()
        communicator.agree(error=error)


class _Writer:
    """Writes a mask file, one parameter after the other, and puts it in place at the end.

    Args:
        folder: the folder to write to.
        plan: what is written of which parameters.
        targets: all parameters, in the order in which they will be added.
    """

    def __init__(self, folder: Path, plan: list[SavedMasks], targets: list[Target]) -> None:
        order = {target.label: position for position, target in enumerate(targets)}
        self._shapes = {target.label: tuple(target.shard.shape) for target in targets}
        # What is made of several parameters is written when the last one has come.
        plan = sorted(plan, key=lambda saved: max(order[name] for name in saved.parameters))
        self._saved_of = {name: saved for saved in plan for name in saved.parameters}
        self._waiting: dict[str, Tensor] = {}
        entries = [
            TensorEntry(name, "", shape, "", 0, 0)
            for saved in plan
            for name, shape in saved.tensors.items()
        ]
        is_changed = any(saved.parameters != (*saved.tensors,) for saved in plan)
        layout = mask_layout(entries, (), is_of_checkpoint=is_changed)
        self._path = folder / MASK_FILE
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._unfinished = self._path.with_suffix(".new")
        self._file: BinaryIO = self._unfinished.open("wb")
        self._file.write(layout.header)

    def add(self, parameter: str, words: Tensor) -> None:
        saved = self._saved_of[parameter]
        if saved.conversion is None:
            size = mask_bits.num_bytes_of(math.prod(self._shapes[parameter]))
            self._file.write(_bytes_of(words)[:size])
            return
        self._waiting[parameter] = words
        if not all(name in self._waiting for name in saved.parameters):
            return
        masks = {name: self._unpacked(name) for name in saved.parameters}
        made = saved.make(masks)
        del masks
        for name in saved.tensors:
            bits = made.pop(name).reshape(-1).numpy()
            self._file.write(mask_bits.pack(bits).tobytes())

    def _unpacked(self, name: str) -> Tensor:
        shape = self._shapes[name]
        words = self._waiting.pop(name).cpu().numpy()
        return torch.from_numpy(mask_bits.unpack_words(words, math.prod(shape))).view(shape)

    def finish(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._unfinished.replace(self._path)
        sync_folder(self._path.parent)

    def abandon(self) -> None:
        self._file.close()
        self._unfinished.unlink(missing_ok=True)


def _as_saved(model: nn.Module, targets: list[Target], keeps_names: bool) -> list[SavedMasks]:
    shapes = {target.label: tuple(target.shard.shape) for target in targets}
    if keeps_names:
        return [SavedMasks((name,), {name: shape}, None, {}) for name, shape in shapes.items()]
    everything = {place.pair.fqn: place.shape for place in all_places(model)}
    return as_saved(model, everything | shapes, shapes)


def _bytes_of(words: Tensor) -> bytes:
    return words.cpu().numpy().astype("<i8", copy=False).tobytes()


def _pruned(model: nn.Module, names: str, pipeline_parallel: bool) -> list[NamedParameter]:
    if names not in ("checkpoint", "model"):
        raise ValueError(f"names={names!r}; expected 'checkpoint' or 'model'.")
    pairs = find_places(model, lambda place: find_hook(*place.pair) is not None)
    if not pairs and not pipeline_parallel:
        raise ValueError("nothing is pruned in this model; expected at least one parameter.")
    return pairs


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

    return communicator.reduce(num_words, own_bits)
