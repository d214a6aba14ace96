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
from distprune.masks.hook import forgets_pruned, refresh_products
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
        count = max(1, len(self.parameters))
        before = sum(entry.error_before for entry in self.parameters) / count
        after = sum(entry.error_after for entry in self.parameters) / count
        heading = ["parameter", "pruned", "error before", "error after"]
        lines = table(heading, rows, ["mean", "", f"{before:.4g}", f"{after:.4g}"])
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
    weights before it. Where parameters are sharded, both calls belong into
    :func:`keep_pruned_values`. Masks do not change. What is pruned becomes +0, so that a second
    pruning and ``reconstruct`` begin with the weights that this one gave.

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
        RuntimeError: Gram matrices that were forgotten; a sharded parameter that was pruned outside
            :func:`keep_pruned_values`.
        NotImplementedError: dtypes other than real floating-point ones; as ``global_unstructured``.

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
            weights = {
                label: _Weight(target, layout, steps, dtype, communicator)
                for target, live, (label, layout) in zip(targets, num_live, known, strict=True)
                if live < target.numel
            }
            for labels, block in blocks:
                sharing = [weights[label] for label in labels if label in weights]
                for number in range(len(block.rows) if sharing else 0):
                    gram, added = _damped(block, number, damping, labels[0], communicator, dtype)
                    for weight in sharing:
                        weight.solve(number, gram, added)
                    del gram
            of_targets = [weights.get(label) for label, _ in known]
            entries = _entries(targets, num_live, of_targets, communicator)
            for weight in weights.values():
                weight.commit()
    return ReconstructionReport(
        entries,
        steps,
        float(damping),
        communicator.size,
        communicator.num_collectives,
        communicator.bytes_sent,
        time.perf_counter() - started,
    )


class _Weight:
    """New values of a pruned weight, and who solves which of its rows.

    A row that one rank alone has is solved there. All others are cut, or are replicas: each is
    solved by one rank, and every rank gets the result. The parameter changes in :meth:`commit`.

    Args:
        target: the parameter.
        layout: of its matrices.
        steps: of conjugate gradients.
        dtype: in which rows are solved.
        communicator: the ranks of the call; making the object is collective.

    Attributes:
        errors: fp64 [3], of the rows that this rank has solved; see ``solving.Solved``.
        damping: the largest that was added to the diagonal of one of its Gram matrices.

    Cost: a copy of this rank's values.
    """

    def __init__(
        self,
        target: Shard,
        layout: WeightLayout,
        steps: int,
        dtype: torch.dtype,
        communicator: Communicator,
    ) -> None:
        self._target, self._shard = target, target
        self._steps, self._dtype, self._communicator = steps, dtype, communicator
        height, self._width = layout.matrix_shape
        is_on_cpu = self._shard.values.device.type == "cpu"
        self._height = max(1, (_CPU_CHUNK if is_on_cpu else _DEVICE_CHUNK) // max(1, self._width))
        self._blocks: list[Block] = []
        self.errors = torch.zeros(3, dtype=torch.float64)
        self.damping = 0.0

        def whole_rows() -> Tensor:
            self._new = self._shard.values.clone()
            self._blocks = blocks_of(self._shard, layout)
            have = torch.zeros(layout.num_matrices, height, dtype=torch.int64)
            for block in self._blocks:
                if len(block.columns) == self._width:
                    have[block.matrix, block.rows.start : block.rows.stop] = 1
            return have.view(-1)

        shared = communicator.reduce(layout.num_outputs, whole_rows)
        self._num_having = shared.view(layout.num_matrices, height)

    def commit(self) -> None:
        """Let the parameter have the new values, and its mask act on them. Local; cannot fail."""
        managed = self._shard.managed
        if managed is not None:
            managed.free_gathered()
        self._shard.values.data.copy_(self._new)  # with a version counter of its own
        if managed is None:
            with torch.enable_grad():  # products have a graph again
                refresh_products(self._target.places)

    def solve(self, number: int, gram: Tensor, added: float) -> None:
        """Solve the rows of one matrix. Collective.

        Args:
            number: of the matrix.
            gram: its Gram matrix, damped ...
            added: ... by so much.
        """
        self.damping = max(self.damping, added)
        gram = gram.to(self._shard.values.device)
        num_having = self._num_having[number]
        blocks = [block for block in self._blocks if block.matrix == number]

        def solved(weights: Tensor, keep: Tensor) -> Tensor:
            found = least_squares(weights, keep, gram, added, self._steps)
            self.errors += found.errors.cpu()
            return found.weights

        def solve_own() -> None:
            alone = (num_having == 1).nonzero().view(-1)
            for block in blocks:
                if len(block.columns) == self._width:
                    for rows in self._runs(alone, block.rows):
                        block.write(self._new, rows, solved(*self._read(block, rows)))

        self._communicator.run(solve_own)
        others = (num_having != 1).nonzero().view(-1)
        for ids in torch.split(others, self._height):
            have_all = bool((num_having[ids] == self._communicator.size).all())
            self._solve_shared(blocks, ids, have_all, solved)

    def _solve_shared(
        self,
        blocks: Sequence[Block],
        ids: Tensor,
        have_all: bool,
        solved: Callable[[Tensor, Tensor], Tensor],
    ) -> None:
        """Solve rows that are cut, or that several ranks have. Collective."""
        communicator, shard = self._communicator, self._shard
        shape = len(ids), self._width

        def places() -> Iterator[tuple[Block, range, slice, slice]]:
            for block in blocks:
                for rows in self._runs(ids, block.rows):
                    start = int(torch.searchsorted(ids, rows.start))
                    columns = slice(block.columns.start, block.columns.stop)
                    yield block, rows, slice(start, start + len(rows)), columns

        def read() -> Tensor:
            both = torch.zeros(2, *shape, dtype=self._dtype, device=shard.values.device)
            if have_all or shard.replica == 0:
                for block, rows, here, columns in places():
                    for buffer, values in zip(both, self._read(block, rows), strict=True):
                        buffer[here, columns] = values
            return both

        both = communicator.run(read)
        if not have_all:
            communicator.sum_floats(both)
        mine = torch.arange(len(ids)).tensor_split(communicator.size)[communicator.index]

        def solve() -> Tensor:
            new = torch.zeros_like(both[0])
            if len(mine):
                rows = slice(int(mine[0]), int(mine[-1]) + 1)
                new[rows] = solved(both[0, rows], both[1, rows])
            return new

        new = communicator.run(solve)
        communicator.sum_floats(new)

        def write() -> None:
            for block, rows, here, columns in places():
                block.write(self._new, rows, new[here, columns])

        communicator.run(write)

    def _read(self, block: Block, rows: range) -> tuple[Tensor, Tensor]:
        """Values and mask of some rows of a block, in the dtype of the solver."""
        values = block.read(self._shard.values, rows).to(self._dtype)
        if self._shard.mask is None:
            return values, torch.ones_like(values)
        return values, (block.read(self._shard.mask, rows) != 0).to(self._dtype)

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
        if forgets_pruned(*target.places[0]):
            raise RuntimeError(
                f"{target.name} is sharded, where a mask sets weights to zero for good, and least "
                "squares need those before the pruning; expected both calls inside "
                "`with distprune.keep_pruned_values():`, and no forward between them (which "
                "DeepSpeed and registered layouts do not support)."
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
    targets: Sequence[Shard],
    num_live: Sequence[int],
    weights: Sequence[_Weight | None],
    communicator: Communicator,
) -> tuple[ReconstructedParameter, ...]:
    """The report of each parameter. Collective.

    Args:
        weights: those that change, by position.

    Raises:
        ValueError: weights that are not finite.
    """
    none = torch.zeros(3, dtype=torch.float64)
    sums = communicator.reduce_floats(
        3 * len(weights),
        lambda: torch.cat([none if weight is None else weight.errors for weight in weights]),
    )
    entries = []
    for target, live, weight, (before, after, total) in zip(
        targets, num_live, weights, sums.view(-1, 3).tolist(), strict=True
    ):
        if not all(map(math.isfinite, (before, after, total))):
            raise ValueError(
                f"{target.name}: weights that are not finite, or outputs beyond the range of "
                "their dtype; expected finite ones."
            )
        size = target.numel
        entries.append(
            ReconstructedParameter(
                target.name,
                size,
                size - live,
                max(0.0, before) / total if total > 0 else 0.0,
                max(0.0, after) / total if total > 0 else 0.0,
                0.0 if weight is None else weight.damping,
            )
        )
    return tuple(entries)
