"""What a user can choose on the command line, parsed once and never changed."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .common_settings import (
    CommonSettings,
    add_calibration,
    add_evaluation,
    add_recovery,
    add_running,
    add_selection,
    check_at_least_1,
    check_common,
    make_parser,
    with_tuples,
)
from .criteria import CRITERIA, NEEDS_TEXT

SCOPES = ("global", "layer", "row")
UPDATES = ("none", "least-squares")
NORMALIZATIONS = ("none", "rms", "l2", "mean")
BUDGETS = ("uniform", "uniform+", "erk", "lamp", "owl")
# Criteria whose scores have another scale in each parameter. Random ones have one scale everywhere,
# and those of gradients all estimate the same: the change of the loss.
_NOT_TO_SCALE = ("magnitude", "wanda", "ria", "stade", "obs")
# What does not change the result.
_OF_THE_MACHINE = ("output", "checkpoint_every")


@dataclass(frozen=True, slots=True)
class Settings(CommonSettings):
    """The command line as typed values; the same on every rank."""

    # How it is pruned.
    criterion: str
    sparsity: float | None  # None: the pattern says it
    scope: str
    pattern: str | None
    normalize: str | None
    budget: str | None
    update: str
    rounds: tuple[float, ...]
    # What it learns from, beside text.
    statistics: Path | None
    sequential: bool
    # How it is recovered.
    lora: int | None
    schedule: str
    prunings: int
    checkpoint_every: int
    # How it runs.
    tensor_parallel: int | None
    dtype: str

    def facts(self) -> dict[str, Any]:
        """What the result depends on, as JSON has it."""
        return self.facts_without(*_OF_THE_MACHINE)

    @property
    def moves_weights(self) -> bool:
        """Whether pruning changes kept weights, or has several rounds."""
        return self.update != "none" or bool(self.rounds)


def parse_settings(arguments: Sequence[str] | None = None) -> Settings:
    """Read the command line; a wrong value ends every rank with the same message."""
    parser = _parser()
    parsed = parser.parse_args(arguments)
    check_common(parser, parsed)
    check_at_least_1(parser, parsed, ("prunings", "checkpoint_every"))
    has_own_sparsity = _says_sparsity(parsed.pattern)
    if has_own_sparsity and parsed.sparsity is not None:
        parser.error(f"--pattern {parsed.pattern} says the sparsity: expected no --sparsity")
    if parsed.sparsity is None and not has_own_sparsity:
        parsed.sparsity = 0.5
    if parsed.sparsity is not None and not 0 < parsed.sparsity < 1:
        parser.error(f"expected --sparsity between 0 and 1, got {parsed.sparsity}")
    if has_own_sparsity and parsed.schedule != "one_shot":
        parser.error(f"--pattern {parsed.pattern} goes without --schedule")
    if parsed.criterion in NEEDS_TEXT and not (parsed.calibrate or parsed.statistics):
        parser.error(f"--criterion {parsed.criterion} needs --calibrate FILE...")
    if parsed.statistics is not None and parsed.criterion not in ("wanda", "ria", "stade"):
        parser.error(f"--statistics has no meaning for --criterion {parsed.criterion}")
    if parsed.budget == "owl" and not (parsed.calibrate or parsed.statistics):
        parser.error("--budget owl needs --calibrate FILE...")
    of_inputs = ("wanda", "ria", "stade", *(("obs",) if parsed.update != "none" else ()))
    if parsed.sequential and parsed.criterion not in of_inputs:
        parser.error(
            "--sequential goes with --criterion wanda, ria and stade; with --update least-squares "
            "obs, too"
        )
    if parsed.sequential and (parsed.statistics or parsed.schedule != "one_shot" or parsed.budget):
        parser.error(
            "--sequential prunes block by block, in one shot: expected it without "
            "--statistics, --schedule and --budget"
        )
    if parsed.schedule != "one_shot" and parsed.recovery_steps < parsed.prunings:
        parser.error(
            f"--schedule {parsed.schedule} prunes while it recovers: expected --recovery-steps of "
            f"at least --prunings, {parsed.prunings}, got {parsed.recovery_steps}"
        )
    if parsed.lora is not None and (parsed.recovery_steps == 0 or parsed.schedule != "one_shot"):
        parser.error("--lora goes with --recovery-steps, and without --schedule")
    if has_own_sparsity and (parsed.scope or parsed.budget):
        parser.error(
            "--pattern decides what is pruned in each group: expected it without "
            "--scope and --budget"
        )
    if parsed.scope is None:
        parsed.scope = _default_scope(parsed)
    _check_moving(parser, parsed)
    if parsed.normalize is None and _needs_scale(parsed):
        parsed.normalize = "rms"
    if parsed.normalize == "none":
        parsed.normalize = None
    return Settings(**with_tuples(parsed))


def _check_moving(parser: argparse.ArgumentParser, parsed: argparse.Namespace) -> None:
    """End the program with a message if the options that move weights do not fit the others."""
    if (parsed.update != "none" or parsed.rounds) and not parsed.calibrate:
        parser.error("--update and --rounds need --calibrate FILE...: inputs of the layers")
    if (parsed.update != "none" or parsed.rounds) and parsed.schedule != "one_shot":
        parser.error("--update and --rounds go without --schedule")
    if parsed.rounds:
        rising = [0.0, *parsed.rounds, parsed.sparsity or 0.0]
        if rising != sorted(set(rising)):
            parser.error("expected --rounds that rise, between 0 and --sparsity")
        is_global = parsed.scope == "global" and not (parsed.pattern or parsed.budget)
        if not is_global or parsed.sequential or parsed.normalize not in (None, "none"):
            parser.error(
                "--rounds rank all weights together: expected --scope global, without --pattern, "
                "--budget, --normalize and --sequential"
            )
        if parsed.criterion not in NEEDS_TEXT:
            parser.error(f"--rounds has no meaning for --criterion {parsed.criterion}")


def _says_sparsity(pattern: str | None) -> bool:
    """N:M does; tiles of AxB are ranked as single weights are."""
    return pattern is not None and ":" in pattern


def _default_scope(parsed: argparse.Namespace) -> str:
    """What measured best: see docs/criteria.md, "Which criterion, which scope"."""
    is_divided = parsed.pattern is not None or parsed.budget is not None
    return "row" if parsed.criterion in _NOT_TO_SCALE and not is_divided else "global"


def _needs_scale(parsed: argparse.Namespace) -> bool:
    """Whether parameters compete by scores that do not compare between them."""
    is_divided = parsed.scope != "global" or _says_sparsity(parsed.pattern) or parsed.budget
    return parsed.criterion in _NOT_TO_SCALE and not is_divided


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(
        "Prune a language model on any number of ranks: load it sharded, calibrate, "
        "prune, measure, recover and save. A run that was killed goes on when it is started again.",
        output="folder to write; must not exist",
    )
    group = parser.add_argument_group("pruning")
    group.add_argument("--criterion", choices=CRITERIA, default="wanda", help="what ranks weights")
    group.add_argument("--sparsity", type=float, help="share of weights to prune (0.5)")
    group.add_argument(
        "--scope",
        choices=SCOPES,
        help="what competes (global for random, taylor, both fishers, budgets and tiles; else row)",
    )
    group.add_argument(
        "--pattern", help="2:4: prune 2 of each 4 weights along the inputs; 4x4: whole tiles"
    )
    group.add_argument(
        "--normalize",
        choices=NORMALIZATIONS,
        help="what divides each parameter's scores (rms, where parameters compete by magnitude, "
        "wanda, ria, stade or obs)",
    )
    group.add_argument("--budget", choices=BUDGETS, help="divides the sparsity among layers")
    group.add_argument(
        "--update",
        choices=UPDATES,
        default="none",
        help="least-squares: move the kept weights so that each layer's outputs change least",
    )
    group.add_argument(
        "--rounds",
        nargs="*",
        type=float,
        default=[],
        metavar="SPARSITY",
        help="sparsities to prune to before --sparsity, each with scores of the model as it is"
        " then",
    )
    add_selection(group)

    group = parser.add_argument_group("calibration")
    add_calibration(group)
    group.add_argument("--statistics", type=Path, help="file of `distprune calibrate`, instead")
    group.add_argument(
        "--sequential",
        action="store_true",
        help="collect each block's statistics with the blocks before it pruned",
    )

    add_evaluation(parser.add_argument_group("evaluation"))

    group = parser.add_argument_group("recovery")
    add_recovery(group)
    group.add_argument(
        "--lora",
        type=int,
        metavar="RANK",
        help="train and merge LoRA adapters of this rank, instead of all weights",
    )
    group.add_argument(
        "--schedule",
        choices=("one_shot", "linear", "cubic"),
        default="one_shot",
        help="linear, cubic: prune in steps while recovering",
    )
    group.add_argument("--prunings", type=int, default=8, help="number of steps of the schedule")
    group.add_argument(
        "--checkpoint-every", type=int, default=50, help="steps between checkpoints of the recovery"
    )

    group = parser.add_argument_group("running")
    add_running(group)
    group.add_argument(
        "--tensor-parallel",
        type=int,
        metavar="N",
        help="ranks that share each layer, with --wrap fsdp2_tp",
    )
    group.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        default="auto",
        help="of the weights; auto: as they are stored",
    )
    return parser
