"""Make the tables of the documentation from what compare_on_language_model.py measured.

python tests/benchmarks/make_language_model_table.py
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "launch"))

from jobs.document import markdown_table
from language_model.table_results import perplexity_text, row_of, short, table_of

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "tests" / "benchmarks" / "results" / "language_model_gemma3_270m_202611.json"
# The same table with kept weights moved; a run of its own.
UPDATED = RESULTS.with_name("language_model_updates_gemma3_270m_202611.json")
TEXTS = {
    "docstrings_held_out_begins.txt": "Documentation of Python modules",
    "news.txt": "News",
}
PAGES = (ROOT / "README.md", ROOT / "docs" / "criteria.md", ROOT / "docs" / "reconstruction.md")
START, END = "<!-- table of a language model -->", "<!-- /table of a language model -->"


def sentence(results: dict) -> str:
    """What the README says: the same sparsity by several criteria and scopes."""
    cells = keyed(results["cells"])

    def at(criterion: str, scope: str) -> str:
        return perplexity_text(cells[criterion, scope, 0.5])

    dense = perplexity_text(results["dense"])
    updated = keyed(json.loads(UPDATED.read_text(encoding="utf-8"))["cells"])
    moved = {key: perplexity_text(cell) for key, cell in updated.items()}
    return (
        f"Perplexity of Gemma-3-270M at 50 % (dense: {dense}): magnitude "
        f"{at('magnitude', 'global')} ranked globally and {at('magnitude', 'row')} by row; Wanda "
        f"{at('wanda', 'global')} globally, {at('wanda', 'global-rms')} with\n"
        f'`normalize="rms"`, {at("wanda", "row")} by row; Fisher {at("fisher", "global")} '
        f"globally, by factors {moved['factored_fisher', 'global', 0.5]}; the latter "
        "with\n[the kept weights moved](docs/reconstruction.md) "
        f"{moved['factored_fisher, least-squares', 'global', 0.5]}, and in rounds "
        f"{moved['factored_fisher, rounds', 'global', 0.5]}; llm-compressor's SparseGPT\n"
        f"{moved['SparseGPT (llm-compressor)', 'layer', 0.5]} from the same text.\n"
        "[The whole table, and what it is not](docs/criteria.md#which-criterion-which-scope)."
    )


def tables(results: dict) -> str:
    """Markdown: perplexity just after pruning, and after recovery as far as it was run."""
    dense = results["dense"]["all"]
    cells = keyed(results["cells"])
    parts = [
        f"Perplexity just after pruning, on {dense['num_tokens']:,} tokens; the dense model: "
        f"{dense['perplexity']:.2f}.",
        table_of(cells, perplexity_text),
    ]
    if results["recovered"]:
        steps = results["recovery"]
        later = results["dense_recovered"]["all"]["perplexity"]
        parts += [
            f"After {steps['recovery_steps']} steps of fine-tuning, {steps['recovery_batch']} "
            f"sequences of {steps['length']} tokens each; the dense model after as many: "
            f"{later:.2f}.",
            table_of(keyed(results["recovered"]), perplexity_text),
        ]
    return "\n\n".join(parts)


def keyed(cells: list[dict]) -> dict:
    return {(row_of(cell), cell["scope"], cell["sparsity"]): cell for cell in cells}


def table_of_updates() -> str:
    """Markdown: what each method makes of each text, and what recovery and programs need."""
    results = json.loads(UPDATED.read_text(encoding="utf-8"))
    dense = results["dense"]["all"]
    parts = [
        f"Perplexity of Gemma-3-270M on {dense['num_tokens']:,} tokens of four documents; the "
        f"dense model: {dense['perplexity']:.2f}. Factors of 1.5 are safe, decimals are not.",
        table_of_methods(results["cells"], lambda cell: cell["all"]["perplexity"]),
    ]
    if results["more_text"]:
        parts.append("The same models on more text:")
        for number, text in enumerate(results["dense_more_text"]["texts"]):
            parts += [
                f"{TEXTS[Path(text['text']).name]}, {text['num_tokens']:,} tokens; the dense "
                f"model: {text['perplexity']:.2f}",
                table_of_methods(
                    results["more_text"],
                    lambda cell, number=number: cell["texts"][number]["perplexity"],
                ),
            ]
    if results["recovered"]:
        parts.append(sentence_of_recovery(results))
    seconds = {
        row_of(cell): f"{cell['cpu_seconds']:,.0f} s"
        for cell in results["cells"]
        if "cpu_seconds" in cell and cell["scope"] != "2:4" and cell["sparsity"] == 0.5
    }
    if seconds:
        listed = ", ".join(f"{name} {time}" for name, time in seconds.items())
        parts.append(
            f"Processor time at 50 %, with loading and saving, beside other work: {listed}."
        )
    return "\n\n".join(parts)


def table_of_methods(cells: list[dict], value_of: Callable[[dict], float]) -> str:
    """A row per method, the worst first, and a column per sparsity and for 2:4."""
    found: dict[str, dict[str, float]] = {}
    for cell in cells:
        column = "2:4" if cell["scope"] == "2:4" else f"{100 * cell['sparsity']:g} %"
        found.setdefault(row_of(cell), {})[column] = value_of(cell)
    columns = sorted({column for row in found.values() for column in row}, key=_at_end)
    rows = [("method", *columns)]
    for name, values in sorted(found.items(), key=lambda item: -max(item[1].values())):
        rows.append((name, *(short(values[c]) if c in values else "-" for c in columns)))
    return markdown_table(rows)


def _at_end(column: str) -> tuple[bool, str]:
    return (":" in column, column)


def sentence_of_recovery(results: dict) -> str:
    """What some steps of training add to an update, and what they give without it."""
    steps = results["recovery"]
    before, after = keyed(results["cells"]), keyed(results["recovered"])
    (sparsity,) = {key[2] for key in after}
    parts = []
    for (row, scope, _), cell in after.items():
        now = perplexity_text(before[row, scope, sparsity])
        parts.append(f"{row} from {now} to {perplexity_text(cell)}")
    return (
        f"{steps['recovery_steps']} steps of fine-tuning with the zeros held, "
        f"{steps['recovery_batch']} sequences of {steps['length']} tokens each, at "
        f"{100 * sparsity:g} %: {'; '.join(parts)}."
    )


def with_tables(page: Path) -> str:
    """The text of a page, with its table made anew."""
    text = page.read_text(encoding="utf-8")
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(END)
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    if page.name == "reconstruction.md":
        made = table_of_updates()
    else:
        made = sentence(results) if page.name == "README.md" else tables(results)
    return f"{before}{START}\n{made}\n{END}{after}"


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(with_tables(page), encoding="utf-8")
