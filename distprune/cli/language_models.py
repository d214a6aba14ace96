"""``distprune eval`` and ``calibrate``, and what commands that run text through a model share."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click
from pydantic import Field

from distprune.cli import process
from distprune.cli.console import Meter, Terminal, count, counted, time_text
from distprune.cli.options import Options, command, made
from distprune.cli.process import translated
from distprune.files.errors import CheckpointError, OutputError, SelectionError, TextError
from distprune.files.text import format_size

if TYPE_CHECKING:  # torch comes with it
    import torch
    from torch import nn
    from transformers import PreTrainedTokenizerBase

    from distprune.language_models import PerplexityReport, TokenWindows


Dtype = Literal["float32", "bfloat16", "float16"]
model_argument = click.argument("model", metavar="MODEL", type=Path)


class ModelOptions(Options):
    """The options of both commands."""

    texts: tuple[Path, ...] = Field(default=(), description="Text in UTF-8. Repeat it for more.")
    length: int = Field(default=1024, ge=2, description="Tokens of a window (1024).")
    limit: int | None = Field(
        default=None, ge=1, description="Windows that are read of each text, at most (all)."
    )
    batch_size: int = Field(
        default=1, ge=1, description="Windows that each process runs at a time (1)."
    )
    dtype: Dtype | None = Field(
        default=None, description="dtype of the loaded weights (the model's)."
    )
    device: str | None = Field(
        default=None, description="cpu or cuda (an accelerator, if there is one)."
    )
    wrap: Literal["none", "ddp", "fsdp2", "tp", "fsdp2_tp", "stream"] | None = Field(
        default=None,
        description="How several processes hold the model: none, ddp, fsdp2 (the default), tp, "
        "fsdp2_tp; stream: one decoder layer at a time (eval only).",
    )
    mesh: str | None = Field(
        default=None,
        pattern="^[1-9][0-9]*x[1-9][0-9]*$",
        description="With fsdp2_tp: data-parallel and tensor-parallel processes, as in 2x4.",
    )
    tokenizer: Path | None = Field(default=None, description="Its tokenizer (that in MODEL).")
    timeout: float = Field(
        default=600.0, ge=1, description="Seconds after which a silent rank is lost (600)."
    )
    as_json: bool = Field(default=False, description="Write one JSON document to stdout.")
    quiet: bool = Field(default=False, description="Write only errors to stderr.")

    def mesh_sizes(self) -> tuple[int, ...] | None:
        """The value of ``--mesh``."""
        if (self.wrap == "fsdp2_tp") != (self.mesh is not None):
            raise SelectionError("--mesh and --wrap fsdp2_tp go together; expected both or none.")
        return None if self.mesh is None else tuple(map(int, self.mesh.split("x")))


def need_libraries(model: Path) -> None:
    """Raise a FilesError if there is no such model, or no library that runs it."""
    missing = [name for name in ("transformers", "safetensors") if not find_spec(name)]
    if missing:
        raise SelectionError(
            f"this command needs {' and '.join(missing)}: pip install "
            "'distprune[cli,language-models]'"
        )
    from distprune.files.checkpoints.locating import locate

    locate(model)


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """A tokenizer; transformers writes nothing but errors from now on."""
    from transformers.utils import logging

    from distprune import language_models

    quiet: Any = logging  # without types
    quiet.set_verbosity_error()
    quiet.disable_progress_bar()
    return language_models.load_tokenizer(folder)


def kind_of_device(asked: str | None) -> str:
    """ "cpu", or the kind of an accelerator; this rank's is the current one afterwards."""
    import torch

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    kind = asked or ("cpu" if accelerator is None else accelerator.type)
    if kind == "cpu":
        return kind
    if accelerator is None or kind != accelerator.type:
        has = "none" if accelerator is None else accelerator.type
        raise SelectionError(
            f"--device {kind}: expected cpu, or the accelerator of this machine ({has})."
        )
    place = int(os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")))
    num_devices = torch.accelerator.device_count()
    if place >= num_devices:
        raise SelectionError(
            f"--device {kind}: process {place} has none, there are {num_devices}; expected as many "
            "processes as devices, or --device cpu."
        )
    torch.accelerator.set_device_index(place)
    return kind


def dtype_named(name: str | None) -> torch.dtype | None:
    """The dtype that an option names; None without one."""
    import torch

    return None if name is None else getattr(torch, name)


def backend_of(kind: str) -> str:
    """The backends of torch.distributed for a kind of device."""
    return {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl", "xpu": "cpu:gloo,xpu:xccl"}.get(
        kind, "gloo"
    )


@dataclass
class Opened:
    """A model with its windows of text, on the ranks of a process group.

    Attributes:
        options: what was asked for.
        folder: of the model.
        model: None: it is streamed.
        windows: None without a text.
        wrap, device: how the model is wrapped, and the kind of device that it is on.
        began: time at which everything was loaded.
    """

    options: ModelOptions
    folder: Path
    terminal: Terminal
    model: nn.Module | None
    tokenizer: PreTrainedTokenizerBase
    windows: TokenWindows | None
    wrap: str
    device: str
    num_ranks: int
    began: float

    def facts(self) -> dict[str, Any]:
        """How the run went, for JSON."""
        if self.model is not None:
            dtype = next(self.model.parameters()).dtype
        else:
            from distprune import streaming

            asked = dtype_named(self.options.dtype)
            dtype = asked or streaming.computing_dtype(self.folder)
        return {
            "dtype": str(dtype).removeprefix("torch."),
            "wrap": self.wrap,
            "device": self.device,
            "num_ranks": self.num_ranks,
            "batch_size": self.options.batch_size,
            "seconds": time.monotonic() - self.began,
        }


def _text_of_run(facts: dict[str, Any]) -> str:
    return f"{time_text(facts['seconds'], facts['num_ranks'])}, {facts['dtype']}."


@contextlib.contextmanager
def opened(options: ModelOptions, folder: Path) -> Iterator[Opened]:
    """Load the model and the windows of all texts on every rank. Collective."""
    need_libraries(folder)
    mesh = options.mesh_sizes()
    terminal = Terminal(options.as_json, options.quiet)
    kind = kind_of_device(options.device)
    with process.process_group(options.timeout, backend_of(kind)):
        with translated(CheckpointError):
            from distprune import language_models
            from distprune.ranks.process_groups import world

            tokenizer = load_tokenizer(options.tokenizer or folder)
        windows = None
        if options.texts:
            with translated(TextError):
                windows = language_models.read_windows(
                    tokenizer, options.texts, options.length, limit=options.limit
                )
            terminal.note(f"{len(windows):,} windows of {windows.length} tokens.")
        num_ranks = world().size
        wrap: Any = options.wrap or ("fsdp2" if num_ranks > 1 else "none")
        if wrap not in ("none", "stream") and num_ranks == 1 and not process.is_rank():
            raise SelectionError(
                f"--wrap {wrap}: there is one process; expected torchrun, or no --wrap."
            )
        with translated(CheckpointError):
            model = (
                None
                if wrap == "stream"
                else language_models.load_sharded(
                    folder,
                    wrap=wrap,
                    mesh=mesh,
                    dtype=dtype_named(options.dtype),
                    device=kind if kind == "cpu" else None,
                )
            )
        began = time.monotonic()
        yield Opened(
            options, folder, terminal, model, tokenizer, windows, wrap, kind, num_ranks, began
        )


class EvaluationOptions(ModelOptions):
    """The options of eval."""

    generate: tuple[str, ...] = Field(
        default=(),
        description="Print how the model goes on with this text, by its likeliest tokens. Repeat "
        "it for more.",
    )


@command("eval", EvaluationOptions)
@model_argument
def evaluate(context: click.Context, model: Path) -> None:
    """Measure the perplexity of texts under a language model, before or after pruning.

    Each text is cut into windows that do not overlap; what is left at its end is dropped. If the
    tokenizer puts a bos token in front of texts, each window begins with one. Processes
    share the windows, and the numbers do not depend on how many there are (but for rounding, with
    tp). Numbers of other lengths, texts or tokenizers do not compare.

    \b
    distprune eval Llama-3.2-1B-50 --text held-out.txt
    distprune eval Llama-3.2-1B-50 --generate "The capital of France is"
    torchrun --nproc-per-node 8 -m distprune eval Llama-3-70B --text test.txt
    """
    given = made(context, EvaluationOptions)
    if not (given.texts or given.generate):
        raise SelectionError("nothing to evaluate; expected --text FILE, or --generate TEXT.")
    if given.generate and given.wrap == "stream":
        raise SelectionError(
            "--generate with --wrap stream would read the whole model for every token; expected "
            "another --wrap, or --text alone."
        )
    with opened(given, model) as run, translated(CheckpointError), Meter(run.terminal) as meter:
        from distprune.language_models.evaluating import continued

        report = None if run.windows is None else _perplexity(run, run.windows, meter)
        loaded: Any = run.model  # it is not streamed, if it goes on with texts
        generated = [
            {"text": text, "continuation": continued(loaded, run.tokenizer, text)}
            for text in given.generate
        ]
        facts = run.facts()
    if given.as_json:
        measured = {} if report is None else report.as_values()
        told = {"generated": generated} if generated else {}
        run.terminal.json({"model": str(model), **measured, **told, **facts})
        return
    if report is not None:
        _show(run.terminal, report)
        run.terminal.note(f"{count(report.total.num_tokens)} tokens in {_text_of_run(facts)}")
    for each in generated:
        run.terminal.text(each["text"] + each["continuation"])


def _perplexity(run: Opened, windows: TokenWindows, meter: Meter) -> PerplexityReport:
    given = run.options
    if run.model is not None:
        from distprune import language_models

        return language_models.perplexity(
            run.model, windows, batch_size=given.batch_size, progress=meter.windows
        )
    from distprune import streaming

    return streaming.perplexity(
        run.folder,
        windows,
        batch_size=given.batch_size,
        dtype=dtype_named(given.dtype),
        device=run.device,
        progress=meter.windows,
    )


def _show(terminal: Terminal, report: PerplexityReport) -> None:
    rows = [
        (text.text, count(text.num_windows), count(text.num_tokens), f"{text.perplexity:.4f}")
        for text in (*report.texts, *([report.total] if len(report.texts) > 1 else []))
    ]
    numbers = ("windows", "tokens", "perplexity")
    terminal.table(("text", *numbers), rows, right=numbers)


class CalibrationOptions(ModelOptions):
    """The options of calibrate."""

    samples: int | None = Field(
        default=None, ge=1, description="Take so many windows, drawn at random (all)."
    )
    seed: int = Field(default=0, description="Random seed for --samples (0).")
    include: tuple[str, ...] = Field(
        default=(),
        description="Layers whose whole name matches a glob, or an expression after re: (all but "
        "the head). Repeat it for more.",
    )
    exclude: tuple[str, ...] = Field(
        default=(), description="Leave out layers that match. Repeat it for more."
    )
    allow_empty: tuple[str, ...] = Field(
        default=(),
        description="Layers to which no token need come, such as experts. Repeat it for more.",
    )
    gradients: bool = Field(
        default=False,
        description="Statistics of gradients, for score fisher, in place of those of activations.",
    )


@command("calibrate", CalibrationOptions)
@model_argument
@click.option(
    "--out",
    metavar="FILE.safetensors",
    type=Path,
    required=True,
    help="The statistics; an existing file is replaced when everything is done.",
)
def calibrate(context: click.Context, model: Path, out: Path) -> None:
    """Run text through a language model, and write statistics of what its layers are called with.

    For each input of each linear layer, and of each of fused experts: the sums of x and of x
    squared over all its tokens, from which Wanda, RIA, STADE and OWL are made. The file has 16
    bytes per input, and full names, so that any run on any number of processes can use it.
    Processes share the windows. The head is left out, unless --include asks for it. It needs the
    extra language-models.

    With --gradients: for each output and each input, the sum of the squared gradients of its
    weights over all batches, from which score fisher is made. A backward follows each forward, and
    gradients take as much memory as the model; a batch counts by its number of windows.

    \b
    distprune calibrate MODEL --text train.txt --samples 64 --out s.safetensors
    distprune calibrate MODEL --text a.txt --out g.safetensors --gradients
    """
    given = made(context, CalibrationOptions)
    if not given.texts:
        raise SelectionError("nothing to run; expected --text FILE.")
    if not out.absolute().parent.is_dir():
        raise OutputError(f"{out}: its folder does not exist; expected one that does.")
    if given.gradients and given.allow_empty:
        raise SelectionError(
            "--allow-empty has no effect with --gradients, where any layer may have none; leave it "
            "out."
        )
    if given.wrap == "stream":
        raise SelectionError(
            "--wrap stream is for eval; `distprune prune --text` collects statistics so."
        )
    with opened(given, model) as run:
        import distprune as prune
        from distprune import language_models
        from distprune.language_models.calibrating import without_statistics

        terminal, windows = run.terminal, run.windows
        assert run.model is not None and windows is not None
        with translated(SelectionError):
            if given.samples is not None:
                windows = windows.sample(given.samples, seed=given.seed)
            layers = language_models.linear_layers(run.model, given.include or None, given.exclude)
            statistics = (
                prune.statistics.GradientStatistics(layers)
                if given.gradients
                else prune.statistics.ActivationStatistics(layers, allow_empty=given.allow_empty)
            )
        unseen = [] if given.gradients else without_statistics(run.model)
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
                "model": str(model),
                "out": str(out),
                "mode": getattr(statistics, "mode", "gradients"),
                "texts": [str(text) for text in given.texts],
                "length": given.length,
                "num_windows": len(windows),
                "num_tokens": num_tokens,
                "samples": given.samples,
                "seed": None if given.samples is None else given.seed,
                "num_layers": len(layers),
                "layers": [layer.fqn for layer in layers],
                "without_statistics": unseen,
                **facts,
            }
        )
    elif terminal.is_leader:
        terminal.text(
            f"{out}: statistics of {counted(len(layers), 'layer')} over {count(num_tokens)} "
            f"tokens in {counted(len(windows), 'window')}, {format_size(out.stat().st_size)}. "
            f"{_text_of_run(facts)}"
        )
