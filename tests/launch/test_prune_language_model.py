"""From a model's folder on disk to a pruned one: the script, as users run it."""

import json
import sys

import pytest
from safetensors.torch import load_file
from shell import ROOT, kill_when, run, start

from distprune.cli.main import main
from helpers.forked_scripts import run_forked
from helpers.sampling import THOROUGH
from helpers.tiny_language_model import save_tiny_llama, save_tiny_mixtral, write_text

sys.path.insert(0, str(ROOT / "launch"))

from language_model.document import recipe_of
from language_model.settings import parse_settings
from language_model.table_settings import parse_settings as parse_table_settings

SCRIPT = "launch/prune_language_model.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, a text to learn from and one to measure on."""
    folder = tmp_path_factory.mktemp("language_model")
    save_tiny_llama(folder / "llama")
    save_tiny_mixtral(folder / "mixtral")
    (folder / "llama" / "README.md").write_text("---\nlicense: mit\n---\nA tiny Llama.\n")
    write_text(folder / "train.txt", 3000)
    write_text(folder / "held_out.txt", 800, seed=1)
    return folder


def arguments(folder, output, *more, model="llama"):
    return [
        folder / model, folder / output, "--windows", 6, "--length", 32, "--evaluation-windows",
        3, "--evaluate", folder / "held_out.txt", *more,
    ]  # fmt: skip


def prune(folder, output, num_ranks, *more, model="llama"):
    """Run the script to its end on some ranks; what it printed."""
    given = arguments(folder, output, *more, model=model)
    status, printed = run_forked(ROOT / SCRIPT, *given, num_ranks=num_ranks)
    assert status == 0, printed
    return printed


def prune_by_recipe(folder, model, output):
    """Prune with the command line, as the recipe of an output says; the weights."""
    recipe, by_files = folder / output / "distprune/recipe.yaml", folder / f"{output}_by_files"
    with pytest.raises(SystemExit) as ended:
        main(["prune", str(folder / model), str(by_files), "-r", str(recipe)])
    assert ended.value.code == 0
    return weights_of(by_files)


def weights_of(folder):
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def bytes_of(folder):
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.slow
def test_every_sharding_prunes_the_same_weights(folder):
    """By Wanda, of the same statistics: one process, FSDP2 on 2 ranks, FSDP2 with TP on 4."""
    how = ["--sparsity", 0.6, "--scope", "global"]
    calibration = ["--calibrate", folder / "train.txt", *how]
    status, printed = run_forked(
        ROOT / SCRIPT, *arguments(folder, "alone", "--wrap", "none", *calibration)
    )
    assert status == 0, printed
    assert "1 ranks, none, float32" in printed
    assert "memory of a rank, estimated: 0.00 GB (weights 0.00 GB" in printed
    assert "WARNING" not in printed
    statistics = ["--statistics", folder / "alone/distprune/statistics.safetensors"]
    prune(folder, "sharded", 2, *statistics, *how)
    others = ["sharded"]
    if THOROUGH:
        others.append("both")
        prune(folder, "both", 4, *statistics, *how, "--wrap", "fsdp2_tp",
              "--tensor-parallel", 2)  # fmt: skip
    alone = weights_of(folder / "alone")
    for other in others:
        found = weights_of(folder / other)
        assert alone.keys() == found.keys()
        assert all(alone[name].equal(found[name]) for name in alone), other
    report = json.loads((folder / "alone/distprune/report.json").read_text())
    pruned = {row["name"]: row["num_pruned"] for row in report["parameters"]}
    assert {name: int((alone[name] == 0).sum()) for name in pruned} == pruned
    assert sum(pruned.values()) == round(0.6 * sum(alone[name].numel() for name in pruned))
    first, second = (
        json.loads((folder / name / "distprune/report.json").read_text())["perplexity"]
        for name in ("alone", "sharded")
    )
    assert first["pruned"]["all"]["nll"] == pytest.approx(second["pruned"]["all"]["nll"], rel=1e-6)
    card = (folder / "alone/README.md").read_text()
    assert card.startswith("---\nlicense: mit") and "ranked by wanda" in card
    assert card.rstrip().endswith("A tiny Llama.")
    assert not (folder / "alone.work").exists()

    by_files = prune_by_recipe(folder, "llama", "alone")
    assert all(alone[name].equal(by_files[name]) for name in alone)


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("criterion", ["magnitude", "wanda"])
def test_experts_are_pruned_as_in_files(folder, criterion):
    how = ["--criterion", criterion, "--scope", "global", "--normalize", "none"]
    texts = ["--calibrate", folder / "train.txt"] if criterion == "wanda" else []
    output = f"experts_{criterion}"
    prune(folder, output, 2, *how, *texts, model="mixtral")
    weights = weights_of(folder / output)
    by_files = prune_by_recipe(folder, "mixtral", output)
    assert weights.keys() == by_files.keys()
    assert all(weights[name].equal(by_files[name]) for name in weights)
    experts = [weight for name, weight in weights.items() if ".experts." in name]
    assert len(experts) == 24 and all((weight == 0).any() for weight in experts)
    assert all((weight != 0).all() for name, weight in weights.items() if ".gate." in name)


@pytest.mark.parametrize(
    ("how", "is_the_same"),
    [
        (["--scope", "row"], True),
        (["--pattern", "2:4"], True),
        (["--scope", "global", "--normalize", "none"], True),
        (["--scope", "global"], False),
        (["--scope", "global", "--normalize", "l2"], False),
        (["--scope", "layer"], False),
        (["--scope", "layer", "--pattern", "2x4"], False),
        (["--scope", "row", "--include", "*.mlp.*"], False),
    ],
)
def test_a_recipe_says_what_files_do_the_same(how, is_the_same):
    """Experts may be one parameter of a model, and many tensors in files."""
    settings = parse_settings(["source", "output", "--criterion", "magnitude", *how])
    layer = {"name": "model.layers.0.self_attn.q_proj.weight"}
    experts = {"name": "model.layers.0.mlp.experts.down_proj"}
    assert recipe_of(settings, [layer])
    assert (recipe_of(settings, [layer, experts]) is not None) == is_the_same


RECOVERY = ["--recovery-steps", 8, "--recovery-batch", 4, "--learning-rate", 1e-3,
            "--checkpoint-every", 2]  # fmt: skip


@pytest.mark.slow
@pytest.mark.thorough
def test_a_killed_run_ends_with_the_same_files(folder):
    more = ["--calibrate", folder / "train.txt", "--recover", folder / "train.txt", *RECOVERY]
    prune(folder, "whole", 2, *more)
    for done in ("pruned.json", "checkpoints/step-000004"):
        job = start("launch/torchrun.sh", ROOT / SCRIPT, *arguments(folder, "killed", *more))
        kill_when(folder / "killed.work" / done, job)
    printed = prune(folder, "killed", 2, *more)
    assert "goes on after step" in printed
    whole, killed = bytes_of(folder / "whole"), bytes_of(folder / "killed")
    assert whole.keys() == killed.keys()
    assert [name for name in whole if whole[name] != killed[name]] == []
    report = json.loads((folder / "killed/distprune/report.json").read_text())
    weights = weights_of(folder / "killed")
    for row in report["parameters"]:
        assert int((weights[row["name"]] == 0).sum()) == row["num_pruned"]
    status, printed = run(SCRIPT, *arguments(folder, "killed", *more))
    assert status == 0 and "is there already" in printed
    status, printed = run(SCRIPT, *arguments(folder, "killed", "--criterion", "random"))
    assert status == 1 and "is not the result of these settings" in printed


@pytest.mark.thorough
@pytest.mark.slow
def test_a_run_in_rounds_that_was_killed_ends_with_the_same_files(folder):
    more = ["--calibrate", folder / "train.txt", "--criterion", "factored_fisher",
            "--sparsity", 0.6, "--rounds", 0.3, 0.5, "--update", "least-squares"]  # fmt: skip
    prune(folder, "rounds", 2, *more)
    job = start("launch/torchrun.sh", ROOT / SCRIPT, *arguments(folder, "killed_round", *more))
    kill_when(folder / "killed_round.work" / "round-0", job)
    prune(folder, "killed_round", 2, *more)
    whole, killed = bytes_of(folder / "rounds"), bytes_of(folder / "killed_round")
    assert whole.keys() == killed.keys()
    assert [name for name in whole if whole[name] != killed[name]] == []
    report = json.loads((folder / "rounds/distprune/report.json").read_text())
    weights, source = weights_of(folder / "rounds"), weights_of(folder / "llama")
    for row in report["parameters"]:
        is_zero = weights[row["name"]] == 0
        assert int(is_zero.sum()) == row["num_pruned"]
        if 0 < row["num_pruned"] < row["num_elements"]:
            assert not source[row["name"]][~is_zero].equal(weights[row["name"]][~is_zero])
            assert row["error_after"] <= row["error_before"]
    num_pruned, num_elements = (
        sum(row[name] for row in report["parameters"]) for name in ("num_pruned", "num_elements")
    )
    assert num_pruned == round(0.6 * num_elements)
    card = (folder / "rounds/README.md").read_text()
    assert "in rounds of 0.3, 0.5 before it; kept weights moved by least squares" in card
    assert not (folder / "rounds/distprune/recipe.yaml").exists()


@pytest.mark.thorough
@pytest.mark.slow
def test_layers_are_updated_block_by_block(folder):
    more = ["--calibrate", folder / "train.txt", "--sequential", "--update", "least-squares"]
    prune(folder, "updated_blocks", 2, *more)
    job = start("launch/torchrun.sh", ROOT / SCRIPT, *arguments(folder, "killed_block", *more))
    kill_when(folder / "killed_block.work" / "block-0", job)
    prune(folder, "killed_block", 2, *more)
    whole, killed = bytes_of(folder / "updated_blocks"), bytes_of(folder / "killed_block")
    assert [name for name in whole if whole[name] != killed.get(name)] == []
    report = json.loads((folder / "updated_blocks/distprune/report.json").read_text())
    assert all(row["error_after"] < row["error_before"] for row in report["parameters"])
    weights = weights_of(folder / "updated_blocks")
    for row in report["parameters"]:
        assert int((weights[row["name"]] == 0).sum()) == row["num_pruned"]


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        ["--lora", 4, "--sequential", "--scope", "row"],
        pytest.param(
            ["--schedule", "cubic", "--prunings", 3, "--criterion", "fisher", "--normalize", "rms"],
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_recovery_keeps_the_zeros(folder, more):
    """Of one shot, block by block, with adapters; and of a schedule, by gradients."""
    texts = ["--calibrate", folder / "train.txt", "--recover", folder / "train.txt"]
    output = f"recovered_{more[0].strip('-')}"
    prune(folder, output, 2, *texts, *RECOVERY, *more)
    source, found = weights_of(folder / "llama"), weights_of(folder / output)
    report = json.loads((folder / output / "distprune/report.json").read_text())
    for row in report["parameters"]:
        zeros = found[row["name"]] == 0
        assert int(zeros.sum()) == row["num_pruned"]
        assert not source[row["name"]][~zeros].equal(found[row["name"]][~zeros])  # it was trained
    assert sum(row["num_pruned"] for row in report["parameters"]) == 2176
    if "--sequential" in more:
        assert {row["sparsity"] for row in report["parameters"]} == {0.5}


def test_the_shipped_arguments_are_read(monkeypatch):
    monkeypatch.chdir(ROOT)
    assert parse_settings(["@configs/gemma.args"]).criterion == "wanda"
    assert parse_table_settings(["@configs/gemma_table.args"]).windows == 32
    assert "rounds" in parse_table_settings(["@configs/gemma_updates.args"]).updates


@pytest.mark.parametrize(
    ("given", "scope", "normalize"),
    [
        (["--criterion", "magnitude"], "row", None),
        (["--criterion", "magnitude", "--scope", "global"], "global", "rms"),
        (["--criterion", "magnitude", "--scope", "global", "--normalize", "none"], "global", None),
        (["--criterion", "magnitude", "--budget", "lamp"], "global", None),
        (["--criterion", "magnitude", "--pattern", "4x4"], "global", "rms"),
        (["--criterion", "fisher", "--calibrate", "a.txt"], "global", None),
        (["--criterion", "factored_fisher", "--calibrate", "a.txt"], "global", None),
        (["--criterion", "obs", "--calibrate", "a.txt"], "row", None),
        (["--criterion", "random"], "global", None),
    ],
)
def test_scope_and_scale_follow_the_criterion(given, scope, normalize):
    settings = parse_settings(["model", "out", *given])
    assert (settings.scope, settings.normalize) == (scope, normalize)


def test_pattern_says_the_sparsity():
    settings = parse_settings(["model", "out", "--criterion", "magnitude", "--pattern", "2:4"])
    assert settings.sparsity is None and settings.normalize is None


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--pattern", "2:4", "--sparsity", "0.6"], "expected no --sparsity"),
        (["--criterion", "wanda"], "needs --calibrate"),
        (["--criterion", "magnitude", "--update", "least-squares"], "need --calibrate"),
        (["--criterion", "taylor", "--calibrate", "a", "--rounds", "0.7"], "that rise"),
        (["--criterion", "wanda", "--calibrate", "a", "--rounds", "0.3"], "--scope global"),
        (["--criterion", "random", "--calibrate", "a", "--rounds", "0.3"], "no meaning"),
        (["--criterion", "magnitude", "--recovery-steps", "3"], "go together"),
        (["--criterion", "magnitude", "--sparsity", "1.5"], "between 0 and 1"),
        (["--criterion", "fisher", "--calibrate", "a", "--sequential"], "wanda, ria and stade"),
        (["--criterion", "obs", "--calibrate", "a", "--sequential"], "obs, too"),
        (["--criterion", "magnitude", "--budget", "owl"], "owl needs --calibrate"),
        (["--criterion", "magnitude", "--windows", "0"], "--windows >= 1"),
    ],
)
def test_wrong_settings_end_with_a_sentence(given, said, capsys):
    with pytest.raises(SystemExit):
        parse_settings(["model", "out", *given])
    assert said in capsys.readouterr().err
