"""``distprune eval`` and ``distprune calibrate``: a folder with a model, and files of text."""

import importlib.util

import numpy as np
import pytest

from distprune.files.statistics_file import read_statistics
from distprune.language_models import (
    calibrate,
    linear_layers,
    load_tokenizer,
    perplexity,
    read_windows,
)
from distprune.statistics import ActivationStatistics, GradientStatistics
from helpers.tiny_language_model import tiny_llama

pytest.importorskip("transformers")


def of_library(model, *texts, limit=None):
    return read_windows(load_tokenizer(model), texts, 16, limit=limit)


def test_eval_says_what_the_library_does(run, made):
    model, first, second = made
    expected = perplexity(tiny_llama(), of_library(model, first, second))
    options = ["--text", first, "--text", second, "--length", "16", "--device", "cpu"]
    done = run("eval", model, *options)
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert lines[0].split() == ["text", "windows", "tokens", "perplexity"]
    assert [line.split()[0] for line in lines[1:]] == [str(first), str(second), "all"]
    assert lines[3].split()[3:] == [f"{expected.perplexity:.4f}"]
    assert "tokens in" in done.err and "on 1 process." in done.err
    found = run("eval", model, *options, "--json", "-q")
    assert found.err == "" and found.json["all"] == expected.total.as_values()
    assert found.json["texts"][0]["num_windows"] == expected.texts[0].num_windows
    assert (found.json["num_ranks"], found.json["dtype"], found.json["has_bos"]) == (
        1, "float32", True,
    )  # fmt: skip
    limited = run("eval", model, *options, "--json", "--limit", "2", "--dtype", "bfloat16")
    assert limited.json["all"]["num_windows"] == 4 and limited.json["dtype"] == "bfloat16"
    assert limited.json["all"]["nll"] != expected.total.nll


def test_eval_goes_on_with_a_text(run, made):
    """As transformers generates by the likeliest tokens, without a cache."""
    model, text, _ = made
    llama, tokenizer = tiny_llama(), load_tokenizer(model)
    ids = tokenizer("the weights", return_tensors="pt")["input_ids"]
    expected = llama.generate(ids, do_sample=False, max_new_tokens=24, use_cache=False)
    words = tokenizer.decode(expected[0, ids.shape[1] :], skip_special_tokens=True)
    command = ["eval", model, "--generate", "the weights", "--device", "cpu"]
    found = run(*command, "--json", "-q")
    assert found.json["generated"] == [{"text": "the weights", "continuation": words}] and words
    assert "perplexity" not in str(found.json)
    done = run(*command, "--generate", "a", "--text", text, "--length", "16")
    assert [line.split(" ")[0] for line in done.out.splitlines()[-3:-1]] == [str(text), "the"]
    refused = run(*command, "--wrap", "stream")
    assert refused.code == 2 and "for eval of --text only" in refused.err
    assert run("eval", model).code == 2 and "--generate TEXT" in run("eval", model).err
    assert "expected --text FILE" in run("calibrate", model, "--out", "x").err
    long = run("eval", model, "--generate", "the " * 60, "--device", "cpu")
    assert long.code == 1 and "positions" in long.err


def test_calibrate_writes_the_statistics_of_the_library(run, made, tmp_path):
    model, text, _ = made
    out = tmp_path / "stats.safetensors"
    options = ["--text", text, "--length", "16", "--device", "cpu"]
    done = run("calibrate", model, *options, "--out", out, "--samples", "5", "--seed", "3")
    assert done.code == 0, done.err
    assert f"{out}: statistics of 14 layers over 80 tokens in 5 windows" in done.out
    assert done.out.rstrip().endswith("on 1 process.")
    llama = tiny_llama()
    statistics = ActivationStatistics(linear_layers(llama))
    calibrate(llama, of_library(model, text).sample(5, seed=3), statistics)
    statistics.save(tmp_path / "own.safetensors")
    assert out.read_bytes() == (tmp_path / "own.safetensors").read_bytes()
    stored = read_statistics(out)[1]
    assert len(stored) == 14 and {each.count for each in stored.values()} == {80}
    assert not any("lm_head" in name or "embed" in name for name in stored)
    other = run(
        "calibrate", model, *options, "--out", out, "--limit", "2", "--json",
        "--include", "*mlp*", "--include", "lm_head", "--exclude", "re:.*down_proj",
    )  # fmt: skip
    stored = read_statistics(out)[1]
    assert list(stored) == other.json["layers"] and other.json["num_tokens"] == 32
    kept = [f"model.layers.{n}.mlp.{name}_proj.weight" for n in (0, 1) for name in ("gate", "up")]
    assert set(stored) == {*kept, "lm_head.weight"}


def test_calibrate_writes_gradients(run, made, tmp_path):
    model, text, _ = made
    out = tmp_path / "gradients.safetensors"
    options = ["--text", text, "--length", "16", "--device", "cpu", "--limit", "4"]
    options += ["--batch-size", "2"]
    done = run("calibrate", model, *options, "--out", out, "--gradients", "--json")
    assert done.code == 0, done.err
    assert done.json["gradients"] is True
    llama = tiny_llama()
    pairs = linear_layers(llama)
    statistics = GradientStatistics(pairs)
    calibrate(llama, of_library(model, text, limit=4), statistics, batch_size=2)
    found = read_statistics(out, of_gradients=True)[1]
    assert list(found) == [pair.fqn for pair in pairs] == done.json["layers"]
    for pair, held in statistics.totals().items():
        assert found[pair.fqn].count == held.weight == 4
        assert np.allclose(found[pair.fqn].second, held.by_input.numpy(), rtol=1e-6)
    refused = run("calibrate", model, "--text", text, "--out", out, "--gradients",
                  "--allow-empty", "x")  # fmt: skip
    assert refused.code == 2 and "--allow-empty has no effect with --gradients" in refused.err


def test_what_is_wrong_is_said_with_an_exit_code(run, made, tmp_path):
    model, text, _ = made
    short, out = tmp_path / "short.txt", tmp_path / "stats.safetensors"
    short.write_text("too short")
    length = ["--length", "16", "--device", "cpu"]
    wrong = [
        (1, ["eval", model, "--text", short, *length], "short.txt has 9 tokens; expected"),
        (1, ["eval", model, "--text", tmp_path / "no.txt", *length], "no.txt cannot be read"),
        (1, ["eval", tmp_path / "nothing", "--text", text, *length], "nothing"),
        (1, ["eval", model, "--text", text, "--length", "65"], "the model has 64 positions"),
        (2, ["eval", model, "--text", text, "--dtype", "int8"], "'int8' is not one of 'float32'"),
        (2, ["eval", model, "--text", text, "--wrap", "tp", *length], "needs a process group"),
        (2, ["eval", model, "--text", text, "--mesh", "2x2", *length], "the number of ranks"),
        (2, ["eval", model, "--text", text, "--device", "abacus"], "--device abacus: expected"),
        (2, ["eval", model], "expected --text FILE"),
        (2, ["calibrate", model, "--text", text, "--out", out, *length, "--include", "x"],
         "'x' matches no parameter"),
        (2, ["calibrate", model, "--text", text, "--out", out, *length, "--samples", "9999"],
         "--samples: 9999 windows of each text are asked for"),
        (1, ["calibrate", model, "--text", text, "--out", tmp_path / "no" / "x", *length],
         "does not exist"),
    ]  # fmt: skip
    for code, arguments, message in wrong:
        done = run(*arguments, "--json")
        assert done.code == code, (arguments, done.err)
        assert message in done.err.replace("\n", " "), done.err
        assert done.out == ""
    assert not out.exists()


def test_a_model_without_tokenizer_or_with_nan(run, made):
    model, text, _ = made
    (model / "tokenizer.json").rename(model.parent / "tokenizer.json")
    for file in model.glob("tokenizer*"):
        file.rename(model.parent / file.name)
    options = ["--text", text, "--length", "16", "--device", "cpu"]
    done = run("eval", model, *options)
    assert done.code == 1 and "has no tokenizer that transformers can load" in done.err
    llama = tiny_llama()
    llama.lm_head.weight.data[7] = float("nan")
    llama.save_pretrained(model)
    done = run("eval", model, *options, "--tokenizer", model.parent)
    assert done.code == 1 and "window 0 of" in done.err and "loss of nan" in done.err


def test_without_the_extra_it_says_what_to_install(run, made, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    done = run("eval", made[0], "--text", made[1])
    assert done.code == 2 and "pip install 'distprune[language-models]'" in done.err
