"""The command line of the table, parsed once and never changed."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jobs.scopes import SCOPES

from .rankings import CRITERIA
from .recovery import Recovery
from .settings import WRAPS

# They add cells, or change how a cell is made, but not what comes of it.
_NOT_OF_A_CELL = ("output", "criteria", "scopes", "sparsities")
_OF_RECOVERY = ("recover", "recovery_steps", "recovery_batch", "learning_rate")
DEFAULT_SCOPES = ["global", "global-rms", "layer", "row", "lamp", "owl", "2:4"]


@dataclass(frozen=True, slots=True)
class TableSettings:
    """The command line as typed values; the same on every rank."""

    model: Path
    output: Path
    criteria: tuple[str, ...]
    scopes: tuple[str, ...]
    sparsities: tuple[float, ...]
    exclude: tuple[str, ...]
    names: tuple[str, ...]
    calibrate: tuple[Path, ...]
    windows: int
    length: int
    evaluate: tuple[Path, ...]
    evaluation_windows: int
    recover: tuple[Path, ...]
    recovery_steps: int
    recovery_batch: int
    learning_rate: float
    wrap: str
    batch_size: int
    seed: int

    @property
    def recovery(self) -> Recovery:
        """How to fine-tune."""
        return Recovery(
            self.recovery_steps, self.recovery_batch, self.learning_rate, self.batch_size, self.seed
        )

    def facts(self, *, recovered: bool) -> dict[str, Any]:
        """What every cell depends on, before or after recovery, as JSON has it."""
        others = _NOT_OF_A_CELL if recovered else (*_NOT_OF_A_CELL, *_OF_RECOVERY)
        values = {k: v for k, v in asdict(self).items() if k not in others}
        return {
            name: [str(v) for v in value] if isinstance(value, tuple)
            else str(value) if isinstance(value, Path) else value
            for name, value in values.items()
        }  # fmt: skip


def parse_settings(arguments: Sequence[str] | None = None) -> TableSettings:
    """Read the command line; a wrong value ends every rank with the same message."""
    parser = _parser()
    parsed = parser.parse_args(arguments)
    if any(not 0 < sparsity < 1 for sparsity in parsed.sparsities):
        parser.error(f"expected --sparsities between 0 and 1, got {parsed.sparsities}")
    if (parsed.recovery_steps > 0) != bool(parsed.recover):
        parser.error("--recover FILE... and --recovery-steps N go together")
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in vars(parsed).items()}
    return TableSettings(**values)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Perplexity of a language model by criterion, scope and sparsity, before and "
        "after a short recovery. Every cell is a file: a run that was killed goes on.",
        fromfile_prefix_chars="@",  # @FILE: one argument per line
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("model", type=Path, help="folder of a Hugging Face model in safetensors")
    add("output", type=Path, help="folder for the cells, the table and its picture")
    add("--criteria", nargs="+", choices=CRITERIA,
        default=["magnitude", "wanda", "ria", "taylor", "fisher"])  # fmt: skip
    add("--scopes", nargs="+", choices=SCOPES, default=DEFAULT_SCOPES, help="what competes")
    add("--sparsities", nargs="+", type=float, default=[0.3, 0.5, 0.6, 0.7])
    add("--exclude", nargs="*", default=[], help="patterns of modules that stay dense")
    add("--names", nargs="+", default=["weight"], help="parameters of modules")
    add("--calibrate", nargs="+", type=Path, required=True, metavar="FILE")
    add("--windows", type=int, default=128, help="sequences to calibrate on")
    add("--length", type=int, default=2048, help="tokens in a sequence")
    add("--evaluate", nargs="+", type=Path, required=True, metavar="FILE")
    add("--evaluation-windows", type=int, default=64, help="sequences per file")
    add("--recover", nargs="+", type=Path, default=[], metavar="FILE")
    add("--recovery-steps", type=int, default=0)
    add("--recovery-batch", type=int, default=8, help="sequences per step, over all ranks")
    add("--learning-rate", type=float, default=1e-5)
    add("--wrap", choices=WRAPS, default="fsdp2", help="how the model is sharded")
    add("--batch-size", type=int, default=1, help="sequences per rank and forward")
    add("--seed", type=int, default=0)
    return parser
