"""Run commands as a user would: in this process, or in one of its own."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from distprune.cli.main import main

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str

    @property
    def json(self):
        return json.loads(self.out)


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


def environment(**more):
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}


def start(*arguments, **keywords):
    """A process of its own; its output is text."""
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(**keywords),
    )
