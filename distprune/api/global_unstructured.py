"""``global_unstructured``: one ranking over many parameters and all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup

from distprune.base.amount import Amount, Sparsities, SparsityBound
from distprune.base.blocks import Scope
from distprune.base.exact_sums import Normalization, check_normalization
from distprune.call.reading import check_mapping, check_order
from distprune.call.report import PruningReport, warn_of_collapse
from distprune.call.request import InputDims, PruningArguments, to_rule
from distprune.call.run import prune_parameters
from distprune.methods.base import BasePruningMethod, hook_for_chosen_mask
from distprune.ranks.collectives import world
from distprune.shards.reader import Scores


def global_unstructured(
    parameters: Iterable[tuple[nn.Module, str]],
    pruning_method: type[BasePruningMethod],
    importance_scores: Scores | None = None,
    *,
    amount: Amount | Sparsities | None = None,
    group: ProcessGroup | None = None,
    min_sparsity: SparsityBound | None = None,
    max_sparsity: SparsityBound | None = None,
    pipeline_parallel: bool = False,
    normalize: Normalization | None = None,
    scope: Scope = "global",
    pattern: str | None = None,
    input_dims: InputDims | None = None,
    **kwargs: Any,
) -> PruningReport:
    """Prune many parameters together: one ranking over all of them, and over all ranks.

    The mask that each rank gets is, bit for bit, its slice of the mask that one
    process would compute. Elements are ordered by (score, position of the
    parameter in the list, row-major index in the whole parameter), and exactly as many
    as asked for are pruned. (RandomUnstructured is the one exception: a process without a
    process group draws torch's own random numbers, as a drop-in has to; with a group, of one
    rank or a thousand, the mask is the same.)

    Every rank of ``group`` has to call this with the same list and arguments when
    a process group is initialised, for plain modules too: nothing tells the
    inside of a DDP replica from a module of one rank. A single rank says so with a
    group of its own.

    Args:
        parameters: (module, name) pairs, as ``select`` lists them. A tied
            parameter counts once.
        pruning_method: a class with ``PRUNING_TYPE`` "unstructured", such as
            ``L1Unstructured`` or ``RandomUnstructured``.
        importance_scores: rank by |scores| instead of |values|: by (module, name),
            ``FactoredScores``, which are computed while they are ranked, or a tensor of the
            parameter's shape; for a sharded parameter whole, or a
            DTensor laid out like it, or, under FSDP1, this rank's run of it: 1-d, in the order
            of the parameter's memory, as its gradient is. Parameters that are not in it rank by
            value. A tied parameter may stand under any of its names; any other key is an error.
        amount: a fraction of what is unpruned in [0, 1], or a count, of all parameters together; or
            a mapping from (module, name), or from full names, to the sparsity of every parameter,
            such as ``budgets.erk(parameters, 0.5)`` gives. With a mapping each parameter is ranked
            by itself: of n elements it has round(sparsity * n) pruned ones after the call, halves
            to even, or as many as before, if these are more. For methods that rank, as the bounds.
        group: the ranks that take part; every rank by default.
        min_sparsity, max_sparsity: how much of each single parameter is to be pruned after
            the call, at least and at most: a sparsity in [0, 1] for all of them, or a mapping from
            (module, name), or from full names, for some. Of n elements at least ceil(min_sparsity
            * n) and at most floor(max_sparsity * n); a parameter that is pruned further already
            just gets no more. Exactly as many elements are pruned overall: first the lowest of
            each parameter up to its floor, then in total order, passing over parameters at
            their ceiling. For methods that rank: L1Unstructured, RandomUnstructured (which then
            draws the same numbers with and without a process group), and ``DISTRIBUTED =
            "scores"``.
        pipeline_parallel: the ranks hold different parts of one model, and each passes the
            parameters that it has (an empty list if none), with full names as ``select`` gives
            them. One ranking goes over the union of all lists; its ties go by name ("layers.2"
            before "layers.10") and not by position, in a single process that holds everything,
            too. Parameters of one name are replicas and count once; replicas that differ are an
            error, and if they are meant to (experts, say), give them different names:
            ``NamedParameter(module, name, fqn)``.
        normalize: "rms", "l2" or "mean": the scores of each parameter are divided by their root
            mean square, by their l2 norm, or by the mean of |score|, over its unpruned elements,
            before they are ranked, so that parameters of different scales compare. None ranks
            them as they are, as torch does: on pretrained language models this empties some
            parameters, and "rms" is the better choice. A statistic is an exact sum, and the result
            is rounded once to float32 (float64 for float64 scores): the same on any sharding.
        scope: what is ranked together: "global" all parameters; "layer" each parameter by itself;
            "row" the elements that each output sums over: a row of a Linear, a column of
            transformers' Conv1D, a filter of a convolution. With the last two, ``amount`` is a
            fraction: the sparsity of every layer or row after the call, rounded to a count by
            itself, halves to even. Elements that are pruned already count, and stay pruned. For
            methods that rank, as the bounds; without these, and without a mapping.
        pattern: "N:M" instead of an amount: of every M neighbours along the inputs, N are kept; of
            a convolution, at each position of the kernel. M has to divide the number of inputs.
        input_dims: where the inputs of a parameter lie, if its module does not say it, as for
            stacked experts: by (module, name), or by pattern for full names, the dimension that an
            output sums over, and for a convolution those of the kernel. The first key that matches
            counts.
        kwargs: for the method: whatever else it accepts.

    Returns:
        A report, the same on every rank.

    Raises:
        TypeError: a method that is not unstructured, a keyword that it does not accept, or
            arguments of a wrong type.
        ValueError: scores of a parameter that is not in the list; a NaN score, or an infinite one
            with ``normalize``; an amount out of range, an empty list; an amount that is too small
            for the floors or too large for the ceilings; ranks that differ in their arguments.
            Named, on every rank.
        NotImplementedError: a layout or wrapper that is not supported; a method that does not say
            how it works on shards, or that does not rank, with bounds, a mapping or a scope.

    On an error no module has changed, on any rank.

    Warns, on every rank, if the ranking leaves at most 1 % of a parameter of two or more dimensions
    where at least 10 % of all elements are left: see ``PruningReport.collapsed``.

    Cost: one read of the scores (two for replicated parameters, which are compared) and one
    write of the masks; a dozen all-reduces, about 100 KB in all whatever the size of the
    model; memory for the masks and a few megabytes. With ``normalize`` two more reads, and 24
    bytes per parameter. With bounds, two to four times as much
    in practice (one ranking per round of ranking.[Note: active set]), and about 100 KB
    more per parameter whose bound decides. With a mapping or the scope "layer" there is no common
    ranking but one of each parameter, side by side: about 70 KB per parameter. Rows and groups of
    N:M that are whole on a rank take one read, and memory for a
    chunk or, where they are columns, for a matrix of up to 4M elements. Those that the sharding
    cuts (row-wise TP, the edges of FSDP1's runs) take one read more, and each key is all-reduced:
    2, 4 or 8 bytes of an element.
    """
    report = prune_parameters(
        lambda: global_arguments(
            parameters,
            pruning_method,
            importance_scores,
            amount=amount,
            min_sparsity=min_sparsity,
            max_sparsity=max_sparsity,
            pipeline_parallel=pipeline_parallel,
            normalize=normalize,
            scope=scope,
            pattern=pattern,
            input_dims=input_dims,
            **kwargs,
        ),
        world(group),
    )
    warn_of_collapse(report)
    return report


# What a call takes beside the arguments of its method, but for what decides these.
_OPTIONS = ("min_sparsity", "max_sparsity", "normalize", "input_dims", "pipeline_parallel")


def global_arguments(
    parameters: Iterable[tuple[nn.Module, str]],
    pruning_method: Callable[..., BasePruningMethod],
    importance_scores: Scores | None = None,
    *,
    amount: Amount | Sparsities | None = None,
    scope: Scope = "global",
    pattern: str | None = None,
    **options: Any,
) -> PruningArguments:
    """The arguments of :func:`global_unstructured`, checked, with the method made. Local."""
    of_call = {name: options.pop(name) for name in _OPTIONS if name in options}
    check_mapping(importance_scores)
    check_normalization(of_call.get("normalize"))
    rule = to_rule(scope, pattern, amount)
    bounds = of_call.get("min_sparsity"), of_call.get("max_sparsity")
    if bounds != (None, None) and (rule is not None or isinstance(amount, Mapping)):
        raise ValueError(
            f"min_sparsity={bounds[0]!r}, max_sparsity={bounds[1]!r} beside a mapping as "
            "amount, a scope or a pattern; expected one of them: each decides how much of every "
            "parameter is pruned. The functions of distprune.budgets take such bounds."
        )
    if amount is not None or pattern is not None:
        # A mapping or a pattern gives the total, and the method's own amount is not used.
        of_method = 0 if amount is None or isinstance(amount, Mapping) else amount
        options = {"amount": of_method, **options}
    method = pruning_method(**options)
    kind = getattr(method, "PRUNING_TYPE", None)
    if kind != "unstructured":
        raise TypeError(
            'Only "unstructured" PRUNING_TYPE is supported for the `pruning_method`: '
            f"{pruning_method} has type {kind!r}."
        )
    expected = "pruning_method=prune.LowestScore, which is criterion.pruning_method"
    check_order(importance_scores, getattr(method, "IGNORES_SIGN", False), expected)
    return PruningArguments(
        parameters=parameters,
        method=str(type(method).__name__),
        decide=method.decide,
        reads_values=method.READS_VALUES,
        make_hook=hook_for_chosen_mask,
        importance_scores=importance_scores,
        facts=method.describe_arguments((), options),
        amount=amount,
        rule=rule,
        **of_call,
    )
