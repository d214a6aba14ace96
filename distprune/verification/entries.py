"""One parameter as this rank sees it, and as all ranks together see it."""

from __future__ import annotations

from dataclasses import dataclass, field

from distprune.masks.record import MaskRecord
from distprune.shards.shard import LocalShard
from distprune.verification.measuring import Numbers
from distprune.verification.report import VerifiedParameter


@dataclass
class LocalEntry:
    """One parameter on this rank.

    Attributes:
        name: fully qualified.
        shard, numbers: None if the parameter could not be read on this rank.
        record: the mask that the last pruning left; None if unknown.
        problems: what is wrong with the parameter on this rank.
    """

    name: str
    shard: LocalShard | None = None
    numbers: Numbers | None = None
    record: MaskRecord | None = None
    problems: list[str] = field(default_factory=list)


@dataclass
class SharedEntry:
    """One parameter over all ranks; the same on every rank.

    Attributes:
        problems: all but ``record_problem``.
        record_problem: says that the mask is not the one that the last pruning left.
    """

    name: str
    num_elements: int = 0
    num_pruned: int = 0
    fingerprint: int = 0
    problems: list[str] = field(default_factory=list)
    record_problem: str | None = None

    def to_report(self) -> VerifiedParameter:
        """The entry of the report."""
        problems = [*self.problems, *([self.record_problem] if self.record_problem else [])]
        return VerifiedParameter(
            self.name, self.num_elements, self.num_pruned, self.fingerprint, tuple(problems)
        )
