"""The oracle: what one process that sees every element prunes. Slow, short, obviously right.

It sorts values, not bits, in Python, and knows nothing of shards or of distprune.
Masks are bool tensors in the shape of the parameter, True = keep.
"""

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from math import ceil, floor

import torch
from torch import Tensor


def num_to_prune(amount: int | float, num_remaining: int) -> int:
    """An integer is a count, a float a fraction of what is left, rounded half to even."""
    return amount if isinstance(amount, int) else round(amount * num_remaining)


def prune(
    scores: Sequence[Tensor],
    amount: int | float,
    masks: Sequence[Tensor] | None = None,
    key: Callable[[float], float] = abs,
) -> list[Tensor]:
    """Masks after the lowest |score| of all tensors together have been pruned.

    Order: |score|, then the position of the tensor in the list, then the row-major
    index. Elements that ``masks`` has pruned already do not compete and stay pruned.
    """
    keeps = _copies(scores, masks)
    # float64 holds every fp16, bf16, fp32 and fp64 value, so promotion changes no order.
    remaining = [
        (key(value), position, index)
        for position, score in enumerate(scores)
        for index, value in enumerate(score.detach().double().flatten().tolist())
        if keeps[position].view(-1)[index]
    ]
    for _, position, index in sorted(remaining)[: num_to_prune(amount, len(remaining))]:
        keeps[position].view(-1)[index] = False
    return keeps


def prune_bounded(
    scores: Sequence[Tensor],
    k: int,
    min_sparsity: Sequence[float],
    max_sparsity: Sequence[float],
    masks: Sequence[Tensor] | None = None,
    key: Callable[[float], float] = abs,
) -> list[Tensor] | None:
    """Masks after exactly ``k`` more elements, with a floor and a ceiling for each tensor.

    First each tensor's lowest elements up to ceil(min_sparsity * n) pruned ones; then in
    the total order, passing over tensors with floor(max_sparsity * n) pruned ones.
    None if that is impossible. A bound is the decimal that it is written as.
    """
    keeps = _copies(scores, masks)
    low = [
        ceil(Fraction(str(s)) * keep.numel()) for s, keep in zip(min_sparsity, keeps, strict=True)
    ]
    high = [
        floor(Fraction(str(s)) * keep.numel()) for s, keep in zip(max_sparsity, keeps, strict=True)
    ]
    pruned = [int((~keep).sum()) for keep in keeps]
    wanted = sum(pruned) + k
    remaining = sorted(
        (key(value), position, index)
        for position, score in enumerate(scores)
        for index, value in enumerate(score.detach().double().flatten().tolist())
        if keeps[position].view(-1)[index]
    )
    for limits, budget in ((low, sum(map(max, low, pruned))), (high, wanted)):
        for _, position, index in remaining:
            if keeps[position].view(-1)[index] and pruned[position] < limits[position]:
                if sum(pruned) == budget:
                    break
                keeps[position].view(-1)[index] = False
                pruned[position] += 1
    return keeps if sum(pruned) == wanted and all(map(int.__le__, low, pruned)) else None


def _copies(like: Sequence[Tensor], masks: Sequence[Tensor] | None) -> list[Tensor]:
    if masks is None:
        return [torch.ones(tensor.shape, dtype=torch.bool) for tensor in like]
    return [(mask != 0).clone(memory_format=torch.contiguous_format) for mask in masks]


def prune_in_blocks(
    scores: Tensor, groups: Sequence[Sequence[int]], num_pruned: int, mask: Tensor | None = None
) -> Tensor:
    """Mask after each group has lost its elements of lowest |score|, lower indices first.

    Args:
        scores: of one parameter.
        groups: row-major indices of the elements of each group.
        num_pruned: of each group; elements that ``mask`` has pruned already count.
    """
    (keep,) = _copies([scores], None if mask is None else [mask])
    flat, values = keep.view(-1), scores.detach().double().flatten().tolist()
    for group in groups:
        left = sorted((abs(values[i]), i) for i in group if flat[i])
        for _, index in left[: max(0, num_pruned - (len(group) - len(left)))]:
            flat[index] = False
    return keep


def rows_of(shape: Sequence[int], inputs: Sequence[int]) -> list[list[int]]:
    """Row-major indices of the elements that each output sums over.

    Args:
        inputs: the dimensions that an output sums over.
    """
    outputs = [dim for dim in range(len(shape)) if dim not in inputs]
    size = 1
    for dim in inputs:
        size *= shape[dim]
    index = torch.arange(torch.Size(shape).numel()).view(tuple(shape))
    return index.permute(*outputs, *inputs).reshape(-1, size).tolist()


def groups_along(shape: Sequence[int], dim: int, m: int) -> list[list[int]]:
    """Row-major indices of each m neighbours along a dimension."""
    index = torch.arange(torch.Size(shape).numel()).view(tuple(shape))
    return index.movedim(dim, -1).reshape(-1, m).tolist()


def normalized(scores: Tensor, normalize: str | None, keep: Tensor | None = None) -> Tensor:
    """Scores of a whole parameter divided by a statistic of those that are kept.

    Args:
        scores: floating point.
        normalize: "rms", "l2", "mean" or None.
        keep: bool, of the same shape; None: all.
    """
    if normalize is None:
        return scores
    wide = scores.double() if scores.dtype == torch.float64 else scores.float()
    numbers = wide.flatten() if keep is None else wide[keep]
    power = 1 if normalize == "mean" else 2
    largest = max((abs(value) for value in numbers.tolist()), default=0.0)
    if math.isnan(largest) or not largest:
        return wide
    unit = Fraction(2) ** (power * math.frexp(largest)[1] - 36)
    total = sum(round(abs(Fraction(value)) ** power / unit) for value in numbers.tolist()) * unit
    mean = total if normalize == "l2" else total / len(numbers)
    divisor = float(mean) if power == 1 else _square_root(mean)
    if wide.dtype == torch.float64:
        return wide * (1 / divisor)
    # 24 binary digits, of any exponent; the product is exact in float64, and is rounded once.
    fraction, exponent = math.frexp(1 / divisor)
    scale = math.ldexp(float(torch.tensor(fraction, dtype=torch.float32)), exponent)
    return (wide.double() * scale).float()


def _square_root(number: Fraction) -> float:
    """The square root of a fraction whose exponent float64 may not hold."""
    shift = (number.numerator.bit_length() - number.denominator.bit_length()) // 2
    return math.ldexp(math.sqrt(number / Fraction(2) ** (2 * shift)), shift)
