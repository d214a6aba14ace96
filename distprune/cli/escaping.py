"""Text of unknown origin on a terminal: names in files may hold escape sequences."""

from __future__ import annotations

import re

_HARMLESS = "\t"


def printable(text: str) -> str:
    """A text with all that is no visible character written as an escape sequence.

    That is control characters ("\\x1b", a line break), marks that turn the direction of text,
    spaces that are none, and bytes of file names that are no UTF-8. A tab stays.
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
