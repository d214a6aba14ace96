"""Perplexity on held-out text, the same number on any sharding; and what a model says next."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from distprune.language_models.losses import BatchLosses, logits_of
from distprune.language_models.running import (
    Report,
    Reporter,
    check_run,
    check_same,
    in_eval_mode,
    inputs_of,
    output_of,
    steps_of,
)
from distprune.language_models.text import TokenWindows
from distprune.ranks.process_groups import world

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class TextPerplexity:
    """How well a model predicts a text.

    Attributes:
        text: its name.
        num_windows: of it.
        num_tokens: that were predicted.
        nll: the sum of their negative log-likelihoods, in nats.
    """

    text: str
    num_windows: int
    num_tokens: int
    nll: float

    @property
    def perplexity(self) -> float:
        """exp(nll / num_tokens); infinity where that is no finite number."""
        try:
            return math.exp(self.nll / self.num_tokens)
        except OverflowError:
            return math.inf

    def as_values(self) -> dict[str, Any]:
        """For JSON."""
        return {**vars(self), "perplexity": self.perplexity}


@dataclass(frozen=True)
class PerplexityReport:
    """How well a model predicts texts; the same on every rank.

    Attributes:
        texts: each text.
        total: all of them together; it is called "all".
        window_nll: float64 [windows], the sum of the negative log-likelihoods of each window.
        length: tokens of a window.
        has_bos: whether windows begin with a bos token.
    """

    texts: tuple[TextPerplexity, ...]
    total: TextPerplexity
    window_nll: Tensor
    length: int
    has_bos: bool

    @property
    def perplexity(self) -> float:
        """Of all texts together."""
        return self.total.perplexity

    def as_values(self) -> dict[str, Any]:
        """For JSON, without the windows."""
        return {
            "length": self.length,
            "has_bos": self.has_bos,
            "texts": [text.as_values() for text in self.texts],
            "all": self.total.as_values(),
        }


def perplexity(
    model: nn.Module,
    windows: TokenWindows,
    *,
    batch_size: int = 1,
    progress: Report | None = None,
) -> PerplexityReport:
    """The perplexity of texts under a model. Collective over all ranks.

    The data-parallel ranks share the windows (see running.[Note: steps]); the ranks of a
    tensor-parallel group compute together. Each window's negative log-likelihoods are computed from
    its logits in fp32 and summed in fp64. The sums are added without rounding (``math.fsum``), so
    the result depends on the ranks only as far as the logits do. With DDP, or without a wrapper, it
    is bit-equal on any number of ranks whose kernels are the same; tensor parallelism adds
    in another order and is equal up to rounding.

    The model is in evaluation mode meanwhile, without gradients and without a cache.

    Args:
        model: plain or wrapped: called with ``input_ids``, it returns logits [windows, length,
            vocabulary], or an object that has them as ``logits``.
        windows: the same on every rank.
        batch_size: windows that a rank runs at a time. Another one may change the rounding of the
            logits.
        progress: called after every step, on every rank.

    Raises:
        ValueError: a window with a loss that is not finite, by the name of its text; tokens or
            positions that the model does not have; ranks with different windows. On every rank.
        TypeError: a model that returns no logits.
        NotImplementedError: as :func:`running.data_ranks`.
        Exception: of the model. Where its forward communicates (FSDP, TP), an error on one rank
            alone leaves the others waiting until the timeout of the process group.

    Cost: a forward of each window; 192 MiB of memory, and for models whose head does not run in
    slices (losses.[Note: slices]) the logits of a batch. On the wire what the forwards send, 40
    bytes per step, and 16 bytes per window at the end.
    """
    ranks = check_same(model, windows, batch_size)
    communicator = world()
    found = WindowLosses(windows)
    batches = BatchLosses(model)
    reporter = Reporter("evaluate", len(windows), progress)
    with (
        communicator.raising_everywhere(),
        in_eval_mode(model),
        torch.inference_mode(False),
        torch.no_grad(),
    ):
        for step in steps_of(len(windows), batch_size, ranks):

            def run(rows: slice = step.rows) -> Tensor:
                return batches.of_windows(inputs_of(model, windows, rows))

            losses = communicator.run(run)
            if ranks.is_counted and not step.is_padding:
                found.add(step.rows, losses)
            reporter.add(step.num_in_step)
    communicator.agree()
    return found.report()


class WindowLosses:
    """The losses of windows, of which each rank adds some.

    Args:
        windows: the same on every rank.
    """

    def __init__(self, windows: TokenWindows) -> None:
        self._windows = windows
        # By window: its loss, and how many ranks have counted it.
        self._table = torch.zeros(len(windows), 2, dtype=torch.float64)

    def add(self, rows: slice, losses: Tensor) -> None:
        """Add the losses of some windows."""
        self._table[rows, 0], self._table[rows, 1] = losses, 1.0

    def report(self) -> PerplexityReport:
        """The perplexity of each text. Collective.

        Raises:
            ValueError: a loss that is not finite, by its window; on every rank.
        """
        table, windows = self._table.view(-1), self._windows
        shared = world().reduce_floats(table.numel(), lambda: table).view(-1, 2)
        assert bool((shared[:, 1] == 1).all()), "every window is counted once"
        losses = shared[:, 0].clone()
        _check_finite(losses, windows)
        texts = [
            _of_text(name, losses, windows, (windows.text_of == number).nonzero().view(-1))
            for number, name in enumerate(windows.texts)
        ]
        total = _of_text("all", losses, windows, torch.arange(len(windows)))
        with_windows = tuple(text for text in texts if text.num_windows)
        return PerplexityReport(with_windows, total, losses, windows.length, windows.has_bos)


def _of_text(name: str, losses: Tensor, windows: TokenWindows, rows: Tensor) -> TextPerplexity:
    nll = math.fsum(losses[rows].tolist())
    return TextPerplexity(name, len(rows), len(rows) * windows.num_predicted, nll)


def _check_finite(losses: Tensor, windows: TokenWindows) -> None:
    """Raise ValueError for losses that are NaN or infinite; equal on all ranks."""
    wrong: Sequence[int] = (~losses.isfinite()).nonzero().view(-1).tolist()
    if not wrong:
        return
    first = wrong[0]
    text = int(windows.text_of[first])
    number = first - int((windows.text_of == text).nonzero()[0])
    raise ValueError(
        f"window {number} of {windows.texts[text]} has a loss of {float(losses[first])}, and "
        f"{len(wrong)} of {len(windows)} windows have one that is not finite; expected finite "
        "logits. Weights that are not finite, or a dtype that overflows (float16), cause this."
    )


@torch.no_grad()
def continued(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, text: str, num_tokens: int = 24
) -> str:
    """The text that follows. Collective where the model is sharded.

    Without a cache of keys and values, so that it runs on every wrapper: for a sentence, not for a
    page. It ends early at the tokenizer's token for the end.

    Raises:
        ValueError: the text has no tokens, or the model has fewer positions.

    Cost: a forward for each token.
    """
    ids = torch.tensor([tokenizer(text)["input_ids"]], dtype=torch.int64)
    if not ids.numel():
        raise ValueError(f"the text {text!a} has no tokens; expected some words.")
    first = ids.shape[1]
    with in_eval_mode(model):
        for _ in range(num_tokens):
            windows = TokenWindows.without_text(ids)
            check_run(model, windows, 1)
            output = output_of(model, input_ids=inputs_of(model, windows, slice(0, 1)))
            token = logits_of(output)[:, -1].float().argmax(dim=-1).cpu()
            ids = torch.cat([ids, token[:, None]], dim=1)
            if int(token) == tokenizer.eos_token_id:
                break
    return str(tokenizer.decode(ids[0, first:], skip_special_tokens=True))
