"""Every example runs, as its first lines say."""

import pytest
from shell import ROOT, run


def totals(output: str) -> list[list[str]]:
    return [line.split()[1:] for line in output.splitlines() if line.startswith("total ")]


# gloo may abort an interpreter that has done its work: what was printed decides.


@pytest.mark.slow
def test_prune_fsdp2():
    _, output = run("launch/torchrun.sh", ROOT / "examples" / "prune_fsdp2.py")
    first, *_, last = totals(output)
    assert first[:3] == ["262,144", "0", "147,577"], output  # cubic: 0.8 - 0.8 * (2 / 3)^3
    assert last[-1] == "80.00%"
    assert "done: loss" in output


@pytest.mark.slow
def test_prune_accelerate():
    _, output = run("launch/accelerate.sh", ROOT / "examples" / "prune_accelerate.py", CPU=1)
    assert "2 processes, ddp" in output, output
    assert [row[-1] for row in totals(output)] == ["70.00%", "80.00%"]
    assert "done: loss" in output
