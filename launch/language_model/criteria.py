"""The criteria of the command lines, and what the package calls them."""

from __future__ import annotations

import distprune as prune
from distprune.language_models import TextScores
from jobs.ranking import Scores

# None: without scores. "fisher" is here that of each weight, as in the committed tables.
CRITERIA: dict[str, str | None] = {
    "magnitude": None,
    "random": None,
    "wanda": "wanda",
    "ria": "ria",
    "stade": "stade",
    "taylor": "taylor",
    "fisher": "elementwise_fisher",
    "factored_fisher": "fisher",
    "obs": "obs",
}
NEEDS_TEXT = tuple(name for name, score in CRITERIA.items() if score is not None)


def method_of(criterion: str) -> type[prune.BasePruningMethod]:
    """The class that ranks by a criterion: none of these scores is signed."""
    return prune.RandomUnstructured if criterion == "random" else prune.L1Unstructured


def scores_of(criterion: str, text: TextScores) -> Scores | None:
    """The scores by a criterion; None: weights rank by themselves. Collective."""
    score = CRITERIA[criterion]
    return None if score is None else text.of(score)
