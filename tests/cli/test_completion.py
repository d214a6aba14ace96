"""Completion by the shell (click's own) knows commands, options and recipes, without torch."""

import pytest
from commands import start

IMPORTED = (
    "import sys\n"
    "from distprune.cli import main\ntry:\n    main()\nfinally:\n"
    "    assert not {'torch', 'numpy'} & set(sys.modules)\n"
)


@pytest.mark.parametrize(
    ("words", "expected"),
    [("distprune pl", ["plan"]), ("distprune prune a b -r semi", ["semi_structured_2_4"])],
)
def test_of_bash(words, expected):
    number = str(len(words.split()) - 1)
    variables = {"_DISTPRUNE_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": number}
    process = start("-c", IMPORTED, **variables)
    out, err = process.communicate(timeout=60)
    found = [line.partition(",")[2] for line in out.split()]
    assert sorted(found) == expected and process.returncode == 0, err
    assert err == ""
