"""``global_structured``: whole channels, ranked over many layers and all ranks.

Channels are numbered group by group, so that the order (score, group, index) is that of (score,
number). All ranks cut it alike, because all have the same numbers.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from distprune.base.amount import Amount, validate_amount
from distprune.base.exact_sums import Normalization, check_normalization
from distprune.base.naming import unwrap
from distprune.call.reading import SignedScores, check_mapping
from distprune.call.report import ChannelGroupReport, StructuredReport
from distprune.call.request import Decision, PruningArguments, PruningCall
from distprune.call.run import prune_parameters
from distprune.methods.base import describe_argument
from distprune.methods.builtin import hook_for_chosen_mask, norm_order
from distprune.methods.channels import (
    ChannelGroup,
    ChannelSlice,
    Flags,
    Floats,
    channel_sizes,
    joint_norms,
    live_channels,
    lowest_channels,
    normalized,
    prune_channels,
)
from distprune.ranks.process_groups import world
from distprune.shards.reader import Scores, ShardReader

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def global_structured(
    groups: Iterable[ChannelGroup],
    *,
    amount: Amount,
    n: float = 2,
    importance_scores: Scores | None = None,
    normalize: Normalization | None = None,
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
        normalize: "rms", "l2" or "mean": the norms of each group are divided by their root mean
            square, their l2 norm, or their mean, over the channels of which something is left, so
            that layers of different scales and channels of different sizes compare.
        group: the ranks that take part; every rank by default.

    Returns:
        A report of channels and elements, the same on every rank.

    Raises:
        TypeError: arguments of a wrong type.
        ValueError: a parameter in two groups, or two parts; shapes that do not fit a group; scores
            of some parameters of a group; norms that are NaN, or infinite with ``normalize``; an
            amount out of range; ranks that differ in their arguments. Named, on every rank.
        IndexError: a ``dim`` that a parameter does not have.
        NotImplementedError: a layout or wrapper that is not supported; scores that are no
            floating-point numbers.

    On an error no module has changed, on any rank.

    Cost: two reads of the values (one for n = 0 and +-inf), and one write of the masks. 16 bytes
    per channel on the wire, 8 more if something was pruned before. Memory for the masks, a few
    megabytes, and, one parameter at a time, 4 bytes per local element of ``FactoredScores``, and
    about 40 bytes per local element of FSDP1's flat runs.

    Source: the coupled structures are those of LLM-Pruner, Ma et al., arXiv 2305.11627.
    """
    method = GlobalStructured(amount, n, normalize)

    def make_arguments() -> PruningArguments:
        method.groups.extend(groups)
        _check(method, importance_scores)
        parts = [part for each in method.groups for part in each.parts]
        return PruningArguments(
            parameters=[part.parameter for part in parts],
            method=method,
            make_hook=hook_for_chosen_mask,
            importance_scores=importance_scores,
            facts=[
                ("amount", describe_argument(amount)),
                ("n", describe_argument(n)),
                ("normalize", str(normalize)),
                *(("channel group", f"{each.label}: {len(each.parts)}") for each in method.groups),
                *((p.label, f"dim {p.dim} size {p.size} ranked {p.is_ranked}") for p in parts),
            ],
            amount=amount,
        )

    report = prune_parameters(make_arguments, world(group))
    return StructuredReport(**vars(report), groups=tuple(method.reports))


def _check(method: GlobalStructured, importance_scores: object) -> None:
    reader = ShardReader()
    seen: dict[Hashable, str] = {}
    for each in method.groups:
        for part in each.parts:
            key, _ = reader.identity(unwrap(part.parameter[0]), part.parameter[1])
            if key in seen:
                raise ValueError(
                    f"{part.label} is in the groups {seen[key]} and {each.label}; expected each "
                    "parameter, under all its names, in one part of one group."
                )
            seen[key] = each.label
    validate_amount(method.amount)
    if method.n is None or isinstance(method.n, bool) or norm_order(method.n) is None:
        raise TypeError(f"n={method.n!r}; expected a number, the order of the norm.")
    check_mapping(importance_scores)
    if isinstance(importance_scores, SignedScores):
        raise TypeError(
            "importance_scores are signed, and a norm is one of |score|; expected scores of which "
            "the smallest absolute values are to be pruned."
        )
    check_normalization(method.normalize)


@dataclass
class GlobalStructured:
    """Prunes the channels of the lowest norms; see request.DecidesMasks.

    Attributes:
        amount, n, normalize: as for ``global_structured``.
        groups: the caller's. Part i of all groups together is parameter i of the call.
        reports: what was decided of each group, once it has decided.
    """

    amount: Amount
    n: float
    normalize: Normalization | None
    groups: list[ChannelGroup] = field(default_factory=list)
    reports: list[ChannelGroupReport] = field(default_factory=list)

    READS_VALUES = True

    def decide(self, call: PruningCall) -> Decision:
        by_group = self._slices(call)
        parts = [part for of_group in by_group for part in of_group]
        sizes = channel_sizes(by_group)
        live = live_channels(parts, sizes, call.communicator)
        ranked = [[part for part in of_group if part.is_ranked] for of_group in by_group]
        rows = [
            partial(part.counted_rows, partial(call.score_or_value, part.position), part.shard.mask)
            for of_group in ranked
            for part in of_group
        ]
        norms = joint_norms(rows, self.n, channel_sizes(ranked), call.communicator)
        # From here to the masks every rank does the same with the same numbers.
        scores = norms.numpy()
        spans = [slice(g[0].first, g[0].first + g[0].num_channels) for g in by_group]
        for group, span in zip(self.groups, spans, strict=True):
            scores[span] = self._checked_scores(group.label, scores[span], live[span])
        chosen = lowest_channels(scores, live, self.amount)
        for group, span in zip(self.groups, spans, strict=True):
            num = span.stop - span.start
            self.reports.append(
                ChannelGroupReport(
                    group.label,
                    num,
                    num - int(live[span].sum()),
                    int(((chosen >= span.start) & (chosen < span.stop)).sum()),
                    int(sizes[span.start]) if num else 0,
                )
            )
        threshold = float(scores[chosen[-1]]) if chosen.size else None
        return Decision(
            prune_channels(call, parts, chosen),
            threshold=threshold,
            num_ties=int((scores[live] == threshold).sum()),
            num_ties_pruned=int((scores[chosen] == threshold).sum()),
        )

    def _slices(self, call: PruningCall) -> list[list[ChannelSlice]]:
        """By group, its parts in the parameters of the call; checked."""
        by_group: list[list[ChannelSlice]] = []
        positions, first = iter(range(len(call.shards))), 0
        for group in self.groups:
            parts = []
            for part in group.parts:
                position = next(positions)
                shard = call.shards[position]
                dim = range(len(shard.shape))[part.dim]
                parts.append(ChannelSlice(position, shard, dim, part.size, first, part.is_ranked))
                if shard.shape[dim] % part.size:
                    raise ValueError(
                        f"{shard.name} in group {group.label}: {shard.shape[dim]} indices along "
                        f"dim {part.dim}; expected a multiple of size={part.size}."
                    )
            if len({part.num_channels for part in parts}) > 1:
                each = ", ".join(f"{part.num_channels} of {part.shard.name}" for part in parts)
                raise ValueError(
                    f"the parts of group {group.label} have different numbers of channels: {each}; "
                    "expected the same. Check dim and size of each part."
                )
            ranked = [part.shard for part in parts if part.is_ranked]
            missing = [shard.name for shard in ranked if shard.scores is None]
            if 0 < len(missing) < len(ranked):
                raise ValueError(
                    f"importance_scores has scores of some parameters of group {group.label}, and "
                    f"none of {', '.join(missing)}; expected scores of all that are ranked, or of "
                    "none. is_ranked=False leaves a part out of the norm."
                )
            for shard in ranked:
                scores = shard.scores if isinstance(shard.scores, Tensor) else shard.values
                if not scores.is_floating_point():
                    raise NotImplementedError(
                        f"{shard.name}: scores of {scores.dtype}; expected floating point."
                    )
            by_group.append(parts)
            first += parts[0].num_channels
        return by_group

    def _checked_scores(self, label: str, norms: Floats, live: Flags) -> Floats:
        """The scores of one group: norms, normalised if asked for."""
        wrong, what = np.isnan(norms) & live, "contain NaN; expected numbers"
        if not wrong.any() and self.normalize is not None:
            wrong = np.isinf(norms) & live
            what = f"are infinite, which normalize={self.normalize!r} cannot divide"
        if wrong.any():
            channels = ", ".join(map(str, np.flatnonzero(wrong)[:5]))
            raise ValueError(f"the norms of {label}, channels {channels} {what}.")
        return norms if self.normalize is None else normalized(norms, live, self.normalize)
