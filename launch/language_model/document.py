"""What the script says of its result: tables, a picture, a model card."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from distprune import __version__
from distprune.files.recipe import FileRecipe
from distprune.files.reports.model_card import join_front_matter, split_front_matter, with_tags
from jobs.document import markdown_table

from .settings import Settings

Rows = list[dict[str, Any]]
Stages = dict[str, dict[str, Any]]  # perplexity by stage: "dense", "pruned", "recovered"

_OF_CHECKPOINTS = ("magnitude", "wanda", "stade")
_TAGS = ("pruned", "sparse")


def perplexity_table(stages: Stages) -> str:
    """A row per text, a column per stage; empty if nothing was measured."""
    if not stages:
        return ""
    head = ("perplexity", *stages)
    first, *_ = stages.values()
    names = [Path(text["text"]).name for text in first["texts"]]
    columns = [[t["perplexity"] for t in stage["texts"]] for stage in stages.values()]
    rows = [(name, *map(_number, values)) for name, *values in zip(names, *columns, strict=True)]
    totals = [stage["all"]["perplexity"] for stage in stages.values()]
    return markdown_table([head, *rows, ("all", *map(_number, totals))])


def sparsity_table(rows: Rows) -> str:
    """A row per parameter, and one for all."""
    table = [("parameter", "elements", "zeros", "sparsity")]
    table += [_sparsity_row(r["name"], r["num_elements"], r["num_pruned"]) for r in rows]
    totals = [sum(row[name] for row in rows) for name in ("num_elements", "num_pruned")]
    return markdown_table([*table, _sparsity_row("all", *totals)])


def draw_layers(rows: Rows, file: Path) -> None:
    """The sparsity of each parameter."""
    figure = Figure(figsize=(8, 1.5 + 0.16 * len(rows)), layout="constrained")
    axes = figure.subplots()
    places = np.arange(len(rows))
    axes.barh(places, [100 * row["sparsity"] for row in rows], color="#0b6e99")
    names = [row["name"].removeprefix("model.").removesuffix(".weight") for row in rows]
    axes.set_yticks(places, names, fontsize=6)
    axes.set(xlim=(0, 100), ylim=(len(rows) - 0.5, -0.5), xlabel="sparsity (%)")
    axes.grid(axis="x", alpha=0.25)
    figure.savefig(file, dpi=120, metadata={"Software": None})


def card(settings: Settings, stages: Stages, rows: Rows) -> str:
    """The README.md of the result: what was done, above the card of the source."""
    file = settings.model / "README.md"
    metadata, below = split_front_matter(file.read_bytes() if file.exists() else b"")
    kept = {key: value for key, value in (metadata or {}).items() if key != "model-index"}
    counts = [sum(row[name] for row in rows) for name in ("num_pruned", "num_elements")]
    text = f"""{join_front_matter(with_tags(kept, _TAGS))}
# Pruned: {_number(100 * counts[0] / counts[1])} % of the weights of {len(rows)} layers are zero

{counts[0]:,} of {counts[1]:,} weights were pruned with distprune {__version__}
(`launch/prune_language_model.py`): {_method(settings)}.
Embeddings, norms and the head are dense.
The zeros are ordinary values: the files are as large as before, and any program loads them.

{perplexity_table(stages)}

`distprune/report.json` has every setting and the sparsity of each layer.
"""
    rest = below.decode("utf-8", "replace").strip()
    if not rest:
        return text
    return f"{text}\n---\n\n*The card of the source follows as it was.*\n\n{rest}\n"


def recipe_of(settings: Settings, rows: Rows) -> str | None:
    """The recipe by which `distprune prune MODEL OUT -r recipe.yaml` prunes the same weights.

    Without patterns the same matrices are selected in files as in the model. None for what the
    command line does not know: gradients, budgets, pruning in several steps; and for experts that
    are one parameter, and many tensors in files, where it matters what is one tensor.
    """
    is_one_call = settings.schedule == "one_shot" and not settings.sequential
    is_one_call &= not settings.moves_weights
    if not is_one_call or settings.budget or settings.criterion not in _OF_CHECKPOINTS:
        return None
    if not all(row["name"].endswith(".weight") for row in rows):
        by_tensor = settings.scope == "layer" or settings.normalize is not None
        if (settings.sparsity is not None and by_tensor) or settings.include or settings.exclude:
            return None
    is_global = settings.sparsity is not None and settings.scope == "global"
    recipe = FileRecipe(
        sparsity=settings.sparsity,
        scope=settings.scope if settings.sparsity is not None else "global",
        pattern=settings.pattern,
        score=settings.criterion,
        normalize=settings.normalize if is_global else None,
        statistics=None if settings.criterion == "magnitude" else "statistics.safetensors",
        include=[row["name"] for row in rows] if settings.include or settings.exclude else None,
    )
    return recipe.to_yaml()


def _method(settings: Settings) -> str:
    words = [f"ranked by {settings.criterion}"]
    words.append(f"pattern {settings.pattern}" if settings.pattern else f"scope {settings.scope}")
    if settings.normalize:
        words.append(f"scores of each parameter divided by their {settings.normalize}")
    if settings.budget:
        words.append(f"budget {settings.budget}")
    if settings.sequential:
        words.append("block by block")
    if settings.rounds:
        words.append(f"in rounds of {', '.join(f'{s:g}' for s in settings.rounds)} before it")
    if settings.update != "none":
        words.append("kept weights moved by least squares of each layer's outputs")
    if settings.recovery_steps:
        how = "all weights" if settings.lora is None else f"LoRA of rank {settings.lora}, merged"
        words.append(f"then {settings.recovery_steps} steps of fine-tuning, {how}, zeros held")
    return "; ".join(words)


def _sparsity_row(name: str, num_elements: int, num_pruned: int) -> tuple[str, ...]:
    return name, f"{num_elements:,}", f"{num_pruned:,}", f"{num_pruned / num_elements:.2%}"


def _number(value: float) -> str:
    return f"{value:.4g}" if value < 1e5 else f"{value:.2g}"
