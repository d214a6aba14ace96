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
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Hashable, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any, Literal

from torch import nn

from distprune.base.amount import Bounded, SparsityBound, resolve_count, to_bounds, validate_amount
from distprune.base.naming import checked_pair, label_of, plain_key, tied_places
from distprune.budgets.lines import Line, divided, exact_number, lines_of, owl_lines
from distprune.budgets.outliers import OWL_MULTIPLE, HasOutlierRatios, block_of
from distprune.shards.reader import ShardReader

__all__ = ["erk", "owl", "uniform"]

# (module, name) pairs, as ``select`` lists them, or shapes by full name.
Parameters = Iterable[tuple[nn.Module, str]] | Mapping[str, Sequence[int]]
# By the pair or the name: the sparsity.
Sparsities = dict[Any, Fraction]


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
    named = _bounded(parameters)
    lines = lines_of("uniform", [each for _, each in named])
    return _divided(named, sparsity, lines, min_sparsity, max_sparsity)


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
    named = _bounded(parameters)
    lines = lines_of("erk", [each for _, each in named])
    return _divided(named, sparsity, lines, min_sparsity, max_sparsity)


def owl(
    parameters: Parameters,
    sparsity: float | Fraction,
    ratios: Mapping[Any, float] | HasOutlierRatios,
    *,
    lam: float = 0.08,
    threshold_multiple: float = OWL_MULTIPLE,
    per: Literal["block", "parameter"] = "block",
    min_sparsity: SparsityBound | None = None,
    max_sparsity: SparsityBound | None = None,
) -> Sparsities:
    """Outlier-weighed layerwise sparsity: the more outliers a layer has, the denser it stays.

    Let D be the outlier ratios, one per block. As in the authors' code the densities are::

        r = (D - min D) / (max D - min D) * 2 * lam        of each block, between 0 and 2 * lam
        density = r + shift                                one shift for all

    where the shift makes the total exact. For blocks of one size it is the authors' ``1 - S -
    mean(r)``, so that the mean of the sparsities is S; where sizes differ, their mean over all
    elements is. Densities above 1 or below 0 are clipped, and the others are shifted further.
    (The paper says |S_l - S| <= lam. Its code, and this, spread the densities over a range of 2 *
    lam whose mean, not whose middle, is 1 - S.)

    Args:
        parameters, sparsity, min_sparsity, max_sparsity: as for :func:`uniform`.
        ratios: outlier ratio of each parameter, >= 0, by (module, name), by full name, or by the
            name of a block ("model.layers.3") for all parameters below it; or activation
            statistics of :mod:`distprune.statistics`, of which ``outlier_ratios`` is called here,
            which is collective. They have to be equal on all ranks.
        lam: half the range of the densities; the paper uses 0.08, for language models at 70 %.
        threshold_multiple: with statistics, a score is an outlier if it is larger than this
            multiple of the mean of its block. The paper uses 5 (LLaMA), or 7 and 10.
        per: "block": parameters of one block share a ratio, as in the paper: the mean of theirs,
            weighted by elements. A block is the name up to its first number ("model.layers.3" of
            "model.layers.3.mlp.up_proj.weight"); a name without one is a block of its own.
            "parameter": each has its own ratio.

    Raises:
        TypeError, ValueError: as :func:`uniform`; ratios that are no numbers, or negative, or
            missing; ``lam`` outside [0, 1/2].

    Source: Yin et al., "Outlier weighed layerwise sparsity (OWL)", arXiv 2310.05175.
    """
    if per not in ("block", "parameter"):
        raise ValueError(f"per={per!r}; expected 'block' or 'parameter'.")
    exact_lam = exact_number("lam", lam)
    if not 0 <= exact_lam <= Fraction(1, 2):
        raise ValueError(f"lam={lam!r} is not in [0, 0.5]; expected half a range of densities.")
    if not isinstance(ratios, Mapping):
        if not isinstance(ratios, HasOutlierRatios):
            raise TypeError(
                f"ratios is a {type(ratios).__name__}; expected a mapping from (module, name) "
                "or full name to an outlier ratio, or statistics that have outlier_ratios()."
            )
        ratios = ratios.outlier_ratios(threshold_multiple=threshold_multiple, per=per)
    exact = {plain_key(key): _ratio(key, value) for key, value in ratios.items()}
    named = _bounded(parameters)
    own = [_ratio_of(each, exact) for _, each in named]
    if per == "block":
        own = _means_of_blocks([each for _, each in named], own)
    lines = owl_lines([each.num_elements for _, each in named], own, exact_lam)
    return _divided(named, sparsity, lines, min_sparsity, max_sparsity)


def _bounded(parameters: Parameters) -> list[tuple[Any, Bounded]]:
    """Each parameter, once, under its key."""
    if isinstance(parameters, Mapping):
        return [
            (name, Bounded(name, (name,), math.prod(shape), tuple(shape)))
            for name, shape in parameters.items()
        ]
    reader, found = ShardReader(), dict[Hashable, tuple[Any, Bounded]]()
    for position, pair in enumerate(parameters):
        checked_pair(pair, f"parameters[{position}]")
        key, shape = reader.identity(*pair)
        label, places = label_of(pair, position), tied_places(pair)
        bounded = Bounded(label, (label, *places), shape.numel(), tuple(shape))
        found.setdefault(key, (pair, bounded))
    return list(found.values())


def _divided(
    named: Sequence[tuple[Any, Bounded]],
    sparsity: float | Fraction,
    lines: Sequence[Line],
    min_sparsity: SparsityBound | None,
    max_sparsity: SparsityBound | None,
) -> Sparsities:
    if not named:
        raise ValueError("parameters is empty; expected at least one.")
    if isinstance(sparsity, numbers.Integral):
        raise TypeError(f"sparsity={sparsity!r} is an int; expected a float in [0, 1].")
    validate_amount(sparsity)  # type: ignore[arg-type]
    parameters = [each for _, each in named]
    sizes = [each.num_elements for each in parameters]
    bounds = to_bounds(parameters, min_sparsity, max_sparsity)
    lowest, highest = (
        ([0] * len(sizes), sizes) if bounds is None else (bounds.lowest, bounds.highest)
    )
    counts = divided(lines, lowest, highest, resolve_count(sparsity, sum(sizes)))  # type: ignore[arg-type]
    return {
        key: Fraction(count, size) if size else Fraction(0)
        for (key, _), count, size in zip(named, counts, sizes, strict=True)
    }


def _ratio_of(parameter: Bounded, ratios: Mapping[Hashable, Fraction]) -> Fraction:
    keys = [key for key in parameter.keys if key in ratios]
    if not keys:  # the longest name among the ratios that is a path above the parameter
        names = [name for name in parameter.keys if isinstance(name, str)]
        above = [
            key
            for key in ratios
            if isinstance(key, str) and any(n.startswith(f"{key}.") for n in names)
        ]
        keys = [max(above, key=len)] if above else []
    found = {ratios[key] for key in keys}
    if len(found) != 1:
        many = "several outlier ratios" if found else "no outlier ratio"
        raise ValueError(
            f"ratios has {many} for {parameter.label}; expected one of every parameter, under its "
            "(module, name), its full name, or the name of its block. Leave out parameters without "
            "statistics."
        )
    return found.pop()


def _means_of_blocks(parameters: Sequence[Bounded], ratios: Sequence[Fraction]) -> list[Fraction]:
    """Per parameter, the mean of the ratios of its block, weighted by elements."""
    blocks: dict[str, tuple[Fraction, int]] = {}
    for parameter, ratio in zip(parameters, ratios, strict=True):
        total, size = blocks.get(block_of(parameter.label), (Fraction(0), 0))
        blocks[block_of(parameter.label)] = (
            total + ratio * parameter.num_elements,
            size + parameter.num_elements,
        )
    means = {name: total / size if size else total for name, (total, size) in blocks.items()}
    return [means[block_of(parameter.label)] for parameter in parameters]


def _ratio(key: object, value: object) -> Fraction:
    shown = f"({type(key[0]).__name__}, {key[1]!r})" if isinstance(key, tuple) else repr(key)
    ratio = exact_number(f"the outlier ratio of {shown}", value)
    if ratio < 0:
        raise ValueError(f"the outlier ratio of {shown} is {value!r}; expected one >= 0.")
    return ratio
