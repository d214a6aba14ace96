"""JSON documents that people can read and that are fast to write: items of a list are lines."""

from __future__ import annotations

import json
from typing import Any


def dump(value: Any) -> str:
    """A value as JSON, in ASCII.

    Objects and lists of objects are spread over lines, two levels deep; what is below is on one
    line. A document of 100,000 tensors takes half a second: with an indent for every level, it
    would take ten times as long.
    """
    return _dump(value, "", 2)


def _dump(value: Any, indent: str, depth: int) -> str:
    inner = indent + "  "
    if depth and isinstance(value, dict) and value:
        lines = [
            f"{inner}{json.dumps(str(key))}: {_dump(item, inner, depth - 1)}"
            for key, item in value.items()
        ]
        return "{\n" + ",\n".join(lines) + "\n" + indent + "}"
    if depth and isinstance(value, (list, tuple)) and any(isinstance(v, dict) for v in value):
        lines = [inner + json.dumps(item) for item in value]
        return "[\n" + ",\n".join(lines) + "\n" + indent + "]"
    return json.dumps(value)
