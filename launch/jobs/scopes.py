"""Over what a comparison ranks: which weights compete, and how many each part may lose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import distprune as prune
from distprune import budgets

# Keywords of `global_unstructured`, by the scope's name on the command line.
_KEYWORDS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "global": lambda _: {},
    "global-rms": lambda _: {"normalize": "rms"},
    "layer": lambda _: {"scope": "layer"},
    "row": lambda _: {"scope": "row"},
    "uniform": lambda _: {"budget": "uniform"},
    "erk": lambda _: {"budget": "erk"},
    "lamp": lambda _: {"budget": "lamp"},
    "owl": lambda ratios: {"budget": budgets.OWL(ratios)},
    "2:4": lambda _: {"pattern": "2:4"},
}
SCOPES = tuple(_KEYWORDS)


def keywords_of(scope: str, ratios: Any) -> dict[str, Any]:
    """What a scope adds to the arguments of `global_unstructured`.

    Args:
        scope: one of `SCOPES`. In "global" all weights compete as they are; in "global-rms" each
            parameter's scores are divided by their root mean square first; in "layer" and "row"
            only those of one parameter, or of one output, compete; in "2:4" those of four
            neighbours; the others are budgets, which fix how many elements each parameter loses.
        ratios: for "owl", what `budgets.OWL` takes.
    """
    return _KEYWORDS[scope](ratios)


def is_meaningful(scope: str, method: type[prune.BasePruningMethod], sparsity: float) -> bool:
    """Random numbers have one scale everywhere, LAMP divides by magnitudes, 2:4 prunes half."""
    if scope == "2:4":
        return sparsity == 0.5
    if scope == "lamp":
        return method is prune.L1Unstructured
    return scope != "global-rms" or method is not prune.RandomUnstructured
