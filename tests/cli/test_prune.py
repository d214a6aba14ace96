"""``distprune prune``: what it says, its progress, exit codes, and warnings after a run."""

import io
import os
import shutil

import pytest
import torch
from rich.console import Console

from distprune.cli import console, main
from distprune.cli.console import Terminal
from distprune.files import disk, planning, pruning
from distprune.files.errors import OutputError
from distprune.files.reports import read_report
from distprune.files.team import Progress
from helpers.forked_scripts import end_of, run_forked, start
from helpers.recipes import raw_recipe
from helpers.tiny_checkpoints import load, save, save_in_files, tree_digest

RUN = ("distprune/report.json",)  # time and memory


@pytest.fixture
def source(tmp_path):
    torch.manual_seed(0)
    names = [f"model.layers.{i}.mlp.{k}.weight" for i in range(11) for k in ("up", "down")]
    tensors = {name: torch.randn(16, 16).bfloat16() for name in names}
    tensors["lm_head.weight"] = torch.randn(16, 16)
    return save_in_files(tmp_path / "source", tensors, 11)


def zeros(folder) -> int:
    return sum(int((tensor == 0).sum()) for tensor in load(folder).values())


def test_prunes_exactly_and_says_so(run, source, tmp_path):
    before = tree_digest(source)
    done = run("prune", source, tmp_path / "out", "--sparsity", "0.3")
    assert done.code == 0
    count = round(0.3 * 22 * 256)
    assert zeros(tmp_path / "out") == count and zeros(source) == 0
    assert f"Pruned {count:,} of 5,632 elements (30.01 %) in 22 tensors." in done.out
    assert "Largest pruned score: " in done.out and " times the rms of its tensor; " in done.out
    assert f"Prunes {count:,} of 5,632" in done.err
    assert tree_digest(source) == before

    # The stored recipe is one: with it, and quietly, the same comes out.
    recipe = tmp_path / "out" / "distprune" / "recipe.yaml"
    done = run("prune", source, tmp_path / "again", "-r", recipe, "--json", "-q")
    assert done.err == ""
    assert done.json["num_pruned"] == count and done.json["run"]["num_ranks"] == 1
    assert len(done.json["tensors"]) == 22 and done.json["groups"][0]["threshold"] > 0
    assert tree_digest(tmp_path / "again", RUN) == tree_digest(tmp_path / "out", RUN)

    done = run("prune", source, tmp_path / "bare", "-r", recipe, "--no-card", "-v")
    assert not (tmp_path / "bare" / "README.md").exists()
    assert "model.layers.10.mlp.up.weight" in done.out


def test_a_defect_is_a_traceback(run, source, tmp_path, monkeypatch):
    monkeypatch.setattr(planning, "plan", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["prune", str(source), str(tmp_path / "out"), "-s", "0.5"])


@pytest.mark.parametrize(("is_terminal", "is_quiet"), [(False, False), (False, True), (True, True)])
def test_progress_is_a_line_every_ten_seconds(monkeypatch, is_terminal, is_quiet):
    """Where it is no bar, on a terminal."""
    now = [0.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    terminal, file = Terminal(quiet=is_quiet), io.StringIO()
    terminal.errors = Console(file=file, force_terminal=is_terminal, width=100)
    with console.Meter(terminal) as meter:
        for seconds in (1, 9, 11, 12, 22):
            now[0] += seconds
            meter.show(Progress("write", 3 * 10**9, 6 * 10**9))
    assert file.getvalue().splitlines() == ["write: 3.0 GB of 6.0 GB"] * 4 * (not is_quiet)


def test_progress_is_a_bar_on_a_terminal():
    terminal, file = Terminal(), io.StringIO()
    terminal.errors = Console(file=file, force_terminal=True, width=100)
    with console.Meter(terminal) as meter:
        meter.show(Progress("write", 3 * 10**9, 6 * 10**9))
    assert "write" in file.getvalue() and "3.0 GB of 6.0 GB" in file.getvalue()


@pytest.mark.slow
def test_without_its_packages_the_command_says_what_to_install(tmp_path):
    script = "import sys; sys.modules['click'] = None; from distprune.cli import main; main()"
    code, _, err = end_of(start("-c", script))
    assert code == 2 and "pip install 'distprune[cli]'" in err


@pytest.fixture
def tensors():
    """A pooler whose weights are a hundredth of the others', as in MiniLM."""
    torch.manual_seed(0)
    found = {f"layers.{i}.mlp.weight": torch.randn(40, 40) + 3 for i in range(3)}
    return found | {"pooler.weight": torch.randn(20, 40) / 100}


def test_a_tensor_that_loses_nearly_all_is_named_with_its_share(run, tensors, tmp_path):
    source = save(tmp_path / "source", tensors)
    raw = ("-s", "0.5", "--normalize", "none")
    done = run("prune", source, tmp_path / "out", *raw, "--json")
    assert done.code == 0
    (warning,) = done.json["warnings"]
    assert warning.startswith("pooler.weight (100.00 % of 800 elements) lost at least 99 %")
    assert "--max-sparsity" in warning and "layers" not in warning
    assert f"Warning: {warning}" in done.err
    assert read_report(tmp_path / "out").warnings == (warning,)
    # What it advises helps; and -q says nothing.
    for number, better in enumerate(([*raw, "--max-sparsity", "0.9"], ["-s", "0.5"])):
        done = run("prune", source, tmp_path / f"better{number}", *better)
        assert done.code == 0 and "Warning" not in done.err
    assert run("prune", source, tmp_path / "quiet", *raw, "-q").err == ""


@pytest.mark.parametrize(
    "recipe",
    [
        raw_recipe(0.995),
        raw_recipe(0.995, "layer"),
        raw_recipe(0.5, "layer"),
        raw_recipe(groups=(raw_recipe(1.0, include=("pooler*",)),)),
    ],
)
def test_nothing_is_said_where_so_much_was_asked_for(tensors, tmp_path, recipe):
    source = save(tmp_path / "source", tensors)
    assert pruning.prune(planning.plan(source, recipe), tmp_path / "out").warnings == ()


@pytest.mark.parametrize("way", [{"sparsity": 0.5}, {"pattern": "2:4"}])
def test_a_source_that_is_sparse_already(tmp_path, way):
    torch.manual_seed(0)
    tensors = {f"layers.{i}.weight": torch.randn(16, 40).bfloat16() for i in range(4)}
    tensors["layers.1.weight"].view(-1)[:100] = 0.0
    tensors["layers.2.weight"].view(-1)[:100] = -0.0
    plan = planning.plan(save(tmp_path / "source", tensors), raw_recipe(**way))
    report = pruning.prune(plan, tmp_path / "target")
    (warning,) = report.warnings
    assert "200 of the 2,560 selected elements (7.81 %) are zero in it" in warning
    zeros = {tensor.name: tensor.num_zero for tensor in report.tensors}
    assert zeros == {f"layers.{i}.weight": 100 * (i in (1, 2)) for i in range(4)}


# ``--force`` replaces finished results only; ``--discard``; a run that goes on after a signal.


DESTINATION = 1


@pytest.fixture
def out(run, source, tmp_path):
    """A finished result."""
    assert run("prune", source, tmp_path / "out", "-s", "0.5").code == 0
    return tmp_path / "out"


@pytest.fixture(params=["prune", "apply"])
def again(request, run, source, tmp_path):
    """A command that makes another result, but for its destination."""
    if request.param == "prune":
        return ["prune", source], ["-s", "0.25"]
    assert run("prune", source, tmp_path / "masks", "-s", "0.25").code == 0
    return ["apply", tmp_path / "masks", source], []


def test_a_result_is_replaced_by_what_a_free_place_would_get(run, again, out, tmp_path):
    begin, end = again
    old = tree_digest(out, RUN)
    done = run(*begin, out, *end)
    assert done.code == DESTINATION and "Add --force to replace it" in done.err
    assert tree_digest(out, RUN) == old
    assert run(*begin, out, *end, "--force").code == 0
    assert run(*begin, tmp_path / "free", *end).code == 0
    assert tree_digest(out, RUN) == tree_digest(tmp_path / "free", RUN) != old
    assert not list(tmp_path.glob("*.partial*"))
    done = run(*begin, out, *end, "--force")
    assert done.code == 0 and "Nothing was changed" in done.err


def test_the_old_result_stays_until_the_new_one_is_complete(run, again, out, monkeypatch):
    begin, end = again
    old = tree_digest(out, RUN)

    def stop(*_):
        raise OutputError("stopped.")

    with monkeypatch.context() as patch:
        patch.setattr(pruning.Result, "_publish", stop)
        assert run(*begin, out, *end, "--force").code == 1
    assert tree_digest(out, RUN) == old
    assert run(*begin, out, *end, "--force").code == 0
    assert tree_digest(out, RUN) != old


def test_a_run_killed_between_the_renames_loses_neither(run, source, out, monkeypatch):
    old, command = tree_digest(out, RUN), ["prune", source, out, "-s", "0.25"]

    def killed(destination):
        os.rename(destination, disk._replaced(destination))
        raise OutputError("as if by SIGKILL.")

    with monkeypatch.context() as patch:
        patch.setattr(disk, "publish", killed)
        assert run(*command, "--force").code == 1
    assert not out.exists()
    assert run(*command).code == DESTINATION  # it puts the old result back
    assert tree_digest(out, RUN) == old
    assert run(*command, "--force").code == 0
    shutil.copytree(out, disk._replaced(out))  # killed before the old one was removed
    assert run(*command).code == 0 and not disk._replaced(out).exists()


def test_nothing_else_is_replaced(run, source, out, tmp_path):
    def refused(destination, *words, masks=()):
        before = tree_digest(tmp_path)
        command = ["apply", *masks, source] if masks else ["prune", source]
        amount = [] if masks else ["-s", "0.25"]
        done = run(*command, destination, *amount, "--force")
        assert done.code == DESTINATION and all(word in done.err for word in words), done.err
        assert tree_digest(tmp_path) == before

    plain = save(tmp_path / "plain", {"layers.0.weight": torch.randn(4, 4)})
    refused(plain, "is no finished result of distprune")
    refused(source, "is inside the source")
    (tmp_path / "link").symlink_to(out)
    refused(tmp_path / "link", "is no finished result")
    refused(out, "which --force would replace", masks=[out])
    inside = save(out / "inside", {"layers.0.weight": torch.randn(4, 4)})
    done = run("prune", inside, out, "-s", "0.25", "--force")
    assert done.code == DESTINATION and "which --force would replace" in done.err


@pytest.fixture
def command(again, tmp_path):
    begin, end = again
    return [*begin, tmp_path / "out", *end]


# As if a signal came when nearly all is done.
INTERRUPTED = """
import os, signal
from distprune.cli import main
from distprune.files import pruning
pruning.Result._publish = lambda *_: os.kill(os.getpid(), signal.{})
main()
"""


def interrupted(folder, command, name="SIGTERM"):
    """The exit code of a command, in a process of its own, that a signal ends."""
    script = folder / "interrupted.py"
    script.write_text(INTERRUPTED.format(name))
    code, _ = run_forked(script, *command)
    script.unlink()
    return code


def test_the_same_command_goes_on_after_a_signal(run, command, tmp_path):
    for name, code in (("SIGINT", 1), ("SIGTERM", -15)):
        assert interrupted(tmp_path, command, name) == code
    done = run(*command)
    assert done.code == 0 and "Resuming: " in done.err


def test_discard_gives_up(run, command, tmp_path):
    before = {path.name for path in tmp_path.iterdir()}
    interrupted(tmp_path, command)
    assert "Removed " in run(*command, "--discard").out
    assert {path.name for path in tmp_path.iterdir()} == before
    assert "There is no unfinished result" in run(*command, "--discard").out
    interrupted(tmp_path, command)
    assert len(run(*command, "--discard", "--json").json["discarded"]) == 1


THREADS = """
import sys
from pathlib import Path
from distprune.cli import main
try:
    main(sys.argv[1:])
except SystemExit as error:
    assert error.code == 0
    print([path.read_text() for path in Path("/proc/self/task").glob("*/comm")])
"""


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="threads are named in /proc")
def test_no_thread_of_a_group_is_left_at_the_end(tmp_path, source):
    """It could need what Python has ended already, and abort a process that has succeeded."""
    script = tmp_path / "script.py"
    script.write_text(THREADS)
    code, printed = run_forked(script, "prune", source, tmp_path / "out", "-s", "0.5", num_ranks=2)
    assert code == 0 and "python" in printed and "gloo" not in printed
