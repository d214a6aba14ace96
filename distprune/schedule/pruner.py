"""ScheduledPruner: one object that follows a schedule in a training loop or a callback."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from distprune._common.bounds import SparsityBound
from distprune._common.collectives import Communicator
from distprune._common.naming import unwrap
from distprune._common.process_groups import world
from distprune.api.global_unstructured import global_arguments
from distprune.api.local import remove
from distprune.call.arguments import ParameterArguments
from distprune.call.importance_scores import without_others
from distprune.call.report import PruningReport
from distprune.call.run import count_pruned, prune_parameters
from distprune.masks.checks import check_removable
from distprune.masks.hook import find_hook
from distprune.methods.base import BasePruningMethod
from distprune.methods.builtin import L1Unstructured
from distprune.schedule.functions import Schedule
from distprune.schedule.groups import Group, make_groups
from distprune.selection.within_bounds import FLOOR
from distprune.verification.report import VerificationReport
from distprune.verification.verifying import verify_parameters

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Scores = Mapping[tuple[nn.Module, str], Tensor]


class ScheduledPruner:
    """Prunes a model by a schedule, one ``step()`` after each step of the optimizer.

    At a step that is due the schedule's sparsity, which is of the total, becomes an exact
    count: round(sparsity * elements), halves to even, less what the masks in force prune
    already. So the sparsity never decreases, and a model that was pruned before, or loaded
    with its masks, is brought to the target from where it is; where it is at or beyond it,
    nothing happens. Every element counts once: shards, replicas and tied parameters too.

    Call it on every rank, with the same arguments, once for each step of the optimizer
    (under gradient accumulation: not for the micro-batches between), and save its state
    after its step::

        for step, batch in enumerate(loader):
            ...
            optimizer.step()
            report = pruner.step()

    Args:
        parameters: (module, name) pairs, as ``select`` lists them; or, for budgets of their
            own, dicts with "parameters" and, where they differ from the arguments below,
            "schedule", "pruning_method", "min_sparsity" and "max_sparsity", like the param
            groups of an optimizer.
        schedule: what is due when; may be left out if every group has one.
        pruning_method: a class, as for ``global_unstructured``; is given the count as ``amount``.
        importance_scores: as for ``global_unstructured``: a mapping, or a function without
            arguments that returns one. It is called when something is about to be pruned, on
            every rank, so that it may communicate.
        group: the ranks that take part; every rank by default.
        min_sparsity, max_sparsity: floors and ceilings of single parameters, as for
            ``global_unstructured``. While a growing target is smaller than the floors together,
            no parameter is pruned beyond its floor; so the floors hold as soon as the target
            suffices for them. That it does in the end, and that the ceilings leave enough, is
            checked here (but for a :class:`Function`, whose end is not known).
        pipeline_parallel: the ranks have different parameters, with full names, as for
            ``global_unstructured``. Bounds go by full name, and are checked at the first
            pruning.
        verify_every: after every so many steps, whether or not anything was due, check that the
            masks act, and are those that the last pruning left: see ``verify``. None: never.

    Attributes:
        num_steps: how often ``step()`` was called; the next call is step number ``num_steps``.

    Raises:
        TypeError, ValueError: arguments of a wrong type; a parameter in two groups; bounds that
            the end of the schedule cannot meet.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[nn.Module, str]] | Iterable[Mapping[str, Any]],
        schedule: Schedule | None = None,
        *,
        pruning_method: type[BasePruningMethod] = L1Unstructured,
        importance_scores: Scores | Callable[[], Scores] | None = None,
        group: ProcessGroup | None = None,
        min_sparsity: SparsityBound | None = None,
        max_sparsity: SparsityBound | None = None,
        pipeline_parallel: bool = False,
        verify_every: int | None = None,
    ) -> None:
        defaults = {
            "pipeline_parallel": pipeline_parallel,
            "schedule": schedule,
            "pruning_method": pruning_method,
            "min_sparsity": min_sparsity,
            "max_sparsity": max_sparsity,
        }
        self._groups: list[Group] = make_groups(parameters, defaults)
        if not (
            importance_scores is None
            or isinstance(importance_scores, Mapping)
            or callable(importance_scores)
        ):
            raise TypeError(
                f"importance_scores is a {type(importance_scores).__name__}; expected a dict from "
                "(module, name) to a tensor, or a function that returns one."
            )
        if verify_every is not None and (
            isinstance(verify_every, bool) or not isinstance(verify_every, int) or verify_every < 1
        ):
            raise ValueError(
                f"verify_every={verify_every!r}; expected a number of steps >= 1, or None."
            )
        self._verify_every = verify_every
        self._importance_scores = importance_scores
        self._process_group = group
        self._is_pipeline_parallel = pipeline_parallel
        self.num_steps = 0
        self._has_pruned = [False] * len(self._groups)
        self._last_reports: tuple[PruningReport | None, ...] = (None,) * len(self._groups)

    def step(self) -> PruningReport | None:
        """Prune what is due after this step of the optimizer.

        Returns:
            What was pruned; None if nothing was. The report of several groups lists the
            parameters of all that were pruned now, and has no threshold, as each group has its
            own: see :attr:`last_reports`.

        Raises:
            ValueError: the ranks are at different steps, or have different schedules or
                targets; a function of the step that returns no sparsity.
            Exception: as ``global_unstructured``, on every rank. The step does not count then,
                and no group has changed but those before the one that failed: a second call
                takes up where the first one stopped.
            VerificationError: see ``verify_every``; on every rank. The step counts, and its
                pruning is done.

        Cost: nothing at a step that is not due, so ranks are only compared where all
        of them prune. A rank that is at another step, where nothing is due, is not
        noticed here: the others wait for it until the process group's timeout. At a due step
        one read of the masks, two small all-reduces, and a global pruning.
        """
        reports = tuple(
            self._prune_group(position) if group.schedule.is_due(self.num_steps) else None
            for position, group in enumerate(self._groups)
        )
        self.num_steps += 1
        self._last_reports = reports
        done_now = (report is not None for report in reports)
        self._has_pruned = [a or b for a, b in zip(self._has_pruned, done_now, strict=True)]
        if self._verify_every is not None and self.num_steps % self._verify_every == 0:
            self.verify()
        done = [report for report in reports if report is not None]
        return _merged(done) if done else None

    def verify(self) -> VerificationReport:
        """Check the masks of the parameters now; see :func:`distprune.verify`. Collective.

        Every parameter of a group that this object has pruned has to be pruned. What only the
        whole model shows, such as a module that was replaced in it, is left to ``verify(model)``.

        Returns:
            A report, the same on every rank.

        Raises:
            VerificationError: something is wrong; on every rank.
        """
        return verify_parameters(
            self.parameters,
            world(self._process_group),
            pruned=self.pruned_parameters,
            pipeline_parallel=self._is_pipeline_parallel,
        )

    @property
    def pruned_parameters(self) -> list[tuple[nn.Module, str]]:
        """Those of ``parameters`` in the groups that this object has pruned."""
        groups = zip(self._groups, self._has_pruned, strict=True)
        return [pair for group, has_pruned in groups if has_pruned for pair in group.parameters]

    @property
    def parameters(self) -> list[tuple[nn.Module, str]]:
        """The (module, name) pairs of all groups."""
        return [pair for group in self._groups for pair in group.parameters]

    @property
    def sparsity(self) -> float:
        """The target in force, of the total of all groups: 0.0 until a pruning was due."""
        if len(self._groups) == 1:
            return self._groups[0].target
        total = sum(group.num_elements for group in self._groups)
        return sum(group.target * group.num_elements for group in self._groups) / max(total, 1)

    @property
    def last_reports(self) -> tuple[PruningReport | None, ...]:
        """What the last ``step()`` pruned, per group."""
        return self._last_reports

    def state_dict(self) -> dict[str, Any]:
        """The state, in plain Python values; the same on every rank.

        The masks are the model's: save its state dict with this one.
        """
        return {
            "num_steps": self.num_steps,
            "groups": [group.to_state() for group in self._groups],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from where a pruner with the same schedules and parameters was saved.

        Raises:
            ValueError: it was saved with other schedules or parameters; says which. Nothing has
                changed then.
        """
        _check_state(state, self.state_dict())
        self.num_steps = int(state["num_steps"])
        for group, saved in zip(self._groups, state["groups"], strict=True):
            group.target = float(saved["sparsity"])

    def remove(self) -> None:
        """Make all pruning of the parameters final: ordinary ones with zeros in them.

        Local on every rank. For when the schedule is over: a later pruning would
        rank the zeros like any other value.

        Raises:
            ValueError: a tied parameter that is pruned differently under its names, by another
                call than this pruner's.
            RuntimeError: as ``remove``. No parameter has changed then.
        """
        pairs = [(unwrap(m), name) for each in self._groups for m, name in each.places]
        pairs = [pair for pair in pairs if find_hook(*pair) is not None]
        for module, name in pairs:
            check_removable(module, name)
        self._has_pruned = [False] * len(self._groups)
        for module, name in pairs:
            # Else removed with a parameter that it is tied to.
            if find_hook(module, name) is not None:
                remove(module, name)

    def _prune_group(self, position: int) -> PruningReport | None:
        group = self._groups[position]
        communicator = world(self._process_group)
        target = 0.0

        def make_arguments() -> ParameterArguments:
            nonlocal target
            target = group.target_at(self.num_steps)
            return ParameterArguments(
                parameters=group.parameters,
                # Whatever decides if a rank goes on to the next collective.
                facts=[
                    ("step of the schedule", str(self.num_steps)),
                    ("parameter group", f"{position} of {len(self._groups)}"),
                    ("schedule", repr(group.schedule)),
                    ("target sparsity", repr(target)),
                    ("importance_scores", type(self._importance_scores).__name__),
                ],
                pipeline_parallel=self._is_pipeline_parallel,
            )

        entries = count_pruned(make_arguments, communicator)
        group.join_stages(entries)
        count = group.num_to_prune(target, entries)
        if count <= 0:
            group.target = target
            return None
        is_growing = group.is_growing(target, entries)
        scores = self._scores(position, communicator)
        report = prune_parameters(
            lambda: global_arguments(
                group.parameters,
                group.pruning_method,
                scores,
                amount=count,
                pipeline_parallel=self._is_pipeline_parallel,
                **group.bounds_now(is_growing),
            ),
            communicator,
        )
        group.target = target
        if not is_growing:
            return report
        # While the target grows, floors are passed as ceilings; report them as min_sparsity.
        entries = tuple(replace(e, held_at=e.held_at and FLOOR) for e in report.parameters)
        return replace(report, parameters=entries)

    def _scores(self, position: int, communicator: Communicator) -> Scores | None:
        """The scores of a group: one mapping serves all groups."""
        scores = self._importance_scores
        if scores is not None and not isinstance(scores, Mapping):
            scores = communicator.run(scores)
        mine = self._groups[position].places
        others = [
            place for i, group in enumerate(self._groups) if i != position for place in group.places
        ]
        return without_others(scores, mine, others)


def _check_state(saved: Mapping[str, Any], present: Mapping[str, Any]) -> None:
    if not set(present) <= set(saved):
        raise ValueError(
            f"the state has the keys {list(saved)}; expected {list(present)}, as state_dict() of a "
            "ScheduledPruner has them."
        )
    if len(saved["groups"]) != len(present["groups"]):
        raise ValueError(
            f"the state has {len(saved['groups'])} parameter groups and this pruner "
            f"{len(present['groups'])}; expected the groups that it was saved with."
        )
    for position, (old, new) in enumerate(zip(saved["groups"], present["groups"], strict=True)):
        if old["schedule"] != new["schedule"]:
            raise ValueError(
                f"the state of group {position} was saved with schedule {old['schedule']}, and "
                f"this pruner has {new['schedule']}; expected the same one."
            )
        if old["parameters"] != new["parameters"]:
            lost = [name for name in old["parameters"] if name not in new["parameters"]]
            added = [name for name in new["parameters"] if name not in old["parameters"]]
            raise ValueError(
                f"the state of group {position} was saved with other parameters: only in the "
                f"state: {', '.join(lost) or '(none)'}; only in this pruner: "
                f"{', '.join(added) or '(none)'}; expected the same ones, in the same order."
            )


def _merged(reports: Sequence[PruningReport]) -> PruningReport:
    """One report for the groups that were pruned at a step."""
    if len(reports) == 1:
        return reports[0]
    return PruningReport(
        method=", ".join(dict.fromkeys(report.method for report in reports)),
        amount=sum(int(report.amount or 0) for report in reports),
        parameters=tuple(entry for report in reports for entry in report.parameters),
        threshold=None,
        num_ties=0,
        num_ties_pruned=0,
        num_ranks=reports[0].num_ranks,
        num_collectives=sum(report.num_collectives for report in reports),
        bytes_sent=sum(report.bytes_sent for report in reports),
        seconds=sum(report.seconds for report in reports),
    )
