"""``distprune eval``, ``calibrate``, ``write-text``, ``shrink``; what such commands share."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from distprune.cli.console import Meter, Terminal, counted, discard_unfinished, time_text
from distprune.cli.options import Options, RanksOptions, command
from distprune.files.checkpoint import open_checkpoint
from distprune.files.disk import write_atomically
from distprune.files.errors import (
    CheckpointError,
    OutputError,
    SelectionError,
    TextError,
    format_size,
    translated,
)

if TYPE_CHECKING:  # torch comes with it
    import torch
    from torch import nn

    from distprune.language_models import TokenWindows

    # From texts, and how many windows of each are read, to these.
    ReadWindows = Callable[[Sequence[Path], int | None], TokenWindows]


class RunOptions(Options):
    """The options of all commands that run a model."""

    length: int | None = Field(
        None, ge=2, description="Tokens of a window (1024, or all that the model can have)."
    )
    batch_size: int = Field(1, ge=1, description="Windows at a time of each process (1).")
    dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        None, description="dtype of the loaded weights (the model's)."
    )
    device: str | None = Field(None, description="cpu or cuda (an accelerator, if any).")
    tokenizer: Path | None = Field(None, description="Its tokenizer (that of the model).")

    def length_for(self, model: Path) -> int:
        """The value of ``--length``, or its default."""
        if self.length is not None:
            return self.length
        config = open_checkpoint(model).config
        positions = config.get("text_config", config).get("max_position_embeddings")
        return min(1024, positions or 1024)

    def torch_dtype(self) -> torch.dtype | None:
        """The value of ``--dtype``."""
        import torch

        return None if self.dtype is None else getattr(torch, self.dtype)


class CalibrationRunOptions(RunOptions):
    """Those of commands that choose what goes by text, and measure the result."""

    texts: tuple[Path, ...] = Field((), description="UTF-8 text whose gradients rank weights.")
    eval_texts: tuple[Path, ...] = Field((), description="Held-out text, for its perplexity.")
    eval_windows: int | None = Field(None, ge=1, description="Windows of each held-out text (all).")
    windows: int = Field(32, ge=1, description="Windows of each text, drawn at random (32).")
    own_text: bool | None = Field(
        None, description="Text that the model writes, too (if it fits in memory)."
    )

    def read(self, read: ReadWindows) -> tuple[TokenWindows | None, TokenWindows | None]:
        """The windows of --text and of --eval; None where there are none. Collective."""
        windows = evaluation = None
        if self.texts:
            with translated(TextError, "--windows: "):
                windows = read(self.texts, None).sample(self.windows)
        if self.eval_texts:
            evaluation = read(self.eval_texts, self.eval_windows)
        return windows, evaluation

    def writes_own_text(self, src: Path, needs: int, room: int, way_out: str) -> bool:
        """Whether the model writes text: as asked for, or else if it fits in memory.

        Args:
            src: the model.
            needs: bytes of memory that it takes.
            room: bytes of memory that there are.
            way_out: what works without any text.

        Raises:
            SelectionError: it does not fit, and there is no other text.
        """
        if self.own_text is not None:
            return self.own_text
        if needs > room and not self.texts:
            raise SelectionError(
                f"{src} takes {format_size(needs)} of memory to write the text that it is pruned "
                f"by, and {format_size(room)} are there for it; expected --text FILE, such as that "
                f"of `distprune write-text` on a larger machine, or {way_out}."
            )
        return needs <= room


@contextlib.contextmanager
def ranks_with_text(
    given: RunOptions, model: Path, timeout: float, terminal: Terminal
) -> Iterator[tuple[str, Any, ReadWindows, Meter]]:
    """Join the other ranks; transformers writes nothing but errors from now on.

    Yields the kind of device that this rank computes on, the tokenizer, a function that reads the
    windows of texts, which is collective, and what shows the progress.

    Raises:
        CheckpointError: for errors of the library in the block.
    """
    from distprune.files.team import process_group

    kind = kind_of_device(given.device)
    backends = {"cuda": "cpu:gloo,cuda:nccl", "xpu": "cpu:gloo,xpu:xccl"}
    group = process_group(timeout, backends.get(kind, "gloo"))
    with group, translated(CheckpointError), Meter(terminal) as meter:
        from distprune.language_models import load_tokenizer, read_windows
        from distprune.language_models.folders import require_extra

        require_extra()
        from transformers.utils import logging

        quiet: Any = logging  # without types
        quiet.set_verbosity_error()
        quiet.disable_progress_bar()
        tokenizer, length = load_tokenizer(given.tokenizer or model), given.length_for(model)

        def read(texts: Sequence[Path], limit: int | None) -> TokenWindows:
            with translated(TextError):
                return read_windows(tokenizer, texts, length, limit=limit)

        yield kind, tokenizer, read, meter


def kind_of_device(asked: str | None) -> str:
    """ "cpu", or the kind of an accelerator; this rank's is the current one afterwards."""
    import torch

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    has = "none" if accelerator is None else accelerator.type
    kind = asked or ("cpu" if accelerator is None else has)
    if kind == "cpu":
        return kind
    if kind != has:
        raise SelectionError(
            f"--device {kind}: expected cpu, or the accelerator of this machine ({has})."
        )
    torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", "0")))
    return kind


class LoadOptions(RunOptions, RanksOptions):
    """How the processes hold a model."""

    wrap: Literal["none", "ddp", "fsdp2", "tp", "fsdp2_tp", "stream"] | None = Field(
        None,
        description="How processes hold the model (fsdp2); stream: a layer at a time (eval only).",
    )
    mesh: str | None = Field(
        None, pattern=r"^\d+x\d+$", description="With fsdp2_tp: processes for data x tensors (2x4)."
    )

    def wrapper(self) -> Any:
        """The value of ``--wrap``, or its default."""
        return self.wrap or ("fsdp2" if "RANK" in os.environ else "none")


def _load(given: LoadOptions, folder: Path, kind: str) -> nn.Module:
    """The model. Collective."""
    from distprune import language_models

    if given.wrap == "stream":
        raise SelectionError("--wrap stream is for eval of --text only; expected another.")

    with translated(SelectionError):
        return language_models.load_sharded(
            folder,
            wrap=given.wrapper(),
            mesh=None if given.mesh is None else tuple(map(int, given.mesh.split("x"))),
            dtype=given.torch_dtype(),
            device=kind if kind == "cpu" else None,
        )


def _facts(given: LoadOptions, model: nn.Module | None, kind: str, began: float) -> dict[str, Any]:
    """How a run went, for JSON."""
    from distprune.ranks.collectives import world

    dtype = given.dtype if model is None else str(next(model.parameters()).dtype)[6:]
    return {
        "dtype": dtype,
        "wrap": given.wrapper(),
        "device": kind,
        "num_ranks": world().size,
        "seconds": time.monotonic() - began,
    }


class EvaluationOptions(LoadOptions):
    """The options of eval; calibrate has some of them."""

    texts: tuple[Path, ...] = Field((), description="Text in UTF-8. Repeat it for more.")
    limit: int | None = Field(None, ge=1, description="Windows of each text, at most (all).")
    generate: tuple[str, ...] = Field(
        (), description="Print how the model goes on with this text. Repeat it for more."
    )


@command("eval", EvaluationOptions, "MODEL")
def evaluate(given: EvaluationOptions, model: Path) -> None:
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
    if not (given.texts or given.generate):
        raise SelectionError("nothing to evaluate; expected --text FILE, or --generate TEXT.")
    terminal = given.terminal()
    with ranks_with_text(given, model, given.timeout, terminal) as (kind, tokenizer, read, meter):
        from distprune import language_models, streaming
        from distprune.language_models.writing import continued

        windows, report, generated = None, None, []
        if given.texts:
            windows = read(given.texts, given.limit)
        is_streamed = given.wrap == "stream" and not given.generate
        loaded = None if is_streamed else _load(given, model, kind)
        began = time.monotonic()
        common: Any = {"batch_size": given.batch_size, "progress": meter.show}
        if windows is not None and loaded is not None:
            report = language_models.perplexity(loaded, windows, **common)
        elif windows is not None:
            dtype = given.torch_dtype()
            report = streaming.perplexity(model, windows, dtype=dtype, device=kind, **common)
        for text in given.generate:
            assert loaded is not None
            generated.append({"text": text, "continuation": continued(loaded, tokenizer, text)})
        facts = _facts(given, loaded, kind, began)
    if given.as_json:
        measured = {} if report is None else report.as_values()
        told = {"generated": generated} if generated else {}
        terminal.json({"model": str(model), **measured, **told, **facts})
        return
    if report is not None:
        rows = [
            (text.text, text.num_windows, text.num_tokens, f"{text.perplexity:.4f}")
            for text in (*report.texts, *([report.total] if len(report.texts) > 1 else []))
        ]
        numbers = ("windows", "tokens", "perplexity")
        terminal.table(("text", *numbers), rows, right=numbers)
        terminal.note(f"{report.total.num_tokens:,} tokens in {time_text(facts)}.")
    for each in generated:
        terminal.text(each["text"] + each["continuation"])


class CalibrationOptions(LoadOptions):
    """The options of calibrate."""

    texts: tuple[Path, ...] = Field((), description="Text in UTF-8. Repeat it for more.")
    limit: int | None = Field(None, ge=1, description="Windows of each text, at most (all).")
    out: Path = Field(description="File for the statistics; replaced at the end if it exists.")
    samples: int | None = Field(None, ge=1, description="Windows that are drawn at random (all).")
    seed: int = Field(0, description="Random seed for --samples (0).")
    include: tuple[str, ...] = Field(
        (), description="Globs, or expressions after re:, of layers (all but the head)."
    )
    exclude: tuple[str, ...] = Field((), description="Patterns of layers to leave out.")
    allow_empty: tuple[str, ...] = Field(
        (), description="Patterns of layers to which no token need come, such as experts."
    )
    gradients: bool = Field(
        False,
        description="Statistics of gradients, for score fisher, in place of those of activations.",
    )


@command("calibrate", CalibrationOptions, "MODEL")
def calibrate(given: CalibrationOptions, model: Path) -> None:
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
    if not given.texts:
        raise SelectionError("nothing to count; expected --text FILE.")
    if given.gradients and given.allow_empty:
        raise SelectionError("--allow-empty has no effect with --gradients; leave it out.")
    if not given.out.absolute().parent.is_dir():
        raise OutputError(f"{given.out}: its folder does not exist; expected one that does.")
    terminal = given.terminal()
    with ranks_with_text(given, model, given.timeout, terminal) as (kind, _, read, meter):
        import distprune as prune
        from distprune import language_models

        windows = read(given.texts, given.limit)
        loaded = _load(given, model, kind)
        began = time.monotonic()
        if given.samples is not None:
            with translated(SelectionError, "--samples: "):
                windows = windows.sample(given.samples, seed=given.seed)
        with translated(SelectionError):
            layers = language_models.linear_layers(loaded, given.include or None, given.exclude)
            statistics = (
                prune.statistics.GradientStatistics(layers)
                if given.gradients
                else prune.statistics.ActivationStatistics(layers, allow_empty=given.allow_empty)
            )
        language_models.calibrate(
            loaded, windows, statistics, batch_size=given.batch_size, progress=meter.show
        )
        statistics.save(given.out)
        facts = _facts(given, loaded, kind, began)
    if given.as_json:
        counts = {"num_windows": len(windows), "num_tokens": windows.tokens.numel()}
        names = {"layers": [layer.fqn for layer in layers]}
        options = given.model_dump(mode="json", exclude={"as_json", "quiet"})
        terminal.json({"model": str(model), **options, **counts, **names, **facts})
    elif terminal.is_leader:
        terminal.text(
            f"{given.out}: statistics of {counted(len(layers), 'layer')} over "
            f"{windows.tokens.numel():,} tokens in {counted(len(windows), 'window')}, "
            f"{format_size(given.out.stat().st_size)}. {time_text(facts)}."
        )


class OwnTextOptions(LoadOptions):
    """The options of write-text."""

    windows: int = Field(32, ge=1, description="How many windows (32).")
    seed: int = Field(0, ge=0, description="Another one gives other text (0).")


@command("write-text", OwnTextOptions, "MODEL", "FILE")
def write_text(given: OwnTextOptions, model: Path, file: Path) -> None:
    """Let a language model write the text by which it is pruned.

    FILE ends in .safetensors, and is replaced at the end if it exists. `prune`, `calibrate` and
    `eval` take it as --text, with the same --length. `prune` writes such text itself where the
    model fits in memory; this command is for another machine, where it does.

    \b
    distprune write-text MODEL own.safetensors --windows 128 --length 2048
    distprune prune MODEL OUT -s 0.6 --text own.safetensors --length 2048
    """
    if file.suffix != ".safetensors" or not file.absolute().parent.is_dir():
        raise OutputError(f"{file}: expected a name in .safetensors, in a folder that exists.")
    terminal = given.terminal()
    with ranks_with_text(given, model, given.timeout, terminal) as (kind, tokenizer, _, meter):
        from distprune import language_models

        loaded, began = _load(given, model, kind), time.monotonic()
        windows = language_models.write_text(
            loaded,
            tokenizer,
            windows=given.windows,
            length=given.length_for(model),
            seed=given.seed,
            progress=meter.show,
        )
        facts = _facts(given, loaded, kind, began)
        if terminal.is_leader:
            windows.save(file)
    if given.as_json:
        terminal.json(
            {"model": str(model), "file": str(file), "num_windows": len(windows), **facts}
        )
    elif terminal.is_leader:
        terminal.text(
            f"{file}: {counted(len(windows), 'window')} of {windows.length:,} tokens. "
            f"{time_text(facts)}."
        )


class ShrinkOptions(CalibrationRunOptions, RanksOptions):
    """The options of shrink."""

    neurons: float = Field(0.0, ge=0, lt=1, description="Share of the neurons of each MLP (0).")
    experts: float = Field(0.0, ge=0, lt=1, description="Share of the experts of each layer (0).")
    update: Literal["least-squares", "none"] = Field(
        "least-squares", description="What moves kept weights (least-squares)."
    )
    round_to: int = Field(128, ge=1, description="A multiple of it is left in each MLP (128).")
    unseen_first: bool = Field(
        False, description="Experts to which no token comes go first, in place of last."
    )
    plan: bool = Field(False, description="Only show what is left; read headers, write nothing.")
    discard: bool = Field(False, description="Only remove the unfinished result beside OUT.")


@command("shrink", ShrinkOptions, "MODEL", "OUT")
def shrink(given: ShrinkOptions, model: Path, out: Path) -> None:
    """Take neurons and experts out of a language model, so that it is smaller.

    OUT is an ordinary model with a smaller configuration, which transformers loads without this
    package. Each layer loses the same number. Which, is decided by text: that of --text, and text
    that the model writes itself; what is left of the MLPs is updated. With --no-own-text and no
    --text, the smallest neurons go, and nothing is updated.

    One layer at a time is in memory; the whole model only while it writes text, which it does if it
    fits. Several processes share the text. After an interruption the same command continues.

    \b
    distprune shrink Qwen3-0.6B Qwen3-0.6B-small --neurons 0.2 --plan
    distprune shrink MODEL OUT --neurons 0.2 --text train.txt --eval held-out.txt
    distprune shrink Qwen3-30B-A3B OUT --experts 0.25
    """
    terminal = given.terminal()
    if given.discard:
        return discard_unfinished(terminal, out)
    shares: Any = given.model_dump(include={"neurons", "experts", "round_to"})
    if given.plan:
        return _show_sizes(terminal, given, model, shares)
    ranks = ranks_with_text(given, model, given.timeout, terminal)
    with ranks as (kind, tokenizer, read, meter), translated(SelectionError):
        from distprune import streaming
        from distprune.files.planning import CARD_FILE
        from distprune.files.reports import card_above

        length, dtype = given.length_for(model), given.torch_dtype()
        run: Any = {"batch_size": given.batch_size, "dtype": dtype, "device": kind}
        run["progress"] = meter.show
        (windows, evaluation), own_text = given.read(read), None
        needs, room = streaming.memory_of_own_text(model, length, dtype), streaming.room_of(kind)
        if given.writes_own_text(model, needs, room, "--no-own-text: the smallest neurons go"):
            own_text = streaming.OwnText(tokenizer, given.windows, length)
        report = streaming.shrink_folder(
            model,
            out,
            windows,
            own_text=own_text,
            update=given.update != "none",
            unseen_first=given.unseen_first,
            tell=terminal.note,
            **shares,
            **run,
        )
        quality = "Its perplexity was not measured; --eval FILE measures it."
        if evaluation is not None:
            before, after = (
                streaming.perplexity(folder, evaluation, **run).perplexity
                for folder in (model, out)
            )
            quality = f"Perplexity of held-out text: {before:.4g} before, {after:.4g} after."
        if terminal.is_leader:
            card = card_above(open_checkpoint(model), ("pruned",), _SHRUNK.format(report, quality))
            write_atomically(out / CARD_FILE, card)
    if given.as_json:
        terminal.json({"model": str(model), "quality": quality, **asdict(report)})
    for line in () if given.as_json else [*str(report).splitlines(), quality]:
        terminal.text(line)


def _show_sizes(
    terminal: Terminal, given: ShrinkOptions, model: Path, shares: dict[str, Any]
) -> None:
    """What shrink would leave of a model."""
    with translated(SelectionError):
        from distprune import streaming

        sizes = streaming.sizes_of_shrunk(model, **shares)
    if given.as_json:
        terminal.json({"model": str(model), **asdict(sizes)})
    else:
        terminal.text(
            f"Each of {counted(sizes.num_layers, 'layer')} keeps {sizes.kept:,} of "
            f"{sizes.total:,} {sizes.kind}: {sizes.parameters_after:,} of "
            f"{sizes.parameters_before:,} parameters, {format_size(sizes.bytes_after)} of "
            f"{format_size(sizes.bytes_before)}."
        )


# What the card of a shrunk model says.
_SHRUNK = """\
# A smaller copy

distprune took out what is listed here. This is an ordinary model with a smaller configuration.

```text
{}
```

{}
"""
