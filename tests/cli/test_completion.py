"""Completion by the shell (typer's own) knows commands, options and recipes, without torch."""

import pytest
from commands import start

IMPORTED = (
    "import os, sys\n"
    "heavy = {'torch', 'numpy', 'yaml'}\n"
    "os._exit = lambda code: sys.exit('heavy' if heavy & set(sys.modules) else code)\n"
    "from distprune.cli.main import main\nmain()\n"
)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("distprune pl", ["plan"]),
        ("distprune prune --spars", ["--sparsity"]),
        ("distprune prune a b -r semi", ["semi_structured_2_4"]),
        *(
            pytest.param(*case, marks=pytest.mark.thorough)
            for case in [
                ("distprune recipe show layer", ["layer_50"]),
                ("distprune recipe s", ["schema", "show"]),
                ("distprune plan a", []),
            ]
        ),
    ],
)
def test_of_bash(words, expected):
    number = str(len(words.split()) - 1)
    variables = {"_DISTPRUNE_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": number}
    process = start("-c", IMPORTED, **variables)
    out, err = process.communicate(timeout=60)
    assert sorted(out.split()) == expected and process.returncode == 0, err
    assert err == ""
