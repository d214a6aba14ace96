"""``save_masks`` and ``load_masks``: the masks of a live model in a folder, and back.

    distprune.load_masks(model, "Llama-3-8B-sparse")  # wrapped or not: train with the zeros held

The folder is what ``distprune prune`` or ``save_masks`` writes; see
distprune.files.mask_files.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor, nn

from distprune._transformers.conversions import (
    MaskSource,
    SavedMasks,
    as_saved,
    match_masks,
    rules_for,
)
from distprune.base import mask_bits
from distprune.base.naming import NamedParameter
from distprune.base.report_text import listed
from distprune.call.reading import read_parameters
from distprune.call.replicas import count_live_and_compare
from distprune.call.report import MaskLoadingReport
from distprune.call.request import (
    Decision,
    ParameterArguments,
    PruningArguments,
    PruningCall,
)
from distprune.call.run import prune_parameters
from distprune.files.checkpoint import open_checkpoint
from distprune.files.disk import sync_folder
from distprune.files.errors import CheckpointError
from distprune.files.mask_files import (
    MASK_FILE,
    mask_layout,
    open_masks,
    read_keep,
)
from distprune.masks.hook import find_hook
from distprune.methods.builtin import hook_for_chosen_mask
from distprune.ranks.collectives import Communicator
from distprune.ranks.process_groups import world
from distprune.shards.reader import all_places, by_parameter, find_places
from distprune.shards.shard import Shard

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

    Cost: an all-reduce of an eighth of a byte per element, which the first rank keeps; there also
    three bytes per element of a parameter that has another shape in the files, or of several that
    are one tensor there.
    """
    communicator = world(group)

    def make_arguments() -> ParameterArguments:
        return ParameterArguments(
            parameters=_pruned(model, names, pipeline_parallel),
            facts=[("names", str(names))],
            pipeline_parallel=pipeline_parallel,
        )

    words: dict[str, Tensor] = {}
    with communicator.exclusively(), torch.inference_mode(False), torch.no_grad():
        _, targets = read_parameters(make_arguments, communicator)
        # Nothing can differ between ranks once replicas have been compared.
        count_live_and_compare(targets, False, communicator)
        keeps_names = names == "model" or pipeline_parallel
        plan = communicator.run(lambda: _as_saved(model, targets, keeps_names))
        for target in targets:
            bits = _whole_bits(target, communicator)
            if communicator.index == 0:
                words[target.name] = bits
        shapes = {target.name: target.shape for target in targets}
        communicator.run(lambda: _write(Path(folder), plan, words, shapes) if words else None)


def _write(
    folder: Path,
    plan: Sequence[SavedMasks],
    words: Mapping[str, Tensor],
    shapes: Mapping[str, torch.Size],
) -> None:
    """Write the masks of a plan beside an existing file, and then in its place.

    Args:
        words: the bits of each whole mask, by parameter.
        shapes: of the parameters.
    """
    packed: dict[str, np.ndarray] = {}
    for saved in plan:
        if saved.conversion is None:
            (name,), (renamed,) = saved.parameters, saved.tensors
            size = mask_bits.num_bytes_of(shapes[name].numel())
            packed[renamed] = words[name].numpy().astype("<i8", copy=False).view(np.uint8)[:size]
            continue
        masks = {}
        for name in saved.parameters:
            flat = mask_bits.unpack_words(words[name].numpy(), shapes[name].numel())
            masks[name] = torch.from_numpy(flat).view(shapes[name])
        made = saved.make(masks)
        packed |= {name: mask_bits.pack(made[name].reshape(-1).numpy()) for name in saved.tensors}
    is_changed = any(saved.parameters != (*saved.tensors,) for saved in plan)
    of_tensors = {name: shape for saved in plan for name, shape in saved.tensors.items()}
    layout = mask_layout(of_tensors, (), is_of_checkpoint=is_changed)
    path = folder / MASK_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".new")
    try:
        with unfinished.open("wb") as file:
            file.write(layout.header)
            for name in of_tensors:
                file.write(packed[name].tobytes())
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    sync_folder(path.parent)


def _as_saved(model: nn.Module, targets: list[Shard], keeps_names: bool) -> list[SavedMasks]:
    shapes = {target.name: tuple(target.shape) for target in targets}
    if keeps_names:
        return [SavedMasks((name,), {name: shape}, None, {}) for name, shape in shapes.items()]
    everything = {place.pair.fqn: place.shape for place in all_places(model)}
    return as_saved(model, everything | shapes, shapes)


def _pruned(model: nn.Module, names: str, pipeline_parallel: bool) -> list[NamedParameter]:
    if names not in ("checkpoint", "model"):
        raise ValueError(f"names={names!r}; expected 'checkpoint' or 'model'.")
    pairs = find_places(model, lambda place: find_hook(*place.pair) is not None)
    if not pairs and not pipeline_parallel:
        raise ValueError("nothing is pruned in this model; expected at least one parameter.")
    return pairs


def _whole_bits(shard: Shard, communicator: Communicator) -> Tensor:
    """The bits of a whole mask, 64 to an int64, the first in the lowest; the same on all ranks."""
    num_words = -(-shard.numel // 64)

    def own_bits() -> Tensor:
        words = torch.zeros(num_words, dtype=torch.int64)
        if shard.values.numel():
            flat = shard.flat_mask
            assert flat is not None
            for start in range(shard.counted.start, shard.counted.stop, _CHUNK):
                positions = torch.arange(start, min(start + _CHUNK, shard.counted.stop))
                keep = flat[positions[0] : positions[-1] + 1].cpu() != 0
                kept = shard.index(positions.to(flat.device)).cpu()[keep]
                # Each bit is set by one rank: a sum of them is as good as a union.
                words.scatter_add_(0, kept >> 6, torch.ones_like(kept) << (kept & 63))
        return words

    return communicator.reduce(num_words, own_bits)


_NUM_SHOWN = 200
_NOT_STRICT = (
    "Pass strict=False to load the other masks and leave such parameters as they are (the report "
    "lists these names)."
)


def load_masks(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    strict: bool = True,
    group: ProcessGroup | None = None,
    pipeline_parallel: bool = False,
) -> MaskLoadingReport:
    """Put the masks of a pruned checkpoint onto a model, whatever wraps it. Collective.

    Each rank gets its slice. Parameters are found by their names in the checkpoint. A model of
    transformers may be any that ``from_pretrained`` makes of the checkpoint: with or without the
    prefix of the base model, with parameters that are renamed on loading, and with those that are
    merged, split or transposed (the experts of a mixture), whose masks go the same way. A
    parameter that is pruned already keeps its zeros, too. The weights do not change; what was
    pruned is zero in the forward, whichever weights the model has.

    Args:
        model: plain or wrapped in anything that distprune supports; a stage, with
            ``pipeline_parallel``.
        folder: what ``distprune prune`` or :func:`save_masks` wrote, on every rank's disk.
        strict: raise if a mask fits no parameter. If not, the report lists them; and such
            parameters stay as they are. (A fine-tuned model has another head than the checkpoint.)
        group: the ranks that take part; every rank by default.
        pipeline_parallel: the ranks hold different parts of the model.

    Returns:
        A report, the same on every rank. Under ``pipeline_parallel`` its ``missing_keys`` and
        ``mismatched_keys`` are those of the calling rank.

    Raises:
        ValueError: a mask whose parameter the model does not have, or has in another shape, or
            of which transformers makes something that has no mask, all by name, with the names
            that are most alike; no mask at all fits; names of a tied parameter with different
            masks; ranks that read different masks. On every rank; no module has changed then.
        FilesError: no masks, or malformed ones; on every rank (a RuntimeError where only some
            ranks failed).

    Cost: every rank reads the masks, an eighth of a byte per element; memory for its part of the
    masks and, for a moment, one byte per element of one parameter (two if it is merged or
    permuted on loading).
    """
    communicator = world(group)
    with communicator.exclusively():
        method = communicator.run(
            lambda: MasksFromFile(model, folder, strict, pipeline_parallel),
            lambda made: [("crc32 of the masks", str(made.crc)), ("strict", str(strict))],
        )
    report = prune_parameters(
        lambda: PruningArguments(
            parameters=method.parameters,
            method=method,
            make_hook=hook_for_chosen_mask,
            pipeline_parallel=pipeline_parallel,
        ),
        communicator,
    )
    return MaskLoadingReport(
        **vars(report),
        missing_keys=method.missing,
        unexpected_keys=tuple(method.unexpected),
        mismatched_keys=tuple(method.matching.mismatched),
    )


class MasksFromFile:
    """Which masks go where, on this rank; decides by reading them: see request.DecidesMasks.

    Args:
        model, folder, strict, pipeline_parallel: as for ``load_masks``.

    Raises:
        ValueError: what there is to say under ``strict``; or no mask fits.

    Attributes:
        crc: the checksum of the masks' file.
        matching: which parameter each mask is for.
        parameters: to be pruned, with all their places.
        missing: parameters without a mask.
        unexpected: masks that no rank has a parameter for, and why; of a pipeline, known when it
            has decided.
    """

    READS_VALUES = False

    def __init__(
        self,
        model: nn.Module,
        folder: str | os.PathLike[str],
        strict: bool,
        pipeline_parallel: bool,
    ) -> None:
        self._folder, self._strict, self._is_joined = folder, strict, pipeline_parallel
        self._masks = masks = open_masks(Path(folder))
        self.crc = _file_crc(masks.path)
        places = list(all_places(model))
        shapes = {place.pair.fqn: place.shape for place in places}
        self.matching = match_masks(
            masks.shapes,
            shapes,
            rules_for(model),
            is_checkpoint=masks.is_of_checkpoint,
            others=_names_of_checkpoint(folder) if masks.header_crcs else (),
        )
        self.unexpected: Mapping[str, str] = self.matching.unexpected
        self.parameters: list[NamedParameter] = []
        # The masks of each parameter, by its full name: a tied one may have several.
        self._sources: dict[str, list[MaskSource]] = {}
        missing = []
        for of_one in by_parameter(places).values():
            named = [place for place in of_one if place.pair.fqn in self.matching.sources]
            if named:
                fqn = named[0].pair.fqn
                self.parameters.append(named[0].with_all(of_one))
                self._sources[fqn] = [self.matching.sources[place.pair.fqn] for place in named]
            elif sum(size > 1 for size in of_one[0].shape) > 1:
                missing.append(of_one[0].pair.fqn)
        self.missing = tuple(missing)
        if strict:
            self._check()
        if not self.parameters and not pipeline_parallel:
            raise self._unexpected_error(self.matching.unexpected | self.matching.mismatched)

    def decide(self, call: PruningCall) -> Decision:
        if self._is_joined:
            self._leave_to_other_ranks(call)

        return Decision(lambda: call.changed_masks(lambda *of_one: self._prune(call, *of_one)))

    def _leave_to_other_ranks(self, call: PruningCall) -> None:
        """Expect those masks that another rank has a parameter for."""
        names = list(self._masks.shapes)

        def claimed() -> Tensor:
            own = [name not in self.matching.unexpected for name in names]
            return torch.tensor(own, dtype=torch.int64)

        counts = call.communicator.reduce(len(names), claimed).tolist()
        nobody = [name for name, count in zip(names, counts, strict=True) if not count]
        self.unexpected = {name: self.matching.unexpected[name] for name in nobody}
        if self.unexpected and self._strict:
            raise self._unexpected_error(self.unexpected)

    def _prune(self, call: PruningCall, position: int, mask: Tensor) -> None:
        if not mask.numel():
            return

        def read_mask(name: str) -> Tensor:
            shape = torch.Size(self._masks.shapes[name])
            return torch.from_numpy(read_keep(self._masks, name, 0, shape.numel())).view(shape)

        shard = call.shards[position]
        first, *others = self._sources[shard.name]
        whole = first.read(read_mask)
        for other in others:
            if not torch.equal(other.read(read_mask), whole):
                raise ValueError(
                    f"{shard.name} is tied, and {self._folder} has different masks under its names "
                    f"({', '.join([*first.names, *other.names][:4])}); expected equal ones."
                )
        mask.mul_(shard.slice_of(whole).to(mask.device, mask.dtype).view(mask.shape))

    def _check(self) -> None:
        """Raise ValueError for what does not fit, under ``strict``."""
        matching, folder = self.matching, self._folder
        if matching.unexpected and not self._is_joined:
            raise self._unexpected_error(matching.unexpected)
        if matching.mismatched:
            differences = "; ".join(list(matching.mismatched.values())[:_NUM_SHOWN])
            raise ValueError(
                f"{differences}. {len(matching.mismatched)} of {len(self._masks.shapes)} masks in "
                f"{folder} have another shape than the model's parameters; expected the model that "
                f"the masks are for. {_NOT_STRICT}"
            )

    def _unexpected_error(self, names: Mapping[str, str]) -> ValueError:
        shown = listed((f"{n} ({why})" if why else n for n, why in names.items()), 8)
        return ValueError(
            f"the model has no parameter for {len(names)} of the masks in {self._folder}: {shown}. "
            "Expected a model that the checkpoint is for, or the part of yours that is one "
            f"(load_masks(model.backbone, ...)). {_NOT_STRICT}"
        )


def _names_of_checkpoint(folder: str | os.PathLike[str]) -> list[str]:
    """All tensors that lie beside the masks, if they do."""
    try:
        return [tensor.name for tensor in open_checkpoint(Path(folder)).tensors]
    except CheckpointError:  # the masks were moved away from the weights, say
        return []


def _file_crc(path: str) -> int:
    crc = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            crc = zlib.crc32(block, crc)
    return crc
