"""How long a pruning by text takes, from one decoder layer that is run on a few tokens.

A batch takes a + b * tokens: a is work for each weight, such as sums of its gradients, b work for
each token. Two lengths show both. Layers take as long as their sizes say, and attention is taken to
be linear in the length. Least squares take as long as their operations do on a small matrix.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

from distprune._common.naming import NamedParameter
from distprune.language_models.text import TokenWindows
from distprune.reconstruction.solving import STEPS, least_squares
from distprune.statistics.gram import GramMatrices
from distprune.streaming.cost import inputs_of, numel
from distprune.streaming.layers import StreamedModel
from distprune.streaming.passes import gradients_of
from distprune.streaming.settings import Settings
from distprune.streaming.updating import StoredLayers
from distprune.streaming.windows import WindowStream

_TOKENS = 64  # at most
_ROWS, _INPUTS = 64, 1024  # of the matrix for least squares
_OPERATIONS = 2 * (STEPS + 2)  # for each weight and input, see ``least_squares``


def measured_seconds(
    streamed: StreamedModel, stored: StoredLayers, settings: Settings
) -> dict[str, float]:
    """About how long each pass takes one process.

    Args:
        streamed: the model, where it will run.
        stored: its layers, as they lie in the checkpoint.
        settings: of the pruning.

    Returns:
        Seconds, by the name of a pass, and of what is around the layers.

    Raises: as :class:`WindowStream`, and as what is collected.

    Cost: three times, reads the largest layer and what is around the layers, and runs them on one
    window of at most 64 tokens.
    """
    layers = range(len(streamed.layers))
    number = max(layers, key=lambda n: (bool(stored.parameters[n]), streamed.num_bytes(n)))
    num_layers = sum(map(streamed.num_bytes, layers)) / streamed.num_bytes(number)
    with tempfile.TemporaryDirectory() as folder:
        take = partial(_take, streamed, stored.parameters[number], settings, number, Path(folder))
        most = min(_TOKENS, settings.windows.length)
        least = max(2, most // 4)
        take(least)  # what is done once, such as choosing kernels, is done now
        few, many = take(least), take(most)
    tokens = settings.batch_size * settings.windows.length
    num_batches, num_evaluated = (
        -(-len(windows) // settings.batch_size) if windows is not None else 0
        for windows in (settings.windows, settings.evaluation)
    )

    def of_tokens(part: str) -> float:
        """Of a batch, what depends on its tokens."""
        return tokens * max(many[part] - few[part], 0.0) / max(most - least, 1)

    def of_batch(part: str) -> float:
        return max(few[part] - of_tokens(part) * least / tokens, 0.0) + of_tokens(part)

    read = num_layers * few["read"]
    evaluation = num_layers * num_evaluated * of_batch("forward")
    forwards = num_batches * (2 if settings.collects_activations else 1)
    seconds = {
        "embedding and head": 2 * few["around"],
        "forward": read + num_layers * forwards * of_batch("forward") + evaluation,
    }
    if num_evaluated:
        seconds["embedding and head"] += 2 * num_evaluated * of_tokens("loss")
    if settings.needs_backward:
        seconds["embedding and head"] += num_batches * of_tokens("head")
        seconds["backward"] = read + num_layers * num_batches * of_batch("backward")
    if "update" in settings.passes:
        seconds["update"] = read + evaluation
    if settings.moves:
        seconds["update"] += num_layers * num_batches * of_batch("gram")
        seconds["update"] += sum(map(operations, stored.parameters)) / _rate(settings)
    return seconds


def _take(
    streamed: StreamedModel,
    parameters: Sequence[NamedParameter],
    settings: Settings,
    number: int,
    folder: Path,
    length: int,
) -> dict[str, float]:
    """Seconds of each part of a layer, and of what is around the layers, for random tokens."""
    vocabulary = streamed.model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocabulary, (1, length), generator=generator)
    windows = TokenWindows(("",), tokens, tokens[:, 0], None, has_bos=False)
    seconds: dict[str, float] = {}

    @contextmanager
    def timed(part: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        seconds[part] = time.perf_counter() - began

    with timed("around"):
        stream = WindowStream(streamed, windows, 1, folder, "sample")
    last = len(streamed.layers)
    stream.copy("state", 0, last)
    if settings.evaluation is not None:
        with timed("loss"):
            stream.perplexity()
    if settings.needs_backward:
        with timed("head"):
            stream.differentiate()
        stream.copy("gradient", last, number + 1)
    stream.copy("state", 0, number)
    began = time.perf_counter()
    with streamed.layer(number):
        seconds["read"] = time.perf_counter() - began
        with timed("forward"):
            stream.advance(number)
        if settings.moves:
            grams = GramMatrices(parameters, allow_empty="*")
            with timed("gram"):
                stream.collect(number, grams)
        if settings.needs_backward:
            statistics, criteria = gradients_of(parameters, settings)
            with timed("backward"):
                stream.differentiate_layer(number, [*statistics, *criteria.values()])
    return seconds


def _rate(settings: Settings) -> float:
    """Operations of least squares in a second."""
    shape = _ROWS, _INPUTS
    weights = torch.ones(shape, dtype=torch.float64, device=settings.device)
    gram = torch.eye(_INPUTS, dtype=torch.float64, device=settings.device)
    seconds = []
    for _ in range(2):
        began = time.perf_counter()
        float(least_squares(weights, weights, gram).errors.sum())  # waits for a device
        seconds.append(time.perf_counter() - began)
    return _OPERATIONS * _ROWS * _INPUTS**2 / min(seconds)


def operations(parameters: Collection[NamedParameter]) -> int:
    """Of least squares for the parameters of a layer."""
    return sum(_OPERATIONS * numel(p) * inputs_of(p[0])[0] for p in parameters)
