"""Windows of text on their way through the layers of a streamed model, and their perplexity.

[Note: stages] The hidden states of a batch before layer i are its stage i; after the last layer,
stage n. They are files of one folder, named by stage and batch, as are the gradients of the loss by
them. So a pass over all layers has one layer and one batch in memory, and a run that was killed
goes on at the layer where it was. Batches are numbered over all ranks, which share them.

    forward     stage 0 (embedding)  -->  stage 1  -->  ...  -->  stage n  -->  loss (norm, head)
    backward    gradient 0  <--  gradient 1  <--  ...  <--  gradient n   <-------+
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from distprune.criteria.elementwise import GradientMoment
from distprune.files.disk import writing
from distprune.language_models import running
from distprune.language_models.folders import require_extra
from distprune.language_models.hidden_states import HiddenStates
from distprune.language_models.losses import BatchLosses, PerplexityReport, report_of
from distprune.language_models.text import TokenWindows
from distprune.ranks.collectives import world
from distprune.statistics.activation import ActivationStatistics
from distprune.statistics.gradients import GradientStatistics
from distprune.streaming.layers import StreamedModel
from distprune.streaming.work import damaged


class WindowStream(HiddenStates):
    """The hidden states of some windows of text; this rank has its share of the batches.

    Args:
        streamed: the model.
        windows: the same on every rank.
        batch_size: windows that a rank runs at a time.
        place: the folder of the hidden states, which exists, and how their names begin.
        forget: called before an error for a damaged file.

    Raises:
        ValueError: tokens or positions that the model does not have.
        NotImplementedError: the layers are no chain.
    """

    def __init__(
        self,
        streamed: StreamedModel,
        windows: TokenWindows,
        batch_size: int,
        place: Path,
        forget: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(streamed.layers)
        self._streamed, self._windows, self._place = streamed, windows, place
        self._forget, self._batch_size = forget, batch_size
        ranks = running.DataRanks(world().index, world().size, True)
        steps = running.steps_of(len(windows), batch_size, ranks)
        self.batches: list[running.Step] = [step for step in steps if step.num_windows]
        with torch.no_grad(), streamed.around() as model:
            for step in self.batches:
                tokens = windows.tokens[step.rows]
                self.catch(partial(running.output_of, model, tokens, needs_logits=False))
                streamed.check_chain(self)

    def collect(self, number: int, statistics: ActivationStatistics) -> None:
        """Statistics of the inputs inside of a layer, which is in memory. Collective."""
        with torch.no_grad(), statistics.collecting():
            for batch in range(len(self.batches)):
                self.run(number, batch)

    def perplexity(self) -> PerplexityReport:
        """Of the windows, whose last stage is there. Collective.

        Raises:
            ValueError: a loss that is not finite.
        """
        found = torch.zeros(len(self._windows), dtype=torch.float64)

        def run() -> None:
            with torch.no_grad(), self._after_layers() as (model, state):
                losses = BatchLosses(model)
                for batch, step in enumerate(self.batches):
                    state[:] = [self.state(len(self._streamed.layers), batch)]
                    found[step.rows] = losses.of_windows(self._windows.tokens[step.rows])

        world().run(run)
        return report_of(self._windows, found)

    def differentiate(self) -> None:
        """The gradients of the losses by the last stage.

        Raises:
            ValueError: a loss that is not finite, by its window.
        """
        last = len(self._streamed.layers)
        with torch.enable_grad(), self._after_layers() as (model, state):
            losses = BatchLosses(model)
            for batch, step in enumerate(self.batches):
                leaf = self.state(last, batch).to(self._streamed.device).requires_grad_(True)
                state[:] = [leaf]
                losses.of_batch(self._windows, step.rows).backward()  # type: ignore[no-untyped-call]
                assert leaf.grad is not None
                self._write("gradient", last, step.rows.start, leaf.grad)

    def differentiate_layer(
        self, number: int, collected: Sequence[GradientStatistics | GradientMoment]
    ) -> None:
        """Collect the gradients of the weights of a layer, which is in memory. Collective.

        It makes the gradients of the losses by the stage before it.

        Args:
            collected: what is made of the gradients of parameters, which need them.
        """
        with torch.enable_grad(), contextlib.ExitStack() as run:
            for each in collected:
                run.enter_context(each.calibrating())
            for batch, step in enumerate(self.batches):
                state = self.state(number, batch).to(self._streamed.device).requires_grad_(True)
                gradient = self._read("gradient", number + 1, step.rows.start)
                made = self.call(number, batch, state)
                with contextlib.ExitStack() as unit:
                    for each in collected:
                        unit.enter_context(each.batch(weight=float(step.num_windows)))
                    torch.autograd.backward(made, gradient.to(made.device))
                assert state.grad is not None
                self._write("gradient", number, step.rows.start, state.grad)
                self._streamed.layers[number].zero_grad()

    def keep(self, stage: int, batch: int, state: Tensor) -> None:
        """Write a stage of a batch."""
        self._write("state", stage, self._first(batch), state)

    def state(self, stage: int, batch: int) -> Tensor:
        """Read a stage of a batch."""
        return self._read("state", stage, self._first(batch))

    def of_window(self, stage: int, row: int) -> Tensor:
        """Read a stage of a window of any rank, [1, length, width]."""
        first = row - row % self._batch_size
        return self._read("state", stage, first)[row - first, None]

    def move_on(self, number: int) -> None:
        """As :meth:`advance`, and remove the stage before the one that it has read.

        A run that is killed before the layer is recorded needs what was read.
        """
        self.advance(number)
        self.remove("state", number - 1)

    def remove(self, kind: str, number: int) -> None:
        """Remove the files of a stage: "state" or "gradient"."""
        for batch in range(len(self.batches)):
            with contextlib.suppress(FileNotFoundError):
                os.remove(self._path(kind, number, self._first(batch)))

    @contextlib.contextmanager
    def _after_layers(self) -> Iterator[tuple[torch.nn.Module, list[Tensor]]]:
        """The model, whose layers return what the caller puts into a list of one tensor."""
        state: list[Tensor] = []
        with self._streamed.around(lambda embedded: state[0].to(embedded.device)) as model:
            yield model, state

    def _path(self, kind: str, stage: int, first: int) -> Path:
        return self._place.with_name(f"{self._place.name}-{kind}-{stage:05}-{first:06}.safetensors")

    def _first(self, batch: int) -> int:
        """The number of the first window of a batch of this rank."""
        return self.batches[batch].rows.start

    def _write(self, kind: str, stage: int, first: int, state: Tensor) -> None:
        from safetensors.torch import save

        path, values = self._path(kind, stage, first), state.detach().cpu().contiguous()
        with writing(path):
            path.write_bytes(save({"state": values}, {"crc32": str(_crc32(values))}))

    def _read(self, kind: str, stage: int, first: int) -> Tensor:
        from safetensors import SafetensorError, safe_open

        path = self._path(kind, stage, first)
        try:
            with safe_open(path, "pt") as file:
                state: Tensor = file.get_tensor("state")
                if (file.metadata() or {}).get("crc32") != str(_crc32(state)):
                    raise SafetensorError("it is not what was written")
        except (OSError, SafetensorError) as error:
            self._forget()
            raise damaged(path, error) from error
        return state


def _crc32(state: Tensor) -> int:
    """A checksum of the bytes of a contiguous tensor on the CPU."""
    return zlib.crc32(state.reshape(-1).view(torch.uint8).numpy().data)


def perplexity(
    source: str | Path,
    windows: TokenWindows,
    *,
    batch_size: int = 1,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    progress: running.Report | None = None,
) -> PerplexityReport:
    """The perplexity of texts under the model of a folder, layer by layer. Collective.

    It is that of ``language_models.perplexity``, to the bit where kernels are equal. The ranks
    share the windows, and each reads every layer.

    Args:
        source: a folder with config.json and safetensors files, or the name of a model in the local
            Hugging Face cache.
        windows: the same on every rank.
        batch_size: windows that a rank runs at a time.
        dtype: in which the model computes; None: that of the config.
        device: where it computes; by default the CPU.
        progress: called after every layer.

    Raises:
        NotImplementedError: a model that is no chain of decoder layers.
        ValueError, TypeError: as ``language_models.perplexity``, on every rank.

    Cost: one read of the checkpoint by each rank. Memory: one layer and a batch, or embedding and
    head. Disk, in the system's temporary folder: two stages of hidden states, tokens x width
    elements each.
    """
    require_extra()
    communicator = world()
    streamed = communicator.run(lambda: StreamedModel(source, dtype, torch.device(device or "cpu")))
    communicator.run(lambda: running.check_run(streamed.model, windows.tokens, batch_size))
    with tempfile.TemporaryDirectory() as states, communicator.raising_everywhere():
        stream = communicator.run(
            lambda: WindowStream(streamed, windows, batch_size, Path(states) / "text")
        )
        total = len(streamed.layers) * len(windows)
        finished = running.reporter("evaluate", total, progress, "forwards of a layer")
        for number in range(len(streamed.layers)):
            with streamed.layer(number):
                communicator.run(partial(stream.advance, number))
            stream.remove("state", number)
            finished(len(windows))
        return stream.perplexity()
