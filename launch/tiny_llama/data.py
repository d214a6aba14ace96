"""Bytes of the Python standard library, as text to train on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from jobs.standard_library import ROOT, is_held_out, source_files

WINDOW = 128  # bytes in one sequence
BATCH = 24  # sequences in one step over all ranks: splits over 1, 2, 3, 4, 6 and 8 ranks
HELD_OUT_WINDOWS = 240  # as BATCH, and by 10: see training.mean_loss


@dataclass(frozen=True, slots=True)
class Corpus:
    """Training and held-out bytes, from different files."""

    train: Tensor  # uint8 [num_train_bytes]
    held_out: Tensor  # int64 [num_held_out_windows, WINDOW]
    num_train_files: int
    num_held_out_files: int


def load_corpus(num_held_out_windows: int = HELD_OUT_WINDOWS) -> Corpus:
    """Read the interpreter's own sources; the same on every rank of one machine.

    About one file in ten is held out.
    """
    files = source_files("idlelib", "lib2to3")
    train_files = [file for file in files if not is_held_out(file, 10)]
    held_out_files = [file for file in files if is_held_out(file, 10)]

    train, held_out = _join_bytes(train_files), _join_bytes(held_out_files)
    if len(train) <= WINDOW or len(held_out) < num_held_out_windows * WINDOW:
        raise ValueError(
            f"{ROOT}: {len(train)} training and {len(held_out)} held-out bytes are too few; "
            f"expected a Python whose standard library is installed as .py files."
        )
    starts = torch.linspace(
        0, len(held_out) - WINDOW, num_held_out_windows, dtype=torch.float64
    ).long()
    return Corpus(train, _windows(held_out, starts), len(train_files), len(held_out_files))


def batches(
    train: Tensor, num_steps: int, seed: int, *, shard: int, num_shards: int
) -> list[Tensor]:
    """This rank's part of each step's batch.

    The batches of all ranks together depend on the seed only, so 1, 2 and 4 ranks train
    on the same bytes in the same steps.

    Args:
        train: uint8 [num_train_bytes].
        num_steps: how many steps.
        seed: decides every window of every step.
        shard: which part, 0 <= shard < num_shards.
        num_shards: must divide `BATCH`.

    Returns:
        int64 [BATCH / num_shards, WINDOW] per step.
    """
    if BATCH % num_shards:
        raise ValueError(
            f"a batch of {BATCH} sequences cannot be split evenly over {num_shards} ranks."
        )
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(train) - WINDOW, (num_steps, BATCH), generator=generator)
    return [_windows(train, step_starts.chunk(num_shards)[shard]) for step_starts in starts]


def _join_bytes(files: list[Path]) -> Tensor:
    return torch.frombuffer(
        bytearray(b"\n".join(path.read_bytes() for path in files)), dtype=torch.uint8
    )


def _windows(data: Tensor, starts: Tensor) -> Tensor:
    """int64 [len(starts), WINDOW]: the bytes from each start on."""
    return data[starts[:, None] + torch.arange(WINDOW)].long()
