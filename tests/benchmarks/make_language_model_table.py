"""Make tables, and what the README says of them, from the rows of language_model_table.py.

python tests/benchmarks/make_language_model_table.py
"""

import json
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "launch"))

from common import markdown_table

ROOT = Path(__file__).resolve().parents[2]
ROWS = ROOT / "tests" / "benchmarks" / "results" / "language_models_202611.jsonl"
TEXTS = {
    "docstrings_held_out_begins.txt": "documentation of Python modules",
    "news.txt": "news",
    "encyclopaedia.txt": "an encyclopaedia",
}
NAMES = {
    "magnitude/row": "magnitude, by rows",
    "wanda": "Wanda (llm-compressor)",
    "sparsegpt": "SparseGPT (llm-compressor)",
    "own": "distprune, its own text",
    "docstrings+own": "distprune, docstrings and its own text",
}
START, END = "<!-- table of a language model -->", "<!-- /table of a language model -->"
Row = dict[str, Any]


def read_rows(file: Path) -> list[Row]:
    """The rows of a file of results; its last line goes if a run was killed while it wrote it."""
    if not file.exists():
        return []
    *lines, unfinished = file.read_text(encoding="utf-8").split("\n")
    if unfinished:
        file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return [json.loads(line) for line in lines]


def short(value: float) -> str:
    """A perplexity as the tables have it."""
    return f"{value:.2f}" if value < 100 else f"{value:,.0f}"


def with_error(losses: Sequence[float]) -> str:
    """The perplexity of a text from the mean losses of its windows, with its standard error."""
    perplexity = math.exp(statistics.fmean(losses))
    error = perplexity * statistics.stdev(losses) / math.sqrt(len(losses))
    return f"{short(perplexity)} ± {short(error)}"


def name_of(row: Row) -> str:
    """A method, and whether its result was polished."""
    name = NAMES.get(row["method"], f"distprune, {row['method']}")
    return f"{name}, polished" if row["polish"] else name


def column_of(row: Row) -> str:
    """How much was pruned."""
    sparsity = row["sparsity"]
    return sparsity if ":" in sparsity else f"{100 * float(sparsity):g} %"


def order_of(row: Row) -> tuple[Any, ...]:
    """As the methods are in NAMES, each before its polish."""
    return [*NAMES, row["method"]].index(row["method"]), row["method"], row["polish"]


def tables() -> str:
    """A table for each model and text: methods, and how much they prune."""
    rows = read_rows(ROWS)
    settings = rows[0]["facts"]
    parts = [
        "Perplexity just after pruning, with its standard error over windows of "
        f"{settings['length']} tokens. Each text that a method reads has {settings['windows']} "
        f"such windows; a polish has {settings['steps']} steps towards the dense model. All "
        "methods are measured on the same windows, so that their differences are surer than "
        "themselves."
    ]
    for model in dict.fromkeys(row["model"] for row in rows):
        dense, *pruned = (row for row in rows if row["model"] == model)
        pruned.sort(key=order_of)
        columns = sorted({column_of(row) for row in pruned}, key=lambda name: (":" in name, name))
        for text, kind in TEXTS.items():
            losses = dense["texts"][text]
            number = len(losses) * (settings["length"] - 1)
            cells = {(name_of(r), column_of(r)): with_error(r["texts"][text]) for r in pruned}
            lines = [("method", *columns)]
            for name in dict.fromkeys(map(name_of, pruned)):
                lines.append((name, *(cells.get((name, column), "-") for column in columns)))
            told = f"{model}, {kind}, {number:,} tokens; the dense model: {with_error(losses)}"
            parts += [told, markdown_table(lines)]
        seconds = [
            f"{name_of(row)} {row['cpu_seconds']:,} s"
            for row in pruned
            if row["sparsity"] == "0.5" and row["cpu_seconds"] is not None
        ]
        told = "Processor time at 50 %, of a polish without what it goes on from"
        parts.append(f"{told}: {', '.join(seconds)}.")
    return "\n\n".join(parts)


def sentence() -> str:
    """What the README says, as soon as all methods are there: one sparsity, on each text."""
    rows = [row for row in read_rows(ROWS) if row["model"] == "gemma-3-270m"]
    at_60 = sorted((row for row in rows if row["sparsity"] == "0.6"), key=order_of)
    if not {row["method"] for row in at_60} >= NAMES.keys():
        return ""

    def words(row: Row) -> str:
        found = [math.exp(statistics.fmean(row["texts"][text])) for text in TEXTS]
        return f"{'polished ' * bool(row['polish'])}{', '.join(map(short, found))}"

    told = {m: ", ".join(words(row) for row in at_60 if row["method"] == m) for m in NAMES}
    return (
        f"Perplexity of Gemma-3-270M at 60 %, on {', on '.join(TEXTS.values())} (dense: "
        f"{words(rows[0])}). {'; '.join(f'{name}: {told[m]}' for m, name in NAMES.items())}. "
        "[How it was measured](docs/language_models.md#methods-side-by-side)."
    )


PAGES = {ROOT / "README.md": sentence, ROWS.with_suffix(".md"): tables}


def with_tables(page: Path) -> str:
    """The text of a page, with its table made anew; at its end, if it has none."""
    text, made = page.read_text(encoding="utf-8"), PAGES[page]()
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(END)
    return f"{before}{START}\n{made}\n{END}{after}" if made else text


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(with_tables(page), encoding="utf-8")
