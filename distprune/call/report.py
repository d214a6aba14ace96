"""What a pruning call did: exact counts, the same on every rank.

A parameter has collapsed if a ranking over all parameters has emptied it; see base/amount.py,
which files use, too. Not counted here are parameters of fewer than two dimensions (biases often
begin at zero), those for which the caller asked for it, by a budget or a bound, and those that had
collapsed before.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from distprune.base.amount import collapsed, is_nearly_empty, listed, share, table


@dataclass(frozen=True)
class CallReport:
    """Totals over the ``parameters`` of a report, and what its call cost.

    Attributes:
        parameters: an entry for each parameter, with ``num_elements`` and ``num_pruned``.
        num_ranks: the ranks that took part.
        num_collectives: all-reduces, and other collectives, that this rank took part in.
        bytes_sent: the payload of these, per rank.
        seconds: wall time on this rank.
    """

    parameters: Sequence[Any]
    num_ranks: int
    num_collectives: int
    bytes_sent: int
    seconds: float

    _TOTALS: ClassVar[tuple[str, ...]] = ("num_elements", "num_pruned", "sparsity")

    @property
    def num_elements(self) -> int:
        """Elements of all parameters."""
        return sum(entry.num_elements for entry in self.parameters)

    @property
    def num_pruned(self) -> int:
        """Pruned elements of all parameters."""
        return sum(entry.num_pruned for entry in self.parameters)

    @property
    def sparsity(self) -> float:
        """Share of pruned elements over all parameters, in [0, 1]."""
        return share(self.num_pruned, self.num_elements)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, such as ``json.dumps`` takes, with the totals and sparsities written out."""
        return {
            **_plain(self, *self._TOTALS),
            "parameters": [_plain(entry, "num_pruned", "sparsity") for entry in self.parameters],
        }

    def _cost(self) -> list[str]:
        """Ranks, traffic and time of the call, for the last line of the report."""
        return [
            f"{self.num_ranks} rank{'s' if self.num_ranks != 1 else ''}",
            f"{self.num_collectives} collectives, {self.bytes_sent:,} bytes per rank",
            f"{self.seconds:.3g} s",
        ]


@dataclass
class ParameterReport:
    """One parameter, whole, each element counted once.

    Attributes:
        name: fully qualified if the parameter came from ``select``.
        num_elements: the elements of the whole parameter.
        num_pruned_before: pruned by earlier calls.
        num_pruned_now: pruned by this call.
        held_at: "min_sparsity" or "max_sparsity" if this bound decided how much was pruned,
            and not the ranking over all parameters, nor the budget.
        wanted: with a budget, the sparsity that it gives this parameter, before floors, ceilings
            and earlier prunings change it. With the scope "layer" or "row", or a pattern N:M, the
            sparsity before it is rounded to counts.
        min_sparsity, max_sparsity: its floor and ceiling, rounded to whole elements; None without.
        num_grown: pruned by earlier calls, and not any more: ``set_masks`` alone does that.
    """

    name: str
    num_elements: int
    num_pruned_before: int
    num_pruned_now: int
    held_at: str | None = None
    wanted: float | None = None
    min_sparsity: float | None = None
    max_sparsity: float | None = None
    num_grown: int = 0

    @property
    def num_pruned(self) -> int:
        """Pruned elements after this call."""
        return self.num_pruned_before + self.num_pruned_now - self.num_grown

    @property
    def sparsity(self) -> float:
        """Share of pruned elements, in [0, 1]."""
        return share(self.num_pruned, self.num_elements)


@dataclass(frozen=True)
class PruningReport(CallReport):
    """What ``global_unstructured`` did. ``print`` it on one rank; it is the same on all.

    Attributes:
        method: name of the pruning method.
        amount: as it was asked for: a fraction of what was unpruned, or a count.
        parameters: an entry for each parameter, in the caller's order.
        threshold: elements with a smaller score were pruned, with a larger one
            kept, except in parameters whose bound decided; None if scores were not ranked.
        num_ties: elements whose score equals the threshold, in parameters whose bound did not
            decide ...
        num_ties_pruned: ... and those of them that were pruned, lowest index first.
        num_ranks, num_collectives, bytes_sent, seconds: what the call cost this rank: the ranks
            that took part, all-reduces and exchanges of cut rows, their payload, and wall time.
        collapsed: names of parameters of which the ranking has left hardly anything; see
            amount.[Note: collapse].
    """

    parameters: tuple[ParameterReport, ...]
    method: str
    amount: float | int | None
    threshold: float | None
    num_ties: int
    num_ties_pruned: int
    collapsed: tuple[str, ...] = ()

    _TOTALS = (*CallReport._TOTALS, "num_pruned_before", "num_pruned_now")

    @property
    def num_pruned_before(self) -> int:
        """Elements that were pruned before this call."""
        return sum(entry.num_pruned_before for entry in self.parameters)

    @property
    def num_pruned_now(self) -> int:
        """Elements that this call pruned."""
        return sum(entry.num_pruned_now for entry in self.parameters)

    @property
    def num_grown(self) -> int:
        """Elements that were pruned before this call, and are not any more."""
        return sum(entry.num_grown for entry in self.parameters)

    def __str__(self) -> str:
        amount = "" if self.amount is None else f", amount={self.amount}"
        facts = [f"{self.method}{amount}"]
        if self.threshold is not None:
            ties = f" ({self.num_ties_pruned:,} of {self.num_ties:,} ties pruned)"
            facts.append(f"threshold {self.threshold:.6g}{ties if self.num_ties > 1 else ''}")
        lines = [*self._table(), "; ".join([*facts, *self._cost()])]
        if self.collapsed:
            lines.append(f"nearly empty: {', '.join(self.collapsed)}")
        return "\n".join(lines)

    def _table(self) -> list[str]:
        entries = self.parameters
        columns = [
            ("parameter", [entry.name for entry in entries], "total"),
            column_of_counts("elements", [entry.num_elements for entry in entries]),
            column_of_counts("before", [entry.num_pruned_before for entry in entries]),
            column_of_counts("now", [entry.num_pruned_now for entry in entries]),
        ]
        if self.num_grown:
            columns.append(column_of_counts("grown", [entry.num_grown for entry in entries]))
        for heading, cells in (
            ("wanted", [_wanted(entry) for entry in entries]),
            ("sparsity", [f"{entry.sparsity:.2%}" for entry in entries]),
            ("held at", [entry.held_at or "" for entry in entries]),
        ):
            if any(cells):
                total = f"{self.sparsity:.2%}" if heading == "sparsity" else ""
                columns.append((heading, cells, total))
        return table_of(columns)


@dataclass(frozen=True)
class MaskLoadingReport(PruningReport):
    """What ``load_masks`` did, and what did not fit, in the words of ``load_state_dict``.

    Attributes:
        missing_keys: parameters of two or more dimensions that got no mask (many are dense on
            purpose: embeddings, heads).
        unexpected_keys: masks that no parameter is for, by their names in the file.
        mismatched_keys: masks of another shape than their parameters have.
    """

    missing_keys: tuple[str, ...] = ()
    unexpected_keys: tuple[str, ...] = ()
    mismatched_keys: tuple[str, ...] = ()


@dataclass(frozen=True)
class ChannelGroupReport:
    """The channels of one group.

    Attributes:
        name: the group's name.
        num_channels: the channels that the group has in all.
        num_pruned_before: channels of which nothing was left before the call.
        num_pruned_now: channels that the call pruned.
        channel_size: elements of one channel, in all parameters of the group.
    """

    name: str
    num_channels: int
    num_pruned_before: int
    num_pruned_now: int
    channel_size: int

    @property
    def num_pruned(self) -> int:
        """Channels of which nothing is left after the call: they could be removed."""
        return self.num_pruned_before + self.num_pruned_now

    @property
    def sparsity(self) -> float:
        """Share of pruned channels, in [0, 1]."""
        return share(self.num_pruned, self.num_channels)


@dataclass(frozen=True)
class StructuredReport(PruningReport):
    """What ``global_structured`` did. ``print`` it on one rank; it is the same on all.

    It has everything of a :class:`PruningReport`, whose counts are of elements. ``threshold`` and
    ties are of channels.

    Attributes:
        groups: an entry for each group, in the caller's order.
    """

    groups: tuple[ChannelGroupReport, ...] = ()

    @property
    def num_removable(self) -> int:
        """Elements of all pruned channels: the number that removing these channels would save."""
        return sum(group.num_pruned * group.channel_size for group in self.groups)

    def _table(self) -> list[str]:
        groups = self.groups
        removable = [group.num_pruned * group.channel_size for group in groups]
        return table_of([
            ("group", [group.name for group in groups], "total"),
            column_of_counts("channels", [group.num_channels for group in groups]),
            column_of_counts("before", [group.num_pruned_before for group in groups]),
            column_of_counts("now", [group.num_pruned_now for group in groups]),
            ("sparsity", [f"{group.sparsity:.2%}" for group in groups], f"{self.sparsity:.2%}"),
            column_of_counts("removable elements", removable),
        ])  # fmt: skip


def _plain(value: Any, *properties: str) -> dict[str, Any]:
    """A dataclass as plain data, with some of its properties."""
    return {**asdict(value), **{name: getattr(value, name) for name in properties}}


# The heading of a column, its cells, and what stands below them.
Column = tuple[str, list[str], str]


def _wanted(entry: ParameterReport) -> str:
    """The sparsity that was asked for, or its bounds; empty if the ranking was free."""
    if entry.wanted is not None:
        return f"{entry.wanted:.2%}"
    low, high = entry.min_sparsity, entry.max_sparsity
    if low is None and high is None:
        return ""
    return f"{low or 0:.2%} to {1 if high is None else high:.2%}"


def column_of_counts(heading: str, numbers: Sequence[int]) -> Column:
    """A column of numbers, and their sum."""
    return heading, [f"{number:,}" for number in numbers], f"{sum(numbers):,}"


def table_of(columns: Sequence[Column], **options: Any) -> list[str]:
    """The lines of a table; options are those of :func:`~distprune.base.amount.table`."""
    headings, cells, totals = zip(*columns, strict=True)
    return table(headings, list(zip(*cells, strict=True)), totals, **options)


def find_collapsed(
    entries: Sequence[ParameterReport], shapes: Sequence[Sequence[int]]
) -> tuple[str, ...]:
    """The names of the parameters that a call has emptied, and nobody asked for it.

    Args:
        entries: the entries of all parameters of the call.
        shapes: the shapes of the whole parameters.
    """
    emptied = collapsed([(entry.num_elements, entry.num_pruned) for entry in entries])
    return tuple(
        entry.name
        for entry, shape in ((entries[i], shapes[i]) for i in emptied)
        if len(shape) >= 2
        and entry.held_at is None
        and entry.wanted is None
        and (entry.min_sparsity or 0) < 0.99
        and not is_nearly_empty(entry.num_elements, entry.num_pruned_before)
    )


def warn_of_collapse(report: PruningReport) -> None:
    """Warn of the collapsed parameters of a report, where the caller of the caller stands."""
    if report.collapsed:
        sparsity = {entry.name: entry.sparsity for entry in report.parameters}
        shown = listed(f"{name} ({sparsity[name]:.2%} pruned)" for name in report.collapsed)
        warnings.warn(
            f"the ranking over all parameters has left hardly anything of {shown}, where "
            f"{report.sparsity:.2%} of all elements are pruned: their scores are smaller than "
            "those of the others, and the model may be useless. Compare the parameters by "
            "normalize='rms', divide the amount among them (budgets.uniform), or bound what each "
            "may lose by max_sparsity=.",
            stacklevel=3,
        )
