"""``diff --exit-code`` answers by its exit code, and everything that differs is a difference."""

import pytest
import torch

from helpers.tiny_checkpoints import file_bytes, save

MADE = {"a.weight": torch.eye(4), "b.weight": torch.ones(2, 3), "scale": torch.tensor(1.0)}


def changed(name, value):
    return {**MADE, name: value}


DIFFERENT = {
    "one bit": changed("a.weight", MADE["a.weight"] + 2**-23 * torch.eye(4)),
    "the sign of a zero": changed("a.weight", torch.where(torch.eye(4) == 0, -0.0, 1.0)),
    "a shape": changed("b.weight", torch.ones(3, 2)),
    "a dtype": changed("b.weight", torch.ones(2, 3, dtype=torch.float16)),
    "a tensor more": {**MADE, "new": torch.ones(1)},
    "a tensor less": {"a.weight": MADE["a.weight"], "b.weight": MADE["b.weight"]},
}


def test_equal_checkpoints_end_with_0(run, tmp_path):
    first = save(tmp_path / "first", MADE)
    parts = [{"scale": MADE["scale"]}, {"b.weight": MADE["b.weight"], "a.weight": torch.eye(4)}]
    second = save(tmp_path / "second", *parts)
    assert run("diff", first, second, "--exit-code").code == 0
    assert run("diff", first, second, "--exit-code", "--json").json["are_equal"] is True


@pytest.mark.parametrize("what", DIFFERENT)
def test_each_difference_ends_with_its_own_code(run, tmp_path, what):
    first = save(tmp_path / "first", MADE)
    second = save(tmp_path / "second", DIFFERENT[what])
    assert run("diff", first, second).code == 0
    done = run("diff", first, second, "--exit-code")
    assert (done.code, done.err) == (3, "")
    found = run("diff", second, first, "--exit-code", "--json")
    assert found.code == 3 and found.json["are_equal"] is False


def test_metadata_are_compared(run, tmp_path):
    first, second = (save(tmp_path / name, MADE) for name in ("first", "second"))
    path = second / "model.safetensors"
    path.write_bytes(file_bytes(MADE, metadata={"format": "np\x1b[1m", "made_by": "x"}))
    done = run("diff", first, second, "--exit-code")
    assert done.code == 3 and "\x1b" not in done.out
    assert "format: 'pt' in A, 'np\\x1b[1m' in B" in done.out
    assert "made_by: none in A, 'x' in B" in done.out
    assert "3 of 3 tensors are equal bit for bit." in done.out
    assert run("diff", first, second, "--json").json["metadata"] == {
        "format": {"first": ["pt"], "second": ["np\x1b[1m"]},
        "made_by": {"first": [], "second": ["x"]},
    }
