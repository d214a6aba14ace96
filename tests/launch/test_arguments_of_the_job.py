"""The main job's command line: what goes together, and what it says of what does not."""

import sys

import pytest
from shell import ROOT

sys.path.insert(0, str(ROOT / "launch"))

from tiny_llama.scoring import CRITERIA
from tiny_llama.settings import BUDGETED_SCOPES, parse_settings


def parse(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["prune_tiny_llama.py", *arguments])
    return parse_settings()


def test_a_comparison_has_every_scope_by_default(monkeypatch):
    settings = parse(monkeypatch, "--criterion", "magnitude", "wanda")
    assert settings.criteria == ("magnitude", "wanda")
    assert settings.scopes == BUDGETED_SCOPES
    assert settings.calibration_batches == 8


def test_without_criteria_nothing_is_compared(monkeypatch):
    assert parse(monkeypatch).criteria == ()


def test_the_full_table_has_every_criterion(monkeypatch):
    settings = parse(monkeypatch, f"@{ROOT}/configs/tiny_llama_criteria.args")
    assert set(settings.criteria) == set(CRITERIA)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--scope", "lamp"], "--scope and --calibration-batches go with --criterion"),
        (["--calibration-batches", "2"], "--scope and --calibration-batches go with --criterion"),
        (["--criterion", "snip", "--schedule", "cubic"], "expected it without --schedule"),
        (["--criterion", "snip", "--calibration-batches", "0"], "--calibration-batches >= 1"),
        (["--criterion", "nothing"], "invalid choice: 'nothing'"),
    ],
)
def test_arguments_that_do_not_go_together(monkeypatch, capsys, arguments, message):
    with pytest.raises(SystemExit):
        parse(monkeypatch, *arguments)
    assert message in capsys.readouterr().err
