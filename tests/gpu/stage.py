"""What every stage is made of: parts that run one after the other, and are written when they end.

A part is a function of a :class:`Stage`. A part that raises fails, and the next one runs. JSON is
written again after each part and each line, so that a stage that is killed has lost nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from measuring import Table
from torch import nn

import distprune

OK, FAILED, NOT_TRIED, UNFINISHED = "ok", "failed", "not tried", "not finished"


class NotTried(Exception):
    """A part cannot run here; the text says why."""


class Stage:
    """The parts of a stage, and what they found.

    Args:
        device: where the work is done.
        quick: small sizes: a rehearsal.
        path: of the JSON document.
    """

    def __init__(self, device: torch.device, *, quick: bool, path: Path) -> None:
        self.device, self.quick, self._path = device, quick, path
        self.parts: list[dict[str, Any]] = []

    def say(self, line: str) -> None:
        """Add a line to the part that runs."""
        self.parts[-1]["lines"].append(line)
        self._write()

    def figure(self, name: str, value: float, unit: str = "") -> None:
        """Add a measured number."""
        self.parts[-1]["figures"][name] = value
        self.say(f"{name}: {value:.6g} {unit}".rstrip())

    def check(self, what: str, holds: bool, detail: str = "") -> None:
        """Add whether something holds; where it does not, the part fails at its end."""
        if not holds:
            self.parts[-1]["wrong"].append(f"{what} {detail}".rstrip())
        self.say(f"{'ok' if holds else 'WRONG'}: {what} {detail}".rstrip())

    def table(self, table: Table) -> None:
        """Add a table, or replace one with the same title."""
        tables = self.parts[-1]["tables"]
        tables[table.title] = table.json()
        self._write()

    def run(self, part: Callable[[Stage], None]) -> None:
        with self._part(part.__name__.replace("_", " ")):
            part(self)

    @contextlib.contextmanager
    def _part(self, name: str) -> Iterator[None]:
        found = _new(name)
        self.parts.append(found)
        self._write()
        print(f"-- {name}", flush=True)
        began = time.perf_counter()
        try:
            yield
            found["status"] = FAILED if found["wrong"] else OK
        except NotTried as reason:
            found["status"] = NOT_TRIED
            found["lines"].append(str(reason))
        except Exception as error:
            found["status"] = FAILED
            found["wrong"].append(f"{type(error).__name__}: {str(error)[:600]}")
            found["traceback"] = traceback.format_exc()[-6000:]
            traceback.print_exc()
        found["seconds"] = round(time.perf_counter() - began, 2)
        self._write()
        print(f"   {found['status']}, {found['seconds']} s", flush=True)

    def _write(self) -> None:
        _write(self._path, self.parts)


def prune(model: nn.Module, amount: float = 0.5) -> None:
    """Prune all weights of a model by magnitude."""
    parameters = distprune.select(model, everything=True)
    distprune.global_unstructured(parameters, distprune.L1Unstructured, amount=amount)


def main(*parts: Callable[[Stage], None], apart: bool = False) -> None:
    """Run the parts of a stage; the arguments are those that run_stages.py passes.

    Args:
        apart: each in a process of its own, because a failure may leave the device unusable.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--parts", help="names of parts, separated by commas; all by default")
    given = parser.parse_args()
    chosen = given.parts.split(",") if given.parts else [part.__name__ for part in parts]
    if apart and len(chosen) > 1:
        sys.exit(_run_apart(chosen, given.json))
    device = torch.device(given.device)
    if device.type != "cpu" and device.index is None:
        device = torch.device(device.type, 0)
        torch.accelerator.set_device_index(0)
    stage = Stage(device, quick=given.quick, path=given.json)
    for part in parts:
        if part.__name__ in chosen:
            stage.run(part)
    sys.stdout.flush()
    # Threads of backends, and broken devices, may hang or abort an ordinary exit.
    os._exit(int(any(part["status"] == FAILED for part in stage.parts)))


def _run_apart(names: list[str], path: Path) -> int:
    """Run this script once for each of its parts; 1 if one failed."""
    found: list[dict[str, Any]] = []
    is_bad = False
    for name in names:
        own = path.with_name(f"{name}.json")
        # Of equal options the last one counts.
        command = [sys.executable, *sys.argv, "--parts", name, "--json", str(own)]
        process = subprocess.Popen(command)
        code = None
        while code is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(timeout=0.5)
            present = json.loads(own.read_text()) if own.exists() else []
            _write(path, [*found, *present])
        if not present or present[-1]["status"] == UNFINISHED:
            what = f"the process of part {name} ended with code {code}"
            present = [{**_new(name.replace("_", " ")), "status": FAILED, "wrong": [what]}]
        found += present
        _write(path, found)
        is_bad = is_bad or code != 0
    return int(is_bad)


def _new(name: str) -> dict[str, Any]:
    return {
        "name": name, "status": UNFINISHED, "lines": [], "figures": {}, "tables": {}, "wrong": [],
    }  # fmt: skip


def _write(path: Path, parts: list[dict[str, Any]]) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(parts))
    partial.replace(path)
