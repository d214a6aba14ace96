"""``distprune shrink``: a folder of a language model, and a smaller one beside it."""

import json

import pytest
import torch

from distprune import language_models, streaming
from distprune.streaming.layers import StreamedModel
from distprune.streaming.shrinking import ShrinkPasses
from helpers.streaming import killed_after
from helpers.tiny_language_model import save_tiny_mixtral

pytest.importorskip("transformers")


SIZES = ["--length", "16", "--windows", "4", "--device", "cpu"]
NEURONS = ["--neurons", "0.25", "--round-to", "2"]


def test_a_smaller_model_that_transformers_loads(run, made, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, text, _ = made
    out = tmp_path / "out"
    done = run("shrink", model, out, *NEURONS, *SIZES, "--text", text, "--eval", text)
    assert done.code == 0, done.err
    small = AutoModelForCausalLM.from_pretrained(out)
    assert AutoTokenizer.from_pretrained(out)("a")["input_ids"] and small.generation_config
    assert small.config.intermediate_size == 18 and small.num_parameters() == 12880 - 576
    assert "576 of 12,880 parameters" in done.out and done.out.count("6 of 24 neurons") == 2
    tokenizer = language_models.load_tokenizer(model)
    before, after = (
        language_models.perplexity(each, language_models.read_windows(tokenizer, text, 16))
        for each in (language_models.load_sharded(model), small)
    )
    quality = f"{before.perplexity:.4g} before, {after.perplexity:.4g} after."
    card = (out / "README.md").read_text()
    assert quality in done.out and quality in card and "6 of 24 neurons" in card
    assert "license: mit" in card and "A tiny model." in card
    sizes = [(folder / "model.safetensors").stat().st_size for folder in (model, out)]
    assert sizes[0] - sizes[1] == pytest.approx(4 * 576, abs=64)

    plan = ["shrink", model, tmp_path / "planned", *NEURONS, "--plan"]
    assert "Each of 2 layers keeps 18 of 24 neurons: 12,304 of 12,880" in run(*plan).out
    planned = run(*plan, "--json").json
    assert planned["parameters_after"] == small.num_parameters()
    assert planned["bytes_before"] - planned["bytes_after"] == 4 * 576
    assert not (tmp_path / "planned").exists()


def test_weights_are_stored_in_the_dtype_of_the_source(run, made, tmp_path):
    from transformers import AutoModelForCausalLM

    model, out = tmp_path / "halves", tmp_path / "out"
    AutoModelForCausalLM.from_pretrained(made[0]).bfloat16().save_pretrained(model)
    options = [*NEURONS, "--no-own-text", "--dtype", "float32", "--device", "cpu"]
    assert run("shrink", model, out, *options, "--tokenizer", made[0]).code == 0
    assert AutoModelForCausalLM.from_pretrained(out).dtype == torch.bfloat16
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"


def test_its_own_text_is_a_source_as_large_as_the_others(run, made, tmp_path, monkeypatch):
    model, text, _ = made
    seen = []
    run_passes = ShrinkPasses.run

    def noted(passes):
        seen.append(passes.settings.windows.text_of.bincount().tolist())
        return run_passes(passes)

    monkeypatch.setattr(ShrinkPasses, "run", noted)
    sources = [[], ["--text", text], ["--no-own-text", "--text", text], ["--no-own-text"]]
    for number, options in enumerate(sources):
        done = run("shrink", model, tmp_path / f"{number}", *NEURONS, *SIZES, *options, "--json")
        assert done.code == 0, done.err
        errors = [layer["error_after"] for layer in done.json["layers"]]
        assert (None in errors) == (number == 3)
    assert seen == [[4], [4, 4], [4], []]


def test_a_model_that_does_not_fit_in_memory_is_shrunk_by_given_text(
    run, made, tmp_path, monkeypatch
):
    model, text, _ = made
    monkeypatch.setattr(streaming, "room_of", lambda kind: 1000)
    monkeypatch.setattr(streaming.pruning, "load_sharded", None)
    done = run("shrink", model, tmp_path / "out", *NEURONS, *SIZES)
    assert done.code == 2 and "expected --text FILE" in done.err and "--no-own-text" in done.err
    done = run("shrink", model, tmp_path / "out", *NEURONS, *SIZES, "--text", text)
    assert done.code == 0 and "6 of 24 neurons" in done.out, done.err


def test_a_command_that_was_killed_goes_on(run, made, tmp_path, monkeypatch):
    """Also between the result and its card; ``--discard`` removes what it left."""
    model, text, _ = made
    command = ["shrink", model, tmp_path / "out", *NEURONS, *SIZES, "--text", text, "--eval", text]
    assert not killed_after(6, monkeypatch, lambda: run(*command))
    assert "Removed " in run("shrink", model, tmp_path / "out", "--discard").out
    assert not list(tmp_path.glob("out*"))
    assert not killed_after(6, monkeypatch, lambda: run(*command))
    with monkeypatch.context() as patch:
        patch.setattr(streaming, "perplexity", None)
        with pytest.raises(TypeError):
            run(*command)
    assert "A smaller copy" not in (tmp_path / "out" / "README.md").read_text()
    done = run(*command)
    assert done.code == 0 and "Nothing was changed" in done.err
    assert "before, " in (tmp_path / "out" / "README.md").read_text()
    assert [path.name for path in tmp_path.glob("out*")] == ["out"]


def test_experts(run, tmp_path):
    save_tiny_mixtral(tmp_path / "model")
    done = run("shrink", tmp_path / "model", tmp_path / "out", "--experts", "0.25", *SIZES)
    assert done.code == 0, done.err
    assert done.out.count("1 of 4 experts") == 2 and "was not measured" in done.out
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_local_experts"] == 3


def test_what_is_wrong_is_said_before_weights_are_read(run, made, tmp_path, monkeypatch):
    model, text, _ = made
    save_tiny_mixtral(tmp_path / "mixtral")
    monkeypatch.setattr(StreamedModel, "values_of", None)
    cases = [
        (2, [model, tmp_path / "out"], "expected shares below 1, one of them above 0"),
        (2, [model, tmp_path / "out", "--neurons", "0.2"], "in multiples of 128"),
        (2, [model, tmp_path / "out", "--experts", "0.2"], "changes its experts"),
        (2, [tmp_path / "mixtral", tmp_path / "out", "--experts", "0.25", "--no-own-text"],
         "without windows; expected text"),
        (2, [tmp_path / "mixtral", tmp_path / "out", *NEURONS], "is not what a smaller inter"),
        (1, [model, tmp_path, *NEURONS], "exists, and is no finished result"),
        (1, [model, model / "inside", *NEURONS], "is inside the source"),
        (1, [model, tmp_path / "out", *NEURONS, "--text", text, "--windows", "9999"],
         "--windows: 9999 windows"),
    ]  # fmt: skip
    for code, arguments, message in cases:
        done = run("shrink", *arguments, "--length", "16", "--device", "cpu")
        assert done.code == code, (arguments, done.err)
        assert message in done.err.replace("\n", " "), done.err
    assert not (tmp_path / "out").exists()
