"""Plain values as YAML text, without PyYAML; recipes are written with it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any


def yaml_text(values: Mapping[str, Any]) -> str:
    """A YAML document in ASCII that a YAML reader turns into the same values.

    Args:
        values: plain values. A list of mappings gets a line for each of their keys, and any other
            value one line.
    """
    lines = []
    for key, value in values.items():
        if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            lines.append(f"{key}:")
            for mapping in value:
                marks = ["  - ", *["    "] * (len(mapping) - 1)]
                lines += [
                    f"{mark}{inner}: {_flow(item)}"
                    for mark, (inner, item) in zip(marks, mapping.items(), strict=True)
                ]
        else:
            lines.append(f"{key}: {_flow(value)}")
    return "\n".join(lines) + "\n"


def _flow(value: Any) -> str:
    """A value in one line: JSON, except where YAML would read another value."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_flow(k)}: {_flow(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_flow, value)) + "]"
    if isinstance(value, float):
        text = format(Decimal(repr(value)), "f")  # YAML reads 1e-05 as a string
        return text if "." in text else text + ".0"
    # JSON writes characters beyond 16 bits as two escapes, which YAML reads as two characters.
    return re.sub(r"\\u(d[89ab]..)\\u(d[c-f]..)", _joined, json.dumps(value))


def _joined(pair: re.Match[str]) -> str:
    high, low = (int(digits, 16) for digits in pair.groups())
    return f"\\U{0x10000 + ((high - 0xD800) << 10) + (low - 0xDC00):08x}"
