"""Masks on disk: one bit per element, 1 = keep, in a safetensors file beside the weights.

Each tensor of the file is U8, [ceil(numel / 8)], and holds the mask of the weight of the same name:
row-major, the first element in the lowest bit. The metadata have the shapes of the weights, and
whether their names are those of a checkpoint or of a model's parameters.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from distprune.base import memory
from distprune.base.memory import num_bytes_of
from distprune.files.checkpoint import SourceFile, make_header, read_header
from distprune.files.disk import SIDECAR, read_into
from distprune.files.errors import CheckpointError

MASK_FILE = f"{SIDECAR}/masks.safetensors"
_FORMAT = "distprune-masks-1"


@dataclass(frozen=True)
class MaskFile:
    """A mask file, described by its header; :func:`read_keep` reads parts of it.

    Attributes:
        file: where it is.
        shapes: by name of a tensor, its shape.
        starts: by name of a tensor, the first byte of its mask.
        is_of_checkpoint: whether names are those of a checkpoint; False: of a model's parameters.
    """

    file: SourceFile
    shapes: Mapping[str, tuple[int, ...]]
    starts: Mapping[str, int]
    is_of_checkpoint: bool


def mask_header(shapes: Mapping[str, tuple[int, ...]], *, is_of_checkpoint: bool) -> bytes:
    """The first bytes of a file of the masks of tensors, which follow in this order.

    Args:
        shapes: of the tensors, by name.
        is_of_checkpoint: whether names are those of a checkpoint.
    """
    metadata = {
        "format": _FORMAT,
        "bit_order": "little, 1 = keep",
        "shapes": json.dumps(shapes),
        "names": "checkpoint" if is_of_checkpoint else "model",
    }
    sizes = {name: num_bytes_of(math.prod(shape)) for name, shape in shapes.items()}
    return make_header({n: ("U8", [size], size) for n, size in sizes.items()}, metadata)


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
            "pruned."
        )
    file = read_header(path, str(path))
    if file.metadata.get("format") != _FORMAT:
        raise CheckpointError(f"{path} holds no masks of format {_FORMAT}.")
    try:
        shapes = {n: tuple(s) for n, s in json.loads(file.metadata["shapes"]).items()}
        expected = {name: num_bytes_of(math.prod(shape)) for name, shape in shapes.items()}
        if {tensor.name: tensor.nbytes for tensor in file.tensors} != expected:
            raise ValueError("the shapes in its metadata do not fit its tensors")
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is malformed: {error}.") from error
    starts = {tensor.name: tensor.start for tensor in file.tensors}
    return MaskFile(file, shapes, starts, file.metadata.get("names") == "checkpoint")


def read_keep(masks: MaskFile, name: str, first: int, last: int) -> np.ndarray:
    """The mask of the elements [first, last) of a tensor, from disk: bool [last - first].

    Raises:
        CheckpointError: the file cannot be read, or has become shorter.
    """
    start, stop = first // 8, -(-last // 8)
    packed = np.empty(stop - start, dtype=np.uint8)
    read_into(masks.file.path, [(masks.starts[name] + start, packed.data)])
    return memory.unpack(packed, first - 8 * start, last - 8 * start)
