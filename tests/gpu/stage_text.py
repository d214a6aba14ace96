"""Pruning of a checkpoint by text (`distprune prune --text`), layer by layer on the device."""

from __future__ import annotations

import contextlib
import filecmp
import importlib.util
import json
import math
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from bench_checkpoint import shapes
from device_clock import release, timed
from measuring import Table
from stage import NotTried, Stage, main

from distprune import streaming
from distprune.files.checkpoint import make_header
from distprune.language_models import TokenWindows
from helpers.recipes import raw_recipe

SMALL = 4e7  # bytes of bfloat16


def both_ways(stage: Stage) -> None:
    """Weights that stay in memory, and weights that are read in each pass: the same bytes."""
    with folder(stage, SMALL) as path:
        windows = random_windows(2, 8) if stage.quick else random_windows(8, 128)
        for score, update in (("fisher", "least_squares"), ("taylor", "none")):
            names = [f"{score}-{way}" for way in ("resident", "again", "streamed")]
            for name, resident in zip(names, (True, True, False), strict=True):
                prune(path, path.with_name(name), windows, score, update, stage, resident)
            first, again, streamed = (path.with_name(name) for name in names)
            stage.check(f"{score}: two runs write the same", *differing(first, again))
            stage.check(f"{score}: both ways write the same", *differing(first, streamed))


def one_billion(stage: Stage) -> None:
    ways = (("fisher", "none"), ("taylor", "none"), ("fisher", "least_squares"))
    large(stage, 1, ways)


def large(stage: Stage, billions: int, ways: Sequence[tuple[str, str]]) -> None:
    """Seconds of a whole run, with scores of gradients and least squares."""
    number, length = (2, 8) if stage.quick else (32, 2048)
    with folder(stage, SMALL if stage.quick else 2e9 * billions) as path:
        windows = random_windows(number, length)
        rows: list[list[Any]] = []
        for score, update in ways:
            target = path.with_name(f"{score}-{update}")
            marks: list[str] = []
            started = time.perf_counter()

            def took(progress: Any, marks: Any = marks, started: float = started) -> None:
                if len(marks) * progress.total <= 12 * progress.num_done:
                    seconds = time.perf_counter() - started
                    marks.append(f"{seconds:.1f} s: {progress.num_done}/{progress.total}")

            run = timed(
                stage.device,
                lambda target=target, score=score, update=update, took=took: prune(
                    path, target, windows, score, update, stage, None, took
                ),
            )
            stage.say(f"{score}, {update}: {', '.join(marks)}")
            rows.append([score, update, run.seconds, run.peak_extra_bytes / 1e9])
            columns = ["score", "update", "s", "peak GB"]
            size = f"{billions} billion weights, {number} windows of {length} tokens"
            title = f"{size}, bfloat16, 60 % of the decoder"
            stage.table(Table(title, columns, rows))
            shutil.rmtree(target)
            release(stage.device)


def prune(
    source: Path, target: Path, windows: TokenWindows, score: str, update: Any, stage: Stage,
    resident: bool | None, progress: Any = None,
) -> None:  # fmt: skip
    recipe = raw_recipe(sparsity=0.6, score=score, normalize=None)
    told: list[str] = []
    options: dict[str, Any] = {"update": update, "device": stage.device, "resident": resident}
    streaming.prune_folder(
        source, target, recipe, windows, progress=progress, tell=told.append, **options
    )
    stage.say(f"{target.name}: {' '.join(told)}")


def random_windows(number: int, length: int) -> TokenWindows:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, 1000, (number, length), generator=generator)
    text_of = torch.zeros(number, dtype=torch.int64)
    return TokenWindows(("random",), tokens, text_of, has_bos=False)


@contextlib.contextmanager
def folder(stage: Stage, num_bytes: float) -> Iterator[Path]:
    """A made checkpoint in a folder of its own, with results beside it; removed at the end."""
    missing = [n for n in ("transformers", "safetensors") if not importlib.util.find_spec(n)]
    if missing:
        raise NotTried(f"{' and '.join(missing)} missing")
    with tempfile.TemporaryDirectory(prefix="distprune-text-") as work:
        source = Path(work, "source")
        source.mkdir()
        config, tensors = shapes(num_bytes)
        (source / "config.json").write_text(json.dumps(config))
        write(source / "model.safetensors", tensors, stage.device)
        yield source


def write(path: Path, tensors: dict[str, tuple[int, ...]], device: torch.device) -> None:
    """Normal weights in bfloat16, made on the device."""
    described = {name: ("BF16", s, 2 * math.prod(s)) for name, s in tensors.items()}
    header, _ = make_header(described, {"format": "pt"})
    with path.open("wb") as file:
        file.write(header)
        left = sum(num_bytes for _, _, num_bytes in described.values())
        generator = torch.Generator(device).manual_seed(0)
        while left:
            number = min(left // 2, 1 << 27)
            values = torch.empty(number, device=device).normal_(std=0.02, generator=generator)
            file.write(values.bfloat16().cpu().view(torch.uint8).numpy())
            left -= 2 * number


def differing(one: Path, other: Path) -> tuple[bool, str]:
    """Whether two results are the same to the byte, and which files are not."""
    names = sorted(str(path.relative_to(one)) for path in one.rglob("*") if path.is_file())
    names = [name for name in names if not name.endswith("report.json")]
    wrong = [name for name in names if not filecmp.cmp(one / name, other / name, shallow=False)]
    return bool(names) and not wrong, ", ".join(wrong)


if __name__ == "__main__":
    main(both_ways, one_billion)
