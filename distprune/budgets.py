"""Budgets: functions that say how much each parameter loses, as a mapping to sparsities.

parameters = prune.select(model)
prune.global_unstructured(
    parameters, prune.L1Unstructured, amount=budgets.erk(parameters, 0.5)
)

A mapping is what ``amount=`` of ``global_unstructured`` takes; each parameter loses its own lowest
elements. The sparsities are exact fractions, count / elements, whose counts have the sum
round(sparsity * elements of all). They are those of shapes: a parameter that is pruned further
already keeps what it has lost, beyond this sum. ``ScheduledPruner`` takes such a function as
``budget=``, and calls it with the sparsity of each step.

Nothing is read and nothing is sent: shapes of shards are global.

[Note: level] A rule says how many elements of each parameter are pruned as the level of all
parameters rises: ``start + slope * level``, held between the parameter's limits. The level is the
one at which the counts have the wanted sum. What does not fit into one parameter is so divided
among the others by the same rule. Counts are rounded by largest remainder: each down, and then up
where the remainder is largest, in case of equal ones in the order of the parameters, until the sum
is right.
"""

from __future__ import annotations

import math
import numbers
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from distprune.base import exact_sums, naming
from distprune.base.amount import Bounded, SparsityBound, resolve_count, to_bounds, validate_amount
from distprune.base.memory import Count, Scratch
from distprune.base.naming import checked_pair, is_pair, label_of, plain_key, tied_places
from distprune.ranking.sums import Scored, grid_sums, largest_scores, per_part
from distprune.ranks.collectives import Communicator
from distprune.shards.reader import ShardReader

__all__ = ["erk", "owl", "uniform"]

# (module, name) pairs, as ``select`` lists them, or shapes by full name.
Parameters = Iterable[tuple[nn.Module, str]] | Mapping[str, Sequence[int]]
# By the pair or the name: the sparsity.
Sparsities = dict[Any, Fraction]

OWL_LAM = 0.08  # by default, half the range of the densities
OWL_MULTIPLE = 5.0  # by default, an outlier is above so many times the mean of its block
# Up to the first number in a name: "model.layers.3." of "model.layers.3.mlp.up_proj.weight".
_BLOCK = re.compile(r"^(?:[^.]+\.)*?\d+(?=\.)")


def uniform(
    parameters: Parameters,
    sparsity: float | Fraction,
    *,
    min_sparsity: SparsityBound | None = None,
    max_sparsity: SparsityBound | None = None,
) -> Sparsities:
    """The same sparsity for each parameter: the scope "layer", with one exact total.

    Args:
        parameters: (module, name) pairs, as ``select`` lists them; or a mapping from full names to
            shapes, as for the parameters of all stages of a pipeline.
        sparsity: of all of them together, in [0, 1].
        min_sparsity, max_sparsity: of each single parameter, as for ``global_unstructured``; what
            one of them may not lose is divided among the others by the same rule.

    Returns:
        The sparsity of each parameter, in the order and under the keys of ``parameters``.

    Raises:
        TypeError, ValueError: a sparsity that is no number in [0, 1]; no parameters; bounds that do
            not allow for it.
    """
    return _sparsities("uniform", parameters, sparsity, min_sparsity, max_sparsity)


def erk(
    parameters: Parameters,
    sparsity: float | Fraction,
    *,
    min_sparsity: SparsityBound | None = None,
    max_sparsity: SparsityBound | None = None,
) -> Sparsities:
    """Erdos-Renyi-Kernel: the density of a parameter falls with its size.

    The density is proportional to (the sum of the dimensions) / (their product), kernel sizes
    included: (n_in + n_out + height + width) / (n_in * n_out * height * width) for a convolution.
    So a parameter keeps a number of elements that is proportional to the sum of its dimensions.
    Parameters that would be denser than 1 stay dense, and the others are scaled again. The formula
    gives 1-d parameters the largest density of all.

    Args, returns, raises: as :func:`uniform`.

    Source: Evci et al., "Rigging the lottery", arXiv 1911.11134.
    """
    return _sparsities("erk", parameters, sparsity, min_sparsity, max_sparsity)


def owl(
    parameters: Parameters,
    sparsity: float | Fraction,
    ratios: Mapping[Any, float],
    *,
    lam: float = OWL_LAM,
    min_sparsity: SparsityBound | None = None,
    max_sparsity: SparsityBound | None = None,
) -> Sparsities:
    """Outlier-weighed layerwise sparsity: the more outliers a layer has, the denser it stays.

    Let D be the outlier ratios. As in the authors' code the densities are::

        r = (D - min D) / (max D - min D) * 2 * lam        between 0 and 2 * lam
        density = r + shift                                one shift for all

    where the shift makes the total exact. For blocks of one size it is the authors' ``1 - S -
    mean(r)``, so that the mean of the sparsities is S; where sizes differ, their mean over all
    elements is. Densities above 1 or below 0 are clipped, and the others are shifted further.
    (The paper says |S_l - S| <= lam. Its code, and this, spread the densities over a range of 2 *
    lam whose mean, not whose middle, is 1 - S.)

    Args:
        parameters, sparsity, min_sparsity, max_sparsity: as for :func:`uniform`.
        ratios: outlier ratio of each parameter, >= 0, by (module, name), by full name, or by the
            name of a block ("model.layers.3") for all parameters below it: what
            ``ActivationStatistics.outlier_ratios()`` returns, by default those of blocks, as in the
            paper. They have to be equal on all ranks.
        lam: half the range of the densities; the paper uses 0.08, for language models at 70 %.

    Raises:
        TypeError, ValueError: as :func:`uniform`; ratios that are no numbers, or negative, or
            missing; ``lam`` outside [0, 1/2].

    Source: Yin et al., "Outlier weighed layerwise sparsity (OWL)", arXiv 2310.05175.
    """
    exact_lam = exact_number("lam", lam)
    if not 0 <= exact_lam <= Fraction(1, 2):
        raise ValueError(f"lam={lam!r} is not in [0, 0.5]; expected half a range of densities.")
    if not isinstance(ratios, Mapping):
        raise TypeError(
            f"ratios is a {type(ratios).__name__}; expected a mapping, such as the one that "
            "statistics.outlier_ratios() returns."
        )
    exact: dict[Hashable, Fraction] = {}
    for key, value in ratios.items():
        what = f"the outlier ratio of {label_of(key) if is_pair(key) else repr(key)}"
        exact[plain_key(key)] = ratio = exact_number(what, value)
        if ratio < 0:
            raise ValueError(f"{what} is {value!r}; expected one >= 0.")

    def lines(named: Sequence[Bounded]) -> list[Line]:
        sizes = [each.num_elements for each in named]
        return owl_lines(sizes, [_ratio_of(each, exact) for each in named], exact_lam)

    return _sparsities(lines, parameters, sparsity, min_sparsity, max_sparsity)


def bounded(parameters: Parameters) -> list[tuple[Any, Bounded]]:
    """Each parameter, once, under its key. Local; nothing is read but shapes.

    Raises:
        TypeError, AttributeError: what is no (module, name) pair of a parameter.
    """
    if isinstance(parameters, Mapping):
        return [
            (name, Bounded(name, (name,), math.prod(shape), tuple(shape)))
            for name, shape in parameters.items()
        ]
    reader, found = ShardReader(), dict[Hashable, tuple[Any, Bounded]]()
    for position, pair in enumerate(parameters):
        module, name = checked_pair(pair, f"parameters[{position}]")
        label, places = label_of(pair, position), tied_places(pair)
        shard = reader.read(module, name, label)
        if shard.key not in found:
            found[shard.key] = pair, Bounded(label, (label,), shard.numel, tuple(shard.shape))
        first, known = found[shard.key]  # of a tied one, under its first name
        found[shard.key] = first, known._replace(keys=(*known.keys, *places))
    return list(found.values())


def _sparsities(
    rule: str | Callable[[Sequence[Bounded]], list[Line]],
    parameters: Parameters,
    sparsity: float | Fraction,
    min_sparsity: SparsityBound | None,
    max_sparsity: SparsityBound | None,
) -> Sparsities:
    found = bounded(parameters)
    if not found:
        raise ValueError("parameters is empty; expected at least one.")
    if isinstance(sparsity, numbers.Integral):
        raise TypeError(f"sparsity={sparsity!r} is an int; expected a float in [0, 1].")
    validate_amount(sparsity)  # type: ignore[arg-type]
    named = [each for _, each in found]
    sizes = [each.num_elements for each in named]
    bounds = to_bounds(named, min_sparsity, max_sparsity)
    lowest, highest = bounds or ([0] * len(sizes), sizes)
    total = resolve_count(sparsity, sum(sizes))  # type: ignore[arg-type]
    lines = lines_of(rule, named) if isinstance(rule, str) else rule(named)
    counts = divided(lines, lowest, highest, total)
    return {
        key: Fraction(count, each.num_elements or 1)
        for (key, each), count in zip(found, counts, strict=True)
    }


def _ratio_of(parameter: Bounded, ratios: Mapping[Hashable, Fraction]) -> Fraction:
    found = {ratios[key] for key in parameter.keys if key in ratios}
    if not found:  # the longest name among the ratios that is a path above the parameter
        starts = tuple(f"{key}." for key in ratios if isinstance(key, str))
        names = [key for key in parameter.keys if isinstance(key, str)]
        above = [start for start in starts if any(name.startswith(start) for name in names)]
        found = {ratios[start[:-1]] for start in sorted(above, key=len)[-1:]}
    if len(found) != 1:
        many = "several outlier ratios" if found else "no outlier ratio"
        raise ValueError(
            f"ratios has {many} for {parameter.label}; expected one of every parameter, under its "
            "(module, name), its full name, or the name of its block."
        )
    return found.pop()


# Pruned elements of a parameter as a function of the level: how many at level 0, and how many more
# per level, >= 0.
Line = tuple[Fraction | int, Fraction | int]


def divided(
    lines: Sequence[Line], lowest: Sequence[int], highest: Sequence[int], total: int
) -> list[int]:
    """Whole counts with a given sum, by the level of [Note: level].

    Args:
        lines: the line of each parameter.
        lowest, highest: limits of each count; lowest <= highest.
        total: the sum.

    Raises:
        ValueError: no level gives this sum.

    Cost: rational operations in the number of parameters times its logarithm.
    """
    limited = list(zip(lines, lowest, highest, strict=True))
    # The sum at a level is constant + slope * level; both change where a parameter leaves its
    # lowest count, and where it reaches its highest.
    constant, slope, level, most = Fraction(0), Fraction(0), Fraction(0), Fraction(0)
    changes: list[tuple[Fraction, Fraction, Fraction]] = []
    for line, low, high in limited:
        start, rise = map(Fraction, line)
        if rise:
            changes.append(((low - start) / rise, start - low, rise))
            changes.append(((high - start) / rise, high - start, -rise))
        constant += low if rise else _held(start, low, high)
        most += high if rise else _held(start, low, high)
    if not constant <= total <= most:
        raise ValueError(
            f"the budget can divide {int(constant):,} to {int(most):,} pruned elements among these "
            f"parameters, and {total:,} are to be pruned; expected a sparsity within these."
        )
    for change in sorted(changes):
        level, more, steeper = change
        if constant + slope * level >= total:
            break
        constant, slope = constant + more, slope + steeper
    if slope:
        level = (total - constant) / slope
    exact = [_held(start + rise * level, low, high) for (start, rise), low, high in limited]
    # Each is rounded down, and the largest remainders up.
    counts = [math.floor(count) for count in exact]
    by_remainder = sorted(range(len(counts)), key=lambda i: (counts[i] - exact[i], i))
    for i in by_remainder[: total - sum(counts)]:
        counts[i] += 1
    return counts


def _held(count: Fraction | int, low: int, high: int) -> Fraction:
    return min(max(Fraction(count), Fraction(low)), Fraction(high))


def lines_of(rule: str, parameters: Sequence[Bounded]) -> list[Line]:
    """The lines of "uniform", one sparsity for all, or of "erk"."""
    if rule == "uniform":
        return [(0, parameter.num_elements) for parameter in parameters]
    # The level of ERK is minus the common factor of the densities.
    return [(p.num_elements, (sum(p.shape) or 1) if p.num_elements else 0) for p in parameters]


def owl_lines(
    sizes: Sequence[int], ratios: Sequence[Fraction], lam: Fraction = Fraction(8, 100)
) -> list[Line]:
    """The lines of OWL; the level is minus the shift of all densities.

    Args:
        sizes: elements of each parameter.
        ratios: the outlier ratio of each.
        lam: half the range of the densities.
    """
    low = min(ratios, default=Fraction(0))
    spread = max(ratios, default=low) - low
    densities = [(ratio - low) / spread * 2 * lam if spread else Fraction(0) for ratio in ratios]
    return [(n * (1 - density), n) for n, density in zip(sizes, densities, strict=True)]


def exact_number(what: str, value: object) -> Fraction:
    """A finite number, as the decimal that was written."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{what} is a {type(value).__name__}; expected a number.")
    if not math.isfinite(value):
        raise ValueError(f"{what} is {value!r}; expected a finite number.")
    return Fraction(value) if isinstance(value, numbers.Rational) else Fraction(repr(float(value)))


def block_of(name: str) -> str:
    """The name of the block of a parameter: up to its first number, or all of it."""
    found = _BLOCK.match(name)
    return found[0] if found else name


def outlier_ratios(
    parts: Sequence[Scored],
    num_live: Sequence[int],
    blocks: Sequence[str],
    multiple: float,
    communicator: Communicator,
) -> list[float]:
    """The share of live scores above a multiple of the mean score, per block. Collective.

    Args:
        parts: this rank's part of every parameter; the same list on all ranks.
        num_live: unpruned elements of every whole parameter.
        blocks: per parameter, the name of its block: the mean is that of a block's scores.
        multiple: of the mean.
        communicator: the ranks that have the parts.

    Returns:
        Per parameter, the ratio of its block.

    Raises:
        ValueError: a live score is NaN or infinite; names its parameter.

    Cost: three reads of the scores; all-reduces of 8, 16 and 8 bytes per parameter. The mean is
    exact to 2**-36 of the largest score, and does not depend on the sharding: exact_sums.
    """
    largest = largest_scores(parts, "an outlier ratio", communicator)
    names = [
        part.shard.name for part, value in zip(parts, largest, strict=True) if math.isnan(value)
    ]
    if names:
        text = f"{', '.join(names)}: a score is NaN; expected finite weights."
        raise naming.UnfitScores(text, "nan", names)

    def of_blocks(values: Iterable[int]) -> dict[str, int]:
        sums = dict.fromkeys(blocks, 0)
        for block, value in zip(blocks, values, strict=True):
            sums[block] += value
        return sums

    # One grid for all parameters of a block, so that their sums add up.
    top = dict.fromkeys(blocks, 0.0)
    for block, value in zip(blocks, largest, strict=True):
        top[block] = max(top[block], value)
    grids = {block: exact_sums.exponent_of(value) for block, value in top.items()}
    exponents = [grids[block] if top[block] > 0 else None for block in blocks]
    totals, sizes = of_blocks(grid_sums(parts, exponents, 1, communicator)), of_blocks(num_live)
    thresholds = {
        block: multiple * exact_sums.statistic("mean", totals[block], grids[block], sizes[block])
        for block in top
    }

    def count_above(i: int, span: range, scratch: Scratch) -> Count:
        threshold, magnitudes = thresholds[blocks[i]], parts[i].magnitudes(span, scratch)
        if isinstance(magnitudes, Tensor):
            return (magnitudes > threshold).sum()
        # In float64, to which no number is rounded.
        return int(np.count_nonzero(np.greater(magnitudes, threshold, signature="dd->?")))

    def count() -> Tensor:
        return torch.tensor(per_part(parts, count_above), dtype=torch.int64)

    counts = of_blocks(communicator.reduce(len(parts), count).tolist())
    return [counts[block] / max(1, sizes[block]) for block in blocks]
