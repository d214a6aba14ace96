"""Write texts of several kinds, which every machine can make, to prune by and to measure on.

    python -m pip install --no-deps -r configs/texts.requirements.txt
    python launch/fetch_texts.py runs/language_model

- docstrings_train.txt, docstrings_held_out.txt: the documentation strings of Python's standard
  library, split by file: about one file in five is held out. docstrings_held_out_begins.txt has the
  first part of each of these: many documents in a short text.
- reference.txt: the topics of Python's `help()`.
- news.txt: 300 short articles of the Australian Broadcasting Corporation, the background corpus of
  Lee, Pincombe and Welsh (2005).
- encyclopaedia.txt: how about 100 articles of the English Wikipedia of 2015 begin (CC BY-SA 3.0).

The last two are among the test data of the package gensim, and left out if it is not installed. It
is not imported, so that it needs none of its dependencies.
"""

from __future__ import annotations

import ast
import bz2
import html
import re
import sys
import warnings
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from pydoc_data.topics import topics

from common import python_sources

SHORTEST = 200  # characters; shorter documentation strings and paragraphs say little in sequence
BEGIN = 1500  # characters of each document
NEWS = "lee_background.cor"
ENCYCLOPAEDIA = "enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2"
# Of MediaWiki: templates and tables without others inside; comments, references and other
# elements; links, of which the words are kept; emphasis.
MARKUP = [
    (r"\{\{[^{}]*\}\}|\{\|[^{}]*\|\}", ""),
    (r"<!--.*?-->|<(ref|gallery|math)\b[^>]*?(/>|>.*?</\1>)|<[^>]*>", ""),
    (r"\[\[(?:[^\[\]|]*\|)?([^\[\]|]*)\]\]", r"\1"),
    (r"'{2,}|\( *[;,]? *\)", ""),
]


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(f"usage: {sys.argv[0]} FOLDER")
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    train, held_out = ([documentation_strings(file) for file in f] for f in python_sources(5))
    texts = {
        "reference.txt": [topics[name] for name in sorted(topics)],
        "docstrings_train.txt": [text for found in train for text in found],
        "docstrings_held_out.txt": [text for found in held_out for text in found],
        "docstrings_held_out_begins.txt": ["\n\n".join(found)[:BEGIN] for found in held_out],
    }
    try:
        data = Path(str(distribution("gensim").locate_file("gensim/test/test_data")))
        texts["news.txt"] = (data / NEWS).read_text(encoding="utf-8").splitlines()
        pages = bz2.decompress((data / ENCYCLOPAEDIA).read_bytes()).decode("utf-8")
        texts["encyclopaedia.txt"] = begins_of_articles(pages)
    except PackageNotFoundError:
        print("without news and encyclopaedia: gensim of configs/texts.requirements.txt is missing")
    for name, parts in texts.items():
        (folder / name).write_text("\n\n".join(filter(None, parts)), encoding="utf-8")
    print(f"wrote {', '.join(texts)} in {folder}")


def documentation_strings(file: Path) -> list[str]:
    """Those of a Python file which are not short."""
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


def begins_of_articles(pages: str) -> list[str]:
    """The first paragraphs of each article in an export of MediaWiki, without markup."""
    begins = []
    for text in re.findall(r"<text[^>]*>(.*?)</text>", pages, re.DOTALL):
        text, before = html.unescape(text), ""
        while text != before:  # from the inside to the outside
            before = text
            for pattern, words in MARKUP:
                text = re.sub(pattern, words, text, flags=re.DOTALL)
        paragraphs = [line for line in text.splitlines() if line[:1].isalpha()]
        begins.append("\n".join(line for line in paragraphs if len(line) >= SHORTEST)[:BEGIN])
    return begins


if __name__ == "__main__":
    main()
