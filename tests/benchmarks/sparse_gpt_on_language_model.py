"""Add a plain SparseGPT to a table of compare_on_language_model.py, from the same texts.

    python tests/benchmarks/sparse_gpt_on_language_model.py @configs/gemma_updates.args

The arguments are those of the table, which shows the cells when it runs the next time. SparseGPT
(tests/helpers/sparse_gpt.py) has the Gram matrices of the dense model from the same windows, and
the perplexity is measured as that of all other cells. Its layers all have the same sparsity, so
that the cells stand under the scopes "layer" and "2:4".
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "launch"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from helpers.sparse_gpt import sparse_gpt
from jobs.processes import join, leave
from language_model.table import Cell, Table, open_table
from language_model.table_settings import parse_settings

NAME = "SparseGPT (plain, tests/helpers)"


def main() -> None:
    settings = parse_settings()
    job = join()
    table = open_table(settings, job)
    cells = [Cell(NAME, "layer", sparsity) for sparsity in settings.sparsities]
    for cell in [*cells, Cell(NAME, "2:4", 0.5)]:
        if not table.is_measured(cell):
            table.measure_cell(cell, prune(table, cell))
            table.reload()
    leave(job, failed=False)


def prune(table: Table, cell: Cell) -> dict[str, Any]:
    """Prune all weights; what the table says of it."""
    grams = table.calibration.grams
    sparsities, num_elements, num_pruned = {}, 0, 0
    for pair in table.parameters:
        weight, gram = getattr(*pair), grams.matrix(*pair)
        if cell.scope == "2:4":
            new = sparse_gpt(weight.detach(), gram, None, pattern=(2, 4))
        else:
            new = sparse_gpt(weight.detach(), gram, cell.sparsity)
        weight.data.copy_(new)
        zeros = int((new == 0).sum())
        sparsities[pair.fqn] = zeros / new.numel()
        num_elements, num_pruned = num_elements + new.numel(), num_pruned + zeros
        table.job.say(f"{cell.file}: {pair.fqn}")
    return {
        "num_elements": num_elements,
        "num_pruned": num_pruned,
        "sparsity_of_parameters": sparsities,
    }


if __name__ == "__main__":
    main()
