"""All commands, and those on distprune itself: ``recipe``, ``env`` and ``selftest``."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import click

import distprune
from distprune.cli import copies, language_models, selftest
from distprune.cli.console import Terminal
from distprune.cli.inspect import inspect
from distprune.cli.options import complete
from distprune.cli.plan import plan
from distprune.cli.process import translated
from distprune.cli.prune import prune
from distprune.files.errors import SelectionError
from distprune.files.text import format_size
from distprune.recipes import Recipe, load_recipe, shipped_recipes


class _Commands(click.Group):
    """Lists its commands in the order in which they were added."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(distprune.__version__, message="%(version)s")
def app() -> None:
    """Prune Hugging Face safetensors checkpoints of any size, without building the model.

    Memory is bounded by a constant, the count is exact, and the result is the same to the byte on
    any number of processes. SRC is a folder of safetensors files, one such file, or the name of a
    model that is in the local Hugging Face cache (org/name).

    Exit codes: 0 done, 1 failure, 2 wrong usage or recipe, 3 checkpoints that differ (verify, and
    diff --exit-code).
    """


as_json_option = click.option("--json", "as_json", is_flag=True, help="Write JSON to stdout.")


@click.group(cls=_Commands)
def recipe() -> None:
    """List, show and describe recipes: what to prune, and how much, as a file."""


@recipe.command()
@as_json_option
def ls(as_json: bool) -> None:
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


@recipe.command()
@click.argument("name", shell_complete=complete)
@as_json_option
def show(name: str, as_json: bool) -> None:
    """Check a recipe and print it with every default: `recipe show layer_50 > my.yaml`."""
    with translated(SelectionError):
        own = load_recipe(name)
    terminal = Terminal(as_json)
    if as_json:
        terminal.json(own.as_values())
    else:
        for line in own.to_yaml().splitlines():
            terminal.text(line)


@recipe.command()
def schema() -> None:
    """Print the JSON schema of a recipe, for editors that complete and check YAML."""
    Terminal(True).json(Recipe.model_json_schema())


_PACKAGES = (
    "torch", "numpy", "safetensors", "transformers", "accelerate", "click", "rich",
    "PyYAML", "pydantic", "matplotlib",
)  # fmt: skip


@click.command()
@click.argument("path", type=Path, default=".")
@as_json_option
def env(path: Path, as_json: bool) -> None:
    """Show versions, devices, memory and the file system, for bug reports."""
    if not path.exists():
        raise SelectionError(f"{path} does not exist; expected a folder.")
    import platform

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
        "free on the disk": format_size(shutil.disk_usage(path).free),
    }
    terminal = Terminal(as_json)
    if as_json:
        terminal.json(facts)
        return
    terminal.table(("what", "value"), [(key, str(value)) for key, value in facts.items()])


def _version(package: str) -> str:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


# It has its own parser, which works without click.
_selftest = click.Command("selftest", help=selftest.ABOUT)
for each in (
    plan, prune, copies.apply, language_models.evaluate, language_models.calibrate, inspect,
    copies.verify, copies.diff, recipe, env, _selftest,
):  # fmt: skip
    app.add_command(each)
