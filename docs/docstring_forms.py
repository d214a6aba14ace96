"""A griffe extension: two forms of the project's docstrings, written as mkdocstrings reads them.

"a, b: both." in Args describes parameters together where they mean the same; the parser takes
"a, b" for one name, and warns that there is no such parameter. A line that ends in "::" comes
before code.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_SECTION = re.compile(r"^(?:Args|Attributes):\n(?:(?: .*)?\n)*", re.MULTILINE)
_ENTRY = re.compile(
    r"^    (?P<names>\w+(?:, \w+)+): (?P<text>.*\n(?:(?: {5,}.*)?\n)*)", re.MULTILINE
)


def rewritten(docstring: str) -> str:
    """The docstring with an entry of its own, of the same text, for each joined name; no "::"."""

    def entries(joined: re.Match[str]) -> str:
        text = joined["text"].rstrip("\n")
        return "".join(f"    {name}: {text}\n" for name in joined["names"].split(", "))

    text = _SECTION.sub(lambda section: _ENTRY.sub(entries, section[0]), docstring + "\n")
    return re.sub(r"::$", ":", text, flags=re.MULTILINE).rstrip()


class DocstringForms(griffe.Extension):
    """Rewrites the docstrings of a package after it was read."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = rewritten(obj.docstring.value)
