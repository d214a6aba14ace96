"""What ``eval`` and ``calibrate`` share: options of text and models, and opening both."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from distprune.cli import ranks
from distprune.cli.console import Terminal
from distprune.files.errors import (
    CheckpointError,
    FilesError,
    RanksError,
    SelectionError,
    TextError,
    explained,
)

if TYPE_CHECKING:  # torch comes with it
    from torch import nn

    from distprune.language_models import TokenWindows

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
    num_ranks = int(os.environ.get("WORLD_SIZE", "1")) if ranks.is_rank() else 1
    wrap: Any = options.wrap or ("fsdp2" if num_ranks > 1 else "none")
    if wrap != "none" and num_ranks == 1 and not ranks.is_rank():
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
        if ranks.is_rank() and explained(error) is None:
            raise RanksError(
                f"a rank failed, was lost, or did not answer in time ({error})."
            ) from error
        raise
