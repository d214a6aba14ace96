"""``distprune calibrate``: statistics of what layers are called with, or of gradients."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from distprune.cli import ranks
from distprune.cli.console import Meter, count, counted
from distprune.cli.language_models import (
    ModelOptions,
    opened,
    takes_model,
    text_of_run,
    translated,
)
from distprune.cli.options import option
from distprune.files.errors import CheckpointError, OutputError, SelectionError
from distprune.files.text import format_size

Out = Annotated[
    Path,
    option(
        "--out",
        metavar="FILE.safetensors",
        help="The statistics; an existing file is replaced when everything is done.",
    ),
]
Samples = Annotated[
    int | None,
    option(
        "--samples",
        min=1,
        help="Take so many windows, drawn at random (all that are read).",
    ),
]
Seed = Annotated[int, typer.Option("--seed", help="Of --samples.")]
Include = Annotated[
    list[str] | None,
    option(
        "--include",
        metavar="PATTERN",
        help="Linear layers and fused experts whose whole name matches a glob, or an expression "
        "after re:. Repeat it for more. Without it: all but the head.",
    ),
]
Exclude = Annotated[
    list[str] | None,
    option(
        "--exclude",
        metavar="PATTERN",
        help="Leave out layers that match. Repeat it for more.",
    ),
]
AllowEmpty = Annotated[
    list[str] | None,
    option(
        "--allow-empty",
        metavar="PATTERN",
        help="Layers to which no token need come, such as experts. Repeat it for more.",
    ),
]

Gradients = Annotated[
    bool,
    typer.Option(
        "--gradients",
        help="Statistics of the gradients of the loss, for score fisher, in place of those of "
        "activations. A batch of one process is a unit.",
    ),
]


@takes_model
def calibrate(
    context: typer.Context,
    out: Out,
    samples: Samples = None,
    seed: Seed = 0,
    include: Include = None,
    exclude: Exclude = None,
    allow_empty: AllowEmpty = None,
    gradients: Gradients = False,
    **options: Any,
) -> None:
    """Run text through a language model, and write statistics of what its layers are called with.

    For each input of each linear layer, and of each of fused experts: the sums of x and of x
    squared over all its tokens, from which Wanda, RIA, STADE and OWL are made. The file has 16
    bytes per input, and full names, so that any run on any number of processes can use it.
    Processes share the windows. The head is left out, unless --include asks for it. It needs the
    extra language-models.

    With --gradients: for each output and each input, the sum of the squared gradients of its
    weights over all batches, from which score fisher is made. A backward follows each forward, and
    gradients take as much memory as the model; a batch counts by its number of windows.

    [bold]Examples[/bold]

      distprune calibrate MODEL --text train.txt --samples 64 --out s.safetensors

      distprune calibrate MODEL --text a.txt --out stats.safetensors --nproc 4

      distprune calibrate MODEL --text a.txt --out g.safetensors --gradients
    """
    given = ModelOptions(**options)
    if not given.texts:
        raise SelectionError("nothing to run; expected --text FILE.")
    given.check()
    _check_out(out)
    if gradients and allow_empty:
        raise SelectionError(
            "--allow-empty has no effect with --gradients, where any layer may have none; leave it "
            "out."
        )
    ranks.run_on_ranks(context, given.nproc)
    if given.wrap == "stream":
        raise SelectionError(
            "--wrap stream is for eval; `distprune prune --text` collects statistics so."
        )
    with opened(given) as run:
        import distprune as prune
        from distprune import language_models
        from distprune.language_models.calibrating import without_statistics

        terminal, windows = run.terminal, run.windows
        assert run.model is not None and windows is not None
        with translated(SelectionError):
            if samples is not None:
                windows = windows.sample(samples, seed=seed)
            layers = language_models.linear_layers(run.model, include or None, exclude or ())
            statistics = (
                prune.statistics.GradientStatistics(layers)
                if gradients
                else prune.statistics.ActivationStatistics(layers, allow_empty=allow_empty or ())
            )
        unseen = [] if gradients else without_statistics(run.model)
        if unseen:
            terminal.note(
                f"Warning: no statistics of {counted(len(unseen), 'weight')} whose inputs are not "
                f"seen ({unseen[0]}{', ...' if len(unseen) > 1 else ''})."
            )
        with translated(CheckpointError), Meter(terminal) as meter:
            language_models.calibrate(
                run.model,
                windows,
                statistics,
                batch_size=given.batch_size,
                progress=meter.windows,
            )
            statistics.save(out)
        facts = run.facts()
    num_tokens = windows.tokens.numel()
    if given.as_json:
        terminal.json(
            {
                "model": str(given.model),
                "out": str(out),
                "mode": getattr(statistics, "mode", "gradients"),
                "texts": [str(text) for text in given.texts],
                "length": given.length,
                "num_windows": len(windows),
                "num_tokens": num_tokens,
                "samples": samples,
                "seed": None if samples is None else seed,
                "num_layers": len(layers),
                "layers": [layer.fqn for layer in layers],
                "without_statistics": unseen,
                **facts,
            }
        )
    elif terminal.is_leader:
        terminal.text(
            f"{out}: statistics of {counted(len(layers), 'layer')} over {count(num_tokens)} tokens "
            f"in {counted(len(windows), 'window')}, {format_size(out.stat().st_size)}. "
            f"{text_of_run(facts)}"
        )


def _check_out(out: Path) -> None:
    """Raise OutputError for a file that could not be written, before hours of work."""
    folder = out.absolute().parent
    if not folder.is_dir():
        raise OutputError(f"{out}: the folder {folder} does not exist; expected one that does.")
    if out.is_dir() or not os.access(folder, os.W_OK):
        why = "it is a folder" if out.is_dir() else f"{folder} is not writable"
        raise OutputError(f"{out} cannot be written: {why}.")
