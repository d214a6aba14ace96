"""Add what other programs make to a table of compare_on_language_model.py, from the same texts.

    make peers
    python tests/benchmarks/peers_on_language_model.py @configs/gemma_updates.args --wrap none \
        --peers sparse_gpt wanda --peer-python .venv-peers/bin/python

The other arguments are those of the table, which shows the cells when it runs the next time. Each
program prunes the same model by the same calibration windows, as far as it uses any, and all
results are measured as all other cells are. A cell has the program's processor time in seconds,
over all threads, with loading and saving: `cpu_seconds`.

- sparse_gpt, wanda: llm-compressor, block after block, in an environment of its own;
- torch: `torch.nn.utils.prune.global_unstructured` by magnitude;
- distprune: this package's command, with its own defaults for text;
- plain_sparse_gpt: tests/helpers/sparse_gpt.py, by the Gram matrices of the dense model.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "launch"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from helpers.sparse_gpt import sparse_gpt
from jobs.processes import join, leave
from language_model.table import Cell, Table, open_table
from language_model.table_settings import parse_settings

PROGRAMS = Path(__file__).resolve().parent / "peers"
Weights = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Peer:
    """A program as the table shows it.

    Args:
        title: the row of the table.
        scope: what competes for a unstructured sparsity.
        has_pattern: whether it prunes 2:4, too.
        prune: weights that it makes, by name, and what the cell says of it beside.
    """

    title: str
    scope: str
    has_pattern: bool
    prune: Callable[[Table, Cell, str], tuple[Weights, dict[str, Any]]]

    def cells(self, sparsities: tuple[float, ...]) -> list[Cell]:
        """All that it can make."""
        patterns = [Cell(self.title, "2:4", 0.5)] if self.has_pattern else []
        return [Cell(self.title, self.scope, sparsity) for sparsity in sparsities] + patterns


def _plain_sparse_gpt(table: Table, cell: Cell, _: str) -> tuple[Weights, dict[str, Any]]:
    grams, made = table.scores.grams, {}
    how = (
        {"sparsity": None, "pattern": (2, 4)}
        if cell.scope == "2:4"
        else {"sparsity": cell.sparsity}
    )
    for pair in table.parameters:
        weight = getattr(*pair).detach()
        made[pair.fqn] = sparse_gpt(weight, grams.matrix(*pair), **how)
    return made, {}


def _llm_compressor(
    modifier: str, table: Table, cell: Cell, python: str
) -> tuple[Weights, dict[str, Any]]:
    windows = table.folder.path / "windows.json"
    windows.write_text(json.dumps(table.texts.calibration.tokens.tolist()))
    pattern = ["--mask-structure", "2:4"] if cell.scope == "2:4" else []
    program = [python, str(PROGRAMS / "llm_compressor.py"), "--modifier", modifier, *pattern]
    return _run([*program, "--windows", str(windows)], table, cell)


def _torch(table: Table, cell: Cell, _: str) -> tuple[Weights, dict[str, Any]]:
    return _run([sys.executable, str(PROGRAMS / "torch_prune.py")], table, cell)


def _distprune(table: Table, cell: Cell, _: str) -> tuple[Weights, dict[str, Any]]:
    settings = table.settings
    texts = [argument for file in settings.calibrate for argument in ("--text", str(file))]
    options = ["--windows", str(settings.windows), "--length", str(settings.length)]
    program = [sys.executable, "-m", "distprune", "prune", *texts, *options]
    return _run([*program, "--dtype", "float32", "--device", "cpu"], table, cell)


def _run(program: list[str], table: Table, cell: Cell) -> tuple[Weights, dict[str, Any]]:
    """What a program writes that is given a model, a folder and a sparsity."""
    output = table.folder.path / "peer"
    shutil.rmtree(output, ignore_errors=True)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    arguments = [str(table.settings.model), str(output), "--sparsity", str(cell.sparsity)]
    subprocess.run([*program, *arguments], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    made: Weights = {}
    for file in sorted(output.glob("*.safetensors")):
        made.update(load_file(file))
    shutil.rmtree(output)
    return made, {"cpu_seconds": round(seconds, 1)}


PEERS = {
    "sparse_gpt": Peer(
        "SparseGPT (llm-compressor)", "layer", True, partial(_llm_compressor, "SparseGPTModifier")
    ),
    "wanda": Peer(
        "Wanda (llm-compressor)", "row", True, partial(_llm_compressor, "WandaPruningModifier")
    ),
    "torch": Peer("magnitude (torch.nn.utils.prune)", "global", False, _torch),
    "distprune": Peer("distprune prune --text", "global", False, _distprune),
    "plain_sparse_gpt": Peer("SparseGPT (plain, tests/helpers)", "layer", True, _plain_sparse_gpt),
}


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--peer-python", default=sys.executable)
    own, rest = parser.parse_known_args()
    job = join()
    settings = parse_settings(rest)
    table = open_table(settings, job)
    for peer in (PEERS[name] for name in own.peers):
        for cell in peer.cells(settings.sparsities):
            if not table.is_measured(cell):
                made, facts = peer.prune(table, cell, own.peer_python)
                table.measure_cell(cell, _give(table, made) | facts)
                table.reload()
    leave(job, failed=False)


def _give(table: Table, made: Weights) -> dict[str, Any]:
    """Put weights into the model; what the table says of their zeros."""
    sparsities, num_elements, num_pruned = {}, 0, 0
    for pair in table.parameters:
        weight = getattr(*pair).data.copy_(made[pair.fqn])
        zeros = int((weight == 0).sum())
        sparsities[pair.fqn] = zeros / weight.numel()
        num_elements, num_pruned = num_elements + weight.numel(), num_pruned + zeros
    return {
        "num_elements": num_elements,
        "num_pruned": num_pruned,
        "sparsity_of_parameters": sparsities,
    }


if __name__ == "__main__":
    main()
