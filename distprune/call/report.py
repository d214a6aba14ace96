"""What a pruning call did: exact counts, the same on every rank.

A parameter has collapsed if a ranking over all parameters has emptied it; see _common/amount.py,
which files use, too. Not counted here are parameters of fewer than two dimensions (biases often
begin at zero), those for which the caller asked for it, by a budget or a bound, and those that had
collapsed before.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from distprune._common.amount import collapsed, is_nearly_empty
from distprune._common.report_text import Totals, cost_facts, share, table


@dataclass(frozen=True)
class ParameterReport:
    """One parameter, whole, each element counted once.

    Attributes:
        name: fully qualified if the parameter came from ``select``.
        num_elements: of the whole parameter.
        num_pruned_before: pruned by earlier calls.
        num_pruned_now: pruned by this call.
        held_at: "min_sparsity" or "max_sparsity" if this bound decided how much was pruned,
            and not the ranking over all parameters, nor the budget.
        wanted: with a budget, the sparsity that it gives this parameter, before floors, ceilings
            and earlier prunings change it; LAMP's is what it gives within them. With the scope
            "layer" or "row", or a pattern N:M, the sparsity before it is rounded to counts.
        min_sparsity, max_sparsity: its floor and ceiling, rounded to whole elements; None without.
    """

    name: str
    num_elements: int
    num_pruned_before: int
    num_pruned_now: int
    held_at: str | None = None
    wanted: float | None = None
    min_sparsity: float | None = None
    max_sparsity: float | None = None

    @property
    def num_pruned(self) -> int:
        """Pruned elements after this call."""
        return self.num_pruned_before + self.num_pruned_now

    @property
    def sparsity(self) -> float:
        """Share of pruned elements, in [0, 1]."""
        return share(self.num_pruned, self.num_elements)

    @property
    def wanted_text(self) -> str:
        """The sparsity that was asked for, or its bounds; empty if the ranking was free."""
        if self.wanted is not None:
            return f"{self.wanted:.2%}"
        low, high = self.min_sparsity, self.max_sparsity
        if low is not None and high is not None:
            return f"{low:.2%} to {high:.2%}" if low < high else f"{low:.2%}"
        if low is not None:
            return f"at least {low:.2%}"
        return "" if high is None else f"at most {high:.2%}"


@dataclass(frozen=True)
class PruningReport(Totals):
    """What ``global_unstructured`` did. ``print`` it on one rank; it is the same on all.

    Attributes:
        method: name of the pruning method.
        amount: as it was asked for: a fraction of what was unpruned, or a count.
        parameters: in the caller's order.
        threshold: elements with a smaller score were pruned, with a larger one
            kept, except in parameters whose bound decided; None if scores were not ranked.
        num_ties: elements whose score equals the threshold, in parameters whose bound did not
            decide ...
        num_ties_pruned: ... and those of them that were pruned, lowest index first.
        num_ranks: that took part.
        num_collectives: all-reduces that this rank took part in.
        bytes_sent: their payload, per rank.
        seconds: wall time on this rank.
        collapsed: names of parameters of which the ranking has left hardly anything; see
            amount.[Note: collapse].
        no_sparse_layout: after a pattern 2:4, for each parameter whose weight
            ``torch.sparse.to_sparse_semi_structured`` does not take, its name and why; None after
            any other call.
    """

    method: str
    amount: float | int | None
    parameters: tuple[ParameterReport, ...]
    threshold: float | None
    num_ties: int
    num_ties_pruned: int
    num_ranks: int
    num_collectives: int
    bytes_sent: int
    seconds: float
    collapsed: tuple[str, ...] = ()
    no_sparse_layout: tuple[tuple[str, str], ...] | None = None

    @property
    def num_pruned_before(self) -> int:
        """Elements that were pruned before this call."""
        return sum(entry.num_pruned_before for entry in self.parameters)

    @property
    def num_pruned_now(self) -> int:
        """Elements that this call pruned."""
        return sum(entry.num_pruned_now for entry in self.parameters)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, with the totals and sparsities written out."""
        data = asdict(self)
        data["collapsed"] = list(self.collapsed)
        data["parameters"] = [
            {**asdict(entry), "num_pruned": entry.num_pruned, "sparsity": entry.sparsity}
            for entry in self.parameters
        ]
        for name in (
            "num_elements", "num_pruned_before", "num_pruned_now", "num_pruned", "sparsity",
        ):  # fmt: skip
            data[name] = getattr(self, name)
        return data

    def to_json(self, **options: Any) -> str:
        """:meth:`to_dict` as JSON; ``options`` go to ``json.dumps``.

        JSON has no NaN or infinity; an infinite threshold becomes a string.
        """
        data = self.to_dict()
        if isinstance(data["threshold"], float) and abs(data["threshold"]) == float("inf"):
            data["threshold"] = str(data["threshold"])
        return json.dumps(data, allow_nan=False, **options)

    def __str__(self) -> str:
        is_bounded = any(entry.held_at for entry in self.parameters)
        is_wanted = any(entry.wanted_text for entry in self.parameters)
        heading = ["parameter", "elements", "before", "now"]
        heading += ["wanted"] if is_wanted else []
        heading += ["sparsity"]
        heading += ["held at"] if is_bounded else []
        rows = [
            [
                entry.name,
                f"{entry.num_elements:,}",
                f"{entry.num_pruned_before:,}",
                f"{entry.num_pruned_now:,}",
                *([entry.wanted_text] if is_wanted else []),
                f"{entry.sparsity:.2%}",
                *([entry.held_at or ""] if is_bounded else []),
            ]
            for entry in self.parameters
        ]
        total = [
            "total",
            f"{self.num_elements:,}",
            f"{self.num_pruned_before:,}",
            f"{self.num_pruned_now:,}",
            *([""] if is_wanted else []),
            f"{self.sparsity:.2%}",
            *([""] if is_bounded else []),
        ]
        amount = "" if self.amount is None else f", amount={self.amount}"
        facts = [f"{self.method}{amount}"]
        if self.threshold is not None:
            facts.append(f"threshold {self.threshold:.6g}")
        if self.num_ties > 1:
            facts[-1] += f" ({self.num_ties_pruned:,} of {self.num_ties:,} ties pruned)"
        facts += cost_facts(self)
        lines = [*table(heading, rows, total), "; ".join(facts)]
        if self.no_sparse_layout is not None:
            lines.append(self._sparse_layout_text())
        if self.collapsed:
            lines.append(f"nearly empty: {', '.join(self.collapsed)}")
        return "\n".join(lines)

    def _sparse_layout_text(self) -> str:
        misfits = self.no_sparse_layout or ()
        count = len(self.parameters) - len(misfits)
        text = f"to_sparse_semi_structured takes {count} of {len(self.parameters)} parameters"
        if misfits:
            shown = "; ".join(f"{name} {why}" for name, why in misfits[:3])
            text += f". {shown}" + (f"; {len(misfits) - 3} more" if len(misfits) > 3 else "")
        return text


@dataclass(frozen=True)
class MaskLoadingReport(PruningReport):
    """What ``load_masks`` did, and what did not fit, in the words of ``load_state_dict``.

    Attributes:
        missing_keys: parameters that got no mask: of those that were asked for; or, if none were,
            of two or more dimensions (many are dense on purpose: embeddings, heads).
        unexpected_keys: masks that no parameter is for, by their names in the file.
        mismatched_keys: masks of another shape than their parameters have.
    """

    missing_keys: tuple[str, ...] = ()
    unexpected_keys: tuple[str, ...] = ()
    mismatched_keys: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        report: PruningReport,
        missing_keys: tuple[str, ...],
        unexpected_keys: tuple[str, ...],
        mismatched_keys: tuple[str, ...],
    ) -> MaskLoadingReport:
        """A report with what did not fit."""
        values = {field.name: getattr(report, field.name) for field in fields(report)}
        return cls(**values, missing_keys=missing_keys, unexpected_keys=unexpected_keys,
                   mismatched_keys=mismatched_keys)  # fmt: skip

    def __str__(self) -> str:
        lines = [super().__str__()]
        for what, keys in (
            ("parameters without a mask", self.missing_keys),
            ("masks without a parameter", self.unexpected_keys),
            ("masks of another shape", self.mismatched_keys),
        ):
            if keys:
                more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
                lines.append(f"{len(keys)} {what}: {', '.join(keys[:3])}{more}")
        return "\n".join(lines)


@dataclass(frozen=True)
class ChannelGroupReport:
    """The channels of one group.

    Attributes:
        name: of the group.
        num_channels: in all.
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

    @property
    def num_removable(self) -> int:
        """Elements of all pruned channels: a model without these channels has so many fewer."""
        return self.num_pruned * self.channel_size


@dataclass(frozen=True)
class StructuredReport(PruningReport):
    """What ``global_structured`` did. ``print`` it on one rank; it is the same on all.

    It has everything of a :class:`PruningReport`, whose counts are of elements. ``threshold`` and
    ties are of channels, and ``collapsed`` has names of groups.

    Attributes:
        groups: in the caller's order.
    """

    groups: tuple[ChannelGroupReport, ...] = ()

    @classmethod
    def of(
        cls, report: PruningReport, groups: Sequence[ChannelGroupReport], collapsed: Sequence[str]
    ) -> StructuredReport:
        """A report with the channels of its groups."""
        values = {field.name: getattr(report, field.name) for field in fields(PruningReport)}
        return cls(**{**values, "collapsed": tuple(collapsed)}, groups=tuple(groups))

    @property
    def num_channels(self) -> int:
        """Channels of all groups."""
        return sum(group.num_channels for group in self.groups)

    @property
    def num_channels_pruned(self) -> int:
        """Channels of which nothing is left: they could be removed."""
        return sum(group.num_pruned for group in self.groups)

    @property
    def num_channels_pruned_now(self) -> int:
        """Channels that this call pruned."""
        return sum(group.num_pruned_now for group in self.groups)

    @property
    def num_removable(self) -> int:
        """Elements of all pruned channels: a model without these channels has so many fewer."""
        return sum(group.num_removable for group in self.groups)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, with the totals and sparsities written out."""
        data = super().to_dict()
        data["groups"] = [
            {
                **asdict(group),
                "num_pruned": group.num_pruned,
                "sparsity": group.sparsity,
                "num_removable": group.num_removable,
            }
            for group in self.groups
        ]
        for name in (
            "num_channels", "num_channels_pruned", "num_channels_pruned_now", "num_removable",
        ):  # fmt: skip
            data[name] = getattr(self, name)
        return data

    def __str__(self) -> str:
        rows = [
            [
                group.name,
                f"{group.num_channels:,}",
                f"{group.num_pruned_before:,}",
                f"{group.num_pruned_now:,}",
                f"{group.sparsity:.2%}",
                f"{group.num_removable:,}",
            ]
            for group in self.groups
        ]
        total = [
            "total",
            f"{self.num_channels:,}",
            f"{sum(group.num_pruned_before for group in self.groups):,}",
            f"{self.num_channels_pruned_now:,}",
            f"{share(self.num_channels_pruned, self.num_channels):.2%}",
            f"{self.num_removable:,}",
        ]
        heading = ["group", "channels", "before", "now", "sparsity", "removable elements"]
        facts = [
            f"{self.method}, amount={self.amount}",
            f"{share(self.num_removable, self.num_elements):.2%} of {self.num_elements:,} elements "
            "could be removed",
        ]
        if self.threshold is not None:
            facts.append(f"threshold {self.threshold:.6g}")
            if self.num_ties > 1:
                facts[-1] += f" ({self.num_ties_pruned:,} of {self.num_ties:,} ties pruned)"
        lines = [*table(heading, rows, total), "; ".join([*facts, *cost_facts(self)])]
        if self.collapsed:
            lines.append(f"nearly empty: {', '.join(self.collapsed)}")
        return "\n".join(lines)


@dataclass(frozen=True)
class MaskUpdate:
    """One parameter, whole, each element counted once.

    Attributes:
        name: fully qualified if the parameter came from ``select``.
        num_elements: of the whole parameter.
        num_pruned: pruned elements, now.
        num_grown: elements that were pruned before, and are not now ...
        num_dropped: ... and the other way round.
    """

    name: str
    num_elements: int
    num_pruned: int
    num_grown: int
    num_dropped: int

    @property
    def sparsity(self) -> float:
        """Share of pruned elements, in [0, 1]."""
        return share(self.num_pruned, self.num_elements)


@dataclass(frozen=True)
class MaskUpdateReport(Totals):
    """What ``set_masks`` did. ``print`` it on one rank; it is the same on all.

    Attributes:
        parameters: in the caller's order.
        num_ranks: that took part.
        num_collectives: all-reduces that this rank took part in.
        bytes_sent: their payload, per rank.
        seconds: wall time on this rank.
    """

    parameters: tuple[MaskUpdate, ...]
    num_ranks: int
    num_collectives: int
    bytes_sent: int
    seconds: float

    @property
    def num_grown(self) -> int:
        """Elements of all parameters that were pruned before, and are not now."""
        return sum(entry.num_grown for entry in self.parameters)

    @property
    def num_dropped(self) -> int:
        """Elements of all parameters that are pruned now, and were not before."""
        return sum(entry.num_dropped for entry in self.parameters)

    def __str__(self) -> str:
        rows = [
            [
                entry.name,
                f"{entry.num_elements:,}",
                f"{entry.num_dropped:,}",
                f"{entry.num_grown:,}",
                f"{entry.sparsity:.2%}",
            ]
            for entry in self.parameters
        ]
        total = [
            "total",
            f"{self.num_elements:,}",
            f"{self.num_dropped:,}",
            f"{self.num_grown:,}",
            f"{self.sparsity:.2%}",
        ]
        heading = ["parameter", "elements", "dropped", "grown", "sparsity"]
        return "\n".join([*table(heading, rows, total), "; ".join(cost_facts(self))])


_SHOWN = 5


def find_collapsed(
    entries: Sequence[ParameterReport], shapes: Sequence[Sequence[int]]
) -> tuple[str, ...]:
    """The names of the parameters that a call has emptied.

    Args:
        entries: of all parameters of the call.
        shapes: of the whole parameters.
    """
    emptied = collapsed([(entry.num_elements, entry.num_pruned) for entry in entries])
    return tuple(
        entries[position].name
        for position in emptied
        if _is_new(entries[position], shapes[position])
    )


def warn_of_collapse(report: PruningReport) -> None:
    """Warn of the collapsed parameters of a report, where the caller of the caller stands."""
    if not report.collapsed:
        return
    entries = {entry.name: entry for entry in report.parameters}
    shown = [
        f"{name} (now {entries[name].sparsity:.2%} pruned, of {entries[name].num_elements:,} "
        "elements)"
        for name in report.collapsed[:_SHOWN]
    ]
    if len(report.collapsed) > _SHOWN:
        shown.append(f"and {len(report.collapsed) - _SHOWN} more")
    few = "this parameter" if len(report.collapsed) == 1 else "these parameters"
    warnings.warn(
        f"the ranking over all parameters has left hardly anything of {', '.join(shown)}, where "
        f"{report.sparsity:.2%} of all elements are pruned: the scores of {few} are smaller than "
        "those of the others, and the model may be useless. Compare the parameters by "
        "normalize='rms', divide the amount among them by budget= ('lamp', for example), or bound "
        "what each may lose by max_sparsity=.",
        stacklevel=3,
    )


def _is_new(entry: ParameterReport, shape: Sequence[int]) -> bool:
    """Whether a parameter that has collapsed did so by this call, and nobody asked for it."""
    return (
        len(shape) >= 2
        and entry.held_at is None
        and entry.wanted is None
        and (entry.min_sparsity is None or entry.min_sparsity < 0.99)
        and not is_nearly_empty(entry.num_elements, entry.num_pruned_before)
    )
