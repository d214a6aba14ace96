"""Pruning block after block: each by the inputs that the pruned blocks before it give."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from torch import Tensor, nn

from distprune.base.naming import NamedParameter
from distprune.statistics.activation import ActivationStatistics
from distprune.statistics.parameters import ParameterStatistics

R = TypeVar("R")


def prune_sequentially(
    statistics: ActivationStatistics,
    model: nn.Module,
    blocks: Iterable[nn.Module],
    batches: Iterable[Any],
    prune_block: Callable[[list[NamedParameter]], R],
    *,
    forward: Callable[[Any], object] | None = None,
    run_block: Callable[[int, int], None] | None = None,
    advance: Callable[[int], None] | None = None,
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
        run_block: runs only a block on a batch, by their numbers, where this is known to be the
            same as a forward of the model: on what the blocks before have returned.
        advance: with ``run_block``, runs a block on all batches: what it returns is for the next.

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
    blocks. No activations are kept. Gram matrices of a block are forgotten after its pruning.
    """
    communicator = statistics._communicator

    def begin() -> list[list[ParameterStatistics]]:
        if isinstance(batches, Iterator):
            raise TypeError(
                f"batches is a {type(batches).__name__}, which can be run through once; expected a "
                "list or a data set: every block needs all batches."
            )
        return _parameters_of_blocks(statistics, blocks)

    def facts(found: list[list[ParameterStatistics]]) -> list[tuple[str, str]]:
        names = [", ".join(parameter.label for parameter in of_one) for of_one in found]
        return [(f"block {number}", of_one) for number, of_one in enumerate(names)]

    with communicator.exclusively():
        of_block = communicator.run(begin, facts)
    statistics._mode = "sequential"
    results = []
    with communicator.raising_everywhere():
        last = max((number for number, parameters in enumerate(of_block) if parameters), default=-1)
        for number, parameters in enumerate(of_block[: last + 1]):
            if parameters:
                with statistics._collecting(parameters):
                    for position, batch in enumerate(batches):
                        if run_block is not None:
                            run_block(number, position)
                        elif forward is not None:
                            forward(batch)
                        else:
                            _run(statistics, model, batch)
                pairs = [NamedParameter(*p.places[0], p.label) for p in parameters]
                results.append(prune_block(pairs))
                statistics.forget(pairs)
            if advance is not None and number < last:
                advance(number)
    communicator.agree()
    return results


def _parameters_of_blocks(
    statistics: ActivationStatistics, blocks: Iterable[nn.Module]
) -> list[list[ParameterStatistics]]:
    """Check that nothing was collected yet, and list the parameters of each block.

    Raises:
        NotImplementedError: parameters of pipeline stages.
        RuntimeError: something was collected before.
        ValueError: a parameter in no block, or in two.
    """
    if statistics._arguments.pipeline_parallel:
        raise NotImplementedError(
            "pipeline_parallel=True: the ranks have different blocks; expected every block on "
            "every rank. Collect in one pass instead."
        )
    if statistics.mode == "sequential" or any(p.seen or p.total for p in statistics._local):
        raise RuntimeError(
            "something was collected already; expected new ActivationStatistics, or the inputs "
            "of one pass would mix with those of pruned blocks."
        )
    inside = [set(block.modules()) for block in blocks]
    of_block: list[list[ParameterStatistics]] = [[] for _ in inside]
    for parameter in statistics._local:
        owners = {module for module, _ in parameter.places}
        numbers = [number for number, modules in enumerate(inside) if owners & modules]
        if len(numbers) != 1:
            where = f"blocks {numbers}" if numbers else "no block"
            raise ValueError(
                f"{parameter.label} is in {where}; expected every parameter in one block. Make "
                "the statistics with parameters of the blocks only: select(model, include=...)."
            )
        of_block[numbers[0]].append(parameter)
    return of_block


def _run(statistics: ActivationStatistics, model: nn.Module, batch: Any) -> None:
    """Run a model on a batch, without its padding."""
    if isinstance(batch, Mapping):
        mask = batch.get("attention_mask")
        is_padding = isinstance(mask, Tensor) and mask.ndim == 2
        with statistics.batch(mask if is_padding else None):
            model(**batch)
    else:
        model(*batch if isinstance(batch, (tuple, list)) else (batch,))
