"""The recipes that come with distprune."""

from __future__ import annotations

from importlib import resources
from pathlib import Path


def shipped_recipes() -> dict[str, Path]:
    """Their files by name, in order."""
    folder = Path(str(resources.files("distprune.recipes") / "shipped"))
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}
