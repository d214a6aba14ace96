"""The metadata of a model card: the YAML mapping between lines of dashes at its beginning."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import yaml

_BLOCK = re.compile(
    rb"\A(?:\xef\xbb\xbf)?\s*---[ \t]*\r?\n(.*?)^---[ \t]*(?:\r?\n|\Z)", re.DOTALL | re.MULTILINE
)
_MAX_BYTES, _MAX_DEPTH = 1 << 18, 32  # of metadata; PyYAML reads some 200 KB per second


def split(card: bytes) -> tuple[dict[Any, Any] | None, bytes]:
    """The metadata of a card, and the text below.

    Returns:
        None and all of the card if it has no metadata, or none that can be read: no UTF-8, no
        mapping, very long, deeply nested, or with aliases.
    """
    match = _BLOCK.match(card)
    if match is None or len(match[1]) > _MAX_BYTES:
        return None, card
    try:
        block = match[1].decode("utf-8")
        if not _is_plain(block):
            return None, card
        metadata = yaml.safe_load(block)
    except Exception:  # PyYAML raises anything for dates, numbers and tags that cannot be
        return None, card
    if metadata is None:
        metadata = {}
    return (metadata, card[match.end() :]) if isinstance(metadata, dict) else (None, card)


def _is_plain(block: str) -> bool:
    """Whether YAML has no aliases, which make much of a little text, and is not deeply nested."""
    depth = 0
    for event in yaml.parse(block, yaml.SafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > _MAX_DEPTH or isinstance(event, yaml.AliasEvent):
            return False
    return True


def join(metadata: dict[Any, Any]) -> str:
    """The metadata as the beginning of a card, in the order of its keys."""
    text = yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True) if metadata else ""
    return f"---\n{text}---\n"


def with_tags(metadata: dict[Any, Any], tags: Sequence[str]) -> dict[Any, Any]:
    """The metadata with more tags; tags that are neither a list nor a word are left alone."""
    present = metadata.get("tags") or []
    if isinstance(present, str):
        present = [present]
    if not isinstance(present, list):
        return metadata
    return {**metadata, "tags": [*present, *(tag for tag in tags if tag not in present)]}
