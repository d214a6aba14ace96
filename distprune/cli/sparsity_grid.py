"""Sparsity by layer and by kind of weight: the numbers of a picture that fits a page."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from distprune._common.natural_order import natural_key
from distprune.files.selecting.kinds import Role, role_of, short_names

OTHERS = "others"


@dataclass
class Count:
    """Elements, and how many of them are zero."""

    num_elements: int = 0
    num_zero: int = 0

    def add(self, num_elements: int, num_zero: int) -> None:
        self.num_elements += num_elements
        self.num_zero += num_zero

    @property
    def share(self) -> float:
        """Of zeros, in [0, 1]; NaN of nothing."""
        return self.num_zero / self.num_elements if self.num_elements else float("nan")


@dataclass
class Row:
    """A layer, or a tensor that is in none.

    Attributes:
        label: the number of the layer, or the name of the tensor.
        stack: of the layer, as short as tells it from others; "" of a tensor that is in none.
        cells: by kind of weight; empty for a tensor that is in no layer.
        total: of the row.
    """

    label: str
    stack: str
    cells: dict[str, Count] = field(default_factory=dict)
    total: Count = field(default_factory=Count)


@dataclass(frozen=True)
class Grid:
    """A table of sparsity.

    Attributes:
        kinds: the columns, as short as tells them apart.
        layers: the rows, in order of stack and layer.
        outside: rows of tensors that are in no layer.
        totals: of the layers, by kind.
        total: of everything.
    """

    kinds: tuple[str, ...]
    layers: tuple[Row, ...]
    outside: tuple[Row, ...]
    totals: dict[str, Count]
    total: Count


def make_grid(
    tensors: Iterable[tuple[str, int, int]], max_kinds: int = 32, max_outside: int = 24
) -> Grid:
    """Add tensors up.

    All experts of a layer are one cell. Where there are too many kinds, or tensors in no layer, the
    largest have a column or a row of their own, and the rest share one.

    Args:
        tensors: name, elements and zeros of each.
        max_kinds: columns at most.
        max_outside: rows at most of tensors that are in no layer.
    """
    placed = [(role_of(name), name, elements, zeros) for name, elements, zeros in tensors]
    inside = [tensor for tensor in placed if tensor[0].layer]
    sizes: dict[str, int] = {}
    for place, _, elements, _ in inside:
        sizes[place.kind] = sizes.get(place.kind, 0) + elements
    kinds = _names(sizes, max_kinds)
    stacks = short_names(place.stack for place, *_ in inside)
    layers: dict[tuple[object, ...], Row] = {}
    totals: dict[str, Count] = {}
    total = Count()
    for place, _, elements, zeros in sorted(inside, key=lambda tensor: _order(tensor[0])):
        label = ".".join(map(str, place.layer))
        row = layers.setdefault((place.stack, place.layer), Row(label, stacks[place.stack]))
        kind = kinds[place.kind]
        counts = row.cells.setdefault(kind, Count()), totals.setdefault(kind, Count())
        for count in (*counts, row.total, total):
            count.add(elements, zeros)
    alone = [(name, elements, zeros) for place, name, elements, zeros in placed if not place.layer]
    names = _names({name: elements for name, elements, _ in alone}, max_outside, shorten=False)
    outside: dict[str, Row] = {}
    for name, elements, zeros in alone:
        label = names[name].removesuffix(".weight")
        for count in (outside.setdefault(label, Row(label, "")).total, total):
            count.add(elements, zeros)
    columns = sorted(totals, key=lambda kind: (kind == OTHERS, natural_key(kind)))
    rows = sorted(outside.values(), key=lambda row: row.label == OTHERS)
    return Grid(tuple(columns), tuple(layers.values()), tuple(rows), totals, total)


def _names(sizes: dict[str, int], most: int, *, shorten: bool = True) -> dict[str, str]:
    """The name of each; all but the largest are "others"."""
    shown = list(sizes)
    if len(sizes) > most:
        shown = sorted(sizes, key=lambda name: (-sizes[name], name))[: most - 1]
    names = short_names(shown) if shorten else {name: name for name in shown}
    return {name: names.get(name, OTHERS) for name in sizes}


def _order(place: Role) -> tuple[object, ...]:
    return natural_key(place.stack), place.stack, place.layer
