"""What is tried on a device before Triton's kernels are used there."""

from __future__ import annotations

import torch
from torch import Tensor

from distprune._common.memory import Scratch
from distprune.selection import device as operations
from distprune.selection import triton_kernels as kernels
from distprune.selection.candidates import Candidates, Collected, Cut
from distprune.selection.keys import Order, ScoreKeys, key_range
from distprune.selection.scores import TensorScores
from distprune.shards.geometry import IndexMap

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
    (found,) = kernels.scan([part], [(0, span)], [pivot], (low, high), [drafts[1]], 0.3)
    _compare("counts", [*map(int, expected.counts)], [*map(int, found.counts)])
    _compare("numbers below", int(expected.num_below), int(found.num_below))
    ours, theirs = _collected(found.collected), _collected(expected.collected)
    _compare("positions", theirs.positions.tolist(), ours.positions.tolist())
    _compare("keys", theirs.keys.tolist(), ours.keys.tolist())
    _compare("drafted masks", drafts[0].tolist(), drafts[1].tolist())

    number = operations.prune_collected(part, 0, cut, theirs, drafts[0])
    (pruned,) = kernels.prune_collected([part], {0: [ours]}, cut, [drafts[1]])
    _compare("numbers pruned", int(number), int(pruned))
    _compare("masks", drafts[0].tolist(), drafts[1].tolist())

    written: Tensor = torch.empty_like(drafts[1])
    kernels.write([part], [(0, span)], [(0, cut)], [written])
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
