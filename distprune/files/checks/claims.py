"""Compare report.json, run.json and recipe.yaml of a result with values derived from its bytes."""

from __future__ import annotations

import dataclasses
import json
import math

from distprune.files.checkpoints.header import load_json
from distprune.files.errors import CheckpointError, SelectionError
from distprune.files.partial import RECIPE_FILE
from distprune.files.planning import Plan, digest_of
from distprune.files.recipe import FileRecipe
from distprune.files.reports.building import mtimes_of
from distprune.files.reports.report import REPORT_FILE, RUN_FILE, Report
from distprune.files.text import printable


def recipe_of(report: Report, folder: str) -> FileRecipe:
    """The recipe in a report.

    Args:
        report: of a result.
        folder: of the result, for messages.

    Raises:
        CheckpointError: the recipe is invalid.
    """
    unknown = set(report.recipe) - {field.name for field in dataclasses.fields(FileRecipe)}
    if unknown:
        raise CheckpointError(
            f"the recipe in {folder}/{REPORT_FILE} has an unknown field {printable(min(unknown))}."
        )
    try:
        return FileRecipe(**report.recipe)
    except SelectionError as error:
        problems = error.problems or (error.headline,)
        headline = f"the recipe in {folder}/{REPORT_FILE} is invalid:"
        raise CheckpointError(headline, problems) from error
    except (TypeError, ValueError, RecursionError, OverflowError) as error:
        raise CheckpointError(
            f"the recipe in {folder}/{REPORT_FILE} is invalid: {error}."
        ) from error


def with_digest(report: Report, stored: Report, plan: Plan) -> Report:
    """A derived report with the stored modification times, and the digest that follows from them.

    A copy of the source, or of given scores, has other times. Since the digest depends on them,
    neither the times nor the digest can be changed alone.

    Args:
        report: derived from the result.
        stored: read from the result.
        plan: of the source as it is now.
    """
    mtimes = {name: stored.mtimes_ns.get(name, now) for name, now in mtimes_of(plan).items()}
    source = plan.checkpoint
    original = dataclasses.replace(
        source,
        files=tuple(dataclasses.replace(f, mtime_ns=mtimes[f.name]) for f in source.files),
        others=tuple(dataclasses.replace(f, mtime_ns=mtimes[f.name]) for f in source.others),
    )
    inputs = plan.inputs.with_times(stored.inputs or {}).facts()
    digest = digest_of(original, plan.recipe, inputs)
    return dataclasses.replace(report, mtimes_ns=mtimes, digest=digest, inputs=inputs or None)


def report_problems(raw: bytes, derived: Report) -> list[str]:
    """A sentence if report.json is not the report that prune writes; else nothing.

    Args:
        raw: the bytes of report.json, which :func:`parse_report` accepts.
        derived: from the source and the recipe.
    """
    if raw == derived.result_json():
        return []
    stored = load_json(raw, REPORT_FILE)
    expected = json.loads(derived.result_json())
    fields = [key for key in expected | stored if stored.get(key) != expected.get(key)]
    what = f" ({', '.join(map(printable, fields))})" if fields else ", to the byte"
    return [f"{REPORT_FILE} is not the report of this result{what}."]


def recipe_problems(raw: bytes, recipe: FileRecipe) -> list[str]:
    """A sentence if recipe.yaml is not the text of the recipe; else nothing."""
    if raw == recipe.as_stored().to_yaml().encode():
        return []
    return [f"{RECIPE_FILE} is not the text of the recipe in {REPORT_FILE}."]


def run_problems(raw: bytes, stored: Report, num_bytes: int) -> list[str]:
    """Sentences on impossible values in run.json, whose values differ from run to run.

    Args:
        raw: the bytes of run.json.
        stored: read from them by :func:`parse_report`.
        num_bytes: written by any run of this plan.
    """
    run = stored.run
    numbers = [*run.seconds.values(), *map(float, run.peak_rss_bytes)]
    checks = [
        (run.num_ranks >= 1, f"num_ranks is {run.num_ranks}"),
        (
            len(run.peak_rss_bytes) == run.num_ranks,
            f"peak_rss_bytes is of {len(run.peak_rss_bytes)} ranks, and num_ranks {run.num_ranks}",
        ),
        (
            all(math.isfinite(number) and number >= 0 for number in numbers),
            "a time or a size is negative or not a number",
        ),
        (raw == stored.run_json(), "its bytes are not those that prune writes"),
        (run.num_bytes == num_bytes, f"num_bytes is {run.num_bytes}; expected {num_bytes}"),
    ]
    return [f"{RUN_FILE}: {problem}." for is_good, problem in checks if not is_good]
