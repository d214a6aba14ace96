"""Prune a language model on any number of ranks: from a folder on disk to a pruned one.

    torchrun --standalone --nproc-per-node 8 launch/prune_language_model.py MODEL OUT \
        --criterion wanda --sparsity 0.6 --calibrate text.txt --evaluate held_out.txt

MODEL is a Hugging Face folder with safetensors. Each rank loads its part only; text goes through
the model to learn which weights matter; one call prunes them, exactly, the same on any sharding;
perplexity is measured before and after. OUT is a Hugging Face folder that plain transformers loads,
with the settings and the result in OUT/distprune/report.json.

Also under `accelerate launch`, and as `python launch/prune_language_model.py --wrap none` on one
device.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import distprune as prune
from common import Job, join, leave, markdown_table
from distprune import budgets, language_models

# The name that the package has for the scores of a criterion; None: scores without text. "fisher"
# is here that of each weight.
CRITERIA: dict[str, str | None] = {
    "magnitude": None,
    "random": None,
    "wanda": "wanda",
    "ria": "ria",
    "stade": "stade",
    "taylor": "taylor",
    "fisher": "elementwise_fisher",
    "factored_fisher": "fisher",
    "obs": "obs",
}
# Their scores have another scale in each parameter, so rows compete by default. Scores from
# gradients all estimate the change of the loss: docs/criteria.md, "Which criterion, which scope".
BY_ROW = ("magnitude", "wanda", "ria", "stade", "obs")
SCOPES = ("global", "global-rms", "layer", "row", "uniform", "erk", "owl", "2:4")


def parse_settings(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; a wrong value ends every rank with the same message."""
    parser = argparse.ArgumentParser(
        description="Prune a language model on any number of ranks: load it sharded, calibrate, "
        "prune, measure and save.",
        fromfile_prefix_chars="@",  # @FILE: one argument per line
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("model", type=Path, help="folder of a Hugging Face model in safetensors")
    add("output", type=Path, help="folder to write; must not exist")
    add("--include", nargs="*", metavar="PATTERN", help="prune only these matrices")
    add("--exclude", nargs="*", metavar="PATTERN", default=[], help="do not prune these matrices")
    add("--calibrate", nargs="+", type=Path, metavar="FILE", help="text to learn scores from")
    add("--windows", type=int, default=128, help="sequences of text to learn from")
    add("--length", type=int, default=2048, help="tokens in each sequence")
    add("--own-text", action="store_true", help="learn from as much text that the model writes")
    add("--evaluate", nargs="+", type=Path, metavar="FILE", help="text to measure perplexity on")
    add("--evaluation-windows", type=int, default=64, help="sequences of each file of --evaluate")
    wraps = ("none", "ddp", "fsdp2", "tp", "fsdp2_tp")
    add("--wrap", choices=wraps, default="fsdp2", help="how the model is sharded")
    add("--tensor-parallel", type=int, default=1, help="ranks of a layer, for --wrap fsdp2_tp")
    dtypes = ("auto", "float32", "bfloat16", "float16")
    add("--dtype", choices=dtypes, default="auto", help="of the weights; auto: as they are stored")
    add("--batch-size", type=int, default=1, help="sequences per rank and forward")
    add("--seed", type=int, default=0, help="of the calibration windows and of random scores")
    rounds = "sparsities of the rounds before the last one"
    add("--rounds-before", nargs="*", type=float, default=[], metavar="SPARSITY", help=rounds)
    add("--criterion", choices=CRITERIA, default="wanda", help="what ranks weights")
    add("--sparsity", type=float, help="share of weights to prune (default: 0.5)")
    scopes = "; ".join(SCOPES)
    add("--scope", help=f"what competes: {scopes} or another N:M (default: row, or global for "
        "random scores and those from gradients)")  # fmt: skip
    add("--polish", type=int, default=0, metavar="STEPS", help="steps of training towards the "
        "dense model, of which another copy is loaded")  # fmt: skip
    updates = ("none", "least-squares", "rounds")
    add("--update", choices=updates, default="none", help="how kept weights move: least-squares: "
        "so that the outputs of each layer change least; rounds: so after each of several rounds "
        "of pruning, over all weights")  # fmt: skip
    settings = parser.parse_args(arguments)
    is_in_rounds = settings.update == "rounds"
    if settings.scope is None:
        is_global = settings.criterion not in BY_ROW or is_in_rounds
        settings.scope = "global" if is_global else "row"
    if settings.scope not in SCOPES and ":" not in settings.scope:
        parser.error(f"expected --scope {scopes} or another N:M, got {settings.scope}")
    if ":" in settings.scope and settings.sparsity is not None:
        parser.error(f"--scope {settings.scope} says the sparsity: expected no --sparsity")
    if settings.sparsity is None and ":" not in settings.scope:
        settings.sparsity = 0.5
    needs_text = CRITERIA[settings.criterion] or settings.update != "none"
    needs_text = needs_text or settings.scope == "owl" or settings.polish > 0
    if needs_text and not (settings.calibrate or settings.own_text):
        parser.error("this criterion, scope or update needs --calibrate FILE..., or --own-text")
    if is_in_rounds and (settings.scope != "global" or not CRITERIA[settings.criterion]):
        parser.error(
            "--update rounds goes with --scope global and a criterion that reads text, got "
            f"{settings.scope} and {settings.criterion}"
        )
    return settings


class LanguageModel:
    """A model with its texts, as the command line says. Every rank calls the same methods."""

    def __init__(self, settings: argparse.Namespace, job: Job) -> None:
        self.settings, self.job = settings, job
        self.model = self.load()
        self.parameters = prune.select(self.model, settings.include, settings.exclude)
        tokenizer = language_models.load_tokenizer(settings.model)
        read, length = language_models.read_windows, settings.length
        self.calibration = self.evaluation = None
        if settings.calibrate:
            windows = read(tokenizer, settings.calibrate, length)
            # As many of each file, and no more than the shortest one has.
            number = min(settings.windows, *windows.text_of.bincount().tolist())
            self.calibration = windows.sample(number, seed=settings.seed)
        if settings.own_text:
            own = language_models.write_text(
                self.model,
                tokenizer,
                windows=settings.windows,
                length=length,
                seed=settings.seed,
                progress=job.progress("writing"),
            )
            self.calibration = own if self.calibration is None else self.calibration + own
        if settings.evaluate:
            limit = settings.evaluation_windows
            self.evaluation = read(tokenizer, settings.evaluate, length, limit=limit)
        self.text = language_models.TextScores(
            self.model,
            self.calibration,
            self.parameters,
            batch_size=settings.batch_size,
            progress=job.progress("calibrating"),
        )
        kind = str(next(self.model.parameters()).dtype).removeprefix("torch.")
        job.say(f"loaded {settings.model}: {job.num_ranks} ranks, {settings.wrap}, {kind}")

    def load(self) -> nn.Module:
        """The dense model, as the command line has it wrapped."""
        settings, mesh = self.settings, None
        if settings.wrap == "fsdp2_tp":
            mesh = self.job.num_ranks // settings.tensor_parallel, settings.tensor_parallel
        dtype = None if settings.dtype == "auto" else getattr(torch, settings.dtype)
        return language_models.load_sharded(
            settings.model, wrap=settings.wrap, mesh=mesh, dtype=dtype, device=self.job.device
        )

    def perplexity(self) -> dict[str, Any]:
        """Of --evaluate: "texts" and "all", as JSON has them; empty without text."""
        if self.evaluation is None:
            return {}
        size = self.settings.batch_size
        report = language_models.perplexity(self.model, self.evaluation, batch_size=size)
        return report.as_values()

    def prune(self) -> list[dict[str, Any]]:
        """Prune, and move kept weights; a row of the report for each parameter."""
        settings = self.settings
        score = CRITERIA[settings.criterion]
        if settings.update == "rounds":
            assert score is not None and self.calibration is not None  # see parse_settings
            *_, (report, moved) = language_models.prune_in_rounds(
                self.model,
                self.calibration,
                self.parameters,
                [*settings.rounds_before, settings.sparsity],
                lambda: self.text.of_round(score),
                batch_size=settings.batch_size,
            )
        else:
            scores = None if score is None else self.text.of(score)
            grams = self.text.grams if settings.update == "least-squares" else None
            competing = self.competing()
            torch.manual_seed(settings.seed)
            with prune.keep_pruned_values():
                report = prune.global_unstructured(
                    self.parameters,
                    prune.RandomUnstructured
                    if settings.criterion == "random"
                    else prune.L1Unstructured,
                    scores,
                    **competing,
                )
                moved = None if grams is None else prune.reconstruct(self.parameters, grams)
        if settings.polish:
            language_models.polish(
                self.model,
                self.load(),
                self.calibration,
                self.parameters,
                steps=settings.polish,
                progress=self.job.progress("polishing"),
            )
        rows = report.to_dict()["parameters"]
        if moved is not None:
            for row, entry in zip(rows, moved.parameters, strict=True):
                row |= {"error_before": entry.error_before, "error_after": entry.error_after}
        return rows

    def competing(self) -> dict[str, Any]:
        """What competes, as an argument of `global_unstructured`.

        "global": all weights; "global-rms": with the scores of each parameter divided by their root
        mean square; "layer" or "row": the weights of one parameter or output; "2:4" and the like:
        neighbours. The others are budgets, which say how much each parameter loses.
        """
        scope, sparsity = self.settings.scope, self.settings.sparsity
        if ":" in scope:
            return {"pattern": scope}
        if scope == "global-rms":
            return {"normalize": "rms", "amount": sparsity}
        if scope == "owl":
            ratios = self.text.statistics.outlier_ratios()
            return {"amount": budgets.owl(self.parameters, sparsity, ratios)}
        if scope in ("uniform", "erk"):
            return {"amount": getattr(budgets, scope)(self.parameters, sparsity)}
        return {"scope": scope, "amount": sparsity}


def sparsity_table(rows: list[dict[str, Any]]) -> str:
    """A row per parameter, and one for all."""
    names = ("num_elements", "num_pruned")
    total = {"name": "all", **{name: sum(row[name] for row in rows) for name in names}}
    table = [("parameter", "elements", "zeros", "sparsity")]
    for row in [*rows, total]:
        share = f"{row['num_pruned'] / row['num_elements']:.2%}"
        table.append((row["name"], *(f"{row[name]:,}" for name in names), share))
    return markdown_table(table)


def main() -> None:
    settings = parse_settings()
    job = join()
    if job.on_rank_0(settings.output.exists):
        raise FileExistsError(f"{settings.output} exists; expected a folder that does not.")
    language_model = LanguageModel(settings, job)
    model = language_model.model
    dense = language_model.perplexity()
    rows = language_model.prune()
    pruned = language_model.perplexity()
    saved = language_models.save_sharded(
        model.module if isinstance(model, DistributedDataParallel) else model,
        settings.output,
        source=settings.model,
    )
    report = {"settings": vars(settings), "dense": dense, "pruned": pruned, "parameters": rows}
    if job.rank == 0:
        folder = settings.output / "distprune"
        folder.mkdir(exist_ok=True)
        (folder / "report.json").write_text(json.dumps(report, indent=1, default=str))
    if dense:
        before, after = dense["all"]["perplexity"], pruned["all"]["perplexity"]
        job.say(f"perplexity: {before:.3f} dense, {after:.3f} pruned")
    job.say(f"wrote {saved}\n\n{sparsity_table(rows)}")
    leave()


if __name__ == "__main__":
    main()
