"""``reconstruct``: least squares for the weights that a mask has kept, on any sharding.

[Note: least squares] A row w0 of a weight gives the outputs w0 X for the inputs X [inputs, tokens].
With a mask, the row v that changes them least is the minimum of

    |(w0 - v) X|^2 + d |(w0 - v) D^(1/2)|^2  =  (w0 - v) H (w0 - v)^T,     H = X X^T + d D,

over all v that are zero where the mask is, where D is the diagonal of X X^T. Only the Gram matrix
X X^T is needed, all rows of a weight have the same one, and no row needs another. The damping d
makes H regular. It shrinks the correlations between inputs, which differ from text to text, and
leaves their scales.

The minimum solves the normal equations, the rows and columns of H that belong to the support:
another matrix for each row. Conjugate gradients need only products with H, of all rows at once: a
gradient is multiplied with the mask, so that what is pruned stays zero, and divided by the diagonal
of H. Steps of a row depend on this row alone, so that no sharding changes them.

[Note: positions] A weight is one matrix or several, one below the other: an expert, a group of a
convolution. A row has the elements of one output. However memory and ranks have the dimensions of
a weight, each belongs to its rows or to its columns. So a rank has the element of row r and column
c at the position ``rows[r] + columns[c]`` of its flat view, if that is one of its positions:

    FSDP2, Shard(0), or a replica      FSDP1, a run of memory          Shard(1), TP row-wise
    . . . . . .                        . . . . 0 1                     0 1 . . . .
    0 1 2 3 4 5                        2 3 4 5 6 7                     2 3 . . . .
    6 7 8 9 . .                        8 9 . . . .                     4 5 . . . .
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from distprune.base.amount import share, table
from distprune.base.blocks import WeightLayout
from distprune.call.reading import count_live_and_compare, read_parameters
from distprune.call.report import CallReport
from distprune.call.request import ParameterArguments
from distprune.masks.hook import forgets_pruned, refresh_products
from distprune.ranks.collectives import Communicator, world
from distprune.shards.geometry import opened
from distprune.shards.shard import Shard
from distprune.statistics.gram import GramMatrices, whole_matrix

STEPS = 15
DAMPING = 0.3
# Elements of the rows that are solved at a time: seven temporaries of so many.
_CPU_CHUNK = 1 << 21
_DEVICE_CHUNK = 1 << 25
_ELSEWHERE = -(1 << 50)  # below all positions, and so is a sum of it and of some of them


@dataclass(frozen=True)
class ReconstructedParameter:
    """One parameter, whole.

    Attributes:
        name: fully qualified if the parameter came from ``select``.
        num_elements, num_pruned: of the whole parameter.
        error_before: |(w0 - w) X|^2 / |w0 X|^2, where w was masked and not changed yet ...
        error_after: ... and with the new w. 0 if w0 X is zero.
        num_rows_unmoved: rows that least squares would have moved further than their own norm, as
            with a singular Gram matrix and hardly any damping: they keep their weights.
    """

    name: str
    num_elements: int
    num_pruned: int
    error_before: float
    error_after: float
    num_rows_unmoved: int = 0


@dataclass(frozen=True)
class ReconstructionReport(CallReport):
    """What ``reconstruct`` did. ``print`` it on one rank; it is the same on all.

    Attributes:
        parameters: an entry for each parameter, in the caller's order.
        steps: of conjugate gradients.
        damping: as it was asked for.
        num_ranks, num_collectives, bytes_sent, seconds: what the call cost this rank: the ranks
            that took part, collectives, their payload, and wall time.
    """

    parameters: tuple[ReconstructedParameter, ...]
    steps: int
    damping: float

    def __str__(self) -> str:
        def row(name: str, pruned: str, errors: Iterable[float]) -> list[str]:
            return [name, pruned, *(f"{error:.4g}" for error in errors)]

        errors = [(entry.error_before, entry.error_after) for entry in self.parameters]
        rows = [
            row(entry.name, f"{share(entry.num_pruned, entry.num_elements):.2%}", both)
            for entry, both in zip(self.parameters, errors, strict=True)
        ]
        mean = row("mean", "", (sum(each) / len(rows) for each in zip(*errors, strict=True)))
        lines = table(["parameter", "pruned", "error before", "error after"], rows, mean)
        unmoved = sum(entry.num_rows_unmoved for entry in self.parameters)
        facts = [f"least squares, {self.steps} steps, damping {self.damping:g}"]
        if unmoved:
            facts.append(f"{unmoved:,} rows kept their weights, as they would have moved too far")
        facts += self._cost()
        return "\n".join([*lines, "; ".join(facts)])


def reconstruct(
    parameters: Iterable[tuple[nn.Module, str]],
    grams: GramMatrices,
    *,
    damping: float = DAMPING,
    steps: int = STEPS,
    dtype: torch.dtype = torch.float64,
    group: ProcessGroup | None = None,
) -> ReconstructionReport:
    """Move the kept weights so that the outputs of each layer change least. Collective.

    prune.global_unstructured(parameters, prune.L1Unstructured, scores, amount=0.6)
    report = prune.reconstruct(parameters, grams)

    For each output row w0 of each weight: the row w that minimises

        |(w0 - w) X|^2 + d |(w0 - w) diag(X X^T)^(1/2)|^2

    over all w that are zero where the mask in force or w0 is, for the inputs X of the calibration
    data. A row that would move further than |w0| keeps its weights. w0 is what the parameter holds,
    under the mask too (``weight_orig``): right after a pruning the weights before it. Where
    parameters are sharded, both calls belong into :func:`keep_pruned_values`. Masks do not change.
    What is pruned becomes +0, so that a second pruning and ``reconstruct`` begin with the weights
    that this one gave.

    A weight that is exactly zero stays zero, pruned or not: a sparse model that was loaded stays
    as sparse. To a pruning its zeros are weights like others, as in torch, unless they are made
    masks first: ``prune.masks_from_zeros(model)``.

    Name a parameter that several modules share with all of its places, as ``select`` does: one that
    is pruned in some of them only is moved in all.

    Any mask will do, and any wrapper: DDP, FSDP1, FSDP2, HSDP, tensor parallelism and their
    combinations give what one process gives, to 1e-5 of the layer's largest weight.

    Args:
        parameters: (module, name) pairs, pruned or not, the same on every rank; each has a Gram
            matrix. One that is not pruned stays as it is.
        grams: of the weights that the calibration data went through.
        damping: d: the diagonal of each Gram matrix is multiplied by 1 + d. 0 needs regular
            matrices. Weights of inputs that are 0 in all of the calibration data stay as they are.
        steps: of conjugate gradients; see [Note: least squares].
        dtype: in which it computes: float64, or float32, which is faster on an accelerator whose
            float64 is slow. Sharded and whole models then agree to about 1e-3 only.
        group: the ranks that take part; every rank by default. Those of ``grams``.

    Returns:
        A report with the relative error of each layer's outputs before and after; the same on
        every rank.

    Raises:
        ValueError: a parameter that is none of those of ``grams``; a damping or a number of steps
            out of range; with damping 0 a singular Gram matrix; weights that are not finite, or
            would not be in the dtype of the parameter. On every rank; every parameter is as it was.
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
    ranks = world(group)

    def arguments() -> ParameterArguments:
        if not isinstance(grams, GramMatrices):
            raise TypeError(f"grams is a {type(grams).__name__}; expected GramMatrices.")
        if not 0 <= damping < float("inf"):
            raise ValueError(f"damping={damping!r}; expected a finite number >= 0, such as 0.3.")
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise ValueError(f"steps={steps!r}; expected a whole number >= 1.")
        if dtype not in (torch.float32, torch.float64):
            raise ValueError(f"dtype={dtype}; expected torch.float64 or torch.float32.")
        facts = [("damping", repr(damping)), ("steps", repr(steps)), ("dtype", str(dtype))]
        return ParameterArguments(parameters=parameters, facts=facts)

    with torch.inference_mode(False), torch.no_grad():
        with ranks.exclusively():
            _, shards = read_parameters(arguments, ranks)
            num_live = count_live_and_compare(shards, True, ranks)
            known = ranks.run(lambda: _layouts_of(shards, grams, ranks))
        blocks = grams.blocks([shard.places[0] for shard in shards])
        with ranks.exclusively():
            weights = {
                label: _Weight(shard, layout, ranks)
                for shard, live, (label, layout) in zip(shards, num_live, known, strict=True)
                if live < shard.numel
            }
            for labels, block in blocks:
                sharing = [weights[label] for label in labels if label in weights]
                for number, rows in enumerate(block if sharing else ()):
                    whole = whole_matrix(rows, ranks)
                    gram, added = ranks.run(partial(_damped, whole, damping, dtype, labels[0]))
                    for weight in sharing:
                        weight.solve(number, gram, added, steps)
                    del gram, whole
            unmoved = torch.zeros(4, dtype=torch.float64)
            parts = [weights[label].errors if label in weights else unmoved for label, _ in known]
            sums = ranks.reduce_floats(4 * len(parts), lambda: torch.cat(parts)).view(-1, 4)
            entries = []
            for shard, live, errors in zip(shards, num_live, sums.tolist(), strict=True):
                before, after, total, num_unmoved = errors
                if not all(map(math.isfinite, (before, after, total))):
                    raise ValueError(
                        f"{shard.name}: weights, before or after they moved, or outputs are not "
                        f"finite in {shard.values.dtype}; expected finite ones."
                    )
                before, after = (max(0.0, e) / total if total > 0 else 0.0 for e in (before, after))
                counts = shard.numel, shard.numel - live
                entry = ReconstructedParameter(shard.name, *counts, before, after, int(num_unmoved))
                entries.append(entry)
            for weight in weights.values():
                weight.commit()
    cost = ranks.size, ranks.num_collectives, ranks.bytes_sent, time.perf_counter() - started
    return ReconstructionReport(tuple(entries), *cost, steps, float(damping))


def _layouts_of(
    shards: Iterable[Shard], grams: GramMatrices, ranks: Communicator
) -> list[tuple[str, WeightLayout]]:
    """The name and the layout that each parameter has among those of the Gram matrices."""
    if grams.ranks != ranks.ranks:
        raise ValueError(
            f"group: grams are of the ranks {list(grams.ranks)}, and this call is of "
            f"{list(ranks.ranks)}; expected the same group for both."
        )
    for shard in shards:
        if not shard.values.is_floating_point():
            raise NotImplementedError(
                f"{shard.name}: its dtype is {shard.values.dtype}; expected a real one."
            )
        if forgets_pruned(*shard.places[0]):
            raise RuntimeError(
                f"{shard.name} is sharded, where a mask sets weights to zero; expected both "
                "calls inside `with distprune.keep_pruned_values():`, and no forward between them "
                "(which DeepSpeed and registered layouts do not support)."
            )
    return grams.layouts_of([shard.places[0] for shard in shards])


def _damped(gram: Tensor, damping: float, dtype: torch.dtype, label: str) -> tuple[Tensor, Tensor]:
    """A copy of a Gram matrix with damping, and what was added to its diagonal, [inputs].

    An input that was not seen gets 1: then least squares leaves its weights as they are.
    """
    damped = gram.to(dtype, copy=True)
    diagonal = damped.diagonal()
    added = torch.where(diagonal > 0, damping * diagonal, 1)
    diagonal.add_(added)
    if not damping and int(torch.linalg.cholesky_ex(damped).info):
        raise ValueError(
            f"{label}: damping=0, and its Gram matrix is singular; expected damping > 0, such as "
            "0.3, or calibration data with more tokens."
        )
    return damped, added


class _Weight:
    """New values of a pruned weight, and who solves which of its rows.

    A row that one rank alone has is solved there. All others are cut, or are replicas: each is
    solved by one rank, and every rank gets the result. The parameter changes in :meth:`commit`.

    Args:
        shard: the parameter.
        layout: of its matrices.
        ranks: of the call; making the object is collective.

    Attributes:
        errors: fp64 [4], of the rows that this rank has solved; see ``least_squares``. NaN if new
            values are not finite in the dtype of the parameter.

    Cost: a copy of this rank's values.
    """

    def __init__(self, shard: Shard, layout: WeightLayout, ranks: Communicator) -> None:
        self._shard, self._ranks = shard, ranks
        height, self._width = layout.matrix_shape
        shape = layout.num_matrices, height
        self.errors = torch.zeros(4, dtype=torch.float64)

        def find_whole_rows() -> Tensor:
            self._new = shard.new_mask(shard.values.dtype).copy_(shard.values)
            rows, columns = positions_of(shard, layout)
            self._rows, self._columns = rows.view(shape), columns.to(shard.values.device)
            first, last = rows + columns.min(), rows + columns.max()
            self._has = ((first >= 0) & (last < shard.values.numel())).view(shape)
            return self._has.view(-1).long()

        self._num_having = ranks.reduce(layout.num_outputs, find_whole_rows).view(shape)

    def solve(self, number: int, gram: Tensor, added: Tensor, steps: int) -> None:
        """Solve the rows of one matrix. Collective.

        Args:
            number: of the matrix.
            gram: its Gram matrix, damped, in the dtype in which rows are solved.
            added: to its diagonal, [inputs].
            steps: of conjugate gradients.
        """
        ranks, device = self._ranks, self._shard.values.device
        gram, added = gram.to(device), added.to(device)
        rows, num_having = self._rows[number], self._num_having[number]

        def solved(both: Tensor) -> Tensor:
            new, errors = least_squares(both[0], both[1], gram, added, steps)
            self.errors += errors.cpu()
            return new

        def solve_own() -> None:
            for ids in self._chunks((num_having == 1) & self._has[number]):
                self._write(rows[ids], solved(self._read(rows[ids], gram.dtype)))

        def read_shared() -> Tensor:
            counts = have_all or self._shard.replica == 0
            return self._read(rows[ids] if counts else rows[ids] + _ELSEWHERE, gram.dtype)

        def solve_share() -> Tensor:
            mine = torch.arange(len(ids)).tensor_split(ranks.size)[ranks.index]
            new = torch.zeros_like(both[0])
            if len(mine):
                new[mine] = solved(both[:, mine])
            return new

        ranks.run(solve_own)
        for ids in self._chunks(num_having != 1):
            have_all = bool((num_having[ids] == ranks.size).all())
            both = ranks.run(read_shared)
            if not have_all:
                ranks.sum_floats(both)
            new = ranks.run(solve_share)
            ranks.sum_floats(new)
            ranks.run(partial(self._write, rows[ids], new))

    def commit(self) -> None:
        """Let the parameter have the new values, and its mask act on them. Local; cannot fail."""
        managed = self._shard.managed
        if managed is not None:
            managed.free_gathered()
        self._shard.values.data.copy_(self._new)  # with a version counter of its own
        if managed is None:
            with torch.enable_grad():  # products have a graph again
                refresh_products(self._shard.places)

    def _chunks(self, chosen: Tensor) -> Iterator[Tensor]:
        """The numbers of the chosen rows, as many at a time as are solved together."""
        size = _CPU_CHUNK if self._new.device.type == "cpu" else _DEVICE_CHUNK
        ids = chosen.nonzero().view(-1)
        if len(ids):
            yield from torch.split(ids, max(1, size // max(1, self._width)))

    def _find(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Where elements of some rows are here, [rows, inputs]; and their positions, 1-d."""
        flat = self._shard.flat_values
        at = rows.to(flat.device).unsqueeze(1) + self._columns
        is_here = (at >= 0) & (at < flat.numel())
        return is_here, at[is_here]

    def _read(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Values, and 1 where they are kept and not 0, of some rows: [2, rows, inputs].

        Both are 0 where this rank has none.
        """
        flat, mask = self._shard.flat_values, self._shard.flat_mask
        both = flat.new_zeros(2, len(rows), self._width, dtype=dtype)
        is_here, at = self._find(rows)
        part = flat[at].to(dtype)
        keep = part != 0
        if mask is not None:
            keep &= mask[at] != 0
        both[0][is_here], both[1][is_here] = part, keep.to(dtype)
        return both

    def _write(self, rows: Tensor, new: Tensor) -> None:
        """Keep the new values of some rows, as far as they are this rank's."""
        is_here, at = self._find(rows)
        part = new[is_here].to(self._new.dtype)
        if not bool(part.isfinite().all()):
            self.errors += torch.nan
        self._shard.flat(self._new)[at] = part


def least_squares(
    weights: Tensor, keep: Tensor, gram: Tensor, added: Tensor, steps: int = STEPS
) -> tuple[Tensor, Tensor]:
    """The rows with a given support whose outputs are nearest to those of given rows.

    Args:
        weights: [rows, inputs], before they were pruned.
        keep: the same shape, 1 where an element is kept and 0 elsewhere.
        gram: [inputs, inputs], damped; of the dtype of ``weights``.
        added: [inputs], the damping on its diagonal, which errors are without.
        steps: of conjugate gradients. An exact solution needs as many as a row has kept elements,
            or distinct eigenvalues; see [Note: least squares].

    Returns:
        The new rows, +0 where nothing is kept; and fp64 [4], sums over them: the squared change of
        the outputs by the mask alone, that by the new rows, and the squared outputs themselves; and
        the number of rows that would move further than their norm, and keep their weights.

    Cost: 2 x rows x inputs**2 operations for each step, and for two products more; temporaries of
    seven times ``weights``.
    """
    masked = weights * keep
    outputs = weights @ gram
    total = _inner(weights, outputs)
    new = masked.clone()
    residual = outputs.sub_(new @ gram)
    before = _inner(weights - new, residual)
    residual.mul_(keep)
    inverse = _ratio(torch.ones_like(gram[0]), gram.diagonal())
    direction = residual * inverse
    change = (residual * direction).sum(1, keepdim=True)
    after = before.clone()
    for _ in range(steps):
        product = (direction @ gram).mul_(keep)
        step = _ratio(change, (direction * product).sum(1, keepdim=True))
        after -= (step * change).view(-1)
        new.addcmul_(step, direction)
        residual.addcmul_(step, product, value=-1)
        torch.mul(residual, inverse, out=product)
        before_step, change = change, (residual * product).sum(1, keepdim=True)
        direction = product.addcmul_(_ratio(change, before_step), direction)
    is_far = _inner(new - masked, new - masked) > _inner(weights, weights)
    new = torch.where(is_far.view(-1, 1), masked, new)
    new = torch.where(keep != 0, new, 0)
    after = torch.where(is_far, before, after)
    damped = [_inner(d, d * added) for d in (weights - masked, weights - new, weights)]
    errors = torch.stack([before, after, total]) - torch.stack(damped)
    return new, torch.cat([errors.sum(1), is_far.sum(dtype=torch.float64).view(1)])


def solve_columns(
    weights: Tensor, stay: Tensor, gram: Tensor, damping: float, label: str
) -> tuple[Tensor, float, float]:
    """As :func:`least_squares` where all rows keep the same inputs, exactly: W H[:, S] H[S, S]^-1.

    Args:
        weights: [rows, inputs], before.
        stay: int64, the inputs S that stay.
        gram: [inputs, inputs], not damped.
        damping, label: see :func:`reconstruct`; the name of the weight.

    Returns:
        The new rows, fp64, 0 where an input does not stay; and |(weights - w) X|^2 / |weights X|^2
        of those without the other inputs, and of the new ones.

    Raises:
        ValueError: the matrix is singular without damping.

    Cost: inputs**3 / 3 + 4 x rows x inputs**2 operations, in fp64.
    """
    whole, (damped, _) = weights.double(), _damped(gram, damping, torch.float64, label)
    masked, new = torch.zeros_like(whole), torch.zeros_like(whole)
    masked[:, stay] = whole[:, stay]
    factor = torch.linalg.cholesky(damped[stay][:, stay])
    new[:, stay] = torch.cholesky_solve(damped[stay] @ whole.T, factor).T
    exact = gram.double()
    before, after, total = (
        max(0.0, float(_inner(rows, rows @ exact).sum()))
        for rows in (whole - masked, whole - new, whole)
    )
    return new, before / (total or 1), after / (total or 1)


def _inner(one: Tensor, other: Tensor) -> Tensor:
    """The inner product of each row, fp64."""
    return (one * other).sum(1, dtype=torch.float64)


def _ratio(values: Tensor, others: Tensor) -> Tensor:
    """values / others, and 0 where that is no number: a row that has arrived makes no step."""
    is_number = others > torch.finfo(others.dtype).tiny
    return torch.where(is_number, values / others, 0)


def positions_of(shard: Shard, layout: WeightLayout) -> tuple[Tensor, Tensor]:
    """Where this rank has the elements of a weight: see [Note: positions].

    Returns:
        int64 [outputs] and [inputs of a matrix].
    """
    index, stride = shard.index, 1
    sizes = shard.shape if index.fold is None else opened(index.fold, shard.shape)
    of_dim: dict[int, Tensor] = {}
    for dim, own in zip(index.dims[::-1], index.coordinates[::-1], strict=True):
        where = torch.arange(sizes[dim])
        is_here = (where >= own.start) & (where < own.stop)
        of_dim[dim] = torch.where(is_here, (where - own.start) * stride, _ELSEWHERE)
        stride *= len(own)
    rows, columns = torch.tensor([-index.offset]), torch.tensor([0])
    for number, vector in sorted(of_dim.items()):
        dim = number - (index.fold is not None and number > index.fold[0])
        if dim == layout.output_dim or (layout.are_experts and dim == 0):
            rows = (rows.view(-1, 1) + vector).view(-1)
        else:
            columns = (columns.view(-1, 1) + vector).view(-1)
    return rows, columns
