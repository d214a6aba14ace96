"""What a user can choose on the command line, parsed once and never changed."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path


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


def parse_settings() -> Settings:
    """Read the command line; a wrong value ends every rank with the same message."""
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
        "--steps", type=int, default=350, help="training steps before the first pruning"
    )
    parser.add_argument(
        "--finetune-steps", type=int, default=40, help="training steps after each pruning"
    )
    parser.add_argument(
        "--sparsities",
        type=float,
        nargs="+",
        default=[0.5, 0.7, 0.9],
        help="share of all prunable weights that is zero after each pruning, rising",
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
        default=["lm_head", "*embed_tokens"],
        help="patterns of modules that stay dense",
    )
    parsed = parser.parse_args()

    if parsed.steps < 1 or parsed.finetune_steps < 0:
        parser.error(
            "expected --steps >= 1 and --finetune-steps >= 0, "
            f"got {parsed.steps} and {parsed.finetune_steps}"
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
    )
