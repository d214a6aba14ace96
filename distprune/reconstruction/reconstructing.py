"""``reconstruct``: least squares for the weights that a mask has kept, on any sharding."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from distprune.base.report_text import CallReport, table
from distprune.call.reading import read_parameters
from distprune.call.replicas import count_live_and_compare
from distprune.call.request import ParameterArguments
from distprune.masks.hook import refresh_products
from distprune.ranks.collectives import Communicator
from distprune.ranks.process_groups import world
from distprune.reconstruction.solving import STEPS, Block, blocks_of, least_squares
from distprune.shards.shard import Shard
from distprune.statistics.gram import GramBlock, GramMatrices, with_damping
from distprune.statistics.layers import WeightLayout

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# Elements of the rows that are solved at a time: six temporaries of so many.
_CPU_CHUNK = 1 << 21
_DEVICE_CHUNK = 1 << 25


@dataclass(frozen=True)
class ReconstructedParameter:
    """One parameter, whole.

    Attributes:
        name: fully qualified if the parameter came from ``select``.
        num_elements, num_pruned: of the whole parameter.
        error_before: |(w0 - w) X|^2 / |w0 X|^2, where w was masked and not changed yet ...
        error_after: ... and with the new w. 0 if w0 X is zero.
        damping: what was added to the diagonal of the Gram matrix; of several matrices, to that
            with the largest.
    """

    name: str
    num_elements: int
    num_pruned: int
    error_before: float
    error_after: float
    damping: float


@dataclass(frozen=True)
class ReconstructionReport(CallReport):
    """What ``reconstruct`` did. ``print`` it on one rank; it is the same on all.

    Attributes:
        parameters: an entry for each parameter, in the caller's order.
        steps: of conjugate gradients.
        damping: as it was asked for: in units of the mean of each diagonal.
        num_ranks: the ranks that took part.
        num_collectives: collectives that this rank took part in.
        bytes_sent: the payload of these, per rank.
        seconds: wall time on this rank.
    """

    parameters: tuple[ReconstructedParameter, ...]
    steps: int
    damping: float
    num_ranks: int
    num_collectives: int
    bytes_sent: int
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    def __str__(self) -> str:
        rows = [
            [
                entry.name,
                f"{entry.num_pruned / max(1, entry.num_elements):.2%}",
                f"{entry.error_before:.4g}",
                f"{entry.error_after:.4g}",
            ]
            for entry in self.parameters
        ]
        before, after = (
            sum(getattr(entry, name) for entry in self.parameters) / max(1, len(self.parameters))
            for name in ("error_before", "error_after")
        )
        lines = table(
            ["parameter", "pruned", "error before", "error after"],
            rows,
            ["mean", "", f"{before:.4g}", f"{after:.4g}"],
        )
        facts = [f"least squares, {self.steps} steps, damping {self.damping:g}", *self._cost()]
        return "\n".join([*lines, "; ".join(facts)])


def reconstruct(
    parameters: Iterable[tuple[nn.Module, str]],
    grams: GramMatrices,
    *,
    damping: float = 0.01,
    steps: int = STEPS,
    dtype: torch.dtype = torch.float64,
    group: ProcessGroup | None = None,
) -> ReconstructionReport:
    """Move the kept weights so that the outputs of each layer change least. Collective.

    prune.global_unstructured(parameters, prune.L1Unstructured, scores, amount=0.6)
    report = prune.reconstruct(parameters, grams)

    For each output row w0 of each weight: the row w that minimises

        |(w0 - w) X|^2 + d |w0 - w|^2

    over all w that are zero where the mask in force is, for the inputs X of the calibration data.
    w0 is what the parameter holds, under the mask too (``weight_orig``): right after a pruning the
    weights before it. Masks do not change. What is pruned becomes +0 in ``weight_orig``, so that a
    second pruning and ``reconstruct`` begin with the weights that this one gave.

    Any mask will do, and any wrapper: DDP, FSDP1, FSDP2, HSDP, tensor parallelism and their
    combinations give what one process gives, to 1e-5 of the layer's largest weight.

    Args:
        parameters: (module, name) pairs, pruned or not, the same on every rank; each has a Gram
            matrix. One that is not pruned stays as it is.
        grams: of the weights that the calibration data went through.
        damping: d, in units of the mean of the Gram matrix's diagonal. 0 needs regular matrices.
        steps: of conjugate gradients; see reconstruction.solving.[Note: least squares].
        dtype: in which it computes: float64, or float32, which is faster on an accelerator whose
            float64 is slow. Sharded and whole models then agree to about 1e-3 only.
        group: the ranks that take part; every rank by default. Those of ``grams``.

    Returns:
        A report with the relative error of each layer's outputs before and after; the same on
        every rank.

    Raises:
        ValueError: a parameter that is none of those of ``grams``; a damping or a number of steps
            out of range; with damping 0 a singular Gram matrix; weights that are not finite. On
            every rank; every parameter is as it was.
        RuntimeError: Gram matrices that were forgotten.
        NotImplementedError: dtypes other than real floating-point ones; parameters that DeepSpeed
            or a registered layout pruned; as ``global_unstructured``.

    Cost: 2 x elements x inputs operations for each step, shared by the ranks. Memory for one
    matrix [inputs, inputs] and a copy of what this rank has of the parameters, for a moment.
    Sent: the Gram matrices once (an all-gather of each); rows that a rank has alone need no more,
    as under ``fully_shard``. Rows that the sharding cuts (FSDP1's boundaries, ``Shard(1)``,
    row-wise tensor parallelism) and rows of replicas are shared among the ranks and summed:
    8 bytes per element where every rank has the row, else 24; half of it in float32.

    Source: the problem is that of Optimal Brain Surgeon and SparseGPT (arXiv 2301.00774) for a
    mask that is given; conjugate gradients on the support as in ALPS, arXiv 2406.07831.
    """
    started = time.perf_counter()
    communicator = world(group)
    pairs: list[tuple[nn.Module, str]] = []

    def arguments() -> ParameterArguments:
        pairs.extend(parameters)
        if not isinstance(grams, GramMatrices):
            raise TypeError(f"grams is a {type(grams).__name__}; expected GramMatrices.")
        if not 0 <= damping < float("inf"):
            raise ValueError(f"damping={damping!r}; expected a finite number >= 0, such as 0.01.")
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise ValueError(f"steps={steps!r}; expected a whole number >= 1.")
        if dtype not in (torch.float32, torch.float64):
            raise ValueError(f"dtype={dtype}; expected torch.float64 or torch.float32.")
        facts = [("damping", repr(damping)), ("steps", repr(steps)), ("dtype", str(dtype))]
        return ParameterArguments(parameters=pairs, facts=facts)

    with torch.inference_mode(False), torch.no_grad():
        with communicator.exclusively():
            _, targets = read_parameters(arguments, communicator)
            num_live = count_live_and_compare(targets, True, communicator)
            known = communicator.run(lambda: _known(targets, grams, communicator))
        blocks = grams.blocks([target.places[0] for target in targets])
        with communicator.exclusively():
            change = _Change(targets)
            try:
                communicator.run(change.begin)
                weights: dict[str, list[_Weight]] = {}
                for number, (label, layout) in enumerate(known):
                    shard = targets[number]
                    if num_live[number] < shard.numel:
                        weight = _Weight(number, shard, layout, change, communicator, dtype)
                        weights.setdefault(label, []).append(weight)
                errors = _Errors(len(targets))
                for labels, block in blocks:
                    sharing = [weight for label in labels for weight in weights.get(label, ())]
                    for number in range(len(block.rows) if sharing else 0):
                        gram, added = _damped(
                            block, number, damping, labels[0], communicator, dtype
                        )
                        for weight in sharing:
                            errors.damping[weight.number].append(added)
                            weight.solve(number, gram, added, steps, errors)
                        del gram
                entries = _entries(targets, num_live, errors, communicator)
                communicator.run(change.finish)
            except BaseException:
                change.rollback()
                raise
    return ReconstructionReport(
        entries,
        steps,
        float(damping),
        communicator.size,
        communicator.num_collectives,
        communicator.bytes_sent,
        time.perf_counter() - started,
    )


class _Change:
    """New values of parameters that stay, or are undone together: on this rank.

    Args:
        targets: the parameters of a call.

    Cost: a copy of the values of each parameter that changes, as long as this object lives.
    """

    def __init__(self, targets: Sequence[Shard]) -> None:
        self._targets = targets
        self._copies: dict[int, Tensor] = {}

    def begin(self) -> None:
        """Free what FSDP has gathered."""
        for target in self._targets:
            if target.managed is not None:
                target.managed.free_gathered()

    def values(self, number: int) -> Tensor:
        """This rank's unmasked values of a parameter, to be written to, N-d."""
        values = self._targets[number].values.data  # with a version counter of its own
        if number not in self._copies:
            self._copies[number] = values.clone()
        return values

    def finish(self) -> None:
        """Let the masks act on the new values, in products that have a graph again."""
        with torch.enable_grad():
            for target in self._targets:
                if target.managed is None:
                    refresh_products(target.places)

    def rollback(self) -> None:
        """Write back what was there before."""
        for number, copy in self._copies.items():
            self.values(number).copy_(copy)
        self.finish()


class _Errors:
    """Sums over the rows that this rank has solved.

    Attributes:
        sums: fp64 [parameters, 3]: the errors before and after, and the outputs themselves.
        damping: what was added to the diagonals, by parameter.
    """

    def __init__(self, num_parameters: int) -> None:
        self.sums = torch.zeros(num_parameters, 3, dtype=torch.float64)
        self.damping: list[list[float]] = [[] for _ in range(num_parameters)]


@dataclass
class _Weight:
    """A pruned weight, and who solves which of its rows.

    A row that one rank alone has is solved there. All others are cut, or are replicas: each is
    solved by one rank, and every rank gets the result.
    """

    number: int
    shard: Shard
    layout: WeightLayout
    change: _Change
    communicator: Communicator
    dtype: torch.dtype

    def __post_init__(self) -> None:
        shard, layout = self.shard, self.layout
        height, self._width = layout.matrix_shape
        self._blocks: list[Block] = []
        chunk = _CPU_CHUNK if shard.values.device.type == "cpu" else _DEVICE_CHUNK
        self._height = max(1, chunk // max(1, self._width))

        def whole_rows() -> Tensor:
            self._blocks = blocks_of(shard, layout)
            have = torch.zeros(layout.num_matrices, height, dtype=torch.int64)
            for block in self._blocks:
                if len(block.columns) == self._width:
                    have[block.matrix, block.rows.start : block.rows.stop] = 1
            return have.view(-1)

        shared = self.communicator.reduce(layout.num_outputs, whole_rows)
        self._num_having = shared.view(layout.num_matrices, height)

    def solve(self, number: int, gram: Tensor, added: float, steps: int, errors: _Errors) -> None:
        """Change the rows of one matrix. Collective.

        Args:
            number: of the matrix.
            gram: its Gram matrix, damped ...
            added: ... by so much.
            steps: of conjugate gradients.
            errors: gets the sums of the rows that this rank solves.
        """
        gram = gram.to(self.shard.values.device)
        num_having = self._num_having[number]

        def solved(weights: Tensor, keep: Tensor) -> Tensor:
            found = least_squares(weights, keep, gram, added, steps)
            errors.sums[self.number] += found.errors.cpu()
            return found.weights

        def solve_own() -> None:
            alone = (num_having == 1).nonzero().view(-1)
            for block in self._blocks:
                if block.matrix == number and len(block.columns) == self._width:
                    for rows in self._runs(alone, block.rows):
                        values, keep = self._read(block, rows)
                        block.write(self.change.values(self.number), rows, solved(values, keep))

        self.communicator.run(solve_own)
        others = (num_having != 1).nonzero().view(-1)
        for ids in torch.split(others, self._height):
            self._solve_shared(number, ids, solved)

    def _solve_shared(
        self, number: int, ids: Tensor, solved: Callable[[Tensor, Tensor], Tensor]
    ) -> None:
        """Solve rows that are cut, or that several ranks have. Collective."""
        communicator = self.communicator
        have_all = bool((self._num_having[number][ids] == communicator.size).all())
        blocks = [block for block in self._blocks if block.matrix == number]
        shape, device = (len(ids), self._width), self.shard.values.device

        def places() -> Iterator[tuple[Block, range, slice, slice]]:
            for block in blocks:
                for rows in self._runs(ids, block.rows):
                    start = int(torch.searchsorted(ids, rows.start))
                    columns = slice(block.columns.start, block.columns.stop)
                    yield block, rows, slice(start, start + len(rows)), columns

        def read() -> Tensor:
            both = torch.zeros(2, *shape, dtype=self.dtype, device=device)
            if have_all or self.shard.replica == 0:
                for block, rows, here, columns in places():
                    for buffer, values in zip(both, self._read(block, rows), strict=True):
                        buffer[here, columns] = values
            return both

        both = communicator.run(read)
        if not have_all:
            communicator.sum_floats(both)
        mine = torch.arange(len(ids)).tensor_split(communicator.size)[communicator.index]

        def solve() -> Tensor:
            new = torch.zeros(shape, dtype=self.dtype, device=device)
            if len(mine):
                rows = slice(int(mine[0]), int(mine[-1]) + 1)
                new[rows] = solved(both[0, rows], both[1, rows])
            return new

        new = communicator.run(solve)
        communicator.sum_floats(new)

        def write() -> None:
            for block, rows, here, columns in places():
                block.write(self.change.values(self.number), rows, new[here, columns])

        communicator.run(write)

    def _read(self, block: Block, rows: range) -> tuple[Tensor, Tensor]:
        """Values and mask of some rows of a block, in the dtype of the solver."""
        shard = self.shard
        values = block.read(shard.values, rows).to(self.dtype)
        if shard.mask is None:
            return values, torch.ones_like(values)
        return values, (block.read(shard.mask, rows) != 0).to(self.dtype)

    def _runs(self, ids: Tensor, within: range) -> Iterator[range]:
        """Consecutive ones of sorted row numbers that lie in a range, in chunks."""
        inside = ids[(ids >= within.start) & (ids < within.stop)]
        ends = (inside[1:] - inside[:-1] != 1).nonzero().view(-1) + 1
        for run in torch.tensor_split(inside, ends):
            for part in torch.split(run, self._height) if len(run) else ():
                yield range(int(part[0]), int(part[-1]) + 1)


def _known(
    targets: Sequence[Shard], grams: GramMatrices, communicator: Communicator
) -> list[tuple[str, WeightLayout]]:
    """The name and the layout that each parameter has among those of the Gram matrices."""
    if grams.ranks != communicator.ranks:
        raise ValueError(
            f"group: grams are of the ranks {list(grams.ranks)}, and this call is of "
            f"{list(communicator.ranks)}; expected the same group for both."
        )
    for target in targets:
        if not target.values.is_floating_point():
            raise NotImplementedError(
                f"{target.name}: its dtype is {target.values.dtype}; expected a real "
                "floating-point one."
            )
        if target.forgets_pruned and target.mask is not None:
            raise NotImplementedError(
                f"{target.name}: its wrapper (DeepSpeed, or a registered layout) stores zeros "
                "where it is pruned, so that the weights before the pruning are gone, which least "
                "squares need; expected pruning and reconstruct() before that wrapper takes the "
                "model, or under FSDP."
            )
    return grams.layouts_of([target.places[0] for target in targets])


def _damped(
    block: GramBlock,
    number: int,
    damping: float,
    label: str,
    communicator: Communicator,
    dtype: torch.dtype,
) -> tuple[Tensor, float]:
    """A whole Gram matrix with damping on its diagonal, and what was added. Collective.

    Raises:
        ValueError: damping is 0, and the matrix is singular.
    """
    whole = block.whole(number, communicator)

    def damp() -> tuple[Tensor, float]:
        damped, added = with_damping(whole, damping, dtype)
        if not damping and int(torch.linalg.cholesky_ex(damped).info):
            raise ValueError(
                f"{label}: damping=0, and its Gram matrix is singular: the calibration data has "
                "fewer tokens than inputs, or inputs that depend on each other. Expected "
                "damping > 0, such as 0.01, or more data."
            )
        return damped, added

    return communicator.run(damp)


def _entries(
    targets: Sequence[Shard], num_live: Sequence[int], errors: _Errors, communicator: Communicator
) -> tuple[ReconstructedParameter, ...]:
    """The report of each parameter. Collective.

    Raises:
        ValueError: weights that are not finite.
    """
    sums = communicator.reduce_floats(errors.sums.numel(), lambda: errors.sums.view(-1))
    entries = []
    for target, live, (before, after, total), added in zip(
        targets, num_live, sums.view(-1, 3).tolist(), errors.damping, strict=True
    ):
        if not all(map(math.isfinite, (before, after, total))):
            raise ValueError(
                f"{target.name}: weights that are not finite, or outputs beyond the range of "
                "their dtype; expected finite ones."
            )
        per_output = 1 / total if total > 0 else 0.0
        size = target.numel
        entries.append(
            ReconstructedParameter(
                target.name,
                size,
                size - live,
                max(0.0, before) * per_output,
                max(0.0, after) * per_output,
                max(added, default=0.0),
            )
        )
    return tuple(entries)
