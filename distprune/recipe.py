"""Recipes: what to prune, how much and when, as a file that is checked before anything runs.

    recipe = load_recipe("configs/recipes/cubic_80.yaml")
    pruner = recipe.pruner(model)  # a ScheduledPruner; the model wrapped or not

A recipe in full; all but ``version``, and one of ``sparsity`` and ``schedule``, may be left out::

    version: 1
    score: magnitude           # or random; "method" means the same
    seed: 0                    # of random
    scope: global              # one ranking over all selected parameters
    schedule:                  # or, at once: sparsity: 0.8
      kind: cubic              # linear; one_shot, which has step and sparsity
      begin: 0
      end: 1000
      frequency: 100
      initial_sparsity: 0.0
      final_sparsity: 0.8
    select:                    # as for distprune.select
      include: ["*"]
      exclude: [lm_head]
      names: [weight]
    limits:                    # of every single parameter
      min_sparsity: 0.0
      max_sparsity: 0.95

``groups``, a list, gives parts of the model budgets of their own. Each group has a ``select`` and
whatever of ``sparsity`` or ``schedule``, ``score``, ``scope``, ``pattern`` and ``limits`` differs
from the top level.

The command line prunes checkpoints with the same recipes: at once, so with ``sparsity`` or
``pattern``. These are its alone::

    scope: layer               # one ranking for each tensor; row: for each output row
    pattern: "2:4"             # instead of a sparsity: 2 of every 4 in a row are kept
    nan: keep                  # or error: what a NaN among the weights is
    select:
      also: ["lm_head"]        # is pruned besides the default, which include would replace
      min_ndim: 2              # tensors of fewer dimensions larger than 1 are left alone
      input_dims: {"*.w1": 0}  # where the inputs of tensors lie, for rows and patterns
    output: {masks: true, card: true}  # whether to write the masks, and a model card

Nothing in this file needs torch until a pruner is made.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distprune._common.strict import (
    Problems,
    Table,
    flag,
    one_of,
    read_yaml,
    share,
    texts,
    whole_number,
)
from distprune.files.recipe import input_dims_pairs
from distprune.schedule.functions import Cubic, Linear, OneShot, Schedule

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed import ProcessGroup

    from distprune.call.context import Decision, PruningCall
    from distprune.methods.base import BasePruningMethod
    from distprune.schedule.pruner import ScheduledPruner

_RANKING_KEYS = ("scope", "pattern")
_BUDGET_KEYS = ("score", "method", "sparsity", "schedule", "select", "limits")
_GROUP_KEYS = (*_BUDGET_KEYS, *_RANKING_KEYS)
_KEYS = ("version", "seed", *_RANKING_KEYS, "nan", "output", *_BUDGET_KEYS, "groups")
_SELECT_KEYS = ("include", "also", "exclude", "names", "min_ndim", "input_dims")
_SCORES = ("magnitude", "random")
_SCOPES = ("global", "layer", "row")
_RAMP_KEYS = ("kind", "begin", "end", "frequency", "initial_sparsity", "final_sparsity")
_SCHEDULE_KEYS = {
    "one_shot": ("kind", "step", "sparsity"), "linear": _RAMP_KEYS, "cubic": _RAMP_KEYS
}  # fmt: skip
_SCHEDULES = {"one_shot": OneShot, "linear": Linear, "cubic": Cubic}
_STAND_IN = OneShot(0, 0.0)  # for a schedule that is wrong, until that is reported


class RecipeError(ValueError):
    """A recipe is wrong; the text names every key that is, and ``problems`` lists them."""

    def __init__(self, where: str, problems: list[str]) -> None:
        self.problems = tuple(problems)
        count = "one problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__("\n  - ".join([f"{where} has {count}:", *problems]))


@dataclass(frozen=True)
class RecipeGroup:
    """Parameters that share a budget.

    Attributes:
        schedule: the sparsity of all of them together, over the steps.
        method: "magnitude" or "random".
        include, exclude, names: as for ``select``.
        min_sparsity, max_sparsity: of every single parameter.
        min_ndim: tensors of fewer dimensions are left alone; None: as the command line has it.
        scope: as for the recipe; None: that of the recipe.
        pattern: (n, m), for this group only.
        also, input_dims: as for ``distprune.files.FileRecipe``; for checkpoints.
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
    also: tuple[str, ...] = ()
    input_dims: tuple[tuple[str, tuple[int, ...]], ...] = ()

    def select_mapping(self) -> dict[str, Any]:
        """What is selected, as a recipe says it."""
        chosen: dict[str, Any] = {} if self.include is None else {"include": list(self.include)}
        if self.also:
            chosen["also"] = list(self.also)
        if self.min_ndim is not None:
            chosen["min_ndim"] = self.min_ndim
        if self.input_dims:
            chosen["input_dims"] = {name: list(dims) for name, dims in self.input_dims}
        if self.exclude:
            chosen["exclude"] = list(self.exclude)
        return chosen | {"names": list(self.names)}

    def as_mapping(self) -> dict[str, Any]:
        """The keys of a group in a recipe."""
        schedule = self.schedule
        if self.pattern is not None:
            pattern = "{}:{}".format(*self.pattern)
            return {"score": self.method, "pattern": pattern, "select": self.select_mapping()}
        if schedule == OneShot(0, schedule.sparsity_at(0)):
            budget: dict[str, Any] = {"sparsity": schedule.sparsity_at(0)}
        else:
            kind = next(name for name, cls in _SCHEDULES.items() if type(schedule) is cls)
            values = {key: getattr(schedule, key) for key in _SCHEDULE_KEYS[kind][1:]}
            budget = {"schedule": {"kind": kind, **values}}
        if self.scope is not None:
            budget["scope"] = self.scope
        limits = {"min_sparsity": self.min_sparsity, "max_sparsity": self.max_sparsity}
        select = self.select_mapping()
        return {"score": self.method, **budget, "select": select, "limits": limits}


@dataclass(frozen=True)
class Recipe:
    """A checked recipe. ``repr`` shows it with every default filled in.

    Attributes:
        groups: one, unless the recipe has ``groups``.
        seed: of the method "random": the same elements on every run and any sharding; None:
            from torch's generator.
        scope: "global": one ranking over all parameters of a group; "layer": one for each of
            them; "row": one for each row of each.
        pattern: (n, m): n of every m in a row are kept; None without one.
        nan: "error", or "keep": what a NaN among the weights is.
        masks: whether masks are written.
        card: whether a model card is written.
        version: of the format.
    """

    groups: tuple[RecipeGroup, ...]
    seed: int | None = None
    scope: str = "global"
    pattern: tuple[int, int] | None = None
    nan: str = "error"
    masks: bool = True
    card: bool = True
    version: int = 1

    def as_mapping(self) -> dict[str, Any]:
        """Plain values with every default filled in; ``parse_recipe`` reads them again."""
        head: dict[str, Any] = {"version": self.version}
        if self.seed is not None:
            head["seed"] = self.seed
        if self.nan != "error":
            head["nan"] = self.nan
        if not (self.masks and self.card):
            head["output"] = {"masks": self.masks, "card": self.card}
        if self.pattern is not None:
            (only,) = self.groups
            head["pattern"] = "{}:{}".format(*self.pattern)
            return head | {"score": only.method, "select": only.select_mapping()}
        head["scope"] = self.scope
        groups = [each.as_mapping() for each in self.groups]
        return head | (groups[0] if len(groups) == 1 else {"groups": groups})

    def pruner(self, model: nn.Module, *, group: ProcessGroup | None = None) -> ScheduledPruner:
        """A pruner for a model that is wrapped already, if it is to be. Changes nothing yet.

        Args:
            model: plain or wrapped in anything that distprune supports.
            group: the ranks that take part; every rank by default.

        Raises:
            ValueError: a pattern matches nothing, or a parameter is in two groups; the recipe has
                what only the command line does, such as another scope.
        """
        from distprune.api.select import select
        from distprune.methods.builtin import L1Unstructured
        from distprune.schedule.pruner import ScheduledPruner

        if foreign := self._only_on_checkpoints():
            raise ValueError(
                f"the recipe has {', '.join(foreign)}; expected none of that, because a pruner "
                "ranks all parameters of a model together. `distprune prune` prunes checkpoints."
            )
        entries = [
            {
                "parameters": select(model, each.include, each.exclude, names=each.names),
                "schedule": each.schedule,
                "pruning_method": _random(self.seed) if each.method == "random" else L1Unstructured,
                "min_sparsity": each.min_sparsity,
                "max_sparsity": each.max_sparsity,
            }
            for each in self.groups
        ]
        return ScheduledPruner(entries, group=group)

    def _only_on_checkpoints(self) -> list[str]:
        """What the recipe says and a pruner does not do."""
        scopes = {each.scope or self.scope for each in self.groups} - {"global"}
        found = [f"scope {scope!r}" for scope in sorted(scopes)]
        if self.pattern is not None or any(each.pattern is not None for each in self.groups):
            found.append("a pattern")
        if self.nan != "error":
            found.append(f"nan {self.nan!r}")
        if not self.masks:
            found.append("output.masks")
        if not self.card:
            found.append("output.card")
        if any(each.min_ndim is not None for each in self.groups):
            found.append("select.min_ndim")
        if any(each.also for each in self.groups):
            found.append("select.also")
        if any(each.input_dims for each in self.groups):
            found.append("select.input_dims")
        return found


def load_recipe(path: str | Path) -> Recipe:
    """Read a recipe from a YAML file; needs PyYAML (``pip install 'distprune[recipes]'``).

    Raises:
        RecipeError: with every problem, its line, what was found and what was expected.
        FileNotFoundError: there is no such file.
        ImportError: PyYAML is missing.
    """
    value, problems = read_yaml(Path(path))
    return _parse(value, problems, str(path))


def parse_recipe(mapping: Mapping[str, Any]) -> Recipe:
    """A recipe from plain values, as YAML or JSON would have them.

    Raises:
        RecipeError: with every problem, what was found and what was expected.
    """
    return _parse(mapping, Problems(), "the recipe")


def _parse(value: Any, problems: Problems, where: str) -> Recipe:
    top = Table(value, (), _KEYS, problems)
    version = top.take("version", one_of(1))
    scope = top.take("scope", one_of(*_SCOPES), "global")
    seed = top.take("seed", whole_number(0), None)
    pattern = top.take("pattern", n_of_m, None)
    nan = top.take("nan", one_of("error", "keep"), "error")
    output = top.table("output", ("masks", "card"))
    masks, card = output.take("masks", flag, True), output.take("card", flag, True)
    shared = _read_group(top, {"method": "magnitude", "schedule": None})
    if "pattern" in top:
        for key in ("sparsity", "schedule", "scope", "groups", "limits"):
            if key in top:
                top.problem("has no place beside 'pattern', which says how much and where.", key)
        n, m = pattern or (1, 2)
        shared["schedule"] = OneShot(0, 1 - n / m)
    if "groups" in top:
        if "select" in top:
            top.problem("goes into each of the groups, if there are any.", "select")
        tables = top.tables("groups", _GROUP_KEYS)
        found = [_read_ranking(table, _read_group(table, shared)) for table in tables]
    else:
        tables, found = [top], [shared]
    for table, fields in zip(tables, found, strict=True):
        if table is not top and table.is_mapping and "select" not in table:
            table.problem("has no 'select', which every group needs.")
        if table.is_mapping and fields["schedule"] is None:
            table.problem("has no 'sparsity' and no 'schedule'; expected one of them.")
    is_random = any(fields["method"] == "random" for fields in found)
    if seed is not None and not is_random and not problems:
        top.problem("has no effect without score 'random'; leave it out.", "seed")
    if problems:
        raise RecipeError(where, problems.texts())
    groups = tuple(RecipeGroup(**fields) for fields in found)
    return Recipe(groups, seed, scope, pattern, nan, masks, card, version)


def _read_group(table: Table, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a RecipeGroup; a group without limits or a budget has those of the top."""
    fields = dict(defaults)
    if "score" in table and "method" in table:
        table.problem("is given beside 'score', and means the same; leave it out.", "method")
    for key in ("score", "method"):
        if key in table:
            fields["method"] = table.take(key, one_of(*_SCORES), defaults["method"])
    if "sparsity" in table and "schedule" in table:
        table.problem("is given beside 'sparsity'; expected one of the two.", "schedule")
    if "sparsity" in table:
        fields["schedule"] = OneShot(0, table.take("sparsity", share, 0.0))
    if "schedule" in table:
        fields["schedule"] = _read_schedule(table)
    if "select" in table:
        chosen = table.table("select", _SELECT_KEYS)
        fields["include"] = chosen.take("include", _patterns, None)
        fields["also"] = chosen.take("also", _patterns, ())
        fields["exclude"] = chosen.take("exclude", _patterns, ())
        fields["names"] = chosen.take("names", texts, ("weight",))
        fields["min_ndim"] = chosen.take("min_ndim", whole_number(1), None)
        fields["input_dims"] = chosen.take("input_dims", input_dims_pairs, ())
        if fields["also"] and fields["include"] is not None:
            chosen.problem("adds to the default, which 'include' replaces; leave one out.", "also")
    if "limits" in table:
        limits = table.table("limits", ("min_sparsity", "max_sparsity"))
        low = limits.take("min_sparsity", share, 0.0)
        high = limits.take("max_sparsity", share, 1.0)
        if low > high:
            limits.problem(f"min_sparsity {low} is above max_sparsity {high}.")
        fields |= {"min_sparsity": low, "max_sparsity": high}
    return fields


def _read_ranking(table: Table, fields: dict[str, Any]) -> dict[str, Any]:
    """The fields with the scope and the pattern that a group has of its own."""
    if "scope" in table:
        fields["scope"] = table.take("scope", one_of(*_SCOPES), None)
    if "pattern" in table:
        for key in ("sparsity", "schedule", "scope", "limits"):
            if key in table:
                table.problem("has no place beside 'pattern', which says how much and where.", key)
        n, m = fields["pattern"] = table.take("pattern", n_of_m, None) or (1, 2)
        everything = {"min_sparsity": 0.0, "max_sparsity": 1.0}
        fields |= {"schedule": OneShot(0, 1 - n / m), **everything}
    return fields


def _read_schedule(parent: Table) -> Schedule:
    every_key = tuple(dict.fromkeys(key for keys in _SCHEDULE_KEYS.values() for key in keys))
    kind = parent.peek("schedule", "kind")
    table = parent.table("schedule", _SCHEDULE_KEYS.get(kind, every_key))
    table.take("kind", one_of(*_SCHEDULE_KEYS))
    if kind not in _SCHEDULE_KEYS:
        return _STAND_IN
    count = len(table.problems)
    if kind == "one_shot":
        values = {
            "step": table.take("step", whole_number(0), 0),
            "sparsity": table.take("sparsity", share),
        }
    else:
        values = {
            "begin": table.take("begin", whole_number(0), 0),
            "end": table.take("end", whole_number(0)),
            "frequency": table.take("frequency", whole_number(1)),
            "initial_sparsity": table.take("initial_sparsity", share, 0.0),
            "final_sparsity": table.take("final_sparsity", share),
        }
    if len(table.problems) > count:
        return _STAND_IN
    try:
        schedule: Schedule = _SCHEDULES[kind](**values)
    except ValueError as error:  # values that do not go together
        table.problem(str(error))
        return _STAND_IN
    return schedule


def n_of_m(value: Any) -> tuple[int, int]:
    """ "2:4" as (2, 4)."""
    found = re.fullmatch(r"(\d{1,9}):(\d{1,9})", value) if isinstance(value, str) else None
    n, m = map(int, found.groups()) if found else (0, 0)
    if not 0 < n < m:
        # Without quotes YAML may take it for a number to the base of 60.
        raise ValueError('how many of how many are kept, such as "2:4", in quotes')
    return n, m


def _patterns(value: Any) -> tuple[str, ...]:
    patterns = texts(value)
    for pattern in patterns:
        try:
            re.compile(pattern.removeprefix("re:") if pattern.startswith("re:") else "")
        except re.error as error:
            raise ValueError(f"a regular expression after 're:' ({error})") from error
    return patterns


def _random(seed: int | None) -> type[BasePruningMethod]:
    """RandomUnstructured, which starts from the seed at every step.

    An element's score is then the same at every step: those pruned earlier are the lowest, and
    a resumed run goes on as if it had not stopped.
    """
    import torch

    from distprune.methods.builtin import RandomUnstructured
    from distprune.methods.ranking import random_keys, rank

    if seed is None:
        return RandomUnstructured

    class SeededRandom(RandomUnstructured):
        def decide(self, call: PruningCall) -> Decision:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                return rank(call, self.amount, random_keys(call.communicator))

    # Compared over the ranks, as everything about a method is.
    SeededRandom.__qualname__ = f"SeededRandom(seed={seed})"
    return SeededRandom
