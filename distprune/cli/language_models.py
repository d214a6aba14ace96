"""``distprune eval`` and ``calibrate``, and what commands that run text through a model share."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import time
from collections.abc import Iterator
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from distprune.cli import process
from distprune.cli.console import Meter, Terminal, count, counted, time_text
from distprune.cli.options import (
    AsJson,
    OutputOptions,
    Timeout,
    argument,
    option,
    same_option,
    takes_options,
)
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
    import torch
    from torch import nn
    from transformers import PreTrainedTokenizerBase

    from distprune.language_models import PerplexityReport, TokenWindows


_DTYPES = ("float32", "bfloat16", "float16")
_WRAPS = ("none", "ddp", "fsdp2", "tp", "fsdp2_tp", "stream")


@dataclass(frozen=True)
class ModelOptions:
    """The options of both commands."""

    model: Annotated[
        Path,
        argument(
            "MODEL",
            "A folder with a language model as transformers saves it, or the name of a model that "
            "is in the local Hugging Face cache (org/name).",
        ),
    ]
    texts: list[Path] | None = option("Text in UTF-8. Repeat it for more.", metavar="FILE")
    length: int = option("Tokens of a window.", 1024, min=2)
    limit: int | None = option("Windows that are read of each text, at most.", min=1)
    batch_size: int = option("Windows that each process runs at a time.", 1, min=1)
    dtype: str | None = option(
        "Of the weights in memory (that of the model).", metavar="|".join(_DTYPES)
    )
    device: str | None = option(
        "Where it runs (an accelerator, if there is one).", metavar="cpu|cuda"
    )
    wrap: str | None = option(
        f"How several processes hold the model: {', '.join(_WRAPS)} (fsdp2, so that none "
        "holds all of it). With stream each has one decoder layer at a time (eval only).",
        metavar="WRAP",
    )
    mesh: str | None = option(
        "With fsdp2_tp: data-parallel and tensor-parallel processes, as in 2x4.", metavar="DPxTP"
    )
    tokenizer: Path | None = option("Its tokenizer (that in MODEL).", metavar="FOLDER")
    timeout: Timeout = 600.0
    as_json: AsJson = False
    quiet: bool = same_option(OutputOptions, "quiet")

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

    def mesh_sizes(self) -> tuple[int, ...] | None:
        """The value of ``--mesh``."""
        if self.mesh is None:
            return None
        sizes = self.mesh.split("x")
        if len(sizes) != 2 or not all(size.isdecimal() and int(size) for size in sizes):
            raise SelectionError(f"--mesh {self.mesh}: expected DPxTP, such as 2x4.")
        return tuple(map(int, sizes))

    def load_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer; transformers says nothing but errors from now on."""
        from transformers.utils import logging

        from distprune import language_models

        quiet: Any = logging  # without types
        quiet.set_verbosity_error()
        quiet.disable_progress_bar()
        return language_models.load_tokenizer(self.tokenizer or self.model)

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
        model: None: it is streamed.
        windows: None without a text.
        wrap, device: how the model is wrapped, and the kind of device that it is on.
        began: time at which everything was loaded.
    """

    options: ModelOptions
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
            dtype = asked or streaming.computing_dtype(self.options.model)
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
def opened(options: ModelOptions) -> Iterator[Opened]:
    """Load the model and the windows of all texts on every rank. Collective."""
    terminal = Terminal(options.as_json, -1 if options.quiet else 0, is_leader=process.is_leader())
    kind = options.kind_of_device()
    with process.process_group(options.timeout, backend_of(kind)):
        with translated(CheckpointError):
            from distprune import language_models
            from distprune.ranks.process_groups import world

            tokenizer = options.load_tokenizer()
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
                    options.model,
                    wrap=wrap,
                    mesh=options.mesh_sizes(),
                    dtype=dtype_named(options.dtype),
                    device=kind if kind == "cpu" else None,
                )
            )
        began = time.monotonic()
        yield Opened(options, terminal, model, tokenizer, windows, wrap, kind, num_ranks, began)


@contextlib.contextmanager
def translated(kind: type[FilesError]) -> Iterator[None]:
    """Give errors of the library, which are Python's, the exit codes of the command line."""
    try:
        yield
    except FilesError:
        raise
    except (ValueError, NotImplementedError) as error:
        raise kind(str(error)) from error
    except ImportError as error:
        raise SelectionError(str(error)) from error
    except RuntimeError as error:
        if process.is_rank() and explained(error) is None:
            raise RanksError(
                f"a rank failed, was lost, or did not answer in time ({error})."
            ) from error
        raise


@takes_options
def evaluate(
    given: ModelOptions,
    generate: Annotated[
        list[str] | None,
        typer.Option(
            "--generate",
            metavar="TEXT",
            help="Print how the model goes on with this text, by its likeliest tokens. Repeat it "
            "for more.",
        ),
    ] = None,
) -> None:
    """Measure the perplexity of texts under a language model, before or after pruning.

    Each text is cut into windows that do not overlap; what is left at its end is dropped. If the
    tokenizer puts a bos token in front of texts, each window begins with one. Processes
    share the windows, and the numbers do not depend on how many there are (but for rounding, with
    tp). Numbers of other lengths, texts or tokenizers do not compare. With --generate, with or
    without texts, the model goes on with a sentence. It needs the extra language-models.

    [bold]Examples[/bold]

      distprune eval Llama-3.2-1B-50 --text held-out.txt

      distprune eval Llama-3.2-1B-50 --generate "The capital of France is"

      distprune eval Llama-3.2-1B --text a.txt --text b.txt --limit 100 --json

      torchrun --nproc-per-node 8 -m distprune eval Llama-3-70B --text test.txt

      distprune eval Llama-3-70B --text test.txt --wrap stream
    """
    if not (given.texts or generate):
        raise SelectionError("nothing to evaluate; expected --text FILE, or --generate TEXT.")
    if generate and given.wrap == "stream":
        raise SelectionError(
            "--generate with --wrap stream would read the whole model for every token; expected "
            "another --wrap, or --text alone."
        )
    given.check()
    with opened(given) as run, translated(CheckpointError), Meter(run.terminal) as meter:
        from distprune.language_models.evaluating import continued

        report = None if run.windows is None else _perplexity(run, run.windows, meter)
        model: Any = run.model  # it is not streamed, if there are texts
        generated = [
            {"text": text, "continuation": continued(model, run.tokenizer, text)}
            for text in generate or []
        ]
        facts = run.facts()
    if given.as_json:
        measured = {} if report is None else report.as_values()
        told = {"generated": generated} if generate else {}
        run.terminal.json({"model": str(given.model), **measured, **told, **facts})
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
        given.model,
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


@dataclass(frozen=True)
class CalibrationOptions:
    """The options of calibrate alone."""

    out: Path = option(
        "The statistics; an existing file is replaced when everything is done.",
        MISSING,
        metavar="FILE.safetensors",
        show_default=False,
    )
    samples: int | None = option(
        "Take so many windows, drawn at random (all that are read).", min=1
    )
    seed: int = option("Of --samples.", 0)
    include: list[str] | None = option(
        "Linear layers and fused experts whose whole name matches a glob, or an "
        "expression after re:. Repeat it for more. Without it: all but the head.",
        metavar="PATTERN",
    )
    exclude: list[str] | None = option(
        "Leave out layers that match. Repeat it for more.", metavar="PATTERN"
    )
    allow_empty: list[str] | None = option(
        "Layers to which no token need come, such as experts. Repeat it for more.",
        metavar="PATTERN",
    )
    gradients: bool = option(
        "Statistics of the gradients of the loss, for score fisher, in place of those of "
        "activations. A batch of one process is a unit.",
        False,
    )


@takes_options
def calibrate(
    given: ModelOptions,
    own: CalibrationOptions,
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

      distprune calibrate MODEL --text a.txt --out g.safetensors --gradients
    """
    if not given.texts:
        raise SelectionError("nothing to run; expected --text FILE.")
    given.check()
    if not own.out.absolute().parent.is_dir():
        raise OutputError(f"{own.out}: its folder does not exist; expected one that does.")
    if own.gradients and own.allow_empty:
        raise SelectionError(
            "--allow-empty has no effect with --gradients, where any layer may have none; leave it "
            "out."
        )
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
            if own.samples is not None:
                windows = windows.sample(own.samples, seed=own.seed)
            layers = language_models.linear_layers(
                run.model, own.include or None, own.exclude or ()
            )
            statistics = (
                prune.statistics.GradientStatistics(layers)
                if own.gradients
                else prune.statistics.ActivationStatistics(
                    layers, allow_empty=own.allow_empty or ()
                )
            )
        unseen = [] if own.gradients else without_statistics(run.model)
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
            statistics.save(own.out)
        facts = run.facts()
    num_tokens = windows.tokens.numel()
    if given.as_json:
        terminal.json(
            {
                "model": str(given.model),
                "out": str(own.out),
                "mode": getattr(statistics, "mode", "gradients"),
                "texts": [str(text) for text in given.texts],
                "length": given.length,
                "num_windows": len(windows),
                "num_tokens": num_tokens,
                "samples": own.samples,
                "seed": None if own.samples is None else own.seed,
                "num_layers": len(layers),
                "layers": [layer.fqn for layer in layers],
                "without_statistics": unseen,
                **facts,
            }
        )
    elif terminal.is_leader:
        terminal.text(
            f"{own.out}: statistics of {counted(len(layers), 'layer')} over {count(num_tokens)} "
            f"tokens in {counted(len(windows), 'window')}, {format_size(own.out.stat().st_size)}. "
            f"{_text_of_run(facts)}"
        )
