"""What all commands share: help, exit codes, stdout and stderr; recipes and env."""

import re

import pytest
import yaml
from click.testing import CliRunner
from commands import start

from distprune.cli.app import app
from distprune.cli.console import percent
from distprune.cli.options import option_name
from distprune.cli.prune import prune
from distprune.files.errors import format_size
from distprune.recipes import Recipe, load_recipe, shipped_recipes

HELPS = """
import sys
from distprune.cli import main

def helps(*command):
    sys.stdout.flush()
    try:
        main([*command, "--help"])
    except SystemExit as exit_:
        assert exit_.code == 0, command

from distprune.cli.app import app
for name in ["", *app.commands]:
    helps(*filter(None, [name]))
helps("recipe", "show")
heavy = {"torch", "numpy", "matplotlib", "safetensors"} & set(sys.modules)
assert not heavy, heavy
"""


def test_help_teaches_and_does_not_import_torch():
    process = start("-c", HELPS, NO_COLOR="1")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "\x1b[3" not in out
    for word in ("Usage: distprune", "Exit codes", "recipe show"):
        assert word in out


def test_the_help_of_prune_fits_a_screen_and_begins_with_what_is_needed():
    arguments = {"prog_name": "distprune", "terminal_width": 100}
    lines = CliRunner().invoke(app, ["prune", "--help"], **arguments).output.splitlines()
    assert len(lines) <= 60 and lines[0] == "Usage: distprune prune [OPTIONS] SRC DST"
    first = lines[lines.index("Options:") + 1 : lines.index("More:")]
    names = ["--recipe", "--sparsity", "--pattern", "--text", "--eval"]
    assert not {"  SRC", "  DST"} & set(lines)
    assert [re.search("--[a-z]+", line)[0] for line in first if "--" in line] == names


def test_every_key_of_a_recipe_is_an_option():
    options = {name for option in prune.params for name in option.opts}
    keys = set(Recipe.model_fields) - {"schedule", "names", "groups"}
    assert {option_name(key) for key in keys} <= options


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["bogus"], "No such command"),
        (["recipe", "show"], "Missing argument"),
        (["recipe", "show", "nope"], "expected a YAML file, or one of by_kind_of_layer, cubic"),
    ],
)
def test_a_wrong_command_is_exit_code_2_and_a_message_on_stderr(run, arguments, expected):
    done = run(*arguments)
    assert (done.code, done.out) == (2, "")
    assert expected in done.err


def test_shipped_recipes_are_listed_shown_and_valid(run):
    listed = [line.split()[0] for line in run("recipe", "ls").out.splitlines()[1:]]
    assert listed == [*shipped_recipes()] and len(listed) == 12
    for name in listed:
        text = run("recipe", "show", name).out
        assert yaml.safe_load(text) == load_recipe(shipped_recipes()[name]).as_values()


def test_the_schema_has_the_keys_of_recipes(run):
    schema = run("recipe", "schema").json
    assert set(schema["properties"]) == set(Recipe.model_fields)
    assert schema["additionalProperties"] is schema["$defs"]["GroupRecipe"]["additionalProperties"]


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
