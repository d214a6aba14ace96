"""What the two scripts for language models share: options, the model with its texts, pruning."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import distprune as prune
from common import Job
from distprune import budgets, language_models

# The name that the package has for the scores of a criterion; None: scores without text. "fisher"
# is here that of each weight, as in the committed tables.
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
SCOPES = ("global", "global-rms", "layer", "row", "uniform", "erk", "owl", "2:4")
UPDATES = ("none", "least-squares", "rounds")


def make_parser(description: str, output: str) -> argparse.ArgumentParser:
    """A parser with the options that the scripts have in common; `output` describes OUTPUT."""
    parser = argparse.ArgumentParser(
        description=description,
        fromfile_prefix_chars="@",  # @FILE: one argument per line
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("model", type=Path, help="folder of a Hugging Face model in safetensors")
    add("output", type=Path, help=output)
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
    rounds = "sparsities of the rounds before the first one that is asked for"
    add("--rounds-before", nargs="*", type=float, default=[], metavar="SPARSITY", help=rounds)
    return parser


class LanguageModel:
    """A model with its texts, as the command line says. Every rank calls the same methods."""

    def __init__(self, settings: argparse.Namespace, job: Job) -> None:
        self.settings = settings
        self.job = job
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
        self._scores: dict[str, Any] = {}  # of the dense model, by criterion
        weight = next(self.model.parameters())
        kind = str(weight.dtype).removeprefix("torch.")
        job.say(f"loaded {settings.model}: {job.num_ranks} ranks, {settings.wrap}, {kind}")

    def load(self) -> torch.nn.Module:
        """The dense model, as the command line has it wrapped."""
        settings, mesh = self.settings, None
        if settings.wrap == "fsdp2_tp":
            mesh = self.job.num_ranks // settings.tensor_parallel, settings.tensor_parallel
        dtype = None if settings.dtype == "auto" else getattr(torch, settings.dtype)
        return language_models.load_sharded(
            settings.model, wrap=settings.wrap, mesh=mesh, dtype=dtype, device=self.job.device
        )

    def polish(self, steps: int) -> None:
        """Train the pruned model towards the dense one."""
        given = self.model, self.load(), self.calibration, self.parameters
        language_models.polish(*given, steps=steps, progress=self.job.progress("polishing"))

    def perplexity(self) -> dict[str, Any]:
        """Of --evaluate: "texts" and "all", as JSON has them; empty without text."""
        if self.evaluation is None:
            return {}
        report = language_models.perplexity(
            self.model, self.evaluation, batch_size=self.settings.batch_size
        )
        return report.as_values()

    def prune(
        self, criterion: str, scope: str, sparsity: float | None, update: str
    ) -> tuple[prune.PruningReport, prune.ReconstructionReport | None]:
        """Prune the dense model once; with the update "least-squares", move the kept weights.

        Args:
            scope: what competes: "global", all weights; "global-rms", all weights, with the scores
                of each parameter divided by their root mean square; "layer" or "row", the weights
                of one parameter or output; "2:4" and the like, neighbours. The other scopes are
                budgets, which say how much each parameter loses.
            sparsity: None for "2:4" and the like.
        """
        if criterion not in self._scores:
            score = CRITERIA[criterion]
            self._scores[criterion] = None if score is None else self.text.of(score)
        grams = self.text.grams if update == "least-squares" else None
        keywords: dict[str, Any] = {"scope": scope, "amount": sparsity}
        if ":" in scope:
            keywords = {"pattern": scope}
        elif scope == "global-rms":
            keywords = {"normalize": "rms", "amount": sparsity}
        elif scope == "owl":
            ratios = self.text.statistics.outlier_ratios()
            keywords = {"amount": budgets.owl(self.parameters, sparsity, ratios)}
        elif scope in ("uniform", "erk"):
            keywords = {"amount": getattr(budgets, scope)(self.parameters, sparsity)}
        torch.manual_seed(self.settings.seed)
        with prune.keep_pruned_values():
            report = prune.global_unstructured(
                self.parameters,
                prune.RandomUnstructured if criterion == "random" else prune.L1Unstructured,
                self._scores[criterion],
                **keywords,
            )
            moved = None if grams is None else prune.reconstruct(self.parameters, grams)
        return report, moved

    def prune_in_rounds(
        self, criterion: str, sparsities: list[float]
    ) -> Iterator[language_models.Round]:
        """Prune to --rounds-before and to these sparsities, with scores anew and an update each."""
        score, windows = CRITERIA[criterion], self.calibration
        if score is None or windows is None:
            raise ValueError(
                f"rounds by {criterion} have nothing to learn; expected a criterion that reads "
                "text, and --calibrate FILE..."
            )
        return language_models.prune_in_rounds(
            self.model,
            windows,
            self.parameters,
            [*self.settings.rounds_before, *sparsities],
            lambda: self.text.of_round(score),
            batch_size=self.settings.batch_size,
        )
