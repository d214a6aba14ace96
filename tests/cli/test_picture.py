"""``--plot``: the picture is right and readable for any checkpoint."""

import math
import re
import sys
from collections import Counter
from itertools import pairwise

import pytest
import torch
from commands import start

from distprune.cli import console, plotting
from distprune.cli.plotting import Picture, make_figure, make_grid, robust_limits
from distprune.files import inspecting, pruning
from distprune.files.checkpoints.checkpoint import open_checkpoint
from distprune.files.inspecting import inspect, sample_exponents
from helpers.tiny_checkpoints import save

KINDS = ("self_attn.q_proj", "self_attn.k_proj", "mlp.up_proj", "mlp.down_proj", "mlp.gate_proj",
         "self_attn.v_proj", "self_attn.o_proj")  # fmt: skip


def llama(num_layers):
    """700 tensors are 100 layers."""
    return [
        (f"model.layers.{i}.{kind}.weight", 100, (i + len(kind)) % 100)
        for i in range(num_layers)
        for kind in KINDS
    ]


def boxes(figure, labels):
    figure.canvas.draw()
    return [label.get_window_extent() for label in labels if label.get_text()]


def texts_of(figure):
    texts = [text.get_text() for axes in figure.axes for text in axes.texts]
    for axes in figure.axes:
        texts += [axes.get_title(), axes.get_xlabel(), axes.get_ylabel()]
        texts += [each.get_text() for each in (*axes.get_xticklabels(), *axes.get_yticklabels())]
        if axes.get_legend() is not None:
            texts += [each.get_text() for each in axes.get_legend().get_texts()]
    return [*texts, figure.get_suptitle(), figure.get_supxlabel()]


def test_the_grid_adds_up_every_element_once():
    tensors = [
        *((f"m.layers.1.mlp.experts.{e}.up.weight", 10, e) for e in range(4)),
        ("m.layers.10.mlp.up.weight", 20, 5), ("m.layers.2.mlp.up.weight", 20, 20),
        ("m.layers.2.attn.q.weight", 5, 0), ("lm_head.weight", 7, 1), ("embed.weight", 3, 3),
    ]  # fmt: skip
    grid = make_grid(tensors)
    assert grid.kinds == ("experts.up", "mlp.up", "q")
    assert [row.label for row in grid.layers] == ["1", "2", "10"]
    experts = grid.layers[0].cells["experts.up"]
    assert (experts.num_elements, experts.num_zero) == (40, 6)
    assert {row.label: row.total.share for row in grid.outside} == {"lm_head": 1 / 7, "embed": 1}
    assert (grid.total.num_elements, grid.total.num_zero) == (95, 35)
    assert {kind: c.num_zero for kind, c in grid.totals.items()} == {
        "experts.up": 6, "mlp.up": 25, "q": 0,
    }  # fmt: skip


def test_what_is_too_much_for_a_page_shares_a_row_or_a_column():
    tensors = [(f"layers.0.kind{i}.weight", i + 1, 1) for i in range(100)]
    tensors += [(f"alone{i}.weight", i + 1, 1) for i in range(100)]
    grid = make_grid(tensors, max_kinds=5, max_outside=3)
    assert grid.kinds == ("kind96", "kind97", "kind98", "kind99", "others")
    assert [row.label for row in grid.outside] == ["alone98", "alone99", "others"]
    assert grid.totals["others"].num_elements == sum(range(1, 97))
    assert (grid.total.num_elements, grid.total.num_zero) == (2 * 5050, 200)


def test_one_denormal_does_not_stretch_the_axis():
    bulk = dict.fromkeys(range(-12, -2), 10**5)
    assert robust_limits(bulk) == (-12, -3)
    far = {**bulk, -149: 1, 120: 2}
    assert robust_limits(far) == (-12, -3)
    assert robust_limits({-149: 1}) == (-149, -149) and robust_limits({}) is None
    assert robust_limits({5: 0}) is None
    low, high = robust_limits({-149: 50, 120: 50})
    assert high == 120 and high - low < 50
    texts = texts_of(make_figure(Picture("x", "zero", llama(2), far)))
    assert "magnitude (not shown: 1 smaller and 2 larger)" in texts


@pytest.mark.parametrize("num_layers", [1, 12, 48, 49, 100, 400])
def test_labels_of_many_layers_do_not_overlap(num_layers):
    tensors = [*llama(num_layers), ("model.embed_tokens.weight", 10, 0), ("lm_head.weight", 9, 9)]
    figure = make_figure(Picture("name", "zero", tensors, {0: 1}))
    grid = figure.axes[0]
    rows = boxes(figure, grid.get_yticklabels())
    assert len(rows) <= 60
    ordered = sorted(rows, key=lambda box: -box.y0)
    assert all(above.y0 > below.y0 + 0.75 * below.height for above, below in pairwise(ordered))
    columns = sorted(boxes(figure, grid.get_xticklabels()), key=lambda box: box.x1)
    assert len(columns) == 8 and all(b.x1 - a.x1 > 8 for a, b in pairwise(columns))
    assert figure.get_figheight() <= 22


def test_it_says_what_it_shows():
    tensors = [("layers.0.a.weight", 1000, 250), ("layers.0.b.weight", 1000, 750)]
    figure = make_figure(
        Picture("org/Name", "pruned", tensors, {-3: 10}, 0.12, [0.1875], ["Ranked by x."])
    )
    texts = texts_of(figure)
    assert {"org/Name", "threshold 0.1875", "25.0", "75.0", "50.0", "a", "b"} <= set(texts)
    assert "1,000 of 2,000 elements are pruned (50.00 %) in 2 tensors.  Ranked by x." in texts
    assert "of 10 elements, a sample of 12 %" in texts
    (line,) = figure.axes[1].lines
    assert line.get_xdata()[0] == pytest.approx(math.log2(0.1875))
    far = make_figure(Picture("x", "pruned", tensors, {-3: 1}, 1, [5e-324, 1e300])).axes[1]
    assert far.get_xlim()[1] - far.get_xlim()[0] < 50 and len(far.patches) < 50
    bands = make_figure(Picture("x", "pruned", tensors, {-3: 1}, 1, [0.0, 0.01, 0.04]))
    assert "thresholds of the tensors: 0.01 to 0.04" in texts_of(bands)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "tensors",
    [
        [],
        [("layers.0.a.weight", 0, 0)],
        [("$\\frac$.weight", 4, 2), ("\x1b[31m", 4, 2), ("日本" * 99, 4, 2), ("\n", 4, 2)],
        [(f"layers.{i}.$k{i}_{{.weight", 4, 2) for i in range(70)],
        [("a.999999999.b.weight", 2**62, 2**61), ("a.0.b.weight", 1, 1)],
        [("layers.0.a.weight", 4, 0)],
    ],
    ids=["nothing", "empty", "names", "kinds", "numbers", "dense"],
)
@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_any_checkpoint_can_be_drawn(tmp_path, tensors, suffix):
    thresholds = [0.0, math.inf, 5e-324]
    plotting.draw(
        tmp_path / f"a.{suffix}",
        Picture("$x_$\x07" * 60, "zero", tensors, {1023: 1}, 1, thresholds),
    )
    assert (tmp_path / f"a.{suffix}").stat().st_size > 1000


def test_a_sample_is_bounded_and_favours_no_tensor(tmp_path, monkeypatch):
    monkeypatch.setattr(inspecting, "_CHUNK", 64)
    g = torch.Generator().manual_seed(0)
    made = {f"layers.{i}.weight": torch.randn(16, 16, generator=g) * 2.0**i for i in range(32)}
    checkpoint = open_checkpoint(save(tmp_path / "source", {**made, "ids": torch.arange(4)}))
    whole = sum((facts.exponents for facts in inspect(checkpoint, ())), start=Counter())
    read = []
    assert sample_exponents(checkpoint, {*made, "ids"}, 10**9, read.append) == (whole, 1.0)
    assert sum(read) == 32 * 1024
    read.clear()
    exponents, share = sample_exponents(checkpoint, made, 4096, read.append)
    assert sum(read) == pytest.approx(4096, rel=0.1) and share == sum(read) / (32 * 1024)
    assert sum(exponents.values()) * 4 == sum(read)
    names = {e.name for e, _ in inspecting.Scanner().sample(checkpoint.tensors, 4096)}
    assert names >= set(made)


def test_prune_shows_progress_while_it_reads_for_the_picture(run, tmp_path, monkeypatch):
    source = save(tmp_path / "source", {"layers.0.a.weight": torch.randn(64, 64)})
    monkeypatch.setattr(console, "_EVERY", -1.0)
    picture = tmp_path / "a.svg"
    done = run("prune", source, tmp_path / "out", "-s", "0.5", "--plot", picture)
    assert done.code == 0 and re.search(r"draw.*16\.4 kB of 16\.4 kB", done.err)


def test_a_result_is_finished_although_its_picture_is_not(run, tmp_path, monkeypatch):
    source = save(tmp_path / "source", {"layers.0.a.weight": torch.randn(8, 8)})
    folder = tmp_path / "pictures"
    folder.mkdir()
    real = pruning.prune

    def and_remove_the_folder(*arguments, **keywords):
        found = real(*arguments, **keywords)
        folder.rmdir()
        return found

    monkeypatch.setattr(pruning, "prune", and_remove_the_folder)
    done = run("prune", source, tmp_path / "out", "-s", "0.5", "--plot", folder / "a.png")
    assert done.code == 4 and "Traceback" not in done.err
    assert "out is finished, but there is no picture of it" in done.err.replace("\n", " ")
    assert run("verify", tmp_path / "out", "--against", source).code == 0


def test_inspect_draws_matrices_and_says_what_it_leaves_out(run, tmp_path, monkeypatch):
    shown = []
    monkeypatch.setattr(plotting, "draw", lambda path, picture: shown.append(picture))
    made = {
        "layers.0.a.weight": torch.eye(4), "layers.0.norm.weight": torch.ones(4),
        "scale": torch.tensor(1.0), "ids": torch.arange(4).reshape(2, 2),
        "bias": torch.zeros(1, 4),
    }  # fmt: skip
    cached = tmp_path / "models--org--Name" / "snapshots" / "0a"
    cached.parent.mkdir(parents=True)
    source = save(cached, made)
    assert run("inspect", source, "--plot", tmp_path / "a.png").code == 0
    (picture,) = shown
    assert picture.tensors == [("layers.0.a.weight", 16, 12)] and picture.title == "org/Name"
    assert picture.exponents == {0: 4} and picture.notes == ["Not shown: 4 other tensors."]


@pytest.mark.thorough
@pytest.mark.slow
def test_no_display_is_needed(tmp_path):
    source = save(tmp_path / "source", {"layers.0.a.weight": torch.eye(4)})
    process = start(
        "-m", "distprune", "inspect", source, "--plot", tmp_path / "a.PDF", MPLBACKEND="TkAgg",
        DISPLAY="",
    )  # fmt: skip
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert (tmp_path / "a.PDF").read_bytes().startswith(b"%PDF")


def test_without_matplotlib_it_says_what_to_install(run, tmp_path, monkeypatch):
    source = save(tmp_path / "source", {"a": torch.ones(2)})
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = run("inspect", source, "--plot", tmp_path / "a.png")
    assert done.code == 2 and "pip install 'distprune[plot]'" in done.err
