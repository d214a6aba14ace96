"""All commands, and those on distprune itself: ``recipe``, ``env`` and ``selftest``."""

from __future__ import annotations

import os
import shutil
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import click

import distprune
from distprune.cli import copies, language_models
from distprune.cli.console import Terminal
from distprune.cli.inspect import inspect
from distprune.cli.options import Options, command, complete
from distprune.cli.process import SELFTEST, translated
from distprune.cli.prune import plan, prune
from distprune.files.errors import SelectionError, format_size
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


@app.group(cls=_Commands)
def recipe() -> None:
    """List, show and describe recipes: what to prune, and how much, as a file."""


@recipe.command()
def ls() -> None:
    """List the recipes that `-r NAME` knows."""
    rows = [
        (name, path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# "))
        for name, path in shipped_recipes().items()  # each begins with a comment
    ]
    Terminal().table(("recipe", "what it does"), rows)


@recipe.command()
@click.argument("name", shell_complete=complete)
def show(name: str) -> None:
    """Check a recipe and print it with every default: `recipe show layer_50 > my.yaml`."""
    with translated(SelectionError):
        chosen = load_recipe(name)
    for line in chosen.to_yaml().splitlines():
        Terminal().text(line)


@recipe.command()
def schema() -> None:
    """Print the JSON schema of a recipe, for editors that complete and check YAML."""
    Terminal().json(Recipe.model_json_schema())


_PACKAGES = (
    "torch", "numpy", "safetensors", "transformers", "accelerate", "click", "rich",
    "PyYAML", "pydantic", "matplotlib",
)  # fmt: skip


@command("env", Options, "[PATH]")
def env(given: Options, path: Path | None) -> None:
    """Show versions, devices, memory and the file system, for bug reports."""
    import platform

    import torch
    import torch.distributed as dist

    accelerator = torch.accelerator.current_accelerator()
    kind = "none" if accelerator is None else f"{torch.accelerator.device_count()} x {accelerator}"
    names = ("gloo", "nccl", "mpi", "ucc", "xccl") if dist.is_available() else ()
    facts: dict[str, Any] = {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "distprune": distprune.__version__,  # the one that runs, installed or not
        **{package: _version(package) for package in _PACKAGES},
        "accelerator": kind,
        "distributed backends": ", ".join(filter(dist.is_backend_available, names)) or "none",
        "memory": format_size(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")),
        "free on the disk": format_size(shutil.disk_usage(path or Path()).free),
    }
    if given.as_json:
        given.terminal().json(facts)
    else:
        given.terminal().table(("what", "value"), [(k, str(v)) for k, v in facts.items()])


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


# It has its own parser, which works without click.
_selftest = click.Command("selftest", help=SELFTEST)
_ALL = (
    plan, prune, language_models.shrink, copies.apply, language_models.evaluate,
    language_models.calibrate, language_models.write_text, inspect, copies.verify,
    copies.diff, recipe, env, _selftest,
)  # fmt: skip
app.commands = {str(each.name): each for each in _ALL}
