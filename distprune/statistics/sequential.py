"""Block after block, with the inputs that pruned blocks give: statistics as Wanda was published."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from torch import Tensor, nn

from distprune._common.naming import NamedParameter
from distprune.statistics.activation import ActivationStatistics
from distprune.statistics.collecting import LocalStatistics

R = TypeVar("R")


def prune_sequentially(
    statistics: ActivationStatistics,
    model: nn.Module,
    blocks: Iterable[nn.Module],
    batches: Iterable[Any],
    prune_block: Callable[[list[NamedParameter]], R],
    *,
    forward: Callable[[Any], object] | None = None,
) -> list[R]:
    """Collect statistics of one block after the other, and prune each before the next. Collective.

    def prune_block(parameters):
        return prune.global_unstructured(
            parameters, prune.L1Unstructured, statistics.wanda(parameters), amount=0.5
        )

    reports = prune_sequentially(statistics, model, model.model.layers, batches, prune_block)

    For each block the whole model runs over all batches, and the inputs of that block are
    collected: those that the blocks before it give as they are now, pruned. This holds on every
    wrapper, as nothing but the model itself is called. The statistics are ``sequential``
    afterwards, and complete: they can be saved.

    Args:
        statistics: new ones; each of their parameters is in one of the blocks.
        model: in evaluation mode, wrapped or not.
        blocks: modules of the model, in the order in which they run.
        batches: this rank's; they are run once per block, so a list or a data set, no iterator.
            Ranks of DDP, or without a wrapper, may have unequal numbers of them.
        prune_block: prunes the parameters that it gets, (module, name) pairs; what it returns is
            collected.
        forward: runs the model on a batch, and takes care of padding (``statistics.batch``). By
            default a mapping becomes keyword arguments, a tuple or list arguments, and an
            ``attention_mask`` [batch, tokens] in a mapping says what is padding.

    Returns:
        What ``prune_block`` returned for each block that has parameters.

    Raises:
        RuntimeError: something was collected before.
        TypeError: ``batches`` is an iterator.
        ValueError: a parameter in no block, or in two; and as ``ActivationStatistics.totals``.
        NotImplementedError: statistics with pipeline_parallel.
        Exception: of the model, of ``batches`` and of ``prune_block``, on every rank. Blocks before
            stay pruned; hooks are gone.

    Cost: one forward of the model per block and batch: as many times that of one pass as there are
    blocks. No activations are kept.
    """
    communicator = statistics._communicator

    def begin() -> list[list[LocalStatistics]]:
        if isinstance(batches, Iterator):
            raise TypeError(
                f"batches is a {type(batches).__name__}, which can be run through once; expected a "
                "list or a data set: every block needs all batches."
            )
        return statistics._begin_sequential(list(blocks))

    with communicator.exclusively():
        of_block = communicator.run(
            begin,
            lambda made: [
                (f"block {number}", ", ".join(parameter.label for parameter in parameters))
                for number, parameters in enumerate(made)
            ],
        )
    statistics._mode = "sequential"
    results = []
    with communicator.raising_everywhere():
        for parameters in filter(None, of_block):
            with statistics._collector.collecting(parameters):
                for batch in batches:
                    if forward is not None:
                        forward(batch)
                    else:
                        _run(statistics, model, batch)
            pairs = [NamedParameter(*p.places[0], p.label) for p in parameters]
            results.append(prune_block(pairs))
    communicator.agree()
    return results


def _run(statistics: ActivationStatistics, model: nn.Module, batch: Any) -> None:
    if not isinstance(batch, Mapping):
        model(*batch if isinstance(batch, (tuple, list)) else (batch,))
        return
    mask = batch.get("attention_mask")
    if isinstance(mask, Tensor) and mask.ndim == 2:
        with statistics.batch(mask):
            model(**batch)
    else:
        model(**batch)
