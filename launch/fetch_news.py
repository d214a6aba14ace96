"""Write a text of another domain than Python's documentation: 300 short news articles.

    python -m pip install --no-deps -r configs/news.requirements.txt
    python launch/fetch_news.py runs/language_model

The articles are the background corpus of Lee, Pincombe and Welsh (2005), news of the Australian
Broadcasting Corporation, which the package gensim has among its test data. The package is not
imported, so that it needs none of its dependencies.
"""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

NAME = "news.txt"


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(f"usage: {sys.argv[0]} FOLDER")
    try:
        found = distribution("gensim").locate_file("gensim/test/test_data/lee_background.cor")
    except PackageNotFoundError:
        sys.exit(
            "gensim is not installed; expected\n"
            "    python -m pip install --no-deps -r configs/news.requirements.txt"
        )
    articles = Path(str(found)).read_text(encoding="utf-8").splitlines()
    file = Path(sys.argv[1]) / NAME
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n\n".join(articles), encoding="utf-8")
    print(f"wrote {file}: {len(articles)} articles")


if __name__ == "__main__":
    main()
