"""Completion by the shell (click's own) knows commands, options and recipes, without torch."""

import pytest
from commands import start

IMPORTED = (
    "import sys\n"
    "from distprune.cli.main import main\ntry:\n    main()\nfinally:\n"
    "    assert not {'torch', 'numpy'} & set(sys.modules)\n"
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
    variables = {"_DISTPRUNE_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": number}
    process = start("-c", IMPORTED, **variables)
    out, err = process.communicate(timeout=60)
    found = [line.partition(",")[2] for line in out.split()]
    assert sorted(found) == expected and process.returncode == 0, err
    assert err == ""
