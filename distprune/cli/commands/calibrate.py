"""``distprune calibrate``: text through a model, for the statistics that Wanda needs."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated

import typer

from distprune.cli import model_options, ranks, starting
from distprune.cli.console import Terminal, count, counted
from distprune.cli.options import AsJson, Nproc, Quiet, Timeout
from distprune.cli.progress import Meter
from distprune.files.errors import CheckpointError, OutputError, SelectionError
from distprune.files.text import format_size

Out = Annotated[
    Path,
    typer.Option(
        "--out",
        metavar="FILE.safetensors",
        help="The statistics; an existing file is replaced when everything is done.",
        show_default=False,
    ),
]
Samples = Annotated[
    int | None,
    typer.Option(
        "--samples",
        min=1,
        help="Take so many windows, drawn at random (all that are read).",
        show_default=False,
    ),
]
Seed = Annotated[int, typer.Option("--seed", help="Of --samples.")]
Include = Annotated[
    list[str] | None,
    typer.Option(
        "--include",
        metavar="PATTERN",
        help="Linear layers and fused experts whose whole name matches a glob, or an expression "
        "after re:. Repeat it for more. Without it: all but the head.",
        show_default=False,
    ),
]
Exclude = Annotated[
    list[str] | None,
    typer.Option(
        "--exclude",
        metavar="PATTERN",
        help="Leave out layers that match. Repeat it for more.",
        show_default=False,
    ),
]
AllowEmpty = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-empty",
        metavar="PATTERN",
        help="Layers to which no token need come, such as experts. Repeat it for more.",
        show_default=False,
    ),
]


def calibrate(
    context: typer.Context,
    model: model_options.Model,
    texts: model_options.Texts,
    out: Out,
    length: model_options.Length = 1024,
    limit: model_options.Limit = None,
    samples: Samples = None,
    seed: Seed = 0,
    batch_size: model_options.BatchSize = 1,
    include: Include = None,
    exclude: Exclude = None,
    allow_empty: AllowEmpty = None,
    dtype: model_options.Dtype = None,
    device: model_options.Device = None,
    wrap: model_options.WrapName = None,
    mesh: model_options.Mesh = None,
    tokenizer: model_options.Tokenizer = None,
    nproc: Nproc = None,
    timeout: Timeout = 600.0,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Run text through a language model, and write statistics of what its layers are called with.

    For each input of each linear layer, and of each of fused experts: the sums of x and of x
    squared over all its tokens, from which Wanda, RIA, STADE and OWL are made. The file has 16
    bytes per input, and full names, so that any run on any number of processes can use it.
    Processes share the windows. The head is left out, unless --include asks for it. It needs the
    extra language-models.

    [bold]Examples[/bold]

      distprune calibrate MODEL --text train.txt --samples 64 --out s.safetensors

      distprune calibrate MODEL --text a.txt --out stats.safetensors --nproc 4
    """
    options = model_options.ModelOptions(
        model, texts, length, limit, dtype, device, wrap, mesh, tokenizer
    )
    options.check()
    _check_out(out)
    starting.run_on_ranks(context, nproc)
    terminal = Terminal(as_json, -1 if quiet else 0, is_leader=ranks.is_leader())
    kind = options.kind_of_device()
    with ranks.process_group(timeout, model_options.backend_of(kind)):
        loaded, windows, used_wrap = model_options.opened(terminal, options, kind)
        import distprune as prune
        from distprune import language_models
        from distprune._common.process_groups import world
        from distprune.language_models.calibrating import without_statistics

        num_ranks, began = world().size, time.monotonic()
        with model_options.translated(SelectionError):
            if samples is not None:
                windows = windows.sample(samples, seed=seed)
            layers = language_models.linear_layers(loaded, include or None, exclude or ())
            statistics = prune.statistics.ActivationStatistics(
                layers, allow_empty=allow_empty or ()
            )
        if unseen := without_statistics(loaded):
            terminal.note(
                f"Warning: no statistics of {counted(len(unseen), 'weight')} whose inputs are not "
                f"seen ({unseen[0]}{', ...' if len(unseen) > 1 else ''})."
            )
        with model_options.translated(CheckpointError), Meter(terminal) as meter:
            language_models.calibrate(
                loaded, windows, statistics, batch_size=batch_size, progress=meter.windows
            )
            statistics.save(out)
        seconds = time.monotonic() - began
        dtype_used = str(next(loaded.parameters()).dtype).removeprefix("torch.")
    num_tokens = windows.tokens.numel()
    if as_json:
        terminal.json(
            {
                "model": str(model),
                "out": str(out),
                "mode": statistics.mode,
                "texts": [str(text) for text in texts],
                "length": length,
                "num_windows": len(windows),
                "num_tokens": num_tokens,
                "samples": samples,
                "seed": None if samples is None else seed,
                "num_layers": len(layers),
                "layers": [layer.fqn for layer in layers],
                "without_statistics": unseen,
                "dtype": dtype_used,
                "wrap": used_wrap,
                "device": kind,
                "num_ranks": num_ranks,
                "batch_size": batch_size,
                "seconds": seconds,
            }
        )
        return
    if terminal.is_leader:
        terminal.text(
            f"{out}: statistics of {counted(len(layers), 'layer')} over {count(num_tokens)} tokens "
            f"in {counted(len(windows), 'window')}, {format_size(out.stat().st_size)}. "
            f"{seconds:.1f} s on {num_ranks} {'process' if num_ranks == 1 else 'processes'}, "
            f"{dtype_used}."
        )


def _check_out(out: Path) -> None:
    """Raise OutputError for a file that could not be written, before hours of work."""
    folder = out.absolute().parent
    if not folder.is_dir():
        raise OutputError(f"{out}: the folder {folder} does not exist; expected one that does.")
    if out.is_dir() or not os.access(folder, os.W_OK):
        why = "it is a folder" if out.is_dir() else f"{folder} is not writable"
        raise OutputError(f"{out} cannot be written: {why}.")
