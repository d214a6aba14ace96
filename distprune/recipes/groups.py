"""A part of a recipe: parameters that share a budget."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from distprune._recipe_form.values import Statistic
from distprune._recipe_form.writing import select_mapping
from distprune.recipes.schedules import schedule_mapping
from distprune.schedule.functions import OneShot, Schedule


@dataclass(frozen=True)
class RecipeGroup:
    """Parameters that share a budget.

    Attributes:
        schedule: the sparsity of all of them together, by step.
        method: "magnitude" or "random"; for checkpoints also "wanda", "stade" and "given".
        include, exclude, names: as for ``select``.
        min_sparsity, max_sparsity: of every single parameter.
        min_ndim: leave alone tensors of fewer dimensions; None: the default of the command line.
        scope: as for the recipe; None: that of the recipe.
        pattern: (n, m), for this group only.
        tile: (a, b): whole tiles of a outputs and b inputs are pruned; None without.
        also: as for ``distprune.files.FileRecipe``; for checkpoints.
        input_dims: as there; for models too.
        normalize: "rms", "l2" or "mean": what magnitudes are divided by before those of all tensors
            are ranked together; None: nothing.
    """

    schedule: Schedule
    method: str = "magnitude"
    include: tuple[str, ...] | None = None
    exclude: tuple[str, ...] = ()
    names: tuple[str, ...] = ("weight",)
    min_sparsity: float = 0.0
    max_sparsity: float = 1.0
    min_ndim: int | None = None
    scope: str | None = None
    pattern: tuple[int, int] | None = None
    tile: tuple[int, int] | None = None
    also: tuple[str, ...] = ()
    input_dims: tuple[tuple[str, tuple[int, ...]], ...] = ()
    normalize: Statistic | None = None

    def is_normalizable(self, scope: str) -> bool:
        """Whether the order of the weights depends on what each tensor is divided by.

        Args:
            scope: of the recipe.
        """
        is_together = self.pattern is self.tile is None and (self.scope or scope) == "global"
        return is_together and self.method != "random"

    def select_mapping(self) -> dict[str, Any]:
        """The section ``select`` of a recipe."""
        values = {} if self.min_ndim is None else {"min_ndim": self.min_ndim}
        values |= select_mapping(self.include, self.also, self.exclude, self.input_dims)
        return values | {"names": list(self.names)}

    def as_mapping(self, scope: str) -> dict[str, Any]:
        """The keys of a group in a recipe of this scope."""
        select = self.select_mapping()
        if self.pattern is not None:
            pattern = "{}:{}".format(*self.pattern)
            return {"score": self.method, "pattern": pattern, "select": select}
        values: dict[str, Any] = {"score": self.method}
        if self.scope is not None:
            values["scope"] = self.scope
        if self.tile is not None:
            values["pattern"] = "{}x{}".format(*self.tile)
        if self.is_normalizable(scope):
            values["normalize"] = self.normalize or "none"
        limits = {"min_sparsity": self.min_sparsity, "max_sparsity": self.max_sparsity}
        if self.tile is None:
            values["limits"] = limits
        return values | _budget(self.schedule) | {"select": select}


def _budget(schedule: Schedule) -> dict[str, Any]:
    """``sparsity`` if all is pruned at step 0, else ``schedule``."""
    if schedule == OneShot(0, schedule.sparsity_at(0)):
        return {"sparsity": schedule.sparsity_at(0)}
    return {"schedule": schedule_mapping(schedule)}
