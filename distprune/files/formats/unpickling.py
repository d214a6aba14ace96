"""Tensors from files of ``torch.save``, without running what else such a file may hold.

A pickle is a program: loading one as Python does runs whatever it says. Here torch's restricted
reader is used (``weights_only=True``), which knows tensors and plain containers and refuses all
else, and the tensors stay in the file until their bytes are asked for.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from distprune._common.float_formats import FLOATS
from distprune.files.errors import CheckpointError
from distprune.files.formats.git_lfs import HEAD_BYTES, check_no_pointer

_DTYPE_NAMES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "I16": "int16", "U16": "uint16", "I32": "int32",
    "U32": "uint32", "C64": "complex64", "I64": "int64", "U64": "uint64",
    **{form.name: form.torch_name for form in FLOATS.values()},
}  # fmt: skip
# In the order of the safetensors library, in which wide ones come last.
_ORDER = (
    "BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "I16", "U16",
    "F16", "BF16", "I32", "U32", "F32", "C64", "F64", "I64", "U64",
)  # fmt: skip
# By dtype of torch, the name in a header.
DTYPES: dict[torch.dtype, str] = {getattr(torch, _DTYPE_NAMES[name]): name for name in _ORDER}
_RANK = {dtype: rank for rank, dtype in enumerate(DTYPES)}
_ZIP = b"PK\x03\x04"
_SHOWN = 6


@dataclass(frozen=True)
class Unpickled:
    """The tensors of a file.

    Attributes:
        tensors: by name, in the order of the safetensors format: wide dtypes first, then by name.
        notes: sentences on what else the file holds.
        tied: groups of names that are one tensor in the file.
    """

    tensors: dict[str, Tensor]
    notes: tuple[str, ...]
    tied: tuple[tuple[str, ...], ...]


def unpickle(path: str, name: str) -> Unpickled:
    """Read the tensors of a file of ``torch.save``.

    Args:
        path: of the file.
        name: what to call it in messages.

    Raises:
        CheckpointError: it is no such file, it asks for code to be run, or it holds something
            that safetensors cannot hold; all names.

    Cost: the names and shapes are read. The tensors are mapped from the file, but for files in
    the form of torch before 1.6, which are read into memory.
    """
    state, notes = _state_dict(_load(path, name), name)
    problems = [
        f"{key!a} is {problem}" for key, value in state.items() if (problem := _problem(key, value))
    ]
    if problems:
        shown = problems[:_SHOWN]
        if len(problems) > _SHOWN:
            shown.append(f"{len(problems) - _SHOWN} more are like that.")
        raise CheckpointError(f"{name} holds what safetensors files cannot hold:", shown)
    plain = {key: value.detach().resolve_conj().resolve_neg() for key, value in state.items()}
    names = sorted(plain, key=lambda key: (-_RANK[plain[key].dtype], key.encode()))
    return Unpickled({key: plain[key] for key in names}, tuple(notes), _tied(plain))


def _load(path: str, name: str) -> Any:
    try:
        with open(path, "rb") as file:
            head = file.read(HEAD_BYTES)
        check_no_pointer(head, name)
        is_zip = head.startswith(_ZIP)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{name} cannot be read: {error.strerror or error}.") from error
    except Exception as error:  # a malformed pickle can raise anything
        raise CheckpointError(f"{name} {_why(error)}") from error


def _why(error: Exception) -> str:
    """The end of a sentence; torch's own text advises to run the pickle's code."""
    text = str(error)
    asked = re.search(r"GLOBAL (\S+?) (?:was not|whose)", text) or re.search(
        r"Unsupported class (\S+)", text
    )
    if asked:
        return (
            f"asks for the Python object {asked[1]}, which is no tensor: to load it would run code "
            "that the file chooses, so it is refused. If you trust where it comes from, load it "
            "with the program that wrote it, and save its state dict alone."
        )
    if "TorchScript" in text:
        return "is a TorchScript program; expected a state dict that torch.save wrote."
    _, _, detail = text.partition("WeightsUnpickler error:")
    first = (detail or text).strip().split("\n")[0][:200]
    return (
        f"is no file of torch.save that holds tensors alone ({type(error).__name__}: {first}). "
        "Download it again?"
    )


def _state_dict(loaded: Any, name: str) -> tuple[dict[Any, Any], list[str]]:
    """The state dict itself, or the one in a mapping that holds more than it."""
    if not isinstance(loaded, Mapping):
        kind = "a tensor without a name" if isinstance(loaded, Tensor) else type(loaded).__name__
        raise CheckpointError(f"{name} holds {kind}; expected a mapping from names to tensors.")
    inner = [
        key
        for key, value in loaded.items()
        if isinstance(value, Mapping)
        and value
        and all(isinstance(each, Tensor) for each in value.values())
    ]
    own = [value for value in loaded.values() if isinstance(value, Tensor)]
    # Beside a mapping of weights, a scalar is a counter of the training.
    if own and not (inner and all(tensor.dim() == 0 for tensor in own)):
        return dict(loaded), []
    if len(inner) == 1:
        others = [str(key) for key in loaded if key != inner[0]]
        left = f"; left out: {', '.join(others)}" if others else ""
        return dict(loaded[inner[0]]), [f"{name}: the weights are those of {inner[0]!a}{left}."]
    if inner:
        raise CheckpointError(
            f"{name} holds several mappings from names to tensors "
            f"({', '.join(ascii(key) for key in inner)}); expected one. Save the one that is meant "
            "alone: torch.save(torch.load(FILE, weights_only=True)[KEY], NEW)."
        )
    keys = ", ".join(ascii(key) for key in list(loaded)[:_SHOWN]) or "nothing"
    raise CheckpointError(f"{name} holds no mapping from names to tensors, but {keys}.")


def _problem(key: Any, value: Any) -> str | None:
    """What keeps an entry out of a safetensors file, as the end of a sentence."""
    if not isinstance(key, str) or key == "__metadata__":
        return "no name of a tensor."
    try:
        key.encode()
    except UnicodeEncodeError:
        return "no valid Unicode."
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}, no tensor."
    if type(value) not in (Tensor, nn.Parameter, nn.Buffer):
        return f"a {type(value).__name__}; expected a plain tensor."
    if value.layout != torch.strided or value.is_quantized or value.is_nested:
        return f"of layout {value.layout}, or quantised; expected a dense tensor."
    if value.device.type != "cpu":
        return f"on {value.device}; it has no numbers."
    if value.dtype not in DTYPES:
        return f"{value.dtype}; safetensors has no such dtype."
    return None


def _tied(tensors: Mapping[str, Tensor]) -> tuple[tuple[str, ...], ...]:
    groups: dict[tuple[Any, ...], list[str]] = {}
    for name, tensor in tensors.items():
        if tensor.numel():
            place = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
            groups.setdefault(place, []).append(name)
    return tuple(tuple(names) for names in groups.values() if len(names) > 1)
