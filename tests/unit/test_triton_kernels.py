"""Triton's kernels give what the functions for a CPU give, bit for bit.

They are interpreted here, block by block, so that data are small and blocks as well. Whether they
compile is tested too, for devices that are not here.
"""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distprune.base import memory
from distprune.base.memory import on_host
from distprune.ranks.collectives import Communicator
from distprune.selection import kernels, passes
from distprune.selection.candidates import Candidates, Cut, Draw, PartCut, Ranked
from distprune.selection.keys import RANDOM_KEYS, Order, RandomKeys, ScoreKeys, key_range
from distprune.selection.scores import ComputedScores, TensorScores
from distprune.selection.search import select_lowest
from distprune.shards.geometry import IndexMap
from helpers import reference
from helpers.virtual_shards import KINDS, candidates, fill

BLOCK = 64
# Around the edges of one block, of several, and of a tile of several.
SIZES = (0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5)
FUSED_ON = kernels.fused_on
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@pytest.fixture(autouse=True)
def fused(monkeypatch, request):
    """Routes what is on a CPU to Triton's interpreter."""
    pytest.importorskip("triton")
    if request.node.get_closest_marker("slow"):
        return None
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton compiles here, and does not interpret")
    from distprune.selection import triton_kernels, triton_tables

    monkeypatch.setattr(triton_tables, "BLOCK", BLOCK)
    # The functions for one part draft and collect as kernels do; those for many small ones do not.
    monkeypatch.setattr("distprune.selection.candidates.MOST_ELEMENTS", 0)
    monkeypatch.setattr(kernels, "fused_on", lambda device: triton_kernels)
    return triton_kernels


def part_of(scores, live=None, order=Order.MAGNITUDE, common=None, counted=None):
    flat = scores.reshape(-1)
    n = flat.numel()
    keys = ScoreKeys(TensorScores(flat), common or key_range(flat.dtype, order))
    index = IndexMap((range(n),), (1,), 0)
    counted = range(n) if counted is None else counted
    return Candidates(keys, live, index, counted, n, n, flat.device)


def in_both_forms(run):
    """What a function returns with the functions for a CPU, and with the fused ones."""
    fused_on = kernels.fused_on
    kernels.fused_on = lambda device: None
    try:
        expected = run()
    finally:
        kernels.fused_on = fused_on
    return expected, run()


def assert_scans_agree(parts, pivots, interval, outs=None, share=1.0):
    """Counts, collected elements and drafts."""

    def run():
        drafts = None if outs is None else [out.clone() for out in outs]
        scanned = passes.scan(parts, pivots, interval, drafts, share)
        return scanned, drafts

    (one, drafts), (other, other_drafts) = in_both_forms(run)
    assert (one.counts, one.num_below, one.sizes) == (other.counts, other.num_below, other.sizes)
    assert torch.equal(one.keys, other.keys)
    assert elements_of(one) == elements_of(other)
    for draft, other_draft in zip(drafts or [], other_drafts or [], strict=True):
        assert bits(draft) == bits(other_draft)


def elements_of(scanned):
    """Per part, the collected elements: whether they are counted, positions, and keys."""
    return [
        [
            (chunk.is_counted, position + chunk.span.start, key)
            for chunk in of_part
            for position, key in zip(chunk.positions.tolist(), chunk.keys.tolist(), strict=True)
        ]
        for of_part in scanned.collected
    ]


def bits(mask):
    """Of a bool mask, whether its bytes are true: those of a file need not be 0 or 1."""
    return mask.tolist() if mask.dtype is torch.bool else mask.view(torch.uint8).tolist()


def hard_values(dtype, n, seed=0):
    """Normal numbers, ties, zeros of both signs, denormals, infinities and NaN."""
    generator = torch.Generator().manual_seed(seed)
    values = (torch.randn(n, generator=generator) * 4).round() / 4
    tiny = float(torch.finfo(dtype).tiny)
    special = torch.tensor(
        [0.0, -0.0, math.inf, -math.inf, math.nan, -math.nan, tiny / 2, -tiny / 4, 1.0],
        dtype=torch.float64,
    )
    values = values.double()
    values[::5] = special.repeat(n // 9 + 1)[: len(values[::5])]
    return values.to(dtype)


def key_of(x, dtype, order=Order.MAGNITUDE):
    keys = ScoreKeys(TensorScores(torch.tensor([x], dtype=dtype)), key_range(dtype, order))
    return int(keys.load(0, 1).values)


@pytest.mark.parametrize("order", Order)
@pytest.mark.parametrize("dtype", DTYPES)
def test_hard_values_of_all_sizes_in_one_launch(dtype, order, fused):
    tensors = [hard_values(dtype, n, seed) for seed, n in enumerate(SIZES)]
    parts = [part_of(tensor, order=order) for tensor in tensors]
    assert all(fused.takes(part, None) for part in parts)
    common = parts[0].keys.common
    low, high = sorted(key_of(x, dtype, order) for x in (0.25, 1.0))
    outs = [torch.full((tensor.numel(),), True) for tensor in tensors]
    for interval in ((low, high), (low, low), (common.low, common.high), None):
        pivots = [low, common.largest_number, *([] if interval is None else [high])]
        assert_scans_agree(parts, pivots, interval, outs)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.float32, torch.bfloat16])
def test_masks_in_force_keep_what_is_pruned_and_values_that_do_not_compete(dtype):
    sizes = (BLOCK - 1, 2 * BLOCK, 3 * BLOCK + 5)
    tensors = [hard_values(torch.float32, n) for n in sizes]
    low, high = key_of(0.5, torch.float32), key_of(1.0, torch.float32)
    masks = [torch.arange(n) % 3 for n in sizes]
    masks = [m.bool() if dtype is torch.bool else m.to(dtype) for m in masks]
    if dtype is torch.bool:
        # Bytes of a file that are read as bool need not be 0 or 1.
        masks[0] = (masks[0].to(torch.uint8) * 255).view(torch.bool)
    parts = [part_of(t, m) for t, m in zip(tensors, masks, strict=True)]
    outs = [torch.empty_like(mask) for mask in masks]
    assert_scans_agree(parts, [low - 1, low + 1, high], (low, high), outs)

    def written():
        targets = [torch.empty_like(mask) for mask in masks]
        cuts = [PartCut(i, Cut(high, 1, 70)) for i in range(3)]
        return passes.write_masks(parts, cuts, targets), [bits(target) for target in targets]

    one, other = in_both_forms(written)
    assert one == other


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bool, torch.float64])
def test_new_masks_of_any_dtype(dtype):
    tensor = hard_values(torch.bfloat16, 3 * BLOCK + 5)
    low, high = key_of(0.5, torch.bfloat16), key_of(1.0, torch.bfloat16)
    out = torch.empty(tensor.numel(), dtype=dtype)
    assert_scans_agree([part_of(tensor)], [low - 1, high], (low, high), [out])


def test_addresses_need_not_be_aligned():
    """Views of one buffer, as flat parameters have them, at odd places."""
    buffer = hard_values(torch.bfloat16, 500)
    parts = [part_of(buffer[1:130]), part_of(buffer[131:400])]
    out = torch.empty(500, dtype=torch.bool)
    low, high = key_of(0.5, torch.bfloat16), key_of(1.0, torch.bfloat16)
    assert_scans_agree(parts, [low - 1, high], (low, high), [out[3:132], out[133:402]])


def test_tiles_with_more_elements_than_expected_are_read_again():
    tensors = [torch.full((3 * BLOCK,), 9.0), torch.linspace(1.0, 2.0, 3 * BLOCK + 7)]
    low, high = key_of(1.0, torch.float32), key_of(2.0, torch.float32)
    parts = [part_of(tensor) for tensor in tensors]
    parts.append(computed(torch.linspace(-2.0, 1.5, 2 * BLOCK), torch.Tensor.abs))
    outs = [torch.empty(part.num_local, dtype=torch.bool) for part in parts]
    assert_scans_agree(parts, [low - 1, high], (low, high), outs, share=0.01)


def test_more_pivots_than_one_launch_counts(fused):
    from distprune.selection import triton_source

    values = hard_values(torch.float32, 3 * BLOCK + 5)
    part = part_of(values, live=torch.arange(len(values)) % 3 != 0)
    pivots = sorted({key_of(x / 8, torch.float32) for x in range(3 * triton_source.MOST_PIVOTS)})
    assert len(pivots) > 2 * triton_source.MOST_PIVOTS
    out = torch.empty(len(values), dtype=torch.bool)
    for interval in ((pivots[3], pivots[15]), None):
        assert_scans_agree([part], pivots, interval, [out])


def computed(values, function):
    n = values.numel()
    keys = ScoreKeys(
        ComputedScores(values, function, values.dtype), key_range(values.dtype, Order.MAGNITUDE)
    )
    return Candidates(keys, None, IndexMap((range(n),), (1,), 0), range(n), n, n, values.device)


def test_scores_that_a_function_computes(monkeypatch):
    monkeypatch.setattr("distprune.selection.cpu.CHUNK_BYTES", 400)
    values = hard_values(torch.float32, 3 * BLOCK + 5)
    low, high = key_of(0.25, torch.float32), key_of(1.0, torch.float32)
    parts = [computed(values, torch.square), part_of(values)]
    outs = [torch.empty(part.num_local, dtype=torch.bool) for part in parts]
    assert_scans_agree(parts, [low - 1, high], (low, high), outs)


def test_dtypes_that_are_compared_after_promotion(fused):
    """bfloat16 is widened by the kernel; float16 beside it is left to other functions."""
    common = key_range(torch.float32, Order.MAGNITUDE)
    tensors = [hard_values(dtype, 2 * BLOCK + 1) for dtype in DTYPES[:3]]
    parts = [part_of(tensor, common=common) for tensor in tensors]
    assert [fused.takes(part, None) for part in parts] == [True, True, False]
    outs = [torch.empty(part.num_local, dtype=torch.bool) for part in parts]
    low, high = key_of(0.5, torch.float32), key_of(1.0, torch.float32)
    assert_scans_agree(parts, [low - 1, high], (low, high), outs)


def test_replicas_count_their_share_and_draft_everything():
    tensor = hard_values(torch.float32, 4 * BLOCK + 3)
    part = part_of(tensor, counted=range(BLOCK + 1, 3 * BLOCK))
    low, high = key_of(0.5, torch.float32), key_of(1.0, torch.float32)
    out = torch.empty(tensor.numel(), dtype=torch.bool)
    assert_scans_agree([part], [low - 1, high], (low, high), [out])
    assert_scans_agree([part], [low, high], None)


@pytest.mark.parametrize("index", [BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 3])
def test_ties_are_cut_at_the_element_and_replicas_count_their_share(index):
    """With a draft and without one; nothing but ties."""
    n = 3 * BLOCK
    tensor, key = torch.full((n,), 0.5), key_of(0.5, torch.float32)
    part = part_of(tensor, counted=range(BLOCK + 1, n))
    cut = PartCut(0, Cut(key, 0, index))
    expected = (torch.arange(n) >= index).tolist()
    for with_draft in (False, True):
        out = torch.empty(n, dtype=torch.bool)
        drafted = passes.scan([part], [key - 1, key], (key, key), [out]) if with_draft else None
        counts = passes.write_masks([part], [cut], [out], drafted)
        assert out.tolist() == expected
        assert counts == [max(0, index - BLOCK - 1)]


@pytest.mark.parametrize("number", [15, 16, 17])
def test_a_tile_that_is_just_full(number):
    """Where none is expected, a tile has room for 16 elements."""
    tensors = [torch.zeros(BLOCK), torch.zeros(BLOCK)]
    for tensor in tensors:
        tensor[3 : 3 + number] = torch.linspace(1.0, 2.0, number)
    low, high = key_of(1.0, torch.float32), key_of(2.0, torch.float32)
    outs = [torch.empty(BLOCK, dtype=torch.bool) for _ in tensors]
    assert_scans_agree([part_of(t) for t in tensors], [low - 1, high], (low, high), outs, share=0.0)


def test_a_tile_writes_nothing_beyond_its_room(fused):
    """The kernel alone, with room for 5 of 20 elements."""
    scores = torch.linspace(1.0, 2.0, 20)
    table = torch.tensor([scores.data_ptr(), 0, 0, 20, 100, 2, 5])
    numbers = torch.tensor([0, 0, key_of(2.0, torch.float32), 0])
    counts = torch.zeros(2, dtype=torch.int32)
    keys, positions = torch.full((30,), -7, dtype=torch.int32), torch.full((30,), -7).int()
    (piece,) = [fused.Piece.of(0, 0, range(20), part_of(scores), None)]
    form = fused._format(piece.kind)
    fused.source.scan_tiles[(1,)](
        table, numbers, counts, keys, positions, form, 0, 2, True, False, BLOCK
    )
    assert counts.tolist() == [20, 0]
    assert positions.tolist() == [-7] * 2 + [100, 101, 102, 103, 104] + [-7] * 23
    assert keys[2:7].tolist() == scores[:5].view(torch.int32).tolist()
    assert (keys[7:] == -7).all() and (keys[:2] == -7).all()


@pytest.mark.parametrize("length", [1, 16])
def test_a_sample_has_a_run_of_each_stratum(length, fused):
    """Of several parts, with and without masks, from a position on, in one launch for each kind."""
    sizes, parts, draws = (3000, 40, 1111), [], []
    for number, size in enumerate(sizes):
        live = None if number == 1 else (torch.arange(size) % 3 != 0)
        parts.append(part_of(torch.arange(1.0, size + 1), live))
        start = 8 * number
        num_runs = (size - start) // length
        draws.append(Draw(number, start, length, num_runs, max(1, num_runs // (number + 1))))
    dead = -1
    found = iter(torch.cat(fused.sample(parts, draws, dead, 7)).tolist())
    # The part without a mask is of another kind.
    for position in (0, 2, 1):
        part, draw = parts[position], draws[position]
        keys = torch.where(
            torch.ones(part.num_local, dtype=torch.bool) if part.live is None else part.live,
            part.keys.load(0, part.num_local).values, dead,
        ).tolist()  # fmt: skip
        for stratum in range(draw.num_drawn):
            run = [next(found) for _ in range(length)]
            first = stratum * draw.num_runs // draw.num_drawn
            last = -(-(stratum + 1) * draw.num_runs // draw.num_drawn)
            at = [draw.start + number * length for number in range(first, last)]
            assert run in [keys[each : each + length] for each in at]
    assert next(found, None) is None


def test_samples_of_one_stratum_move_with_the_salt(fused):
    part = part_of(torch.arange(1.0, 5001.0))
    drawn = [
        torch.cat(fused.sample([part], [Draw(0, 0, 1, 5000, 10)], -1, salt)).tolist()
        for salt in range(3)
    ]
    assert drawn[0] != drawn[1] != drawn[2]


@given(
    st.lists(st.integers(-(2**15), 2**15 - 1), max_size=3000),
    st.sampled_from([torch.int16, torch.int32, torch.int64]),
    st.integers(-(2**15), 2**15 - 1),
    st.integers(0, 5) | st.integers(0, 2**16),
    st.integers(0, 12),
)
@settings(max_examples=30, deadline=None)
def test_keys_are_counted_in_bins(numbers, dtype, low, width, shift):
    """By Triton and by torch's operations, which leave out the keys outside of the interval."""
    from distprune.selection import device, triton_kernels

    keys, high = torch.tensor(numbers, dtype=dtype), min(low + width, 2**15 - 1)
    expected = [0] * ((high >> shift) - (low >> shift) + 1)
    for number in numbers:
        if low <= number <= high:
            expected[(number >> shift) - (low >> shift)] += 1
    for form in (device, triton_kernels):
        assert form.histogram(keys, low, high, shift).tolist() == expected
    with mock.patch.object(triton_kernels, "_CROWDED", 0):  # few bins are counted one by one
        assert triton_kernels.histogram(keys, low, high, shift).tolist() == expected


@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize("kind", ["rows", "columns"])
def test_random_keys(kind, live, fused):
    """Hashes of indices, beyond 32 bits too; where indices are no run, by other functions."""
    index = IndexMap((range(300),), (1,), 2**33 + 7)
    if kind == "columns":
        index = IndexMap((range(20), range(5, 20)), (40, 1), None, dims=(0, 1))
    mask = (torch.arange(300) % 3 != 0) if live else None
    keys = RandomKeys(2**61 + 12345, 2**40, index, torch.device("cpu"))
    part = Candidates(keys, mask, index, range(300), 300, 2**34, torch.device("cpu"))
    assert fused.takes(part, None) == (kind == "rows")
    middle = RANDOM_KEYS.high // 2
    interval = (middle - middle // 4, middle)
    out = torch.empty(300, dtype=torch.bool)
    assert_scans_agree([part], [interval[0] - 1, middle, 3 * (middle // 2)], interval, [out])


@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("kind", KINDS)
def test_whole_selections_equal_the_oracle(kind, dtype, monkeypatch, fused):
    """Through the bracket, ties and drafts, over shards of ranks that are not row-major runs."""
    for name in ("kth_key.COLLECT_ALL", "bracket.COLLECT_ALL"):
        monkeypatch.setattr(f"distprune.selection.{name}", 100)
    monkeypatch.setattr(fused.tables, "BLOCK", 256)
    generator = torch.Generator().manual_seed(3)
    tensors = [fill(kind, shape, generator).to(dtype) for shape in ((30, 40), (5,), (13, 17))]
    common = key_range(dtype, Order.MAGNITUDE)
    parts = [candidates(t, None, "rows", common, 1, 0)[0] for t in tensors]
    sizes = [t.numel() for t in tensors]
    for k in (1, sum(sizes) // 2, sum(sizes) - 1):
        drafts = [torch.empty(n, dtype=torch.bool) for n in sizes]
        ranked = Ranked(parts, list("abc"), sizes, common, Communicator(()))
        found = select_lowest(ranked, k, drafts=drafts)
        cuts = [PartCut(i, found.cut) for i in range(3)]
        assert sum(passes.write_masks(parts, cuts, drafts, found.drafted)) == k
        for draft, mask in zip(drafts, reference.prune(tensors, k, None), strict=True):
            assert torch.equal(draft, mask.view(-1).bool())


def test_nan_raises_and_names_its_parameter():
    tensors = [torch.ones(70), torch.ones(200)]
    tensors[1][150] = math.nan
    parts = [part_of(tensor) for tensor in tensors]
    common = key_range(torch.float32, Order.MAGNITUDE)
    with pytest.raises(ValueError, match=r"right \(1 of 200\)") as caught:
        select_lowest(Ranked(parts, ["left", "right"], [70, 200], common, Communicator(())), 3)
    assert "left" not in str(caught.value)


@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.float32])
def test_drafts_are_corrected_for_many_parameters_at_once(mask_dtype):
    """In front of, in and behind the parameter in which ties are cut."""
    sizes = (BLOCK + 1, 300, 2 * BLOCK)
    parts = [part_of(hard_values(torch.float32, n, n)) for n in sizes]
    low, high = key_of(0.25, torch.float32), key_of(1.5, torch.float32)

    def run():
        results = []
        for threshold, parameter, index in ((0.5, 1, 100), (1.0, 3, 0), (0.25, 0, 5), (1.5, 2, 0)):
            drafts = [torch.empty(n, dtype=mask_dtype) for n in sizes]
            scanned = passes.scan(parts, [low - 1, high], (low, high), drafts)
            cut = Cut(key_of(threshold, torch.float32), parameter, index)
            counts = passes.finish_drafts(scanned, parts, cut, drafts)
            results.append((on_host(counts), [bits(draft) for draft in drafts]))
        return results

    one, other = in_both_forms(run)
    assert one == other


def test_ties_in_memory_that_is_not_row_major_are_left_to_other_functions(fused):
    """Transposed: later positions do not have larger indices."""
    tensor = torch.full((30, 20), 0.5)
    keys = ScoreKeys(
        TensorScores(tensor.t().reshape(-1)), key_range(torch.float32, Order.MAGNITUDE)
    )
    index = IndexMap((range(30), range(20)), (1, 30), None, dims=(1, 0))
    part = Candidates(keys, None, index, range(600), 600, 600, tensor.device)
    key = key_of(0.5, torch.float32)
    assert not fused.can_cut(part, 0, Cut(key, 0, 100)) and fused.can_cut(part, 1, Cut(key, 0, 100))

    def run():
        drafts = [torch.empty(600, dtype=torch.bool) for _ in range(2)]
        scanned = passes.scan([part, part], [key - 1, key], (key, key), drafts)
        counts = passes.finish_drafts(scanned, [part, part], Cut(key, 0, 100), drafts)
        return on_host(counts), [bits(draft) for draft in drafts]

    one, other = in_both_forms(run)
    assert one == other and one[0] == [100, 0]


def test_a_cpu_takes_numpy_and_the_variable_turns_triton_off(monkeypatch):
    monkeypatch.setattr(kernels, "fused_on", FUSED_ON)
    assert kernels.fused_on(torch.device("cpu")) is None
    monkeypatch.setattr(kernels, "_compiled_on", lambda device: "compiled")
    monkeypatch.setattr(memory, "takes_numpy", lambda device: False)
    assert kernels.fused_on(torch.device("cuda", 0)) == "compiled"
    assert kernels.fused_on(torch.device("mps")) is None
    monkeypatch.setenv(kernels.NO_TRITON, "1")
    assert kernels.fused_on(torch.device("cuda", 0)) is None


def test_a_device_that_triton_does_not_reach_is_left_to_torch_and_named(caplog):
    kernels._compiled_on.cache_clear()
    with caplog.at_level("WARNING", logger="distprune"):
        assert kernels._compiled_on(torch.device("xpu", 0)) is None
    assert "xpu:0" in caplog.text and kernels.NO_TRITON in caplog.text


@pytest.mark.thorough
@pytest.mark.slow
def test_kernels_compile_for_devices_that_are_not_here(tmp_path):
    """As they are launched, up to the launch; aligned elements are loaded 16 bytes at a time."""
    script = Path(__file__).parents[1] / "helpers" / "compiled_kernels.py"
    paths = [str(script.parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(tmp_path),
    }
    result = subprocess.run(
        [sys.executable, script, "cuda:90:32=bfloat16,random", "hip:gfx942:64=widened"],
        env=environment, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    if result.returncode and "ptxas" in result.stderr:
        pytest.skip("Triton has no assembler for NVIDIA's devices here")
    assert result.returncode == 0, result.stderr[-3000:]
    found = json.loads(result.stdout)
    names = {"scan_tiles", "pack_tiles", "write_tiles", "correct_runs", "sample_tiles",
             "count_bins"}  # fmt: skip
    for kinds in found.values():
        assert all(names <= set(assembly) for assembly in kinds.values())
    cuda = found["cuda:90:32"]
    for name in ("scan_tiles", "write_tiles"):
        assert "ld.global.v4.b32" in cuda["bfloat16"][name]
        assert "st.global.v2.b32" in cuda["bfloat16"][name]
    assert "global_load_dwordx2" in found["hip:gfx942:64"]["widened"]["scan_tiles"]
