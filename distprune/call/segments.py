"""The segments of a call: what is ranked together, and how much of it goes."""

from __future__ import annotations

import numbers
import re
import sys
from collections.abc import Mapping, Sequence

from torch import nn

from distprune.base.amount import (
    Amount,
    Bounded,
    Sparsities,
    per_parameter,
    to_bounds,
)
from distprune.base.blocks import BlockRule, Layout, Scope, layout_along, parse_pattern
from distprune.base.naming import plain_key
from distprune.base.selecting import matcher
from distprune.call.request import ONE_SEGMENT, InputDims, PruningArguments, Segments
from distprune.ranking.in_blocks import BlockedParameter
from distprune.ranks.collectives import Communicator
from distprune.shards.shard import Shard

_TURNED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_STRAIGHT = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_WEIGHT = re.compile(r"(.*_)?weight(_.*)?|original1")


def to_rule(
    scope: Scope, pattern: str | None, amount: Amount | Sparsities | None
) -> BlockRule | None:
    """The rule of the arguments ``scope``, ``pattern`` and ``amount``; None for one ranking.

    Raises:
        TypeError, ValueError: arguments that do not go together.
    """
    if scope not in ("global", "layer", "row"):
        raise ValueError(f"scope={scope!r}; expected 'global', 'layer' or 'row'.")
    if pattern is not None:
        kept_of = parse_pattern(pattern)
        if scope != "global":
            raise ValueError(
                f"scope={scope!r} beside pattern={pattern!r}; expected one of them: a pattern "
                "ranks each of its groups by itself."
            )
        if amount is not None:
            raise ValueError(
                f"amount={amount!r} beside pattern={pattern!r}; expected no amount: the pattern "
                "says how many elements are pruned."
            )
        return BlockRule(scope, None, kept_of)
    if scope == "global":
        return None
    if not isinstance(amount, numbers.Real) or isinstance(amount, numbers.Integral):
        raise ValueError(
            f"amount={amount!r} with scope={scope!r}; expected a fraction in [0.0, 1.0]: the "
            f"sparsity that every {scope} has after the call."
        )
    return BlockRule(scope, float(amount))


def agree_on_segments(
    arguments: PruningArguments, targets: Sequence[Shard], communicator: Communicator
) -> Segments:
    """What is ranked together, settled for the parameters of a call. Collective.

    Raises:
        TypeError: a sparsity that is no number.
        ValueError: a sparsity outside [0, 1], a floor above a ceiling, a key that is no parameter,
            a parameter without a sparsity; a pattern that does not fit the parameters, or whose
            direction is not known; ranks that differ in any of them. On every rank.

    Cost: an all-reduce of 40 bytes, unless all parameters are one segment without bounds.
    """
    if not arguments.divides:
        return ONE_SEGMENT
    named = [Bounded(t.name, (t.name, *t.places), t.numel, tuple(t.shape)) for t in targets]

    def settle() -> Segments:
        rule, amount = arguments.rule, arguments.amount
        sizes = [each.num_elements for each in named]
        if rule is not None and rule.needs_input_dim:
            given = _given_dims(arguments.input_dims or {}, targets)
            blocks = tuple(
                _grouped(rule, target, given.get(position)) if target.places else None
                for position, target in enumerate(targets)
            )
            return Segments(blocks=blocks, wanted=(rule.wanted,) * len(targets))
        if rule is not None:  # layers
            counts = [rule.counts(size, None)[1] for size in sizes]
            return Segments(counts=tuple(counts), wanted=(rule.wanted,) * len(sizes))
        if isinstance(amount, Mapping):
            shares = per_parameter("amount", amount, named, default=None)
            counts = [round(share * n) for share, n in zip(shares, sizes, strict=True)]
            return Segments(counts=tuple(counts), wanted=tuple(map(float, shares)))
        return Segments(to_bounds(named, arguments.min_sparsity, arguments.max_sparsity))

    def facts_of(segments: Segments) -> list[tuple[str, str]]:
        bounds = segments.bounds
        each: Sequence[object] = segments.counts or ()
        if segments.blocks is not None and not arguments.pipeline_parallel:
            each = segments.blocks  # ranks of a pipeline know the modules of their own parameters
        elif bounds is not None:
            pairs = zip(bounds.lowest, bounds.highest, strict=True)
            each = [f"{low} to {high} pruned elements" for low, high in pairs]
        return [(f"segments of {t.name}", str(of)) for t, of in zip(targets, each, strict=False)]

    return communicator.run(settle, facts_of)


def _grouped(rule: BlockRule, target: Shard, given: tuple[int, ...] | None) -> BlockedParameter:
    """The groups of a parameter."""
    shape = tuple(target.shape)
    dims = given or _dims_of(*target.places[0], shape, target.name)
    layout = _grouped_transpose(target.places[0][0], shape) if given is None else None
    if layout is not None:
        dims = ()
    elif dims:
        layout = layout_along(target.name, shape, dims)
    else:
        layout = Layout(1, target.numel)
    problem = rule.misfit(target.name, shape, layout)
    if problem is not None:
        raise ValueError(problem)
    _, num_pruned = rule.counts(target.numel, layout)
    groups = rule.blocks(target.numel, layout, num_pruned)
    return BlockedParameter(groups, rule, shape, dims)


def _given_dims(input_dims: InputDims, targets: Sequence[Shard]) -> dict[int, tuple[int, ...]]:
    """By position of a target, what the caller gave for it."""
    found: dict[int, tuple[int, ...]] = {}
    for key, value in input_dims.items():
        dims = (value,) if isinstance(value, int) else tuple(value)
        if isinstance(key, str):
            matches = matcher(key)
            positions = [i for i, target in enumerate(targets) if matches(target.name)]
        else:
            positions = [i for i, target in enumerate(targets) if plain_key(key) in target.places]
        if not positions:
            raise ValueError(
                f"input_dims: {key!r} matches none of the {len(targets)} parameters; expected "
                "(module, name) pairs of the call, or patterns for full names."
            )
        for position in positions:
            ndim = len(targets[position].shape)
            resolved = tuple(dim + ndim if dim < 0 else dim for dim in dims)
            found.setdefault(position, resolved)
    return found


def _dims_of(module: nn.Module, name: str, shape: Sequence[int], label: str) -> tuple[int, ...]:
    """The dimensions that an output sums over; () for a number."""
    ndim = len(shape)
    if ndim < 2:
        return tuple(range(ndim))
    kernel = tuple(range(2, ndim))
    if isinstance(module, _TURNED):
        return (0, *kernel)
    if isinstance(module, _STRAIGHT):
        return (1, *kernel)
    loaded = sys.modules.get("transformers.pytorch_utils")
    if loaded is not None and isinstance(module, loaded.Conv1D):
        return (0,)
    if ndim == 2 and _WEIGHT.fullmatch(name):
        return (1,)
    # transformers says it of its fused experts.
    is_turned = getattr(module, "is_transposed", None)
    if ndim == 3 and isinstance(is_turned, bool):
        return (1,) if is_turned else (2,)
    raise ValueError(
        f"{label} of {type(module).__name__} has the shape {list(shape)}, and along which "
        "dimension its inputs lie is not known. Give it with input_dims, such as "
        f"{{{label!r}: {ndim - 1}}} for [..., out, in] and {ndim - 2} for [..., in, out], or leave "
        "it out."
    )


def _grouped_transpose(module: nn.Module, shape: Sequence[int]) -> Layout | None:
    """The layout of a transposed convolution with groups, which has an outer dimension of these."""
    if not isinstance(module, _TURNED) or module.groups == 1 or len(shape) < 2:
        return None
    size = 1
    for length in shape[2:]:
        size *= length
    return Layout(module.groups, shape[0] // module.groups, shape[1], size)
