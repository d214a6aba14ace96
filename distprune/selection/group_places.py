"""Where the groups of a parameter lie in a rank's part of it: whole, or cut by the sharding.

A group (see ``_common/element_groups.py``) has a number, and its elements have places in it::

    a [4, 6] weight, groups of 3 inputs     columns 0 to 3 of it, on one rank of two
      0 0 0 | 1 1 1                           0 0 0 | 1
      2 2 2 | 3 3 3                           2 2 2 | 3       groups 0, 2, 4 and 6 are whole here,
      4 4 4 | 5 5 5                           4 4 4 | 5       and 1, 3, 5 and 7 are cut
      6 6 6 | 7 7 7                           6 6 6 | 7

Parts whose memory is a sequence of whole groups are ranked block by block (:class:`Places.blocks`).
Of all others, the number and the place of each element follow from its index.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from distprune._common.element_groups import GroupRule, Groups, layout_along
from distprune._common.memory import Array
from distprune.selection.candidates import Candidates

# Larger blocks are not ranked in memory.
_MAX_BLOCK = 1 << 22
# Positions whose group numbers, int64, are in memory at a time.
_CHUNK = 1 << 18

# Arithmetic progressions of group numbers: (first, step, how many).
Progressions = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class GroupedParameter:
    """The groups of one whole parameter; the same on all ranks.

    Attributes:
        groups: of the whole parameter.
        num_groups: of the whole parameter.
        rule: that made them.
        shape: of the whole parameter.
        dims: that an output sums over, as for ``layout_along``; () if unknown, which is slower.
    """

    groups: Groups
    num_groups: int
    rule: GroupRule
    shape: tuple[int, ...]
    dims: tuple[int, ...]

    @property
    def is_trivial(self) -> bool:
        """Whether no group loses an element."""
        return not self.groups.num_pruned or not self.num_groups


@dataclass(frozen=True)
class Places:
    """Where the groups of a parameter lie in a local part.

    Attributes:
        local: groups of the elements in ``blocks``, which lie there one after the other.
        blocks: flat positions of whole blocks of whole groups.
        rest: ranges of all other flat positions.
        cut: numbers of groups of which some elements are here, and some are not; ascending.
        whole: numbers of groups in ``rest`` that are whole all the same; ascending.
    """

    local: Groups
    blocks: range
    rest: tuple[range, ...]
    cut: Array
    whole: Array


NOWHERE = Places(
    Groups(1, 1, 1, 0), range(0), (), np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
)


def places_of(part: Candidates, parameter: GroupedParameter) -> Places:
    """Find the groups of a local part. Local; reads no element.

    Cost: nothing where the part is a sequence of whole groups; otherwise some passes over the
    indices of the other elements, and 8 bytes for each group of the parameter.
    """
    everything = range(part.num_local)
    nothing: Array = np.zeros(0, dtype=np.int64)
    groups = parameter.groups
    if not part.num_local:
        return NOWHERE
    if parameter.is_trivial:
        return Places(NOWHERE.local, range(0), (everything,), nothing, nothing)
    local = _groups_of_box(part, parameter)
    if local is not None and local.block <= _MAX_BLOCK:
        return Places(local, everything, (), nothing, nothing)
    blocks, rest = range(0), [everything]
    if part.index.start is not None and groups.block <= _MAX_BLOCK:
        start = part.index.start
        first = min(-start % groups.block, part.num_local)
        last = first + (part.num_local - first) // groups.block * groups.block
        blocks = range(first, last)
        rest = [r for r in (range(first), range(last, part.num_local)) if r]
    numbers = np.zeros(parameter.num_groups, dtype=np.int64) if rest else nothing
    for span in spans_of_ranges(rest):
        own, _ = number_and_place(part, groups, span)
        first = int(own.min())
        counts = np.bincount(own - first)
        numbers[first : first + len(counts)] += counts
    cut = np.flatnonzero((numbers > 0) & (numbers < groups.size))
    return Places(groups, blocks, tuple(rest), cut, np.flatnonzero(numbers == groups.size))


def _groups_of_box(part: Candidates, parameter: GroupedParameter) -> Groups | None:
    """The groups of a part that is a box in the parameter, if none of them is cut; else None."""
    index, shape, dims = part.index, parameter.shape, parameter.dims
    sizes = [len(rows) for rows in index.coordinates]
    if (
        not dims
        or index.offset
        or index.dims != tuple(range(len(shape)))
        or math.prod(sizes) != part.num_local
    ):
        return None
    inputs = dims[0]
    rule, along = parameter.rule, index.coordinates[inputs]
    if rule.kept_of is not None:
        m = rule.kept_of[1]
        if along.start % m or len(along) % m:
            return None
    elif any(sizes[dim] != shape[dim] for dim in dims):
        return None
    layout = layout_along("", sizes, dims)
    return rule.groups(part.num_local, layout, parameter.groups.num_pruned)


def spans_of_ranges(ranges: Iterable[range]) -> Iterator[range]:
    """Chunks of ranges of positions."""
    for positions in ranges:
        for start in range(positions.start, positions.stop, _CHUNK):
            yield range(start, min(start + _CHUNK, positions.stop))


def number_and_place(part: Candidates, groups: Groups, span: range) -> tuple[Array, Array]:
    """The group of each element of a span, and its place in it; int64."""
    index = part.index(torch.arange(span.start, span.stop)).numpy()
    block, inside = np.divmod(index, groups.block)
    if groups.columns == 1:
        return block, inside
    step, inside = np.divmod(inside, groups.stride)
    column, inside = np.divmod(inside, groups.kernel)
    return block * groups.columns + column, step * groups.kernel + inside


def to_progressions(numbers: Array) -> Progressions:
    """Ascending numbers as few arithmetic progressions, so that regular ones need few words."""
    if len(numbers) < 2:
        return tuple((int(number), 1, 1) for number in numbers)
    steps = np.diff(numbers)
    # Runs of equal steps. A number that ends one progression does not begin another.
    edges = np.flatnonzero(np.diff(steps)) + 1
    found: list[tuple[int, int, int]] = []
    next_free = 0
    for first, last in itertools.pairwise([0, *edges.tolist(), len(steps)]):
        # Steps [first, last) join numbers [first, last].
        start = max(first, next_free)
        count = last - start + 1
        if count > 1:
            found.append((int(numbers[start]), int(steps[first]), count))
            next_free = start + count
    if next_free < len(numbers):
        found += [(int(number), 1, 1) for number in numbers[next_free:]]
    return tuple(found)


def union(progressions: Sequence[Progressions]) -> Array:
    """All numbers of some progressions, ascending, each once."""
    arrays = [
        first + step * np.arange(count, dtype=np.int64)
        for several in progressions
        for first, step, count in several
    ]
    return np.unique(np.concatenate(arrays)) if arrays else np.zeros(0, dtype=np.int64)
