"""The tables of the documentation are what was measured on real language models."""

import json
import math
import sys

import pytest
from examples_of_pages import DOCS, ROOT

sys.path.insert(0, str(DOCS))
sys.path.insert(0, str(ROOT / "tests" / "benchmarks"))

import draw_pictures
import make_language_model_table as maker

FACTS = {"windows": 32, "length": 256, "steps": 40}


@pytest.mark.skipif(not maker.ROWS.exists(), reason="nothing has been measured")
@pytest.mark.parametrize("page", maker.PAGES, ids=lambda page: page.name)
def test_tables_are_made_from_the_results(page):
    assert maker.START in page.read_text(encoding="utf-8")
    assert maker.with_tables(page) == page.read_text(encoding="utf-8")


def test_a_table_and_a_picture_of_two_texts(tmp_path, monkeypatch):
    """Of the mean losses of windows: perplexity with its standard error, and a line per method."""
    monkeypatch.setattr(maker, "ROWS", tmp_path / "rows.jsonl")
    monkeypatch.setattr(draw_pictures, "TABLE", maker.ROWS)

    def write(*cells):
        """A row of each cell: windows of `low` and four times it have twice it as perplexity."""
        with maker.ROWS.open("a") as stream:
            for sparsity, method, polish, low in cells:
                texts = {text: [math.log(low), math.log(4 * low)] for text in maker.TEXTS}
                row = {"model": "gemma-3-270m", "sparsity": sparsity, "method": method}
                row |= {"polish": polish, "cpu_seconds": 1234, "texts": texts, "facts": FACTS}
                stream.write(json.dumps(row) + "\n")

    write(("0", "dense", 0, 10), ("0.5", "taylor/layer", 0, 1000), ("2:4", "own", 40, 20))
    assert maker.sentence() == ""
    for at, low in (("0.6", 20), ("0.5", 15)):
        write((at, "own", 40, low), (at, "sparsegpt", 0, 2 * low), (at, "sparsegpt", 40, 2 * low))
        write((at, "magnitude/row", 0, 10**5), (at, "wanda", 0, 60))
        write((at, "docstrings+own", 0, 25), (at, "docstrings+own", 40, low))

    made = maker.tables()
    assert "news, 510 tokens; the dense model: 20.00 ± 13.86\n" in made
    table = [[word.strip() for word in line.split("|")[1:-1]] for line in made.splitlines()]
    assert table.count(["method", "50 %", "60 %", "2:4"]) == 3
    own = ["distprune, its own text, polished", "30.00 ± 20.79", *2 * ["40.00 ± 27.73"]]
    assert own in table and ["distprune, taylor/layer", "2,000 ± 1,386", "-", "-"] in table
    order = [line[0] for line in table if line]
    assert order.index("SparseGPT (llm-compressor)") < order.index(own[0])
    assert "SparseGPT (llm-compressor) 1,234 s" in made
    of, told = "80.00, 80.00, 80.00", maker.sentence()
    assert f"SparseGPT (llm-compressor): {of}, polished {of}; distprune, its own" in told

    picture = str(draw_pictures.perplexity())
    assert picture.count("<polyline") == 2 * 6 and picture.count(">SparseGPT</text>") == 1
    assert ">news</text>" in picture and ">magnitude (above 400)</text>" in picture
    assert "SparseGPT: 60.00 at 50 %, 80.00 at 60 %" in picture
