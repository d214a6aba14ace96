"""What a message advises works: the message is shown, and the command that it names is run.

Every text of the package that names a command or an option is in one of the tables at the end.
"""

import ast
import re
import shlex

import pytest
import torch
import yaml
from commands import ROOT

from distprune.cli import process
from distprune.files import planning
from distprune.recipe import shipped_recipes
from helpers.sampling import every
from helpers.tiny_checkpoints import file_bytes, save, tree_digest
from helpers.tiny_language_model import save_tiny_llama, write_text

ADVISES = re.compile(
    r"\bdistprune (prune|plan|apply|verify|diff|inspect|calibrate|eval|env|recipe"
    r"|selftest)\b|(?<![\w-])--[a-z]|torchrun|accelerate launch|pip install|python -m"
)
TENSORS = {f"layers.{n}.mlp.weight": torch.randn(8, 12) for n in range(2)}


@pytest.fixture
def source(tmp_path):
    return save(tmp_path / "source", TENSORS)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """(a folder with a language model, statistics of it, a text)."""
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("models")
    text = write_text(folder / "a.txt", 200)
    return save_tiny_llama(folder / "llama"), folder / "stats.safetensors", text


def said(done, *texts, code=None):
    """What a command wrote, which has these texts in it."""
    written = " ".join((done.out + done.err).split())
    assert all(text in written for text in texts), written
    assert code is None or done.code == code, written
    return written


def works(done):
    assert done.code == 0, done.out + done.err
    return done


HOW = [
    ["-s", "0.5"],
    ["-s", "0.5", "--scope", "row"],
    ["-s", "0.5", "--scope", "layer"],
    ["-s", "0.5", "--max-sparsity", "0.9"],
    ["-s", "0.5", "--normalize", "none"],
    ["-s", "0.5", "--normalize", "l2"],
    ["-s", "0.5", "--pattern", "4x4"],
    ["--pattern", "2:4"],
    *(["-r", name] for name in ("semi_structured_2_4", "magnitude_50", "layer_50", "row_50")),
]


@pytest.mark.parametrize("how", every(4, HOW), ids=" ".join)
def test_text_for_a_language_model(run, llama, tmp_path, how):
    model, _, text = llama
    written = said(run("plan", model, *how), "distprune eval measures it")
    option = re.search(r"\((--text) FILE\), gradients rank", written)[1]
    on_cpu = [option, text, "--length", "16", "--device", "cpu"]
    done = works(run("prune", model, tmp_path / "out", *how, *on_cpu, "--windows", "2"))
    recipe = yaml.safe_load((tmp_path / "out" / "distprune" / "recipe.yaml").read_text())
    assert recipe["score"] == "fisher" and "may ruin it" not in done.err
    if how == HOW[0]:
        works(run("eval", tmp_path / "out", *on_cpu))


def test_text_for_a_recipe_with_groups(run, llama, tmp_path):
    model, _, text = llama
    how = "score: fisher in the recipe, and --text FILE"
    said(run("plan", model, "-r", "by_kind_of_layer"), f"({how}), gradients rank")
    recipe = tmp_path / "recipe.yaml"
    shipped = shipped_recipes()["by_kind_of_layer"].read_text()
    recipe.write_text(shipped.replace("score: magnitude", "score: fisher"))
    on_cpu = ["--text", text, "--length", "16", "--device", "cpu", "--windows", "2"]
    done = works(run("prune", model, tmp_path / "out", "-r", recipe, *on_cpu))
    assert "may ruin it" not in done.err


def test_what_was_probably_meant(run, llama, tmp_path):
    model, _, text = llama
    command = [
        "prune",
        model,
        tmp_path / "out",
        "--device",
        "cpu",
        "--length",
        "16",
        "--windows",
        "2",
    ]
    share = said(run(*command, "-s", "50", "--text", text), "did you mean", code=2)
    meant = re.search(r"did you mean (.*)\?", share)[1]
    score = said(run(*command, "-s", meant, "--text", text, "--score", "snip"), "fisher", code=2)
    words = re.search(r"Expected (\w+) with (--text) FILE", score)
    works(run(*command, "-s", meant, "--score", words[1], words[2], text))


def test_options_of_text_need_text(run, llama, tmp_path):
    model, _, text = llama
    command = ["prune", model, tmp_path / "out", "-s", "0.5", "--windows", "2", "--length", "16"]
    said(run(*command), "--windows has no effect without --text", code=2)
    works(run(*command, "--text", text, "--device", "cpu"))


def test_normalize_where_raw_magnitudes_empty_a_tensor(run, tmp_path):
    scales = {"a.weight": 1.0, "b.weight": 1e-4}
    source = save(tmp_path / "source", {n: s * torch.randn(8, 200) for n, s in scales.items()})
    how = ["-s", "0.5", "--normalize", "none"]
    raw, emptied = "Raw magnitudes of several tensors", "keeps at most 1 %"
    done = run("prune", source, tmp_path / "raw", *how)
    said(done, f"{raw} are", "; --normalize rms, or normalize: rms", emptied, "(--normalize rms)")
    said(done, "limits.max_sparsity (--max-sparsity)")
    done = works(run("prune", source, tmp_path / "rms", *how[:2], "--normalize", "rms"))
    assert raw not in done.err and emptied not in done.err
    done = works(run("prune", source, tmp_path / "limited", *how, "--max-sparsity", "0.9"))
    assert emptied not in done.err
    # An option has no place beside groups, so it is not advised there.
    groups = [{"select": {"include": f"?.{name}"}, "sparsity": 0.5} for name in ("weight", "bias")]
    recipe = tmp_path / "recipe.yaml"
    source = save(tmp_path / "more", {
        **{n: s * torch.randn(8, 200) for n, s in scales.items()}, "c.bias": torch.randn(4, 4)
    })  # fmt: skip
    recipe.write_text(yaml.safe_dump({"version": 2, "normalize": "none", "groups": groups}))
    written = said(run("prune", source, tmp_path / "groups", "-r", recipe), raw, emptied)
    assert "--normalize" not in written
    recipe.write_text(recipe.read_text().replace("normalize: none", "normalize: rms"))
    done = works(run("prune", source, tmp_path / "groups-rms", "-r", recipe))
    assert raw not in done.err and emptied not in done.err


AMOUNTS = {"--sparsity": ["0.5"], "--pattern": ["2:4"], "--recipe": ["row_50"]}


def test_an_amount_where_there_is_none(run, source, tmp_path):
    said(run("plan", source), "No sparsity is given: --sparsity, --pattern or --recipe says")
    done = run("prune", source, tmp_path / "out", "--scope", "global")
    said(done, "expected --sparsity, --pattern or --recipe", code=2)
    for number, (option, value) in enumerate(AMOUNTS.items()):
        works(run("plan", source, option, *value))
        works(run("prune", source, tmp_path / f"{number}", option, *value))
    tiles = ["--pattern", "4x4"]
    said(run("plan", source, *tiles), "4x4 has no sparsity; expected --sparsity", code=2)
    works(run("plan", source, *tiles, "--sparsity", "0.5"))
    pattern = ["-r", "semi_structured_2_4", "--scope", "row"]
    said(run("plan", source, *pattern), "expected --sparsity too", "or no --scope", code=2)
    works(run("plan", source, *pattern, "--sparsity", "0.5"))
    works(run("plan", source, *pattern[:2]))
    both = ["--pattern", "2:4", "--scope", "row"]
    said(run("plan", source, *both), "leave --scope out", code=2)
    works(run("plan", source, *both[:2]))


def test_what_a_score_is_made_from(run, llama, source, tmp_path):
    model, statistics, text = llama
    for wanda in (["--score", "wanda", "-s", "0.5"], ["-r", "wanda_row_50"]):
        done = run("plan", model, *wanda)
        said(done, "expected --statistics FILE", "`distprune calibrate`", code=2)
        options = ["--text", text, "--length", "16", "--device", "cpu", "--out", statistics]
        works(run("calibrate", model, *options))
        works(run("plan", model, *wanda, "--statistics", statistics))
    fisher = ["plan", model, "--score", "fisher", "-s", "0.5"]
    said(run(*fisher), "expected --statistics FILE", "`distprune calibrate --gradients`", code=2)
    works(run("calibrate", model, *options, "--gradients"))
    works(run(*fisher, "--statistics", statistics))
    wanda = ["plan", model, "--score", "wanda", "-s", "0.5", "--statistics", statistics]
    said(run(*wanda), "`distprune calibrate` without --gradients", code=3)
    works(run("calibrate", model, *options))
    works(run(*wanda))
    other = run(*fisher, "--statistics", statistics)
    said(other, "`distprune calibrate --gradients` write", code=3)
    taylor = ["plan", model, "--score", "taylor", "-s", "0.5"]
    said(run(*taylor), "expected --scores FOLDER", "--text FILE makes them", code=2)
    works(run(*taylor, "--text", text, "--length", "16", "--windows", "2"))
    given = ["--score", "given", "-s", "0.5"]
    said(run("plan", source, *given), "expected --scores FOLDER", code=2)
    scores = save(tmp_path / "scores", {name: torch.randn(8, 12) for name in TENSORS})
    works(run("prune", source, tmp_path / "out", *given, "--scores", scores))
    verify = ["verify", tmp_path / "out", "--against", source]
    said(run(*verify), "(--scores FOLDER)", code=3)
    works(run(*verify, "--scores", scores))
    works(run("prune", source, tmp_path / "other", "-s", "0.5"))
    verify = ["verify", tmp_path / "other", "--against", source]
    said(run(*verify, "--scores", scores), "leave --scores out", code=3)
    works(run(*verify))


def test_the_dimension_of_the_inputs(run, llama, tmp_path):
    source = save(tmp_path / "source", {"layers.0.experts.w1": torch.randn(2, 4, 8)})
    command = ["plan", source, "--pattern", "2:4"]
    written = said(run(*command), "its input dimension is not known", code=2)
    option = re.search(r"--input-dim '(.*?)=DIM'", written)[1]
    for dim in re.findall(r"(\d) for \[\.\.\., ", written):
        works(run(*command, "--input-dim", f"{option}={dim}"))
    said(run(*command, "--input-dim", "w1"), "such as '*.c_fc.weight=0'", code=2)
    conv1d = save(tmp_path / "conv1d", {"h.0.c_fc.weight": torch.randn(4, 8)})
    works(run("plan", conv1d, "--pattern", "2:4", "--input-dim", "*.c_fc.weight=0"))
    model, statistics, text = llama
    options = ["--text", text, "--length", "16", "--device", "cpu", "--out", statistics]
    works(run("calibrate", model, *options))
    command = ["plan", model, "-r", "wanda_row_50", "--statistics", statistics]
    done = run(*command, "--input-dim", "*.q_proj.weight=0")
    said(done, "correct input_dims (--input-dim)", code=2)
    works(run(*command, "--input-dim", "*.q_proj.weight=1"))


def test_the_file_of_mistral(run, tmp_path):
    folder = tmp_path / "mistral"
    folder.mkdir()
    (folder / "params.json").write_text("{}")
    (folder / "consolidated.safetensors").write_bytes(file_bytes(TENSORS))
    written = said(run("prune", folder, tmp_path / "out", "-s", "0.5"), "`distprune plan`", code=3)
    file = re.search(r"give the file itself: (\S+);", written)[1]
    works(run("plan", file))


def test_what_to_compare_by_diff(run, source, tmp_path):
    works(run("prune", source, tmp_path / "bare", "-s", "0.5", "--no-masks"))
    works(run("prune", source, tmp_path / "out", "-s", "0.5"))
    works(run("apply", tmp_path / "out", source, tmp_path / "applied"))
    works(run("prune", source, tmp_path / "no-report", "-s", "0.5"))
    (tmp_path / "no-report" / "distprune" / "report.json").unlink()
    verify = ["--against", source]
    said(run("verify", tmp_path / "bare", *verify), "Prune again with masks", "`distprune diff`")
    works(run("diff", "--exit-code", tmp_path / "bare", tmp_path / "out"))
    done = run("verify", tmp_path / "applied", *verify)
    said(done, "Verify that checkpoint; `distprune diff`", code=3)
    works(run("verify", tmp_path / "out", *verify))
    works(run("diff", tmp_path / "applied", source))
    done = run("verify", tmp_path / "no-report", *verify)
    said(done, "not made by `distprune prune`", "use `distprune diff`", code=3)
    works(run("diff", tmp_path / "no-report", source))


@pytest.mark.parametrize("has_scores", [False, True])
def test_the_commands_of_a_model_card(run, source, tmp_path, monkeypatch, has_scores):
    scores = save(tmp_path / "SCORES", {name: torch.randn(8, 12) for name in TENSORS})
    given = ["--scores", scores] if has_scores else []
    works(run("prune", source, tmp_path / "out", "-s", "0.5", *given))
    card = (tmp_path / "out" / "README.md").read_text()
    block = card.partition("```bash\n")[2].partition("```")[0]
    commands = [shlex.split(line, comments=True) for line in block.splitlines()]
    assert [words[:2] for words in commands] == [["distprune", "prune"], ["distprune", "verify"]]
    monkeypatch.chdir(tmp_path / "out")
    places = {"SRC": source, "DST": tmp_path / "again", "SCORES": scores}
    for words in commands:
        works(run(*(places.get(word, word) for word in words[1:])))
    run_facts = ("distprune/run.json",)
    assert tree_digest(tmp_path / "out", run_facts) == tree_digest(tmp_path / "again", run_facts)


def test_a_changed_model_card(run, source, tmp_path):
    works(run("prune", source, tmp_path / "out", "-s", "0.5"))
    with (tmp_path / "out" / "README.md").open("a") as card:
        card.write("more")
    verify = ["verify", tmp_path / "out", "--against", source]
    said(run(*verify), "prune with --no-card", code=3)
    works(run("prune", source, tmp_path / "bare", "-s", "0.5", "--no-card"))
    works(run("verify", tmp_path / "bare", "--against", source))


def test_a_recipe_for_checkpoints(run, source, tmp_path):
    from distprune.recipe import load_recipe

    path = tmp_path / "recipe.yaml"
    path.write_text("version: 2\nsparsity: 0.5\nnan: keep\n")
    with pytest.raises(ValueError, match="`distprune prune` prunes checkpoints"):
        load_recipe(path).pruner(torch.nn.Linear(2, 2))
    works(run("prune", source, tmp_path / "out", "-r", path))


def test_one_of_two_that_write_to_stdout(run, source):
    said(run("inspect", source, "--csv", "-", "--json"), "leave one of them out", code=2)
    works(run("inspect", source, "--csv", "-"))
    works(run("inspect", source, "--json"))


def test_a_defect_asks_for_the_environment(run, source, monkeypatch):
    def fail(*_, **__):
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(planning, "plan", fail)
        said(run("plan", source), "`distprune env`", code=1)
    works(run("env"))
    assert "`distprune env`" in process._DEFECT


def test_devices_and_wraps_of_models(run, llama):
    model, _statistics, text = llama
    command = ["eval", model, "--text", text, "--length", "16"]
    said(run(*command, "--device", "xla"), "--device xla: expected cpu", code=2)
    done = run(*command, "--device", "cpu", "--wrap", "ddp")
    said(done, "expected --nproc or torchrun, or no --wrap", code=2)
    done = run(*command, "--wrap", "fsdp2_tp")
    said(done, "--mesh and --wrap fsdp2_tp go together; expected both or none", code=2)
    said(run(*command, "--mesh", "2"), "go together", code=2)
    works(run(*command, "--device", "cpu"))


def test_every_command_has_help(run):
    import typer

    from distprune.cli import app

    said(run("--help"), "Every command has a --help of its own")
    for name in typer.main.get_command(app.make_app()).commands:
        works(run(name, "--help"))
    works(run("recipe", "ls"))  # of the help of --recipe


def test_extras_that_messages_name_exist():
    text = (ROOT / "pyproject.toml").read_text()
    known = text.partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    extras = set(re.findall(r"^([\w-]+) = ", known, re.MULTILINE))
    written = " ".join(text for _place, text in texts_of_the_package())
    named = set(",".join(re.findall(r"distprune\[([\w,-]+)\]", written)).split(","))
    assert "cli" in named and named <= extras


def texts_of_the_package():
    """(place, text) of every string in the code of the package, without docstrings."""
    for path in sorted((ROOT / "distprune").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        docstrings = {
            id(node.body[0].value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
            and node.body
            and isinstance(node.body[0], ast.Expr)
        }
        nodes = [tree]
        while nodes:
            node = nodes.pop()
            text = _text(node)
            if text is None:
                nodes += ast.iter_child_nodes(node)
            elif id(node) not in docstrings:
                yield f"{path.relative_to(ROOT)}:{node.lineno}", text


def _text(node):
    """A string, with names in the place of values; None for any other node."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(_text(value) or f"{{{ast.unparse(value.value)}}}" for value in values)
    return None


# A part of a text -> the test that runs what it advises: of this file, or of another one.
GOING_ON = "cli/test_going_on_and_giving_up.py::"
DOCUMENTED = "docs/test_documented_commands.py::"
SELFTEST = "selftest/test_selftest.py::"
RUN_BY = {
    "was trained on ({how}), gradients": "test_text_for_a_language_model",
    "--text FILE": "test_text_for_a_language_model",
    "has no effect without --text": "test_options_of_text_need_text",
    "--sparsity {share}": "test_what_was_probably_meant",
    "--score {score} is of live models": "test_what_was_probably_meant",
    "`distprune prune --text` collects": "test_options_of_text_need_text",
    "distprune eval measures it": "test_text_for_a_language_model",
    "in the recipe, and --text FILE": "test_text_for_a_recipe_with_groups",
    "--normalize rms, or ": "test_normalize_where_raw_magnitudes_empty_a_tensor",
    " (--normalize rms)": "test_normalize_where_raw_magnitudes_empty_a_tensor",
    "limits.max_sparsity (--max-sparsity)": "test_normalize_where_raw_magnitudes_empty_a_tensor",
    "No sparsity is given: --sparsity, --pattern": "test_an_amount_where_there_is_none",
    "expected --sparsity, --pattern or --recipe": "test_an_amount_where_there_is_none",
    "has no sparsity; expected --sparsity": "test_an_amount_where_there_is_none",
    "leave --scope out.": "test_an_amount_where_there_is_none",
    "expected --sparsity too, which replaces": "test_an_amount_where_there_is_none",
    "expected --statistics FILE": "test_what_a_score_is_made_from",
    "calibrate --gradients` or GradientStatistics.save": "test_what_a_score_is_made_from",
    "`distprune calibrate` without --gradients": "test_what_a_score_is_made_from",
    "`distprune calibrate --gradients`": "test_what_a_score_is_made_from",
    "--allow-empty has no effect with --gradients": (
        "cli/test_eval_and_calibrate.py::test_calibrate_writes_gradients_that_prune_a_checkpoint"
    ),
    "expected --scores FOLDER": "test_what_a_score_is_made_from",
    "leave --scores out": "test_what_a_score_is_made_from",
    "copy of them (--scores FOLDER)": "test_what_a_score_is_made_from",
    "(--way streamed)": "cli/test_prune_by_text.py::test_weights_stay_in_memory_if_asked",
    "with --keep-scores": "cli/test_prune_by_text.py::test_scores_of_single_weights",
    " `prune --text --keep-scores`": "cli/test_prune_by_text.py::test_scores_of_single_weights",
    "Give it with --input-dim": "test_the_dimension_of_the_inputs",
    "correct input_dims (--input-dim)": "test_the_dimension_of_the_inputs",
    "--input-dim {option}: expected PATTERN=DIM": "test_the_dimension_of_the_inputs",
    "check what is selected with `distprune plan`": "test_the_file_of_mistral",
    "compare the two results with `distprune diff`": "test_what_to_compare_by_diff",
    "`distprune diff` compares the weights": "test_what_to_compare_by_diff",
    "use `distprune diff` to compare": "test_what_to_compare_by_diff",
    "distprune prune SRC DST -r": "test_the_commands_of_a_model_card",
    "distprune verify DST --against SRC": "test_the_commands_of_a_model_card",
    " --scores SCORES": "test_the_commands_of_a_model_card",
    "or prune with --no-card": "test_a_changed_model_card",
    "`distprune prune` prunes checkpoints": "test_a_recipe_for_checkpoints",
    "--csv - and --json both write to stdout": "test_one_of_two_that_write_to_stdout",
    "output of `distprune env`": "test_a_defect_asks_for_the_environment",
    "--device {kind}: expected cpu": "test_devices_and_wraps_of_models",
    "or --device cpu.": "test_devices_and_wraps_of_models",
    "--mesh and --wrap fsdp2_tp go together": "test_devices_and_wraps_of_models",
    "expected --nproc or torchrun, or no --wrap": (
        "cli/test_eval_and_calibrate.py::test_processes_share_the_windows_and_say_the_same"
    ),
    "Every command has a --help": "test_every_command_has_help",
    "(`distprune recipe ls`)": "test_every_command_has_help",
    "pip install": "test_extras_that_messages_name_exist",
    "Add --force to replace it": (
        "cli/test_force.py::test_a_result_is_replaced_by_what_a_free_place_would_get"
    ),
    "`distprune --install-completion` installs": (
        "cli/test_completion.py::test_it_can_be_installed"
    ),
    "expected --text FILE, or --generate TEXT": (
        "cli/test_eval_and_calibrate.py::test_eval_goes_on_with_a_text"
    ),
    "--generate with --wrap stream": (
        "cli/test_eval_and_calibrate.py::test_eval_goes_on_with_a_text"
    ),
    "add --discard to that command": f"{GOING_ON}test_discard_gives_up",
    "with --discard, and then again without": f"{GOING_ON}test_discard_gives_up",
    "distprune plan Llama-3.2-1B --sparsity 0.5": f"{DOCUMENTED}test_examples_of_the_help_run",
    "python -m distprune selftest": f"{SELFTEST}test_two_ranks_print_once",
    "Pass --cpu to use none": f"{SELFTEST}test_one_process_with_torch_and_numpy_only",
    "With --share they have the devices in common": (
        f"{SELFTEST}test_ranks_that_share_an_accelerator_use_gloo"
    ),
    "call `accelerate launch --multi_gpu": (
        "launch/test_launchers.py::test_accelerate_that_starts_fewer_than_it_was_asked_for"
    ),
}
# A part of a text -> why there is nothing to run.
NOTHING_TO_RUN = {
    "--force replaces nothing else": "an option to leave out",
    "which --force would replace": "an option to leave out",
    "and --force would remove it": "an option to leave out",
    "--pattern {text}: expected": "the option that is wrong",
    "--csv {path}": "the option that is wrong",
    "--update {self.update}": "the option that is wrong",
    "--way {self.way}": "the option that is wrong",
    "--score-bits {self.score_bits}": "the option that is wrong",
    "unless --score says otherwise": "help of an option",
    "With --text, run one decoder layer": "help of an option",
    "and --scores FOLDER ranks by them again": "help of an option",
    "and prune --text makes those": "help of an option",
    "as in --round 0.35": "help of an option",
    "or fewer in a batch (--batch-size)": "options whose value depends on the machine",
    "--plot {path}": "the option that is wrong",
    "--mesh {self.mesh}": "the option that is wrong",
    "torchrun has started the processes already": "an option to leave out",
    "# What `distprune apply` was given": "says what a file is",
    "distprune selftest": "the name of the program",
    "Of --samples.": "help of an option",
    "beside --sparsity, prune whole tiles": "help of an option",
    "by --statistics": "help of an option",
    "as `distprune calibrate` writes them": "help of an option",
    "the default of --include": "help of an option",
    "aws s3 cp --recursive": "needs a network",
    "or --dtype float32": "needs a CPU without instructions for 16 bits",
    "Check --num_processes, --num_machines": "needs a launcher that is wrong",
    "script by `accelerate launch` or torchrun": "tests/launch starts scripts in both ways",
    "call torch's fully_shard under torchrun": "tests/launch runs examples under torchrun",
    "start it with torchrun, or show it one GPU": "needs GPUs",
    "Start the program by torchrun": "tests/launch runs examples under torchrun",
}


def test_every_text_that_names_a_command_is_in_a_table():
    texts = [
        (place, text)
        for place, text in texts_of_the_package()
        if ADVISES.search(text) and not re.fullmatch(r"--[\w/{}\[\]:-]+", text)
    ]
    parts = [*RUN_BY, *NOTHING_TO_RUN]
    unknown = [each for each in texts if not any(part in each[1] for part in parts)]
    assert not unknown, "add what these texts advise to a table, and a test that runs it"
    unused = [part for part in parts if not any(part in text for _place, text in texts)]
    assert not unused, "no text of the package has these parts any more"


def test_the_tests_that_the_table_names_exist():
    for name in set(RUN_BY.values()):
        file, _, test = name.rpartition("::")
        path = ROOT / "tests" / (file or "cli/test_advised_commands.py")
        assert f"def {test}(" in path.read_text(encoding="utf-8"), name
