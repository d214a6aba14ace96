"""``distprune prune --text``: the folder of a language model, a text, and one line."""

import json

import pytest

from distprune import language_models
from helpers.forked_scripts import run_forked
from helpers.tiny_language_model import write_text

pytest.importorskip("transformers")


SIZES = ["--length", "16", "--windows", "4", "--device", "cpu"]
OPTIONS = ["-s", "0.5", *SIZES]


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
    assert f"from {before:.4g} to {after:.4g}" in card and "was not measured" not in card
    assert run("verify", out, "--against", model).code == 0
    again = run("prune", model, out, *OPTIONS, "--text", text, "--eval", held_out, "--json", "-q")
    assert again.code == 0 and again.json["inputs"] == report["inputs"]


@pytest.mark.parametrize(
    ("command", "options", "said"),
    [
        ("prune", ["-s", "0.5"], "on 2 processes"),
        pytest.param(
            "shrink",
            ["--neurons", "0.25", "--round-to", "2"],
            "576 of 12,880 parameters",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_processes_share_the_text(made, tmp_path, command, options, said):
    model, text, _ = made
    script = tmp_path / "command.py"
    script.write_text("import sys\nfrom distprune.cli import main\nmain(sys.argv[1:])\n")
    words = [command, model, tmp_path / "out", *options, *SIZES, "--text", text]
    code, out = run_forked(script, *words, num_ranks=2)
    assert code == 0 and said in out, out


def test_what_is_wrong_is_said_before_the_work(run, made, tmp_path):
    model, text, _ = made
    short = write_text(tmp_path / "short.txt", 4)
    cases = [
        (["--text", short], 1, "--windows: 4 windows of each text are asked for, and"),
        (["--text", tmp_path / "none.txt"], 1, "cannot be read"),
        (["--score", "magnitude"], 2, "--length, --windows have no effect without text"),
        (["--no-own-text"], 2, "--length, --windows have no effect without text"),
        (["--text", text, "--round", "0.6"], 2, "rising ones below the sparsity"),
        (["--text", text, "--update", "adam"], 2, "is not one of 'training', 'least-squares'"),
        (["--text", text, "--also", "lm_head.weight"], 2, "is in no decoder layer"),
    ]
    for options, code, expected in cases:
        done = run("prune", model, tmp_path / "out", *OPTIONS, *options)
        assert done.code == code and expected in done.err, (done.code, done.err)
    (model / "config.json").write_text("{}")
    done = run("prune", model, tmp_path / "out", *OPTIONS, "--text", text)
    assert done.code in (1, 2) and not (tmp_path / "out").exists(), done.err
    assert not list(tmp_path.glob("out*"))


def test_eval_of_a_model_that_is_streamed(run, made):
    model, text, _ = made
    command = ["eval", model, "--text", text, "--length", "16", "--device", "cpu", "--json", "-q"]
    whole, streamed = run(*command), run(*command, "--wrap", "stream")
    assert streamed.code == 0, streamed.err
    assert streamed.json["all"] == whole.json["all"]
    assert streamed.json["dtype"] is None and whole.json["dtype"] == "float32"
    done = run("calibrate", *command[1:], "--out", "s.safetensors", "--wrap", "stream")
    assert done.code == 2 and "for eval of --text only" in done.err


def test_plan_says_what_text_takes(run, made, monkeypatch):
    model, text, _ = made
    command = ["plan", model, *OPTIONS, "--text", text, "--no-own-text", "--polish", "0"]
    done = run(*command)
    assert done.code == 0 and "By text, each process needs at most" in done.out, done.err
    assert "ranked together by fisher" in done.out
    cost = run(*command, "--json").json["cost_by_text"]
    # Embedding and head of 264 tokens, and two layers, in float32; three stages of 64 tokens more.
    layers = 2 * 4 * (4 * 16 * 16 + 3 * 16 * 24 + 2 * 16)
    assert cost["reads"] == 3 * layers + 2 * 4 * (2 * 264 * 16 + 16)
    assert cost["disk"] == 4 * (64 * 16 * (2 + 3) + 2 * (4 * 16 * 16 + 3 * 16 * 24))
    by_default = run(*command[:4], "--device", "cpu", "--json")
    memory = by_default.json["cost_by_text"]["memory"]
    assert {"own text", "polish"} <= memory.keys() and "polish" not in cost["memory"]
    assert by_default.json["recipe"]["score"] == "fisher"
    monkeypatch.setattr("distprune.streaming.room_of", lambda device: memory["polish"] - 1)
    done = run(*command[:4], "--device", "cpu")
    assert "then training of each layer" in done.out and "polishing" not in done.out, done.err


def test_without_text_a_model_is_pruned_by_its_own(run, made, tmp_path):
    """Its length is that of the model; a rerun finds the result, and another run the text."""
    model, _, held_out = made
    out, command = tmp_path / "out", ["-s", "0.5", "--windows", "3", "--device", "cpu"]
    done = run("prune", model, out, *command, "--eval", held_out)
    assert done.code == 0, done.err
    how = "3 windows of 64 tokens of each of text that the model writes: score fisher, then"
    assert how in done.err and "40 steps of polishing" in done.err
    report = json.loads((out / "distprune" / "report.json").read_text())
    assert len(report["inputs"]["update"]["polish"]["losses"]) == 40
    assert "trained it for 40 steps" in (out / "README.md").read_text()
    own = out / "distprune" / "own_text.safetensors"
    model_of = language_models.load_sharded(model)
    tokenizer = language_models.load_tokenizer(model)
    windows = language_models.write_text(model_of, tokenizer, windows=3, length=64)
    found = language_models.read_windows(tokenizer, own, 64)
    assert (found.tokens == windows.tokens).all()
    assert run("verify", out, "--against", model).code == 0
    again = run("prune", model, out, *command, "--eval", held_out)
    assert again.code == 0 and "is finished" in again.err
    stamp = own.read_bytes()
    assert run("prune", model, out, *command, "--polish", "0", "--force").code == 0
    assert own.read_bytes() == stamp


def test_what_has_no_own_text_is_pruned_by_its_weights(run, made, tmp_path, monkeypatch):
    """A recipe with a score, a checkpoint without tokenizer; or there is an error with ways out."""
    model, _, _ = made
    done = run("prune", model, tmp_path / "a", "-s", "0.5", "--score", "magnitude")
    assert done.code == 0 and "Largest pruned score" in done.out
    from distprune import streaming

    monkeypatch.setattr(streaming, "room_of", lambda device: 1000)
    done = run("prune", model, tmp_path / "b", "-s", "0.5")
    assert done.code == 2 and "expected --text FILE" in done.err
    assert "--score magnitude" in done.err and "1.0 kB are there" in done.err

    def refused(*_, **__):
        raise NotImplementedError("the decoder layers are no chain.")

    with monkeypatch.context() as patch:
        patch.setattr(streaming, "estimate", refused)
        done = run("prune", model, tmp_path / "b", "-s", "0.5")
    assert done.code == 2 and "no chain. --score magnitude prunes" in done.err
    for file in model.glob("token*"):
        file.unlink()
    assert run("prune", model, tmp_path / "c", "-s", "0.5").code == 0


def test_a_written_text_is_a_text(run, made, tmp_path):
    model, _, _ = made
    file, size = tmp_path / "own.safetensors", ["--length", "16", "--windows", "4"]
    done = run("write-text", model, file, *size, "--device", "cpu")
    assert done.code == 0 and "4 windows of 16 tokens" in done.out, done.err
    options = ["--text", file, *size, "--no-own-text", "--polish", "0", "--device", "cpu"]
    assert run("prune", model, tmp_path / "out", "-s", "0.5", *options).code == 0
    done = run("write-text", model, tmp_path / "own.txt")
    assert done.code == 1 and "expected a name in .safetensors" in done.err
