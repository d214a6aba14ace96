"""Weights that stay in memory, and weights of which each rank reads a part: the same result."""

import os

import pytest
import torch

from distprune import streaming
from distprune.files.errors import MachineError
from distprune.files.recipe import FileRecipe
from distprune.ranks.collectives import Communicator
from distprune.streaming import StreamCost, cost
from distprune.streaming.layers import Holding, StreamedModel
from distprune.streaming.settings import Settings
from distprune.testing import run_ranks
from helpers.streaming import other_files, tokens
from helpers.tiny_transformers import save_tiny

RECIPE = FileRecipe(sparsity=0.5, score="fisher", normalize=None)
FAMILIES = ["llama", "qwen3_moe"]


@pytest.fixture(scope="module", params=FAMILIES)
def source(request, tmp_path_factory):
    return save_tiny(request.param, tmp_path_factory.mktemp(request.param) / "source")


def run(source, destination, resident, local_ranks=None, evaluates=False):
    """Prune; returns the bytes of weights that this rank has read, and what was told."""
    models, told, init = [], [], StreamedModel.__init__
    environment = dict(os.environ)

    def remembered(self, *args):
        models.append(self)
        init(self, *args)

    StreamedModel.__init__ = remembered
    if local_ranks is not None:
        os.environ["LOCAL_WORLD_SIZE"] = str(local_ranks)
    try:
        streaming.prune_folder(
            source,
            destination,
            RECIPE,
            tokens(6, seed=1),
            evaluation=tokens(3, seed=2) if evaluates else None,
            resident=resident,
            tell=told.append,
        )
    finally:
        StreamedModel.__init__ = init
        os.environ.clear()
        os.environ.update(environment)
    return sum(each.bytes_read for each in models), [
        text for text in told if text.startswith(("Resident", "Streamed"))
    ]


def sizes(source):
    """Bytes of all decoder layers, and of what is around them."""
    streamed = StreamedModel(source, None, torch.device("cpu"))
    of_layers = sum(streamed.num_bytes(n) for n in range(len(streamed.layers)))
    return of_layers, streamed.num_bytes(None)


def assert_same(one, other):
    assert set(other_files(one, other)) <= {"distprune/report.json"}


def test_one_process(source, tmp_path):
    layers, around = sizes(source)
    streamed = run(source, tmp_path / "streamed", False, evaluates=True)
    resident = run(source, tmp_path / "resident", True, evaluates=True)
    assert_same(tmp_path / "streamed", tmp_path / "resident")
    # Embedding and head: for both texts at first, for both losses, and twice for the text after.
    assert streamed[0] == 3 * layers + 6 * around and resident[0] == layers + around
    assert streamed[1] == ["Streamed: each pass reads a layer when it needs it."]
    assert resident[1] == ["Resident: weights are read once, and stay in memory."]


def test_two_processes(source, tmp_path):
    """Of one machine, and of two: where ranks share, all of them together read each layer once."""
    layers, around = sizes(source)
    ways = [("streamed", (None,)), ("resident", (True,)), ("of_two", (None, 1))]
    streamed, resident, of_two = (
        run_ranks(run, 2, source, tmp_path / name, *how) for name, how in ways
    )
    assert_same(tmp_path / "streamed", tmp_path / "resident")
    assert_same(tmp_path / "streamed", tmp_path / "of_two")
    whole = 3 * layers + 2 * around
    assert [num_bytes for num_bytes, _ in streamed] == [whole, whole]
    assert sum(num_bytes for num_bytes, _ in of_two) == whole
    assert sum(num_bytes for num_bytes, _ in resident) == layers + around
    assert all(0.4 < num_bytes / whole < 0.6 for num_bytes, _ in of_two)
    assert "on 2 machines each process reads a part" in of_two[0][1][0]


def evaluated(source, local_ranks):
    os.environ["LOCAL_WORLD_SIZE"] = str(local_ranks)
    try:
        return streaming.perplexity(source, tokens(3, seed=2)).perplexity
    finally:
        del os.environ["LOCAL_WORLD_SIZE"]


def test_perplexity_of_two_machines(source):
    assert len({*run_ranks(evaluated, 2, source, 2), *run_ranks(evaluated, 2, source, 1)}) == 1


def broken(source, destination, resident):
    """Rank 1 alone cannot read; without a destination, in an evaluation."""
    import torch.distributed as dist

    part = StreamedModel._part

    def fails(self, *wanted):
        if dist.get_rank() == 1:
            raise MachineError("no memory on rank 1")
        return part(self, *wanted)

    StreamedModel._part = fails
    try:
        if destination is None:
            streaming.perplexity(source, tokens(3, seed=2))
        else:
            run(source, destination, resident)
    except Exception as error:
        return str(error)
    finally:
        StreamedModel._part = part
    return None


@pytest.mark.parametrize(("evaluates", "resident"), [(False, True), (False, None), (True, None)])
def test_an_error_of_one_rank_is_raised_on_all(source, tmp_path, evaluates, resident):
    found = run_ranks(broken, 2, source, None if evaluates else tmp_path / "out", resident)
    assert all("no memory on rank 1" in text for text in found), found


GB = 10**9
COST = StreamCost({"forward": 2 * GB}, 0, 0, weights=16 * GB)


def chosen(monkeypatch, device, free, resident=None, local_ranks=None):
    if local_ranks is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local_ranks))
    monkeypatch.setattr(cost, "_available_memory", lambda device: free)
    settings = Settings(RECIPE, tokens(2, 1), device=torch.device(device), resident=resident)
    return cost.chosen_holding(COST, settings, Communicator(()))


@pytest.mark.parametrize(
    ("device", "free", "resident", "expected", "told"),
    [
        ("cuda", 18 * GB, None, Holding(keeps=True), "Resident: weights are read once"),
        (
            "cuda",
            17 * GB,
            None,
            Holding(),
            "of 18.0 GB of memory that each process",
        ),
        ("cuda", None, None, Holding(), "nothing tells how much is free"),
        ("cuda", 99 * GB, False, Holding(), "when it needs it."),
        ("cpu", 99 * GB, None, Holding(), "stay in free memory"),
        ("cpu", 18 * GB, True, Holding(keeps=True), "Resident"),
    ],
)
def test_what_is_chosen(monkeypatch, device, free, resident, expected, told):
    holding, text = chosen(monkeypatch, device, free, resident)
    assert holding == expected and told in text


def test_weights_that_cannot_stay_are_an_error(monkeypatch):
    with pytest.raises(MachineError, match=r"the weights cannot stay in memory.*--way streamed"):
        chosen(monkeypatch, "cpu", 10 * GB, resident=True)
