"""The self-test holds here, needs little, answers by its exit code, and finds faults."""

import contextlib
import importlib
import json
import sys
from datetime import timedelta
from importlib.util import find_spec
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import distprune
from distprune import selftest
from distprune.testing import run_ranks
from helpers import deepspeed_state
from helpers.forked_scripts import end_of, held_port, run_forked, start

FAST = ["masks", "training", "private fields"]
TORCH = [each.name for each in selftest.WRAPPINGS if each.name != "ZeRO-3"]


# None of these is there; the self-test must not mind.
WITHOUT_EXTRAS = """
import sys
for name in ("click", "rich", "yaml", "safetensors", "transformers", "deepspeed", "pytest"):
    sys.modules[name] = None
from distprune.cli import main
main(["selftest", *sys.argv[1:]])
"""


def test_one_process_with_torch_and_numpy_only():
    code, out, err = end_of(start("-c", WITHOUT_EXTRAS, "--json", "--cpu"))
    assert code == 0, out + err
    report = json.loads(out)
    assert report["holds"] and not report["ended"] and not report["wrong"]
    assert {"distprune", "torch", "python", "backend", "device", "ranks"} <= set(report["facts"])
    assert list(report["wrappings"]) == [each.name for each in selftest.WRAPPINGS]
    for name, cells in report["wrappings"].items():
        if name in ("plain", "DDP", "FSDP2", "TP"):
            others = {check: text for check, text in cells.items() if check != "traffic"}
            assert others == dict.fromkeys(selftest.CHECKS.keys() - {"traffic"}, "ok") | {
                "all or none": "-"
            }
            assert cells["traffic"].endswith(" kB")
        else:
            reason = "needs deepspeed: " if name == "ZeRO-3" else "needs "
            assert cells["tried"].startswith(f"not tried: {reason}")


SOME = """
from distprune import selftest
selftest.WRAPPINGS = selftest.WRAPPINGS[:-1]
for name in [name for name in selftest.CHECKS if name not in ("masks", "traffic")]:
    del selftest.CHECKS[name]
from distprune.cli import main
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
    assert out.count("masks") == 1
    names = ["plain", "DDP", "FSDP1", "FSDP2", "TP"]
    names += ["ZeRO-3"] * bool(whole and find_spec("deepspeed"))
    for name in names:
        (line,) = [line for line in out.splitlines() if line.split("  ")[0] == name]
        assert line.count(" ok") == (len(selftest.CHECKS) if whole else 2) - 1 and " kB" in line
    assert "HSDP        not tried: needs 4 ranks" in out
    assert "Everything that was tried holds." in out


def test_every_wrapping_of_torch_on_four_ranks():
    for report, _ in run_ranks(report_of, 4, TORCH, FAST, timeout=240):
        assert report["holds"], report
        assert report["wrappings"] == {name: dict.fromkeys(FAST, "ok") for name in TORCH}


def test_zero_3():
    pytest.importorskip("deepspeed")
    for report, _ in run_ranks(report_of, 2, ["ZeRO-3"], FAST):
        assert report["holds"] and set(report["wrappings"]["ZeRO-3"]) == set(FAST), report


def test_ranks_that_share_an_accelerator_use_gloo(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    chosen, made = [], []
    monkeypatch.setattr(torch.accelerator, "set_device_index", chosen.append)
    monkeypatch.setattr(
        torch.distributed, "init_process_group", lambda backend, **_: made.append(backend)
    )
    for name, value in (("LOCAL_RANK", "3"), ("LOCAL_WORLD_SIZE", "4")):
        monkeypatch.setenv(name, value)
    device, note = selftest.join(60.0, cpu=False)
    assert made == ["gloo"] and note == "4 ranks share 2 devices, over gloo"
    assert device == torch.device("cuda", 1) and chosen == [1]


@pytest.mark.thorough
def test_an_odd_number_of_ranks_tries_what_it_can():
    for report, _ in run_ranks(report_of, 3, TORCH, ["masks", "training"], timeout=240):
        assert report["holds"], report
        skipped = {name for name, cells in report["wrappings"].items() if "tried" in cells}
        assert skipped == {"HSDP", "FSDP2 + TP"}


FOUND = [
    ("swap_ties", "FSDP2", "masks", "tied values, amount"),
    ("one_too_many", "plain", "masks", "elements were pruned, expected"),
    ("idle_mask", "FSDP2", "training", "the output differs from the reference"),
    ("dense_master", "ZeRO-3", "training", "the weight of layer 0 after a step differs"),
    ("much_traffic", "DDP", "traffic", "expected at most 256 kB"),
    ("uncompared_amounts", "DDP", "all or none", "do not change during the call"),
    ("changed_before_agreed", "DDP", "all or none", "the model has changed although"),
    ("renamed_field", "FSDP2", "private fields", "FSDP2Parameter.fsdp_param._of_tomorrow"),
    ("lost_function", "TP", "private fields", "torch has no torch.distributed.tensor.No"),
]


@pytest.mark.parametrize(("fault", "wrapping", "check", "message"), FOUND)
def test_a_planted_fault_is_found_and_named(fault, wrapping, check, message):
    if wrapping.startswith("ZeRO"):
        pytest.importorskip("deepspeed")
    for report, text in run_ranks(report_of, 2, [wrapping], [check], fault):
        assert not report["holds"] and report["wrappings"] == {wrapping: {check: "FAILED"}}
        assert any(message in each for each in report["wrong"]), report["wrong"]
        assert f'FAILED: "{check}" on {wrapping}, rank ' in text and " problems." in text


def test_a_rank_that_raises_alone_ends_the_test_on_every_rank():
    some = ["masks", "training"]
    for report, _ in run_ranks(report_of, 2, ["plain", "DDP"], some, "one_rank_raises"):
        assert report["ended"] and not report["holds"]
        first, last = report["wrong"]
        assert "plain, rank 1: Traceback" in first and "MemoryError: planted" in first
        assert "out of step" in last


DYING = """
import os, sys
from distprune import selftest
import torch.distributed as dist
def die(case):
    if dist.get_rank() == 1:
        os._exit(9)
    return []
selftest.CHECKS["masks"] = die
from distprune.cli import main
main(["selftest", "--cpu", "--timeout", "3"])
"""


@pytest.mark.thorough
def test_a_rank_that_dies_ends_the_others():
    with held_port() as port:
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
        processes = [start("-c", DYING, RANK=str(rank), **place) for rank in range(2)]
        (code, out, err), (died, _, _) = map(end_of, processes)
    assert (code, died) == (1, 9), out + err
    assert "FAILED: ended early: " in out


FAILING = """
from distprune import selftest
selftest.WRAPPINGS = selftest.WRAPPINGS[:1]
selftest.CHECKS["masks"] = lambda case: ["planted"]
from distprune.cli import main
main(["selftest", "--cpu"])
"""


def test_what_does_not_hold_is_exit_code_1(tmp_path):
    (tmp_path / "failing.py").write_text(FAILING)
    code, out = run_forked(tmp_path / "failing.py")
    assert code == 1, out
    assert 'FAILED: "masks" on plain, rank 0: planted' in out and "1 problems." in out


MISSING = """
import sys
sys.modules[sys.argv.pop(1)] = None
from distprune.cli import main
main(["selftest"])
"""


@pytest.mark.parametrize(
    ("module", "expected", "message"),
    [
        ("torch", 1, "FAILED: distprune cannot be imported"),
        pytest.param(
            "distprune.wrappers.wrapper",
            1,
            "FAILED: distprune cannot be imported",
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_a_torch_that_lacks_a_module(module, expected, message):
    code, out, err = end_of(start("-c", MISSING, module))
    assert code == expected and message in out + err, out + err


@pytest.mark.parametrize("arguments", [["--bogus"], ["--timeout", "x"]])
def test_wrong_usage_is_exit_code_2(arguments, capsys):
    from distprune.cli import main

    with pytest.raises(SystemExit) as ended:
        main(["selftest", *arguments])
    assert ended.value.code == 2
    assert "usage: distprune selftest" in capsys.readouterr().err


# Faults to plant in distprune, and a self-test that runs with one of them on every rank.


def report_of(wrappings, only, fault=None):
    """The report of this rank, of a run on some wrappings with some of the checks."""
    chosen = [each for each in selftest.WRAPPINGS if each.name in wrappings]
    if "deepspeed" in sys.modules:
        deepspeed_state.forget()
    some = {name: check for name, check in selftest.CHECKS.items() if name in only}
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(selftest, "WRAPPINGS", chosen))
        stack.enter_context(mock.patch.object(selftest, "CHECKS", some))
        if fault is not None:
            FAULTS[fault](stack)
            # Ranks out of step: as the self-test's own group would, this one times out.
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=4), dist.group.WORLD)
        lines = []
        report = selftest.run(torch.device("cpu"), "", 60.0, lines.append)
    return report, "\n".join(lines)


def replace(stack, module, path, value):
    owner = importlib.import_module(module)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    stack.enter_context(mock.patch.object(owner, name, value))


def swap_ties(stack):
    """Of two equal magnitudes the later one is pruned instead of the earlier one."""
    prune = distprune.global_unstructured

    def changed(parameters, *args, **kwargs):
        before = [getattr(module, name).detach().clone() for module, name in parameters]
        report = prune(parameters, *args, **kwargs)
        for (module, name), values in zip(parameters, before, strict=True):
            mask = getattr(module, name + "_mask")
            if hasattr(mask, "to_local"):
                swap(mask.to_local(), values.to_local())
        return report

    stack.enter_context(mock.patch.object(distprune, "global_unstructured", changed))


@torch.no_grad()
def swap(mask, values):
    flat, magnitudes = mask.view(-1), values.abs().flatten()
    for first in flat.logical_not().nonzero().flatten().tolist():
        others = flat.bool() & (magnitudes == magnitudes[first])
        if others.any():
            flat[first], flat[int(others.nonzero()[0])] = 1, 0
            return


def one_too_many(stack):
    count = importlib.import_module("distprune.base.amount").checked_count
    replace(stack, "distprune.methods.ranking", "checked_count", lambda *args: count(*args) + 1)


def idle_mask(stack):
    """The mask is registered, and nothing is zeroed."""
    replace(stack, "distprune.wrappers.held", "Held.zero", lambda self: None)


def dense_master(stack):
    """The mask of ZeRO-3 does not act on what the ranks store."""
    replace(stack, "distprune.wrappers.held", "zero_pruned", lambda values, mask: None)


def much_traffic(stack):
    reduce = importlib.import_module("distprune.ranks.collectives").Communicator._reduce

    def wasteful(self, values, op):
        reduce(self, torch.zeros(100_000, dtype=torch.int64), op)
        return reduce(self, values, op)

    replace(stack, "distprune.ranks.collectives", "Communicator._reduce", wasteful)


def uncompared_amounts(stack):
    describe = classmethod(lambda cls, *arguments: [])
    replace(stack, "distprune.methods.base", "BasePruningMethod.describe_arguments", describe)


def changed_before_agreed(stack):
    """The error comes on every rank, and a parameter has changed by then."""
    prune = distprune.global_unstructured

    def impatient(parameters, *args, **kwargs):
        parameters = list(parameters)
        module, name = parameters[0]
        if not hasattr(module, name + "_mask"):
            with torch.no_grad():
                getattr(module, name).mul_(0.5)
        return prune(parameters, *args, **kwargs)

    stack.enter_context(mock.patch.object(distprune, "global_unstructured", impatient))


def renamed_field(stack):
    fields = importlib.import_module("distprune.wrappers.wrapper").FIELDS
    names = {"FSDP2Parameter": "fsdp_param.sharded_param fsdp_param._of_tomorrow"}
    stack.enter_context(mock.patch.dict(fields, names))


def lost_function(stack):
    names = importlib.import_module("distprune.wrappers.wrapper").NAMES
    stack.enter_context(mock.patch.dict(names, {"torch.distributed.tensor": "No"}))


def one_rank_raises(stack):
    def check(case):
        if dist.get_rank() == 1:
            raise MemoryError("planted")
        return []

    stack.enter_context(mock.patch.dict(selftest.CHECKS, {"masks": check}))


FAULTS = {
    each.__name__: each
    for each in (
        swap_ties, one_too_many, idle_mask, dense_master, much_traffic,
        uncompared_amounts, changed_before_agreed, renamed_field,
        lost_function, one_rank_raises,
    )
}  # fmt: skip
