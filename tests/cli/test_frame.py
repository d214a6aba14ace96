"""What all commands share: help, exit codes, stdout and stderr; recipes and env."""

import json

import pytest
from commands import start

from distprune.cli.console import percent
from distprune.files.text import format_size
from distprune.recipe import load_recipe, shipped_recipes
from distprune.recipes.request import recipe_schema

HELPS = """
import sys
from distprune.cli.main import main

def helps(*command):
    sys.stdout.flush()
    try:
        main([*command, "--help"])
    except SystemExit as exit_:
        assert exit_.code == 0, command

from distprune.cli.app import make_app
import typer.main
root = typer.main.get_command(make_app())
for name in ["", *root.commands]:
    helps(*filter(None, [name]))
helps("recipe", "show")
heavy = {"torch", "numpy", "yaml", "matplotlib", "safetensors"} & set(sys.modules)
heavy |= {"distprune.recipes.form"} & set(sys.modules)
assert not heavy, heavy
"""


def test_help_teaches_and_does_not_import_torch():
    process = start("-c", HELPS, NO_COLOR="1")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "\x1b[3" not in out
    for word in ("Usage: distprune", "Examples", "Exit codes", "recipe show"):
        assert word in out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["bogus"], "No such command"),
        (["recipe", "show"], "Missing argument"),
        (["recipe", "show", "nope"], "expected a YAML file, or one of by_kind_of_layer, cubic"),
        (["env", "no/such/folder"], "no/such/folder does not exist"),
    ],
)
def test_a_wrong_command_is_exit_code_2_and_a_message_on_stderr(run, arguments, expected):
    done = run(*arguments)
    assert (done.code, done.out) == (2, "")
    assert expected in done.err


def test_a_wrong_recipe_names_every_problem(run, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("version: 1\nscope: rows\nsparsty: 0.5\n")
    done = run("recipe", "show", path)
    assert done.code == 2
    for text in ("scope: Input should be", "sparsty: Extra inputs", "no 'sparsity'"):
        assert text in done.err
    path.write_text("version: [")
    assert run("recipe", "show", path).code == 2


def test_shipped_recipes_are_listed_shown_and_valid(run):
    listed = {each["name"]: each["about"] for each in run("recipe", "ls", "--json").json}
    assert set(listed) == set(shipped_recipes()) and len(listed) == 12
    for name, about in listed.items():
        assert about in run("recipe", "ls").out
        text = run("recipe", "show", name).out
        assert text.strip() == shipped_recipes()[name].read_text().strip()
        shown = run("recipe", "show", name, "--json").json
        assert shown == load_recipe(shipped_recipes()[name]).as_mapping()


def test_the_schema_has_the_keys_of_recipes_and_no_null(run):
    schema = run("recipe", "schema").json
    assert schema == json.loads(json.dumps(recipe_schema()))
    assert schema["title"] == "A recipe of distprune" and schema["required"] == ["version"]
    group = schema["$defs"]["GroupForm"]
    assert group["required"] == ["select"]
    top = {"version", "seed", "nan", "output", "groups", "statistics", "scores"}
    assert set(schema["properties"]) == set(group["properties"]) | top
    ramp, one_shot = (schema["$defs"][name] for name in ("RampForm", "OneShotForm"))
    assert ramp["properties"]["kind"] == {"enum": ["linear", "cubic"], "type": "string"}
    assert one_shot["properties"]["sparsity"] == {"maximum": 1, "minimum": 0, "type": "number"}
    assert "null" not in json.dumps(schema)
    assert all(table["additionalProperties"] is False for table in schema["$defs"].values())


def test_env_says_what_a_report_needs(run, tmp_path):
    done = run("env", tmp_path, "--json")
    assert {"distprune", "torch", "python", "free on the disk"} <= set(done.json)
    assert "gloo" in done.json["distributed backends"]
    lines = run("env").out.splitlines()
    assert lines[0].split() == ["what", "value"] and len(lines) == len(done.json) + 1


def test_numbers_are_not_rounded_to_what_they_are_not():
    assert percent(1, 10**9) == "0.01 %" and percent(10**9 - 1, 10**9) == "99.99 %"
    assert percent(0, 3) == "0.00 %" and percent(3, 3) == "100.00 %" and percent(0, 0) == "-"
    assert [format_size(n) for n in (999, 1500, 3e9, 2e12)] == [
        "999 B",
        "1.5 kB",
        "3.0 GB",
        "2.0 TB",
    ]
