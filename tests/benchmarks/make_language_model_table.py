"""Make the tables of the documentation from what compare_on_language_model.py measured.

python tests/benchmarks/make_language_model_table.py
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "launch"))

from common import markdown_table
from compare_on_language_model import perplexity_of, row_of, short, table_of
from language_model import SCOPES

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "tests" / "benchmarks" / "results" / "language_model_gemma3_270m_202611.json"
# The same table with kept weights moved; a run of its own.
UPDATED = RESULTS.with_name("language_model_updates_gemma3_270m_202611.json")
TEXTS = {"docstrings_held_out_begins.txt": "Documentation of Python modules", "news.txt": "News"}
START, END = "<!-- table of a language model -->", "<!-- /table of a language model -->"


def sentence() -> str:
    """What the README says: the same sparsity by several criteria and scopes."""
    found = {}
    for results in (_read(RESULTS), _read(UPDATED)):
        for cell in results["cells"]:
            if cell["sparsity"] == 0.5:
                found[row_of(cell), cell["scope"]] = perplexity_of(cell)
    return (
        f"Perplexity of Gemma-3-270M at 50 % (dense: {perplexity_of(results['dense'])}): magnitude "
        f"{found['magnitude', 'global']} ranked globally and {found['magnitude', 'row']} by row; "
        f"Wanda {found['wanda', 'global']} globally, {found['wanda', 'global-rms']} with "
        f'`normalize="rms"`, {found["wanda", "row"]} by row; Fisher {found["fisher", "global"]} '
        f"globally, by factors {found['factored_fisher', 'global']}; the latter"
        "\nwith [the kept weights moved](docs/reconstruction.md) "
        f"{found['factored_fisher, least-squares', 'global']}, and in rounds "
        f"{found['factored_fisher, rounds', 'global']}; llm-compressor's SparseGPT "
        f"{found['SparseGPT (llm-compressor)', 'layer']} from the same text. "
        "[The whole table, and what it is not](docs/criteria.md#which-criterion-which-scope)."
    )


def table_of_criteria() -> str:
    """Markdown: perplexity by criterion, scope and sparsity."""
    results = _read(RESULTS)
    dense = results["dense"]
    cells = [cell for cell in results["cells"] if cell["scope"] in SCOPES]  # as there are now
    return (
        f"Perplexity just after pruning, on {dense['all']['num_tokens']:,} tokens; the dense "
        f"model: {perplexity_of(dense)}.\n\n{table_of(cells)}"
    )


def table_of_updates() -> str:
    """Markdown: what each method makes of each text, and what programs need."""
    results = _read(UPDATED)
    dense = results["dense"]["all"]
    parts = [
        f"Perplexity of Gemma-3-270M on {dense['num_tokens']:,} tokens of four documents; the "
        f"dense model: {dense['perplexity']:.2f}. Factors of 1.5 are safe, decimals are not.",
        table_of_methods(results["cells"], lambda cell: cell["all"]["perplexity"]),
        "The same models on more text:",
    ]
    for number, text in enumerate(results["dense_more_text"]["texts"]):

        def value(cell: dict, number: int = number) -> float:
            return cell["texts"][number]["perplexity"]

        name, size = TEXTS[Path(text["text"]).name], f"{text['num_tokens']:,} tokens"
        parts.append(f"{name}, {size}; the dense model: {text['perplexity']:.2f}")
        parts.append(table_of_methods(results["more_text"], value))
    seconds = ", ".join(
        f"{row_of(cell)} {cell['cpu_seconds']:,.0f} s"
        for cell in results["cells"]
        if "cpu_seconds" in cell and cell["scope"] != "2:4" and cell["sparsity"] == 0.5
    )
    parts.append(f"Processor time at 50 %, with loading and saving, beside other work: {seconds}.")
    return "\n\n".join(parts)


def table_of_methods(cells: list[dict], value_of: Callable[[dict], float]) -> str:
    """A row per method, the worst first, and a column per sparsity and for 2:4."""
    found: dict[str, dict[str, float]] = {}
    for cell in cells:
        column = "2:4" if cell["scope"] == "2:4" else f"{100 * cell['sparsity']:g} %"
        found.setdefault(row_of(cell), {})[column] = value_of(cell)
    columns = sorted({c for row in found.values() for c in row}, key=lambda c: (":" in c, c))
    rows = [("method", *columns)]
    for name, values in sorted(found.items(), key=lambda item: -max(item[1].values())):
        rows.append((name, *(short(values[c]) if c in values else "-" for c in columns)))
    return markdown_table(rows)


def _read(file: Path) -> dict:
    return json.loads(file.read_text(encoding="utf-8"))


PAGES = {
    ROOT / "README.md": sentence,
    ROOT / "docs" / "criteria.md": table_of_criteria,
    ROOT / "docs" / "reconstruction.md": table_of_updates,
}


def with_tables(page: Path) -> str:
    """The text of a page, with its table made anew."""
    text = page.read_text(encoding="utf-8")
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(END)
    return f"{before}{START}\n{PAGES[page]()}\n{END}{after}"


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(with_tables(page), encoding="utf-8")
