"""A ranking over virtual ranks equals a sort, for any data, layout and number of ranks."""

import math
import time
from itertools import product
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distprune.ranking import chunks, ranking
from distprune.ranking.ranking import COLLECT_ALL, Ranking
from distprune.ranking.scores import key_range
from distprune.ranks.collectives import Communicator
from helpers import reference
from helpers.models import HARD, values
from helpers.sampling import num_examples
from helpers.virtual_ranks import LAYOUTS, part_of, run_virtual_ranks

DRAFT_DTYPES = (torch.bool, torch.float32, torch.bfloat16, torch.float64, torch.complex128)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def check(
    tensors, masks, amounts, layouts, size, *, device, segments=None, most=None, max_collectives=32
):
    """Masks, counts and number of collectives, with drafts and without.

    Args:
        amounts: one of each segment; a segment is a list of positions, by default all.
        most: keys that may be collected.
    """
    segments = segments or [range(len(tensors))]
    dtype = tensors[0].dtype
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    common = key_range(dtype)
    num_live = [t.numel() if masks is None else int(masks[i].sum()) for i, t in enumerate(tensors)]
    expected, counts = [None] * len(tensors), []
    for segment, amount in zip(segments, amounts, strict=True):
        own = None if masks is None else [masks[i] for i in segment]
        kept = reference.prune([tensors[i] for i in segment], amount, own)
        for i, keep in zip(segment, kept, strict=True):
            expected[i] = keep
        counts.append(reference.num_to_prune(amount, sum(num_live[i] for i in segment)))
    tensors = [tensor.to(device) for tensor in tensors]
    masks = None if masks is None else [mask.to(device) for mask in masks]
    expected = [keep.to(device) for keep in expected]
    gone = [n - int(keep.sum()) for n, keep in zip(num_live, expected, strict=True)]

    def on_rank(communicator: Communicator):
        several = [
            part_of(
                tensor, None if masks is None else masks[i], layouts[i], common, size,
                communicator.index,
            )
            for i, tensor in enumerate(tensors)
        ]  # fmt: skip
        parts, sources, cutters = zip(*several, strict=True)
        owners = [0] * len(tensors)
        for number, segment in enumerate(segments):
            for i in segment:
                owners[i] = number
        for drafted in (True, False):
            # Masks of any dtype, drafted during the read, or written anew.
            outs = [
                torch.full((source.size,), 7, device=device).to(DRAFT_DTYPES[i % len(DRAFT_DTYPES)])
                for i, source in enumerate(sources)
            ]
            ranking = Ranking(
                parts, (common, sources), num_live, communicator, outs, most_collected=most
            )
            cuts = ranking.cut(owners, counts, count_each=not drafted)
            if drafted:
                calls = communicator.num_collectives
            else:
                assert cuts.num_before.tolist() == gone
            numbers = ranking.write(cuts)
            for out, cutter, keep in zip(outs, cutters, expected, strict=True):
                assert torch.equal(out.to(torch.float64), cutter(keep).double())
        return numbers, calls

    results = run_virtual_ranks(on_rank, size)
    assert [sum(numbers) for numbers in zip(*(n for n, _ in results), strict=True)] == gone
    assert len({calls for _, calls in results}) == 1
    assert results[0][1] <= max_collectives


@settings(max_examples=num_examples(400), deadline=None, derandomize=True)
@given(data=st.data())
def test_any_data_on_any_layout(device, data):
    size = data.draw(st.integers(1, 6), "ranks")
    kind = data.draw(st.sampled_from(HARD), "kind")
    shapes = data.draw(
        st.lists(
            st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple), min_size=1, max_size=4
        ),
        "shapes",
    )
    dtypes = [data.draw(st.sampled_from(DTYPES)) for _ in shapes]
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99), "seed"))
    tensors = [
        values(kind, shape, dtype, generator) for shape, dtype in zip(shapes, dtypes, strict=True)
    ]
    masks = None
    if data.draw(st.booleans(), "pruned already"):
        masks = [torch.rand(shape, generator=generator) > 0.4 for shape in shapes]
    owners = [data.draw(st.integers(0, 2)) for _ in shapes]
    segments = [[i for i, own in enumerate(owners) if own == each] for each in sorted({*owners})]
    amounts = []
    for segment in segments:
        live = sum(tensors[i].numel() if masks is None else int(masks[i].sum()) for i in segment)
        amounts.append(
            data.draw(st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]) | st.integers(0, live), "amount")
        )
    layouts = [data.draw(st.sampled_from(LAYOUTS)) for _ in shapes]
    serial = data.draw(st.sampled_from([0, 40, 1 << 15]), "elements of a small part")
    collected = data.draw(st.sampled_from([10, COLLECT_ALL]), "elements that are collected")
    most = data.draw(st.sampled_from([None, 20]), "most collected")
    stored = data.draw(st.sampled_from([1, 1 << 24]), "keys of segments side by side")
    with (
        mock.patch("distprune.ranking.chunks.SERIAL", serial),
        mock.patch.object(ranking, "COLLECT_ALL", collected),
        mock.patch.object(ranking, "_STORED", stored),
    ):
        check(
            tensors, masks, amounts, layouts, size,
            device=device, segments=segments, most=most, max_collectives=200,
        )  # fmt: skip


@settings(max_examples=num_examples(200), deadline=None, derandomize=True)
@given(data=st.data())
def test_any_data_with_the_operations_of_other_devices(device, data):
    """What a GPU runs, on the CPU."""
    with mock.patch("distprune.base.memory.takes_numpy", lambda device: False):
        test_any_data_on_any_layout.hypothesis.inner_test(device, data)


@pytest.mark.parametrize(
    ("dtype", "kind", "numpy", "amount"),
    product(
        [torch.float32, torch.bfloat16],
        [*HARD, "sorted", "half zero", "one huge value"],
        [True, False],
        [0.5, 0.999],
    ),
)
def test_more_elements_than_are_collected_outright(kind, dtype, numpy, amount, monkeypatch, device):
    """The sampled bracket: three ranks, a size at which it is used, all data from easy to nasty."""
    numpy = numpy and device.type == "cpu"
    monkeypatch.setattr("distprune.base.memory.takes_numpy", lambda device: numpy)
    for operations in ("cpu", "device"):
        monkeypatch.setattr(f"distprune.ranking.{operations}.CHUNK_BYTES", 1 << 15)
    generator = torch.Generator().manual_seed(5)
    shapes = [(211, 307), (5000,), (97, 101)]
    assert sum(map(math.prod, shapes)) > COLLECT_ALL
    if kind == "sorted":
        tensors = [torch.arange(math.prod(s)).view(s).float() for s in shapes]
    elif kind == "half zero":
        tensors = [torch.randn(s, generator=generator).clamp(min=0) for s in shapes]
    elif kind == "one huge value":
        tensors = [torch.full(s, 1e-30) for s in shapes]
        tensors[0][3, 3] = 1e30
    else:
        tensors = [values(kind, s, dtype, generator) for s in shapes]
    tensors = [tensor.to(dtype) for tensor in tensors]
    check(tensors, None, [amount], ["rows", "replicated", "columns"], 3, device=device)


def test_a_bracket_that_misses_costs_time_only(monkeypatch, device):
    """Brackets far too narrow: more rounds, the same masks."""
    monkeypatch.setattr(ranking, "_SIGMAS", 0.01)
    monkeypatch.setattr(ranking, "COLLECT_ALL", 50)
    generator = torch.Generator().manual_seed(5)
    for dtype in (torch.float32, torch.float64):
        tensors = [torch.randn(300, 70, generator=generator).to(dtype), torch.randn(99, 11)]
        for amount in (0.02, 0.5, 0.97):
            layouts = ["rows", "columns"]
            check(tensors, None, [amount], layouts, 2, device=device, max_collectives=100)
            each = {"segments": [[0], [1]], "max_collectives": 200}
            check(tensors, None, [amount, 0.5], layouts, 2, device=device, **each)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("num_pruned", [399, 400, 401, 799])
def test_equal_scores_are_cut_after_the_last_element_of_a_parameter(
    num_pruned, size, monkeypatch, device
):
    """So many ties that they are found by reading again, cut at and beside the end of a layer."""
    monkeypatch.setattr(ranking, "COLLECT_ALL", 300)
    layers = [torch.full((20, 20), 0.25), torch.full((400,), 0.25)]
    check(layers, None, [num_pruned], ["rows", "rows"], size, device=device, max_collectives=64)


@pytest.mark.parametrize("data", [pytest.param("normal", marks=pytest.mark.thorough), "few"])
def test_a_thousand_ranks_send_what_two_send(data):
    whole = values(data, (2000, 30), torch.float32, torch.Generator().manual_seed(0))
    common = key_range(torch.float32)
    (expected,) = reference.prune([whole], 0.5)

    def sent_by(size: int) -> tuple[int, int]:
        def on_rank(communicator: Communicator) -> tuple[int, int]:
            place = size, communicator.index
            part, source, cutter = part_of(whole, None, "rows", common, *place)
            out = torch.empty(source.size)
            ranking = Ranking([part], (common, [source]), [whole.numel()], communicator, [out])
            ranking.write(ranking.cut([0], [whole.numel() // 2]))
            assert torch.equal(out, cutter(expected).float())
            return communicator.num_collectives, communicator.bytes_sent

        (found,) = {*run_virtual_ranks(on_rank, size)}
        return found

    (few, few_bytes), (many, many_bytes) = sent_by(2), sent_by(1000)
    # Ranks draw samples of their own, and the search in one takes a step more or less: of 16 KiB.
    assert abs(many - few) <= 2 and abs(many_bytes - few_bytes) <= 2 * 17_000
    assert many <= 32 and many_bytes <= 256 * 1024


def test_nan_raises_on_every_rank_and_names_its_parameter():
    whole = torch.ones(6, 2)
    whole[5, 1] = math.nan
    common = key_range(torch.float32)

    def on_rank(communicator):
        parts = [
            part_of(tensor, None, "rows", common, 3, communicator.index, name)
            for tensor, name in ((torch.ones(4, 2), "left"), (whole, "right"))
        ]
        keys = common, [source for _, source, _ in parts]
        for count in (0, 3):
            ranking = Ranking([part for part, _, _ in parts], keys, [8, 12], communicator)
            with pytest.raises(ValueError, match=r"right \(1 of 12\)") as caught:
                ranking.cut([0, 0], [count])
        assert "left" not in str(caught.value)
        return str(caught.value)

    assert len(set(run_virtual_ranks(on_rank, 3))) == 1


@pytest.mark.parametrize(
    "k, kept", [(2, [1, 0, 1, 0, 1]), (4, [0, 0, 0, 0, 1]), (3, [0, 0, 1, 0, 1])]
)
def test_nan_rank_last_by_index_where_they_are_allowed(k, kept):
    scores = torch.tensor([math.nan, 1.0, math.nan, -2.0, math.nan])
    from distprune.methods.ranking import zero_lowest

    mask = torch.ones(5)
    zero_lowest(mask, scores, k)
    assert mask.tolist() == kept


def test_an_error_in_one_thread_ends_the_others(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    called = []

    def call(number, elements, scratch):
        called.append(number)
        time.sleep(0.01)
        if number == 1:
            raise OSError("the disk is gone")

    items = [(number, range(chunks._THREADED_CHUNK)) for number in range(1000)]
    with pytest.raises(OSError, match="the disk is gone"):
        chunks.call_all(call, items, True)
    assert len(called) < 100
