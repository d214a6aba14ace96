"""The metadata of a model card: the YAML block at its beginning, edited as text.

A YAML library would reorder and reformat the author's text, and the result would depend on the
version of the library. So top-level keys are found line by line, and lines that this module cannot
parse are left alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence

_BLOCK = re.compile(
    rb"\A(?:\xef\xbb\xbf)?\s*---[ \t]*\r?\n(.*?)^---[ \t]*(?:\r?\n|\Z)", re.DOTALL | re.MULTILINE
)
_KEY = re.compile(
    r"""(?:"([^"\\]+)"|'([^']+)'|([A-Za-z0-9_][^\s:#'"{}\[\],]*))[ \t]*:(?=\s|$)(.*)"""
)
_ITEM = re.compile(r"([ \t]*)-[ \t]+(\S.*)")
_PLAIN = re.compile(r"[A-Za-z0-9_][\w./ +-]*")

# A key, or None for the lines before the first key; its lines.
Part = tuple[str | None, list[str]]


def split(card: bytes) -> tuple[str | None, bytes]:
    """Split a card into its metadata and its text.

    Returns:
        The block between the lines of three dashes; None if there is none, or it is not UTF-8.
        The rest, unchanged: without a block, all of the card.
    """
    match = _BLOCK.match(card)
    if match is None:
        return None, card
    try:
        return match[1].decode("utf-8").replace("\r\n", "\n"), card[match.end() :]
    except UnicodeDecodeError:
        return None, card


def parse(block: str) -> list[Part] | None:
    """Cut a block into its top-level keys; None if it is not a plain mapping."""
    parts: list[Part] = [(None, [])]
    for line in block.split("\n")[: -1 if block.endswith("\n") else None]:
        match = _KEY.match(line)
        if match:
            parts.append((match[1] or match[2] or match[3], [line]))
        elif not line.strip() or line[0] in " \t#" or (line[0] == "-" and line[1:2] in ("", " ")):
            is_content = line.strip() and not line.lstrip().startswith("#")
            if is_content and parts[-1][0] is None:
                return None
            parts[-1][1].append(line)
        else:
            return None
    keys = [key for key, _ in parts if key is not None]
    return parts if len(set(keys)) == len(keys) else None


def without(parts: Sequence[Part], keys: Collection[str]) -> list[Part]:
    """The parts without some keys."""
    return [part for part in parts if part[0] not in keys]


def with_tags(parts: Sequence[Part], tags: Sequence[str]) -> list[Part]:
    """Add missing tags to the list of tags; a list in an unknown form is left alone."""
    lines_of_tags = [lines for key, lines in parts if key == "tags"]
    if not lines_of_tags:
        return [*parts, ("tags", ["tags:", *(f"- {tag}" for tag in tags)])]
    edited = _tagged(lines_of_tags[0], tags)
    return [(key, edited) if key == "tags" else (key, lines) for key, lines in parts]


def value_of(parts: Sequence[Part], key: str) -> str | None:
    """A value that is one plain or quoted word on the key's own line; None for anything else."""
    for name, lines in parts:
        match = _KEY.match(lines[0]) if name == key else None
        if match and not any(line.strip() for line in lines[1:]):
            text = _unquoted(match[4].strip())
            return text if text and not set(text) & set(" \t#&*!|>{}[]'\"") else None
    return None


def join(parts: Sequence[Part]) -> str:
    """The block with its lines of dashes."""
    lines = [line for _, part in parts for line in part]
    return "\n".join(["---", *lines, "---"]) + "\n"


def as_value(text: str) -> str:
    """A word as a YAML value: quoted unless YAML can only read it as a string."""
    return text if "/" in text and _PLAIN.fullmatch(text) else json.dumps(text)


def _tagged(lines: list[str], tags: Sequence[str]) -> list[str]:
    match = _KEY.match(lines[0])
    assert match is not None
    value, rest = match[4].strip(), [line for line in lines[1:] if line.strip()]
    if value in ("", "null", "~") and not rest:
        return ["tags:", *(f"- {tag}" for tag in tags)]
    items = [_ITEM.fullmatch(line) for line in rest]
    if value == "" and all(items) and len({item[1] for item in items if item}) == 1:
        present = {_unquoted(item[2].strip()) for item in items if item}
        indent = items[0][1] if items[0] else ""
        return [lines[0], *rest, *(f"{indent}- {tag}" for tag in tags if tag not in present)]
    inner = re.fullmatch(r"\[([^\[\]{}#\"']*)\]", value)
    if inner and not rest:
        words = [word.strip() for word in inner[1].split(",") if word.strip()]
        return [f"tags: [{', '.join([*words, *(t for t in tags if t not in words)])}]"]
    if _PLAIN.fullmatch(value) and not rest:
        return ["tags:", f"- {value}", *(f"- {tag}" for tag in tags if tag != value)]
    return lines


def _unquoted(text: str) -> str:
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        return text[1:-1]
    return text
