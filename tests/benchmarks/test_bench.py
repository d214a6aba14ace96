"""The benchmark runs, its oracle is right, and it fails when a bound does."""

import json
import os
import subprocess
import sys
from pathlib import Path

import bench
import data
import fit_cost
import pytest
import torch
import torch.nn.utils.prune as torch_prune
from measuring import Bound, CheckFailed, Table, Verdict, interleaved, measured

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def quick_run(parts):
    command = [sys.executable, bench.__file__, "--quick", "--parts", parts]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


@pytest.mark.slow
@pytest.mark.thorough
def test_cheap_parts_run_from_end_to_end():
    output = quick_run("importing,one_process")
    assert "... and every public name of it" in output
    assert output.count("distprune, ranking and masks") == 2


@pytest.mark.slow
@pytest.mark.thorough
def test_many_parameters_are_measured_from_end_to_end():
    output = quick_run("many")
    assert output.count("ms of processor time per parameter") == 4
    assert output.count("times faster than torch") == 2 * 2 * 3


@pytest.mark.slow
@pytest.mark.thorough
def test_reconstructing_runs_from_end_to_end():
    assert "SparseGPT (plain), one process" in quick_run("reconstructing")


def test_parts_that_do_not_exist_are_refused(capsys):
    with pytest.raises(SystemExit) as stopped:
        bench.parse(["--parts", "importing,exporting"])
    assert stopped.value.code == 2
    assert "unknown parts exporting" in capsys.readouterr().err
    assert all(Path(bench.__file__).with_name(f"{part}.py").exists() for part in bench.PARTS)


@pytest.mark.parametrize(
    ("bound", "value", "all_hold", "words"),
    [
        (Bound("seconds", 0.2), 0.2, True, "holds"),
        (Bound("seconds", 0.2), 0.3, False, "DOES NOT HOLD"),
        (Bound("times", 60, at_least=True), 60.0, True, "holds"),
        (Bound("times", 60, at_least=True), 59.0, False, "DOES NOT HOLD"),
        (Bound("times", 2, is_aim=True), 3.0, True, "aim: missed"),
    ],
)
def test_bounds_decide(bound, value, all_hold, words):
    table = Table("title", ["", "x"], [["row", 1.5]], [Verdict(bound, value)], ["note"])
    assert Table.from_json(table.json()) == table
    part = {"part": "some", "seconds": 1.0, "exit status": 0, "tables": [table.json()]}
    lines, found = bench.summary([part], is_judged=True)
    assert found == all_hold and words in lines[-1]
    lines, found = bench.summary([part], is_judged=False)
    assert found and "not judged" in lines[-1]
    lines, found = bench.summary([{**part, "exit status": 1}], is_judged=False)
    assert not found and "FAILED" in lines[-1]


def test_contestants_take_turns():
    order = []
    calls = {name: lambda name=name: order.append(name) for name in "abc"}
    assert interleaved(calls, 3) == {name: [None] * 3 for name in "abc"}
    assert "".join(order) == "abccbaabc"


def test_memory_is_measured():
    size = 50_000_000
    run = measured(lambda: bytearray(size).count(1))
    assert run.result == 0
    assert 0.9 * size < run.peak_extra_bytes < 1.5 * size
    assert run.retained_bytes < 0.1 * size
    run = measured(lambda: bytearray(b"x") * size)
    assert 0.9 * size < run.retained_bytes < 1.5 * size


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_pruned", [False, True])
@pytest.mark.parametrize("amount", [0.01, 0.5, 0.99, 7])
def test_the_oracle_is_a_stable_sort(dtype, is_pruned, amount):
    generator = torch.Generator().manual_seed(0)
    shapes = [(4, 5), (40,), (1, 1), (0, 3), (30, 20)]
    values = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    values[1][:] = values[0][0, 0]  # ties within and between parameters
    values[4][::2] = -values[0][0, 1]
    earlier = None
    if is_pruned:
        earlier = [(torch.rand(shape, generator=generator) < 0.6).to(dtype) for shape in shapes]
    flat = torch.cat([value.view(-1) for value in values]).abs().double()
    live = torch.cat([m.view(-1) for m in earlier]) != 0 if is_pruned else flat == flat
    k = amount if isinstance(amount, int) else round(amount * int(live.sum()))
    lowest = torch.where(live, flat, torch.inf).sort(stable=True).indices[:k]
    keep = live.clone()
    keep[lowest] = False

    expected = data.oracle(values, amount, earlier)
    masks = list(keep.split([value.numel() for value in values]))
    data.check_masks(values, masks, expected, earlier)
    assert expected.num_pruned == k
    assert expected.threshold == flat[lowest[-1]]
    assert expected.num_ties == int((flat[live] == expected.threshold).sum())
    assert expected.num_ties_pruned == int((flat[lowest] == expected.threshold).sum())
    masks[4][17] ^= True
    with pytest.raises(CheckFailed, match="parameter 4: 1 of 600 elements"):
        data.check_masks(values, masks, expected, earlier)


@pytest.mark.parametrize("dtype", DTYPES)
def test_undo_leaves_a_model_as_it_was_built(dtype):
    model = data.build(200_000, dtype)
    assert 190_000 < data.num_elements(model) <= 200_000
    before = [(w.data_ptr(), w.clone()) for w in data.weights(model)]
    names = list(model.state_dict())
    for _ in range(2):
        assert data.masks(model) is None
        torch_prune.global_unstructured(data.pairs(model), torch_prune.L1Unstructured, amount=0.5)
        assert len(data.masks(model)) == len(names)
        data.undo(model)
    assert list(model.state_dict()) == names
    for weight, (address, value) in zip(data.weights(model), before, strict=True):
        assert weight.data_ptr() == address and torch.equal(weight, value)


def test_the_saved_constants_follow_from_the_results_and_none_is_negative():
    """Otherwise, run `python tests/benchmarks/fit_cost.py --save cost_2cores_202611`."""
    found = fit_cost.tables()
    saved = json.loads((bench.RESULTS / "cost_2cores_202611.json").read_text())
    shown = [Table.from_json(table).text() for table in saved["parts"][0]["tables"]]
    assert [table.text() for table in found][::2] == shown[::2]  # without errors of rounding
    values = [row[1] for row in found[0].rows]
    assert min(values) > 0 and len(values) == 10
