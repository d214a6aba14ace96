"""What the programs for language models have in common on their command lines."""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from .recovery import Recovery

WRAPS = ("none", "ddp", "fsdp2", "tp", "fsdp2_tp")
_AT_LEAST_1 = ("windows", "length", "evaluation_windows", "recovery_batch", "batch_size")


@dataclass(frozen=True, slots=True)
class CommonSettings:
    """The options of `add_common_options` as typed values; the same on every rank."""

    model: Path
    output: Path
    include: tuple[str, ...]
    exclude: tuple[str, ...]
    calibrate: tuple[Path, ...]
    windows: int
    length: int
    evaluate: tuple[Path, ...]
    evaluation_windows: int
    recover: tuple[Path, ...]
    recovery_steps: int
    recovery_batch: int
    learning_rate: float
    mixed_precision: str
    wrap: str
    batch_size: int
    seed: int

    @property
    def recovery(self) -> Recovery:
        """How to fine-tune."""
        return Recovery(
            self.recovery_steps,
            self.recovery_batch,
            self.learning_rate,
            self.batch_size,
            self.seed,
            autocast=torch.bfloat16 if self.mixed_precision == "bf16" else None,
        )

    def facts_without(self, *names: str) -> dict[str, Any]:
        """All settings but these, as JSON has them."""
        return {k: _as_json(v) for k, v in asdict(self).items() if k not in names}


class _WithDefaults(argparse.ArgumentDefaultsHelpFormatter):
    """Says the default of an option, unless its text does, or there is none."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        says = action.default in (None, False, []) or (action.help or "").endswith(")")
        return action.help if says else super()._get_help_string(action)


def make_parser(description: str, output: str) -> argparse.ArgumentParser:
    """A parser with the two folders.

    Args:
        description: of the program.
        output: what the second folder is for.
    """
    parser = argparse.ArgumentParser(
        description=description,
        fromfile_prefix_chars="@",  # @FILE: one argument per line
        formatter_class=_WithDefaults,
    )
    parser.add_argument("model", type=Path, help="folder of a Hugging Face model in safetensors")
    parser.add_argument("output", type=Path, help=output)
    return parser


def add_selection(group: Any) -> None:
    """Add the options that say what is pruned."""
    group.add_argument(
        "--include",
        nargs="*",
        default=[],
        metavar="PATTERN",
        help="matrices to prune (all but embeddings, heads, norms and routers, with the experts)",
    )
    group.add_argument(
        "--exclude", nargs="*", default=[], metavar="PATTERN", help="matrices that stay dense"
    )


def add_calibration(group: Any, *, required: bool = False) -> None:
    """Add the options of the text that scores are learnt from."""
    _add_text(group, "--calibrate", "text to learn scores from", required=required)
    group.add_argument("--windows", type=int, default=128, help="number of sequences")
    group.add_argument("--length", type=int, default=2048, help="tokens in each sequence")


def add_evaluation(group: Any, *, required: bool = False) -> None:
    """Add the options of the text that perplexities are of."""
    text = "held-out text: perplexity before, after, and after recovery"
    _add_text(group, "--evaluate", text, required=required)
    group.add_argument("--evaluation-windows", type=int, default=64, help="sequences per file")


def add_recovery(group: Any) -> None:
    """Add the options of fine-tuning."""
    _add_text(group, "--recover", "text to fine-tune on, with the zeros held")
    group.add_argument("--recovery-steps", type=int, default=0, help="steps of the optimizer")
    group.add_argument(
        "--recovery-batch", type=int, default=8, help="sequences per step, all ranks"
    )
    group.add_argument("--learning-rate", type=float, default=1e-5, help="of AdamW, at its height")
    group.add_argument(
        "--mixed-precision",
        choices=("no", "bf16"),
        default="no",
        help="bf16: fine-tune with matrix products in bfloat16; weights stay as they are",
    )


def add_running(group: Any) -> None:
    """Add the options of how the program runs."""
    group.add_argument("--wrap", choices=WRAPS, default="fsdp2", help="how the model is sharded")
    group.add_argument("--batch-size", type=int, default=1, help="sequences per rank and forward")
    group.add_argument("--seed", type=int, default=0, help="of random scores and of recovery")


def check_common(parser: argparse.ArgumentParser, parsed: argparse.Namespace) -> None:
    """End the program with a message if a common option is wrong."""
    check_at_least_1(parser, parsed, _AT_LEAST_1)
    if (parsed.recovery_steps > 0) != bool(parsed.recover):
        parser.error("--recover FILE... and --recovery-steps N go together")


def check_at_least_1(
    parser: argparse.ArgumentParser, parsed: argparse.Namespace, names: tuple[str, ...]
) -> None:
    """End the program with a message if a number is below 1."""
    for name in names:
        if getattr(parsed, name) < 1:
            option = "--" + name.replace("_", "-")
            parser.error(f"expected {option} >= 1, got {getattr(parsed, name)}")


def with_tuples(parsed: argparse.Namespace) -> dict[str, Any]:
    """The values by name; lists as tuples, which cannot change."""
    return {k: tuple(v) if isinstance(v, list) else v for k, v in vars(parsed).items()}


def _add_text(group: Any, option: str, text: str, *, required: bool = False) -> None:
    default = None if required else []
    group.add_argument(
        option, nargs="+", type=Path, default=default, required=required, metavar="FILE", help=text
    )


def _as_json(value: object) -> Any:
    if isinstance(value, Path):
        return str(value)
    return [_as_json(v) for v in value] if isinstance(value, tuple) else value
