"""Make the tables of the documentation from what compare_on_language_model.py measured.

python tests/benchmarks/make_language_model_table.py
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "launch"))

from language_model.table_results import perplexity_text, row_of, table_of, tables_of_texts

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "tests" / "benchmarks" / "results" / "language_model_gemma3_270m_202611.json"
# The same table with kept weights moved; a run of its own.
UPDATED = RESULTS.with_name("language_model_updates_gemma3_270m_202611.json")
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
        f"{moved['factored_fisher, rounds', 'global', 0.5]}.\n"
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
    """Markdown: perplexity with the kept weights as they were, and moved."""
    results = json.loads(UPDATED.read_text(encoding="utf-8"))
    dense = results["dense"]["all"]
    parts = [
        f"Perplexity of Gemma-3-270M on {dense['num_tokens']:,} tokens of four documents; the "
        f"dense model: {dense['perplexity']:.2f}. Factors of 1.5 are safe, decimals are not.",
        table_of(keyed(results["cells"]), perplexity_text),
    ]
    if results["more_text"]:
        parts.append("The same models on more text:")
        parts += tables_of_texts(results["dense_more_text"], keyed(results["more_text"]))
    return "\n\n".join(parts)


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
