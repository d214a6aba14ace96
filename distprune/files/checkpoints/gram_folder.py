"""Folders of Gram matrices: a safetensors file for each matrix, and an index, written last.

[Note: folder of Gram matrices] Beside ``statistics.safetensors``, a file of activation statistics::

    grams.json              {"version": 1, "matrices": [{"file": ..., "size": n, "number": e,
                            "parameters": [names that share it]}]}
    gram-00000.safetensors  one tensor "gram", [n, n], F32 or F64

``number`` is that of the expert, or of the group of a convolution.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from distprune.files.checkpoints.header import load_json, make_header, read_header
from distprune.files.disk.access import read_small, write_atomically
from distprune.files.errors import CheckpointError

STATISTICS = "statistics.safetensors"
INDEX = "grams.json"
_VERSION = 1
_DTYPES = {"F32": "<f4", "F64": "<f8"}


@dataclass(frozen=True)
class StoredMatrix:
    """One matrix of a folder.

    Attributes:
        file: its name in the folder.
        size: inputs.
        number: of the matrix among those of its parameters.
        parameters: names of those that share it.
    """

    file: str
    size: int
    number: int
    parameters: tuple[str, ...]


def write_matrix(path: Path, matrix: np.ndarray) -> None:
    """Write one matrix [n, n], of float32 or float64.

    Raises:
        OutputError: it cannot be written.
    """
    dtype = "F64" if matrix.dtype == np.float64 else "F32"
    data = np.ascontiguousarray(matrix, _DTYPES[dtype])
    header, _ = make_header({"gram": (dtype, matrix.shape, data.nbytes)}, {})
    write_atomically(path, [header, data.tobytes()])


def write_index(folder: Path, matrices: Sequence[StoredMatrix]) -> None:
    """Write the index, once all matrices are there.

    Raises:
        OutputError: it cannot be written.
    """
    content = {"version": _VERSION, "matrices": [asdict(matrix) for matrix in matrices]}
    write_atomically(folder / INDEX, json.dumps(content).encode())


def read_index(folder: Path) -> list[StoredMatrix]:
    """What a folder has.

    Raises:
        CheckpointError: there is no index, or it is malformed.
    """
    path = folder / INDEX
    if not path.exists():
        raise CheckpointError(
            f"{folder} has no {INDEX}; expected what GramMatrices.save has written."
        )
    content = load_json(read_small(path).decode(), str(path))
    try:
        if content["version"] != _VERSION:
            raise ValueError(f"version {content['version']}; expected {_VERSION}")
        return [
            StoredMatrix(
                Path(str(entry["file"])).name,
                int(entry["size"]),
                int(entry["number"]),
                tuple(map(str, entry["parameters"])),
            )
            for entry in content["matrices"]
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is malformed: {error!r}.") from error


def read_rows(folder: Path, matrix: StoredMatrix, rows: range) -> np.ndarray:
    """Some rows of a matrix; those beyond it are zeros.

    Raises:
        CheckpointError: the file is missing or malformed.
    """
    header = read_header(folder / matrix.file, matrix.file)
    entry = header.tensors[0] if len(header.tensors) == 1 else None
    if entry is None or entry.dtype not in _DTYPES or entry.shape != (matrix.size, matrix.size):
        raise CheckpointError(
            f"{folder / matrix.file}: expected one tensor, F32 or F64, of {matrix.size} x "
            f"{matrix.size}."
        )
    dtype = np.dtype(_DTYPES[entry.dtype])
    found = np.zeros((len(rows), matrix.size), dtype)
    here = range(min(rows.start, matrix.size), min(rows.stop, matrix.size))
    offset = entry.start + here.start * matrix.size * dtype.itemsize
    count = len(here) * matrix.size
    found[: len(here)] = np.fromfile(header.path, dtype, count, offset=offset).reshape(
        -1, matrix.size
    )
    return found
