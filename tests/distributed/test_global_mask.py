"""global_mask selects on every wrapping what one process selects; errors are on all ranks."""

import pytest
import torch
import torch.distributed as dist

import distprune as prune
from distprune.testing import run_ranks
from helpers import wrappings
from helpers.collective_traffic import Traffic
from helpers.comparisons import assert_nothing_wrong
from helpers.models import Net, fill, fqns, target


def random_selection(wrapping: str) -> list:
    dense = fill(Net(wrappings.runnable_sizes(wrapping)), "equal", "float32")
    names = fqns(dense)
    indices = wrappings.local_indices(dense, wrapping)
    model = wrappings.wrap(dense, wrapping)
    torch.manual_seed(7 + dist.get_rank())  # the leader's seed counts
    pairs = [target(wrappings.unwrapped(model), name) for name in names]
    found = prune.global_mask(pairs, 60, scores="random")
    held = [wrappings.local(mask) for mask in found.masks]
    return [(m.flatten(), indices[n].flatten()) for m, n in zip(held, names, strict=True)]


@pytest.mark.parametrize("wrapping", ["ddp-3", "fsdp1_root-3", "fsdp2-3", "hsdp-2x2", "tp-2"])
def test_random_scores_do_not_depend_on_the_sharding(wrapping):
    sizes = wrappings.runnable_sizes(wrapping)
    model = Net(sizes)
    torch.manual_seed(7)
    pairs = [target(model, name) for name in fqns(model)]
    whole = prune.global_mask(pairs, 60, scores="random").masks
    for of_rank in run_ranks(random_selection, wrappings.world_size(wrapping), wrapping):
        for (held, indices), mask in zip(of_rank, whole, strict=True):
            assert torch.equal(held, mask.flatten()[indices])


def in_a_hook_of_the_optimizer(wrapping: str) -> list[str]:
    """What ADMM does: a projection in each step."""
    model = wrappings.wrap(
        fill(Net(wrappings.runnable_sizes(wrapping)), "normal", "float32"), wrapping
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    pairs = prune.select(model)
    found, wrong = [], []

    def project(*_):
        found.append(prune.global_mask(pairs, 50))

    optimizer.register_step_post_hook(project)
    for _ in range(3):
        model(torch.ones(4, 6)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if [m.tolist() for m in map(wrappings.local, found[-1].masks)] != [
            m.tolist() for m in map(wrappings.local, prune.global_mask(pairs, 50).masks)
        ]:
            wrong.append("the masks in the hook are others")
    return wrong if len(found) == 3 else ["the hook did not run"]


@pytest.mark.parametrize("wrapping", ["ddp-2", "fsdp1-2", "fsdp1_flat-2", "fsdp2-2", "tp-2"])
def test_in_a_hook_of_the_optimizer(wrapping):
    assert_nothing_wrong(run_ranks(in_a_hook_of_the_optimizer, 2, wrapping))


def traffic() -> tuple[int, int]:
    model = wrappings.wrap(fill(Net((200, 400, 300, 8)), "normal", "float32"), "fsdp2-2")
    with Traffic() as seen:
        found = prune.global_mask(prune.select(model), 50_000)
    assert found.num_collectives == len(seen.calls) and found.bytes_sent == seen.num_bytes
    return found.num_collectives, found.bytes_sent


def test_few_small_collectives():
    num_collectives, bytes_sent = run_ranks(traffic, 2)[0]
    assert num_collectives <= 12 and bytes_sent < 150_000
