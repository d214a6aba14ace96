"""Fill the table of language models: perplexity by model, sparsity, method and text.

    make language-model-table ARGS="--model gemma-3-270m --cells 0.5:own,2:4:docstrings+own"

Each cell is measured as the method leaves it, and after a polish: steps of training towards the
dense model by the same windows, which are the last ones of `distprune prune` too. Both are rows of
the results, where each text has the negative log-likelihood of each window, in nats per token. What
is there is not made again: a run that was killed goes on, and cells may be added in any order.

Methods:

- own: distprune by windows that the model wrote itself; docstrings+own: by as many of Python's
  documentation strings too; docstrings: by these alone;
- wanda, sparsegpt: those of llm-compressor by the windows of docstrings+own, in an environment of
  its own (`make peers`);
- SCORE/SCOPE, such as magnitude/row or taylor/layer: a score of distprune by the docstrings, if it
  reads text, which moves no weight and gets no polish.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

import distprune as prune
from distprune import language_models

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "launch"))

from make_language_model_table import ROOT, ROWS, TEXTS, Row, read_rows

from fetch_models import MODELS

SPARSITIES = ("0.5", "0.6", "0.7", "0.8", "2:4")
METHODS = ("magnitude/row", "own", "docstrings+own", "wanda", "sparsegpt")
PEERS = {"wanda": "WandaPruningModifier", "sparsegpt": "SparseGPTModifier"}
SCOPES = {
    "global": [],
    "global-rms": ["--normalize", "rms"],
    "layer": ["--scope", "layer"],
    "row": ["--scope", "row"],
}
KEY = ("model", "sparsity", "method", "polish")
DISTPRUNE = (sys.executable, "-m", "distprune")


def parse_settings() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Fill the table of language models.")
    add = parser.add_argument
    add("--model", nargs="+", default=list(MODELS), help="names of folders (all)")
    add("--cells", default="", help="SPARSITY:METHOD, with commas between them (all that can be)")
    add("--folder", type=Path, default=ROOT / "runs/language_model", help="of models and texts")
    add("--results", type=Path, default=ROWS, help="file of the rows")
    add("--peer-python", default=ROOT / ".venv-peers/bin/python", help="has llm-compressor")
    add("--windows", type=int, default=32, help="of each text to prune by")
    add("--length", type=int, default=256, help="tokens of a window")
    add("--steps", type=int, default=40, help="of the polish")
    add("--evaluation-windows", type=int, default=40, help="of each text to measure on")
    settings = parser.parse_args()
    here = [name for name in METHODS if name not in PEERS or Path(settings.peer_python).exists()]
    cells = settings.cells or ",".join(f"{share}:{name}" for name in here for share in SPARSITIES)
    settings.cells = [tuple(cell.rsplit(":", 1)) for cell in cells.split(",")]
    for cell in settings.cells:
        name = cell[-1]
        is_known = name in PEERS or name.partition("/")[2] in SCOPES
        if len(cell) != 2 or not (is_known or set(name.split("+")) <= {"docstrings", "own"}):
            parser.error(f"expected cells such as 0.5:own, 2:4:wanda or 0.6:taylor/row; got {cell}")
        if name not in here and name in PEERS:
            parser.error(f"{name} needs llm-compressor; expected `make peers`, or --peer-python")
    return settings


class Table:
    """The cells of one model.

    Attributes:
        facts: what all its rows depend on; the row of the dense model has them.
    """

    def __init__(self, name: str, settings: argparse.Namespace) -> None:
        self.name, self.settings = name, settings
        self.source = settings.folder / name
        self.work = settings.folder / f"{name}-table-{settings.windows}x{settings.length}"
        self.work.mkdir(exist_ok=True)
        self.tokenizer = language_models.load_tokenizer(self.source)
        self.dtype = language_models.load_sharded(self.source).dtype
        texts = [settings.folder / text for text in TEXTS]
        self.evaluation = self.read(texts, settings.evaluation_windows)
        self.facts = {
            **{key: getattr(settings, key) for key in ("windows", "length", "steps")},
            "texts": [tokens for _, tokens in self.evaluation.digests()],
            "versions": [prune.__version__, torch.__version__, transformers.__version__],
        }

    def fill(self) -> None:
        """Make the rows that are missing."""
        rows = {key_of(row): row for row in read_rows(self.settings.results)}
        dense = rows.get(self.key("0", "dense", 0))
        if dense is None:
            self.add(self.key("0", "dense", 0), 0, self.load(self.source), facts=self.facts)
        elif dense["facts"] != self.facts:
            sys.exit(
                f"{self.settings.results}: its rows of {self.name} depend on {dense['facts']}, and "
                f"this run on {self.facts}; expected the same, or another file as --results."
            )
        for sparsity, method in self.settings.cells:
            steps = [0] if "/" in method else [0, self.settings.steps]
            keys = [self.key(sparsity, method, number) for number in steps]
            if not all(key in rows for key in keys):
                self.fill_cell(sparsity, method, [key for key in keys if key not in rows])

    def key(self, sparsity: str, method: str, polish: int) -> tuple[str, str, str, int]:
        return self.name, sparsity, method, polish

    def fill_cell(self, sparsity: str, method: str, missing: list[Any]) -> None:
        """Prune, measure, polish and measure, as far as that is missing."""
        folder = self.work / f"{sparsity}-{method}".replace("/", "-").replace(":", "-")
        unfinished = folder.with_name(f"{folder.name}.unfinished")
        texts = [self.windows_of(source) for source in sources_of(method)]
        command = self.command(sparsity, method, texts, unfinished)
        # Of what a killed run left, nobody knows how long it took.
        is_new, before = not any(self.work.glob(f"{folder.name}*")), cpu_seconds()
        if not folder.exists():
            shutil.rmtree(unfinished, ignore_errors=True)
            run(*command)
            unfinished.rename(folder)
        for key in missing:
            model = self.load(folder)
            if key[-1]:
                before = cpu_seconds()
                self.polish(model, texts)
            read = [digest for _, digest in self.read(texts).digests()] if texts else []
            seconds = round(cpu_seconds() - before) if is_new or key[-1] else None
            self.add(key, seconds, model, read=read)
        shutil.rmtree(folder)

    def windows_of(self, source: str) -> Path:
        """The file of the windows of "docstrings" or "own", made if it is not there."""
        file, settings = self.work / f"{source}.safetensors", self.settings
        if not file.exists() and source == "docstrings":
            train = self.read([settings.folder / "docstrings_train.txt"])
            train.sample(settings.windows).save(file)
        elif not file.exists():
            size = ["--windows", settings.windows, "--length", settings.length]
            run(*DISTPRUNE, "write-text", self.source, file, *size)
        return file

    def read(self, files: list[Path], limit: int | None = None) -> language_models.TokenWindows:
        """Windows of texts."""
        length = self.settings.length
        return language_models.read_windows(self.tokenizer, files, length, limit=limit)

    def command(self, sparsity: str, method: str, texts: list[Path], output: Path) -> list[Any]:
        """What prunes the model."""
        settings = self.settings
        if method in PEERS:
            share = ["0.5", "--mask-structure", sparsity] if ":" in sparsity else [sparsity]
            program = [settings.peer_python, Path(__file__).parent / "peers" / "llm_compressor.py"]
            command = [*program, self.source, output, "--windows", *texts]
            return [*command, "--modifier", PEERS[method], "--sparsity", *share]
        command = [*DISTPRUNE, "prune", self.source, output]
        command += ["--pattern" if ":" in sparsity else "--sparsity", sparsity]
        score, _, scope = method.partition("/")
        if scope:
            command += ["--score", score, *(SCOPES[scope] if ":" not in sparsity else [])]
        if texts:
            command += [part for text in texts for part in ("--text", text)]
            command += ["--windows", settings.windows, "--length", settings.length]
            command += ["--no-own-text", "--polish", 0, "--device", "cpu"]
            command += ["--update", "none"] if scope else []
        return command

    def load(self, folder: Path) -> torch.nn.Module:
        """A model in the dtype of the dense one; some methods store another."""
        return language_models.load_sharded(folder, dtype=self.dtype)

    def polish(self, model: torch.nn.Module, texts: list[Path]) -> None:
        """Do what `distprune prune` does last."""
        parameters = prune.select(model)
        for module, name in parameters:
            prune.custom_from_mask(module, name, getattr(module, name) != 0)
        dense, windows = self.load(self.source), self.read(texts)
        language_models.polish(model, dense, windows, parameters, steps=self.settings.steps)
        for module, name in parameters:
            prune.remove(module, name)

    def add(
        self, key: tuple[Any, ...], seconds: int | None, model: torch.nn.Module, **more: Any
    ) -> None:
        """Measure a model, and append its row."""
        report = language_models.perplexity(model, self.evaluation)
        losses = report.window_nll / (self.settings.length - 1)
        texts = {
            text: [round(loss, 4) for loss in losses[self.evaluation.text_of == number].tolist()]
            for number, text in enumerate(TEXTS)
        }
        row = dict(zip(KEY, key, strict=True))
        row |= {"cpu_seconds": seconds, "texts": texts, **more}
        with self.settings.results.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(row) + "\n")
            stream.flush()
            os.fsync(stream.fileno())
        print(*key, *(f"{text.perplexity:,.2f}" for text in report.texts), flush=True)


def run(*command: Any) -> None:
    """Run a program to its end."""
    subprocess.run([str(part) for part in command], check=True)


def cpu_seconds() -> float:
    """Of this process and those that it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def sources_of(method: str) -> list[str]:
    """The texts that a method reads."""
    if method.startswith(("magnitude/", "random/")):
        return []
    if method in PEERS:
        return ["docstrings", "own"]
    return ["docstrings"] if "/" in method else method.split("+")


def key_of(row: Row) -> tuple[Any, ...]:
    """What no two rows have in common."""
    return tuple(row[name] for name in KEY)


if __name__ == "__main__":
    chosen = parse_settings()
    transformers.utils.logging.disable_progress_bar()
    for name in chosen.model:
        Table(name, chosen).fill()
