"""Schedules by the names that recipes have for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from distprune.schedule.functions import Cubic, Linear, OneShot, Schedule

_CLASSES: dict[str, type[OneShot | Linear | Cubic]] = {
    "one_shot": OneShot, "linear": Linear, "cubic": Cubic
}  # fmt: skip


def schedule_of(values: Mapping[str, Any]) -> Schedule:
    """The schedule that a section ``schedule`` describes.

    Raises:
        ValueError: values that do not go together.
    """
    arguments = dict(values)
    return _CLASSES[arguments.pop("kind")](**arguments)


def schedule_mapping(schedule: Schedule) -> dict[str, Any]:
    """The section ``schedule`` of a recipe."""
    for kind, schedule_class in _CLASSES.items():
        if type(schedule) is schedule_class:
            values = {f.name: getattr(schedule, f.name) for f in fields(schedule_class)}
            return {"kind": kind, **values}
    raise ValueError(f"{schedule!r} has no form in a recipe; expected OneShot, Linear or Cubic.")
