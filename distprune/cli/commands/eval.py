"""``distprune eval``: the perplexity of texts under a model in a folder."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import typer

from distprune.cli import model_options, ranks, starting
from distprune.cli.console import Terminal, count
from distprune.cli.options import AsJson, Nproc, Quiet, Timeout
from distprune.cli.progress import Meter
from distprune.files.errors import CheckpointError

if TYPE_CHECKING:
    from distprune.language_models import PerplexityReport


def evaluate(
    context: typer.Context,
    model: model_options.Model,
    texts: model_options.Texts,
    length: model_options.Length = 1024,
    limit: model_options.Limit = None,
    batch_size: model_options.BatchSize = 1,
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
    """Measure the perplexity of texts under a language model, before or after pruning.

    Each text is cut into windows that do not overlap; what is left at its end is dropped. If the
    tokenizer puts a bos token in front of texts, each window begins with one. Bits per byte
    compare models with different tokenizers. Processes share the windows, and the numbers do not
    depend on how many there are (but for rounding, with tp). Numbers of other lengths or texts do
    not compare. It needs the extra language-models.

    [bold]Examples[/bold]

      distprune eval Llama-3.2-1B-50 --text held-out.txt

      distprune eval Llama-3.2-1B --text a.txt --text b.txt --limit 100 --json

      torchrun --nproc-per-node 8 -m distprune eval Llama-3-70B --text test.txt
    """
    options = model_options.ModelOptions(
        model, texts, length, limit, dtype, device, wrap, mesh, tokenizer
    )
    options.check()
    starting.run_on_ranks(context, nproc)
    terminal = Terminal(as_json, -1 if quiet else 0, is_leader=ranks.is_leader())
    kind = options.kind_of_device()
    with ranks.process_group(timeout, model_options.backend_of(kind)):
        loaded, windows, used_wrap = model_options.opened(terminal, options, kind)
        from distprune._common.process_groups import world
        from distprune.language_models import perplexity

        num_ranks, began = world().size, time.monotonic()
        with model_options.translated(CheckpointError), Meter(terminal) as meter:
            report = perplexity(loaded, windows, batch_size=batch_size, progress=meter.windows)
        seconds = time.monotonic() - began
        dtype_used = str(next(loaded.parameters()).dtype).removeprefix("torch.")
    if as_json:
        terminal.json(
            {
                "model": str(model),
                **report.as_values(),
                "dtype": dtype_used,
                "device": kind,
                "wrap": used_wrap,
                "num_ranks": num_ranks,
                "batch_size": batch_size,
                "seconds": seconds,
            }
        )
        return
    _show(terminal, report)
    terminal.note(
        f"{count(report.total.num_tokens)} tokens in {seconds:.1f} s on {num_ranks} "
        f"{'process' if num_ranks == 1 else 'processes'}, {dtype_used}."
    )


def _show(terminal: Terminal, report: PerplexityReport) -> None:
    rows = []
    for text in (*report.texts, *([report.total] if len(report.texts) > 1 else [])):
        bits = text.bits_per_byte
        rows.append(
            (
                text.text,
                count(text.num_windows),
                count(text.num_tokens),
                f"{text.perplexity:.4f}",
                "-" if bits is None else f"{bits:.4f}",
            )
        )
    numbers = ("windows", "tokens", "perplexity", "bits/byte")
    terminal.table(("text", *numbers), rows, right=numbers)
