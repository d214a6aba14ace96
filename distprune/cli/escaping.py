"""Text of unknown origin on a terminal: names in files may hold escape sequences."""

from __future__ import annotations

import re

_HARMLESS = "\t"


def printable(text: str) -> str:
    """Write every character that is not visible as an escape sequence.

    These are control characters ("\\x1b", a line break), marks that change the direction of text,
    other spaces, and bytes of file names that are not UTF-8. A tab stays.
    """
    if text.isprintable():
        return text
    return _NOT_ASCII_PRINTABLE.sub(_escaped, text)


def _escaped(match: re.Match[str]) -> str:
    character = match.group()
    if character.isprintable() or character in _HARMLESS:
        return character
    number = ord(character)
    if 0xDC80 <= number <= 0xDCFF:  # a byte of a file name
        number -= 0xDC00
    if number < 0x100:
        return f"\\x{number:02x}"
    return f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"


_NOT_ASCII_PRINTABLE = re.compile(r"[^ -~]")
