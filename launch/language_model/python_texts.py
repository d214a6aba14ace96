"""English that every machine with Python has: its language reference and documentation strings.

    python -m language_model.python_texts FOLDER    # from the folder of this package's parent

Four files: `reference.txt`, the topics of Python's `help()`, and the documentation strings of the
standard library, split by file: `docstrings_train.txt`, and about one file in five in
`docstrings_held_out.txt`. `docstrings_held_out_begins.txt` has the first part of each of these:
many documents in a short text. All are the same for the same version of Python.
"""

from __future__ import annotations

import ast
import sys
import warnings
from pathlib import Path
from pydoc_data.topics import topics

from jobs.standard_library import is_held_out, source_files

TRAIN, HELD_OUT, REFERENCE = "docstrings_train.txt", "docstrings_held_out.txt", "reference.txt"
BEGINS = "docstrings_held_out_begins.txt"
SHORTEST = 200  # characters; shorter documentation strings say little in sequence
BEGIN = 1500  # characters of each file


def write_texts(folder: Path) -> None:
    """Write the four files, unless they are there."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = {
        REFERENCE: [topics[name] for name in sorted(topics)],
        TRAIN: [],
        HELD_OUT: [],
        BEGINS: [],
    }
    if all((folder / name).exists() for name in texts):
        return
    for file in source_files():
        found = _documentation_strings(file)
        if is_held_out(file, 5):
            texts[HELD_OUT] += found
            texts[BEGINS].append("\n\n".join(found)[:BEGIN])
        else:
            texts[TRAIN] += found
    for name, parts in texts.items():
        (folder / name).write_text("\n\n".join(filter(None, parts)), encoding="utf-8")


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


if __name__ == "__main__":
    write_texts(Path(sys.argv[1]))
