"""Calibrate a language model block after block, and prune each before the next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

from distprune._common.naming import NamedParameter, unwrap
from distprune._common.process_groups import world
from distprune._transformers.building import decoder_layers
from distprune.language_models.running import (
    Report,
    Reporter,
    Step,
    check_same,
    in_eval_mode,
    inputs_of,
    output_of,
    steps_of,
)
from distprune.language_models.text import TokenWindows
from distprune.statistics.activation import ActivationStatistics, prune_sequentially

R = TypeVar("R")


def decoder_blocks(model: nn.Module) -> list[nn.Module]:
    """The decoder layers of a model of transformers, in the order in which they run.

    Args:
        model: wrapped or not.

    Raises:
        ValueError: the model does not say which of its modules they are.
    """
    inner: Any = unwrap(model)
    found = decoder_layers(inner)
    if not found:
        raise ValueError(
            f"{type(inner).__name__} does not name its decoder layers; expected a causal language "
            "model of transformers, with _no_split_modules."
        )
    return found


def prune_block_by_block(
    model: nn.Module,
    windows: TokenWindows,
    statistics: ActivationStatistics,
    prune_block: Callable[[list[NamedParameter]], R],
    *,
    batch_size: int = 1,
    progress: Report | None = None,
) -> list[R]:
    """Prune each decoder layer by the inputs that the pruned layers before it give. Collective.

    def prune_block(parameters):
        return prune.global_unstructured(
            parameters, prune.L1Unstructured, statistics.wanda(parameters), amount=0.5
        )

    reports = prune_block_by_block(model, windows, statistics, prune_block)

    The data-parallel ranks share the windows, in any number, as in ``calibrate``; see
    ``distprune.statistics.prune_sequentially`` for what happens to a block.

    Args:
        model: plain or wrapped.
        windows: the same on every rank.
        statistics: new ones, of parameters of decoder layers.
        prune_block: prunes the (module, name) pairs that it gets.
        batch_size: windows that a rank runs at a time.
        progress: called after every step, on every rank. Each layer runs all windows.

    Returns:
        What ``prune_block`` returned for each layer that has parameters.

    Raises:
        ValueError: a parameter outside of all decoder layers; and as ``calibrate``. On every rank.
        RuntimeError, NotImplementedError: as ``prune_sequentially``.

    Cost: a forward of the model per decoder layer and window. No activations are kept.
    """
    ranks = check_same(model, windows, batch_size)
    blocks = world().run(lambda: decoder_blocks(model))
    modules = [{id(module) for module in block.modules()} for block in blocks]
    owners = {id(module) for module, _ in statistics.parameters}
    num_runs = sum(not owners.isdisjoint(of_block) for of_block in modules)
    inside = set().union(*modules)
    outside = [p for p in statistics.parameters if id(p[0]) not in inside]
    if outside:
        raise ValueError(
            f"{len(outside)} parameters of statistics are in no decoder layer, such as one of a "
            f"{type(outside[0][0]).__name__}; expected parameters of decoder layers only. Exclude "
            "the others, as the head."
        )
    steps = steps_of(len(windows), batch_size, ranks)
    reporter = Reporter("calibrate", num_runs * len(windows), progress)

    def forward(step: Step) -> None:
        ids = inputs_of(model, windows, step.rows)
        if step.is_padding:  # FSDP communicates in the forward; the tokens do not count
            with statistics.batch(torch.zeros_like(ids)):
                output_of(model, input_ids=ids)
        else:
            output_of(model, input_ids=ids)
        reporter.add(step.num_in_step)

    with in_eval_mode(model), torch.inference_mode(False), torch.no_grad():
        return prune_sequentially(statistics, model, blocks, steps, prune_block, forward=forward)
