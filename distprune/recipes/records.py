"""A checked recipe, as a program uses it: every default is filled in."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from distprune.recipes.groups import RecipeGroup

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed import ProcessGroup

    from distprune.schedule.pruner import ScheduledPruner


@dataclass(frozen=True)
class Recipe:
    """A checked recipe. ``repr`` shows it with every default filled in.

    Attributes:
        groups: one, unless the recipe has ``groups``.
        seed: of the method "random", which then prunes the same elements on every run and any
            sharding; None: from torch's generator.
        scope: "global": one ranking over all parameters of a group; "layer": one for each of
            them; "row": one for each row of each.
        pattern: (n, m): n of every m in a row are kept; None without one.
        nan: "error", or "keep": whether a NaN among the weights is an error.
        masks: whether to write masks.
        card: whether to write a model card.
        version: of the format.
        statistics, scores: paths of what the scores of a checkpoint are made from; None without.
    """

    groups: tuple[RecipeGroup, ...]
    seed: int | None = None
    scope: str = "global"
    pattern: tuple[int, int] | None = None
    nan: str = "error"
    masks: bool = True
    card: bool = True
    version: int = 1
    statistics: str | None = None
    scores: str | None = None

    def as_mapping(self) -> dict[str, Any]:
        """Plain values with every default filled in; ``parse_recipe`` reads them again."""
        head: dict[str, Any] = {"version": self.version}
        if self.seed is not None:
            head["seed"] = self.seed
        for name in ("statistics", "scores"):
            if getattr(self, name) is not None:
                head[name] = getattr(self, name)
        if self.nan != "error":
            head["nan"] = self.nan
        if not (self.masks and self.card):
            head["output"] = {"masks": self.masks, "card": self.card}
        if self.pattern is not None:
            (group,) = self.groups
            head["pattern"] = "{}:{}".format(*self.pattern)
            return head | {"score": group.method, "select": group.select_mapping()}
        head["scope"] = self.scope
        groups = [group.as_mapping(self.scope) for group in self.groups]
        # A group that differs from the recipe in these is written as one of a list.
        has_own = any(group.scope or group.pattern for group in self.groups)
        return head | (groups[0] if len(groups) == 1 and not has_own else {"groups": groups})

    def pruner(self, model: nn.Module, *, group: ProcessGroup | None = None) -> ScheduledPruner:
        """A pruner for a model that is wrapped already, if it is to be. Changes nothing yet.

        Args:
            model: plain, or wrapped in anything that distprune supports.
            group: the ranks that take part; every rank by default.

        Raises:
            ValueError: a pattern matches nothing, or a parameter is in two groups; the recipe has
                keys that are for checkpoints only.
        """
        from distprune.recipes.pruner import make_pruner

        if names := self._only_for_checkpoints():
            raise ValueError(
                f"the recipe has {', '.join(names)}; expected none of that for a model, because "
                "it says what to do with a checkpoint. `distprune prune` prunes checkpoints."
            )
        groups = [
            replace(part, scope=part.scope or self.scope, pattern=part.pattern or self.pattern)
            for part in self.groups
        ]
        return make_pruner(groups, self.seed, model, group)

    def _only_for_checkpoints(self) -> list[str]:
        """The keys of a recipe that a pruner does not support."""
        scores = {group.method for group in self.groups} - {"magnitude", "random"}
        names = [f"score {score!r}" for score in sorted(scores)]
        if self.nan != "error":
            names.append(f"nan {self.nan!r}")
        if not self.masks:
            names.append("output.masks")
        if not self.card:
            names.append("output.card")
        if any(group.min_ndim is not None for group in self.groups):
            names.append("select.min_ndim")
        if any(group.also for group in self.groups):
            names.append("select.also")
        return names
