"""``global_structured``: whole channels, ranked over many layers and all ranks."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Iterable
from typing import TYPE_CHECKING, Literal

from distprune._common.amount import Amount, SparsityBound, validate_amount
from distprune._common.exact_sums import Normalization, check_normalization
from distprune._common.naming import unwrap
from distprune._common.process_groups import world
from distprune.call.importance_scores import SignedScores, check_mapping
from distprune.call.report import StructuredReport
from distprune.call.request import PruningArguments
from distprune.call.run import prune_parameters
from distprune.methods.base import describe_argument
from distprune.methods.builtin import hook_for_chosen_mask
from distprune.methods.channels import ChannelGroup
from distprune.methods.global_channels import GlobalStructured
from distprune.methods.structured import norm_order
from distprune.shards.parameters import Scores
from distprune.shards.reader import ShardReader

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def global_structured(
    groups: Iterable[ChannelGroup],
    *,
    amount: Amount,
    n: float = 2,
    importance_scores: Scores | None = None,
    unit: Literal["channels", "elements"] = "channels",
    normalize: Normalization | None = None,
    min_sparsity: SparsityBound | None = None,
    max_sparsity: SparsityBound | None = None,
    group: ProcessGroup | None = None,
) -> StructuredReport:
    """Prune whole channels of many layers together: one ranking over all of them and all ranks.

    A channel is a slice of each parameter of a :class:`ChannelGroup`: a neuron of an MLP with its
    rows and its column, a head with its rows of q, k and v and its columns of o. Its score is the
    L_n norm of all its elements in all those parameters. The channels of the lowest scores are
    pruned in all of them. They are masked, and nothing changes its shape: the report says what
    could be removed.

    The mask that each rank gets is, bit for bit, its slice of the mask that one process would
    compute: norms are exact sums, and channels are ordered by (score, position of the group, index
    of the channel). Shards may cut channels anywhere.

    Collective: every rank of ``group`` calls it with the same arguments, plain modules included:
    ranks with different parameters, such as pipeline stages, are refused.

    Args:
        groups: a parameter is in one group at most. The presets of
            ``distprune.integrations.channels`` make them for models of transformers.
        amount: a fraction of the channels of which something is left, in [0, 1], or a count.
        n: order of the norm, as in ``torch.norm``: any number, 0 (non-zero elements) and +-inf
            included. ``n=1`` adds up |scores|: a criterion, summed over the channel. Pruned
            elements count as 0.
        importance_scores: norms of these instead of the values: by (module, name), tensors or
            ``FactoredScores``, as for ``global_unstructured``. For all ranked parameters of a
            group or for none; those of a part that is not ranked are not used.
        unit: what the amount counts. Of "elements" (those that are not pruned yet), as many
            channels are pruned, in their order, as fit into the amount.
        normalize: "rms", "l2" or "mean": the norms of each group are divided by their root mean
            square, their l2 norm, or their mean, over the channels of which something is left, so
            that layers of different scales and channels of different sizes compare.
        min_sparsity, max_sparsity: how many channels of each single group are to be pruned after
            the call, at least and most: a share in [0, 1] of all its channels, or a mapping from
            names of groups. Rounded up and down to whole channels. Each group first gives its
            lowest up to its floor; then channels go in order, passing over groups at their ceiling.
        group: the ranks that take part; every rank by default.

    Returns:
        A report of channels and elements, the same on every rank.

    Raises:
        TypeError: arguments of a wrong type.
        ValueError: a parameter in two groups, or two parts; shapes that do not fit a group; two
            groups of one name; scores of some parameters of a group; norms that are NaN, or
            infinite with ``normalize``; an amount out of range or outside of the bounds;
            ranks that differ in their arguments. Named, on every rank.
        IndexError: a ``dim`` that a parameter does not have.
        NotImplementedError: a layout or wrapper that is not supported; scores that are no
            floating-point numbers.

    On an error no module has changed, on any rank. Warns, on every rank, if at most 1 % of the
    channels of a group are left, and at least 10 % of all channels.

    Cost: two reads of the values (one for n = 0 and +-inf), and one write of the masks. 16 bytes
    per channel on the wire, 8 more if something was pruned before. Memory for the masks, a few
    megabytes, and, one parameter at a time, 4 bytes per local element of ``FactoredScores``, and
    about 40 bytes per local element of FSDP1's flat runs.

    Source: the coupled structures are those of LLM-Pruner, Ma et al., arXiv 2305.11627.
    """
    listed: list[ChannelGroup] = []
    method = GlobalStructured(listed, amount, n, unit, normalize, min_sparsity, max_sparsity)

    def make_arguments() -> PruningArguments:
        listed.extend(groups if isinstance(groups, Iterable) else ())
        _check_groups(groups, listed)
        _check_rest(amount, n, importance_scores, unit, normalize)
        return PruningArguments(
            parameters=[part.parameter for each in listed for part in each.parts],
            method=method,
            make_hook=hook_for_chosen_mask,
            importance_scores=importance_scores,
            facts=[
                ("amount", describe_argument(amount)),
                ("n", describe_argument(n)),
                ("unit", unit),
                ("normalize", str(normalize)),
                ("min_sparsity and max_sparsity", _given(min_sparsity) + _given(max_sparsity)),
                *(("channel group", _described(each)) for each in listed),
            ],
            amount=amount,
        )

    of_elements = vars(prune_parameters(make_arguments, world(group))) | {
        "collapsed": tuple(method.collapsed)
    }
    report = StructuredReport(**of_elements, groups=tuple(method.reports))
    if report.collapsed:
        warnings.warn(
            f"the ranking over all groups has left hardly any channels of "
            f"{', '.join(report.collapsed[:5])}: the model may be useless. Compare the groups by "
            "normalize='rms', or bound what each may lose by max_sparsity=.",
            stacklevel=2,
        )
    return report


def _check_groups(groups: object, listed: list[ChannelGroup]) -> None:
    if not isinstance(groups, Iterable):
        raise TypeError(f"groups is a {type(groups).__name__}; expected ChannelGroups.")
    if not listed:
        raise ValueError("groups is empty; expected at least one ChannelGroup.")
    for position, each in enumerate(listed):
        if not isinstance(each, ChannelGroup):
            raise TypeError(
                f"groups[{position}] is a {type(each).__name__}; expected a ChannelGroup, such as "
                "ChannelGroup([ChannelPart((module, 'weight'), dim=0)])."
            )
    names = [each.name for each in listed if each.name]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"two groups have the name {twice!r}; expected one each.")
    reader = ShardReader()
    seen: dict[Hashable, ChannelGroup] = {}
    for each in listed:
        for part in each.parts:
            module, name = unwrap(part.parameter[0]), part.parameter[1]
            key = reader.identity(module, name)[0]
            if key in seen:
                where = (
                    f"twice in group {each.label}"
                    if seen[key] is each
                    else f"in the groups {seen[key].label} and {each.label}"
                )
                raise ValueError(
                    f"{part.label} is {where}; expected each parameter, under all its names, in "
                    "one part of one group."
                )
            seen[key] = each


def _check_rest(
    amount: Amount, n: object, importance_scores: object, unit: str, normalize: object
) -> None:
    validate_amount(amount)
    if n is None or isinstance(n, bool) or norm_order(n) is None:
        raise TypeError(f"n={n!r}; expected a number, the order of the norm.")
    check_mapping(importance_scores)
    if isinstance(importance_scores, SignedScores):
        raise TypeError(
            "importance_scores are signed, and a norm is one of |score|; expected scores of which "
            "the smallest absolute values are to be pruned."
        )
    if unit not in ("channels", "elements"):
        raise ValueError(f"unit={unit!r}; expected 'channels' or 'elements'.")
    check_normalization(normalize)


def _given(bound: SparsityBound | None) -> str:
    return "n" if bound is None else "y"


def _described(each: ChannelGroup) -> str:
    parts = [f"{p.label} dim {p.dim} size {p.size} ranked {p.is_ranked}" for p in each.parts]
    return f"{each.name}: {', '.join(parts)}"
