"""``distprune prune --text``: the folder of a language model, a text, and one line."""

import json

import pytest
from commands import start

from distprune import language_models
from helpers.tiny_language_model import save_tiny_llama, write_text

pytest.importorskip("transformers")


@pytest.fixture
def made(tmp_path):
    """(model, text, held-out text)."""
    save_tiny_llama(tmp_path / "model")
    texts = [write_text(tmp_path / f"{name}.txt", 300, seed=n) for n, name in enumerate("ab")]
    return tmp_path / "model", *texts


OPTIONS = ["-s", "0.5", "--length", "16", "--windows", "4", "--device", "cpu"]


def test_one_line_scores_moves_and_measures(run, made, tmp_path):
    model, text, held_out = made
    out = tmp_path / "out"
    done = run("prune", model, out, *OPTIONS, "--text", text, "--eval", held_out)
    assert done.code == 0, done.err
    assert "score fisher" in done.err and "least squares" in done.err
    before, after = (
        language_models.perplexity(
            language_models.load_sharded(folder),
            language_models.read_windows(language_models.load_tokenizer(model), held_out, 16),
        ).perplexity
        for folder in (model, out)
    )
    assert f"{before:.2f} before, {after:.2f} after" in done.err
    report = json.loads((out / "distprune" / "report.json").read_text())
    assert report["inputs"]["update"]["perplexity"] == {"before": before, "after": after}
    card = (out / "README.md").read_text()
    assert f"from {before:.4g} to {after:.4g}" in card and "its quality was not" not in card
    assert run("verify", out, "--against", model).code == 0
    again = run("prune", model, out, *OPTIONS, "--text", text, "--eval", held_out, "--json", "-q")
    assert again.code == 0 and again.json["inputs"] == report["inputs"]


def test_processes_share_the_text(made, tmp_path):
    model, text, _ = made
    command = ["prune", model, tmp_path / "out", *OPTIONS, "--text", text, "--nproc", 2]
    process = start("-m", "distprune", *command)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert "on 2 processes" in out


def test_what_is_wrong_is_said_before_the_work(run, made, tmp_path):
    model, text, _ = made
    short = write_text(tmp_path / "short.txt", 4)
    cases = [
        (["--text", short], 3, "expected a number from 1 to"),
        (["--text", tmp_path / "none.txt"], 3, "cannot be read"),
        (["--text", text, "--update", "adam"], 2, "expected least-squares, none"),
        (["--text", text, "--also", "lm_head.weight"], 2, "is in no decoder layer"),
    ]
    for options, code, expected in cases:
        done = run("prune", model, tmp_path / "out", *OPTIONS, *options)
        assert done.code == code and expected in done.err, (done.code, done.err)
    (model / "config.json").write_text("{}")
    done = run("prune", model, tmp_path / "out", *OPTIONS, "--text", text)
    assert done.code in (2, 3) and not (tmp_path / "out").exists(), done.err
    assert not list(tmp_path.glob("out*"))
