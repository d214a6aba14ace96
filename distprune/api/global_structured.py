"""Whole channels, ranked over many layers and all ranks; and taken out of a plain model.

Channels are numbered group by group, so that the order (score, group, index) is that of (score,
number). All ranks cut it alike, because all have the same numbers.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from distprune.api.chosen_masks import put_masks
from distprune.api.local import remove
from distprune.base.amount import Amount, validate_amount
from distprune.base.exact_sums import Normalization, check_normalization
from distprune.base.naming import checked_pair, label_of, unwrap
from distprune.base.pruned_form import MASK, ORIG
from distprune.call.reading import check_mapping, check_order
from distprune.call.report import ChannelGroupReport, StructuredReport
from distprune.call.request import Decision, ParameterArguments, PruningCall
from distprune.masks.hook import check_removable, hooks_on
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
    them. They are masked, and nothing changes its shape: the report says what could be removed, and
    :func:`shrink_channels` removes it from a plain model.

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


# By the class of a layer, what it calls the sizes of the dimensions that can be cut.
_SIZES: dict[type[nn.Module], tuple[str, ...]] = {
    nn.Linear: ("out_features", "in_features"),
    nn.modules.conv._ConvNd: ("out_channels", "in_channels"),
    nn.modules.batchnorm._NormBase: ("num_features",),
}
# By layer and dimension: the indices that stay.
_Cuts = dict[nn.Module, dict[int, Tensor]]


def shrink_channels(
    groups: Mapping[str, Sequence[ChannelPart]], forward: Callable[[], Tensor]
) -> dict[str, list[int]]:
    """Take the channels that ``global_structured`` has masked out of a plain model. Local.

    prune.global_structured(groups, amount=0.3)
    model.eval()
    prune.shrink_channels(groups, lambda: model(example))

    A channel goes if all of its parts are masked. With it goes what a layer has for it besides: the
    bias of an output, the running statistics of a norm. The layers stay the same objects, with
    smaller parameters and sizes (``out_features``, ...), and have no masks any more: other elements
    that were pruned are zero. Their parameters are new ones: make optimizers, and wrappers such as
    DDP, afterwards.

    Args:
        groups: as for ``global_structured``. Here a parameter may be in two groups: the weight of a
            layer between two others has the outputs of one, and the inputs of the other.
        forward: runs the model on an example, in evaluation mode. Without the channels of a group
            its result has to be the same, to rounding.

    Returns:
        By group, the numbers of the channels that went.

    Raises:
        NotImplementedError: a layer other than nn.Linear, convolutions without groups, batch and
            instance norms; a parameter that is not masked, is sharded or tied; a group whose
            channels are connected to more than its parts, as by a residual connection or a layer
            norm, so that without them ``forward`` fails, or gives something else.
        ValueError: parts of a group that do not fit each other, or of which nothing would be left.

    On an error nothing has changed.

    Cost: a run of ``forward`` for each group, and two more; a copy of the layers.
    """
    cuts, removed = _Cuts(), dict[str, list[int]]()
    with torch.no_grad():
        wanted = forward()
        for name, parts in groups.items():
            found = [_live_channels(part) for part in parts]
            lives = [live for *_, live in found]
            if len({*map(len, lives)}) != 1 or not bool(torch.stack(lives).any()):
                raise ValueError(
                    f"group {name} has parts of {[*map(len, lives)]} channels; expected as many in "
                    "each, of which some are not masked."
                )
            live, own = torch.stack(lives).any(0), _Cuts()
            for part, (module, dim, _) in zip(parts, found, strict=True):
                kept = live.repeat_interleave(part.size).nonzero().view(-1)
                own.setdefault(module, {})[dim] = kept
                cuts.setdefault(module, {})[dim] = kept
            _check_result(name, own, forward, wanted)
            removed[name] = (~live).nonzero().view(-1).tolist()
        _check_result(", ".join(groups), cuts, forward, wanted)
        for module, of_module in cuts.items():
            for hook in hooks_on(module):
                remove(module, hook._tensor_name)
            vars(module).update(vars(_smaller(module, of_module)))
    return removed


def _live_channels(part: ChannelPart) -> tuple[nn.Module, int, Tensor]:
    """The layer and the dimension of a part, and bool [channels]: what is not masked there."""
    module, (_, name) = unwrap(part.parameter[0]), part.parameter
    mask, num_dims = module._buffers.get(name + MASK), len(_sizes_of(module))
    is_plain = name + ORIG in module._parameters and not check_removable(module, name)
    dim = 0 if mask is None else range(mask.ndim)[part.dim]
    if mask is None or not is_plain or dim >= num_dims or mask.shape[dim] % part.size:
        raise NotImplementedError(
            f"{part.label} (dim {part.dim} of a {type(module).__name__}) is not masked, is sharded "
            f"or tied, or cannot be cut by {part.size}; expected outputs or inputs of linear "
            "layers and convolutions without groups, or batch or instance norms, of a plain model."
        )
    rows = mask.movedim(dim, 0).reshape(mask.shape[dim] // part.size, -1)
    return module, dim, rows.any(1).cpu()


def _sizes_of(module: nn.Module) -> tuple[str, ...]:
    """What a layer calls the sizes of its dimensions; () if it cannot be cut."""
    has_groups = getattr(module, "groups", 1) > 1 or getattr(module, "transposed", False)
    known = (sizes for kind, sizes in _SIZES.items() if isinstance(module, kind))
    return () if has_groups or "forward" in vars(module) else next(known, ())


def _check_result(name: str, cuts: _Cuts, forward: Callable[[], Tensor], wanted: Tensor) -> None:
    """Raise NotImplementedError if the model gives something else without channels of a group."""
    error = None
    found = torch.full_like(wanted, torch.nan)
    with contextlib.ExitStack() as changes:
        for module, of_module in cuts.items():
            vars(module)["forward"] = _smaller(module, of_module).forward
            changes.callback(vars(module).pop, "forward")
        try:
            found = forward()
        except Exception as raised:
            error = raised
    allowed = torch.finfo(wanted.dtype).eps ** 0.5 * wanted.abs().max()
    if found.shape != wanted.shape or not bool(((found - wanted).abs() <= allowed).all()):
        raise NotImplementedError(
            f"group {name}: without its masked channels the model gives another result, or none "
            f"({error}); expected a model in evaluation mode, and parts of all layers that these "
            "channels are connected to. Channels of residual connections and layer norms stay."
        ) from error


def _smaller(module: nn.Module, cuts: Mapping[int, Tensor]) -> nn.Module:
    """A copy of a layer without masks, with the indices that stay."""

    def cut(tensor: Tensor) -> Tensor:
        for dim, kept in cuts.items():
            if dim < tensor.ndim:
                tensor = tensor.index_select(dim, kept.to(tensor.device))
        return tensor

    small, pruned = copy.copy(module), [hook._tensor_name for hook in hooks_on(module)]
    parameters, buffers = dict(module._parameters), dict(module._buffers)
    for name in pruned:
        del parameters[name + ORIG], buffers[name + MASK]
        parameters[name] = vars(small).pop(name)
    for name, parameter in parameters.items():
        if parameter is not None:
            parameters[name] = nn.Parameter(cut(parameter), parameter.requires_grad)
    buffers = {name: each if each is None else cut(each) for name, each in buffers.items()}
    sizes = {_sizes_of(module)[dim]: len(kept) for dim, kept in cuts.items()}
    vars(small).update(sizes, _parameters=parameters, _buffers=buffers)
    return small
