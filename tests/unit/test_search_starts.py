"""A start decides how fast a search is, and never what it finds."""

import math
from dataclasses import replace
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distprune.selection import kth_key
from distprune.selection.bracket import Start
from distprune.selection.candidates import PartCut, Ranked
from distprune.selection.keys import Order, key_range
from distprune.selection.passes import write_masks
from distprune.selection.search import search_lowest, search_together
from helpers import reference
from helpers.sampling import num_examples
from helpers.virtual_ranks import run_virtual_ranks
from helpers.virtual_shards import KINDS, candidates, fill

LAYOUTS = ["rows", "columns", "replicated"]


def select(tensors, masks, k, start=None, size=2):
    """Compare the masks of all ranks; (start of the next, collectives, scans of a rank)."""
    common = key_range(tensors[0].dtype, Order.MAGNITUDE)
    expected = reference.prune(tensors, k, masks)
    num_live = [t.numel() if masks is None else int(masks[i].sum()) for i, t in enumerate(tensors)]
    scan, scans = kth_key.scan, []

    def counted(*args):
        scans.append(args)
        return scan(*args)

    def on_rank(communicator):
        both = [
            candidates(tensor, None if masks is None else masks[i], LAYOUTS[i % 3], common, size,
                       communicator.index)
            for i, tensor in enumerate(tensors)
        ]  # fmt: skip
        parts = [part for part, _ in both]
        outs = [torch.full(cut(tensors[i]).shape, True) for i, (_, cut) in enumerate(both)]
        names = [str(i) for i in range(len(parts))]
        ranked = Ranked(parts, names, num_live, common, communicator)
        search = search_lowest(ranked, k, drafts=outs, start=start)
        (selection,) = search_together([search], communicator)
        cuts = [PartCut(i, selection.cut) for i in range(len(parts))]
        write_masks(parts, cuts, outs, selection.drafted)
        for i, (_, cut) in enumerate(both):
            assert torch.equal(outs[i], cut(expected[i])), (i, start)
        return selection.start, communicator.num_collectives

    with mock.patch("distprune.selection.kth_key.scan", counted):
        results = run_virtual_ranks(on_rank, size)
    assert len({str(result) for result in results}) == 1
    return results[0][0], results[0][1], len(scans) / size


@pytest.fixture(autouse=True)
def small_limits():
    """Limits of small data, so that a few hundred elements are searched as millions are."""
    limits = {"kth_key.COLLECT_ALL": 20, "search.COLLECT_ALL": 20, "search._KEPT": 20}
    with mock.patch.multiple("distprune.selection.bracket", _SHARE=0.1, _LARGEST_SHARE=0.3):
        patches = [mock.patch(f"distprune.selection.{name}", n) for name, n in limits.items()]
        for patch in patches:
            patch.start()
        yield
        for patch in patches:
            patch.stop()


@settings(max_examples=num_examples(200), deadline=None, derandomize=True)
@given(data=st.data())
def test_any_start_gives_the_same_masks(data):
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99), "seed"))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int16]), "dtype")
    kind = data.draw(st.sampled_from(KINDS), "kind")
    if dtype is torch.int16:
        kind = "few values"
    tensors = [fill(kind, shape, generator).to(dtype) for shape in [(17, 13), (70,)]]
    masks = None
    if data.draw(st.booleans(), "some do not compete"):
        masks = [torch.rand(tensor.shape, generator=generator) > 0.4 for tensor in tensors]
    total = sum(t.numel() for t in tensors) if masks is None else sum(int(m.sum()) for m in masks)
    keys = key_range(dtype, Order.MAGNITUDE)
    start, _, _ = select(tensors, masks, data.draw(st.integers(0, total), "k before"))
    if start is None or data.draw(st.booleans(), "nonsense"):
        start = Start(
            data.draw(st.sampled_from([keys, key_range(torch.float64, Order.ASCENDING)])),
            data.draw(st.integers(keys.low - 2, keys.high + 2), "threshold"),
            data.draw(st.sampled_from([None, 0.0, 1e-9, 0.5, 1e9]), "density"),
            data.draw(st.none() | st.integers(0, 2 * keys.high), "half"),
            data.draw(st.integers(0, 1000), "total"),
        )
    for _ in range(2):
        k = data.draw(st.integers(0, total), "k")
        start, _, _ = select(tensors, masks, k, start)


def test_a_start_makes_the_next_search_one_scan():
    generator = torch.Generator().manual_seed(3)
    tensors = [torch.randn(60, 50, generator=generator), torch.randn(4000, generator=generator)]
    start, cold, _ = select(tensors, None, 3500)
    for step in range(4):
        for tensor in tensors:
            tensor += 0.002 * torch.randn(tensor.shape, generator=generator)
        start, warm, num_scans = select(tensors, None, 3500, start)
        assert num_scans == 1 and warm <= cold - 3, step
        assert 0.05 < start.share < 0.35


def test_a_start_that_misses_widens_the_next_one():
    generator = torch.Generator().manual_seed(3)
    tensors = [torch.rand(60, 50, generator=generator) + 1]
    start, _, _ = select(tensors, None, 1500)
    tensors[0] += 0.13  # about a quarter of all elements
    following, _, num_scans = select(tensors, None, 1500, start)
    assert num_scans > 1 and following.half > 2 * start.half
    tensors[0] += 0.13
    _, _, num_scans = select(tensors, None, 1500, replace(following, density=1e-9))
    assert num_scans == 1 or following.share < 0.3


def test_a_key_with_many_elements_is_counted_and_not_collected():
    tensors = [torch.zeros(60, 50), torch.linspace(1, 2, 900)]
    start, _, _ = select(tensors, None, 1500)
    assert start.half is None and start.threshold == 0
    _, _, num_scans = select(tensors, None, 1700, start)
    assert num_scans == 1
    start, _, _ = select(tensors, None, 3300, start)
    assert start.half is not None and start.threshold > 0


def test_an_interval_that_became_crowded_is_not_collected():
    generator = torch.Generator().manual_seed(3)
    tensors = [torch.rand(60, 50, generator=generator) + 1]
    start, _, _ = select(tensors, None, 1500)
    low, high = start.around(0, 2**31).interval
    middle = torch.tensor([(low + high) // 2 - 9], dtype=torch.int32).view(torch.float32)
    crowded = [torch.where(torch.rand(60, 50, generator=generator) < 0.9, middle, tensors[0])]
    collected = []
    scan = kth_key.scan

    def recorded(parts, pivots, interval, *rest):
        collected.append(interval)
        return scan(parts, pivots, interval, *rest)

    with mock.patch("distprune.selection.kth_key.scan", recorded):
        select(crowded, None, 1500, start)
    assert collected[:2] == [None, None] and math.isfinite(start.share)
