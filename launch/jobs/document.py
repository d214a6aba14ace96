"""What the job's documents have in common: tables, the machine, the command."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from pathlib import Path

import torch
import transformers

from .processes import Job


def machine_facts(job: Job) -> dict[str, str]:
    """What the numbers were made on."""
    device = torch.cuda.get_device_name(job.device) if job.device.type == "cuda" else _processor()
    cores, threads = os.cpu_count(), torch.get_num_threads()
    return {
        "device": f"{device}; {cores} CPU cores, threads per rank: {threads}",
        "versions": f"Python {platform.python_version()}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}",
    }


def _processor() -> str:
    """The CPU's name where the system tells it."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def command_line(job: Job) -> str:
    """How this job was started."""
    torchrun = ["torchrun", "--standalone", "--nproc-per-node", str(job.num_ranks)]
    launcher = torchrun if "TORCHELASTIC_RUN_ID" in os.environ else ["python"]
    return shlex.join([*launcher, os.path.relpath(sys.argv[0]), *sys.argv[1:]])


def markdown_table(rows: list[tuple[str, ...]]) -> str:
    """Aligned, so that it reads well in a terminal too; the first row is the head."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def line(row: tuple[str, ...]) -> str:
        text, *numbers = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        return " | ".join(["| " + text, *(n.strip().rjust(len(n)) for n in numbers)]) + " |"

    rules = ["-" * (width + 1) for width in widths]
    rule = "|" + rules[0] + "-|" + ":|".join(rules[1:]) + ":|"
    return "\n".join([line(rows[0]), rule, *map(line, rows[1:])])
