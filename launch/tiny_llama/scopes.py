"""Over what a comparison ranks: how much each single parameter may lose."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import distprune as prune
from distprune import budgets

OutlierRatios = Mapping[str, float]  # by parameter name, of activation statistics

# Keywords of `global_unstructured`, by the scope's name on the command line.
_KEYWORDS: dict[str, Callable[[OutlierRatios], dict[str, Any]]] = {
    "global": lambda _: {},
    "global-rms": lambda _: {"normalize": "rms"},
    "uniform": lambda _: {"budget": "uniform"},
    "erk": lambda _: {"budget": "erk"},
    "lamp": lambda _: {"budget": "lamp"},
    "owl": lambda ratios: {"budget": budgets.OWL(ratios)},
}
SCOPES = tuple(_KEYWORDS)


def keywords_of(scope: str, ratios: OutlierRatios) -> dict[str, Any]:
    """What a scope adds to the arguments of `global_unstructured`.

    Args:
        scope: one of `SCOPES`. In "global" all weights compete as they are; in "global-rms" each
            parameter's scores are divided by their root mean square first; the others are budgets,
            which fix how many elements each parameter loses.
        ratios: for "owl".
    """
    return _KEYWORDS[scope](ratios)


def is_meaningful(scope: str, method: type[prune.BasePruningMethod]) -> bool:
    """Random numbers have one scale everywhere, and LAMP divides by magnitudes."""
    if scope == "lamp":
        return method is prune.L1Unstructured
    return scope != "global-rms" or method is not prune.RandomUnstructured
