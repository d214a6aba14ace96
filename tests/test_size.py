"""The package stays small: lines of code and files of each room have a limit."""

import ast
import functools
import io
import tokenize
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# Room of the package: (lines of code, files). A change that makes a room smaller lowers its limit.
ROOMS = {
    "__init__.py": (17, 1),
    "__main__.py": (13, 1),
    "_public.py": (59, 1),
    "_transformers.py": (328, 1),
    "_version.py": (1, 1),
    "api": (965, 7),
    "base": (799, 9),
    "budgets.py": (212, 1),
    "call": (791, 5),
    "checkpoint.py": (208, 1),
    "cli": (1246, 8),
    "criteria": (675, 3),
    "dynamic.py": (128, 1),
    "files": (2423, 13),
    "integrations": (782, 6),
    "language_models": (1691, 10),
    "layouts.py": (13, 1),
    "masks": (437, 3),
    "methods": (668, 4),
    "ranking": (1658, 9),
    "ranks": (345, 2),
    "recipes": (297, 1),
    "reconstruction.py": (288, 1),
    "schedule.py": (214, 1),
    "selftest.py": (322, 1),
    "shards": (787, 5),
    "statistics": (1365, 6),
    "streaming": (1470, 7),
    "testing.py": (211, 1),
    "verification.py": (492, 1),
    "wrappers": (1091, 8),
}
TOTAL = (19996, 120)
# Lines of code of the other folders.
FOLDERS = {"tests": 28000, "launch": 831}
NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENDMARKER,
}  # fmt: skip
DOCUMENTED = (ast.Module, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def count_code(text: str) -> int:
    """The number of lines that hold a token which is neither a comment nor a docstring."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    lines = set()
    for token in tokens:
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            lines.difference_update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return len(lines)


@functools.cache
def sizes(folder: str) -> dict[str, tuple[int, int]]:
    """Lines of code and files of each folder or module directly below a folder."""
    lines, files = Counter(), Counter()
    for path in (ROOT / folder).rglob("*.py"):
        room = path.relative_to(ROOT / folder).parts[0]
        lines[room] += count_code(path.read_text())
        files[room] += 1
    return {room: (lines[room], files[room]) for room in files}


def test_each_room_is_within_its_limits():
    found = sizes("distprune")
    assert set(found) == set(ROOMS)
    larger = {
        room: (size, ROOMS[room])
        for room, size in found.items()
        if size[0] > ROOMS[room][0] or size[1] > ROOMS[room][1]
    }
    assert not larger, "(lines of code, files) and the limits"


def test_the_package_is_within_its_limits():
    lines, files = (sum(sizes) for sizes in zip(*sizes("distprune").values(), strict=True))
    assert lines <= TOTAL[0] and files <= TOTAL[1]


@pytest.mark.parametrize("folder", FOLDERS)
def test_other_folders_are_within_their_limits(folder):
    assert sum(lines for lines, _ in sizes(folder).values()) <= FOLDERS[folder]


def test_what_counts_as_a_line_of_code():
    text = '"""Doc."""\n\n# why\ndef f(  # why\n    x,\n):\n    """Doc."""\n    return """a\nb"""\n'
    assert count_code(text) == 5
