"""Tensors from files of ``torch.save``, without running code that such a file may contain.

A pickle is a program, which Python runs when it loads the file. torch's restricted reader
(``weights_only=True``) knows tensors and plain containers only and refuses everything else. The
tensors are mapped, so that their bytes stay in the file until they are read.
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
# The order of the safetensors library, reversed: it writes wide dtypes first.
_ORDER = (
    "BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "I16", "U16",
    "F16", "BF16", "I32", "U32", "F32", "C64", "F64", "I64", "U64",
)  # fmt: skip
# By dtype of torch, the name in a header.
DTYPES: dict[torch.dtype, str] = {getattr(torch, _DTYPE_NAMES[name]): name for name in _ORDER}
_POSITION = {dtype: position for position, dtype in enumerate(DTYPES)}
_ZIP = b"PK\x03\x04"
_NUM_SHOWN = 6  # problems, or keys, in a message


@dataclass(frozen=True)
class Unpickled:
    """The tensors of a file.

    Attributes:
        tensors: by name, in the order of the safetensors library: wide dtypes first, then by name.
        notes: sentences on other content of the file.
        tied: groups of names that share one tensor in the file.
    """

    tensors: dict[str, Tensor]
    notes: tuple[str, ...]
    tied: tuple[tuple[str, ...], ...]


def unpickle(path: str, name: str) -> Unpickled:
    """Read the tensors of a file of ``torch.save``.

    Args:
        path: of the file.
        name: of the file in messages.

    Raises:
        CheckpointError: it is not a file of ``torch.save``, loading it would run code, or it holds
            values that safetensors cannot store; names each of them.

    Cost: reads names and shapes, and maps the tensors. Files of torch before 1.6 are read into
    memory.
    """
    state, notes = _state_dict(_load(path, name), name)
    problems = [
        f"{key!a} is {problem}" for key, value in state.items() if (problem := _problem(key, value))
    ]
    if problems:
        shown = problems[:_NUM_SHOWN]
        if len(problems) > _NUM_SHOWN:
            shown.append(f"and {len(problems) - _NUM_SHOWN} more.")
        raise CheckpointError(f"{name} holds values that safetensors files cannot store:", shown)
    plain = {key: value.detach().resolve_conj().resolve_neg() for key, value in state.items()}
    names = sorted(plain, key=lambda key: (-_POSITION[plain[key].dtype], key.encode()))
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
    """The end of a sentence; torch's own text suggests to run the pickle's code."""
    text = str(error)
    refused = re.search(r"GLOBAL (\S+?) (?:was not|whose)", text) or re.search(
        r"Unsupported class (\S+)", text
    )
    if refused:
        return (
            f"contains the Python object {refused[1]}, which is not a tensor: loading it could run "
            "code of the file, so it is refused. If you trust its source, load it with the program "
            "that wrote it, and save its state dict alone."
        )
    if "TorchScript" in text:
        return "is a TorchScript program; expected a state dict that torch.save wrote."
    _, _, detail = text.partition("WeightsUnpickler error:")
    first = (detail or text).strip().split("\n")[0][:200]
    return (
        f"is not a file of torch.save that holds tensors alone ({type(error).__name__}: {first}). "
        "Download it again?"
    )


def _state_dict(loaded: Any, name: str) -> tuple[dict[Any, Any], list[str]]:
    """The state dict: the loaded mapping, or the only one inside it; and notes."""
    if not isinstance(loaded, Mapping):
        kind = "a tensor without a name" if isinstance(loaded, Tensor) else type(loaded).__name__
        raise CheckpointError(f"{name} holds {kind}; expected a mapping from names to tensors.")
    inner = [
        key
        for key, value in loaded.items()
        if isinstance(value, Mapping)
        and value
        and all(isinstance(tensor, Tensor) for tensor in value.values())
    ]
    own = [value for value in loaded.values() if isinstance(value, Tensor)]
    # Scalars beside a mapping of weights are counters of the training, such as the step.
    if own and not (inner and all(tensor.dim() == 0 for tensor in own)):
        return dict(loaded), []
    if len(inner) == 1:
        others = [str(key) for key in loaded if key != inner[0]]
        left = f"; left out: {', '.join(others)}" if others else ""
        return dict(loaded[inner[0]]), [f"{name}: the weights are those of {inner[0]!a}{left}."]
    if inner:
        raise CheckpointError(
            f"{name} holds several mappings from names to tensors "
            f"({', '.join(ascii(key) for key in inner)}); expected one. Save the right one "
            "alone: torch.save(torch.load(FILE, weights_only=True)[KEY], NEW)."
        )
    keys = ", ".join(ascii(key) for key in list(loaded)[:_NUM_SHOWN]) or "nothing"
    raise CheckpointError(f"{name} holds no mapping from names to tensors, but {keys}.")


def _problem(key: Any, value: Any) -> str | None:
    """Why an entry cannot be stored in a safetensors file, as the end of a sentence."""
    if not isinstance(key, str) or key == "__metadata__":
        return "not a tensor's name."
    try:
        key.encode()
    except UnicodeEncodeError:
        return "not valid Unicode."
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}, not a tensor."
    if type(value) not in (Tensor, nn.Parameter, nn.Buffer):
        return f"a {type(value).__name__}; expected a plain tensor."
    if value.layout != torch.strided or value.is_quantized or value.is_nested:
        return f"of layout {value.layout}, or quantised; expected a dense tensor."
    if value.device.type != "cpu":
        return f"on {value.device}; expected a tensor with data."
    if value.dtype not in DTYPES:
        return f"{value.dtype}; safetensors has no such dtype."
    return None


def _tied(tensors: Mapping[str, Tensor]) -> tuple[tuple[str, ...], ...]:
    groups: dict[tuple[Any, ...], list[str]] = {}
    for name, tensor in tensors.items():
        if tensor.numel():
            memory = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
            groups.setdefault(memory, []).append(name)
    return tuple(tuple(names) for names in groups.values() if len(names) > 1)
