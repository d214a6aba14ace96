"""Pruning of a checkpoint by text (`distprune prune --text`), layer by layer on the device."""

from __future__ import annotations

import contextlib
import filecmp
import importlib.util
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import plan_by_text
import torch
from device_clock import release, timed
from measuring import Table
from stage import NotTried, Stage, main

from distprune import streaming
from distprune.files.recipe import FileRecipe
from distprune.language_models import TokenWindows

SMALL = (512, 1376, 4, 128, True, 1024)


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
    large(stage, "Llama-3.2-1B", ways)


def large(stage: Stage, name: str, ways: Sequence[tuple[str, str]]) -> None:
    """Seconds of a whole run, with scores of gradients and least squares."""
    sizes = SMALL if stage.quick else plan_by_text.MODELS[name]
    number, length = (2, 8) if stage.quick else (plan_by_text.WINDOWS, plan_by_text.LENGTH)
    with folder(stage, sizes) as path:
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
            title = f"{name}, {number} windows of {length} tokens, bfloat16, 60 % of the decoder"
            stage.table(Table(title, columns, rows))
            shutil.rmtree(target)
            release(stage.device)


def prune(
    source: Path, target: Path, windows: TokenWindows, score: str, update: Any, stage: Stage,
    resident: bool | None, progress: Any = None,
) -> None:  # fmt: skip
    recipe = FileRecipe(sparsity=0.6, score=score, normalize=None)
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
def folder(stage: Stage, sizes: tuple[Any, ...]) -> Iterator[Path]:
    """A made checkpoint in a folder of its own, with results beside it; removed at the end."""
    missing = [n for n in ("transformers", "safetensors") if not importlib.util.find_spec(n)]
    if missing:
        raise NotTried(f"{' and '.join(missing)} missing")
    with tempfile.TemporaryDirectory(prefix="distprune-text-") as work:
        source = Path(work, "source")
        source.mkdir()
        plan_by_text.write(source, *sizes)
        fill(source / "model.safetensors", stage.device)
        yield source


def fill(path: Path, device: torch.device) -> None:
    """Normal weights in place of the holes behind a header."""
    with path.open("r+b") as file:
        file.seek(8 + int.from_bytes(file.read(8), "little"))
        left = path.stat().st_size - file.tell()
        generator = torch.Generator(device).manual_seed(0)
        while left:
            number = min(left // 2, 1 << 27)
            values = torch.empty(number, device=device).normal_(std=0.02, generator=generator)
            file.write(values.bfloat16().cpu().view(torch.uint8).numpy())
            left -= 2 * number


def differing(one: Path, other: Path) -> tuple[bool, str]:
    """Whether two results are the same to the byte, and which files are not."""
    names = sorted(str(path.relative_to(one)) for path in one.rglob("*") if path.is_file())
    names = [name for name in names if not name.endswith("run.json")]
    wrong = [name for name in names if not filecmp.cmp(one / name, other / name, shallow=False)]
    return bool(names) and not wrong, ", ".join(wrong)


if __name__ == "__main__":
    main(both_ways, one_billion)
