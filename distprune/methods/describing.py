"""Arguments of a pruning method as text, for the comparison between ranks."""

from __future__ import annotations

import numbers
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from distprune.shards.checksum import checksums


def describe_argument(value: Any) -> str:
    """What must be equal on all ranks of an argument; of what has no values to compare, its type.

    Whatever else differs shows in the masks: those of replicas are compared.
    """
    if isinstance(value, Tensor):
        kind = f"tensor {tuple(value.shape)} {value.dtype}"
        if type(value) is not Tensor or value.is_meta:  # a DTensor is another one on each rank
            return kind
        return f"{kind}, checksum {checksums([value])[0]}"
    if isinstance(value, np.ndarray):
        return f"array {value.shape} {value.dtype}, crc32 {zlib.crc32(value.tobytes())}"
    if isinstance(value, (bool, numbers.Number, str, bytes, type(None))):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__} of {', '.join(map(describe_argument, value))}"
    if isinstance(value, Mapping):
        entries = [describe_argument(part) for entry in value.items() for part in entry]
        return f"{type(value).__name__} of {', '.join(entries)}"
    return type(value).__name__
