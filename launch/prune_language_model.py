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
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from common import join, leave, markdown_table
from distprune import language_models
from language_model import CRITERIA, SCOPES, UPDATES, LanguageModel, make_parser

# Their scores have another scale in each parameter, so rows compete by default. Scores from
# gradients all estimate the change of the loss: docs/criteria.md, "Which criterion, which scope".
BY_ROW = ("magnitude", "wanda", "ria", "stade", "obs")


def parse_settings(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; a wrong value ends every rank with the same message."""
    parser = make_parser(
        "Prune a language model on any number of ranks: load it sharded, calibrate, prune, "
        "measure and save.",
        output="folder to write; must not exist",
    )
    add = parser.add_argument
    add("--criterion", choices=CRITERIA, default="wanda", help="what ranks weights")
    add("--sparsity", type=float, help="share of weights to prune (default: 0.5)")
    scopes = "; ".join(SCOPES)
    add("--scope", help=f"what competes: {scopes} or another N:M (default: row, or global for "
        "random scores and those from gradients)")  # fmt: skip
    add("--polish", type=int, default=0, metavar="STEPS", help="steps of training towards the "
        "dense model, of which another copy is loaded; with --dtype float32")  # fmt: skip
    add("--update", choices=UPDATES, default="none", help="how kept weights move: least-squares: "
        "so that the outputs of each layer change least; rounds: so after each of several rounds "
        "of pruning, over all weights")  # fmt: skip
    settings = parser.parse_args(arguments)
    if settings.scope is None:
        is_global = settings.criterion not in BY_ROW or settings.update == "rounds"
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
    if settings.update == "rounds" and settings.scope != "global":
        parser.error(f"--update rounds goes with --scope global, got {settings.scope}")
    return settings


def prune(language_model: LanguageModel, settings: argparse.Namespace) -> list[dict[str, Any]]:
    """Prune as the command line says; a row of the report for each parameter. Collective."""
    if settings.update == "rounds":
        *_, last = language_model.prune_in_rounds(settings.criterion, [settings.sparsity])
        report, moved = last.pruning, last.update
    else:
        report, moved = language_model.prune(
            settings.criterion, settings.scope, settings.sparsity, settings.update
        )
    rows = report.to_dict()["parameters"]
    if moved is not None:
        for row, entry in zip(rows, moved.parameters, strict=True):
            row |= {"error_before": entry.error_before, "error_after": entry.error_after}
    return rows


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
    rows = prune(language_model, settings)
    if settings.polish:
        language_model.polish(settings.polish)
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
