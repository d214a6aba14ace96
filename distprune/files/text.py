"""Names, sizes and fractions as texts, for messages and for the files of a result."""

from __future__ import annotations


def printable(text: str) -> str:
    """A text with escape sequences in place of what is not visible, such as "\\x1b" or "\\n"."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


def format_size(num_bytes: float) -> str:
    """ "1.5 GB": a size in decimal units, which are those of disks."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"


def format_percent(part: int, whole: int) -> str:
    """ "12.34 %"; 0.00 and 100.00 only if the fraction is exactly that, or the whole is 0."""
    percent = 100 * part / whole if whole else 0.0
    if 0 < part < whole:
        percent = min(max(percent, 0.01), 99.99)
    return f"{percent:.2f} %"
