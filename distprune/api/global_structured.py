"""``global_structured``: whole channels, ranked over many layers and all ranks.

Channels are numbered group by group, so that the order (score, group, index) is that of (score,
number). All ranks cut it alike, because all have the same numbers.
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor

from distprune.base.amount import (
    Amount,
    Bounded,
    Bounds,
    SparsityBound,
    collapsed,
    is_nearly_empty,
    to_bounds,
    validate_amount,
)
from distprune.base.exact_sums import Normalization, check_normalization
from distprune.base.naming import unwrap
from distprune.call.importance_scores import SignedScores, check_mapping
from distprune.call.report import ChannelGroupReport, StructuredReport
from distprune.call.request import Decision, PruningArguments, PruningCall
from distprune.call.run import prune_parameters
from distprune.methods.base import describe_argument
from distprune.methods.builtin import hook_for_chosen_mask, norm_order
from distprune.methods.channels import (
    ChannelCut,
    ChannelGroup,
    ChannelRows,
    ChannelSlice,
    Flags,
    Unit,
    count_live_of_channels,
    cut_channels,
    joint_norms,
    masks_without,
    normalized,
)
from distprune.ranks.process_groups import world
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
        listed.extend(groups)
        _check_groups(listed)
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


def _check_groups(listed: Sequence[ChannelGroup]) -> None:
    names = [each.name for each in listed if each.name]
    if len(set(names)) < len(names):
        raise ValueError(f"two groups have one name ({', '.join(names)}); expected one each.")
    reader = ShardReader()
    seen: dict[Hashable, str] = {}
    for each in listed:
        for part in each.parts:
            module, name = unwrap(part.parameter[0]), part.parameter[1]
            key = reader.identity(module, name)[0]
            if key in seen:
                raise ValueError(
                    f"{part.label} is in the groups {seen[key]} and {each.label}; expected each "
                    "parameter, under all its names, in one part of one group."
                )
            seen[key] = each.label


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


_SHOWN = 5


@dataclass
class GlobalStructured:
    """Prunes the channels of the lowest norms; see request.DecidesMasks.

    Attributes:
        groups: the caller's. Part i of all groups together is parameter i of the call.
        amount, n, unit, normalize, min_sparsity, max_sparsity: as for ``global_structured``.
        reports: what was decided of each group, once it has decided ...
        collapsed: ... and the names of the groups of which hardly anything is left.
    """

    groups: Sequence[ChannelGroup]
    amount: Amount
    n: float
    unit: Unit
    normalize: Normalization | None
    min_sparsity: SparsityBound | None
    max_sparsity: SparsityBound | None
    reports: list[ChannelGroupReport] = field(default_factory=list)
    collapsed: list[str] = field(default_factory=list)

    READS_VALUES = True

    def decide(self, call: PruningCall) -> Decision:
        by_group = _laid_out(self.groups, call)
        parts = [part for of_group in by_group for part in of_group]
        group_sizes = [of_group[0].num_channels for of_group in by_group]
        bounds = self._agree_on_bounds(call, group_sizes)
        sizes = _channel_sizes(by_group)
        num_live = count_live_of_channels(parts, sizes, call.communicator)
        ranked = [[part for part in of_group if part.is_ranked] for of_group in by_group]
        norms = joint_norms(
            [partial(_read, call, part) for of_group in ranked for part in of_group],
            self.n,
            _channel_sizes(ranked),
            call.communicator,
        )
        names = [group.label for group in self.groups]
        # From here to the masks every rank does the same with the same numbers.
        scores, live = norms.numpy(), num_live.numpy() > 0
        _refuse(np.isnan(scores) & live, "contain NaN; expected numbers", names, group_sizes)
        if self.normalize is not None:
            what = f"are infinite, which normalize={self.normalize!r} cannot divide"
            _refuse(np.isinf(scores) & live, what, names, group_sizes)
            ends = np.cumsum(group_sizes)[:-1]
            scores = normalized(scores, np.split(live, ends), self.normalize)
        cut = cut_channels(scores, num_live.numpy(), group_sizes, self.amount, self.unit, bounds)
        self._report(names, group_sizes, live, cut, sizes, bounds)
        return Decision(
            lambda: masks_without(call, parts, torch.from_numpy(cut.dropped)),
            threshold=cut.threshold,
            num_ties=cut.num_ties,
            num_ties_pruned=cut.num_ties_pruned,
        )

    def _agree_on_bounds(self, call: PruningCall, group_sizes: Sequence[int]) -> Bounds | None:
        if self.min_sparsity is None and self.max_sparsity is None:
            return None
        bounded = [
            Bounded(group.label, (group.label,), size, (size,))
            for group, size in zip(self.groups, group_sizes, strict=True)
        ]
        return call.communicator.run(
            lambda: to_bounds(bounded, self.min_sparsity, self.max_sparsity),
            lambda bounds: [("bounds of the groups", str(bounds))],
        )

    def _report(
        self,
        names: Sequence[str],
        group_sizes: Sequence[int],
        live: Flags,
        cut: ChannelCut,
        sizes: Tensor,
        bounds: Bounds | None,
    ) -> None:
        self.reports, first = [], 0
        for name, size in zip(names, group_sizes, strict=True):
            of_group = slice(first, first + size)
            self.reports.append(
                ChannelGroupReport(
                    name,
                    size,
                    size - int(live[of_group].sum()),
                    int(cut.dropped[of_group].sum()),
                    int(sizes[first]) if size else 0,
                )
            )
            first += size
        emptied = collapsed([(group.num_channels, group.num_pruned) for group in self.reports])
        floors = [0] * len(names) if bounds is None else bounds.lowest
        self.collapsed = [
            names[i]
            for i in emptied
            # Not by an earlier call, and not because the caller asked for it.
            if self.reports[i].num_pruned_now
            and not is_nearly_empty(
                group_sizes[i], max(floors[i], self.reports[i].num_pruned_before)
            )
        ]


def _laid_out(groups: Sequence[ChannelGroup], call: PruningCall) -> list[list[ChannelSlice]]:
    """By group, its parts in the parameters of the call; checked."""
    by_group: list[list[ChannelSlice]] = []
    positions, first = iter(range(len(call.shards))), 0
    for group in groups:
        parts = []
        for part in group.parts:
            position = next(positions)
            shard = call.shards[position]
            dim = range(len(shard.shape))[part.dim]
            if shard.shape[dim] % part.size:
                raise ValueError(
                    f"{shard.name} in group {group.label}: {shard.shape[dim]} indices along dim "
                    f"{part.dim}; expected a multiple of size={part.size}."
                )
            parts.append(ChannelSlice(position, shard, dim, part.size, first, part.is_ranked))
        if len({part.num_channels for part in parts}) > 1:
            each = ", ".join(f"{part.num_channels} of {part.shard.name}" for part in parts)
            raise ValueError(
                f"the parts of group {group.label} have different numbers of channels: {each}; "
                "expected the same. Check dim and size of each part."
            )
        _check_scores(group, parts, call)
        by_group.append(parts)
        first += parts[0].num_channels
    return by_group


def _check_scores(group: ChannelGroup, parts: Sequence[ChannelSlice], call: PruningCall) -> None:
    ranked = [part for part in parts if part.is_ranked]
    missing = [part.shard.name for part in ranked if call.scores[part.position] is None]
    if missing and len(missing) < len(ranked):
        raise ValueError(
            f"importance_scores has scores of some parameters of group {group.label}, and none "
            f"of {', '.join(missing)}; expected scores of all that are ranked, or of none. "
            "is_ranked=False leaves a part out of the norm."
        )
    for part in ranked:
        scores = call.scores[part.position]
        tensor = scores if isinstance(scores, Tensor) else part.shard.values
        if not tensor.dtype.is_floating_point:
            raise NotImplementedError(
                f"{part.shard.name}: scores of dtype {tensor.dtype}; expected floating point."
            )


def _channel_sizes(by_group: Sequence[Sequence[ChannelSlice]]) -> Tensor:
    """int64 [channels]: elements of each whole channel, in the given parts of its group."""
    sizes = torch.tensor([sum(part.channel_size for part in parts) for parts in by_group])
    return sizes.repeat_interleave(torch.tensor([parts[0].num_channels for parts in by_group]))


def _read(call: PruningCall, part: ChannelSlice) -> ChannelRows:
    return part.counted_rows(call.score_or_value(part.position).detach(), part.shard.mask)


def _refuse(wrong: Flags, what: str, names: Sequence[str], group_sizes: Sequence[int]) -> None:
    """Raise ValueError with the names and channels of scores that are wrong."""
    if not wrong.any():
        return
    ends = np.cumsum(group_sizes)[:-1]
    shown = "; ".join(
        f"{name}, channels {', '.join(map(str, np.flatnonzero(of_group)[:_SHOWN]))}"
        for name, of_group in zip(names, np.split(wrong, ends), strict=True)
        if of_group.any()
    )
    raise ValueError(f"the norms of {shown} {what}.")
