"""Statistics in files: any sharding reads them, and mistakes are named."""

import json

import numpy as np
import pytest
import torch
from torch import nn

import distprune as prune
from distprune.files.errors import CheckpointError
from distprune.files.statistics_file import (
    StoredStatistics,
    WeightLayout,
    read_statistics,
    write_statistics,
)
from distprune.statistics import ActivationStatistics


class Small(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.conv = nn.Conv1d(4, 6, 3, groups=2)
        self.fc = nn.Linear(6, width)

    def forward(self, x):
        return self.fc(self.conv(x).mT)


@pytest.fixture
def collected() -> ActivationStatistics:
    torch.manual_seed(0)
    model = Small()
    statistics = ActivationStatistics(prune.select(model, everything=True))
    with statistics.collecting():
        model.conv(torch.randn(2, 4, 7))
        model.fc(torch.randn(5, 6))
    return statistics


def assert_same(a: ActivationStatistics, b: ActivationStatistics) -> None:
    assert a.mode == b.mode
    for mine, its in zip(a.totals().values(), b.totals().values(), strict=True):
        assert mine.num_tokens == its.num_tokens
        assert torch.equal(mine.sums, its.sums) and torch.equal(mine.squares, its.squares)


def test_a_file_gives_back_what_was_saved(collected, tmp_path):
    collected.save(tmp_path / "statistics.safetensors")
    loaded = ActivationStatistics.load(
        tmp_path / "statistics.safetensors", prune.select(Small(), everything=True)
    )
    assert_same(collected, loaded)
    assert [path.name for path in tmp_path.iterdir()] == ["statistics.safetensors"]
    some = prune.select(Small(), include="fc")
    only_fc = ActivationStatistics.load(tmp_path / "statistics.safetensors", some)
    assert list(only_fc.num_tokens()) == ["fc.weight"]


def test_the_safetensors_library_reads_it(collected, tmp_path):
    safetensors = pytest.importorskip("safetensors")
    collected.save(tmp_path / "a.safetensors")
    with safetensors.safe_open(tmp_path / "a.safetensors", "np") as file:
        metadata = file.metadata()
        totals = collected.totals()[collected.parameters[0]]
        assert np.array_equal(file.get_tensor("conv.weight.input_sum"), totals.sums.numpy())
        squares = file.get_tensor("conv.weight.input_square_sum")
        assert np.array_equal(squares, totals.squares.numpy())
    assert metadata["format"] == "distprune-statistics-2"
    assert metadata["mode"] == "one_pass"
    assert json.loads(metadata["parameters"])["conv.weight"] == {
        "layout": "convolution", "shape": [6, 2, 3], "groups": 2, "count": 10,
    }  # fmt: skip


def test_a_parameter_of_another_shape_is_named(collected, tmp_path):
    collected.save(tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match=r"fc\.weight: .*a\.safetensors.*\(4, 6\).*\(5, 6\)"):
        ActivationStatistics.load(
            tmp_path / "a.safetensors", prune.select(Small(5), everything=True)
        )
    with pytest.raises(ValueError, match=r"no statistics of 0\.weight.*conv\.weight, fc\.weight"):
        ActivationStatistics.load(
            tmp_path / "a.safetensors", prune.select(nn.Sequential(nn.Linear(6, 4)))
        )


def test_parameters_without_names_cannot_be_stored(tmp_path):
    layer = nn.Linear(3, 2)
    statistics = ActivationStatistics([(layer, "weight")])
    with statistics.collecting():
        layer(torch.ones(1, 3))
    with pytest.raises(ValueError, match="no full names"):
        statistics.save(tmp_path / "a.safetensors")
    assert not list(tmp_path.iterdir())


def stored(**changes) -> StoredStatistics:
    weight = {"kind": "linear", "shape": (2, 3)}
    fields = {"count": 4, "first": np.zeros(3), "second": np.ones(3)} | changes
    weight |= {key: fields.pop(key) for key in ("kind", "shape") if key in fields}
    return StoredStatistics(WeightLayout(**weight), **fields)


GRADIENTS = {"of_gradients": True, "count": 4.0, "first": np.zeros(2)}
EXPERTS = {
    "kind": "transposed_experts", "shape": (2, 3, 5), "count": (4, 4),
    "first": np.zeros((2, 3)), "second": np.ones((2, 3)),
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"second": np.array([1, np.nan, 1])}, "not finite"),
        ({"second": np.array([1, -1.0, 1])}, "negative"),
        ({"kind": "other"}, "malformed"),
        ({"count": -1}, "malformed"),
        ({"shape": (2, -3)}, "shape|malformed"),
        ({"count": (4, 4)}, "malformed"),
        ({**EXPERTS, "count": 4}, "malformed"),
        ({**EXPERTS, "count": (4, -1)}, "malformed"),
        ({**EXPERTS, "count": (4,)}, "malformed"),
        ({**EXPERTS, "shape": (2, 3, 5, 1)}, "malformed"),
        ({**GRADIENTS, "count": 0.0}, "has the count 0"),
        ({**GRADIENTS, "count": float("nan")}, "has the count nan"),
        ({**GRADIENTS, "first": np.zeros(3)}, "has sums of the shapes"),
        ({**GRADIENTS, "first": -np.ones(2)}, "not finite or negative"),
    ],
)
def test_a_malformed_file_is_refused(changes, text, tmp_path):
    made = stored(**changes)
    mode = "gradients" if made.of_gradients else "one_pass"
    write_statistics(tmp_path / "a", mode, {"fc.weight": made})
    with pytest.raises(CheckpointError, match=text):
        read_statistics(tmp_path / "a", made.of_gradients)


def test_other_files_are_refused(tmp_path):
    write_statistics(tmp_path / "mode", "other", {"fc.weight": stored()})
    (tmp_path / "text").write_text("x" * 100)
    for name, text in (("mode", "no statistics"), ("text", "header"), ("none", "none")):
        with pytest.raises(CheckpointError, match=text):
            read_statistics(tmp_path / name)


@pytest.mark.parametrize("num_spaces", range(1, 8))
def test_a_header_of_any_length(num_spaces, tmp_path):
    """Numbers that lie across the words of memory are numbers of torch all the same."""
    path = tmp_path / "a"
    write_statistics(path, "one_pass", {"fc.weight": stored()})
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header = raw[8:start] + b" " * num_spaces
    path.write_bytes(len(header).to_bytes(8, "little") + header + raw[start:])
    found = read_statistics(path)[1]["fc.weight"]
    assert found.first.tolist() == stored().first.tolist() and found.second.flags.aligned
    assert torch.from_numpy(found.second).tolist() == stored().second.tolist()
