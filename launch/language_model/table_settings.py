"""The command line of the table, parsed once and never changed."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobs.scopes import SCOPES

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
from .criteria import CRITERIA

# They add cells, or change how a cell is made, but not what comes of it: sums over the ranks of
# any sharding are the same but for rounding.
_NOT_OF_A_CELL = (
    "output", "criteria", "scopes", "sparsities", "updates", "rounds_before", "wrap",
)  # fmt: skip
_OF_TEXT = ("evaluate", "evaluation_windows")
_OF_MORE_TEXT = ("more_text", "more_windows")
_OF_RECOVERY = (
    "recover", "recovery_steps", "recovery_batch", "learning_rate", "mixed_precision",
)  # fmt: skip
UPDATES = ("none", "least-squares", "rounds")
DEFAULT_SCOPES = ["global", "global-rms", "layer", "row", "lamp", "owl", "2:4"]


@dataclass(frozen=True, slots=True)
class TableSettings(CommonSettings):
    """The command line as typed values; the same on every rank."""

    criteria: tuple[str, ...]
    scopes: tuple[str, ...]
    sparsities: tuple[float, ...]
    updates: tuple[str, ...]
    rounds_before: tuple[float, ...]
    more_text: tuple[Path, ...]
    more_windows: int

    def facts(self, *, recovered: bool = False, of_more_text: bool = False) -> dict[str, Any]:
        """What every cell depends on, as JSON has it.

        Args:
            recovered: the cells after recovery.
            of_more_text: the cells that are measured on more text.
        """
        others = _OF_TEXT if of_more_text else _OF_MORE_TEXT
        return self.facts_without(*_NOT_OF_A_CELL, *others, *(() if recovered else _OF_RECOVERY))


def parse_settings(arguments: Sequence[str] | None = None) -> TableSettings:
    """Read the command line; a wrong value ends every rank with the same message."""
    parser = _parser()
    parsed = parser.parse_args(arguments)
    check_common(parser, parsed)
    check_at_least_1(parser, parsed, ("more_windows",))
    if any(not 0 < sparsity < 1 for sparsity in parsed.sparsities):
        parser.error(f"expected --sparsities between 0 and 1, got {parsed.sparsities}")
    rising = [0.0, *parsed.rounds_before, min(parsed.sparsities)]
    if rising != sorted(set(rising)):
        parser.error(
            "expected --rounds-before that rise, between 0 and the first of --sparsities, got "
            f"{parsed.rounds_before}"
        )
    return TableSettings(**with_tuples(parsed))


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(
        "Perplexity of a language model by criterion, scope and sparsity, before and "
        "after a short recovery. Every cell is a file: a run that was killed goes on.",
        output="folder for the cells, the table and its picture",
    )
    group = parser.add_argument_group("cells")
    group.add_argument(
        "--criteria",
        nargs="+",
        choices=CRITERIA,
        default=["magnitude", "wanda", "ria", "taylor", "fisher"],
        help="what ranks weights",
    )
    group.add_argument(
        "--scopes", nargs="+", choices=SCOPES, default=DEFAULT_SCOPES, help="what competes"
    )
    group.add_argument(
        "--sparsities",
        nargs="+",
        type=float,
        default=[0.3, 0.5, 0.6, 0.7],
        help="shares of weights to prune",
    )
    group.add_argument(
        "--updates",
        nargs="+",
        choices=UPDATES,
        default=["none"],
        help="what moves the kept weights: nothing; least squares, once; rounds of rising "
        "sparsities, with scores anew and least squares in each, over the scope global",
    )
    group.add_argument(
        "--rounds-before",
        nargs="*",
        type=float,
        default=[],
        metavar="SPARSITY",
        help="of rounds before that of the first of --sparsities",
    )
    add_selection(group)
    add_calibration(parser.add_argument_group("calibration"), required=True)
    group = parser.add_argument_group("evaluation")
    add_evaluation(group, required=True)
    group.add_argument(
        "--more-text",
        nargs="*",
        type=Path,
        default=[],
        metavar="FILE",
        help="held-out text for a second table, of the cells that this command names",
    )
    group.add_argument("--more-windows", type=int, default=64, help="sequences per file of it")
    add_recovery(parser.add_argument_group("recovery"))
    add_running(parser.add_argument_group("running"))
    return parser
