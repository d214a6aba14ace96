"""Make the support matrix of the documentation from what the tests of ten steps measured.

python tests/distributed/make_support_matrix.py [matrix.json]
"""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "support.md"
MEASURED = ROOT / "tests" / "distributed" / "matrix.json"
START, END = "<!-- matrix -->", "<!-- /matrix -->"
NAMES = {
    "plain": "plain modules",
    "ddp": "DDP",
    "fsdp1": "FSDP1, per layer",
    "fsdp1_root": "FSDP1, root only",
    "fsdp1_flat": "FSDP1, `use_orig_params=False`",
    "fsdp1_hybrid": "FSDP1, `HYBRID_SHARD`",
    "fsdp2": "FSDP2, per layer",
    "fsdp2_root": "FSDP2, root only",
    "hsdp": "HSDP",
    "tp": "tensor parallelism",
    "fsdp2_tp": "FSDP2 over tensor parallelism",
    "replicate": "`replicate()`",
    "fsdp2_replicate": "`replicate()` of one layer under FSDP2",
    "zero1": "DeepSpeed, ZeRO-1",
    "zero2": "DeepSpeed, ZeRO-2",
    "zero3": "DeepSpeed, ZeRO-3",
}


def table(measured: dict) -> str:
    """Markdown: per wrapper and number of processes, the largest difference of a weight."""
    cells: dict[str, dict[int, float]] = {}
    num_runs = 0
    for result in measured["results"]:
        kind, mesh = result["wrapping"].split("-", 1)
        size = 1
        for axis in mesh.split("x"):
            size *= int(axis)
        row = cells.setdefault(kind, {})
        row[size] = max(row.get(size, 0.0), result["largest_difference"])
        num_runs += 1
    sizes = sorted({size for row in cells.values() for size in row})
    lines = [
        "| largest difference of a weight | "
        + " | ".join(f"{s} rank{'s' * (s > 1)}" for s in sizes)
        + " |",
        "|---" * (len(sizes) + 1) + "|",
    ]
    for kind, row in cells.items():
        shown = (f"{row[size]:.0e}" if size in row else "" for size in sizes)
        lines.append(f"| {NAMES.get(kind, kind)} | {' | '.join(shown)} |")
    differences = sum(result["num_mask_differences"] for result in measured["results"])
    lines.append("")
    lines.append(
        f"{num_runs} runs of {measured['num_steps']} steps beside one process with "
        "`torch.nn.utils.prune` and the same masks: AdamW with weight decay and SGD with momentum, "
        "made before and after pruning (DeepSpeed's before, with clipping, beside a model that is "
        "masked by hand, and pruned twice). "
        f"Mask elements that differ, in all: {differences}. "
        f"torch {measured['torch']}, {measured['backend']}."
    )
    return "\n".join(lines)


def with_table(page: str, measured: dict) -> str:
    """A page with a new matrix between its markers."""
    before, _, rest = page.partition(START)
    _, _, after = rest.partition(END)
    return f"{before}{START}\n{table(measured)}\n{END}{after}"


def main() -> None:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else MEASURED
    page = PAGE.read_text()
    if START not in page or END not in page:
        sys.exit(f"{PAGE} has no {START} and {END} to put the matrix between")
    PAGE.write_text(with_table(page, json.loads(path.read_text())))


if __name__ == "__main__":
    main()
