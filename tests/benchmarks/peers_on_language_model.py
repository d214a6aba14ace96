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
- distprune: this package's command, with its own defaults for text.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import torch

import distprune as prune

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "launch"))

from common import join, leave
from compare_on_language_model import Cell, open_table, parse_settings
from distprune import language_models
from language_model import LanguageModel

PROGRAMS = Path(__file__).resolve().parent / "peers"
# The row of the table, and what competes for an unstructured sparsity.
PEERS = {
    "sparse_gpt": ("SparseGPT (llm-compressor)", "layer"),
    "wanda": ("Wanda (llm-compressor)", "row"),
    "torch": ("magnitude (torch.nn.utils.prune)", "global"),
    "distprune": ("distprune prune --text", "global"),
}
MODIFIERS = {"sparse_gpt": "SparseGPTModifier", "wanda": "WandaPruningModifier"}


def command_of(peer: str, scope: str, settings: argparse.Namespace, windows: Path) -> list[str]:
    """What prunes a model, without the model, the output and the sparsity."""
    if peer == "torch":
        return [sys.executable, str(PROGRAMS / "torch_prune.py")]
    if peer == "distprune":
        texts = [argument for file in settings.calibrate for argument in ("--text", str(file))]
        size = ["--windows", str(settings.windows), "--length", str(settings.length)]
        command = [sys.executable, "-m", "distprune", "prune", *texts, *size]
        return [*command, "--dtype", "float32", "--device", "cpu"]
    program = [settings.peer_python, str(PROGRAMS / "llm_compressor.py")]
    pattern = ["--mask-structure", "2:4"] if scope == "2:4" else []
    return [*program, "--modifier", MODIFIERS[peer], *pattern, "--windows", str(windows)]


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--peer-python", default=sys.executable)
    own, rest = parser.parse_known_args()
    settings = parse_settings(rest)
    job = join()
    cells = open_table(settings, job)
    settings.peer_python = own.peer_python
    language_model = LanguageModel(settings, job)
    windows = settings.output / "windows.json"
    windows.write_text(json.dumps(language_model.calibration.tokens.tolist()))
    for peer in own.peers:
        title, scope = PEERS[peer]
        wanted = [(scope, sparsity) for sparsity in settings.sparsities]
        for scope, sparsity in [*wanted, *([("2:4", 0.5)] if peer in MODIFIERS else [])]:
            cell = {"criterion": title, "scope": scope, "sparsity": sparsity, "update": "none"}
            if not cells.has(cell):
                command = command_of(peer, scope, settings, windows)
                cells.add(cell | measure(command, sparsity, language_model))
    leave()


def measure(command: list[str], sparsity: float, language_model: LanguageModel) -> Cell:
    """Run a program, and measure what it writes; what the cell says of it."""
    settings = language_model.settings
    folder = settings.output / "peer"
    shutil.rmtree(folder, ignore_errors=True)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    arguments = [str(settings.model), str(folder), "--sparsity", str(sparsity)]
    subprocess.run([*command, *arguments], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    # In place of the model that was loaded, with the same texts.
    language_model.model = language_models.load_sharded(folder, dtype=torch.float32)
    shutil.rmtree(folder)
    weights = {pair.fqn: getattr(*pair) for pair in prune.select(language_model.model)}
    zeros = {name: int((weight == 0).sum()) for name, weight in weights.items()}
    return {
        "num_elements": sum(weight.numel() for weight in weights.values()),
        "num_pruned": sum(zeros.values()),
        "sparsity_of_parameters": {n: zeros[n] / weights[n].numel() for n in zeros},
        "cpu_seconds": round(seconds, 1),
        **language_model.perplexity(),
    }


if __name__ == "__main__":
    main()
