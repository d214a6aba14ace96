"""``distprune selftest``, and ``prune --text`` layer by layer, on the device."""

import json
import os
import subprocess
import sys

import pytest
import torch

from distprune import streaming
from helpers.forked_scripts import held_port
from helpers.recipes import raw_recipe
from helpers.streaming import tokens, weights_of
from helpers.tiny_transformers import save_tiny

pytestmark = pytest.mark.gpu
RECIPE = raw_recipe(sparsity=0.5, score="fisher", normalize=None)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_selftest(device, size):
    """One rank with the device's backend; ranks that share it, over gloo."""
    command = [sys.executable, "-m", "distprune", "selftest", "--json", "--timeout", "40"]
    command += ["--cpu"] if device.type == "cpu" else []
    environment = dict(os.environ)
    ranks = []
    with held_port() as port:
        if size > 1:
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            environment |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
            environment |= {"OMP_NUM_THREADS": "1"}
        for rank in range(size):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if size > 1 else {}
            stdout = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
            ranks.append(subprocess.Popen(command, env=environment | own, stdout=stdout, text=True))
        found = json.loads(ranks[0].communicate()[0])
        assert [rank.wait() for rank in ranks] == [0] * size
    assert found["holds"] and not found["wrong"]
    backends = {"cpu": "gloo", "cuda": "nccl", "xpu": "xccl"}
    assert found["facts"]["backend"] == (backends[device.type] if size == 1 else "gloo")
    assert found["facts"]["device"].startswith(device.type)


def test_text(device, tmp_path):
    """Two runs on the device write the same; what they prune is what a CPU prunes, but for ties."""
    source = save_tiny("llama", tmp_path / "source")
    found = {}
    for name, where in (("one", device), ("again", device), ("cpu", torch.device("cpu"))):
        out = tmp_path / name
        streaming.prune_folder(source, out, RECIPE, tokens(6, seed=1), device=where, damping=0.1)
        found[name] = weights_of(out)
    for name, weight in found["one"].items():
        assert torch.equal(weight, found["again"][name])
        others = (weight == 0) != (found["cpu"][name] == 0)
        assert others.count_nonzero() <= 0.01 * weight.numel()
