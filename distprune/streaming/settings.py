"""What a pruning by text was asked to do, as one value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from distprune._version import __version__
from distprune.files.checkpoints.checkpoint import Checkpoint
from distprune.files.planning import source_facts
from distprune.files.scoring import are_of_gradients
from distprune.files.team import Progress
from distprune.language_models.running import Report
from distprune.language_models.text import TokenWindows
from distprune.recipes import GroupRecipe, Recipe
from distprune.recipes.recipe import ELEMENTWISE

Update = Literal["least_squares", "none"]
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Settings:
    """The arguments of ``prune_folder`` but for places and rounds; see there.

    Attributes:
        device: where layers run.
    """

    recipe: Recipe
    windows: TokenWindows
    evaluation: TokenWindows | None = None
    update: Update = "least_squares"
    damping: float = 0.01
    batch_size: int = 1
    dtype: torch.dtype | None = None
    device: torch.device = _CPU
    progress: Report | None = None
    progress_of_files: Callable[[Progress], None] | None = None
    replace: bool = False
    keep_scores: Path | None = None
    tell: Callable[[str], None] = lambda text: None

    @property
    def moves(self) -> bool:
        """Whether kept weights move."""
        return self.update == "least_squares"

    @property
    def collects_gradients(self) -> bool:
        """Whether scores are made of statistics of gradients on the windows."""
        return self._collects and are_of_gradients(self._measured)

    @property
    def collects_activations(self) -> bool:
        """Whether scores or budgets are made of statistics of activations on the windows."""
        return self._collects and not are_of_gradients(self._measured)

    @property
    def elementwise(self) -> list[str]:
        """The scores of single weights that are made of gradients on the windows."""
        if self.recipe.scores is not None:
            return []
        scores = {part.score for part in self.recipe.parts}
        return [score for score in ELEMENTWISE if score in scores]

    @property
    def needs_backward(self) -> bool:
        """Whether anything is made of gradients on the windows."""
        return self.collects_gradients or bool(self.elementwise)

    @property
    def passes(self) -> list[str]:
        """The passes over all layers, in their order."""
        has_update = self.moves or self.evaluation is not None
        return [
            "forward",
            *(["backward"] if self.needs_backward else []),
            *(["update"] if has_update else []),
        ]

    def facts(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """What decides the result, as JSON."""
        import transformers

        texts = {"windows": self.windows, "evaluation": self.evaluation}
        return {
            **source_facts(checkpoint),
            "recipe": self.recipe.as_stored().as_values(),
            **{name: w.digests() for name, w in texts.items() if w is not None},
            "update": self.update,
            "damping": self.damping,
            "batch_size": self.batch_size,
            "dtype": str(self.dtype),
            "versions": [__version__, str(torch.__version__), transformers.__version__],
        }

    @property
    def _measured(self) -> list[GroupRecipe]:
        return [part for part in self.recipe.parts if part.reads_statistics]

    @property
    def _collects(self) -> bool:
        return bool(self._measured) and self.recipe.statistics is None
