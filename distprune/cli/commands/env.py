"""``distprune env``: what a bug report needs to say."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from distprune.cli.console import Terminal
from distprune.cli.options import AsJson
from distprune.files.text import format_size

_PACKAGES = (
    "distprune", "torch", "numpy", "safetensors", "transformers", "accelerate", "typer", "rich",
    "PyYAML", "pydantic", "matplotlib",
)  # fmt: skip


def env(
    path: Annotated[Path, typer.Argument(help="A folder on the file system to report.")] = Path(
        "."
    ),
    as_json: AsJson = False,
) -> None:
    """Show versions, devices, memory and the file system, for bug reports."""
    if not path.exists():
        raise typer.BadParameter(f"{path} does not exist; expected a folder.")
    facts = _facts(path)
    terminal = Terminal(as_json)
    if as_json:
        terminal.json(facts)
        return
    terminal.table(("what", "value"), [(key, str(value)) for key, value in facts.items()])


def _facts(path: Path) -> dict[str, Any]:
    facts: dict[str, Any] = {"python": sys.version.split()[0], "platform": platform.platform()}
    for package in _PACKAGES:
        facts[package] = _version(package)
    facts |= _torch_facts()
    facts["cores"] = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    facts["memory"] = _memory()
    facts["file system"] = f"{file_system(path)} ({format_size(shutil.disk_usage(path).free)} free)"
    return facts


def _version(package: str) -> str:
    if package == "distprune":  # the one that runs, installed or not
        import distprune

        return distprune.__version__
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _torch_facts() -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    accelerator = torch.accelerator.current_accelerator()
    names = ("gloo", "nccl", "mpi", "ucc", "xccl")
    backends = [name for name in names if dist.is_available() and dist.is_backend_available(name)]
    kind = "none" if accelerator is None else accelerator.type
    number = torch.accelerator.device_count() if accelerator is not None else 0
    return {
        "accelerator": f"{number} x {kind}" if number else kind,
        "distributed backends": ", ".join(backends) or "none",
    }


def _memory() -> str | None:
    try:
        return format_size(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, ValueError, OSError):
        return None


def file_system(path: Path) -> str:
    """The type of the file system that a path is on ("ext4"), as far as the system tells."""
    try:
        lines = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        return "unknown"
    best, kind = "", "unknown"
    resolved = str(path.resolve())
    for line in lines:
        _, mount, mount_kind, *_ = line.split()
        mount = mount.encode().decode("unicode_escape")
        inside = mount == "/" or resolved == mount or resolved.startswith(mount + "/")
        if inside and len(mount) >= len(best):
            best, kind = mount, mount_kind
    return kind
