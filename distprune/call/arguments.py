"""The arguments of one collective call over parameters, as one value."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import nn

from distprune._common.amount import Amount, SparsityBound
from distprune._common.element_groups import GroupRule
from distprune._common.exact_sums import Normalization
from distprune.budgets.base import Budget
from distprune.call.context import Decision, PruningCall
from distprune.call.grouping import InputDims
from distprune.masks.hook import PruningHook
from distprune.shards.target import Scores

# (label, text): must be equal on all ranks of a call.
Fact = tuple[str, str]
# (module, name) -> the hook to register on the module
MakeHook = Callable[[nn.Module, str], PruningHook]


class DecidesMasks(Protocol):
    """What a call needs of a pruning method."""

    READS_VALUES: bool

    def decide(self, call: PruningCall) -> Decision:
        """Decide the masks of all parameters. Collective: the same steps on every rank."""
        ...


@dataclass(frozen=True, kw_only=True)
class ParameterArguments:
    """The parameters of a call, and what the ranks must agree on.

    Attributes:
        parameters: (module, name) pairs, the same on every rank unless ``pipeline_parallel``.
        importance_scores: by (module, name): like the parameter, or whole; None: the values.
        scores_name: of that argument, for messages.
        pipeline_parallel: the ranks have different lists, which are joined by name.
        facts: arguments that must be equal on all ranks.
    """

    parameters: Iterable[tuple[nn.Module, str]]
    importance_scores: Scores | None = None
    scores_name: str = "importance_scores"
    pipeline_parallel: bool = False
    facts: Sequence[Fact] = ()

    def all_facts(self) -> list[Fact]:
        """Everything that must be equal on all ranks, but for the parameters themselves."""
        return [*self.facts, ("pipeline_parallel", str(self.pipeline_parallel))]


@dataclass(frozen=True)
class OneRanking:
    """One ranking over all parameters decides how much each of them loses.

    Attributes:
        min_sparsity, max_sparsity: floors and ceilings of single parameters, as the caller gave
            them; None: none.
    """

    min_sparsity: SparsityBound | None = None
    max_sparsity: SparsityBound | None = None

    @property
    def has_bounds(self) -> bool:
        """Whether single parameters may be bounded."""
        return self.min_sparsity is not None or self.max_sparsity is not None

    @property
    def facts(self) -> list[Fact]:
        """What must be equal on all ranks before the parameters are known."""
        bounds = "given" if self.has_bounds else "none"
        return [("bounds on the sparsity of parameters", bounds), ("budget", "none"), _NO_SCOPE]


@dataclass(frozen=True, kw_only=True)
class ByBudget(OneRanking):
    """A budget decides how much each parameter loses, within the bounds.

    Attributes:
        budget: the rule.
        has_amount: whether the caller gave an amount; without one, the budget gives the total.
    """

    budget: Budget
    has_amount: bool = True

    @property
    def facts(self) -> list[Fact]:
        bounds, _, scope = super().facts
        return [bounds, ("budget", repr(self.budget)), scope]


@dataclass(frozen=True)
class InGroups:
    """Layers, rows, groups N:M or tiles are ranked on their own.

    Attributes:
        rule: which groups there are, and how much they lose.
        input_dims: dimensions that outputs sum over, where modules do not say it.
    """

    rule: GroupRule
    input_dims: InputDims | None = None

    @property
    def facts(self) -> list[Fact]:
        """What must be equal on all ranks before the parameters are known."""
        bounds, budget, _ = OneRanking().facts
        return [bounds, budget, (_NO_SCOPE[0], str(self.rule))]


_NO_SCOPE: Fact = ("scope or pattern", "None")


@dataclass(frozen=True, kw_only=True)
class PruningArguments(ParameterArguments):
    """The arguments of a call that prunes.

    Attributes:
        method: decides the masks.
        make_hook: makes what is registered on a module.
        amount: for the report.
        normalize: what the scores of each parameter are divided by, if anything.
        share: how the pruned elements are shared among the parameters.
    """

    method: DecidesMasks
    make_hook: MakeHook
    amount: Amount | None = None
    normalize: Normalization | None = None
    share: OneRanking | InGroups = OneRanking()

    def all_facts(self) -> list[Fact]:
        """Everything that must be equal on all ranks, but for the parameters themselves."""
        return [*super().all_facts(), ("normalize", str(self.normalize)), *self.share.facts]
