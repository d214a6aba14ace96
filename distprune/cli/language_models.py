"""``distprune eval`` and ``calibrate``: text through a language model."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from distprune.cli import process, ranks
from distprune.cli.console import Meter, Terminal, count, counted
from distprune.cli.options import AsJson, Nproc, Quiet, Timeout
from distprune.files.errors import (
    CheckpointError,
    FilesError,
    OutputError,
    RanksError,
    SelectionError,
    TextError,
    explained,
)
from distprune.files.text import format_size

if TYPE_CHECKING:  # torch comes with it
    from torch import nn

    from distprune.language_models import PerplexityReport, TokenWindows


_DTYPES = ("float32", "bfloat16", "float16")
_WRAPS = ("none", "ddp", "fsdp2", "tp", "fsdp2_tp")
_DIFFERENT = "the ranks were called with different arguments"

Model = Annotated[
    Path,
    typer.Argument(
        metavar="MODEL",
        help="A folder with a language model as transformers saves it, or the name of a model that "
        "is in the local Hugging Face cache (org/name).",
        show_default=False,
    ),
]
Texts = Annotated[
    list[Path],
    typer.Option(
        "--text", metavar="FILE", help="Text in UTF-8. Repeat it for more.", show_default=False
    ),
]
Length = Annotated[int, typer.Option("--length", min=2, help="Tokens of a window.")]
Limit = Annotated[
    int | None,
    typer.Option(
        "--limit", min=1, help="Windows that are read of each text, at most.", show_default=False
    ),
]
BatchSize = Annotated[
    int, typer.Option("--batch-size", min=1, help="Windows that each process runs at a time.")
]
Dtype = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        metavar="|".join(_DTYPES),
        help="Of the weights in memory (that of the model).",
        show_default=False,
    ),
]
Device = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="cpu|cuda",
        help="Where it runs (an accelerator, if there is one).",
        show_default=False,
    ),
]
WrapName = Annotated[
    str | None,
    typer.Option(
        "--wrap",
        metavar="WRAP",
        help=f"How several processes hold the model: {', '.join(_WRAPS)} (fsdp2, so that none "
        "holds all of it).",
        show_default=False,
    ),
]
Mesh = Annotated[
    str | None,
    typer.Option(
        "--mesh",
        metavar="DPxTP",
        help="With fsdp2_tp: data-parallel and tensor-parallel processes, as in 2x4.",
        show_default=False,
    ),
]
Tokenizer = Annotated[
    Path | None,
    typer.Option(
        "--tokenizer", metavar="FOLDER", help="Its tokenizer (that in MODEL).", show_default=False
    ),
]


@dataclass(frozen=True)
class ModelOptions:
    """The options that :func:`opened` needs."""

    model: Path
    texts: list[Path]
    length: int
    limit: int | None
    dtype: str | None
    device: str | None
    wrap: str | None
    mesh: str | None
    tokenizer: Path | None

    def check(self) -> None:
        """Check what needs no torch."""
        missing = [
            name for name in ("transformers", "safetensors") if not importlib.util.find_spec(name)
        ]
        if missing:
            raise SelectionError(
                f"this command needs {' and '.join(missing)}: pip install "
                "'distprune[cli,language-models]'"
            )
        for name, value, allowed in [
            ("--dtype", self.dtype, _DTYPES),
            ("--wrap", self.wrap, _WRAPS),
        ]:
            if value is not None and value not in allowed:
                raise SelectionError(f"{name} {value}: expected {', '.join(allowed)}.")
        if (self.wrap == "fsdp2_tp") != (self.mesh is not None):
            raise SelectionError("--mesh and --wrap fsdp2_tp go together; expected both or none.")
        self.mesh_sizes()
        from distprune.files.checkpoints.locating import locate

        locate(self.model)
        for text in self.texts:
            try:
                text.open("rb").close()
            except OSError as error:
                raise TextError(f"{text} cannot be read: {error.strerror or error}.") from error

    def mesh_sizes(self) -> tuple[int, ...] | None:
        """The value of ``--mesh``."""
        if self.mesh is None:
            return None
        sizes = self.mesh.split("x")
        if len(sizes) != 2 or not all(size.isdecimal() and int(size) for size in sizes):
            raise SelectionError(f"--mesh {self.mesh}: expected DPxTP, such as 2x4.")
        return tuple(map(int, sizes))

    def kind_of_device(self) -> str:
        """ "cpu", or the kind of an accelerator; this rank's is the current one afterwards."""
        import torch

        found = torch.accelerator.current_accelerator(check_available=True)
        kind = self.device or ("cpu" if found is None else found.type)
        if kind == "cpu":
            return kind
        if found is None or kind != found.type:
            has = "none" if found is None else found.type
            raise SelectionError(
                f"--device {kind}: expected cpu, or the accelerator of this machine ({has})."
            )
        place = int(os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")))
        count = torch.accelerator.device_count()
        if place >= count:
            raise SelectionError(
                f"--device {kind}: process {place} has none, there are {count}; expected as many "
                "processes as devices, or --device cpu."
            )
        torch.accelerator.set_device_index(place)
        return kind


def backend_of(kind: str) -> str:
    """The backends of torch.distributed for a kind of device."""
    return {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl", "xpu": "cpu:gloo,xpu:xccl"}.get(
        kind, "gloo"
    )


def opened(
    terminal: Terminal, options: ModelOptions, kind: str
) -> tuple[nn.Module, TokenWindows, str]:
    """The model, the windows of all texts, and how the model is wrapped. Collective."""
    with translated(CheckpointError):
        import torch
        from transformers.utils import logging

        from distprune import language_models

        quiet: Any = logging  # without types
        quiet.set_verbosity_error()
        quiet.disable_progress_bar()
        tokenizer = language_models.load_tokenizer(options.tokenizer or options.model)
    with translated(TextError):
        windows = language_models.read_windows(
            tokenizer, options.texts, options.length, limit=options.limit
        )
    terminal.note(f"{len(windows):,} windows of {windows.length} tokens.")
    num_ranks = int(os.environ.get("WORLD_SIZE", "1")) if process.is_rank() else 1
    wrap: Any = options.wrap or ("fsdp2" if num_ranks > 1 else "none")
    if wrap != "none" and num_ranks == 1 and not process.is_rank():
        raise SelectionError(
            f"--wrap {wrap}: there is one process; expected --nproc or torchrun, or no --wrap."
        )
    with translated(CheckpointError):
        model = language_models.load_sharded(
            options.model,
            wrap=wrap,
            mesh=options.mesh_sizes(),
            dtype=None if options.dtype is None else getattr(torch, options.dtype),
            device=kind if kind == "cpu" else None,
            ignore_unexpected=True,
        )
    return model, windows, wrap


@contextlib.contextmanager
def translated(kind: type[FilesError]) -> Iterator[None]:
    """Give errors of the library, which are Python's, the exit codes of the command line."""
    try:
        yield
    except FilesError:
        raise
    except (ValueError, NotImplementedError) as error:
        if _DIFFERENT in str(error):
            raise RanksError(str(error)) from error
        raise kind(str(error)) from error
    except ImportError as error:
        raise SelectionError(str(error)) from error
    except RuntimeError as error:
        if process.is_rank() and explained(error) is None:
            raise RanksError(
                f"a rank failed, was lost, or did not answer in time ({error})."
            ) from error
        raise


def evaluate(
    context: typer.Context,
    model: Model,
    texts: Texts,
    length: Length = 1024,
    limit: Limit = None,
    batch_size: BatchSize = 1,
    dtype: Dtype = None,
    device: Device = None,
    wrap: WrapName = None,
    mesh: Mesh = None,
    tokenizer: Tokenizer = None,
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
    options = ModelOptions(model, texts, length, limit, dtype, device, wrap, mesh, tokenizer)
    options.check()
    ranks.run_on_ranks(context, nproc)
    terminal = Terminal(as_json, -1 if quiet else 0, is_leader=process.is_leader())
    kind = options.kind_of_device()
    with ranks.process_group(timeout, backend_of(kind)):
        loaded, windows, used_wrap = opened(terminal, options, kind)
        from distprune._common.process_groups import world
        from distprune.language_models import perplexity

        num_ranks, began = world().size, time.monotonic()
        with translated(CheckpointError), Meter(terminal) as meter:
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
    model: Model,
    texts: Texts,
    out: Out,
    length: Length = 1024,
    limit: Limit = None,
    samples: Samples = None,
    seed: Seed = 0,
    batch_size: BatchSize = 1,
    include: Include = None,
    exclude: Exclude = None,
    allow_empty: AllowEmpty = None,
    dtype: Dtype = None,
    device: Device = None,
    wrap: WrapName = None,
    mesh: Mesh = None,
    tokenizer: Tokenizer = None,
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
    options = ModelOptions(model, texts, length, limit, dtype, device, wrap, mesh, tokenizer)
    options.check()
    _check_out(out)
    ranks.run_on_ranks(context, nproc)
    terminal = Terminal(as_json, -1 if quiet else 0, is_leader=process.is_leader())
    kind = options.kind_of_device()
    with ranks.process_group(timeout, backend_of(kind)):
        loaded, windows, used_wrap = opened(terminal, options, kind)
        import distprune as prune
        from distprune import language_models
        from distprune._common.process_groups import world
        from distprune.language_models.calibrating import without_statistics

        num_ranks, began = world().size, time.monotonic()
        with translated(SelectionError):
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
        with translated(CheckpointError), Meter(terminal) as meter:
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
