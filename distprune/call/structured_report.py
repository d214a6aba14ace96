"""What ``global_structured`` did: exact counts of channels, the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from distprune._common.report_text import cost_facts, share, table
from distprune.call.report import PruningReport


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
