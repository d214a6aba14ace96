"""``kernels.FusedKernels`` by Triton: scores are read once, for many parameters in one launch.

The operations of device.py read and write whole chunks of keys and flags one after the other. Here
a program has a block of scores in registers while it makes the keys, counts them, writes the
drafted mask, and stores what lies in the interval:

    tile 0    | block | block | block |      collected: [k k k . . . . .]    in the order of
    tile 1    | block | block | block |                 [k . . . . . . .]    their positions
    tile 2    | block | bl                              [k k k k k k k k] k  too many
                                                            |  the counts come to the host
                                                            v
                                                        [k k k k | k k k k k]    packed

Each tile has room for somewhat more elements than are expected. The scores of a tile that has too
many are read again. Nothing is waited for before all tiles are launched.

A sample is drawn, and keys are counted in bins, on the device too: only counts come to the host.

Cost: per element, its score is read, and the mask in force if there is one; a drafted mask is
written. Memory: the room of the tiles, and what is packed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import triton.language as tl
from torch import Tensor

from distprune.base import memory
from distprune.base.mask_values import bits_of_one
from distprune.base.memory import Array, Runs, Scratch, arrays_on_host
from distprune.selection import device as operations
from distprune.selection import triton_source as source
from distprune.selection import triton_tables as tables
from distprune.selection.candidates import Candidates, ChunkScan, Collected, Cut, Draw, Interval
from distprune.selection.keys import Order, ScoreKeys, key_range
from distprune.selection.scores import TensorScores
from distprune.selection.triton_tables import Kind, Piece, Tiles, numbered
from distprune.shards.geometry import IndexMap

# Blocks of BLOCK elements that a program writes at a time, with a warp for each. A program that
# scans has one warp, whose threads need not wait for each other.
_WRITTEN = 4
# Blocks of BLOCK elements that a program samples, with four warps.
_SAMPLED = 16
# Collected elements that a program moves or corrects.
_FEW, _RUN = 256, 1 << 14
_TYPES = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}
_ORDERS = {Order.MAGNITUDE: 0, Order.ASCENDING: 1, Order.DESCENDING: -1}

takes = tables.takes
is_in_memory = tables.is_in_memory


def scan(
    parts: Sequence[Candidates],
    chunks: Sequence[tuple[int, range]],
    pivots: Sequence[int],
    interval: Interval | None,
    outs: Sequence[Tensor] | None,
    expected_share: float,
) -> list[ChunkScan]:
    others = [p for p in pivots if interval is None or p not in (interval[0] - 1, interval[1])]
    if rest := others[source.MOST_PIVOTS :]:
        first = [pivot for pivot in pivots if pivot not in rest]
        firsts = scan(parts, chunks, first, interval, outs, expected_share)
        rests = scan(parts, chunks, rest, None, None, expected_share)
        order = [[*first, *rest].index(pivot) for pivot in pivots]
        return [
            replace(one, counts=[[*one.counts, *other.counts][i] for i in order])
            for one, other in zip(firsts, rests, strict=True)
        ]
    launches = [
        _Scan.launch(kind, pieces, others, interval, expected_share)
        for kind, pieces in _launches(parts, chunks, outs)
    ]
    results: dict[int, ChunkScan] = {}
    for launch, counts in zip(launches, arrays_on_host([s.counts for s in launches]), strict=True):
        totals = launch.tiles.sums(counts)
        keys, positions = launch.packed(counts[:, 0], parts)
        end = 0
        for (number, position, span), (num_inside, num_below, *row) in zip(
            launch.chunks, totals.tolist(), strict=True
        ):
            by_pivot = dict(zip(others, row, strict=False))
            collected = None
            if interval is not None:
                by_pivot[interval[0] - 1] = num_below
                by_pivot[interval[1]] = num_below + num_inside
                here = slice(end, end := end + num_inside)
                is_counted = span.start in parts[position].counted
                collected = Collected(span, positions[here], keys[here], is_counted, num_inside)
            results[number] = ChunkScan([by_pivot[p] for p in pivots], num_below, collected)
    return [results[number] for number in range(len(chunks))]


def write(
    parts: Sequence[Candidates],
    chunks: Sequence[tuple[int, range]],
    cuts: Sequence[tuple[int, Cut]],
    outs: Sequence[Tensor],
) -> list[int]:
    totals: dict[torch.device, Tensor] = {}
    for kind, pieces in _launches(parts, chunks, outs):
        tiles = tables.tiles_of(pieces)
        ends = []
        for piece in pieces:
            end = tables.end_of_ties(piece.part, *_cut_at(cuts, piece.position, piece.span))
            assert end is not None, "can_cut tells"
            ends.append(end)
        thresholds = np.array([cuts[piece.position][1].threshold for piece in pieces])
        tiles.table[:, tables.THRESHOLD] = thresholds[tiles.piece]
        tiles.table[:, tables.END] = np.array(ends, dtype=np.int64)[tiles.piece] - tiles.first
        numbers, table = _on_device(kind.device, [kind.seed], tiles.table)
        counts = torch.empty(len(tiles.table), dtype=torch.int32, device=kind.device)
        with _launching_on(kind.device):
            source.write_tiles[(len(tiles.table),)](
                table, numbers, counts, _format(kind), _WRITTEN * tables.BLOCK, num_warps=_WRITTEN
            )
        is_counted = [piece.span.start in piece.part.counted for piece in pieces]
        _add(totals, counts, [p.position for p in pieces], is_counted, tiles.piece, len(parts))
    return _per_part(totals, parts)


def can_cut(part: Candidates, position: int, cut: Cut) -> bool:
    return tables.end_of_ties(part, position, range(0), cut) is not None


def prune_collected(
    parts: Sequence[Candidates],
    collected: Mapping[int, Sequence[Collected]],
    cut: Cut,
    outs: Sequence[Tensor],
) -> list[int]:
    totals: dict[torch.device, Tensor] = {}
    groups: dict[tuple[torch.device, torch.dtype, int], list[tuple[int, Collected]]] = {}
    for position, chunks in collected.items():
        for chunk in chunks:
            group = (chunk.keys.device, chunk.keys.dtype, outs[position].itemsize)
            groups.setdefault(group, []).append((position, chunk))
    for (device, dtype, mask_bytes), members in groups.items():
        rows = []
        for position, chunk in members:
            end = tables.end_of_ties(parts[position], position, chunk.span, cut)
            out = outs[position].data_ptr() + chunk.span.start * mask_bytes
            addresses = [chunk.keys.data_ptr(), chunk.positions.data_ptr(), out]
            rows.append([*addresses, chunk.keys.numel(), cut.threshold, end])
        table = np.array(rows, dtype=np.int64)
        member, number = numbered(-(-table[:, 3] // _RUN))
        first = number * _RUN
        table = table[member]
        table[:, 0] += first * dtype.itemsize
        table[:, 1] += first * 4
        table[:, 3] = np.minimum(_RUN, table[:, 3] - first)
        _, on_device = _on_device(device, [], table)
        counts = torch.empty(len(table), dtype=torch.int32, device=device)
        with _launching_on(device):
            source.correct_runs[(len(table),)](
                on_device, counts, _TYPES[dtype.itemsize], _TYPES[mask_bytes], _FEW
            )
        is_counted = [chunk.is_counted for _, chunk in members]
        _add(totals, counts, [p for p, _ in members], is_counted, member, len(parts))
    return _per_part(totals, parts)


def sample(
    parts: Sequence[Candidates], draws: Sequence[Draw], dead: int, salt: int
) -> list[Tensor]:
    found = []
    groups: dict[tuple[Kind, int], list[tuple[Piece, Draw]]] = {}
    for draw in draws:
        part = parts[draw.position]
        piece = Piece.of(0, draw.position, range(part.num_local), part, None)
        groups.setdefault((piece.kind, draw.length), []).append((piece, draw))
    for (kind, length), members in groups.items():
        rows = np.array(
            [
                [*piece.addresses[:2], draw.start, draw.num_drawn * length, 0, 0, draw.num_runs,
                 draw.num_drawn]
                for piece, draw in members
            ],
            dtype=np.int64,
        )  # fmt: skip
        sizes, block = rows[:, tables.LENGTH], _SAMPLED * tables.BLOCK
        member, number = numbered(-(-sizes // block))
        first = number * block
        table = rows[member]
        table[:, tables.LENGTH] = np.minimum(block, sizes[member] - first)
        table[:, tables.FIRST] = first
        table[:, tables.PLACE] = (np.cumsum(sizes) - sizes)[member] + first
        numbers, on_device = _on_device(kind.device, [kind.seed, dead, salt], table)
        keys = torch.empty(int(sizes.sum()), dtype=kind.keys.dtype, device=kind.device)
        with _launching_on(kind.device):
            source.sample_tiles[(len(table),)](
                on_device, numbers, keys, _format(kind), length, block
            )
        found.append(keys)
    return found


# Programs that count keys, each in bins of its own; and the keys of a block.
_COUNTING, _COUNTED = 512, 1024
# So many ties in so few bins would wait for each other.
_CROWDED, _FEW_BINS = 1 << 20, 8


def histogram(keys: Tensor, low: int, high: int, shift: int) -> Tensor:
    first = low >> shift
    num_bins = (high >> shift) - first + 1
    if shift == 0 and num_bins <= _FEW_BINS and keys.numel() > _CROWDED:
        return torch.stack([torch.count_nonzero(keys == key) for key in range(low, high + 1)])
    num_programs = max(1, min(_COUNTING, -(-keys.numel() // _COUNTED)))
    row = np.zeros((0,), dtype=np.int64)
    numbers, _ = _on_device(keys.device, [keys.numel(), low, high, shift, first, num_bins], row)
    counts = torch.zeros((num_programs, num_bins), dtype=torch.int32, device=keys.device)
    with _launching_on(keys.device):
        source.count_bins[(num_programs,)](keys, numbers, counts, _COUNTED)
    return counts.sum(0)


@dataclass(frozen=True)
class _Scan:
    """A launch whose counts have not been waited for.

    Attributes:
        kind: of the pieces.
        chunks: per piece, its number, the position of its part, and its span ...
        outs: ... and the mask of the part.
        tiles: of the pieces.
        numbers: the table of numbers that the launch read.
        counts: int32 [tiles, slots], on the device.
        keys, positions: what the tiles collected, with gaps.
    """

    kind: Kind
    chunks: list[tuple[int, int, range]]
    outs: list[Tensor | None]
    tiles: Tiles
    numbers: Tensor
    counts: Tensor
    keys: Tensor
    positions: Tensor

    @classmethod
    def launch(
        cls,
        kind: Kind,
        pieces: Sequence[Piece],
        pivots: Sequence[int],
        interval: Interval | None,
        expected_share: float,
    ) -> _Scan:
        tiles = tables.tiles_of(pieces)
        tiles.table[:, tables.FIRST] = tiles.first
        if interval is not None:
            expected = expected_share * tiles.lengths
            room = (1.25 * expected + 4 * np.sqrt(expected) + 16).astype(np.int64)
            tiles.table[:, tables.CAPACITY] = np.minimum(room, tiles.lengths)
            ends = np.cumsum(tiles.table[:, tables.CAPACITY])
            tiles.table[:, tables.PLACE] = ends - tiles.table[:, tables.CAPACITY]
        size = int(tiles.table[:, tables.CAPACITY].sum())
        numbers, table = _on_device(
            kind.device, [kind.seed, *(interval or (0, 0)), *pivots], tiles.table
        )
        slots = 1 << (1 + len(pivots)).bit_length()
        counts = torch.empty((len(tiles.table), slots), dtype=torch.int32, device=kind.device)
        keys = torch.empty(size, dtype=kind.keys.dtype, device=kind.device)
        positions = torch.empty(size, dtype=torch.int32, device=kind.device)
        drafts = interval is not None and pieces[0].out is not None
        with _launching_on(kind.device):
            source.scan_tiles[(len(tiles.table),)](
                table, numbers, counts, keys, positions, _format(kind), len(pivots), slots,
                interval is not None, drafts, tables.BLOCK, num_warps=1,
            )  # fmt: skip
        chunks = [(piece.number, piece.position, piece.span) for piece in pieces]
        outs = [piece.out for piece in pieces]
        return cls(kind, chunks, outs, tiles, numbers, counts, keys, positions)

    def packed(self, number: Array, parts: Sequence[Candidates]) -> tuple[Tensor, Tensor]:
        """Keys and positions without gaps; ``number`` of each tile."""
        capacity = self.tiles.table[:, tables.CAPACITY]
        target = np.cumsum(number) - number
        keys = torch.empty(int(number.sum()), dtype=self.keys.dtype, device=self.keys.device)
        positions = torch.empty(keys.numel(), dtype=torch.int32, device=keys.device)
        fits = (number > 0) & (number <= capacity)
        if fits.any():
            rows = np.stack([self.tiles.table[:, tables.PLACE], target, number], axis=1)[fits]
            _, table = _on_device(keys.device, [], rows)
            with _launching_on(keys.device):
                source.pack_tiles[(len(rows),)](
                    table, self.keys, self.positions, keys, positions, _FEW
                )
        crowded = number > capacity
        if crowded.any():
            self._read_again(crowded, number, target, parts, keys, positions)
        return keys, positions

    def _read_again(
        self,
        crowded: Array,
        number: Array,
        target: Array,
        parts: Sequence[Candidates],
        keys: Tensor,
        positions: Tensor,
    ) -> None:
        """Collect what the tiles that had too little room hold."""
        pieces = [
            Piece.of(number, position, span, parts[position], out)
            for (number, position, span), out in zip(self.chunks, self.outs, strict=True)
        ]
        rows = tables.tiles_of(pieces).table
        rows[:, tables.FIRST] = self.tiles.first
        rows[:, tables.PLACE], rows[:, tables.CAPACITY] = target, number
        rows = rows[crowded]
        _, table = _on_device(keys.device, [], rows)
        counts = torch.empty((len(rows), 2), dtype=torch.int32, device=keys.device)
        with _launching_on(keys.device):
            source.scan_tiles[(len(rows),)](
                table, self.numbers, counts, keys, positions, _format(self.kind), 0, 2, True, False,
                tables.BLOCK, num_warps=1,
            )  # fmt: skip


def _launches(
    parts: Sequence[Candidates],
    chunks: Sequence[tuple[int, range]],
    outs: Sequence[Tensor] | None,
) -> Iterator[tuple[Kind, list[Piece]]]:
    """What to launch together: what is in memory, by kind; computed scores piece by piece."""
    kinds: dict[Kind, list[Piece]] = {}
    for number, (position, span) in enumerate(chunks):
        part = parts[position]
        piece = Piece.of(number, position, span, part, None if outs is None else outs[position])
        if not is_in_memory(part):
            yield piece.kind, [piece]
        else:
            kinds.setdefault(piece.kind, []).append(piece)
    yield from kinds.items()


def _format(kind: Kind) -> source.Format:
    """What to compile for."""
    keys = kind.keys
    is_random = kind.scores is None
    size = keys.dtype.itemsize if kind.scores is None else kind.scores.itemsize
    one = 1 if kind.masks is torch.bool else int(bits_of_one(kind.masks))
    return source.Format(
        scores=_TYPES[size],
        is_widened=kind.scores is not None and size < keys.dtype.itemsize,
        magnitudes=torch.iinfo(keys.dtype).max,
        largest=keys.largest_number,
        order=0 if is_random else _ORDERS[keys.order],
        is_random=is_random,
        keys=_TYPES[keys.dtype.itemsize],
        has_live=kind.has_live,
        masks=_TYPES[kind.masks.itemsize],
        is_bool=kind.masks is torch.bool,
        one=one,
        is_aligned=kind.is_aligned,
    )


def _cut_at(cuts: Sequence[tuple[int, Cut]], position: int, span: range) -> tuple[int, range, Cut]:
    in_list, cut = cuts[position]
    return in_list, span, cut


def _on_device(device: torch.device, numbers: Sequence[int], table: Array) -> tuple[Tensor, Tensor]:
    """Numbers and a table, copied together; the host does not wait."""
    # Of even length, so that the table is always aligned to the same number of bytes.
    head = np.array([*numbers, *[0] * (len(numbers) % 2)], dtype=np.int64)
    both = memory.moved(torch.from_numpy(np.concatenate([head, table.ravel()])), device)
    return both[: head.size], both[head.size :]


def _launching_on(where: torch.device) -> contextlib.AbstractContextManager[object]:
    """Launch kernels on this device."""
    if where.type == "cpu":  # by the interpreter
        return contextlib.nullcontext()
    context: contextlib.AbstractContextManager[object] = torch.get_device_module(where).device(
        where
    )
    return context


def _add(
    totals: dict[torch.device, Tensor],
    counts: Tensor,
    positions: Sequence[int],
    is_counted: Sequence[bool],
    member: Array,
    num_parts: int,
) -> None:
    """Add counts of tiles to the totals of their parts, without waiting."""
    device = counts.device
    if device not in totals:
        totals[device] = torch.zeros(num_parts + 1, dtype=torch.int64, device=device)
    # What others count goes to the last place.
    places = np.where(is_counted, positions, num_parts)[member]
    _, index = _on_device(device, [], places.astype(np.int64))
    totals[device].index_add_(0, index, counts.long())


def _per_part(totals: Mapping[torch.device, Tensor], parts: Sequence[Candidates]) -> list[int]:
    """Of each part the total on its device. Waits once for each device."""
    rows = {device: total.tolist() for device, total in totals.items()}
    return [rows[part.device][i] if part.device in rows else 0 for i, part in enumerate(parts)]


_NUM_ELEMENTS = 20_011  # some blocks, and a part of one


def check_on(where: torch.device) -> None:
    """Rank some thousand elements on a device, by Triton's kernels and by torch's operations.

    Among the scores are ties, zeros of both signs, denormals and infinities; some elements are
    pruned already.

    Raises:
        RuntimeError: the results differ.
        Exception: of any type, if kernels cannot be compiled or launched there.
    """
    part = _candidates(where)
    span = range(part.num_local)
    numbers = sorted(part.keys.load(0, part.num_local).values.tolist())
    low, pivot, high = (numbers[part.num_local * i // 10] for i in (3, 5, 6))
    cut = Cut(pivot, 0, part.num_local // 2)

    drafts = [torch.empty(part.num_local, dtype=torch.bool, device=where) for _ in range(2)]
    scratch = Scratch()
    expected = operations.scan(part, span, [pivot], (low, high), drafts[0], scratch)
    (found,) = scan([part], [(0, span)], [pivot], (low, high), [drafts[1]], 0.3)
    _compare("counts", [*map(int, expected.counts)], [*map(int, found.counts)])
    _compare("numbers below", int(expected.num_below), int(found.num_below))
    ours, theirs = _collected(found.collected), _collected(expected.collected)
    _compare("positions", theirs.positions.tolist(), ours.positions.tolist())
    _compare("keys", theirs.keys.tolist(), ours.keys.tolist())
    _compare(
        "histograms",
        operations.histogram(theirs.keys, low, high, 9).tolist(),
        histogram(ours.keys, low, high, 9).tolist(),
    )
    (sampled,) = sample([part], [Draw(0, 0, 1, part.num_local, part.num_local)], high, 1)
    whole = operations.gather(part, Runs(0, part.num_local, 1, torch.arange(part.num_local)), high)
    _compare("sampled keys", whole.tolist(), sampled.tolist())
    _compare("drafted masks", drafts[0].tolist(), drafts[1].tolist())

    number = operations.prune_collected(part, 0, cut, theirs, drafts[0])
    (pruned,) = prune_collected([part], {0: [ours]}, cut, [drafts[1]])
    _compare("numbers pruned", int(number), int(pruned))
    _compare("masks", drafts[0].tolist(), drafts[1].tolist())

    written: Tensor = torch.empty_like(drafts[1])
    write([part], [(0, span)], [(0, cut)], [written])
    _compare("written masks", drafts[0].tolist(), written.tolist())


def _candidates(where: torch.device) -> Candidates:
    index = torch.arange(_NUM_ELEMENTS)
    values = ((index * 7919) % 1009 - 504).float() / 64
    values[::97] *= 1e-42
    values[::1013] = float("inf")
    values[::1511] = -0.0
    live = (index * 31) % 7 != 0
    keys = ScoreKeys(TensorScores(values.to(where)), key_range(torch.float32, Order.MAGNITUDE))
    size = len(index)
    positions = IndexMap((range(size),), (size,), 0)
    return Candidates(keys, live.to(where), positions, range(size), size, size, where)


def _collected(collected: Collected | None) -> Collected:
    assert collected is not None, "an interval was given"
    return collected


def _compare(what: str, expected: object, found: object) -> None:
    if expected != found:
        raise RuntimeError(f"{what} differ from those of torch's operations")
