"""What a user can choose on the command line, parsed once and never changed."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from jobs.scopes import SCOPES

from .data import HELD_OUT_WINDOWS
from .scoring import CRITERIA

# Those whose parameters compete, or have a budget.
BUDGETED_SCOPES = ("global", "global-rms", "uniform", "erk", "lamp", "owl")


@dataclass(frozen=True, slots=True)
class Settings:
    """The command line as typed values; the same on every rank."""

    wrap: str
    output: Path
    steps: int
    finetune_steps: int
    sparsities: tuple[float, ...]
    seed: int
    exclude: tuple[str, ...]
    schedule: str
    checkpoint_every: int
    held_out_windows: int
    criteria: tuple[str, ...]  # to compare; none: prune by magnitude and at random
    scopes: tuple[str, ...]
    calibration_batches: int

    @property
    def checkpoints(self) -> Path:
        """The folder below which runs with a schedule keep their checkpoints."""
        return self.output / "checkpoints"


def parse_settings() -> Settings:
    """Read the command line; a wrong value ends every rank with the same message."""
    parser = _parser()
    parsed = parser.parse_args()

    if parsed.held_out_windows < 1:
        parser.error(f"expected --held-out-windows >= 1, got {parsed.held_out_windows}")
    if parsed.steps < 1 or parsed.finetune_steps < 0:
        parser.error(
            "expected --steps >= 1 and --finetune-steps >= 0, "
            f"got {parsed.steps} and {parsed.finetune_steps}"
        )
    if parsed.schedule == "rounds" and parsed.checkpoint_every is not None:
        parser.error("--checkpoint-every goes with a --schedule other than rounds")
    parsed.checkpoint_every = 50 if parsed.checkpoint_every is None else parsed.checkpoint_every
    if parsed.schedule != "rounds" and (parsed.steps < 4 or parsed.checkpoint_every < 1):
        parser.error(
            "expected --steps >= 4 and --checkpoint-every >= 1 with a schedule, "
            f"got {parsed.steps} and {parsed.checkpoint_every}"
        )
    if parsed.criterion and parsed.schedule != "rounds":
        parser.error("--criterion prunes in one shot; expected it without --schedule")
    if not parsed.criterion and (parsed.scope or parsed.calibration_batches is not None):
        parser.error("--scope and --calibration-batches go with --criterion")
    if parsed.calibration_batches is not None and parsed.calibration_batches < 1:
        parser.error(f"expected --calibration-batches >= 1, got {parsed.calibration_batches}")
    if parsed.sparsities is None:
        parsed.sparsities = [0.5, 0.7, 0.9] if parsed.schedule == "rounds" else [0.9]
    if parsed.schedule != "rounds" and len(parsed.sparsities) != 1:
        parser.error(
            "expected one of --sparsities, that at the end of the schedule, "
            f"got {parsed.sparsities}"
        )
    rising = [0.0, *parsed.sparsities, 1.0]
    if any(low >= high for low, high in pairwise(rising)):
        parser.error(f"expected --sparsities between 0 and 1 and rising, got {parsed.sparsities}")
    return Settings(
        parsed.wrap,
        parsed.output,
        parsed.steps,
        parsed.finetune_steps,
        tuple(parsed.sparsities),
        parsed.seed,
        tuple(parsed.exclude),
        parsed.schedule,
        parsed.checkpoint_every,
        parsed.held_out_windows,
        tuple(parsed.criterion),
        tuple(parsed.scope or BUDGETED_SCOPES),
        8 if parsed.calibration_batches is None else parsed.calibration_batches,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Train, prune and fine-tune a small Llama on sharded weights.",
        fromfile_prefix_chars="@",  # @configs/NAME.args: one argument per line
    )
    parser.add_argument(
        "--wrap",
        choices=("fsdp2", "ddp", "tp"),
        default="fsdp2",
        help="how the model is spread over the ranks",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("runs/prune_tiny_llama"),
        help="folder for tables, pictures and the model",
    )
    parser.add_argument(
        "--schedule",
        choices=("rounds", "linear", "cubic"),
        default="rounds",
        help="rounds: train, then prune in rounds with fine-tuning between; linear and cubic: "
        "prune gradually while training, and continue after the last checkpoint in --output if "
        "an earlier run was killed",
    )
    parser.add_argument(
        "--criterion",
        choices=CRITERIA,
        nargs="+",
        default=[],
        help="compare these criteria instead: prune copies of one trained model in one shot, over "
        "each --scope, to each of --sparsities",
    )
    parser.add_argument(
        "--scope",
        choices=SCOPES,
        nargs="+",
        help="over what --criterion ranks: all weights as they are, all of them after a division "
        "by each parameter's rms, or each parameter alone with a budget (default: every scope)",
    )
    parser.add_argument(
        "--calibration-batches",
        type=int,
        help="batches of training text from which criteria learn (default 8)",
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=350,
        help="training steps before the first pruning; of a schedule, steps until its end",
    )
    parser.add_argument(
        "--finetune-steps",
        type=int,
        default=40,
        help="training steps after each pruning; of a schedule, steps after its end",
    )
    parser.add_argument(
        "--sparsities",
        type=float,
        nargs="+",
        help="share of all prunable weights that is zero after each pruning, rising (default 0.5 "
        "0.7 0.9); of a schedule, the one at its end (default 0.9)",
    )
    parser.add_argument(
        "--checkpoint-every",
        type=int,
        help="steps between checkpoints, with a schedule (default 50)",
    )
    parser.add_argument(
        "--held-out-windows",
        type=int,
        default=HELD_OUT_WINDOWS,
        help="sequences of held-out text on which losses are measured",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="seed of the weights, the batches and the random pruning",
    )
    parser.add_argument(
        "--exclude",
        nargs="*",
        default=[],
        help="patterns of modules that stay dense, besides embeddings, norms and the head",
    )
    return parser
