"""Run commands in this process; a language model for them."""

import json
from dataclasses import dataclass

import pytest

from distprune.cli import main
from helpers.tiny_language_model import save_tiny_llama, write_text


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


@pytest.fixture
def made(tmp_path):
    """(folder of a Llama, a text, another text)."""
    save_tiny_llama(tmp_path / "model")
    (tmp_path / "model" / "README.md").write_text("---\nlicense: mit\n---\nA tiny model.\n")
    texts = [write_text(tmp_path / f"{name}.txt", 300, seed=n) for n, name in enumerate("ab")]
    return tmp_path / "model", *texts
