"""Run commands in this process."""

import pytest
from commands import Done

from distprune.cli import main


@pytest.fixture
def run(capsys):
    """run("plan", folder, "--json") -> Done, in this process."""

    def call(*arguments):
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit_:
            main([str(each) for each in arguments])
        out, err = capsys.readouterr()
        return Done(exit_.value.code, out, err)

    return call
