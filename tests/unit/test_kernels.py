"""The two forms of the work on a chunk agree, and the one for devices waits for them rarely."""

from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from distprune.base import memory
from distprune.base.memory import Scratch, on_host
from distprune.ranks.collectives import Communicator
from distprune.selection import cpu, device, passes
from distprune.selection.candidates import Cut, Ranked
from distprune.selection.keys import Order, key_range
from distprune.selection.passes import finish_drafts
from distprune.selection.radix import Descent
from distprune.selection.search import select_lowest
from helpers import reference
from helpers.virtual_shards import candidates

DTYPES = (
    torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float32,
    torch.float64, torch.complex64, torch.complex128,
)  # fmt: skip


@pytest.fixture(autouse=True)
def no_batches(monkeypatch):
    """Small parts would not be visited by the functions that are tested here."""
    monkeypatch.setattr("distprune.selection.candidates.MOST_ELEMENTS", 0)


def part_of(scores, live=None, size=1, rank=0, kind="rows"):
    common = key_range(scores.dtype, Order.MAGNITUDE)
    return candidates(scores, live, kind, common, size, rank)[0]


def previous_masks(dtype, n):
    """None; zeros and ones; and, where the dtype has them, other values, which do not compete."""
    flags = torch.rand(n, generator=torch.Generator().manual_seed(1)) > 0.4
    yield None
    yield flags.to(dtype)
    if dtype is not torch.bool:
        yield torch.where(torch.arange(n) % 7 == 0, 3, flags.to(dtype))


@pytest.mark.parametrize("numpy", [True, False])
@pytest.mark.parametrize("byte", [1, 2, 255])
def test_every_byte_but_zero_is_true_in_a_bool_mask(byte, numpy, monkeypatch):
    """Bytes of a file that are read as bool need not be 0 or 1."""
    monkeypatch.setattr("distprune.base.memory.takes_numpy", lambda device: numpy)
    scores = torch.arange(1.0, 301.0)
    live = torch.arange(300) % 3 != 0
    mask = (live.to(torch.uint8) * byte).view(torch.bool)
    assert mask.tolist() == live.tolist()
    part = part_of(scores, mask)
    keys = key_range(torch.float32, Order.MAGNITUDE)
    ranked = Ranked([part], ["w"], [int(live.sum())], keys, Communicator(()))
    cut = select_lowest(ranked, 50).cut
    kernels = cpu if numpy else device
    assert kernels.write(part, range(300), 0, cut, mask, mask, Scratch()) == 50
    assert mask.tolist() == reference.prune([scores], 50, [live])[0].tolist()


@pytest.mark.parametrize("new_dtype", DTYPES)
@pytest.mark.parametrize("old_dtype", DTYPES)
def test_both_forms_read_and_write_the_same(old_dtype, new_dtype):
    n = 300
    scores = (torch.randn(n, generator=torch.Generator().manual_seed(0)) * 4).round() / 4
    low, high = (int(torch.tensor(x).view(torch.int32)) for x in (0.5, 1.0))
    pivots = [low - 1, low + 5, high, key_range(torch.float32, Order.MAGNITUDE).largest_number]
    for previous in previous_masks(old_dtype, n):
        if new_dtype is torch.bool and old_dtype is not torch.bool and previous is not None:
            continue  # nobody asks for it: a bool mask stays one
        if old_dtype.is_complex and not new_dtype.is_complex:
            continue
        part = part_of(scores, previous)
        untouched = None if previous is None else previous.clone()
        results = []
        for kernels in (cpu, device):
            drafted, written = (torch.full((n,), 1).to(new_dtype) for _ in range(2))
            numpy = kernels is cpu  # of the keys, too
            with mock.patch.object(memory, "takes_numpy", lambda _, numpy=numpy: numpy):
                chunk = kernels.scan(part, range(n), pivots, (low, high), drafted, Scratch())
                cut = Cut(high, 0, 150)
                count = kernels.write(part, range(n), 0, cut, written, previous, Scratch())
            numbers = on_host([chunk.num_below, *chunk.counts, chunk.collected.number, count])
            positions, keys = chunk.collected.positions, chunk.collected.keys
            results.append((numbers, positions, keys, drafted, written))
        assert previous is None or torch.equal(previous, untouched)
        assert results[0][0] == results[1][0]
        for one, other in zip(results[0][1:], results[1][1:], strict=True):
            assert torch.equal(one, other)
        live = torch.ones(n, dtype=torch.bool) if previous is None else previous == 1
        below = live & (scores.abs() < 0.5)
        kept = torch.ones(n) if previous is None else previous
        assert torch.equal(results[0][3], torch.where(below, 0, kept).to(new_dtype))
        early = scores.abs() == 1.0
        early[150:] = False
        before = live & ((scores.abs() < 1.0) | early)
        assert torch.equal(results[0][4], torch.where(before, 0, kept).to(new_dtype))


@pytest.mark.parametrize("numpy", [True, False])
@pytest.mark.parametrize("is_pruned", [True, False])
@pytest.mark.parametrize("kind", ["rows", "columns", "replicated", "strided"])
def test_ties_are_counted_in_bins_of_their_indices(kind, is_pruned, numpy, monkeypatch):
    """Every bin of a histogram of indices, over the parts of four ranks, chunk by chunk."""
    monkeypatch.setattr("distprune.base.memory.takes_numpy", lambda device: numpy)
    monkeypatch.setattr("distprune.selection.cpu.CHUNK_BYTES", 400)
    monkeypatch.setattr("distprune.selection.device.CHUNK_BYTES", 400)
    generator = torch.Generator().manual_seed(0)
    scores = torch.randint(0, 3, (60, 20), generator=generator).float()
    live = torch.rand(60, 20, generator=generator) > 0.3 if is_pruned else None
    common = key_range(torch.float32, Order.MAGNITUDE)
    key = int(torch.tensor(2.0).view(torch.int32))
    ties = (scores == 2) if live is None else (scores == 2) & live
    indices = ties.flatten().nonzero().flatten()
    for low, high, bits in ((0, 1199, 4), (0, 1199, 11), (130, 777, 3), (500, 500, 5)):
        bins = Descent.over(low, high, 0, bits)
        parts = [candidates(scores, live, kind, common, 4, rank)[0] for rank in range(4)]
        found = sum(passes.count_in_bins(part, key, bins) for part in parts)
        inside = indices[(indices >= low) & (indices <= high)]
        expected = torch.bincount((inside >> bins.shift) - (low >> bins.shift), minlength=0)
        expected = torch.nn.functional.pad(expected, (0, bins.num_bins - expected.numel()))
        assert torch.equal(found, expected)


class Waits(TorchDispatchMode):
    """Counts the operations that make the host wait for a device."""

    def __init__(self):
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name.removeprefix("aten::")
        by_flags = name.startswith("index") and any(
            each is not None and each.dtype is torch.bool
            for each in (args[1] if isinstance(args[1], (list, tuple)) else [args[1]])
            if each is None or isinstance(each, torch.Tensor)
        )
        waiting = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "unique")
        if name in waiting or by_flags:
            self.number += 1
        return function(*args, **(kwargs or {}))


def prune_on_device(num_parameters, masks=None):
    """The masks, and how often the host waited, of one selection with the operations of devices."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(90, 50, generator=generator) for _ in range(num_parameters)]
    parts = [part_of(tensor, None if masks is None else masks[0]) for tensor in tensors]
    num_live = [t.numel() if masks is None else int(masks[0].sum()) for t in tensors]
    drafts = [torch.empty(t.numel(), dtype=torch.bool) for t in tensors]
    names = [str(i) for i in range(num_parameters)]
    keys = key_range(torch.float32, Order.MAGNITUDE)
    k = sum(num_live) // 2
    with (
        mock.patch("distprune.base.memory.takes_numpy", lambda device: False),
        mock.patch("distprune.selection.kth_key.COLLECT_ALL", 1000),
        mock.patch("distprune.selection.bracket.COLLECT_ALL", 1000),
        Waits() as waits,
    ):
        ranked = Ranked(parts, names, num_live, keys, Communicator(()))
        selection = select_lowest(ranked, k, drafts=drafts)
        assert selection.drafted is not None
        assert None not in finish_drafts(selection.drafted, parts, selection.cut, drafts)
    whole = None if masks is None else masks * num_parameters
    expected = reference.prune(tensors, k, whole)
    for draft, mask in zip(drafts, expected, strict=True):
        assert torch.equal(draft, mask.view(-1).bool())
    return waits.number


@pytest.mark.parametrize("already_pruned", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_the_host_does_not_wait_for_every_parameter(already_pruned):
    masks = [torch.rand(90, 50) > 0.3] if already_pruned else None
    few, many = (prune_on_device(n, masks) for n in (4, 40))
    # What waits is on histograms and the few ties, whose number does not depend on it.
    assert many <= few + 8


def test_a_device_scans_a_chunk_again_that_holds_more_than_expected():
    """All keys of the interval are in one parameter, which a share of all does not tell."""
    n = 40_000
    scores = [torch.full((n,), 9.0), torch.linspace(1.0, 2.0, n)]
    parts = [part_of(each) for each in scores]
    low, high = (int(torch.tensor(x).view(torch.int32)) for x in (1.0, 2.0))
    drafts = [torch.empty(n, dtype=torch.bool) for _ in parts]
    with mock.patch("distprune.base.memory.takes_numpy", lambda device: False):
        scanned = passes.scan(parts, [high], (low, high), drafts, expected_share=0.01)
    assert scanned.counts == [[0], [n]] and scanned.num_below == [0, 0]
    assert scanned.sizes == [0, n] and scanned.keys.numel() == n
    assert all(bool(draft.all()) for draft in drafts)


def test_chunks_are_counted_once_where_replicas_share(monkeypatch):
    for kernels in ("cpu", "device"):
        monkeypatch.setattr(f"distprune.selection.{kernels}.CHUNK_BYTES", 256)
    scores = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    totals = [
        passes.scan(
            [part_of(scores, size=3, rank=rank, kind="replicated")],
            [int(torch.tensor(0.5).view(torch.int32))], (0, 0),
            [torch.empty(1000, dtype=torch.bool)],
        ).counts[0][0]
        for rank in range(3)
    ]  # fmt: skip
    assert sum(totals) == int((scores.abs() <= 0.5).sum())


def test_an_error_on_a_thread_is_raised(monkeypatch):
    for kernels in ("cpu", "device"):
        monkeypatch.setattr(f"distprune.selection.{kernels}.CHUNK_BYTES", 256)
    part = part_of(torch.randn(1000))

    def fail(*_, **__):
        raise ZeroDivisionError("inside of a chunk")

    monkeypatch.setattr("distprune.selection.cpu.scan", fail)
    with pytest.raises(ZeroDivisionError, match="inside of a chunk"):
        passes.scan([part], [3], None)
