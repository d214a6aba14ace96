"""Perplexity of a language model that is larger than memory."""

from __future__ import annotations

import tempfile
from contextlib import closing
from pathlib import Path

import torch

from distprune._common.process_groups import world
from distprune._transformers.building import build_without_weights
from distprune.files.checkpoints.checkpoint import open_checkpoint
from distprune.language_models.evaluating import PerplexityReport
from distprune.language_models.loading import require_extra, stored_dtype
from distprune.language_models.running import Report, Reporter
from distprune.language_models.text import TokenWindows
from distprune.streaming.layers import StreamedModel
from distprune.streaming.parts import Holding, num_machines
from distprune.streaming.windows import WindowStream


def computing_dtype(source: str | Path) -> torch.dtype:
    """The dtype in which the model of a folder computes, if no other is asked for. Local.

    Args:
        source: as for :func:`perplexity`.

    Raises: as :func:`perplexity`, for what the config and the headers show.

    Cost: builds the model without weights.
    """
    require_extra()
    checkpoint = open_checkpoint(source, follow_links=True)
    found: torch.dtype = build_without_weights(checkpoint.folder, stored_dtype(checkpoint)).dtype
    return found


def perplexity(
    source: str | Path,
    windows: TokenWindows,
    *,
    batch_size: int = 1,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    folder: str | Path | None = None,
    progress: Report | None = None,
) -> PerplexityReport:
    """The perplexity of texts under the model of a folder, layer by layer. Collective.

    It is that of ``language_models.perplexity``, to the bit where kernels are equal. The ranks
    share the windows; each reads every layer, or on several machines its part of every layer.

    Args:
        source: a folder with config.json and safetensors files, or the name of a model in the local
            Hugging Face cache.
        windows: the same on every rank.
        batch_size: windows that a rank runs at a time.
        dtype: in which the model computes; None: that of the config.
        device: where it computes; by default the CPU.
        folder: gets a temporary folder with hidden states; by default that of the system.
        progress: called after every layer.

    Raises:
        NotImplementedError: a model that is no chain of decoder layers.
        ValueError, TypeError: as ``language_models.perplexity``, on every rank.

    Cost: one read of the checkpoint by each rank; on several machines by all together, and an
    all-gather of each layer. Memory: one layer and a batch, or embedding and
    head. Disk: two stages of hidden states, tokens x width elements each.
    """
    require_extra()
    communicator = world()

    def begin() -> StreamedModel:
        checkpoint = open_checkpoint(source, follow_links=True)
        holding = Holding(shares=num_machines(communicator.size) > 1)
        return StreamedModel(checkpoint, dtype, torch.device(device or "cpu"), holding)

    with (
        tempfile.TemporaryDirectory(dir=folder) as states,
        closing(communicator.run(begin)) as streamed,
        communicator.raising_everywhere(),
    ):
        with streamed.weights_around():
            stream = communicator.run(
                lambda: WindowStream(streamed, windows, batch_size, Path(states), "text")
            )
        num_layers = len(streamed.layers)
        total = num_layers * len(windows)
        reporter = Reporter("evaluate", total, progress, "forwards of a layer")
        for number in range(num_layers):

            def advance(number: int = number) -> None:
                stream.advance(number)
                stream.remove("state", number)

            with streamed.layer(number):
                communicator.run(advance)
            reporter.add(len(windows))
        with streamed.weights_around():
            return stream.perplexity()
