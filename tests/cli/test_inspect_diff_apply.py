"""``inspect``, ``diff`` and ``apply`` against torch, with everything in memory; every dtype."""

import json
import math
import sys
from collections import Counter

import pytest
import torch

from distprune.base.selecting import DTYPE_BITS, PLAIN_FLOATS
from distprune.cli import inspect as pictures
from distprune.files import disk as access
from distprune.files.checkpoint import open_checkpoint
from distprune.files.verifying import inspect
from helpers.tiny_checkpoints import encode, load, save, save_in_files, tree_digest

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}


def tensors(seed=0):
    g = torch.Generator().manual_seed(seed)
    made = {}
    for name, dtype in DTYPES.items():
        matrix = torch.randn(9, 24, generator=g).to(dtype)
        matrix[torch.rand(9, 24, generator=g) < 0.6] = 0
        tiny = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
        matrix[0, :6] = torch.tensor([-0.0, float("nan"), float("inf"), -float("inf"), 3, tiny])
        made[f"layers.0.{name}.weight"] = matrix
    conv = torch.randn(5, 8, 3, generator=g)
    conv[torch.rand(5, 8, 3, generator=g) < 0.5] = 0
    made["conv.weight"] = conv
    made["odd.weight"] = torch.randn(3, 7, generator=g)
    made["norm"] = torch.ones(8)
    made["ids"] = torch.arange(4)
    return made


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(access, "SLAB_BYTES", 64)


def share(tensor, n, m):
    """How many of how many groups along the input dimension have at most n of m."""
    groups = tensor.movedim(1, -1).reshape(-1, m)
    return int(((groups != 0).sum(1) <= n).sum()), len(groups)


def test_inspect_counts_what_torch_counts(run, tmp_path):
    made = tensors()
    source = save(tmp_path / "source", made)
    found = run("inspect", source, "--json", "--pattern", "2:4", "--pattern", "1:8").json
    found = {each["name"]: each for each in found["tensors"]}
    assert set(found) == set(made)
    assert found.pop("ids")["num_zero"] is None
    for name, facts in found.items():
        tensor = made[name]
        assert facts["num_elements"] == tensor.numel() and facts["shape"] == list(tensor.shape)
        assert facts["num_zero"] == int((tensor == 0).sum())
        assert facts["num_nan"] == int(tensor.isnan().sum())
        assert facts["num_inf"] == int(tensor.isinf().sum())
        if tensor.ndim < 2 or tensor.shape[1] % 4:
            assert facts["patterns"].keys() <= {"2:4", "1:8"}
            continue
        for n, m in ((2, 4), (1, 8)):
            kept, groups = share(tensor, n, m)
            assert facts["patterns"][f"{n}:{m}"] == {"num_groups": groups, "num_kept": kept}
    assert found["odd.weight"]["patterns"] == {}


def test_inspect_as_a_table(run, tmp_path):
    source = save(tmp_path / "source", {f"layers.{i}.weight": torch.eye(4) for i in range(3)})
    done = run("inspect", source, "--pattern", "1:4", "--pattern", "2:3")
    rows = [line.split() for line in done.out.splitlines()]
    numbers = ["3", "48", "36", "75.00", "%", "100.00", "%", "-", "0", "0"]
    assert rows[1] == ["layers.*.weight", "F32", "4", "x", "4", *numbers]
    assert rows[2] == ["all", *numbers]
    assert "layers.2.weight" in run("inspect", source, "-v").out
    assert run("inspect", source, "--pattern", "4:2").code == 2
    assert run("inspect", tmp_path).code == 1


def test_diff_tells_values_from_zeros(run, tmp_path):
    made = tensors()
    first = save(tmp_path / "first", made)
    other = {name: tensor.clone() for name, tensor in reversed(made.items())}
    conv = other["conv.weight"]
    conv.view(-1)[::3] = 0
    conv.view(-1)[1::3] = 2
    other["ids"][1] = 9
    other["odd.weight"] = other["odd.weight"].half()
    del other["norm"]
    other["new"] = torch.ones(1)
    second = save_in_files(tmp_path / "second", other, 4)
    found = run("diff", first, second, "--json").json
    assert found["are_equal"] is False
    found = {each["name"]: each for each in found["tensors"]}
    was, now = made["conv.weight"], conv
    assert found["conv.weight"] == {
        "name": "conv.weight",
        "numel": 120,
        "num_differing": int((was.view(torch.int32) != now.view(torch.int32)).sum()),
        "num_zero_in_both": int(((was == 0) & (now == 0)).sum()),
        "num_zero_in_first": int(((was == 0) & (now != 0)).sum()),
        "num_zero_in_second": int(((was != 0) & (now == 0)).sum()),
        "problem": "",
        "is_equal": False,
    }
    assert found["ids"]["num_differing"] == 1
    assert found["odd.weight"]["problem"] == "F32 [3, 7]; F16 [3, 7]"
    assert found["norm"]["problem"] == "only in the first"
    assert found["new"]["problem"] == "only in the second"
    assert all(found[f"layers.0.{name}.weight"]["is_equal"] for name in PLAIN_FLOATS)  # NaN, too

    done = run("diff", first, second)
    assert "4 of 9 tensors are equal bit for bit." in done.out and "layers.0" not in done.out
    done = run("diff", first, first)
    assert done.out == "8 of 8 tensors are equal bit for bit.\n"
    assert run("diff", first, first, "--json", "--exit-code").json["are_equal"] is True
    assert run("diff", first, second, "--exit-code").code == 3


def test_apply_puts_masks_on_another_checkpoint(run, tmp_path):
    made = {name: torch.nan_to_num(tensor) for name, tensor in tensors().items()}
    base = save(tmp_path / "base", made)
    masks = tmp_path / "pruned"
    assert run("prune", base, masks, "-s", "0.8", "--scope", "layer", "--exclude", "odd*").code == 0
    tuned = tensors(seed=1)
    tuned["layers.0.F32.weight"] = tuned["layers.0.F32.weight"].bfloat16()  # another dtype will do
    source = save_in_files(tmp_path / "tuned", tuned, 3)
    before = tree_digest(source)
    done = run("apply", masks, source, tmp_path / "out", "--json")
    assert done.code == 0, done.err

    pruned, result, counts = load(masks), load(tmp_path / "out"), Counter()
    for name, tensor in tuned.items():
        expected = tensor.clone()
        if name.startswith("layers") or name == "conv.weight":
            drop = pruned[name] == 0
            counts.update(num_elements=drop.numel(), num_pruned=int(drop.sum()))
            assert int(drop.sum()) == round(0.8 * drop.numel())
            expected[drop] = 0
        bits = {8: torch.int64, 4: torch.int32, 2: torch.int16}[tensor.itemsize]
        assert torch.equal(result[name].view(bits), expected.view(bits)), name
    assert {key: done.json[key] for key in counts} == counts
    one, two = (f / "distprune" / "masks.safetensors" for f in (masks, tmp_path / "out"))
    assert one.read_bytes()[-200:] == two.read_bytes()[-200:]
    assert tree_digest(source) == before
    assert "the masks prune" in run("apply", tmp_path / "out", source, tmp_path / "again").out
    given = ["distprune/report.json"]
    assert tree_digest(tmp_path / "again", given) == tree_digest(tmp_path / "out", given)

    assert run("apply", masks, base, tmp_path / "out").code == 1
    assert run("apply", source, base, tmp_path / "new").code == 1
    tuned["layers.0.F16.weight"] = tuned["layers.0.F16.weight"].T
    other = save(tmp_path / "other", tuned)
    done = run("apply", masks, other, tmp_path / "new")
    assert done.code == 1
    assert "mask [9, 24] of layers.0.F16.weight" in done.err and "F16 [24, 9]" in done.err
    assert not list(tmp_path.glob("new*"))


def folder_of(path, **tensors):
    """A checkpoint of (dtype, shape, bytes)."""
    header, data = {}, b""
    for name, (dtype, shape, raw) in tensors.items():
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        data += raw
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model_type": "tiny"}))
    (path / "model.safetensors").write_bytes(encode(header, data))
    return path


def look(folder):
    return {facts.entry.name: facts for facts in inspect(open_checkpoint(folder), [(2, 4)])}


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F6_E2M3", "F4", "C64", "X7"])
def test_zeros_that_are_not_counted_are_not_told(run, tmp_path, dtype):
    data = bytes(4 * DTYPE_BITS.get(dtype, 6) // 8)
    source = folder_of(tmp_path / "source", a=(dtype, [4], data), b=("F32", [2], bytes(8)))
    assert look(source)["a"].num_zero is None
    rows = {line.split()[0]: line.split() for line in run("inspect", source).out.splitlines()}
    assert rows["a"][4:7] == ["4", "-", "-"]
    assert rows["all"][1:] == ["floats", "1", "2", "2", "100.00", "%", "-", "0", "0"]
    tensors = {each["name"]: each for each in run("inspect", source, "--json").json["tensors"]}
    assert tensors["a"]["num_zero"] is None and tensors["b"]["num_zero"] == 2


# ``inspect --plot``: the picture adds every element up once, and any checkpoint has one.


def test_the_grid_adds_up_every_element_once():
    layers, kinds, shares = pictures.make_grid([
        *((f"m.layers.1.mlp.experts.{e}.up.weight", 10, e) for e in range(4)),
        ("m.layers.10.mlp.up.weight", 20, 5), ("m.layers.2.mlp.up.weight", 20, 20),
        ("m.layers.2.attn.q.weight", 5, 0), ("lm_head.weight", 7, 1),
    ])  # fmt: skip
    assert layers == ["1", "2", "10", "no layer"]
    assert kinds == ["attn.q", "experts.up", "lm_head", "mlp.up"]
    shares = [[None if math.isnan(share) else share for share in row] for row in shares]
    assert shares == [
        [None, 6 / 40, None, None],
        [0, None, None, 1],
        [None, None, None, 0.25],
        [None, None, 1 / 7, None],
    ]
    two, _, _ = pictures.make_grid([("encoder.layers.0.a", 1, 0), ("decoder.layers.0.a", 1, 1)])
    assert two == ["decoder.layers.0", "encoder.layers.0"]
    _, many, _ = pictures.make_grid((f"layers.0.kind{i}.weight", i, 1) for i in range(1, 101))
    assert many == [f"kind{i}" for i in range(69, 101)]


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
    pictures.draw_picture(tmp_path / f"a.{suffix}", "$x_$\x07" * 60, tensors)
    assert (tmp_path / f"a.{suffix}").stat().st_size > 1000


def test_inspect_draws_matrices_of_floats(run, tmp_path, monkeypatch):
    shown = []
    monkeypatch.setattr(pictures, "draw_picture", lambda *picture: shown.append(picture))
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
