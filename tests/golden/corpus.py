"""The frozen results: hashes by the name of a case, in results.json."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch

PATH = Path(__file__).with_name("results.json")
# The package that makes the checkpoints, and the one that draws random values.
PACKAGES = ("torch", "transformers")


def stored() -> dict[str, Any]:
    """Return what results.json holds: "made_with", "sources" and "results"."""
    if not PATH.exists():
        return {"made_with": {}, "sources": {}, "results": {}}
    found: dict[str, Any] = json.loads(PATH.read_text())
    return found


def versions() -> dict[str, str]:
    return {name: metadata.version(name) for name in PACKAGES}


def write(sources: Mapping[str, str], results: Mapping[str, str]) -> None:
    parts = {"made_with": versions(), "sources": dict(sources), "results": dict(results)}
    sections = [
        f"{json.dumps(title)}: {{\n"
        + ",\n".join(f"{json.dumps(k)}: {json.dumps(part[k])}" for k in sorted(part))
        + "\n}"
        for title, part in parts.items()
    ]
    PATH.write_text("{" + ",\n".join(sections) + "}\n")


def hash_of(parts: Iterable[object]) -> str:
    """Hash texts, numbers, tensors and None, in their order."""
    digest = hashlib.sha256()
    for part in parts:
        plain = part.hex() if isinstance(part, float) else part
        data = plain if isinstance(plain, bytes) else repr(plain).encode()
        digest.update(f"{len(data)}:".encode() + data)
    return digest.hexdigest()[:12]


def hash_of_masks(masks: Mapping[str, torch.Tensor]) -> str:
    """Hash masks in the order of their names: True or 1 = keep, one bit per row-major element."""
    parts: list[object] = []
    for name in sorted(masks):
        keep = masks[name].to(torch.bool).contiguous().numpy()
        parts += [name, keep.shape, int(keep.sum()), np.packbits(keep.reshape(-1)).tobytes()]
    return hash_of(parts)


def hash_of_tensors(tensors: Mapping[str, torch.Tensor]) -> str:
    """Hash the bytes of tensors in the order of their names."""
    parts: list[object] = []
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        data = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        parts += [name, str(tensor.dtype), tuple(tensor.shape), data]
    return hash_of(parts)


def differences(found: Mapping[str, str], expected: Mapping[str, str]) -> list[str]:
    """Name each case with another result than the frozen one, and the part that differs."""
    lines = []
    for case, result in found.items():
        if case not in expected:
            lines.append(f"{case}: no result is frozen")
            continue
        pairs = zip(result.split(), expected[case].split(), strict=True)
        differing = [new.partition("=")[0] for new, old in pairs if new != old]
        if differing:
            lines.append(f"{case}: other {' and '.join(differing)}")
    return lines
