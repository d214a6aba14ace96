"""English that every machine with Python has: its language reference and documentation strings.

    python -m language_model.python_texts FOLDER    # from the folder of this package's parent

Three files: `reference.txt`, the topics of Python's `help()`, and the documentation strings of the
standard library, split by file: `docstrings_train.txt`, and about one file in five in
`docstrings_held_out.txt`. All are the same for the same version of Python.
"""

from __future__ import annotations

import ast
import hashlib
import sys
import sysconfig
import warnings
from pathlib import Path
from pydoc_data.topics import topics

TRAIN, HELD_OUT, REFERENCE = "docstrings_train.txt", "docstrings_held_out.txt", "reference.txt"
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}
SHORTEST = 200  # characters; shorter documentation strings say little in sequence


def write_texts(folder: Path) -> None:
    """Write the three files, unless they are there."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = {REFERENCE: [topics[name] for name in sorted(topics)], TRAIN: [], HELD_OUT: []}
    if all((folder / name).exists() for name in texts):
        return
    root = Path(sysconfig.get_path("stdlib"))
    for file in sorted(root.rglob("*.py")):
        path = file.relative_to(root)
        if not SKIPPED_FOLDERS & set(path.parts):
            texts[HELD_OUT if _is_held_out(path) else TRAIN] += _documentation_strings(file)
    for name, parts in texts.items():
        (folder / name).write_text("\n\n".join(parts), encoding="utf-8")


def _documentation_strings(file: Path) -> list[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # of escapes in old files
        try:
            tree = ast.parse(file.read_bytes())
        except SyntaxError:  # some files are templates
            return []
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(tree) if isinstance(node, documented)]
    found = [ast.get_docstring(node) or "" for node in nodes]
    return [text for text in found if len(text) >= SHORTEST]


def _is_held_out(file: Path) -> bool:
    """By a hash of the name: a file stays on its side when others come and go."""
    return hashlib.sha256(file.as_posix().encode()).digest()[0] % 5 == 0


if __name__ == "__main__":
    write_texts(Path(sys.argv[1]))
