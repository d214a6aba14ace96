"""Whether a saved state of a ScheduledPruner fits another one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def check_state(saved: Mapping[str, Any], present: Mapping[str, Any]) -> None:
    """Raise if a state was saved with other groups, schedules or parameters.

    Args:
        saved: the state to load.
        present: the state of the pruner that is to load it.

    Raises:
        ValueError: says what differs.
    """
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
