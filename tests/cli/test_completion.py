"""Shell completion: of commands, options and recipes; quick, without torch."""

import pytest
from commands import start

IMPORTED = (
    "import sys, atexit\n"
    "atexit.register(lambda: print('heavy:', {'torch', 'numpy', 'yaml'} & set(sys.modules), "
    "file=sys.stderr))\n"
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
    assert err == "heavy: set()\n"


def test_it_can_be_installed(run):
    out = run("--help").out
    assert "--install-completion" in out and "--show-completion" in out
    assert "completion" not in run("prune", "--help").out


@pytest.mark.parametrize("shell", ["bash", pytest.param("zsh", marks=pytest.mark.thorough)])
def test_of_what_a_shell_reads(shell):
    variables = {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    process = start("-m", "distprune", "--show-completion", shell, **variables)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "_DISTPRUNE_COMPLETE" in out and "distprune" in out


def test_the_command_that_does_not_exist_names_the_option(run):
    done = run("completion")
    assert done.code == 2 and "distprune --install-completion" in " ".join(done.err.split())
