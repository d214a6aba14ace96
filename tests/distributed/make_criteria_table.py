"""Make the table of criteria of the documentation from what test_criteria_matrix.py measured.

python tests/distributed/make_criteria_table.py [criteria.json]
"""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "criteria.md"
MEASURED = ROOT / "tests" / "distributed" / "criteria.json"
START, END = "<!-- table of criteria -->", "<!-- /table of criteria -->"
WRAPPERS = {
    "plain, DDP": ("plain", "ddp"),
    "FSDP1": ("fsdp1", "fsdp1_root", "fsdp1_flat", "fsdp1_hybrid"),
    "FSDP2": ("fsdp2", "fsdp2_root"),
    "HSDP": ("hsdp",),
    "TP": ("tp",),
    "FSDP2 + TP": ("fsdp2_tp",),
}


def table(measured: dict) -> str:
    """Markdown: per criterion what it reads, keeps and sends, and how exact it is per wrapper."""
    by_criterion: dict[str, list[dict]] = {}
    for row in measured["results"]:
        by_criterion.setdefault(row["criterion"], []).append(row)
    lines = [
        f"| criterion | reads | keeps | sends | {' | '.join(WRAPPERS)} |",
        "|---" * (4 + len(WRAPPERS)) + "|",
    ]
    for title, rows in by_criterion.items():
        cells = [_cell(rows, kinds) for kinds in WRAPPERS.values()]
        about = measured["about"][title]
        lines.append(
            f"| {title} | {about['reads']} | {about['memory']} | {about['wire']} | "
            f"{' | '.join(cells)} |"
        )
    results = measured["results"]
    differences = sum(row["num_mask_differences"] for row in results)
    lines += [
        "",
        f"The largest difference of a score from that of one process that runs the same units, as "
        f"a share of the parameter's largest score, in {len(results)} runs on 1 to 4 ranks: 1 and "
        "3 micro-batches, equal and unequal counts, float32 and bfloat16. *exact*: bit for bit, "
        "where the data are small integers. Mask elements that differ from those of one process "
        f"that is fed these scores, in all: {differences}. torch {measured['torch']}, "
        f"{measured['backend']}.",
    ]
    return "\n".join(lines)


def _cell(rows: list[dict], kinds: tuple[str, ...]) -> str:
    """How exact a criterion is on some wrappers; empty if it was not measured there."""
    mine = [row for row in rows if row["wrapping"].split("-")[0] in kinds]
    if not mine:
        return ""
    on_integers = max((r["largest_difference"] for r in mine if r["data"] == "integer"), default=1)
    largest = max(row["largest_difference"] for row in mine)
    return ("exact, " if not on_integers else "") + (f"{largest:.0e}" if largest else "0")


def page_with_table(measured: dict) -> str:
    """The page as it is to be, with its table between the markers."""
    text = PAGE.read_text()
    if START not in text or END not in text:
        sys.exit(f"{PAGE} has no {START} and {END} to put the table between")
    before, _, rest = text.partition(START)
    return f"{before}{START}\n{table(measured)}\n{END}{rest.partition(END)[2]}"


def main() -> None:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else MEASURED
    PAGE.write_text(page_with_table(json.loads(path.read_text())))


if __name__ == "__main__":
    main()
