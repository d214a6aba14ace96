"""A pruning call that ends when its masks are ready."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from torch import nn

from distprune._common.process_groups import world
from distprune.call.request import LocalMasks, PruningArguments, PruningCall
from distprune.call.run import prune_parameters
from distprune.methods.builtin import L1Unstructured, hook_for_chosen_mask


class _Decided(Exception):
    def __init__(self, decision: LocalMasks) -> None:
        super().__init__()
        self.decision = decision


class _StopsWithMasks:
    """A method that ends the call when its masks are ready, before modules change."""

    def __init__(self, method: L1Unstructured) -> None:
        self._method = method
        self.READS_VALUES = method.READS_VALUES

    def decide(self, call: PruningCall) -> NoReturn:
        raise _Decided(self._method.decide(call).finish())


def decide_only(parameters: Sequence[tuple[nn.Module, str]], amount: float) -> LocalMasks:
    """The whole call without attaching: parameters are read, counted and ranked, masks made."""
    method = _StopsWithMasks(L1Unstructured(amount))
    try:
        prune_parameters(
            lambda: PruningArguments(
                parameters=parameters, method=method, make_hook=hook_for_chosen_mask
            ),
            world(),
        )
    except _Decided as decided:
        return decided.decision
    raise AssertionError("the call ended without asking the method to decide")
