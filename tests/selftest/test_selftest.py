"""The self-test holds here, needs little, answers by its exit code, and finds faults."""

import json
import os
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import planted
import pytest
import torch

from distprune.selftest import checks
from distprune.selftest.running import Report, Result, choose_device, end_text
from distprune.testing import run_ranks
from helpers.forked_scripts import run_forked

FAST = ["masks", "training", "private fields"]
ROOT = Path(__file__).resolve().parents[2]


def start(*arguments, **environment):
    settings = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
    return subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **settings},
    )


def end_of(process):
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


# Neither is there; the self-test must not mind. As on a GPU, optimizers step lists of parameters.
WITHOUT_EXTRAS = """
import sys
import torch
sgd = sys.modules["torch.optim.sgd"]
sgd._default_to_fused_or_foreach = lambda *args, **kwargs: (False, True)
for name in ("typer", "rich", "yaml", "safetensors", "transformers", "deepspeed", "pytest"):
    sys.modules[name] = None
from distprune.cli.main import main
main(["selftest", *sys.argv[1:]])
"""


def test_one_process_with_torch_and_numpy_only():
    code, out, err = end_of(start("-c", WITHOUT_EXTRAS, "--json", "--cpu"))
    assert code == 0, out + err
    report = json.loads(out)
    assert report["holds"] and report["ended"] is None
    assert {"distprune", "torch", "python", "backend", "device", "ranks"} <= set(report["facts"])
    tried = {(r["wrapping"], r["check"]) for r in report["results"] if r["status"] == "ok"}
    columns = set(checks.CHECKS) - {"all or none"}
    names = ("plain", "DDP", "FSDP2", "replicate", "TP")
    assert tried == {(w, c) for w in names for c in columns}
    reasons = {r["wrapping"]: r["detail"] for r in report["results"] if r["status"] == "not tried"}
    assert reasons["ZeRO-3"].startswith("needs deepspeed: ")
    assert {text.partition(":")[0] for text in reasons.values()} == {
        "needs 2 ranks", "needs 4 ranks", "needs deepspeed"
    }  # fmt: skip


SOME = """
from distprune.selftest import checks, running
running.WRAPPINGS = [each for each in checks.WRAPPINGS if not each.library]
for name in [name for name in checks.CHECKS if name not in ("masks", "traffic")]:
    del checks.CHECKS[name]
from distprune.cli.main import main
main(["selftest", "--cpu"])
"""


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_two_ranks_print_once(whole, tmp_path):
    if whole:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        code, out, err = end_of(start(*torchrun, "-m", "distprune", "selftest", "--cpu"))
    else:
        (tmp_path / "some.py").write_text(SOME)
        (code, out), err = run_forked(tmp_path / "some.py", num_ranks=2), ""
    assert code == 0, out + err
    num_checks = len(checks.CHECKS) if whole else 2
    assert out.count("masks") == 1
    libraries = {"ZeRO-1": "deepspeed", "ZeRO-2": "deepspeed", "ZeRO-3": "deepspeed"}
    libraries |= {"HF FSDP": "transformers", "HF TP": "transformers"}
    found = [name for name, library in libraries.items() if whole and find_spec(library)]
    names = ["plain", "DDP", "FSDP1", "FSDP2", "replicate", "TP", *found]
    for name in names:
        (line,) = [line for line in out.splitlines() if line.split("  ")[0] == name]
        assert line.count(" ok") == num_checks - 1 and " kB" in line, line
    assert "HSDP          not tried: needs 4 ranks" in out
    assert f"Everything that was tried holds: {len(names) * num_checks} checks" in out


def test_every_wrapping_of_torch_on_four_ranks(tmp_path):
    names = [each.name for each in checks.WRAPPINGS if not each.library]
    store = str(tmp_path / "store")
    for report in run_ranks(planted.report_of, 4, store, names, FAST, timeout=240):
        assert report["holds"], report
        assert len(report["results"]) == len(names) * len(FAST)


@pytest.mark.parametrize("library", ["deepspeed", "transformers"])
def test_wrappings_of_libraries(library, tmp_path):
    pytest.importorskip(library)
    names = [each.name for each in checks.WRAPPINGS if each.library == library]
    for report in run_ranks(planted.report_of, 2, str(tmp_path / "store"), names, FAST):
        assert report["holds"], report
        assert {r["status"] for r in report["results"]} == {"ok"}
        assert len(report["results"]) == len(names) * len(FAST)


@pytest.mark.parametrize("share", [False, True])
def test_ranks_that_share_an_accelerator_use_gloo(share, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr("torch.distributed.is_backend_available", lambda backend: True)
    chosen = []
    monkeypatch.setattr(torch.accelerator, "set_device_index", chosen.append)
    for name, value in (("LOCAL_RANK", "3"), ("LOCAL_WORLD_SIZE", "4")):
        monkeypatch.setenv(name, value)
    device, backend, note = choose_device(3, 4, cpu=False, share=share)
    assert backend == "gloo"
    if share:
        assert device == torch.device("cuda", 1) and chosen == [1] and note == ""
    else:
        assert device == torch.device("cpu") and "--share" in note


@pytest.mark.thorough
def test_an_odd_number_of_ranks_tries_what_it_can(tmp_path):
    names = [each.name for each in checks.WRAPPINGS if not each.library]
    store, some = str(tmp_path / "store"), ["masks", "training"]
    for report in run_ranks(planted.report_of, 3, store, names, some, timeout=240):
        assert report["holds"], report
        skipped = {r["wrapping"] for r in report["results"] if r["status"] == "not tried"}
        assert skipped == {"FSDP1 hybrid", "HSDP", "FSDP2 + TP"}


FOUND = [
    ("swap_ties", "FSDP2", "masks", "tied values, amount"),
    ("one_too_many", "plain", "masks", "elements were pruned, expected"),
    ("idle_mask", "FSDP2", "training", "the output differs from the reference"),
    ("dense_gradient", "FSDP2", "training", "a step changed pruned elements of l1.weight"),
    ("dense_master", "ZeRO-3", "training", "a step changed pruned elements of l1.weight"),
    ("much_traffic", "DDP", "traffic", "expected at most 256 kB"),
    ("uncompared_amounts", "DDP", "all or none", "RuntimeError"),
    ("changed_before_agreed", "DDP", "all or none", "the model has changed although"),
    ("renamed_field", "FSDP2", "private fields", "changed FSDP2's FSDPParam._of_tomorrow"),
    ("lost_function", "TP", "private fields", "torch has no torch.distributed.tensor.No"),
]


@pytest.mark.parametrize(("fault", "wrapping", "check", "message"), FOUND)
def test_a_planted_fault_is_found_and_named(tmp_path, fault, wrapping, check, message):
    if wrapping.startswith("ZeRO"):
        pytest.importorskip("deepspeed")
    found = run_ranks(
        planted.report_of, 2, str(tmp_path / "store"), [wrapping], [check], fault, 4.0
    )
    for report in found:  # the same on both ranks
        assert not report["holds"]
        (result,) = report["results"]
        assert (result["status"], result["check"]) == ("FAILED", check)
        assert any(message in text for text in result["wrong"]), result["wrong"]
        text = end_text(Report(report["facts"], [Result(**result)]))
        assert f'FAILED: "{check}" on {wrapping}' in text and "1 of 1 checks FAILED" in text


def test_a_rank_that_raises_alone_ends_the_test_on_every_rank(tmp_path):
    some = ["masks", "training"]
    arguments = (str(tmp_path / "store"), ["plain", "DDP"], some, "one_rank_raises")
    for report in run_ranks(planted.report_of, 2, *arguments):
        assert not report["holds"] and "out of step" in report["ended"]
        (result,) = report["results"]
        assert "rank 1: Traceback" in result["wrong"][0]
        assert "MemoryError: planted" in result["wrong"][0]


def test_a_rank_that_does_not_answer_ends_the_test_at_the_deadline(tmp_path):
    arguments = (str(tmp_path / "store"), ["plain"], ["masks"], "one_rank_sleeps", 2.0)
    first, second = run_ranks(planted.report_of, 2, *arguments)
    for report in (first, second):
        assert report["ended"] == "a rank is lost" and not report["holds"]
    assert first["results"][0]["wrong"] == ["rank 1 did not answer within 2 s"]


DYING = """
import os, sys
from distprune.selftest import checks
def die(case):
    if case.rank == 1:
        os._exit(9)
    return checks.check_masks(case)
checks.CHECKS["masks"] = die
from distprune.cli.main import main
main(["selftest", "--cpu", "--timeout", "3"])
"""


@pytest.mark.thorough
def test_a_rank_that_dies_is_exit_code_5_on_the_others():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    processes = [start("-c", DYING, RANK=str(rank), **place) for rank in range(2)]
    (code, out, err), (died, _, _) = map(end_of, processes)
    assert (code, died) == (5, 9), out + err
    assert "rank 1 did not answer within 3 s" in out and "ended early: a rank is lost" in out


FAILING = """
from distprune.selftest import checks, running
running.WRAPPINGS = checks.WRAPPINGS[:1]
checks.CHECKS["masks"] = lambda case: ["planted"]
from distprune.cli.main import main
main(["selftest", "--cpu"])
"""


def test_what_does_not_hold_is_exit_code_1(tmp_path):
    (tmp_path / "failing.py").write_text(FAILING)
    code, out = run_forked(tmp_path / "failing.py")
    assert code == 1, out
    assert 'FAILED: "masks" on plain\n    planted\n' in out
    assert "1 of 4 checks FAILED" in out


MISSING = """
import sys
sys.modules[sys.argv.pop(1)] = None
from distprune.cli.main import main
main(["selftest"])
"""


@pytest.mark.parametrize(
    ("module", "expected", "message"),
    [
        ("torch", 2, "the self-test needs torch and numpy"),
        pytest.param(
            "distprune.torch_private.private_fields",
            1,
            "FAILED: distprune does not import with torch",
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_a_torch_that_lacks_a_module(module, expected, message):
    code, out, err = end_of(start("-c", MISSING, module))
    assert code == expected and message in out + err, out + err


@pytest.mark.parametrize("arguments", [["--bogus"], ["--timeout", "0"], ["--timeout", "x"]])
def test_wrong_usage_is_exit_code_2(arguments, capsys):
    from distprune.cli.main import main

    with pytest.raises(SystemExit) as ended:
        main(["selftest", *arguments])
    assert ended.value.code == 2
    assert "usage: distprune selftest" in capsys.readouterr().err
