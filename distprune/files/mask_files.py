"""Masks on disk: one bit per element, 1 = keep, in a safetensors file beside the weights.

Each tensor of the file is U8, [ceil(numel / 8)], and holds the mask of the weight of the same name:
row-major, the first element in the lowest bit. The metadata have the shapes of the weights and the
crc32 of the headers of their files.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from distprune.base import mask_bits
from distprune.base.mask_bits import num_bytes_of
from distprune.files.checkpoint import SIDECAR, WeightFile, make_header, read_header
from distprune.files.disk import read_into
from distprune.files.errors import CheckpointError

MASK_FILE = f"{SIDECAR}/masks.safetensors"
_FORMAT = "distprune-masks-1"


@dataclass(frozen=True)
class MaskFile:
    """A mask file, described by its header; :func:`read_keep` reads parts of it.

    Attributes:
        path: the path of the file; "" if it is not written yet.
        shapes: by name of a tensor, its shape.
        starts: by name of a tensor, the first byte of its mask.
        header_crcs: by name of a weight file, the crc32 of its header.
        is_of_checkpoint: whether names are those of a checkpoint; False: of a model's parameters.
        header: the first bytes of the file.
        state: size and time of change of the file, and the crc32 of its header.
    """

    path: str
    shapes: Mapping[str, tuple[int, ...]]
    starts: dict[str, int]
    header_crcs: dict[str, int]
    is_of_checkpoint: bool = True
    header: bytes = b""
    state: tuple[int, int, int] = (0, 0, 0)

    @property
    def size(self) -> int:
        """The size of the file."""
        return len(self.header) + sum(num_bytes_of(math.prod(s)) for s in self.shapes.values())


def mask_layout(
    shapes: Mapping[str, tuple[int, ...]],
    files: Sequence[WeightFile],
    *,
    is_of_checkpoint: bool = False,
) -> MaskFile:
    """A file of the masks of tensors, in this order, before it is written.

    Args:
        shapes: of the tensors, by name.
        files: the weight files of the checkpoint; () if there is none.
        is_of_checkpoint: whether names are those of a checkpoint although ``files`` is empty.
    """
    crcs = {file.name: file.header_crc for file in files}
    metadata = {
        "format": _FORMAT,
        "bit_order": "little, 1 = keep",
        "shapes": json.dumps(shapes),
        "header_crc32": json.dumps(crcs),
    }
    if is_of_checkpoint and not files:
        metadata["names"] = "checkpoint"
    sizes = {name: num_bytes_of(math.prod(shape)) for name, shape in shapes.items()}
    header, starts = make_header({n: ("U8", [size], size) for n, size in sizes.items()}, metadata)
    return MaskFile("", shapes, starts, crcs, is_of_checkpoint or bool(files), header)


def open_masks(folder: str | Path) -> MaskFile:
    """Read the header of a pruned checkpoint's mask file.

    Args:
        folder: the folder of the checkpoint.

    Raises:
        CheckpointError: there are none, or the file is malformed.
    """
    path = Path(folder, MASK_FILE)
    if not path.exists():
        raise CheckpointError(
            f"{folder} has no masks ({MASK_FILE} is missing); expected a folder that distprune "
            "pruned, with masks: true."
        )
    file = read_header(path, str(path))
    if file.metadata.get("format") != _FORMAT:
        raise CheckpointError(f"{path} holds no masks of format {_FORMAT}.")
    sizes = {tensor.name: tensor.nbytes for tensor in file.tensors}
    try:
        shapes = {n: tuple(s) for n, s in json.loads(file.metadata["shapes"]).items()}
        crcs = {str(n): int(crc) for n, crc in json.loads(file.metadata["header_crc32"]).items()}
        if sizes != {name: num_bytes_of(math.prod(shape)) for name, shape in shapes.items()}:
            raise ValueError("the shapes in its metadata do not fit its tensors")
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is malformed: {error}.") from error
    starts = {tensor.name: tensor.start for tensor in file.tensors}
    is_of_checkpoint = bool(crcs) or file.metadata.get("names") == "checkpoint"
    state = (file.size, file.mtime_ns, file.header_crc)
    return MaskFile(str(path), shapes, starts, crcs, is_of_checkpoint, state=state)


def read_keep(masks: MaskFile, name: str, first: int, last: int) -> np.ndarray:
    """The mask of the elements [first, last) of a tensor, from disk: bool [last - first].

    Raises:
        CheckpointError: the file cannot be read, or has become shorter.
    """
    start, stop = first // 8, -(-last // 8)
    packed = np.empty(stop - start, dtype=np.uint8)
    read_into(masks.path, masks.starts[name] + start, packed.data)
    return mask_bits.unpack(packed, first - 8 * start, last - 8 * start)
