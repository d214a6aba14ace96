"""The job's pictures."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure

from .comparison import Comparison
from .results import Results
from .settings import Settings

COLOURS = {"magnitude": "#0b6e99", "random": "#c8553d"}


def draw_loss(results: Results, file: Path) -> None:
    """Held-out loss over sparsity for each method, just after pruning and after fine-tuning."""
    figure = Figure(figsize=(7.5, 5), layout="constrained")
    axes = figure.subplots()
    percents = [0.0, *(100 * step.sparsity for step in results.of("magnitude"))]
    for method, colour in COLOURS.items():
        steps = results.of(method)
        pruned = [results.loss_dense, *(step.loss_pruned for step in steps)]
        finetuned = [results.loss_dense, *(step.loss_finetuned for step in steps)]
        label = f"{method}, just after pruning"
        axes.plot(percents, pruned, "o--", color=colour, markerfacecolor="white", label=label)
        axes.plot(percents, finetuned, "o-", color=colour, label=f"{method}, after fine-tuning")
    dense = [results.loss_dense, *results.losses_trained_on]
    label = "dense, trained as many steps"
    axes.plot(percents, dense, "s:", color="0.4", markersize=4, label=label)
    axes.set_xticks(percents)
    axes.set(xlabel="sparsity of the pruned parameters (%)", ylabel="held-out loss (nats per byte)")
    axes.set_title("Pruning in steps, fine-tuning between")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    figure.savefig(file, dpi=150)


def draw_layers(results: Results, file: Path) -> None:
    """The sparsity that global magnitude pruning gave each parameter, one colour per step."""
    steps = results.of("magnitude")
    names = [entry.name for entry in steps[0].report.parameters]
    rows = range(len(names))
    figure = Figure(figsize=(8, 1.8 + 0.22 * len(names)), layout="constrained")
    axes = figure.subplots()
    shades = colormaps["viridis"](np.linspace(0.85, 0.1, len(steps)))  # darker is sparser
    for step, colour in zip(steps, shades, strict=True):
        percents = [100 * entry.sparsity for entry in step.report.parameters]
        axes.axvline(100 * step.sparsity, color=colour, linewidth=1, linestyle=":")
        axes.plot(percents, rows, "o", color=colour, label=f"{step.percent} % of all elements")
    axes.set_yticks(rows, [_short(name) for name in names])
    axes.invert_yaxis()  # the model's input at the top
    axes.set(xlim=(0, 100), xlabel="sparsity of the parameter (%)")
    axes.set_title("Where global magnitude pruning prunes")
    axes.grid(alpha=0.25)
    figure.legend(loc="outside lower center", ncols=len(steps), frameon=False)
    figure.savefig(file, dpi=150)


def draw_comparison(comparison: Comparison, settings: Settings, file: Path) -> None:
    """What pruning costs before any fine-tuning: a panel per sparsity, a row per criterion."""
    sparsities, criteria = settings.sparsities, settings.criteria
    figure = Figure(figsize=(4 * len(sparsities), 2 + 0.32 * len(criteria)), layout="constrained")
    panels = figure.subplots(1, len(sparsities), sharex=True, sharey=True, squeeze=False)[0]
    colours = colormaps["viridis"](np.linspace(0, 0.9, len(settings.scopes)))
    rows = np.arange(len(criteria))
    for axes, sparsity in zip(panels, sparsities, strict=True):
        for scope, colour in zip(settings.scopes, colours, strict=True):
            cells = [comparison.cell(name, scope, sparsity) for name in criteria]
            costs = [np.nan if c is None else c.loss_pruned - comparison.loss_dense for c in cells]
            # A logarithm needs a smallest cost; pruning may even lower the loss a little.
            axes.plot(np.maximum(costs, 1e-3), rows, "o", color=colour, alpha=0.8, label=scope)
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter("")
        axes.set_title(f"{100 * sparsity:g} % pruned")
        axes.set_xlabel("held-out loss, minus that of the dense\nmodel (nats per byte)")
        axes.grid(alpha=0.25)
    panels[0].set_yticks(rows, criteria)
    panels[0].invert_yaxis()  # in the order of the table
    handles, labels = panels[0].get_legend_handles_labels()
    num_columns = 2 * len(sparsities)
    figure.legend(handles, labels, loc="outside lower center", ncols=num_columns, frameon=False)
    figure.savefig(file, dpi=150)


def _short(name: str) -> str:
    """Without the words that every parameter's name shares."""
    return name.removeprefix("model.").removesuffix(".weight")
