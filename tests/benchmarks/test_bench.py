"""The benchmark runs, its oracle is right, and it fails when a bound does."""

import sys
from pathlib import Path

import bench
import data
import pytest
import torch
import torch.nn.utils.prune as torch_prune
from measuring import CheckFailed, Table, Verdict, interleaved, measured

import distprune
from helpers.forked_scripts import environment, output_of

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("part", bench.PARTS)
def test_every_part_runs_from_end_to_end(part):
    command = [sys.executable, bench.__file__, "--quick", "--parts", part]
    printed = output_of(*command, env=environment())
    assert f"=== {part}" in printed and "-----" in printed


def test_parts_that_do_not_exist_are_refused(capsys):
    with pytest.raises(SystemExit) as stopped:
        bench.parse(["--parts", "many,exporting"])
    assert stopped.value.code == 2
    assert "unknown parts exporting" in capsys.readouterr().err
    assert all(Path(bench.__file__).with_name(f"{part}.py").exists() for part in bench.PARTS)


@pytest.mark.parametrize(
    ("verdict", "all_hold", "words"),
    [
        (Verdict("seconds", 0.2, 0.2), True, "holds"),
        (Verdict("seconds", 0.3, 0.2), False, "DOES NOT HOLD"),
        (Verdict("times", 60.0, 60, at_least=True), True, "holds"),
        (Verdict("times", 59.0, 60, at_least=True), False, "DOES NOT HOLD"),
        (Verdict("times", 3.0, 2, is_aim=True), True, "aim: missed"),
    ],
)
def test_bounds_decide(verdict, all_hold, words):
    table = Table("title", ["", "x"], [["row", 1.5]], [verdict], ["note"])
    part = {"part": "some", "seconds": 1.0, "error": "", "tables": [table]}
    lines, found = bench.summary([part], is_judged=True)
    assert found == all_hold and words in lines[-1]
    lines, found = bench.summary([part], is_judged=False)
    assert found and "not judged" in lines[-1]
    lines, found = bench.summary([{**part, "error": "an error"}], is_judged=False)
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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("amount", [0.01, 0.5, 0.99, 7])
def test_the_oracle_is_a_stable_sort(dtype, amount):
    generator = torch.Generator().manual_seed(0)
    shapes = [(4, 5), (40,), (1, 1), (0, 3), (30, 20)]
    values = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    values[1][:] = values[0][0, 0]  # ties within and between parameters
    values[4][::2] = -values[0][0, 1]
    flat = torch.cat([value.view(-1) for value in values]).abs().double()
    k = amount if isinstance(amount, int) else round(amount * len(flat))
    lowest = flat.sort(stable=True).indices[:k]
    keep = torch.ones(len(flat), dtype=torch.bool).index_fill(0, lowest, False)

    expected = data.oracle(values, amount)
    masks = list(keep.split([value.numel() for value in values]))
    data.check_masks(values, masks, expected)
    threshold = flat[lowest[-1]]
    num_ties = int((flat == threshold).sum()), int((flat[lowest] == threshold).sum())
    assert expected == data.Expected(k, float(threshold), *num_ties)
    masks[4][17] ^= True
    with pytest.raises(CheckFailed, match="parameter 4: 1 of 600 elements"):
        data.check_masks(values, masks, expected)


@pytest.mark.parametrize("module", [distprune, torch_prune])
def test_undo_leaves_a_model_as_it_was_built(module):
    model = data.build(200_000)
    before = [weight.clone() for weight in data.weights(model)]
    names = list(model.state_dict())
    for _ in range(2):
        module.global_unstructured(data.pairs(model), module.L1Unstructured, amount=0.5)
        assert len(data.masks(model)) == len(names)
        assert data.undo(model) == 2 * 4 * sum(weight.numel() for weight in before)
    assert list(model.state_dict()) == names and data.masks(model) is None
    assert all(map(torch.equal, data.weights(model), before))
