"""JSON that is parsed strictly, since programs differ in how they read malformed JSON."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any, NoReturn

from distprune.files.errors import CheckpointError


def load_json(raw: bytes, what: str) -> Any:
    """Parse JSON strictly: UTF-8, no duplicate keys, no NaN.

    Args:
        raw: the JSON.
        what: subject of the error message.

    Raises:
        CheckpointError: it is malformed.
    """
    try:
        return json.loads(
            raw.decode("utf-8"),
            object_pairs_hook=_unique,
            parse_int=_parse_int,
            parse_constant=_refuse_constant,
        )
    except RecursionError:
        reason = "it is nested too deeply"
    except ValueError as error:  # from UTF-8, the JSON decoder, or one of the hooks
        reason = str(error)
    raise CheckpointError(f"{what} is not valid JSON: {reason}. Download the file again?")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        counts = Counter(key for key, _ in pairs)
        duplicate = next(key for key, _ in pairs if counts[key] > 1)
        raise ValueError(f"the key {ascii(duplicate)[:100]} occurs twice")
    return mapping


def _parse_int(digits: str) -> int:
    if len(digits) > 20:  # longer than any 64-bit integer
        raise ValueError(f"the number {digits[:20]}... is too large")
    return int(digits)


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
