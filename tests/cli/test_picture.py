"""``inspect --plot``: the picture adds every element up once, and any checkpoint has one."""

import math
import sys

import pytest
import torch

from distprune.cli import inspect
from helpers.tiny_checkpoints import save


def test_the_grid_adds_up_every_element_once():
    grid = inspect.make_grid([
        *((f"m.layers.1.mlp.experts.{e}.up.weight", 10, e) for e in range(4)),
        ("m.layers.10.mlp.up.weight", 20, 5), ("m.layers.2.mlp.up.weight", 20, 20),
        ("m.layers.2.attn.q.weight", 5, 0), ("lm_head.weight", 7, 1),
    ])  # fmt: skip
    assert grid.layers == ["1", "2", "10", "no layer"]
    assert grid.kinds == ["attn.q", "experts.up", "lm_head", "mlp.up"]
    shares = [[None if math.isnan(share) else share for share in row] for row in grid.shares]
    assert shares == [
        [None, 6 / 40, None, None],
        [0, None, None, 1],
        [None, None, None, 0.25],
        [None, None, 1 / 7, None],
    ]
    two = inspect.make_grid([("encoder.layers.0.a", 1, 0), ("decoder.layers.0.a", 1, 1)])
    assert two.layers == ["decoder.layers.0", "encoder.layers.0"]
    many = inspect.make_grid((f"layers.0.kind{i}.weight", i, 1) for i in range(1, 101))
    assert many.kinds == [f"kind{i}" for i in range(69, 101)]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "tensors",
    [
        [],
        [("layers.0.a.weight", 0, 0)],
        [("$\\frac$.weight", 4, 2), ("\x1b[31m", 4, 2), ("日本" * 99, 4, 2), ("\n", 4, 2)],
        [(f"layers.{i}.$k{i % 40}_{{.weight", 4, 2) for i in range(400)],
        [("a.999999999.b.weight", 2**62, 2**61), ("a.0.b.weight", 1, 1)],
        [("a.1" + "0" * 5000 + ".weight", 4, 2), ("a.٣.weight", 4, 2), ("weight", 4, 2)],
    ],
    ids=["nothing", "empty", "names", "layers", "numbers", "no numbers"],
)
@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_any_checkpoint_can_be_drawn(tmp_path, tensors, suffix):
    inspect.draw_picture(tmp_path / f"a.{suffix}", "$x_$\x07" * 60, tensors)
    assert (tmp_path / f"a.{suffix}").stat().st_size > 1000


def test_inspect_draws_matrices_of_floats(run, tmp_path, monkeypatch):
    shown = []
    monkeypatch.setattr(inspect, "draw_picture", lambda *picture: shown.append(picture))
    made = {
        "layers.0.a.weight": torch.eye(4), "layers.0.norm.weight": torch.ones(4),
        "scale": torch.tensor(1.0), "ids": torch.arange(4).reshape(2, 2),
        "bias": torch.zeros(1, 4),
    }  # fmt: skip
    cached = tmp_path / "models--org--Name" / "snapshots" / "0a"
    cached.parent.mkdir(parents=True)
    source = save(cached, made)
    assert run("inspect", source, "--plot", tmp_path / "a.png").code == 0
    assert shown == [(tmp_path / "a.png", "org/Name", [("layers.0.a.weight", 16, 12)])]


def test_what_cannot_be_drawn_is_said_before_the_weights_are_read(run, tmp_path, monkeypatch):
    source = save(tmp_path / "source", {"a": torch.ones(2)})
    monkeypatch.setattr("distprune.files.verifying.inspect", None)
    assert run("inspect", source, "--plot", tmp_path / "none" / "a.png").code == 1
    assert run("inspect", source, "--plot", tmp_path / "a.txt").code == 2
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = run("inspect", source, "--plot", tmp_path / "a.png")
    assert done.code == 2 and "pip install 'distprune[plot]'" in done.err
