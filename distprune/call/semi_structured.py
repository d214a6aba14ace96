"""``is_semi_structured``: which pruned weights torch's semi-structured sparsity can compress.

Masks are counted over all ranks without gathering any.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from distprune._common.blocks import Pattern
from distprune._common.collectives import Communicator
from distprune._common.process_groups import world
from distprune._common.report_text import table
from distprune.call.grouping import InputDims, input_dims_of, to_pattern
from distprune.call.reading import read_parameters
from distprune.call.replicas import count_live_and_compare
from distprune.call.request import ParameterArguments
from distprune.masks.hook import find_hook
from distprune.selection.candidates import Ranked, candidates_of
from distprune.selection.keys import Order, ScoreKeys, key_range
from distprune.selection.scores import TensorScores
from distprune.selection.tiles import TiledParts, Tiling, rank_tiles
from distprune.shards.parameters import Target, find_places

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


# By backend and dtype: the numbers of rows and columns are multiples of these.
MULTIPLES: dict[str, dict[torch.dtype, tuple[int, int]]] = {
    "cutlass": {
        torch.int8: (16, 128),
        torch.float16: (32, 64),
        torch.bfloat16: (32, 64),
        torch.float32: (32, 32),
    },
    "cusparselt": {
        torch.float8_e4m3fn: (32, 32),
        torch.int8: (32, 32),
        torch.float16: (16, 16),
        torch.bfloat16: (16, 16),
    },
}


def backends_for(shape: Sequence[int], dtype: torch.dtype) -> tuple[str, ...]:
    """The backends that take a matrix of this shape and dtype."""
    if len(shape) != 2 or not all(shape):
        return ()
    return tuple(
        backend
        for backend, by_dtype in MULTIPLES.items()
        if dtype in by_dtype
        and not any(size % of for size, of in zip(shape, by_dtype[dtype], strict=True))
    )


def layout_problem(shape: Sequence[int], dtype: torch.dtype, dims: Sequence[int]) -> str:
    """Why no backend takes a weight; "" if one does.

    Args:
        shape: the shape of the whole weight.
        dtype: the weight's dtype.
        dims: along which its inputs lie; () if that is not known.
    """
    if len(shape) != 2:
        return f"has {len(shape)} dimensions, not 2"
    if tuple(dims) == (0,):
        return "is stored [in, out]: convert its transpose"
    if backends_for(shape, dtype):
        return ""
    accepted = [
        f"{rows} x {columns} ({backend})"
        for backend, by_dtype in MULTIPLES.items()
        for of, (rows, columns) in by_dtype.items()
        if of is dtype
    ]
    if not accepted:
        return f"is of {dtype}, which no backend takes"
    return f"is {shape[0]} x {shape[1]}, no multiple of {' or '.join(accepted)}"


@dataclass(frozen=True)
class SemiStructuredParameter:
    """One pruned parameter, whole.

    Attributes:
        name: fully qualified.
        num_groups: the groups of M neighbours along the inputs; 0 if M does not divide these.
        num_fitting: groups of which at most N elements are kept.
        backends: those of ``torch.sparse.to_sparse_semi_structured`` that take its shape and dtype.
        layout_problem: why none does, or why the inputs lie elsewhere; "" if one does.
    """

    name: str
    num_groups: int
    num_fitting: int
    backends: tuple[str, ...]
    layout_problem: str

    @property
    def fits_pattern(self) -> bool:
        """Whether the whole mask fits N:M."""
        return 0 < self.num_groups == self.num_fitting

    @property
    def fits(self) -> bool:
        """Whether the mask fits N:M, and a backend takes the weight."""
        return self.fits_pattern and not self.layout_problem


@dataclass(frozen=True)
class SemiStructuredReport:
    """What ``is_semi_structured`` found, the same on every rank. True if everything fits.

    Attributes:
        pattern: "N:M".
        parameters: all pruned ones.
    """

    pattern: str
    parameters: tuple[SemiStructuredParameter, ...]

    def __bool__(self) -> bool:
        return all(parameter.fits for parameter in self.parameters)

    def __str__(self) -> str:
        rows = [
            [
                entry.name,
                f"{entry.num_fitting:,} of {entry.num_groups:,}",
                ", ".join(entry.backends) if not entry.layout_problem else "none",
                entry.layout_problem,
            ]
            for entry in self.parameters
        ]
        count = sum(entry.fits for entry in self.parameters)
        total = ["fit", f"{count} of {len(rows)} parameters", "", ""]
        return "\n".join(table(["parameter", self.pattern, "backends", "problem"], rows, total))


def is_semi_structured(
    model: nn.Module,
    *,
    pattern: str = "2:4",
    input_dims: InputDims | None = None,
    group: ProcessGroup | None = None,
) -> SemiStructuredReport:
    """Say which pruned weights ``torch.sparse.to_sparse_semi_structured`` can compress. Collective.

    A weight fits if of every 4 neighbours along its inputs the mask keeps at most 2, and if one of
    torch's two backends takes its dtype and shape: multiples of 32 x 64 (cutlass) or 16 x 16
    (cusparselt) of float16 and bfloat16, 32 x 32 of float32 (cutlass). Nothing is converted, no
    GPU is needed, and no rank gathers a mask. To convert, on a GPU and after ``remove``::

        linear.weight = nn.Parameter(torch.sparse.to_sparse_semi_structured(linear.weight))

    Args:
        model: plain or wrapped.
        pattern: "N:M". The shapes are those for 2:4 whatever it is.
        input_dims: as for ``global_unstructured``. Where the inputs are not known, they are taken
            to lie along the last dimension.
        group: the ranks that take part; every rank by default.

    Returns:
        A report with an entry per pruned parameter, the same on every rank; as a bool, whether
        all of them fit.

    Raises:
        ValueError: a pattern of another form; nothing is pruned; replicas have different masks. On
            every rank.

    Cost: two reads of the masks, and memory for one of float32 and 17 bytes per group; all-reduces
    of 24 bytes per parameter, and of about 50 bytes per group that the sharding cuts.
    """

    def make_arguments() -> ParameterArguments:
        to_pattern(pattern, tiles=False)
        pairs = find_places(model, lambda place: find_hook(*place.pair) is not None)
        if not pairs:
            raise ValueError("nothing is pruned in this model; expected at least one parameter.")
        return ParameterArguments(parameters=pairs, facts=[("pattern", str(pattern))])

    communicator = world(group)
    with communicator.exclusively(), torch.inference_mode(False), torch.no_grad():
        _, targets = read_parameters(make_arguments, communicator)
        count_live_and_compare(targets, False, communicator)
        kept_of = Pattern.parse(pattern).kept_of
        assert kept_of is not None
        n, m = kept_of
        dims = communicator.run(
            lambda: input_dims_of(input_dims, targets),
            lambda found: [
                (f"inputs of {target.label}", str(own))
                for target, own in zip(targets, found, strict=True)
            ],
        )
        counted = [
            i
            for i, target in enumerate(targets)
            if dims[i] and target.shard.numel and target.shard.shape[dims[i][0]] % m == 0
        ]
        fitting = _num_fitting([targets[i] for i in counted], [dims[i] for i in counted], n, m,
                               communicator)  # fmt: skip
    by_position = dict(zip(counted, fitting, strict=True))
    return SemiStructuredReport(
        f"{n}:{m}",
        tuple(
            SemiStructuredParameter(
                target.label,
                target.shard.numel // m if i in by_position else 0,
                by_position.get(i, 0),
                backends_for(target.shard.shape, target.shard.values.dtype),
                layout_problem(target.shard.shape, target.shard.values.dtype, dims[i]),
            )
            for i, target in enumerate(targets)
        ),
    )


def _num_fitting(
    targets: Sequence[Target],
    dims: Sequence[tuple[int, ...]],
    n: int,
    m: int,
    communicator: Communicator,
) -> list[int]:
    """Per parameter, its groups that keep at most n elements: sums of masks over tiles 1 x M."""
    if not targets:
        return []
    keys = key_range(torch.float32, Order.MAGNITUDE)
    sources, shards, tilings = [], [], []
    for target, own in zip(targets, dims, strict=True):
        shard = target.shard
        mask = torch.ones_like(shard.values) if shard.mask is None else shard.mask
        sizes = [1] * len(shard.shape)
        sizes[own[0]] = m
        tilings.append(Tiling(tuple(shard.shape), tuple(sizes)))
        sources.append(ScoreKeys(TensorScores(shard.flat((mask != 0).float())), keys))
        shards.append(replace(shard, mask=None))
    ranked = Ranked(
        candidates_of(shards, sources),
        [target.label for target in targets],
        [target.shard.numel for target in targets],
        keys,
        communicator,
    )
    firsts = [target.shard.replica == 0 for target in targets]
    parts = rank_tiles(TiledParts(ranked, tilings, m, firsts)).ranked.parts

    def count() -> torch.Tensor:
        counts = []
        for part in parts:
            own = part.keys.load(part.counted.start, part.counted.stop).values
            limit = torch.tensor([float(n)], dtype=torch.float64)
            counts.append(int((own <= limit.view(torch.int64)).sum()))
        return torch.tensor(counts, dtype=torch.int64)

    return communicator.reduce(len(parts), count).tolist()
