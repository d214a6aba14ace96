"""Every change of a result's report, recipe or run.json is found by verify."""

import json

import pytest
import torch
from kinds_of_recipes import RECIPES, tensors

from distprune.files import planning, pruning
from distprune.files.checks.claims import with_digest
from distprune.files.recipe import FileRecipe
from distprune.files.reports.report import REPORT_FILE, RUN_FILE, read_report
from distprune.files.verifying import verify
from helpers import tiny_checkpoints

RECIPE_FILE = "distprune/recipe.yaml"


def leaves(value, path=()):
    """Paths to everything in a JSON value that is no list or object, and to all lists."""
    if isinstance(value, dict | list):
        yield path
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, each in items:
            yield from leaves(each, (*path, key))
    else:
        yield path


def changed(value):
    """Values near this one, of its own type and of others."""
    if isinstance(value, bool):
        return [not value, 1, None]
    if isinstance(value, int):
        return [value + 1, value - 1, -value - 1, float(value), str(value), None, 2**63, not value]
    if isinstance(value, float):
        return [value + 1, -value - 1, value * 2 + 1, str(value), None, 0, 1e308]
    if isinstance(value, str):
        return [value + "x", value[1:] + "y", "", None, 0] if value else ["x", None]
    if isinstance(value, list):
        return [[*value, 1], value[:-1] if value else [0], None, {}, [*value, *value, None]]
    if isinstance(value, dict):
        return [{**value, "more": 1}, None, []]
    return [0, 0.5, "0x1", False, []]


def edited(raw, path, value, delete=False):
    values = json.loads(raw)
    inner = values
    for key in path[:-1]:
        inner = inner[key]
    if delete:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return (json.dumps(values, indent=1) + "\n").encode()


def test_any_value_of_the_report(found, made):
    raw = (made[1] / REPORT_FILE).read_bytes()
    values = json.loads(raw)
    num_edits = 0
    for path in leaves(values):
        if not path:
            continue
        value = values
        for key in path:
            value = value[key]
        edits = [edited(raw, path, each) for each in changed(value) if not same(each, value)]
        edits.append(edited(raw, path, None, delete=True))
        for edit in edits[:: 1 if len(path) < 3 else 3]:
            problems = found(lambda target, raw=edit: (target / REPORT_FILE).write_bytes(raw))
            assert problems and any("report.json" in each for each in problems), (path, problems)
            num_edits += 1
    assert num_edits > 150
    for edit in (raw + b" ", raw.replace(b"\n", b"", 1), raw[:-1]):
        (problem,) = found(lambda target, raw=edit: (target / REPORT_FILE).write_bytes(raw))
        assert problem == "distprune/report.json is not the report of this result, to the byte."


def same(one, other):
    return type(one) is type(other) and one == other


def test_any_field_of_the_recipe(found, made):
    text = (made[1] / RECIPE_FILE).read_text()
    lines = text.splitlines(keepends=True)
    edits = [text + "# more\n", text + "masks: false\n", text[:-1], "", text.replace(":", ": ", 1)]
    for number, line in enumerate(lines):
        key = line.partition(":")[0]
        for new in ("", f"{key}: 7\n", f"{key}: null\n", f'{key}: "x"\n', f"#{line}"):
            if new != line:
                edits.append("".join([*lines[:number], new, *lines[number + 1 :]]))
    for edit in edits:
        problems = found(lambda target, edit=edit: (target / RECIPE_FILE).write_text(edit))
        assert len(problems) == 1 and "recipe.yaml" in problems[0], edit


def test_what_cannot_be_in_run_json(found, made):
    raw = (made[1] / RUN_FILE).read_bytes()
    edits = [
        edited(raw, (key,), value)
        for key, values in {
            "num_ranks": [0, -1, 2, "1", None],
            "seconds": [None, {"count": -1.0}, {"count": "1"}],
            "peak_rss_bytes": [[], [1, 2], [-1], ["1"], None],
            "num_bytes": [0, 1.5, None],
            "versions": [None, {"python": 3}],
            "schema": [2],
        }.items()
        for value in values
    ]
    edits += [edited(raw, (key,), None, delete=True) for key in json.loads(raw)]
    for edit in [*edits, raw + b" ", raw[:-1], b""]:
        problems = found(lambda target, edit=edit: (target / RUN_FILE).write_bytes(edit))
        assert problems and "run.json" in problems[0], edit


@pytest.mark.parametrize("claimed", ["global", "layer", "row", "pattern", "tiles"])
def test_a_random_pruning_that_says_it_is_one_by_magnitude(tmp_path, claimed):
    """Masks, weights, report and recipe fit together, and the report says nothing of thresholds."""
    source = tiny_checkpoints.save(tmp_path / "source", tensors([torch.bfloat16]))
    told = RECIPES[claimed]
    fields = {"pattern": told.pattern} if told.kept_of else {
        "sparsity": told.sparsity, "scope": told.scope, "pattern": told.pattern
    }  # fmt: skip
    done = FileRecipe(**fields, score="random", seed=1)
    pruning.prune(planning.plan(source, done), tmp_path / "target")
    assert verify(tmp_path / "target", source).is_good
    report = read_report(tmp_path / "target")
    values = json.loads(report.result_json())
    values["recipe"] |= {"score": "magnitude", "seed": None}
    plan = planning.plan(source, told)
    values["digest"] = with_digest(report, report, plan).digest
    nulls = dict.fromkeys(("threshold", "threshold_bits", "num_ties", "num_ties_pruned"))
    (tmp_path / "target" / RECIPE_FILE).write_text(told.to_yaml())
    for more in (nulls, {}):
        text = json.dumps(values | more, indent=1) + "\n"
        (tmp_path / "target" / REPORT_FILE).write_text(text)
        problems = verify(tmp_path / "target", source).problems
        assert any("order of scores" in problem for problem in problems)


def test_the_digest_covers_the_recipe_and_the_times(found, made):
    """Where a field has no effect on these weights, the digest still tells."""
    raw = (made[1] / REPORT_FILE).read_bytes()
    recipe = json.loads(raw)["recipe"]
    field, other = "nan", "keep" if recipe["nan"] == "error" else "error"
    if recipe["pattern"] == "1x4":  # NaN are always refused
        field, other = "input_dims", [["*.weight", [1]]]
    edit = edited(raw, ("recipe", field), other)

    def change(target):
        (target / REPORT_FILE).write_bytes(edit)
        (target / RECIPE_FILE).write_text(FileRecipe(**json.loads(edit)["recipe"]).to_yaml())

    (problem,) = found(change)
    # Only NaN themselves tell otherwise.
    is_refused = "does not fit" in problem and "NaN in a.weight" in problem
    assert is_refused if other == "error" else problem.endswith("of this result (digest).")
