"""``global_structured``: whole channels, ranked over many layers and all ranks.

Channels are numbered group by group, so that the order (score, group, index) is that of (score,
number). All ranks cut it alike, because all have the same numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from torch import nn
from torch.distributed import ProcessGroup

from distprune.api.chosen_masks import put_masks
from distprune.base.amount import Amount, validate_amount
from distprune.base.exact_sums import Normalization, check_normalization
from distprune.base.naming import checked_pair, label_of
from distprune.call.reading import check_mapping, check_order
from distprune.call.report import ChannelGroupReport, StructuredReport
from distprune.call.request import Decision, ParameterArguments, PruningCall
from distprune.methods import channels
from distprune.methods.base import describe_argument
from distprune.methods.channels import ChannelSlice, norm_order
from distprune.ranks.collectives import world
from distprune.shards.reader import Scores
from distprune.shards.shard import Shard


@dataclass(frozen=True)
class ChannelPart:
    """The part that one parameter has in the channels of a group.

    Channel c has the indices from ``c * size`` up to ``(c + 1) * size`` of ``dim``, with all
    elements there. The parts of neurons of a gated MLP, and of heads of an attention in which ``n``
    query heads share a key-value head, each of ``d`` features:

        [ChannelPart((mlp.gate_proj, "weight"), 0),
         ChannelPart((mlp.up_proj, "weight"), 0),
         ChannelPart((mlp.down_proj, "weight"), 1)]
        [ChannelPart((attention.q_proj, "weight"), 0, n * d),
         ChannelPart((attention.k_proj, "weight"), 0, d),
         ChannelPart((attention.v_proj, "weight"), 0, d),
         ChannelPart((attention.o_proj, "weight"), 1, n * d)]

    Args:
        parameter: a (module, name) pair, as ``select`` lists them.
        dim: the channels' dimension: 0 for the outputs of a linear layer, 1 for its inputs.
        size: indices per channel: 1 for neurons, the size of a head for heads.
        is_ranked: whether its elements count for the norm of a channel. Those of a part that does
            not count (a bias, say) are pruned together with the others.

    Raises:
        ValueError: a size below 1.
    """

    parameter: tuple[nn.Module, str]
    dim: int
    size: int = 1
    is_ranked: bool = True

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"size={self.size} of {self.label}; expected 1 or more.")

    @property
    def label(self) -> str:
        """The parameter's name, for messages."""
        return label_of(self.parameter)


def global_structured(
    groups: Mapping[str, Sequence[ChannelPart]],
    *,
    amount: Amount,
    n: float = 2,
    importance_scores: Scores | None = None,
    normalize: Normalization | None = None,
    group: ProcessGroup | None = None,
) -> StructuredReport:
    """Prune whole channels of many layers together: one ranking over all of them and all ranks.

    A channel is a slice of each parameter of a group: a neuron of an MLP with its rows and its
    column, a head with its rows of q, k and v and its columns of o. Its score is the L_n norm of
    all its elements in all those parameters. The channels of the lowest scores are pruned in all of
    them. They are masked, and nothing changes its shape: the report says what could be removed.

    The mask that each rank gets is, bit for bit, its slice of the mask that one process would
    compute: norms are exact sums, and channels are ordered by (score, position of the group, index
    of the channel). Shards may cut channels anywhere.

    Collective: every rank of ``group`` calls it with the same arguments, plain modules included:
    ranks with different parameters, such as pipeline stages, are refused.

    Args:
        groups: by a name for reports and messages, the parts whose channels go together: channel c
            is slice c of each. All parts of a group have the same number of channels, and at least
            one is ranked. A parameter is in one group at most.
            ``distprune.integrations.channels`` makes them for models of transformers.
        amount: a fraction of the channels of which something is left, in [0, 1], or a count.
        n: order of the norm: 1, 2 or inf. ``n=1`` adds up |scores|: a criterion, summed over the
            channel. Pruned elements count as 0.
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
        ValueError: a group without a part that is ranked; a parameter in two groups, or two parts;
            shapes that do not fit a group; scores of some parameters of a group; norms that are
            NaN, or infinite with ``normalize``; an amount out of range; ranks that differ in their
            arguments. Named, on every rank.
        IndexError: a ``dim`` that a parameter does not have.
        NotImplementedError: a layout or wrapper that is not supported; scores that are no
            floating-point numbers.

    On an error no module has changed, on any rank.

    Cost: two reads of the values (one for n = inf), and one write of the masks. 16 bytes
    per channel on the wire, 8 more if something was pruned before. Memory for the masks, a few
    megabytes, and, one parameter at a time, 4 bytes per local element of ``FactoredScores``, and
    about 40 bytes per local element of FSDP1's flat runs.

    Source: the coupled structures are those of LLM-Pruner, Ma et al., arXiv 2305.11627.
    """
    given: dict[str, Sequence[ChannelPart]] = {}
    reports: list[ChannelGroupReport] = []

    def read() -> ParameterArguments:
        if not isinstance(groups, Mapping):
            kind = type(groups).__name__
            raise TypeError(f"groups is a {kind}; expected a mapping from names to ChannelParts.")
        given.update({name: list(parts) for name, parts in groups.items()})
        for name, parts in given.items():
            if not any(part.is_ranked for part in parts):
                raise ValueError(f"group {name} has no part that is ranked; expected one.")
        validate_amount(amount)
        check_normalization(normalize)
        check_mapping(importance_scores)
        if n is None or norm_order(n) is None:
            raise ValueError(f"n={n!r}; expected the order of a norm: 1, 2 or inf.")
        check_order(importance_scores, True, "scores that are not signed")
        every = [part for parts in given.values() for part in parts]
        return ParameterArguments(
            parameters=[part.parameter for part in every],
            importance_scores=importance_scores,
            facts=[
                ("amount", describe_argument(amount)),
                ("n", describe_argument(n)),
                ("normalize", str(normalize)),
                *(("channel group", f"{name}: {len(parts)}") for name, parts in given.items()),
                *((p.label, f"dim {p.dim} size {p.size} ranked {p.is_ranked}") for p in every),
            ],
        )

    def decide(call: PruningCall) -> Decision:
        by_group = _slices(given, call.shards)
        slices = [part for parts in by_group for part in parts]
        sizes = channels.channel_sizes(by_group)
        live = channels.live_channels(slices, sizes, call.communicator)
        rows = [
            partial(part.counted_rows, partial(call.score_or_value, i), part.shard.mask)
            for i, part in enumerate(slices)
            if part.is_ranked
        ]
        ranked = [[part for part in parts if part.is_ranked] for parts in by_group]
        num_ranked = channels.channel_sizes(ranked)
        scores = channels.joint_norms(rows, n, num_ranked, call.communicator).numpy()
        # From here to the masks every rank does the same with the same numbers.
        for name, (first, *_) in zip(given, by_group, strict=True):
            values, is_live = scores[first.span], live[first.span]
            is_wrong = np.isnan(values) if normalize is None else ~np.isfinite(values)
            wrong = np.flatnonzero(is_wrong & is_live)
            if wrong.size:
                raise ValueError(
                    f"the norms of {name}, channels {', '.join(map(str, wrong[:5]))} are "
                    f"{values[wrong[0]]}; expected numbers, finite ones with normalize."
                )
            if normalize is not None:
                values[:] = channels.normalized(values, is_live, normalize)
        decision, pruned = channels.prune_lowest(call, slices, scores, live, amount)
        for name, (first, *_) in zip(given, by_group, strict=True):
            span, num = first.span, first.num_channels
            num_live, num_pruned = int(live[span].sum()), int(pruned[span].sum())
            size = int(sizes[span].sum()) // max(num, 1)
            reports.append(ChannelGroupReport(name, num, num - num_live, num_pruned, size))
        return decision

    report = put_masks("global_structured", read, decide, world(group), reads_values=True)
    return StructuredReport(**{**vars(report), "amount": amount}, groups=tuple(reports))


def _slices(
    groups: Mapping[str, Sequence[ChannelPart]], shards: Sequence[Shard]
) -> list[list[ChannelSlice]]:
    """By group, its parts; checked. The parameters of the call have the order of the parts."""
    by_group: list[list[ChannelSlice]] = []
    shard_of = {(id(module), name): s for s in shards for module, name in s.places}
    group_of: dict[int, str] = {}  # by id of a shard
    first = 0
    for group, parts in groups.items():
        slices, without_scores = [], []
        for part in parts:
            module, name = checked_pair(part.parameter, "a parameter")
            shard = shard_of[id(module), name]
            if id(shard) in group_of:
                raise ValueError(
                    f"{part.label} is in the groups {group_of[id(shard)]} and {group}; "
                    "expected each parameter, under all its names, in one part of one group."
                )
            group_of[id(shard)] = group
            dim = range(len(shard.shape))[part.dim]
            if shard.shape[dim] % part.size:
                raise ValueError(
                    f"{shard.name} in group {group}: {shard.shape[dim]} indices along "
                    f"dim {part.dim}; expected a multiple of size={part.size}."
                )
            slices.append(ChannelSlice(shard, dim, part.size, first, part.is_ranked))
            if part.is_ranked and shard.scores is None:
                without_scores.append(shard.name)
        if len({each.num_channels for each in slices}) > 1:
            counts = ", ".join(f"{each.num_channels} of {each.shard.name}" for each in slices)
            raise ValueError(
                f"the parts of group {group} have different numbers of channels: {counts}; "
                "expected the same. Check dim and size of each part."
            )
        if 0 < len(without_scores) < sum(part.is_ranked for part in parts):
            raise ValueError(
                f"importance_scores has scores of some parameters of group {group}, and "
                f"none of {', '.join(without_scores)}; expected scores of all that are ranked."
            )
        by_group.append(slices)
        first += slices[0].num_channels
    return by_group
