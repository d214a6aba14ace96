"""Every example runs, as its first lines say."""

import ast
import json
import re
import runpy
import sys

import pytest
from shell import ROOT, run

from helpers.forked_scripts import environment, output_of, run_forked


def totals(output: str) -> list[list[str]]:
    return [line.split()[1:] for line in output.splitlines() if line.startswith("total ")]


def printed(example: str, capsys) -> str:
    runpy.run_path(str(ROOT / "examples" / example), run_name="__main__")
    return capsys.readouterr().out


# gloo may abort an interpreter that has done its work: what was printed decides.


@pytest.mark.slow
def test_prune_fsdp2():
    _, output = run_forked(ROOT / "examples" / "prune_fsdp2.py", num_ranks=2)
    first, *_, last = totals(output)
    assert first[:3] == ["262,144", "0", "147,577"], output  # cubic: 0.8 - 0.8 * (2 / 3)^3
    assert last[-1] == "80.00%"
    assert "done: loss" in output


@pytest.mark.thorough
@pytest.mark.slow
def test_prune_accelerate():
    _, output = run("launch/accelerate.sh", ROOT / "examples" / "prune_accelerate.py", CPU=1)
    assert "2 processes, ddp" in output, output
    assert [row[-1] for row in totals(output)] == ["70.00%", "80.00%"]
    assert "done: loss" in output


@pytest.mark.slow
def test_prune_one_device(capsys):
    output = printed("prune_one_device.py", capsys)
    # Half of one of two equal layers, then 80 % of the rest.
    assert totals(output) == [["262,144", "65,536", "157,286", "85.00%"]]
    assert "222,822 weights are zero" in output


@pytest.mark.slow
@pytest.mark.thorough
def test_prune_trainer(tmp_path):
    status, output = run("examples/prune_trainer.py", tmp_path)
    assert status == 0, output
    assert "57,344 of 81,920 weights are zero in the file" in output  # 70 %
    assert "weight_mask" not in (tmp_path / "pruned/model.safetensors").read_bytes()[:9999].decode(
        errors="replace"
    )


@pytest.mark.slow
@pytest.mark.thorough
def test_prune_ray():
    pytest.importorskip("ray.train", reason="Ray is not among what the tests install")
    status, output = run("examples/prune_ray.py")
    assert status == 0, output
    assert "'sparsity': 0.8} in Checkpoint(" in output


@pytest.mark.slow
@pytest.mark.thorough
def test_lottery_ticket():
    """Sharded; alone, it finds tickets of the same sizes."""
    _, output = run("launch/torchrun.sh", ROOT / "examples" / "lottery_ticket.py")
    found = re.findall(r"ticket: ([\d,]+) weights left, loss (\d)", output)
    assert [count for count, _ in found] == ["131,072", "65,536", "32,768"], output
    # An eighth of the weights still learns: a byte at random costs 5.5.
    assert all(int(loss) < 4 for _, loss in found), output


@pytest.mark.slow
@pytest.mark.thorough
def test_snip_at_initialisation():
    """Better than at random; one rank and two differ by what rounding does in the training."""
    losses = {}
    for num_ranks in (1, 2):
        _, output = run(
            "launch/torchrun.sh", ROOT / "examples" / "snip_at_initialisation.py", NPROC=num_ranks
        )
        found = re.findall(r"^(\w+): held-out loss ([\d.]+)", output, re.MULTILINE)
        losses[num_ranks] = {name: float(loss) for name, loss in found}
        assert [name for name, _ in found] == ["dense", "snip", "random"], output
        assert losses[num_ranks]["snip"] < losses[num_ranks]["random"] - 0.05, output
    assert losses[1]["snip"] == pytest.approx(losses[2]["snip"], abs=0.01)


def test_grasp_at_initialisation(capsys):
    """Gradients still flow: their norm is larger than that of a model pruned at random."""
    output = printed("grasp_at_initialisation.py", capsys)
    assert [row[-1] for row in totals(output)] == ["89.99%", "89.99%"]
    grasp, random = map(float, re.findall(r"norm of the gradient ([\d.]+)", output))
    assert grasp > 1.2 * random, output


def test_synflow(capsys):
    """No layer is empty, as one is by magnitude."""
    output = printed("synflow.py", capsys)
    found = re.findall(r"(\w+): \[(\d+), (\d+)\] weights left", output)
    (_, *synflow), (_, *magnitude) = found
    assert sum(map(int, synflow)) == sum(map(int, magnitude)) == 82
    assert min(map(int, synflow)) > 20 and magnitude == ["82", "0"], output


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("example", "ends", "least"),
    [
        ("prune_wanda_fsdp2.py", ["262,144 0 209,715 80.00%"], 0.05),
        ("movement_pruning.py", ["54.92%", "83.12%", "93.52%", "95.00%"], 0.1),
    ],
)
def test_better_than_by_magnitude(example, ends, least):
    """Which prunes nearly the same trained model."""
    losses = []
    for num_ranks, arguments in ((2, []), (1, ["magnitude"])):
        command = ROOT / "examples" / example, *arguments
        _, output = run("launch/torchrun.sh", *command, NPROC=num_ranks)
        rows = zip(map(" ".join, totals(output)), ends, strict=True)
        assert all(row.endswith(end) for row, end in rows), output
        found = re.search(r"held-out loss: ([\d.]+)(?: dense, ([\d.]+) pruned)?", output)
        losses.append([float(loss) for loss in found.groups() if loss])
    (*dense, ours), (*dense_alone, magnitude) = losses
    assert dense == pytest.approx(dense_alone, abs=0.02)  # what rounding does in the training
    assert all(loss < ours for loss in dense) and ours < magnitude - least


@pytest.mark.slow
@pytest.mark.thorough
def test_projections():
    """Exactly 10 % are left, on shards, too; masks that move learn more than those that do not."""
    example = ROOT / "examples" / "projections.py"
    _, output = run("launch/torchrun.sh", example, "static", "RigL", "ADMM")
    found = re.findall(
        r"^(\w+): ([\d,]+) weights left, held-out loss ([\d.]+)", output, re.MULTILINE
    )
    assert [name for name, _, _ in found] == ["static", "RigL", "ADMM"], output
    assert all(count == "26,214" for _, count, _ in found)
    losses = {name: float(loss) for name, _, loss in found}
    assert losses["RigL"] < losses["static"] - 0.02, output


@pytest.mark.slow
@pytest.mark.thorough
def test_lora_on_pruned(tmp_path):
    """LoRA makes up for most of what pruning costs; merging changes nothing."""
    _, output = run("launch/torchrun.sh", ROOT / "examples" / "lora_on_pruned.py", tmp_path)
    found = re.search(r"held-out loss: ([\d.]+) dense, ([\d.]+) pruned", output)
    dense, pruned = float(found[1]), float(found[2])
    found = re.search(r"([\d.]+) with LoRA on 14 layers, ([\d.]+) merged", output)
    trained, merged = float(found[1]), float(found[2])
    assert trained - dense < (pruned - dense) / 3, output
    assert merged == pytest.approx(trained, abs=0.0011)  # printed with three digits
    assert "65,536 weights are zero, as before" in output


# The notebook of examples/ has no outputs, and its cells run from the first to the last.


NOTEBOOK = ROOT / "examples" / "language_model_in_ten_minutes.ipynb"
CELLS = [
    cell for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    if cell["cell_type"] == "code"
]  # fmt: skip


def test_cells_parse_and_have_no_outputs():
    for cell in CELLS:
        ast.parse("".join(cell["source"]))
        assert cell["outputs"] == [] and cell["execution_count"] is None


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_cells_run(tmp_path):
    """Its assertions compare perplexities, and count the zeros."""
    program = tmp_path / "notebook.py"
    program.write_text("\n\n".join("".join(cell["source"]) for cell in CELLS), encoding="utf-8")
    variables = environment(WORK=str(tmp_path / "work"))
    output_of(sys.executable, program, env=variables, cwd=tmp_path)
