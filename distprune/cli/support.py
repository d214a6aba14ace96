"""``distprune recipe`` and ``env``: what helps to write a recipe, and a bug report."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

import distprune
from distprune.cli.console import Terminal
from distprune.cli.options import AsJson, complete, find, read
from distprune.files.text import format_size
from distprune.recipe import Recipe
from distprune.recipes.request import recipe_schema, shipped_recipes

recipe = typer.Typer(
    help="List, show and describe recipes: what to prune, and how much, as a file.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)


@recipe.command("ls")
def ls(as_json: AsJson = False) -> None:
    """List the recipes that `-r NAME` knows."""
    about = {}
    for name, path in shipped_recipes().items():  # each begins with a comment
        first = path.read_text(encoding="utf-8").partition("\n")[0]
        about[name] = first.removeprefix("#").strip()
    terminal = Terminal(as_json)
    if as_json:
        terminal.json([{"name": name, "about": text} for name, text in about.items()])
    else:
        terminal.table(("recipe", "what it does"), list(about.items()))


@recipe.command("show")
def show(
    name: Annotated[
        str,
        typer.Argument(help="A shipped recipe, or a file of your own.", autocompletion=complete),
    ],
    as_json: AsJson = False,
) -> None:
    """Check a recipe and print it; the start of one's own: `recipe show layer_50 > my.yaml`."""
    own = read(name, Recipe)
    terminal = Terminal(as_json)
    if as_json:
        terminal.json(own.as_mapping())
    else:
        for line in find(name).read_text(encoding="utf-8").rstrip().splitlines():
            terminal.text(line)


@recipe.command("schema")
def schema(as_json: AsJson = False) -> None:
    """Print the JSON schema of a recipe, for editors that complete and check YAML.

    It is JSON with and without --json.
    """
    Terminal(True).json(recipe_schema())


_PACKAGES = (
    "torch", "numpy", "safetensors", "transformers", "accelerate", "typer", "rich",
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
    import torch
    import torch.distributed as dist

    accelerator = torch.accelerator.current_accelerator()
    number = 0 if accelerator is None else torch.accelerator.device_count()
    kind = "none" if accelerator is None else accelerator.type
    names = ("gloo", "nccl", "mpi", "ucc", "xccl") if dist.is_available() else ()
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    facts: dict[str, Any] = {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "distprune": distprune.__version__,  # the one that runs, installed or not
        **{package: _version(package) for package in _PACKAGES},
        "accelerator": f"{number} x {kind}" if number else kind,
        "distributed backends": ", ".join(filter(dist.is_backend_available, names)) or "none",
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "memory": format_size(memory),
        "file system": f"{_file_system(path)} ({format_size(shutil.disk_usage(path).free)} free)",
    }
    terminal = Terminal(as_json)
    if as_json:
        terminal.json(facts)
        return
    terminal.table(("what", "value"), [(key, str(value)) for key, value in facts.items()])


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _file_system(path: Path) -> str:
    """The type of the file system that a path is on ("ext4"), as far as the system tells."""
    try:
        lines = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        return "unknown"
    # Of mounts on one place, the last one counts; spaces in their names are escaped.
    kinds = {line.split()[1].encode().decode("unicode_escape"): line.split()[2] for line in lines}
    inside = [mount for mount in kinds if path.resolve().is_relative_to(mount)]
    return kinds[max(inside, key=len)] if inside else "unknown"
