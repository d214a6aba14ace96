"""From a model's folder on disk to a pruned one: the script, as users run it."""

import json

import pytest
from safetensors.torch import load_file
from shell import ROOT

from helpers.forked_scripts import run_forked
from helpers.sampling import THOROUGH
from helpers.tiny_language_model import save_tiny_llama, write_text
from prune_language_model import parse_settings

SCRIPT = ROOT / "launch/prune_language_model.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, a text to learn from and one to measure on."""
    folder = tmp_path_factory.mktemp("language_model")
    save_tiny_llama(folder / "llama")
    write_text(folder / "train.txt", 3000)
    write_text(folder / "held_out.txt", 800, seed=1)
    return folder


def prune(folder, output, num_ranks, *more):
    """Run the script on some ranks; the weights and the report."""
    given = [
        folder / "llama", folder / output, "--calibrate", folder / "train.txt", "--windows", 6,
        "--length", 32, "--evaluate", folder / "held_out.txt", "--evaluation-windows", 3, *more,
    ]  # fmt: skip
    status, printed = run_forked(SCRIPT, *given, num_ranks=num_ranks)
    assert status == 0, printed
    report = json.loads((folder / output / "distprune/report.json").read_text())
    return load_file(folder / output / "model.safetensors"), report


@pytest.mark.slow
def test_every_sharding_prunes_the_same_weights(folder):
    """One process, FSDP2 on 2 ranks, FSDP2 with tensor parallelism on 4."""
    how = ["--criterion", "magnitude", "--scope", "global-rms", "--sparsity", 0.6]
    alone, first = prune(folder, "alone", 1, "--wrap", "none", *how)
    wrappings = [("sharded", 2, [])]
    if THOROUGH:
        wrappings.append(("both", 4, ["--wrap", "fsdp2_tp", "--tensor-parallel", 2]))
    for output, num_ranks, more in wrappings:
        found, second = prune(folder, output, num_ranks, *how, *more)
        assert alone.keys() == found.keys()
        assert all(alone[name].equal(found[name]) for name in alone), output
        for stage in ("dense", "pruned"):
            expected = pytest.approx(first[stage]["all"]["nll"], rel=1e-6)
            assert second[stage]["all"]["nll"] == expected
    pruned = {row["name"]: row["num_pruned"] for row in first["parameters"]}
    assert {name: int((alone[name] == 0).sum()) for name in pruned} == pruned
    assert sum(pruned.values()) == round(0.6 * sum(alone[name].numel() for name in pruned))

    given = [folder / "llama", folder / "alone", "--criterion", "random", "--wrap", "none"]
    status, printed = run_forked(SCRIPT, *given)
    assert status != 0 and "exists; expected a folder that does not" in printed


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize(
    "how",
    [
        ["--update", "least-squares"],
        ["--update", "least-squares", "--scope", "2:4"],
        ["--update", "rounds", "--rounds-before", 0.3, "--criterion", "factored_fisher"],
    ],
)
def test_kept_weights_move(folder, how):
    weights, report = prune(folder, "_".join(map(str, how)), 2, *how)
    source = load_file(folder / "llama/model.safetensors")
    for row in report["parameters"]:
        is_zero = weights[row["name"]] == 0
        assert int(is_zero.sum()) == row["num_pruned"]
        if 0 < row["num_pruned"] < row["num_elements"]:
            assert not source[row["name"]][~is_zero].equal(weights[row["name"]][~is_zero])
            assert row["error_after"] <= row["error_before"]
    assert sum(row["num_pruned"] for row in report["parameters"]) == 2176


@pytest.mark.parametrize(
    ("given", "scope", "sparsity"),
    [
        (["@configs/gemma.args"], "row", 0.3),
        (["model", "out", "--criterion", "magnitude"], "row", 0.5),
        (["model", "out", "--criterion", "fisher", "--calibrate", "a"], "global", 0.5),
        (["model", "out", "--criterion", "random"], "global", 0.5),
        (["model", "out", "--criterion", "magnitude", "--scope", "4:8"], "4:8", None),
    ],
)
def test_the_scope_follows_the_criterion(given, scope, sparsity, monkeypatch):
    monkeypatch.chdir(ROOT)
    settings = parse_settings(given)
    assert (settings.scope, settings.sparsity) == (scope, sparsity)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--criterion", "magnitude", "--scope", "2:4", "--sparsity", "0.6"], "no --sparsity"),
        (["--criterion", "magnitude", "--scope", "rows"], "expected --scope global; "),
        (["--criterion", "wanda"], "needs --calibrate"),
        (["--criterion", "magnitude", "--scope", "owl"], "needs --calibrate"),
        (["--calibrate", "a", "--update", "rounds", "--scope", "row"], "goes with --scope global"),
        (["--update", "rounds", "--criterion", "magnitude", "--own-text"], "that reads text"),
    ],
)
def test_wrong_settings_end_with_a_sentence(given, said, capsys):
    with pytest.raises(SystemExit):
        parse_settings(["model", "out", *given])
    assert said in capsys.readouterr().err


# The main job from its script to its files, with so few steps that it takes seconds.


@pytest.mark.slow
@pytest.mark.parametrize(
    "wrap", ["fsdp2", *(pytest.param(wrap, marks=pytest.mark.thorough) for wrap in ("tp", "ddp"))]
)
def test_a_short_run(tmp_path, wrap):
    status, printed = run_forked(
        ROOT / "launch/prune_tiny_llama.py", "--wrap", wrap, "--output", tmp_path, "--steps", 2,
        "--finetune-steps", 1, "--sparsities", 0.9, "--held-out-windows", 20, num_ranks=2,
    )  # fmt: skip
    assert status == 0, printed
    assert "saved model: as reported" in printed
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["num_ranks"] == 2 and results["saved_model_faults"] == []
    assert [found["num_differing"] for found in results["prunings"]] == [0] * 2
    assert all(found["num_compared"] >= 802_816 for found in results["prunings"])
    assert (tmp_path / "model/model.safetensors").exists()
    assert "| 90 % " in (tmp_path / "results.md").read_text()
