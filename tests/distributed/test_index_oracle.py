"""The indices that the other tests cut their oracle with: every element once per replica."""

from collections import Counter

import pytest
import torch

from distprune.testing import run_ranks
from helpers import wrappings
from helpers.models import EVEN, UNEVEN, Net, ShapesNet, fqns, seeded

REPLICAS = {"plain-3": 3, "ddp-4": 4, "hsdp-2x1": 2, "hsdp-3x1": 3, "hsdp-2x2": 2}


def indices_and_values(wrapping: str, sizes: tuple) -> list[tuple[str, int, list, list]]:
    """Per parameter: full size, the indices of this rank, and the values that it really holds."""
    model = seeded(Net(sizes) if sizes == EVEN else ShapesNet(sizes))
    full = {name: p.detach().clone() for name, p in model.named_parameters()}
    indices = wrappings.local_indices(model, wrapping)
    names = fqns(model)
    model = wrappings.wrap(model, wrapping)
    rows = []
    for name in names:
        held = wrappings.shard(model, name, indices)
        assert torch.equal(held, wrappings.my_part(full[name], indices[name]))
        rows.append((name, full[name].numel(), indices[name].flatten().tolist(), held.shape))
    return rows


@pytest.mark.parametrize("wrapping", wrappings.sampled(wrappings.ALL + wrappings.FSDP2_DIM1))
def test_each_element_is_held_once_per_replica(wrapping):
    sizes = EVEN if wrapping in wrappings.FSDP2_DIM1 else UNEVEN
    per_rank = run_ranks(indices_and_values, wrappings.world_size(wrapping), wrapping, sizes)
    for rows in zip(*per_rank, strict=True):
        name, numel = rows[0][:2]
        holders = Counter(index for _, _, indices, _ in rows for index in indices)
        assert sorted(holders) == list(range(numel)), name
        assert len(set(holders.values())) == 1, f"{name}: {holders}"
        if wrapping in REPLICAS:
            assert holders[0] == REPLICAS[wrapping], name


def test_the_cases_include_uneven_and_empty_shards():
    per_rank = run_ranks(indices_and_values, 4, "fsdp2-4", UNEVEN)
    rows_of_l1 = [{r[0]: r[3] for r in rows}["l1.weight"][0] for rows in per_rank]
    rows_of_l3 = [{r[0]: r[3] for r in rows}["l3.weight"][0] for rows in per_rank]
    assert rows_of_l1 == [3, 3, 3, 1]
    assert rows_of_l3 == [1, 1, 1, 0]
